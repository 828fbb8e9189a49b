// The work of one thread of the copy kernel. Plain functions of their arguments, so that a host can
// run them too, one thread after another.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#if defined(__CUDACC__)
#define ZERO3_HOST_DEVICE __host__ __device__
#define ZERO3_UNROLL _Pragma("unroll")  // so that arrays stay in registers
#else
#define ZERO3_HOST_DEVICE
#define ZERO3_UNROLL
#endif

namespace zero3 {

// At most kMost copies, cut into tiles. Passed as the kernel's argument.
template <int kMost>
struct CopyBatch {
  struct Item {
    const void* from;  // null: zeros
    void* to;
    int64_t numel;
  };

  Item items[kMost];
  int32_t ends[kMost];  // number of tiles up to and including each item
  int32_t count = 0;
  float items_per_tile = 0;                              // on average
  c10::ScalarType through = c10::ScalarType::Undefined;  // cast to it first, if defined
  bool multiplies = false;
  double factor = 1;  // divisor of the elements; with `multiplies`, their factor
};

// A launch takes some microseconds however little it copies. A large batch takes longer to pass.
constexpr int kFewCopies = 128;
constexpr int kManyCopies = 1024;
static_assert(sizeof(CopyBatch<kManyCopies>) <= 32764);  // limit of sm_70 on and CUDA 12.1 on

// A thread reads or writes 16 bytes of the wider dtype at once: neighbors then touch memory
// without gaps. It issues kUnroll reads, of 64 bytes, before it uses the first, to hide the
// memory's latency.
template <typename From, typename To>
struct Tiling {
  static constexpr int kThreads = 256;
  static constexpr int kVector = 16 / std::max(sizeof(From), sizeof(To));
  static constexpr int kUnroll = 64 / (kVector * sizeof(From));
  static constexpr int64_t kTile = int64_t{kThreads} * kVector * kUnroll;
};

template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T values[N];
};

template <typename Math>
ZERO3_HOST_DEVICE inline Math rounded(Math value, c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return static_cast<Math>(static_cast<c10::Half>(static_cast<float>(value)));
    case c10::ScalarType::BFloat16:
      return static_cast<Math>(static_cast<c10::BFloat16>(static_cast<float>(value)));
    case c10::ScalarType::Float:
      return static_cast<Math>(static_cast<float>(value));
    default:
      return value;
  }
}

template <typename From, typename To, int kMost>
ZERO3_HOST_DEVICE inline void copy_tile(const CopyBatch<kMost>& batch, int32_t tile, int thread) {
  using Tile = Tiling<From, To>;
  constexpr bool is_double = std::is_same_v<From, double> || std::is_same_v<To, double>;
  using Math = std::conditional_t<is_double, double, float>;
  constexpr int kVector = Tile::kVector;
  using Read = Vector<From, kVector>;
  using Written = Vector<To, kVector>;

  // This tile's item: the first that ends after the tile. Of items of equal size, the first guess
  // is right: each read of `ends` may miss the cache of constants, which is small.
  int first = 0;
  int last = batch.count - 1;
  int guess = static_cast<int>((static_cast<float>(tile) + 0.5f) * batch.items_per_tile);
  if (guess > last) guess = last;
  if (batch.ends[guess] > tile) {
    last = guess;
    if (guess > 0 && batch.ends[guess - 1] <= tile) first = guess;
  } else {
    first = guess + 1;
  }
  while (first < last) {
    const int middle = (first + last) / 2;
    if (batch.ends[middle] > tile)
      last = middle;
    else
      first = middle + 1;
  }
  const auto& item = batch.items[first];
  const int64_t begin = (tile - (first == 0 ? 0 : batch.ends[first - 1])) * Tile::kTile;
  const int64_t rest = item.numel - begin;
  const int64_t numel = rest < Tile::kTile ? rest : Tile::kTile;
  const auto* from = static_cast<const From*>(item.from);
  auto* to = static_cast<To*>(item.to) + begin;
  if (from == nullptr) {
    for (int64_t i = thread; i < numel; i += Tile::kThreads) to[i] = static_cast<To>(0.0f);
    return;
  }
  from += begin;

  const auto factor = static_cast<Math>(batch.factor);
  const auto convert = [&](From value) {
    const Math exact = rounded(static_cast<Math>(value), batch.through);
    return static_cast<To>(batch.multiplies ? exact * factor : exact / factor);
  };
  const bool is_aligned = reinterpret_cast<uintptr_t>(from) % alignof(Read) == 0 &&
                          reinterpret_cast<uintptr_t>(to) % alignof(Written) == 0;
  int64_t done = 0;
  if (is_aligned && numel == Tile::kTile) {
    Read read[Tile::kUnroll];
    const auto* sources = reinterpret_cast<const Read*>(from);
    auto* targets = reinterpret_cast<Written*>(to);
    ZERO3_UNROLL
    for (int k = 0; k < Tile::kUnroll; ++k) read[k] = sources[k * Tile::kThreads + thread];
    ZERO3_UNROLL
    for (int k = 0; k < Tile::kUnroll; ++k) {
      Written written;
      ZERO3_UNROLL
      for (int i = 0; i < kVector; ++i) written.values[i] = convert(read[k].values[i]);
      targets[k * Tile::kThreads + thread] = written;
    }
    done = numel;
  }
  for (int64_t i = done + thread; i < numel; i += Tile::kThreads) to[i] = convert(from[i]);
}

}  // namespace zero3
