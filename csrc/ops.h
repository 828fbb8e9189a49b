// What the bindings need of the operators.
#pragma once

#include "parameter.h"

namespace zero3 {

// The gathered tensor itself, differentiable as what zero3::unshard returns: for eager code, which
// is trusted not to write to it (that is found out when it is freed).
at::Tensor read_gathered(const ParameterPtr& parameter);

// The same of one that nobody holds: gathered now.
at::Tensor gather_and_read(const ParameterPtr& parameter);

}  // namespace zero3
