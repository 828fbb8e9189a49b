// What the ranks of the random program have in common: its constants, and their memory.
#pragma once

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "transport/shared/rank_waiter.h"
#include "transport/shared/words.h"

// Makes ranks write without waiting for readers: 1 to copies, 2 to mailboxes, 3 to places of copies
// whose gathers they have started themselves, 4 to presences.
#ifndef MISTAKE
#define MISTAKE 0
#endif

namespace zero3 {

using Element = uint64_t;
using Random = std::mt19937_64;

constexpr int kParameters = 8;
constexpr int kInTurns = 6;  // share a ring; each other parameter has its own place
constexpr int64_t kMaxElements = 300;
constexpr int64_t kMailbox = 12 << 10;  // bytes: five of the largest gradients
constexpr int kOperations = 3400;       // gathers and reductions of each world
constexpr std::chrono::seconds kTimeout{20};

inline int64_t below(Random& random, int64_t bound) {
  return static_cast<int64_t>(random() % bound);
}

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::_Exit(1);
}

// An element of the part of a parameter that `rank` has at a given time.
inline Element value_of(int64_t rank, int64_t parameter, uint64_t time, int64_t index) {
  Element value = 1;
  for (Element part : {Element(rank), Element(parameter), Element(time), Element(index)})
    value = (value ^ (value >> 31) ^ part) * 0x9e3779b97f4a7c15u;
  return value;
}

// The ranks' shared memory. Some parameters have fewer elements than there are ranks.
struct Shared {
  explicit Shared(int64_t world_size, Random random) : world_size(world_size) {
    states = allocate<RankState>(world_size);
    wake_word = allocate<WakeWord>(1);
    mailboxes = allocate<char>(world_size * kMailbox);
    for (int p = 0; p < kParameters; ++p) {
      sizes.push_back(p < 2 ? 1 + below(random, 5) : 1 + below(random, kMaxElements));
      progress.push_back(allocate<Progress>(world_size));
    }
    const int64_t largest = *std::max_element(sizes.begin(), sizes.begin() + kInTurns);
    capacity = 2 * (largest * sizeof(Element) + kCacheLine);
    ring = allocate<char>(capacity);
    for (int p = 0; p < kParameters; ++p)
      copies.push_back(p < kInTurns ? ring : allocate<char>(nbytes(p)));
  }

  template <typename T>
  static T* allocate(int64_t count) {
    void* zeros = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (zeros == MAP_FAILED) fail("no memory");
    return static_cast<T*>(zeros);  // never freed
  }

  int64_t nbytes(int p) const { return sizes[p] * sizeof(Element); }
  int64_t chunk(int p) const { return (sizes[p] + world_size - 1) / world_size; }
  // The rank that has all rows of a parameter, if any.
  std::optional<int64_t> owner(int p) const {
    return p % 2 == 1 ? std::optional(p % world_size) : std::nullopt;
  }
  int64_t first(int p, int64_t rank) const { return std::min(rank * chunk(p), sizes[p]); }

  int64_t world_size;
  RankState* states;
  WakeWord* wake_word;
  char* mailboxes;
  std::vector<int64_t> sizes;
  std::vector<Progress*> progress;
  int64_t capacity;  // bytes of the ring
  char* ring;
  std::vector<char*> copies;  // the memory of each parameter's copies
};
// A thread that plays a rank.
struct Rank {
  Rank(const Shared& shared, int64_t number, Random program)
      : shared(shared),
        number(number),
        program(program),
        own(this->program() + number),
        waiter(shared.wake_word, shared.states, number,
               std::vector<pid_t>(shared.world_size, getpid()), kTimeout, "a rule") {}

  // Delays ranks at different times.
  void linger() {
    const auto dice = below(own, 64);
    if (dice < 8) sched_yield();
    if (dice == 63) usleep(below(own, 100));
  }

  const Shared& shared;
  const int64_t number;
  Random program;  // the same on all ranks
  Random own;
  RankWaiter waiter;
  int operations = 0;  // gathers and reductions so far
};

}  // namespace zero3
