/* Compiles the products of integers for x86-64 with AVX-VNNI, in vectors of 256 bits. */
#include "host.h"

#if HAS_AVX_VNNI
#pragma GCC target("avx2,fma,f16c,avxvnni")
#define LANES 8
#define AVX2 1
#define PAIRS 0
#include "integers.h"

INTEGER_KERNELS(avxvnni_integers, many_tokens, no_tiles, no_end);
#endif
