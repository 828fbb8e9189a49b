// Gathers of ranks that share memory: which ranks may write the copy of a parameter, or read it.
#pragma once

#include <algorithm>
#include <vector>

#include "transport/shared/words.h"

namespace zero3 {

// Words of the gathers of one parameter. Each rank writes its rows of one copy, and all ranks read
// the copy.
class GatherWords {
 public:
  GatherWords(Progress* ranks, int64_t rank, int64_t world_size)
      : ranks_(ranks), rank_(rank), world_size_(world_size) {}

  uint64_t epoch() const { return epoch_; }

  // Begins the next epoch, whose copy has a turn with this `history`. From now on this rank reads
  // the copy only when there are no writers().
  void arrive(uint64_t history) {
    ranks_[rank_].history.store(history, std::memory_order_relaxed);
    ranks_[rank_].arrived.store(++epoch_, std::memory_order_release);
  }

  // Ranks that may still read the previous contents of the copy's place. If there are none, this
  // rank may write its rows, and then calls publish().
  std::vector<int64_t> readers() const { return behind(&Progress::arrived); }

  // Whether all ranks have the copy at the same place. Valid once there are no readers(). False if
  // ranks have gathered different things, or if some have raised and gone on, as this rank will.
  bool is_at_one_place() const {
    const auto mine = ranks_[rank_].history.load(std::memory_order_relaxed);
    return std::all_of(ranks_, ranks_ + world_size_, [&](const Progress& progress) {
      return progress.history.load(std::memory_order_relaxed) == mine;
    });
  }

  void publish() { ranks_[rank_].published.store(epoch_, std::memory_order_release); }
  bool is_published() const {
    return ranks_[rank_].published.load(std::memory_order_relaxed) >= epoch_;
  }

  // Ranks that have not written their rows.
  std::vector<int64_t> writers() const { return behind(&Progress::published); }

 private:
  std::vector<int64_t> behind(std::atomic<uint64_t> Progress::* word) const {
    return ranks_where(world_size_, [&](int64_t r) {
      return (ranks_[r].*word).load(std::memory_order_acquire) < epoch_;
    });
  }

  Progress* ranks_;
  int64_t rank_;
  int64_t world_size_;
  uint64_t epoch_ = 0;
};

}  // namespace zero3
