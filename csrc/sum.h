// The arithmetic of a reduction.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zero3 {

// out = (addends[0] + addends[1] + ...) / divisor, in that order, in fp32 or, where one of the
// dtypes is double, in that. The sum is rounded once, to the wire's dtype, as a collective of that
// dtype gives it, and the result to that of `out`. In fp16 it is not: a sum of what fits may not.
// The addends are of one dtype, which the wire's holds exactly. All are contiguous and of one size;
// `out` may be one of the addends.
void sum_and_divide(const at::Tensor& out, const std::vector<at::Tensor>& addends,
                    at::ScalarType wire_dtype, double divisor);

}  // namespace zero3
