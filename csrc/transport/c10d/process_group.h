// Exchanges over a c10d process group.
//
// On gloo between CPUs, gathers and reductions are sends and receives in place: its all-gather
// copies twice, and its reduce-scatter is an all-reduce. Other backends use their own collectives.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "transport/channel.h"

namespace zero3 {

// An exchange that is dropped before wait(), by an exception for example, goes on by itself. The
// next exchange of its group waits for it: either all ranks have dropped it, or a rank is gone. If
// its group is destroyed, the next exchange of any group frees its tensors.
class ProcessGroupChannel : public Channel {
 public:
  // `rank_names` are for messages, by rank. With `sends_to_itself`, a rank that is alone calls the
  // backend's collectives as others do.
  ProcessGroupChannel(const std::string& group_name, int64_t rank,
                      std::vector<std::string> rank_names, int64_t world_size, at::Device device,
                      bool sends_to_itself);
  std::unique_ptr<Exchange> exchange() const override;

 private:
  const bool moves_nothing_;
};

// c10d's name of the backend for a device: "gloo", "nccl".
std::string backend_name(const std::string& group_name, at::Device device);

// Seconds that threads of this process have waited for exchanges. Where a device waits, and not the
// host, these are next to nothing.
double seconds_waited();

// Frees the tensors of dropped exchanges whose groups were destroyed. Call without the GIL, which
// threads of a group take when they end.
void drop_exchanges_of_destroyed_groups();

// Raises if the group was destroyed.
void check_exists(const std::string& group_name);

// Returns the time after which ranks of this group give up waiting for each other.
std::chrono::milliseconds timeout_of(const std::string& group_name);

}  // namespace zero3
