/* Compiles the products of integers for x86-64 with AVX2, FMA and F16C. */
#ifdef __x86_64__
#pragma GCC target("avx2,fma,f16c")
#define LANES 8
#define AVX2 1
#define PAIRS 1
#include "integers.h"

INTEGER_KERNELS(avx2_integers, many_tokens, no_tiles, no_end);
#endif
