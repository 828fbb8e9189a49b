// Copies of what is not read soon: past the caches, which then needs not read what it overwrites.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace zero3 {

constexpr int64_t kWorthStreaming = 1 << 20;  // bytes; what is less may well be in a cache

// As memcpy. Others that see a later write of this thread's, by a release, see these too once
// finish_streaming() was called in between.
inline void stream(void* to, const void* from, int64_t nbytes) {
#if defined(__SSE2__)
  constexpr int64_t kLine = 64;
  auto* target = static_cast<char*>(to);
  auto* source = static_cast<const char*>(from);
  if (reinterpret_cast<uintptr_t>(target) % sizeof(__m128i) == 0) {
    for (; nbytes >= kLine; nbytes -= kLine, target += kLine, source += kLine) {
      auto* lane = reinterpret_cast<__m128i*>(target);
      auto* read = reinterpret_cast<const __m128i*>(source);
      const __m128i a = _mm_loadu_si128(read), b = _mm_loadu_si128(read + 1),
                    c = _mm_loadu_si128(read + 2), d = _mm_loadu_si128(read + 3);
      _mm_stream_si128(lane, a);
      _mm_stream_si128(lane + 1, b);
      _mm_stream_si128(lane + 2, c);
      _mm_stream_si128(lane + 3, d);
    }
  }
  if (nbytes > 0) std::memcpy(target, source, nbytes);  // which may take its time for nothing
#else
  std::memcpy(to, from, nbytes);
#endif
}

inline void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace zero3
