// The transport of ranks that share memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "transport/shared/gather_words.h"
#include "transport/shared/one_host.h"
#include "transport/shared/reduce_words.h"
#include "transport/transport.h"

namespace zero3 {

// Gathers into one copy of the source: each rank writes its rows, and all ranks read the copy.
// Reduces through mailboxes.
class SharedMemory : public Transport {
 public:
  // `progress` is zeroed shared memory: for each block of the gradient, a Progress for each rank.
  // The source either has its own `copy_memory`, or takes turns in it with others of the group.
  SharedMemory(std::shared_ptr<OneHost> one_host, const Source& source, at::Tensor progress,
               std::shared_ptr<CopyMemory> copy_memory, bool takes_turns);

  // The transport of a source, or of a parameter, that has this one.
  static SharedMemory& of(const Source& source) {
    return static_cast<SharedMemory&>(*source.transport);
  }
  static SharedMemory& of(const Parameter& parameter) { return of(*parameter.source); }

  std::string name() const override { return "shared_memory"; }
  RankNames rank_names() const override { return one_host_->waiter->names(); }
  bool joins(const Transport& other) const override;
  // In shared_gather.cpp and shared_reduce.cpp.
  std::unique_ptr<GatherBucket> gather_bucket(std::vector<SourcePtr> sources) override;
  std::unique_ptr<Backward> begin_backward() override;
  at::Tensor empty(const Parameter& parameter, at::IntArrayRef sizes,
                   const at::TensorOptions& options) override;
  // Index among the parameters of the OneHost.
  uint64_t parameter_index() const override { return parameter_index_; }

  void count_unpublished_forward() override;
  uint64_t epoch() const override { return gather_words.epoch(); }
  bool expect_epoch(const Source& source, uint64_t epoch) override;
  void invalidate() override { is_invalid_ = true; }

  const std::shared_ptr<OneHost>& one_host() const { return one_host_; }
  const at::Tensor& progress() const { return progress_; }

  // Whether a backward cannot read the copy: it was never published, an optimizer has stepped,
  // another copy has its place, or another forward has published it. For another forward,
  // parameters may have been changed through `.data`, which `_version` does not count.
  bool is_stale(const Source& source) const;
  // Whether the copy is stale only because this rank has changed its shard since.
  bool has_changed(const Source& source) const;
  bool is_gone() const { return turn_->is_over; }

  // Begins the next publication, of the shard at `version`. Views of copies in its place get their
  // own memory. Does nothing and returns false if a pinned copy is there.
  bool arrive(const Source& source, uint64_t version, bool even_if_pinned);
  // Writes `shard` to this rank's rows, with the cast in the same pass.
  void publish(const Source& source, const at::Tensor& shard);

  Ring::Pin pin() const { return Ring::Pin(turn_); }
  // Returns the full tensor, read-only, in the source's sizes and strides.
  at::Tensor view(const Source& source);

  GatherWords gather_words;
  const std::vector<Block> blocks;
  std::vector<ReduceWords> reduce_words;  // one for each block

 private:
  using Views = std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>;

  const std::shared_ptr<OneHost> one_host_;
  const uint64_t parameter_index_;
  const at::Tensor progress_;
  const std::shared_ptr<CopyMemory> copy_memory_;
  std::shared_ptr<Ring::Turn> turn_;  // turn of the latest publication
  std::shared_ptr<Views> views_;      // views of that publication
  uint64_t published_version_ = 0;
  bool is_invalid_ = false;
};

}  // namespace zero3
