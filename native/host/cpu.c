/* Chooses the instruction set, by the processor or by COLIBRI_ISA. */
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "host.h"

static int always(void) { return 1; }

#ifdef __x86_64__
/* A bit of what cpuid says in leaf 7. */
static int leaf_7(unsigned subleaf, int which, int bit) {
    unsigned words[4] = {0}; /* eax, ebx, ecx, edx */
    return __get_cpuid_count(7, subleaf, &words[0], &words[1], &words[2], &words[3]) && words[which] >> bit & 1;
}

static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

static int has_avx_vnni(void) { return has_avx2() && leaf_7(1, 0, 4); }

static int has_avx512_vnni(void) {
    return has_avx2() && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && leaf_7(0, 2, 11);
}

/* Linux gives a process the tiles' registers when it asks: their state is large. */
static int has_amx(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
    return has_avx512_vnni() && leaf_7(0, 3, 24) && leaf_7(0, 3, 25) &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}
#endif

/* The later the better. Those after avx2 differ from it in products of integers alone. */
static const Isa isas[] = {
    {"portable", "host portable", &portable_kernels, &portable_integers, always},
#ifdef __x86_64__
    {"avx2", "host avx2", &avx2_kernels, &avx2_integers, has_avx2},
#if HAS_AVX_VNNI
    {"avxvnni", "host avxvnni", &avx2_kernels, &avxvnni_integers, has_avx_vnni},
#endif
#if HAS_AVX512_VNNI
    {"vnni", "host vnni", &avx2_kernels, &vnni_integers, has_avx512_vnni},
#endif
#if HAS_AMX
    {"amx", "host amx", &avx2_kernels, &amx_integers, has_amx},
#endif
#endif
};
enum { NUM_ISAS = sizeof isas / sizeof *isas };

/* "portable, avx2": what this machine has; all: what any may have. */
static const char *listed(int all) {
    static _Thread_local char text[80];
    text[0] = 0;
    for (int i = 0; i < NUM_ISAS; i++)
        if (all || isas[i].is_here()) strcat(strcat(text, *text ? ", " : ""), isas[i].name);
    return text;
}

static const Isa *named_isa(const char *name) {
    for (int i = 0; i < NUM_ISAS; i++) {
        if (strcmp(name, isas[i].name) != 0) continue;
        if (isas[i].is_here()) return &isas[i];
        fail("environment: COLIBRI_ISA=%s, expected one that this machine has: %s; unset it", name, listed(0));
        return NULL;
    }
    fail("environment: COLIBRI_ISA=%s, expected %s; unset it to let the machine decide", name, listed(1));
    return NULL;
}

/* The last one that makes a difference to this model. */
static const Isa *best_isa(void) {
    const Isa *best = isas;
    for (int i = 1; i < NUM_ISAS; i++)
        if ((USES_INTEGERS || isas[i].integers == &avx2_integers) && isas[i].is_here()) best = &isas[i];
    return best;
}

const Isa *host_isa(void) {
    static const Isa *chosen; /* threads that race here all store the same value */
    const Isa *isa = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (isa) return isa;
    const char *name = getenv("COLIBRI_ISA");
    isa = name && *name ? named_isa(name) : best_isa();
    __atomic_store_n(&chosen, isa, __ATOMIC_RELAXED);
    return isa;
}
