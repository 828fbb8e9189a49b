// Presences that ranks sharing memory tell each other when a backward begins.
#pragma once

#include <memory>
#include <vector>

#include "reduce/presence.h"
#include "transport/shared_memory.h"

namespace zero3 {

class SharedPresences : public PresenceGather {
 public:
  SharedPresences(const std::vector<ParameterPtr>& parameters, uint64_t backward,
                  const Presences& mine, Occasion occasion);
  ~SharedPresences() override;

  std::vector<Presences> finish() override {
    hear();
    return all_;
  }

 private:
  // Waits for the other ranks, so that this rank may begin another call.
  void hear();
  void check_topic_of(int64_t rank) const;
  void forget();
  Progress* progress(size_t i) const;

  const std::vector<ParameterPtr> parameters_;
  const std::shared_ptr<OneHost> one_host_;
  const uint64_t topic_;
  uint64_t call_ = 0;
  std::vector<Presences> all_;
};

}  // namespace zero3
