#include "parameter/gathered.h"

#include "support/memory.h"
#include "support/user_state.h"

namespace zero3 {

void Gathered::hold(const at::Tensor& full, bool read_only) {
  state_ = State::kHeld;
  full_ = full;
  version_ = full.is_inference() ? 0 : full._version();
  is_read_only_ = read_only;
}

void Gathered::retain(const at::Tensor& full, bool read_only, uint64_t shard_version) {
  hold(full, read_only);
  state_ = State::kRetained;
  shard_version_ = shard_version;
}

void Gathered::reshard() {
  state_ = State::kResharded;
  full_.reset();
}

void Gathered::reshard_retained() {
  if (state_ == State::kRetained) reshard();
}

bool Gathered::was_written() const {
  return is_unsharded() && !full_.is_inference() && full_._version() != version_;
}

void Gathered::make_writable() {
  if (!is_unsharded() || !is_read_only_) return;
  WithoutUserModes guard;
  full_ = pooled_copy(full_);
  version_ = full_.is_inference() ? 0 : full_._version();
  is_read_only_ = false;
}

bool Gathered::is_stale(uint64_t shard_version) const {
  return state_ == State::kRetained && shard_version_ != shard_version;
}

}  // namespace zero3
