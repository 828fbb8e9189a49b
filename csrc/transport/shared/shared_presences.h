// Presences of ranks that share memory.
#pragma once

#include <memory>
#include <vector>

#include "transport/presences.h"
#include "transport/shared/shared_memory.h"

namespace zero3 {

class SharedPresences : public PresenceGather {
 public:
  SharedPresences(const std::vector<ParameterPtr>& parameters, uint64_t backward,
                  const Presences& mine, Occasion occasion);
  ~SharedPresences() override;

  std::vector<Presences> finish() override {
    read();
    return all_;
  }

 private:
  // Waits for the other ranks' announcements and reads them, so that this rank may begin another
  // round.
  void read();
  void check_topic_of(int64_t rank) const;
  void acknowledge();
  Progress* progress(size_t i) const;

  const std::vector<ParameterPtr> parameters_;
  const std::shared_ptr<OneHost> one_host_;
  const uint64_t topic_;
  uint64_t round_ = 0;
  std::vector<Presences> all_;
};

}  // namespace zero3
