// Shards that replicas have in parts, gathered from these once for each change.
//
//   an optimizer steps the parts  ->  the next forward gathers the shards over the replicas
//                                 ->  it and all forwards and backwards until the next step gather
//                                     the full tensors over the ranks with other shards
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gather/gather.h"
#include "parameter/parameter.h"

namespace zero3 {

class GatheredShards;
class PartsOfModel;

// The parts of one shard. To the gather over the replicas, the shard is the full tensor.
class GatheredParts : public Parts {
 public:
  // Of the shard of `source`, over the ranks of `replicas`.
  GatheredParts(const Source& source, const std::shared_ptr<Channel>& replicas);

  void set_fqn(const std::string& fqn) override { as_source_->fqn = fqn; }
  void follow(const at::Tensor& dtensor, at::Tensor part) override;
  uint64_t version() const override { return as_source_->version(); }
  void encode(const Codec* codec) override;
  at::Tensor shard() override;

 private:
  friend class GatheredShards;
  friend class PartsOfModel;

  // Whether the shard is made of the parts as they are now, for all that versions tell.
  bool is_fresh() const { return version_ == version(); }
  // Returns what is gathered: the parts, or their bytes.
  SourcePtr source_now();
  // Takes what was gathered; undefined after an error.
  void take(at::Tensor gathered);
  // Whether the part has other values than the shard was made of.
  bool differs() const;

  const SourcePtr as_source_;  // whose rows are the parts
  Substitutes substitutes_;
  const Codec* codec_ = nullptr;
  at::Tensor shard_;                 // undefined before the first gather
  std::optional<uint64_t> version_;  // of the part that the shard was made of; nullopt: gather it
  std::shared_ptr<GatheredShards> gathering_;  // until it has ended
  std::weak_ptr<PartsOfModel> model_;
};

// The parameters of a model that have parts. Their shards are gathered together, in buckets.
class PartsOfModel : public std::enable_shared_from_this<PartsOfModel> {
 public:
  // Adds a parameter, whose parts are GatheredParts.
  void add(const ParameterPtr& parameter);

  // An outermost forward begins. Compares parts that have not changed, for all that versions tell,
  // with what was gathered of them: a write through .data counts nowhere. Replicas tell each other
  // what differs. While gradients are not synchronized, nothing is compared.
  void begin_forward();

  // Starts to gather all shards that are not fresh.
  void start();

 private:
  struct Member {
    ParameterPtr parameter;
    GatheredParts* parts;
  };
  std::vector<Member> alive() const;
  // Finds out which of `members`, which are fresh, have changed on some replica.
  static void compare(const Channel& channel, const std::vector<Member>& members);

  std::vector<std::weak_ptr<Parameter>> parameters_;
};

}  // namespace zero3
