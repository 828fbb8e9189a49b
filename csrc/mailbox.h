// Reductions of ranks that share memory: each rank leaves its gradients in its mailbox, and sums
// its rows of all ranks' there.
#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "one_host.h"
#include "parameter.h"

namespace zero3 {

// A block of a gradient on its way, which this rank is to sum.
struct Letter {
  ParameterPtr parameter;
  size_t block;
  uint64_t epoch;
  at::ScalarType wire_dtype;
  double divisor;
  at::Tensor sum;  // to be written
  bool is_summed = false;

  const Block& rows() const;
  Deposit& deposit() const;
};
using LetterPtr = std::shared_ptr<Letter>;

// The mailboxes of all ranks, and what this one has in its own.
class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  // `memory` is [world, capacity] bytes, shared.
  static std::shared_ptr<Mailbox> make(std::shared_ptr<Host> host, at::Tensor memory);

  ~Mailbox();

  int64_t capacity() const { return capacity_; }

  // Memory in this rank's mailbox. Waits until others have read what fills it; raises if that would
  // be in vain.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, const std::string& fqn);
  bool holds(const at::Tensor& tensor) const;

  // Leaves `grad`, the rows of a block, contiguous and in this mailbox, to be read; undefined, it
  // counts as zero. Gives nothing if this rank has no part in their sum; else that will be in
  // `shard`, of all rows that this rank has.
  LetterPtr post(const ParameterPtr& parameter, size_t block, const at::Tensor& grad,
                 uint64_t backward, at::ScalarType wire_dtype, double divisor,
                 const at::Tensor& shard);

  // Sums letters in their order until one is not there, or all that are there, and forgets what all
  // have read.
  void poll(bool all = false);
  // All, in this one and every other mailbox of this process: ranks that wait in that of one group
  // may be waited for in that of another.
  void poll_everywhere();
  void finish(const LetterPtr& letter);  // waits until this rank has summed it
  void drop(const LetterPtr& letter);    // this rank never will

 private:
  Mailbox(std::shared_ptr<Host> host, at::Tensor memory);

  // One that this rank has left. It holds no parameter: the latest ones stay for long.
  struct Unread {
    at::Tensor grad;
    uint64_t epoch;
    Deposit deposit;
    at::Tensor progress;  // the memory behind `deposit`
    std::string fqn;
  };

  // Raises if a rank will never send its part.
  void check_complete(const Letter& letter) const;
  void sum(Letter& letter) const;
  // Nothing where they are zero.
  std::optional<at::Tensor> rows_of(int64_t rank, const Letter& letter) const;
  void give_back(uint64_t offset);
  static Host::Missing who_keeps(const Deposit& deposit, uint64_t epoch, const std::string& fqn);
  // Who keeps this rank's memory from being free; nothing: nobody.
  std::optional<Host::Missing> who_keeps_memory();

  std::shared_ptr<Host> host_;
  at::Tensor memory_;
  uint8_t* mine_;
  int64_t capacity_;

  std::mutex mutex_;
  Arena arena_;
  std::list<LetterPtr> unsummed_;  // by this rank
  std::list<Unread> unread_;       // by some rank
};

}  // namespace zero3
