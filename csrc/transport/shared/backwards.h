// Backwards of ranks that share memory, and the ranks' announcements in a backward.
#pragma once

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "support/error.h"
#include "transport/shared/words.h"

namespace zero3 {

// Numbers the backwards of a group. All ranks count alike, even after a backward that raised on
// some ranks before it began there: the next gather of a forward, in which all ranks meet, realigns
// them.
class Backwards {
 public:
  // Tests begin with `gathers` that were counted already.
  Backwards(RankState* ranks, int64_t rank, uint64_t gathers = 0)
      : ranks_(ranks), rank_(rank), gathers_(gathers) {}

  // Counts a gather of a forward, whatever the number of its parameters.
  void count_gather() {
    std::lock_guard lock(mutex_);
    if (gathers_ == kMostGathers)
      throw_error(
          "the forwards of a sharded model's process group have gathered " +
          std::to_string(gathers_) +
          " times, and its ranks cannot count further: start them again, from a checkpoint");
    ++gathers_;
    show_oldest();
  }

  uint64_t begin() {
    std::lock_guard lock(mutex_);
    const uint64_t number = next();
    latest_ = number;
    running_.insert(number);
    return number;
  }

  // Notes that this rank reads nothing of backward `number` any more.
  void end(uint64_t number) {
    std::lock_guard lock(mutex_);
    running_.erase(number);
    show_oldest();
  }

 private:
  uint64_t next() const { return std::max(latest_ + 1, gathers_ << kBackwardBits); }
  void show_oldest() {
    const uint64_t oldest = running_.empty() ? next() : *running_.begin();
    ranks_[rank_].oldest_backward.store(oldest, std::memory_order_release);
  }

  RankState* ranks_;
  int64_t rank_;
  std::mutex mutex_;  // a thread may be in a forward while another is in a backward
  uint64_t gathers_;
  uint64_t latest_ = 0;
  std::set<uint64_t> running_;  // nested ones
};

// Rounds in which each rank announces something and reads the other ranks' announcements. A round's
// number consists of its backward's number and a count within the backward.
class Announcements {
 public:
  Announcements(RankState* ranks, int64_t rank, int64_t world_size)
      : ranks_(ranks), rank_(rank), world_size_(world_size) {}

  // Ranks that may still read this rank's announcement of its latest round. If there are none, this
  // rank may write its announcement of the next() round, and then call announce().
  std::vector<int64_t> readers() const {
    return ranks_where(world_size_, [&](int64_t r) {
      return ranks_[r].acknowledged.load(std::memory_order_acquire) < latest_ &&
             !ranks_[r].has_left(latest_ >> kRoundBits);
    });
  }
  uint64_t next(uint64_t backward) {
    return latest_ = std::max(latest_, backward << kRoundBits) + 1;
  }
  void announce(uint64_t round, uint64_t topic) {
    ranks_[rank_].topic.store(topic, std::memory_order_relaxed);
    ranks_[rank_].announced.store(round, std::memory_order_release);
  }

  // Ranks that have not announced in `round`. If there are none, all announcements can be read
  // until acknowledge().
  std::vector<int64_t> unannounced(uint64_t round) const {
    return ranks_where(world_size_, [&](int64_t r) {
      return ranks_[r].announced.load(std::memory_order_acquire) < round;
    });
  }
  // Topic of rank r's announcement. Valid once there are no unannounced() ranks.
  uint64_t topic_of(int64_t r) const { return ranks_[r].topic.load(std::memory_order_relaxed); }
  // The unannounced() ranks that have gone on, and will never announce in `round`.
  std::vector<int64_t> ranks_gone(uint64_t round) const {
    return ranks_where(world_size_, [&](int64_t r) {
      return ranks_[r].has_left(round >> kRoundBits) &&
             ranks_[r].announced.load(std::memory_order_acquire) < round;
    });
  }
  void acknowledge(uint64_t round) {
    ranks_[rank_].acknowledged.store(round, std::memory_order_release);
  }

 private:
  RankState* ranks_;
  int64_t rank_;
  int64_t world_size_;
  uint64_t latest_ = 0;
};

}  // namespace zero3
