#include "parameter/gathered.h"

#include "support/apart.h"
#include "support/memory.h"

namespace zero3 {

void Gathered::hold(const at::Tensor& full, bool read_only) {
  state_ = State::kUnsharded;
  full_ = full;
  version_ = full.is_inference() ? 0 : full._version();
  is_read_only_ = read_only;
}

void Gathered::keep(const at::Tensor& full, bool read_only, uint64_t shard_version) {
  hold(full, read_only);
  state_ = State::kKept;
  shard_version_ = shard_version;
}

void Gathered::reshard() {
  state_ = State::kResharded;
  full_.reset();
}

void Gathered::reshard_kept() {
  if (state_ == State::kKept) reshard();
}

bool Gathered::was_written() const {
  return is_held() && !full_.is_inference() && full_._version() != version_;
}

void Gathered::make_writable() {
  if (!is_held() || !is_read_only_) return;
  Apart apart;
  full_ = pooled_copy(full_);
  version_ = full_.is_inference() ? 0 : full_._version();
  is_read_only_ = false;
}

bool Gathered::is_stale(uint64_t shard_version) const {
  return state_ == State::kKept && shard_version_ != shard_version;
}

}  // namespace zero3
