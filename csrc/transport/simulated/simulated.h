// Simulates ranks: allocates the buffers that a c10d backend needs, on the meta device.
#pragma once

#include <string>

#include "transport/channel.h"

namespace zero3 {

class SimulatedChannel : public Channel {
 public:
  // `backend` is the name in c10d: "gloo", "nccl".
  SimulatedChannel(const std::string& name, int64_t rank, int64_t world_size,
                   const std::string& backend);
  std::unique_ptr<Exchange> exchange() const override;
};

}  // namespace zero3
