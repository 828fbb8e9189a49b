// Marks functions that are compiled for AVX2 too, which is selected at run time: bfloat16 is four
// times faster.
#pragma once

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define ZERO3_VECTORIZED __attribute__((target_clones("avx2", "default")))
#else
#define ZERO3_VECTORIZED
#endif
