#include "transport/shared/shared_memory.h"

#include <ATen/ops/from_blob.h>

#include <cstring>

#include "kernels/nontemporal_copy.h"
#include "kernels/sum.h"
#include "support/grad_dtype.h"
#include "support/memory.h"
#include "support/shard_reads.h"

namespace zero3 {
SharedMemory::SharedMemory(std::shared_ptr<OneHost> one_host, const Source& source,
                           at::Tensor progress, std::shared_ptr<CopyMemory> copy_memory,
                           bool takes_turns)
    : Transport({.gathers_views = true,
                 .publishes = true,
                 .ranks_meet_in_backward = takes_turns,
                 .sends_any_dtype = true,
                 .sums_in_fp32 = true,
                 .bounds_buckets = false,  // mailboxes have their own bound
                 .sends_messages = false,
                 .empty_waits = true}),
      gather_words(reinterpret_cast<Progress*>(data_of(progress)), source.rank,
                   source.layout.world_size()),
      blocks(blocks_of(source.layout, source.nbytes() / source.rows())),
      one_host_(std::move(one_host)),
      parameter_index_(one_host_->parameters++),
      progress_(std::move(progress)),
      copy_memory_(std::move(copy_memory)) {
  copy_memory_->ring.admit(source.nbytes());
  auto* ranks = reinterpret_cast<Progress*>(data_of(progress_));
  for (auto& block : blocks) {
    reduce_words.emplace_back(ranks, one_host_->rank_states, source.rank,
                              source.layout.world_size(), block.reader);
    ranks += source.layout.world_size();
  }
}

bool SharedMemory::joins(const Transport& other) const {
  const auto* shared = dynamic_cast<const SharedMemory*>(&other);
  return shared && shared->one_host_ == one_host_;
}

at::Tensor SharedMemory::empty(const Parameter& parameter, at::IntArrayRef sizes,
                               const at::TensorOptions& options) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  return one_host_->mailbox->empty(sizes, dtype, parameter.fqn());
}

// Counts as a gather, since gathers number the backwards.
void SharedMemory::count_unpublished_forward() {
  one_host_->waiter->begin_anew();
  one_host_->backwards.count_gather();
}

bool SharedMemory::expect_epoch(const Source& source, uint64_t epoch) {
  is_invalid_ = gather_words.epoch() != epoch;
  return is_stale(source);
}

bool SharedMemory::is_stale(const Source& source) const {
  return !turn_ || turn_->is_over || is_invalid_ || has_changed(source);
}

bool SharedMemory::has_changed(const Source& source) const {
  return turn_ && !turn_->is_over && !is_invalid_ &&
         source.version_to_gather() != published_version_;
}

bool SharedMemory::arrive(const Source& source, uint64_t version, bool even_if_pinned) {
  auto turn = copy_memory_->ring.next(source.nbytes(), even_if_pinned);
  if (!turn) return false;
  turn_ = std::move(turn);
  is_invalid_ = false;
  views_ = std::make_shared<Views>();
  turn_->leave = [views = views_] {
    for (auto& weak : *views) {
      auto storage = weak.lock();
      if (!storage) continue;
      const auto nbytes = static_cast<int64_t>(storage->nbytes());
      auto own = pooled_empty({nbytes}, at::TensorOptions(at::kByte));
      std::memcpy(own.mutable_data_ptr(), storage->data(), nbytes);
      storage->set_data_ptr(own.storage().set_data_ptr({}));
    }
  };
  published_version_ = version;
  gather_words.arrive(turn_->history);
  return true;
}

void SharedMemory::publish(const Source& source, const at::Tensor& shard) {
  if (const int64_t rows = source.shard_rows(); rows > 0) {
    auto mine = at::from_blob(data_of(copy_memory_->writable) + turn_->begin, source.sizes,
                              source.strides, at::TensorOptions(source.dtype))
                    .narrow(0, source.layout.first_row_of(source.rank), rows);
    const auto nbytes = static_cast<int64_t>(mine.nbytes());
    const bool past_caches =
        nbytes >= kWorthNontemporal && mine.is_contiguous() && shard.is_contiguous();
    if (past_caches && mine.dtype() == shard.dtype()) {
      nontemporal_copy(mine.mutable_data_ptr(), shard.const_data_ptr(), nbytes);
      nontemporal_fence();
    } else if (past_caches && mine.scalar_type() == at::kBFloat16 &&
               is_gradient_dtype(shard.scalar_type())) {
      sum_and_divide(mine, {shard}, shard.scalar_type(), 1);  // faster than torch's cast
    } else {
      copy_into(mine, shard);
    }
    finish_reading(shard);
  }
  gather_words.publish();
}

at::Tensor SharedMemory::view(const Source& source) {
  auto view = at::for_blob(data_of(copy_memory_->readable) + turn_->begin, source.sizes)
                  .strides(source.strides)
                  .deleter([mapped = copy_memory_->readable](void*) {})
                  .options(at::TensorOptions(source.dtype))
                  .make_tensor();
  std::erase_if(*views_, [](auto& weak) { return weak.expired(); });
  views_->emplace_back(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(view.storage().unsafeGetStorageImpl()));
  return view;
}

}  // namespace zero3
