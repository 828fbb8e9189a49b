// Reads of shards, for a feature that keeps shards where reading them has to end.
#pragma once

#include <ATen/core/Tensor.h>

namespace zero3 {

// Call when a shard was read and may be out of use for a while.
void finish_reading(const at::Tensor& shard);

// Sets what finish_reading() does; nothing until then.
void set_finish_reading(void (*finish)(const at::Tensor& shard));

}  // namespace zero3
