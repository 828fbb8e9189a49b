// From shards to full tensors.
#pragma once

#include <functional>

#include "parameter.h"

namespace zero3 {

// The full tensors of `parameters`, one collective for each (process group, compute dtype) among
// them, in order of appearance: each fresh, [rows, ...] in the parameter's
// compute dtype and strides, sharing memory with no shard. The cast happens before the wire.
std::vector<at::Tensor> gather(const std::vector<ParameterPtr>& parameters);

// Called by refresh(), to make `Parameter::shard` what the model registers now.
void set_refresh(std::function<void(const std::string& fqn)> function);
void refresh(const Parameter& parameter);

}  // namespace zero3
