#include "parameter/row_layout.h"

#include <c10/util/ArrayRef.h>
#include <c10/util/StringUtil.h>

#include "support/error.h"

namespace zero3 {

RowLayout::RowLayout(int64_t rows, int64_t world_size, std::vector<int64_t> offsets)
    : rows_(rows),
      world_size_(world_size),
      offsets_(std::move(offsets)),
      chunk_rows_((rows + world_size - 1) / world_size) {
  if (is_chunked()) return;
  chunk_rows_ = 0;
  for (int64_t r = 0; r < world_size_; ++r) chunk_rows_ = std::max(chunk_rows_, rows_of(r));
  for (int64_t r = 0; r < world_size_ && rows_ > 0; ++r)
    if (rows_of(r) == rows_) only_rank_ = r;
}

RowLayout RowLayout::chunked(int64_t rows, int64_t world_size) {
  ZERO3_CHECK(rows >= 0 && world_size > 0, rows, " rows cannot be chunked over ", world_size,
              " ranks");
  return RowLayout(rows, world_size, {});
}

RowLayout RowLayout::by_offsets(std::vector<int64_t> offsets) {
  ZERO3_CHECK(offsets.size() >= 2 && offsets.front() == 0 && std::ranges::is_sorted(offsets),
              "offsets of the ranks' rows must ascend from 0, got ", c10::IntArrayRef(offsets));
  const int64_t rows = offsets.back();
  const auto world_size = static_cast<int64_t>(offsets.size()) - 1;
  return RowLayout(rows, world_size, std::move(offsets));
}

}  // namespace zero3
