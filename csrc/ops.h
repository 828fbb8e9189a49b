// Functions of the operators that the bindings use.
#pragma once

#include <functional>
#include <vector>

#include "parameter/parameter.h"

namespace zero3 {

// Returns the gathered full tensor, differentiable like the result of zero3::unshard. For eager
// code, which is trusted not to write to the tensor; a write is detected when the tensor is freed.
at::Tensor read_gathered(const ParameterPtr& parameter);

// Likewise, but returns `full`, made of the sources that are gathered in the parameter's place.
at::Tensor read_as(const ParameterPtr& parameter, const at::Tensor& full);

// Like read_gathered(), for a parameter that is not gathered: gathers it now.
at::Tensor gather_and_read(const ParameterPtr& parameter);

// Sets the function that zero3::unshard calls before it gathers. The function sets
// `Parameter::shard` to the model's present shard and, in a forward, fixes the settings.
void set_prepare_unshard(std::function<void(const at::Tensor& placeholder)> function);

}  // namespace zero3
