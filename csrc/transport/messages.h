// Ranks that exchange messages: gathers, reductions and presences over the channels of a group.
#pragma once

#include <memory>
#include <string>

#include "transport/channel.h"
#include "transport/transport.h"

namespace zero3 {

class Messages : public Transport {
 public:
  // Channels of two process groups, so that no gather waits for a reduction, or one channel twice
  // for what is only gathered. Both have the same ranks, except in Substitutes::after_forward.
  Messages(std::shared_ptr<Channel> gathers, std::shared_ptr<Channel> reductions)
      : Transport({.sums_in_fp32 = reductions->traits.is_point_to_point,
                   .reduces_in_any_order = reductions->traits.is_point_to_point,
                   .tells_presence = reductions->traits.carries_data}),
        gathers(std::move(gathers)),
        reductions(std::move(reductions)) {}

  std::string name() const override { return "c10d"; }
  RankNames rank_names() const override { return gathers->rank_names; }
  bool joins(const Transport& other) const override {
    const auto* messages = dynamic_cast<const Messages*>(&other);
    return messages && is_same(gathers.get(), messages->gathers.get()) &&
           is_same(reductions.get(), messages->reductions.get());
  }
  // In message_gather.cpp and message_reduce.cpp.
  std::unique_ptr<GatherBucket> gather_bucket(std::vector<SourcePtr> sources) override;
  std::unique_ptr<Backward> begin_backward() override;

  const std::shared_ptr<Channel> gathers;
  const std::shared_ptr<Channel> reductions;
};

}  // namespace zero3
