// Gradients of a parameter that are not reduced yet.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <mutex>
#include <optional>

#include "parameter/codec.h"

namespace zero3 {

// The dtypes of a gradient at each stage.
struct GradientDtypes {
  std::optional<at::ScalarType> leaf;   // the leaf's contract; nullopt: as it arrives
  std::optional<at::ScalarType> wire;   // nullopt: the normalized dtype
  std::optional<at::ScalarType> shard;  // the optimizer's; nullopt: the normalized dtype
  const Codec* codec = nullptr;         // on the wire, in place of a cast to `wire`; null: none
  bool feeds_error_back = false;        // adds the encoding error of a gradient to the next one

  // Dtype to which a raw gradient is cast first.
  at::ScalarType normalized(at::ScalarType raw) const { return leaf.value_or(raw); }
};

// A gradient [shard_rows, ...], reduced over the ranks of the shards but not yet over the replicas.
struct PartialGradient {
  at::Tensor shard;  // not divided; its dtype holds fp32, `wire_dtype` and `shard_dtype`
  at::ScalarType wire_dtype;
  at::ScalarType shard_dtype;  // dtype of the delivered gradient
  double divisor;              // to be applied to the sum over replicas
  double divisor_over_shards;  // part of it: makes `shard` the mean over the ranks of the shards
};

// Nonfinite elements of gradients that arrived.
struct Nonfinite {
  int64_t nans = 0;
  int64_t infinities = 0;
  int64_t numel = 0;    // all elements of the gradients that have nonfinite ones
  int64_t arrival = 0;  // of the first of them, among those of the process
};

// Thread-safe. No thread waits for the GIL while it holds `mutex_`.
class GradientAccumulator {
 public:
  // Adds a raw full gradient, cast to the leaf's dtype. The sum's dtype holds all of `dtypes`, so
  // that it is never narrower than a gradient or the result. The sum may take the memory of an
  // `owned` gradient.
  void add(const at::Tensor& raw, const GradientDtypes& dtypes, bool owned);

  struct Sum {
    at::Tensor grad;               // full shape
    at::ScalarType arrived_dtype;  // holds all gradients as normalized
  };
  std::optional<Sum> take_sum();
  bool has_sum() const;
  std::optional<at::ScalarType> arrived_dtype() const;
  // Widens the sum's `arrived_dtype` as if a gradient of `dtype` had arrived on this rank.
  void widen(at::ScalarType dtype);

  // The encoding error of the latest gradient, full shape, in fp32; undefined before the first.
  at::Tensor take_error();
  void keep_error(at::Tensor error);

  void add_partial(PartialGradient partial);
  std::optional<PartialGradient> take_partial();
  bool is_empty() const;  // neither a sum nor a partial

  // Counts the nonfinite elements of a gradient that has arrived.
  void detect_nonfinite(const at::Tensor& raw);
  std::optional<Nonfinite> take_nonfinite();

  // Whether a backward that has not ended has delivered the gradient early.
  std::atomic<bool> is_delivered_early = false;

  // Drops everything, after a backward that raised.
  void drop();
  // Whether drop() was called since the last take_dropped().
  bool take_dropped();

 private:
  mutable std::mutex mutex_;
  std::optional<Sum> sum_;
  std::optional<PartialGradient> partial_;
  std::optional<Nonfinite> nonfinite_;
  at::Tensor error_;
  bool dropped_ = false;
};

}  // namespace zero3
