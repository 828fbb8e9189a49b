#include "transport/shared/reduce_words.h"

namespace zero3 {
namespace {

constexpr int64_t kBlockBytes = 4 << 20;

}  // namespace

std::vector<Block> blocks_of(const RowLayout& layout, int64_t row_bytes) {
  const int64_t rows = layout.rows();
  if (rows * row_bytes <= kBlockBytes) return {{0, rows, layout.only_rank()}};
  const int64_t step = std::max<int64_t>(kBlockBytes / std::max<int64_t>(row_bytes, 1), 1);
  std::vector<Block> blocks;
  for (int64_t offset = 0; offset < layout.chunk_rows(); offset += step)
    for (int64_t r = 0; r < layout.world_size(); ++r) {  // alternates readers: all have work
      const int64_t begin = layout.first_row_of(r) + offset;
      const int64_t end = std::min(begin + step, layout.first_row_of(r + 1));
      if (begin < end) blocks.push_back({begin, end - begin, r});
    }
  return blocks;
}

}  // namespace zero3
