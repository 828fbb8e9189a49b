// Between whom exchanges go.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace zero3 {

// The ranks of a process group, of which each has a part on a device.
struct Channel {
  std::string group_name;
  at::Device device = at::kCPU;
  // On the meta device nothing is sent: the backend whose buffers are taken.
  std::string simulated_backend = {};
};

}  // namespace zero3
