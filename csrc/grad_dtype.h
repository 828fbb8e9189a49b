// The leaf's gradient dtype, declared where autograd keeps it: on a gradient edge.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>

namespace zero3 {

// A leaf's contract as graphs spell it: a dtype, "bfloat16", or "any" for one that keeps whatever
// arrives (nullopt).
std::string contract_name(std::optional<at::ScalarType> grad_dtype);
std::optional<at::ScalarType> contract_dtype(const std::string& name);

// Whether gradients can be kept and sent in it.
bool is_gradient_dtype(at::ScalarType dtype);

// Makes the engine cast gradients that reach `tensor` to `dtype` (nullopt: leave them as they are)
// before it sums them, as it does for a leaf with that `Tensor.grad_dtype`. Also for non-leaves.
void declare_grad_dtype(const at::Tensor& tensor, std::optional<at::ScalarType> dtype);

}  // namespace zero3
