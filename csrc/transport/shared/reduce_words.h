// Reductions of ranks that share memory: ready gradients, and the ranks that may still read them.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "parameter/row_layout.h"
#include "transport/shared/words.h"

namespace zero3 {

// Words of the reductions of one block of a parameter. Each rank's gradient stays in its mailbox
// until it is read.
class ReduceWords {
 public:
  struct Description {
    uint64_t offset;
    int8_t dtype;
    int8_t wire_dtype;
  };

  // With a `reader`, only that rank reads. Otherwise all ranks do.
  ReduceWords(Progress* ranks, const RankState* states, int64_t rank, int64_t world_size,
              std::optional<int64_t> reader = std::nullopt)
      : ranks_(ranks), states_(states), rank_(rank), world_size_(world_size), reader_(reader) {}

  bool is_read_by(int64_t r) const { return !reader_ || *reader_ == r; }

  // Ranks that may still read this rank's gradient of `epoch`.
  std::vector<int64_t> readers(uint64_t epoch) const {
    return ranks_where(world_size_, [&](int64_t r) {
      return is_read_by(r) && ranks_[r].consumed.load(std::memory_order_acquire) < epoch &&
             !states_[r].has_left(epoch >> kGradientBits);
    });
  }

  // The epoch of the next gradient in this backward. The latest() epoch must have no readers().
  uint64_t next_epoch(uint64_t backward) const {
    const uint64_t first = backward << kGradientBits;
    return std::max(latest_, first) + 1;
  }
  uint64_t latest() const { return latest_; }

  void post(uint64_t epoch, const Description& description) {
    Progress& mine = ranks_[rank_];
    mine.offset = description.offset;
    mine.dtype = description.dtype;
    mine.wire_dtype = description.wire_dtype;
    latest_ = epoch;
    mine.posted.store(epoch, std::memory_order_release);
  }

  // Ranks that have not posted their gradient of `epoch`.
  std::vector<int64_t> writers(uint64_t epoch) const {
    return ranks_where(world_size_, [&](int64_t r) { return !has_posted(r, epoch); });
  }

  // The writers() that have gone on, and will never post their gradient of `epoch`.
  std::vector<int64_t> ranks_gone(uint64_t epoch) const {
    return ranks_where(world_size_, [&](int64_t r) {  // in this order: a rank posts, then leaves
      return states_[r].has_left(epoch >> kGradientBits) && !has_posted(r, epoch);
    });
  }

  // Describes the gradient of rank r. Valid once there are no writers().
  Description of_rank(int64_t r) const {
    return {ranks_[r].offset, ranks_[r].dtype, ranks_[r].wire_dtype};
  }

  // Notes that this rank has read all that it needs of `epoch`.
  void consume(uint64_t epoch) {
    if (ranks_[rank_].consumed.load(std::memory_order_relaxed) < epoch)
      ranks_[rank_].consumed.store(epoch, std::memory_order_release);
  }

 private:
  bool has_posted(int64_t r, uint64_t epoch) const {
    return ranks_[r].posted.load(std::memory_order_acquire) >= epoch;
  }

  Progress* ranks_;
  const RankState* states_;
  int64_t rank_;
  int64_t world_size_;
  std::optional<int64_t> reader_;
  uint64_t latest_ = 0;
};

// Rows of a gradient that are sent and summed at a time: few enough to stay in caches meanwhile.
struct Block {
  int64_t begin;
  int64_t rows;
  std::optional<int64_t> reader;  // rank that sums the rows; none: each rank sums some of them
};
// The blocks of the rows of a layout.
std::vector<Block> blocks_of(const RowLayout& layout, int64_t row_bytes);

}  // namespace zero3
