/* Compiles the kernels for any machine: vectors of four lanes, which GCC maps to SSE2, NEON or plain registers. */
#define LANES 4
#define AVX2 0
#include "kernels.h"

KERNELS(portable_kernels);
