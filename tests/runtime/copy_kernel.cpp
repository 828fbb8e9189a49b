// Runs the GPU's copy kernel on the CPU, one thread after the other, and checks every written
// element and the memory that must stay untouched.
#include "kernels/copy_kernel.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#ifndef MISTAKE
#define MISTAKE 0
#endif

namespace {

using c10::ScalarType;

constexpr unsigned char kUntouched = 0xA5;

template <typename T>
double cast(double value) {  // casts as torch does
  if constexpr (std::is_same_v<T, double>) return value;
  return static_cast<double>(static_cast<T>(static_cast<float>(value)));
}

double through_dtype(double value, ScalarType through) {
  switch (through) {
    case ScalarType::Half:
      return cast<c10::Half>(value);
    case ScalarType::BFloat16:
      return cast<c10::BFloat16>(value);
    case ScalarType::Float:
      return cast<float>(value);
    default:
      return value;
  }
}

// A tensor whose memory begins `skipped` elements after a multiple of 16 bytes.
template <typename T>
class Tensor {
 public:
  Tensor(int64_t numel, int64_t skipped)
      : memory_((numel + skipped) * sizeof(T) / 16 + 2), data_(first() + skipped), numel_(numel) {
    std::memset(memory_.data(), kUntouched, memory_.size() * 16);
  }

  T* data() { return data_; }
  int64_t numel() const { return numel_; }

  bool is_untouched_around() {
    const auto* begin = reinterpret_cast<const unsigned char*>(memory_.data());
    const auto* end = begin + memory_.size() * 16;
    const auto* mine = reinterpret_cast<const unsigned char*>(data_);
    const auto* mine_end = reinterpret_cast<const unsigned char*>(data_ + numel_);
    for (const auto* p = begin; p < end; ++p)
      if ((p < mine || p >= mine_end) && *p != kUntouched) return false;
    return true;
  }

 private:
  struct alignas(16) Block {
    unsigned char bytes[16];
  };

  T* first() { return reinterpret_cast<T*>(memory_.data()); }

  std::vector<Block> memory_;
  T* data_;
  int64_t numel_;
};

template <typename From, typename To>
bool check(std::mt19937& random, ScalarType through, double divisor) {
  using Tile = zero3::Tiling<From, To>;
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  const bool many = below(8) == 0;
  const int count = 1 + static_cast<int>(below(many ? zero3::kManyCopies : 5));
  std::vector<Tensor<From>> sources;
  std::vector<Tensor<To>> targets;
  std::vector<bool> zeros;
  for (int i = 0; i < count; ++i) {
    const int64_t sizes[] = {1 + below(40), Tile::kTile, Tile::kTile + 1 + below(100),
                             2 * Tile::kTile};
    const int64_t numel = sizes[many && below(100) != 0 ? 0 : below(4)];
    sources.emplace_back(numel, below(3) == 0 ? 1 : 0);
    targets.emplace_back(numel, below(3) == 0 ? 1 : 0);
    zeros.push_back(below(4) == 0);
    for (int64_t k = 0; k < numel; ++k)
      sources[i].data()[k] =
          static_cast<From>(static_cast<float>(std::normal_distribution<double>(0, 3)(random)));
  }
  zero3::CopyBatch<zero3::kManyCopies> batch;
  batch.through = through;
  int exponent;
  batch.multiplies = std::frexp(divisor, &exponent) == 0.5;
  batch.factor = batch.multiplies ? 1 / divisor : divisor;
  int32_t tiles = 0;
  for (int i = 0; i < count; ++i) {
    tiles += static_cast<int32_t>((targets[i].numel() + Tile::kTile - 1) / Tile::kTile);
    batch.ends[i] = tiles;
    batch.items[i] = {zeros[i] ? nullptr : sources[i].data(), targets[i].data(),
                      targets[i].numel()};
  }
  batch.count = count;
  const float guesses[] = {static_cast<float>(count) / static_cast<float>(tiles), 0, 1, 1e6};
  batch.items_per_tile = guesses[below(4)];  // whose only effect is on time
  for (int32_t tile = MISTAKE == 1 ? 1 : 0; tile < tiles; ++tile)
    for (int thread = 0; thread < Tile::kThreads; ++thread)
      zero3::copy_tile<From, To>(batch, tile, thread);

  for (int i = 0; i < count; ++i) {
    if (!targets[i].is_untouched_around()) {
      std::printf("wrote outside of item %d\n", i);
      return false;
    }
    for (int64_t k = 0; k < targets[i].numel(); ++k) {
      const auto source = static_cast<double>(sources[i].data()[k]);
      const double exact = zeros[i] ? 0 : through_dtype(source, through) / divisor;
      const double found = static_cast<double>(targets[i].data()[k]);
      if (found != cast<To>(MISTAKE == 2 ? source / divisor : exact)) {
        std::printf("element %ld of item %d is %g in place of %g\n", static_cast<long>(k), i, found,
                    cast<To>(exact));
        return false;
      }
    }
  }
  return true;
}

template <typename From>
bool check_all(std::mt19937& random) {
  for (ScalarType through : {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
                             ScalarType::Double, ScalarType::Undefined})
    for (double divisor : {1.0, 4.0, 3.0})
      if (!check<From, float>(random, through, divisor) ||
          !check<From, double>(random, through, divisor) ||
          !check<From, c10::BFloat16>(random, through, divisor) ||
          !check<From, c10::Half>(random, through, divisor))
        return false;
  return true;
}

}  // namespace

int main() {
  std::mt19937 random(0);
  for (int i = 0; i < 4; ++i)
    if (!check_all<float>(random) || !check_all<double>(random) ||
        !check_all<c10::BFloat16>(random) || !check_all<c10::Half>(random))
      return 1;
}
