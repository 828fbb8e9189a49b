// The leaf's gradient dtype, and how graphs spell it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace zero3 {

// A leaf's contract as graphs spell it: a dtype, "bfloat16", or "any" for one that keeps whatever
// arrives (nullopt).
std::string contract_name(std::optional<at::ScalarType> grad_dtype);
std::optional<at::ScalarType> contract_dtype(const std::string& name);

// Whether gradients can be kept and sent in it.
bool is_gradient_dtype(at::ScalarType dtype);

}  // namespace zero3
