/* Compiles the products of integers for x86-64 with AVX-512 VNNI. */
#include "host.h"

#if HAS_AVX512_VNNI
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")
#define LANES 16
#define AVX2 1
#define PAIRS 0
#include "integers.h"

INTEGER_KERNELS(vnni_integers, many_tokens, no_tiles, no_end);
#endif
