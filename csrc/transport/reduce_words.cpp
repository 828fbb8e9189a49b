#include "transport/reduce_words.h"

namespace zero3 {
namespace {

constexpr int64_t kBlockBytes = 4 << 20;

}  // namespace

std::vector<Block> blocks_of(int64_t rows, int64_t row_bytes, int64_t world_size,
                             std::optional<int64_t> owner) {
  if (rows * row_bytes <= kBlockBytes) return {{0, rows, owner}};
  const int64_t step = std::max<int64_t>(kBlockBytes / std::max<int64_t>(row_bytes, 1), 1);
  std::vector<Block> blocks;
  if (owner) {
    for (int64_t begin = 0; begin < rows; begin += step)
      blocks.push_back({begin, std::min(step, rows - begin), owner});
    return blocks;
  }
  const int64_t chunk = (rows + world_size - 1) / world_size;
  for (int64_t offset = 0; offset < chunk; offset += step)  // alternates owners: all have work
    for (int64_t r = 0; r < world_size; ++r) {
      const int64_t begin = r * chunk + offset;
      const int64_t end = std::min({begin + step, (r + 1) * chunk, rows});
      if (begin < end) blocks.push_back({begin, end - begin, r});
    }
  return blocks;
}

}  // namespace zero3
