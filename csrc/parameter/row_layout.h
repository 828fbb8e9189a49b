// The rows of a tensor that each rank has.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace zero3 {

// Ranks have their rows in the order of ranks.
//
//   chunked      ceil(rows / world) rows per rank, the layout of torch.chunk: the last ranks have
//                fewer rows, or none, and their parts are padded where they travel
//   by offsets   any number of rows per rank, perhaps all on one rank; parts travel as they are
class RowLayout {
 public:
  static RowLayout chunked(int64_t rows, int64_t world_size);
  // Rank r has the rows from offsets[r] to offsets[r + 1]. Raises unless offsets ascend from 0.
  static RowLayout by_offsets(std::vector<int64_t> offsets);

  int64_t rows() const { return rows_; }
  int64_t world_size() const { return world_size_; }
  bool is_chunked() const { return offsets_.empty(); }

  // The first row of rank r; if it has none, the row after those of the ranks before it.
  int64_t first_row_of(int64_t r) const {
    return is_chunked() ? std::min(r * chunk_rows_, rows_) : offsets_[r];
  }
  int64_t rows_of(int64_t r) const { return first_row_of(r + 1) - first_row_of(r); }
  // Maximum number of rows of a rank.
  int64_t chunk_rows() const { return chunk_rows_; }
  // The rank that has all rows, if they are not chunked.
  std::optional<int64_t> only_rank() const { return only_rank_; }

  // Rows that travel: all, and the padding of chunks. Only the last ranks' chunks are padded, so
  // the parts end to end are the full tensor followed by padding.
  int64_t padded_rows() const { return is_chunked() ? world_size_ * chunk_rows_ : rows_; }
  int64_t first_padded_row_of(int64_t r) const {
    return is_chunked() ? r * chunk_rows_ : offsets_[r];
  }
  int64_t padded_rows_of(int64_t r) const {
    return first_padded_row_of(r + 1) - first_padded_row_of(r);
  }

  bool operator==(const RowLayout&) const = default;

 private:
  RowLayout(int64_t rows, int64_t world_size, std::vector<int64_t> offsets);

  int64_t rows_;
  int64_t world_size_;
  std::vector<int64_t> offsets_;  // world_size + 1; none if rows are chunked
  int64_t chunk_rows_;
  std::optional<int64_t> only_rank_;
};

}  // namespace zero3
