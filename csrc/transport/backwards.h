// Backwards of ranks that share memory, and the calls by which the ranks communicate in one.
#pragma once

#include <algorithm>
#include <mutex>
#include <set>
#include <vector>

#include "transport/words.h"

namespace zero3 {

// Numbers the backwards of a group. All ranks count alike, even after a backward that raised on
// some ranks before it began there: the next forward, in which all ranks meet, realigns them.
class Backwards {
 public:
  Backwards(Standing* ranks, int64_t rank) : ranks_(ranks), rank_(rank) {}

  void count_publication() {
    std::lock_guard lock(mutex_);
    ++publications_;
    settle();
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
    settle();
  }

 private:
  static constexpr int kPublicationShift = 12;  // 4096 backwards per publication suffice

  uint64_t next() const { return std::max(latest_ + 1, publications_ << kPublicationShift); }
  void settle() {
    const uint64_t settled = running_.empty() ? next() : *running_.begin();
    ranks_[rank_].settled.store(settled, std::memory_order_release);
  }

  Standing* ranks_;
  int64_t rank_;
  std::mutex mutex_;  // a thread may be in a forward while another is in a backward
  uint64_t publications_ = 0;
  uint64_t latest_ = 0;
  std::set<uint64_t> running_;  // nested ones
};

// Calls in which each rank announces something and hears the other ranks' announcements. A call's
// number contains that of its backward and a count within the backward.
class Calls {
 public:
  Calls(Standing* ranks, int64_t rank, int64_t world_size)
      : ranks_(ranks), rank_(rank), world_size_(world_size) {}

  // Ranks that may still read this rank's announcement of its latest call. If there are none, this
  // rank may write that of its next() call, and then say() so.
  std::vector<int64_t> readers() const {
    return those([&](const Standing& standing) {
      return standing.heard.load(std::memory_order_acquire) < latest_ &&
             !has_settled(standing, latest_);
    });
  }
  uint64_t next(uint64_t backward) {
    return latest_ = std::max(latest_, backward << kBackwardShift) + 1;
  }
  void say(uint64_t call, uint64_t topic) {
    ranks_[rank_].topic.store(topic, std::memory_order_relaxed);
    ranks_[rank_].called.store(call, std::memory_order_release);
  }

  // Ranks that have not announced `call`. If none, all announcements can be read until hear().
  std::vector<int64_t> silent(uint64_t call) const {
    return those([&](const Standing& standing) {
      return standing.called.load(std::memory_order_acquire) < call;
    });
  }
  // Model of rank r's announcement. Valid once no rank is silent().
  uint64_t topic_of(int64_t r) const { return ranks_[r].topic.load(std::memory_order_relaxed); }
  // Ranks that never will announce `call`.
  std::vector<int64_t> ranks_gone(uint64_t call) const {
    return those([&](const Standing& standing) {
      return has_settled(standing, call) && standing.called.load(std::memory_order_acquire) < call;
    });
  }
  void hear(uint64_t call) { ranks_[rank_].heard.store(call, std::memory_order_release); }

 private:
  static constexpr int kBackwardShift = 8;

  static bool has_settled(const Standing& standing, uint64_t call) {
    return standing.settled.load(std::memory_order_acquire) > call >> kBackwardShift;
  }

  template <typename Predicate>
  std::vector<int64_t> those(Predicate predicate) const {
    std::vector<int64_t> result;
    for (int64_t r = 0; r < world_size_; ++r)
      if (predicate(ranks_[r])) result.push_back(r);
    return result;
  }

  Standing* ranks_;
  int64_t rank_;
  int64_t world_size_;
  uint64_t latest_ = 0;
};

}  // namespace zero3
