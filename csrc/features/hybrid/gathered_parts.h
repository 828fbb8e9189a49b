// Shards that replicas have in parts, gathered from these once for each change.
//
//   an optimizer steps the parts  ->  the next forward gathers the shards over the replicas
//                                 ->  it and all forwards and backwards until the next step gather
//                                     the full tensors over the ranks with other shards
#pragma once

#include <memory>
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
  uint64_t version_of_shard() const override;
  void gradient_arrives() override;
  void encode(const Codec* codec) override;
  const Codec* codec() const override { return codec_; }
  at::Tensor shard() override;

 private:
  friend class GatheredShards;
  friend class PartsOfModel;

  // Whether the shard is made of the parts as they are now, for all that versions tell.
  bool is_fresh() const { return !is_outdated_ && made_of_ == version(); }
  // Returns what is gathered: the parts, or their bytes.
  SourcePtr source_now();
  // Takes what was gathered; undefined after an error.
  void take(at::Tensor gathered);
  // Whether the part has other values than the shard was made of.
  bool differs() const;

  const SourcePtr as_source_;  // whose rows are the parts
  Substitutes substitutes_;
  const Codec* codec_ = nullptr;
  at::Tensor shard_;                           // undefined before the first gather
  uint64_t made_of_ = 0;                       // version of the part that the shard is made of
  bool is_outdated_ = true;                    // whatever the versions are
  std::shared_ptr<GatheredShards> gathering_;  // until it has ended
  std::weak_ptr<PartsOfModel> model_;
};

// The parameters of a model that have parts. Their shards are gathered together, in buckets.
class PartsOfModel : public std::enable_shared_from_this<PartsOfModel> {
 public:
  // Adds a parameter, whose parts are GatheredParts.
  void add(const ParameterPtr& parameter);

  // An outermost forward begins. Replicas tell each other which parts have changed, so that all
  // gather the same ones. A write through .data counts in no version: parts without a change are
  // compared with what was gathered of them. Nothing is told in a forward without gradient sync,
  // but for the first one after a step's gradients were delivered.
  void begin_forward();

  // Starts to gather all shards that are not fresh.
  void start();
  void gradient_arrives() { has_agreed_ = false; }

 private:
  struct Member {
    ParameterPtr parameter;
    GatheredParts* parts;
  };
  std::vector<Member> alive() const;
  // Exchanges which of `members` have changed on some replica.
  static void agree(const Channel& channel, const std::vector<Member>& members);

  std::vector<std::weak_ptr<Parameter>> parameters_;
  bool has_agreed_ = false;  // since gradients were delivered
};

}  // namespace zero3
