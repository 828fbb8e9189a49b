// Codes of one byte for floating-point numbers. Plain functions of their arguments, without
// branches, so that a compiler vectorizes them for a CPU, and a GPU's kernels call them too.
#pragma once

#include <bit>
#include <cfloat>
#include <cstdint>

#if defined(__CUDACC__)
#define ZERO3_HOST_DEVICE __host__ __device__
#else
#define ZERO3_HOST_DEVICE
#endif

namespace zero3 {

constexpr uint32_t kInfinityBits = 0x7F800000;  // of a float
constexpr uint32_t kNanBits = 0x7FC00000;

// A conditional expression by masks. gcc vectorizes no loop with one that computes floats.
ZERO3_HOST_DEVICE inline uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

// A float of 8 bits: a sign, an exponent, and kMantissa bits. Magnitudes from kFirstSpecial on are
// kInfinity, if the format has that, and NaN.
template <int kMantissa, int kBias, int kFirstSpecial, int kInfinity, int kNan>
struct Float8Code {
  static constexpr int kShift = 23 - kMantissa;  // to the mantissa of a float
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  static constexpr uint32_t kFirstNormal = static_cast<uint32_t>(128 - kBias) << 23;

  // 2 to the power of `exponent`.
  static constexpr float power(int exponent) {
    return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
  }

  // Rounds to nearest, ties to even. A finite value is at most the format's maximum, or rounds to
  // it.
  ZERO3_HOST_DEVICE static uint8_t encode(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    const uint32_t tie = (magnitude >> kShift) & 1;
    const uint32_t normal = (magnitude - kRebias + (1u << (kShift - 1)) - 1 + tie) >> kShift;
    // The last bit of the sum is the spacing of subnormal numbers.
    constexpr float kAligned = power(24 - kBias - kMantissa);
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + kAligned) -
                               std::bit_cast<uint32_t>(kAligned);
    uint32_t code = select(magnitude < kFirstNormal, subnormal, normal);
    code = select(magnitude == kInfinityBits, kInfinity, code);
    code = select(magnitude > kInfinityBits, kNan, code);
    return static_cast<uint8_t>(code | (bits >> 31 << 7));
  }

  ZERO3_HOST_DEVICE static float decode(uint8_t code) {
    const uint32_t magnitude = code & 0x7F;
    const uint32_t sign = static_cast<uint32_t>(code >> 7) << 31;
    constexpr float kStep = power(1 - kBias - kMantissa);
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(static_cast<float>(static_cast<int>(magnitude)) * kStep);
    uint32_t bits =
        select(magnitude < (1u << kMantissa), subnormal, (magnitude << kShift) + kRebias);
    bits = select(magnitude >= kFirstSpecial, kNanBits, bits);
    if constexpr (kInfinity != kNan) bits = select(magnitude == kInfinity, kInfinityBits, bits);
    return std::bit_cast<float>(bits | sign);
  }
};

struct Float8E4m3fn : Float8Code<3, 7, 0x7F, 0x7F, 0x7F> {  // infinity becomes NaN
  static constexpr float kLargest = 448.0f;
};

struct Float8E5m2 : Float8Code<2, 15, 0x7C, 0x7C, 0x7F> {
  static constexpr float kLargest = 57344.0f;
};

// Integers from -127 to 127. The code -128 is NaN, and infinity becomes NaN.
struct Int8 {
  static constexpr float kLargest = 127.0f;

  ZERO3_HOST_DEVICE static uint8_t encode(float value) {
    constexpr float kAligned = 12582912.0f;  // 1.5 * 2^23: the last bit of a sum is worth 1
    const bool is_finite = (std::bit_cast<uint32_t>(value) & 0x7FFFFFFF) < kInfinityBits;
    const uint32_t rounded =
        std::bit_cast<uint32_t>(value + kAligned) - std::bit_cast<uint32_t>(kAligned);
    return static_cast<uint8_t>(select(is_finite, rounded, 0x80));
  }

  ZERO3_HOST_DEVICE static float decode(uint8_t code) {
    const auto value = static_cast<float>(static_cast<int>(static_cast<int8_t>(code)));
    return std::bit_cast<float>(select(code == 0x80, kNanBits, std::bit_cast<uint32_t>(value)));
  }
};

// Bits of the magnitude of `value`, which are in the order of magnitudes; 0 if it is not finite.
ZERO3_HOST_DEVICE inline uint32_t finite_magnitude(float value) {
  const uint32_t magnitude = std::bit_cast<uint32_t>(value) & 0x7FFFFFFF;
  return select(magnitude < kInfinityBits, magnitude, 0);
}

// The scale of a block whose largest finite magnitude has these bits. A value is that of its code
// times the scale. The largest code's value stays finite.
template <typename Code>
ZERO3_HOST_DEVICE inline float scale_of(uint32_t largest) {
  const float scale = std::bit_cast<float>(largest) / Code::kLargest;
  if (scale < FLT_MIN) return FLT_MIN;
  const auto bits = std::bit_cast<uint32_t>(scale);
  return scale * Code::kLargest <= FLT_MAX ? scale : std::bit_cast<float>(bits - 1);
}

// The place of a block's scale in a quantized row.
ZERO3_HOST_DEVICE inline int64_t scale_offset(int64_t row_numel, int64_t block) {
  return (row_numel + 3) / 4 * 4 + block * 4;
}

}  // namespace zero3
