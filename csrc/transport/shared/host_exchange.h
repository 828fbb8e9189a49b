// Rounds in which the ranks of one host tell each other a number and a line of text, and wait for
// all: an all-gather of a few bytes, without messages.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "transport/shared/rank_waiter.h"
#include "transport/shared/words.h"

namespace zero3 {

constexpr size_t kLineBytes = 1000;

// What one rank tells, in shared memory. A rank that begins round n + 2 has all ranks' words that
// they began round n + 1, and so have read round n: two places are enough.
struct alignas(kCacheLine) Told {
  struct Said {
    uint64_t number;
    uint64_t length;
    std::array<char, kLineBytes> line;
  };
  std::atomic<uint64_t> round;  // latest round in which this rank has told
  std::array<Said, 2> said;     // by the round's lowest bit
};

class HostExchange {
 public:
  // `names` has one for each rank. `memory` is zeroed shared memory of nbytes(), the same on the
  // ranks of a group. `rule` is that of RankWaiter.
  HostExchange(const std::string& group_name, int64_t rank, RankNames names,
               const std::vector<int64_t>& pids, at::Tensor memory, const std::string& rule);

  static int64_t nbytes(int64_t world_size);

  // Returns what all ranks tell, by rank. `where` is where this rank is, for the message. Throws as
  // RankWaiter::wait() does. The first kLineBytes of a line arrive.
  std::vector<std::pair<uint64_t, std::string>> exchange(uint64_t number, const std::string& line,
                                                         const std::string& where);

 private:
  const at::Tensor memory_;
  Told* told_;
  RankWaiter waiter_;
  uint64_t round_ = 0;
};

}  // namespace zero3
