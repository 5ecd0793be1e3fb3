/* The kernels for any machine: four-lane vectors, which GCC maps to SSE2, NEON or plain registers. */
#define LANES 4
#define AVX2 0
#include "kernels.h"

KERNELS(portable_kernels, "host portable");
