// Copies of many tensors, with a cast and a division in the same pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zero3 {

struct Copy {
  at::Tensor to;
  at::Tensor from;  // same sizes as `to`; undefined: zeros
};

// Sets to = from.to(through) / divisor, in the dtype of `to`, for each copy. The quotient may first
// be rounded to `through`. All tensors are on one device. On a GPU, one kernel takes many
// contiguous copies of one pair of dtypes.
void copy_all(const std::vector<Copy>& copies, at::ScalarType through, double divisor = 1);

// copy_all() on a GPU. Only defined with ZERO3_WITH_CUDA.
void copy_all_on_cuda(const std::vector<Copy>& copies, at::ScalarType through, double divisor);

// Rounds `numel` up to a multiple of 16 bytes, so that data behind it can be read and written 16
// bytes at once.
int64_t aligned(int64_t numel, at::ScalarType dtype);

// Whether a cast from `from` to `to` is lossless.
bool is_exact(at::ScalarType from, at::ScalarType to);

// Whether casting from `from` to `through` and then to `to` equals casting to `to` directly.
bool is_one_cast(at::ScalarType from, at::ScalarType through, at::ScalarType to);

// Multiplying by the reciprocal of a power of two equals dividing by it, and is faster.
bool is_power_of_two(double value);

}  // namespace zero3
