/* The choice of kernels: by the processor, or by COLIBRI_ISA. */
#include <stdlib.h>
#include <string.h>

#include "host.h"

const Kernels *host_kernels(void) {
    static const Kernels *chosen; /* threads that race here all store the same value */
    const Kernels *kernels = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (kernels) return kernels;
    const char *isa = getenv("COLIBRI_ISA");
    int automatic = !isa || !*isa;
    if (!automatic && strcmp(isa, "portable") != 0 && strcmp(isa, "avx2") != 0) {
        fail("environment: COLIBRI_ISA=%s, expected portable or avx2; unset it to let the machine decide", isa);
        return NULL;
    }
    kernels = &portable_kernels;
#ifdef __x86_64__
    int has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (has_avx2 && (automatic || strcmp(isa, "avx2") == 0)) kernels = &avx2_kernels;
#endif
    if (!automatic && strcmp(isa, "avx2") == 0 && kernels == &portable_kernels) {
        fail("environment: COLIBRI_ISA=avx2, expected portable on a machine without AVX2, FMA and F16C; unset it");
        return NULL;
    }
    __atomic_store_n(&chosen, kernels, __ATOMIC_RELAXED);
    return kernels;
}
