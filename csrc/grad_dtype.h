// The leaf's gradient dtype, declared where autograd keeps it: on a gradient edge.
#pragma once

#include <ATen/ATen.h>

#include <optional>

namespace zero3 {

// Makes the engine cast gradients that reach `tensor` to `dtype` (nullopt: leave them as they are)
// before it sums them, as it does for a leaf with that `Tensor.grad_dtype`. Also for non-leaves.
void declare_grad_dtype(const at::Tensor& tensor, std::optional<at::ScalarType> dtype);

}  // namespace zero3
