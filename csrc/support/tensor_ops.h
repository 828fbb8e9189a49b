// torch's functions on tensors that the runtime calls, compiled once. Each header of ATen/ops reads
// all of ATen's context, two seconds for every source that includes one. Sources that read it
// anyway, for autograd or c10d, call torch's own functions.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero3::tensor_ops {

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options);
at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         const at::TensorOptions& options);
at::Tensor empty_like(const at::Tensor& like, const at::TensorOptions& options);
at::Tensor zeros(at::IntArrayRef sizes, const at::TensorOptions& options);

void div_out(const at::Tensor& out, const at::Tensor& dividend, double divisor);
void mm_out(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right);

}  // namespace zero3::tensor_ops
