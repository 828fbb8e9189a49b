// Reductions of ranks that share memory, through mailboxes.

#include "kernels/copy.h"
#include "support/memory.h"
#include "support/profiler_range.h"
#include "support/tensor_ops.h"
#include "transport/c10d/process_group.h"
#include "transport/reduce_bucket.h"
#include "transport/shared/shared_memory.h"
#include "transport/shared/shared_presences.h"

namespace zero3 {
namespace {

// A gradient lies in the mailbox in the wire dtype, or in its own dtype if that is narrower. It is
// written and summed block by block.
class SharedReduce : public ReduceBucket {
 public:
  SharedReduce(const Parameter& like, const BucketKey& key, uint64_t backward)
      : ReduceBucket(like, key),
        mailbox_(SharedMemory::of(like).one_host()->mailbox),
        backward_(backward) {}

  ~SharedReduce() override {
    for (auto& pending : pending_sums_) mailbox_->drop(pending);
  }

  std::vector<at::Tensor> finish() override {
    for (auto& pending : pending_sums_) mailbox_->finish(pending);
    return shards_;
  }

 private:
  void send(const ParameterPtr& parameter, const at::Tensor& grad, at::ScalarType through,
            at::ScalarType shard_dtype, bool owned) override {
    const bool as_it_is = pre_divide_factor_ == 1.0 && is_exact(through, wire_dtype());
    const auto dtype = as_it_is ? through : wire_dtype();
    const bool is_there = owned && mailbox_->holds(grad) && grad.scalar_type() == dtype &&
                          grad.is_contiguous() && pre_divide_factor_ == 1.0 &&
                          is_exact(dtype, through);
    post(parameter, shard_dtype, [&](const Block& block) {
      const auto rows = grad.narrow(0, block.begin, block.rows);
      if (is_there) return rows;
      auto posted = mailbox_->empty(rows.sizes(), dtype, parameter->fqn());
      copy_all({{posted, rows}}, through, pre_divide_factor_);
      return posted;
    });
  }

  void send_product(const ParameterPtr& parameter, const at::Tensor& left, const at::Tensor& right,
                    at::ScalarType shard_dtype) override {
    if (pre_divide_factor_ != 1.0) {
      ReduceBucket::send_product(parameter, left, right, shard_dtype);
      return;
    }
    post(parameter, shard_dtype, [&](const Block& block) {
      auto posted = mailbox_->empty({block.rows, right.size(1)}, wire_dtype(), parameter->fqn());
      tensor_ops::mm_out(posted, left.narrow(0, block.begin, block.rows), right);
      return posted;
    });
  }

  // Takes no mailbox memory: ranks that wait for each other's memory would never go on.
  void send_zero(const ParameterPtr& parameter, at::ScalarType shard_dtype) override {
    post(parameter, shard_dtype, [](const Block&) { return at::Tensor(); });
  }

  // `write` returns the rows of a block, in the mailbox; undefined for zeros.
  template <typename Write>
  void post(const ParameterPtr& parameter, at::ScalarType shard_dtype, Write write) {
    const ProfilerRange range([&] { return scope_name(collective_of({parameter}), "send"); });
    shards_.push_back(
        pooled_empty(parameter->source->sizes_with_rows(parameter->source->shard_rows()),
                     options().dtype(shard_dtype)));
    const auto& blocks = SharedMemory::of(*parameter).blocks;
    for (size_t i = 0; i < blocks.size(); ++i) {
      auto pending = mailbox_->post(parameter, i, write(blocks[i]), backward_, wire_dtype(),
                                    divisor_now(), shards_.back());
      if (pending) pending_sums_.push_back(std::move(pending));
      mailbox_->poll();
    }
  }

  const std::shared_ptr<Mailbox> mailbox_;
  const uint64_t backward_;
  std::vector<at::Tensor> shards_;
  std::vector<PendingSumPtr> pending_sums_;
};

class SharedBackward : public Backward {
 public:
  explicit SharedBackward(std::shared_ptr<OneHost> one_host)
      : one_host_(std::move(one_host)), number_(one_host_->backwards.begin()) {
    one_host_->waiter->begin_anew();
  }
  ~SharedBackward() override {
    one_host_->backwards.end(number_);
    one_host_->waiter->notify();
  }

  std::unique_ptr<ReduceBucket> reduce_bucket(const Parameter& like, const BucketKey& key,
                                              bool) override {
    return std::make_unique<SharedReduce>(like, key, number_);
  }

  std::unique_ptr<PresenceGather> gather_presences(const std::vector<ParameterPtr>& parameters,
                                                   const Presences& mine,
                                                   Occasion occasion) override {
    return std::make_unique<SharedPresences>(parameters, number_, mine, occasion);
  }

 private:
  const std::shared_ptr<OneHost> one_host_;
  const uint64_t number_;
};

}  // namespace

std::unique_ptr<Backward> SharedMemory::begin_backward() {
  check_exists(one_host_->group_name);  // an exchange of messages checks this itself
  return std::make_unique<SharedBackward>(one_host_);
}

}  // namespace zero3
