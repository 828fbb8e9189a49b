// Reductions of ranks that share memory. Each rank leaves its gradients in its mailbox, and sums
// its rows of the gradients in all mailboxes.
#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "parameter/parameter.h"
#include "transport/shared/rank_waiter.h"
#include "transport/shared/reduce_words.h"
#include "transport/shared/ring.h"

namespace zero3 {

// A sum that this rank computes: of its rows of one block, over the mailboxes of all ranks.
struct PendingSum {
  ParameterPtr parameter;
  size_t block;
  uint64_t epoch;
  at::ScalarType wire_dtype;
  double divisor;
  at::Tensor sum;  // output
  bool is_summed = false;

  const Block& rows() const;
  ReduceWords& words() const;
};
using PendingSumPtr = std::shared_ptr<PendingSum>;

// The mailboxes of all ranks, and the contents of this rank's own.
class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  // `memory` is [world, capacity] bytes, shared.
  static std::shared_ptr<Mailbox> make(std::shared_ptr<RankWaiter> waiter, at::Tensor memory);

  ~Mailbox();

  int64_t capacity() const { return capacity_; }

  // Allocates memory in this rank's mailbox. If it is full, waits until other ranks have read
  // gradients in it. Raises if waiting cannot help.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const std::string& fqn);
  bool holds(const at::Tensor& tensor) const;

  // Posts `grad`, the rows of a block, contiguous and in this mailbox. An undefined `grad` counts
  // as zero. Returns null if this rank sums no rows of the block. Otherwise the sum will be in
  // `shard`, which has all rows that this rank owns.
  PendingSumPtr post(const ParameterPtr& parameter, size_t block, const at::Tensor& grad,
                     uint64_t backward, at::ScalarType wire_dtype, double divisor,
                     const at::Tensor& shard);

  // Computes pending sums in order until one is incomplete, or `all` that are complete. Also
  // forgets the gradients that all their readers have read.
  void poll(bool all = false);
  // Calls poll(/*all=*/true) on every mailbox of this process: a rank that waits in the mailbox of
  // one group may be waited for in that of another.
  void poll_everywhere();
  void finish(const PendingSumPtr& pending);  // waits until this rank has summed it
  void drop(const PendingSumPtr& pending);    // this rank will never sum it

 private:
  Mailbox(std::shared_ptr<RankWaiter> waiter, at::Tensor memory);

  // A gradient posted by this rank. Holds no parameter: the latest entries stay for long.
  struct Unread {
    at::Tensor grad;
    uint64_t epoch;
    ReduceWords words;
    at::Tensor progress;  // the memory behind `words`
    std::string fqn;
  };

  // Raises if a rank will never send its part.
  void check_complete(const PendingSum& pending) const;
  void sum(PendingSum& pending) const;
  // The rows of the sum in the mailbox of `rank`; nullopt if they are zero.
  std::optional<at::Tensor> rows_of(int64_t rank, const PendingSum& pending) const;
  void give_back(uint64_t offset);
  static RankWaiter::Missing who_keeps(const ReduceWords& words, uint64_t epoch,
                                       const std::string& fqn);
  // The ranks that keep this rank's mailbox full; nullopt if there are none.
  std::optional<RankWaiter::Missing> who_keeps_memory();

  std::shared_ptr<RankWaiter> waiter_;
  at::Tensor memory_;
  uint8_t* mine_;
  int64_t capacity_;

  std::mutex mutex_;
  Arena arena_;
  std::list<PendingSumPtr> unsummed_;  // by this rank
  std::list<Unread> unread_;           // by some rank
};

}  // namespace zero3
