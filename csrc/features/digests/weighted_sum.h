// The sum over a matrix of words with a key for each row and each column, for digests of tensors.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero3 {

// Returns row_keys @ words @ column_keys modulo 2**64, on a CPU, in one read of `words`.
//
// `words` [rows, columns] are int8, int16 or int32, contiguous within a row. The keys are int64 and
// contiguous, [rows] and [columns].
int64_t weighted_sum(const at::Tensor& words, const at::Tensor& row_keys,
                     const at::Tensor& column_keys);

}  // namespace zero3
