// The full tensor of a parameter, while there is one.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero3 {

// Not thread-safe. Only the running forward or backward of the model uses it, with or without the
// GIL.
class Gathered {
 public:
  enum class State {
    kResharded,  // there is no full tensor: initially, and after reshard()
    kHeld,       // for reads of eager code: after hold(), until the forward ends
    kRetained,   // for later forwards and backwards, which gather nothing: after retain()
  };

  State state() const { return state_; }
  bool is_unsharded() const { return state_ != State::kResharded; }
  const at::Tensor& full() const { return full_; }  // undefined unless is_unsharded()

  // Holds the full tensor for reads. Its memory may be read-only.
  void hold(const at::Tensor& full, bool read_only = false);
  // Retains it for later forwards and backwards, as reshard_after_backward=False asks.
  // `shard_version` is its shard's version.
  void retain(const at::Tensor& full, bool read_only, uint64_t shard_version);
  void reshard();
  void reshard_retained();  // only in state kRetained

  bool was_written() const;
  void make_writable();
  // Whether the retained tensor was gathered from another version of the shard.
  bool is_stale(uint64_t shard_version) const;

 private:
  State state_ = State::kResharded;
  at::Tensor full_;
  int64_t version_ = 0;  // version of `full_` when it was held
  bool is_read_only_ = false;
  uint64_t shard_version_ = 0;  // shard version of the retained tensor
};

}  // namespace zero3
