// The leaf's gradient dtype, and its name in graphs.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace zero3 {

// Name of a leaf's contract in graphs: a dtype ("bfloat16"), or "any" (nullopt) if the leaf keeps
// gradients as they arrive.
std::string contract_name(std::optional<at::ScalarType> grad_dtype);
std::optional<at::ScalarType> contract_dtype(const std::string& name);

// Whether gradients can be kept and sent in `dtype`.
bool is_gradient_dtype(at::ScalarType dtype);

}  // namespace zero3
