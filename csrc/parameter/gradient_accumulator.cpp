#include "parameter/gradient_accumulator.h"

#include <utility>

#include "support/memory.h"
#include "support/user_state.h"

namespace zero3 {

void GradientAccumulator::add(const at::Tensor& raw, const GradientDtypes& dtypes, bool owned) {
  WithoutUserModes guard;
  const auto dtype = dtypes.normalized(raw.scalar_type());
  const auto grad = raw.to(dtype);
  auto wider = c10::promoteTypes(dtypes.wire.value_or(dtype), dtypes.shard.value_or(dtype));
  wider = c10::promoteTypes(wider, dtype);
  // Any dtype may arrive, and more than once: low-precision gradients must not round each other.
  if (!dtypes.leaf) wider = c10::promoteTypes(wider, at::kFloat);
  std::lock_guard lock(mutex_);
  if (sum_) {
    sum_->arrived_dtype = c10::promoteTypes(sum_->arrived_dtype, dtype);
    auto& sum = sum_->grad;
    sum = sum.to(c10::promoteTypes(wider, sum.scalar_type())).add_(grad);
  } else {
    const bool copy = grad.is_same(raw) && !owned;
    sum_ = {raw.is_meta() ? pooled_empty(raw.sizes(), raw.options().dtype(wider))  // counted
                          : grad.to(wider, /*non_blocking=*/false, copy),
            dtype};
  }
}

std::optional<GradientAccumulator::Sum> GradientAccumulator::take_sum() {
  std::lock_guard lock(mutex_);
  return std::exchange(sum_, std::nullopt);
}

bool GradientAccumulator::has_sum() const {
  std::lock_guard lock(mutex_);
  return sum_.has_value();
}

std::optional<at::ScalarType> GradientAccumulator::arrived_dtype() const {
  std::lock_guard lock(mutex_);
  return sum_ ? std::optional(sum_->arrived_dtype) : std::nullopt;
}

void GradientAccumulator::widen(at::ScalarType dtype) {
  std::lock_guard lock(mutex_);
  if (sum_) sum_->arrived_dtype = c10::promoteTypes(sum_->arrived_dtype, dtype);
}

at::Tensor GradientAccumulator::take_error() {
  std::lock_guard lock(mutex_);
  return std::exchange(error_, {});
}

void GradientAccumulator::keep_error(at::Tensor error) {
  std::lock_guard lock(mutex_);
  error_ = std::move(error);
}

void GradientAccumulator::add_partial(PartialGradient added) {
  std::lock_guard lock(mutex_);
  if (partial_) {
    const auto wider = c10::promoteTypes(partial_->shard.scalar_type(), added.shard.scalar_type());
    auto sum = partial_->shard.to(wider);
    if (partial_->divisor != added.divisor) sum = sum.mul(added.divisor / partial_->divisor);
    added.shard = sum.add_(added.shard);
    added.wire_dtype = c10::promoteTypes(partial_->wire_dtype, added.wire_dtype);
    added.shard_dtype = c10::promoteTypes(partial_->shard_dtype, added.shard_dtype);
  }
  partial_ = std::move(added);
}

std::optional<PartialGradient> GradientAccumulator::take_partial() {
  std::lock_guard lock(mutex_);
  return std::exchange(partial_, std::nullopt);
}

bool GradientAccumulator::is_empty() const {
  std::lock_guard lock(mutex_);
  return !sum_ && !partial_;
}

void GradientAccumulator::detect_nonfinite(const at::Tensor& raw) {
  if (raw.isfinite().all().item<bool>()) return;
  const auto nans = raw.isnan().sum().item<int64_t>();
  const auto infinities = raw.isinf().sum().item<int64_t>();
  static std::atomic<int64_t> arrivals = 0;
  std::lock_guard lock(mutex_);
  if (!nonfinite_) nonfinite_ = Nonfinite{.arrival = arrivals.fetch_add(1)};
  nonfinite_->nans += nans;
  nonfinite_->infinities += infinities;
  nonfinite_->numel += raw.numel();
}

std::optional<Nonfinite> GradientAccumulator::take_nonfinite() {
  std::lock_guard lock(mutex_);
  return std::exchange(nonfinite_, std::nullopt);
}

void GradientAccumulator::drop() {
  std::lock_guard lock(mutex_);
  sum_.reset();
  partial_.reset();
  nonfinite_.reset();
  dropped_ = true;
  error_.reset();
}

bool GradientAccumulator::take_dropped() {
  std::lock_guard lock(mutex_);
  return std::exchange(dropped_, false);
}

}  // namespace zero3
