// The arithmetic of a reduction.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zero3 {

// Sets out = (addends[0] + addends[1] + ...) / divisor. Sums in that order, in fp32, or in double
// if one of the dtypes is double. Rounds the sum once to `wire_dtype`, as a collective of that
// dtype does, and the quotient to the dtype of `out`. Does not round the sum to fp16, in which it
// may overflow. The addends have one dtype, which `wire_dtype` holds exactly. All tensors are
// contiguous and of one size. `out` may be one of the addends.
void sum_and_divide(const at::Tensor& out, const std::vector<at::Tensor>& addends,
                    at::ScalarType wire_dtype, double divisor);

// Returns the part of `divisor` that addends are divided by ahead of a sum in fp16, a power of two.
// Half the scaling comes before such a sum and half after, so that the sum neither overflows nor
// underflows.
double divisor_before_fp16_sum(double divisor);

}  // namespace zero3
