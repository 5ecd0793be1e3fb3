/* Compiles the kernels for x86-64 with AVX2, FMA and F16C. cpu.c asks the processor before it uses them. */
#ifdef __x86_64__
#pragma GCC target("avx2,fma,f16c")
#define LANES 8
#define AVX2 1
#include "kernels.h"

KERNELS(avx2_kernels);
#endif
