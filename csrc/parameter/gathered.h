// The full tensor of a parameter while it is held.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero3 {

// Used only by the thread with the GIL, and by the backward that runs meanwhile.
class Gathered {
 public:
  enum class State {
    kResharded,  // not held: initially, and after reshard()
    kUnsharded,  // read by eager code: after hold(), until the forward ends
    kKept,       // kept while reshard_after_backward is False: after keep()
  };

  State state() const { return state_; }
  bool is_held() const { return state_ != State::kResharded; }
  const at::Tensor& full() const { return full_; }  // undefined if not held

  // Holds the full tensor for reads. Its memory may be read-only.
  void hold(const at::Tensor& full, bool read_only = false);
  // Holds the full tensor for later forwards and backwards. `shard_version` is its shard's version.
  void keep(const at::Tensor& full, bool read_only, uint64_t shard_version);
  void reshard();
  void reshard_kept();  // only in state kKept

  bool was_written() const;
  void make_writable();
  // Whether the kept tensor was gathered from another version of the shard.
  bool is_stale(uint64_t shard_version) const;

 private:
  State state_ = State::kResharded;
  at::Tensor full_;
  int64_t version_ = 0;  // version of `full_` when it was held
  bool is_read_only_ = false;
  uint64_t shard_version_ = 0;  // shard version of the kept tensor
};

}  // namespace zero3
