// Copies past the caches, for memory that is not read soon. The caches need not read the memory
// that such a copy overwrites.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace zero3 {

constexpr int64_t kWorthNontemporal = 1 << 20;  // bytes; a smaller copy may well stay in a cache

// Copies like memcpy. A later store-release of this thread publishes these writes only if
// nontemporal_fence() is called in between.
inline void nontemporal_copy(void* to, const void* from, int64_t nbytes) {
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
  if (nbytes > 0) std::memcpy(target, source, nbytes);  // memcpy of 0 bytes may take time
#else
  std::memcpy(to, from, nbytes);
#endif
}

inline void nontemporal_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace zero3
