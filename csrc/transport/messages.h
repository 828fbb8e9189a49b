// Ranks that exchange messages: gathers, reductions and presences over the channels of a group.
#pragma once

#include <memory>
#include <string>

#include "transport/channel.h"
#include "transport/transport.h"

namespace zero3 {

class Messages : public Transport {
 public:
  // The two channels have the same ranks, so that no gather waits for a reduction.
  Messages(std::shared_ptr<Channel> gathers, std::shared_ptr<Channel> reductions);

  std::string name() const override { return "c10d"; }
  bool joins(const Transport& other) const override;
  std::unique_ptr<GatherBucket> gather(std::vector<ParameterPtr> parameters) override;
  std::unique_ptr<Backward> begin_backward() override;

  const std::shared_ptr<Channel> gathers;
  const std::shared_ptr<Channel> reductions;
};

// Gathers presences between the ranks of `channel`, over tensors on `device`. `key` is the same on
// Gathers presences over one channel.
std::unique_ptr<PresenceGather> gather_presences(const Channel& channel,
                                                 const std::vector<ParameterPtr>& parameters,
                                                 const Presences& mine, Occasion occasion);

}  // namespace zero3
