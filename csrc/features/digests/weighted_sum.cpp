#include "features/digests/weighted_sum.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "support/error.h"

// Instructions of 512 bits read memory as fast as it is, where those of 256 bits do not.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    __GNUC__ >= 12
#define ZERO3_VECTORIZED_WIDELY \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#include "kernels/vectorized.h"
#define ZERO3_VECTORIZED_WIDELY ZERO3_VECTORIZED
#endif

namespace zero3 {
namespace {

constexpr int64_t kKeysInCache = 4096;  // columns whose keys stay in a processor's first cache
constexpr int64_t kRowsTogether = 4;    // read with each key, where keys come from a slower cache
constexpr int64_t kWordsPerTask = 1 << 20;  // at least, for each thread

// Keys in two halves: key = low + 2**32 * high. Two products of 32 bits are cheaper than one of 64.
struct ColumnKeys {
  explicit ColumnKeys(const at::Tensor& keys) : low(keys.numel()), high(keys.numel()) {
    const int64_t* key = keys.const_data_ptr<int64_t>();
    for (size_t i = 0; i < low.size(); ++i) {
      low[i] = static_cast<int32_t>(key[i]);
      high[i] = static_cast<uint32_t>((static_cast<uint64_t>(key[i]) - low[i]) >> 32);
    }
  }

  std::vector<int32_t> low;
  std::vector<uint32_t> high;
};

template <int kRows, typename Word>
ZERO3_VECTORIZED_WIDELY uint64_t sum_of_rows(const Word* words, int64_t stride,
                                             const int64_t* row_keys, const int32_t* low_keys,
                                             const uint32_t* high_keys, int64_t columns) {
  uint64_t low[kRows] = {};  // unsigned: sums wrap around
  uint32_t high[kRows] = {};
  for (int64_t i = 0; i < columns; ++i) {
    for (int row = 0; row < kRows; ++row) {
      const int32_t word = words[row * stride + i];
      low[row] += static_cast<uint64_t>(int64_t{word} * int64_t{low_keys[i]});
      high[row] += static_cast<uint32_t>(word) * high_keys[i];
    }
  }
  uint64_t sum = 0;
  for (int row = 0; row < kRows; ++row)
    sum += (low[row] + (static_cast<uint64_t>(high[row]) << 32)) *
           static_cast<uint64_t>(row_keys[row]);
  return sum;
}

template <typename Word>
uint64_t sum_in_parallel(const at::Tensor& words, const at::Tensor& row_keys,
                         const ColumnKeys& keys) {
  const int64_t columns = words.size(1), stride = words.stride(0);
  const Word* first = words.const_data_ptr<Word>();
  const int64_t* row_key = row_keys.const_data_ptr<int64_t>();
  std::atomic<uint64_t> sum = 0;  // modulo 2**64: the order of threads does not matter
  const auto grain = std::max<int64_t>(1, kWordsPerTask / columns);
  at::parallel_for(0, words.size(0), grain, [&](int64_t begin, int64_t end) {
    const auto add = [&]<int kRows>(std::integral_constant<int, kRows>, int64_t row) {
      return sum_of_rows<kRows>(first + row * stride, stride, row_key + row, keys.low.data(),
                                keys.high.data(), columns);
    };
    uint64_t mine = 0;
    int64_t row = begin;
    if (columns > kKeysInCache)
      for (; row + kRowsTogether <= end; row += kRowsTogether)
        mine += add(std::integral_constant<int, kRowsTogether>(), row);
    for (; row < end; ++row) mine += add(std::integral_constant<int, 1>(), row);
    sum += mine;
  });
  return sum;
}

}  // namespace

int64_t weighted_sum(const at::Tensor& words, const at::Tensor& row_keys,
                     const at::Tensor& column_keys) {
  ZERO3_CHECK(words.is_cpu() && words.dim() == 2 && words.stride(1) == 1 &&
                  row_keys.is_contiguous() && row_keys.numel() == words.size(0) &&
                  column_keys.is_contiguous() && column_keys.numel() == words.size(1),
              "words ", words.sizes(), " with strides ", words.strides(), " on ", words.device(),
              " do not fit keys ", row_keys.sizes(), " and ", column_keys.sizes());
  if (words.numel() == 0) return 0;
  const ColumnKeys keys(column_keys);
  uint64_t sum = 0;
  switch (words.scalar_type()) {
    case at::kChar:
      sum = sum_in_parallel<int8_t>(words, row_keys, keys);
      break;
    case at::kShort:
      sum = sum_in_parallel<int16_t>(words, row_keys, keys);
      break;
    case at::kInt:
      sum = sum_in_parallel<int32_t>(words, row_keys, keys);
      break;
    default:
      ZERO3_CHECK(false, "words are int8, int16 or int32, not ", words.scalar_type());
  }
  return static_cast<int64_t>(sum);
}

}  // namespace zero3
