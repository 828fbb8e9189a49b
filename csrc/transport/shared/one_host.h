// The state that ranks of one host share besides parameters, and the memory for gathered copies.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "transport/shared/backwards.h"
#include "transport/shared/mailbox.h"
#include "transport/shared/rank_waiter.h"
#include "transport/shared/ring.h"

namespace zero3 {

class SharedPresences;

// The ranks of a process group that live on one host.
struct OneHost {
  // `rank_names` are for messages, by rank. `control` is zeroed shared memory: a WakeWord, and a
  // RankState for each rank.
  OneHost(const std::string& group_name, int64_t rank, std::vector<std::string> rank_names,
          const std::vector<int64_t>& pids, at::Tensor control);

  const std::string group_name;

  static int64_t control_bytes(int64_t world_size);

  at::Tensor control;
  RankState* rank_states;
  std::shared_ptr<RankWaiter> waiter;
  Backwards backwards;
  Announcements announcements;
  SharedPresences* latest_presences = nullptr;  // the latest, while it lives
  std::atomic<int> waiting_for_room = 0;        // gathers that wait for room; later ones wait too
  uint64_t parameters = 0;                      // number of parameters so far
  std::shared_ptr<Mailbox> mailbox;
};

// Memory for the gathered copies of one parameter, or of several that take turns in it.
struct CopyMemory {
  // Both tensors are one range of shared bytes, mapped twice. Nobody writes to `readable`.
  CopyMemory(at::Tensor writable, at::Tensor readable);

  // Moves the turns to other memory, from the next gather on.
  void grow(at::Tensor writable, at::Tensor readable);

  Ring ring;
  at::Tensor writable;
  at::Tensor readable;
};

inline char* data_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

// Returns the descriptor of a new anonymous file of zeros, closed on exec.
int new_shared_file(int64_t nbytes);

// Makes the memory of `mapped`, which is whole pages, read-only.
void make_read_only(const at::Tensor& mapped);

}  // namespace zero3
