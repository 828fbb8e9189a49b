// Copies of many tensors that are cast and divided on their way.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zero3 {

struct Copy {
  at::Tensor to;
  at::Tensor from;  // of the same sizes; undefined: zeros
};

// to = from.to(through) / divisor for each, in the dtype of `to`; a quotient may be rounded to
// `through` before. All are on one device. On a GPU those that are contiguous are one kernel for
// each pair of dtypes.
void copy_all(const std::vector<Copy>& copies, at::ScalarType through, double divisor = 1);

// The same on a GPU; there if ZERO3_WITH_CUDA is defined.
void copy_all_on_cuda(const std::vector<Copy>& copies, at::ScalarType through, double divisor);

// The first number of elements, from `numel` on, that takes a multiple of 16 bytes: what begins
// there is read and written 16 bytes at once.
int64_t aligned(int64_t numel, at::ScalarType dtype);

// Whether a cast loses nothing.
bool is_exact(at::ScalarType from, at::ScalarType to);

// Multiplying by the reciprocal of one gives what dividing does, sooner.
bool is_power_of_two(double value);

}  // namespace zero3
