// The words in which the ranks of one host tell each other who may write when. docs/one_host.md has
// the protocol and why it is safe. This file and the protocol's classes use no tensors.
//
// All memory starts as zeros. Each epoch is written by one rank and only grows, so that a rank that
// dies anywhere leaves nothing locked.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace zero3 {

constexpr size_t kCacheLine = 64;

// Rounds up to whole cache lines, at least one.
inline uint64_t in_cache_lines(uint64_t nbytes) {
  return (std::max<uint64_t>(nbytes, 1) + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// Epochs of reductions and rounds of announcements, from their highest bits to their lowest:
//
//   gathers of forwards | backwards since | gradients of a parameter, or rounds, in the backward
//
// Epochs that start again at zero would free memory that others still read. Ranks therefore raise
// once half of all epochs are used up, which takes 280 years at a thousand gathers a second. A
// count that outgrows its part goes on in the next higher one: memory stays safe, since a rank that
// has left a later backward has left the earlier one too, but ranks notice later that one has
// raised.
constexpr int kBackwardBits = 10;
constexpr int kGradientBits = 10;
constexpr int kRoundBits = 8;
constexpr uint64_t kMostGathers = uint64_t{1} << (63 - kBackwardBits - kGradientBits);
static_assert(kRoundBits <= kGradientBits);

// Progress of one rank with one block of a parameter's gradient. The first block's progress also
// has the words of gathers and presences.
struct alignas(kCacheLine) Progress {
  // A gather's epochs count the publications of the parameter.
  std::atomic<uint64_t> arrived;    // this rank will read no copy of an epoch before this one
  std::atomic<uint64_t> published;  // this rank has written its rows of this epoch
  std::atomic<uint64_t> history;    // digest of a Ring's turns, up to that of `arrived`

  // A reduction's epochs count backwards, and the parameter's gradients within a backward.
  std::atomic<uint64_t> posted;  // this rank's gradient of this epoch is in its mailbox:
  uint64_t offset;               // at this place, in bytes
  int8_t dtype;
  int8_t wire_dtype;
  std::atomic<uint32_t> presence;  // announced in this rank's latest round of Announcements
  std::atomic<uint64_t> consumed;  // this rank will read no gradient up to this epoch
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(Progress) == kCacheLine);

// Text of what a rank waits for, in words that others may read while the rank writes.
using Text = std::array<std::atomic<uint64_t>, 32>;

constexpr int64_t kNobody = -1;

// The state of one rank.
struct alignas(kCacheLine) RankState {
  std::atomic<uint64_t> oldest_backward;  // this rank will read no gradient of an earlier backward
  std::atomic<uint64_t> announced;        // latest round in which this rank has announced presences
  std::atomic<uint64_t> topic;            // topic of that announcement
  std::atomic<uint64_t> acknowledged;     // latest round whose announcements this rank has read

  // The rank's latest long wait.
  std::atomic<uint64_t> waits;    // counts begins and ends of long waits: odd while the rank waits
  std::atomic<uint64_t> looks;    // number of looks in vain, in all waits
  std::atomic<int64_t> for_rank;  // rank that this one cannot go on without; or kNobody
  std::atomic<uint64_t> gave_up;  // `waits` when this rank found that nobody can go on; else 0
  Text what;                      // what the other rank has not done

  bool has_left(uint64_t backward) const {
    return oldest_backward.load(std::memory_order_acquire) > backward;
  }
};

// The ranks for which `predicate` holds.
template <typename Predicate>
std::vector<int64_t> ranks_where(int64_t world_size, Predicate predicate) {
  std::vector<int64_t> result;
  for (int64_t r = 0; r < world_size; ++r)
    if (predicate(r)) result.push_back(r);
  return result;
}

// The word on which ranks sleep.
struct alignas(kCacheLine) WakeWord {
  std::atomic<uint32_t> notified;  // number of calls of RankWaiter::notify()
  std::atomic<uint32_t> sleepers;
};

}  // namespace zero3
