// Functions of the operators that the bindings use.
#pragma once

#include "parameter/parameter.h"

namespace zero3 {

// Returns the held full tensor, differentiable like the result of zero3::unshard. For eager code,
// which is trusted not to write to the tensor; a write is detected when the tensor is freed.
at::Tensor read_gathered(const ParameterPtr& parameter);

// Like read_gathered(), for a parameter that is not held: gathers it now.
at::Tensor gather_and_read(const ParameterPtr& parameter);

}  // namespace zero3
