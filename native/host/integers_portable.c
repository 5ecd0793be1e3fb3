/* Compiles the products of integers for any machine. */
#define LANES 4
#define AVX2 0
#define PAIRS 0
#include "integers.h"

INTEGER_KERNELS(portable_integers, many_tokens, no_tiles, no_end);
