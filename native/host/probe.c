/* Measures the machine's ceilings, with which speeds are compared, with the instructions of the kernels. */
#include <omp.h>

#include "host.h"

#define PROBE_WORDS (1 << 16) /* of one work item: 256 KiB */

typedef struct Read {
    const uint32_t *data;
    int64_t words;
    uint32_t *sum;
} Read;

static void read_item(const void *job, long item) {
    const Read *read = job;
    int64_t first = item * PROBE_WORDS, count = read->words - first;
    uint32_t sum = host_kernels()->read_sum(read->data + first, count < PROBE_WORDS ? count : PROBE_WORDS);
    __atomic_fetch_add(read->sum, sum, __ATOMIC_RELAXED);
}

double colibri_read_sum(const void *data, int64_t bytes, int num_threads) {
    uint32_t sum = 0;
    Read read = {data, bytes / 4, &sum};
    if (!host_isa()) return -1;
    parallel_for(num_threads, CEIL_DIV(read.words, PROBE_WORDS), (double)bytes, read_item, &read);
    return sum;
}

double colibri_fma_rate(double seconds, int num_threads) {
    const Isa *isa = host_isa();
    int64_t done = 0;
    if (!isa) return -1;
    double start = omp_get_wtime(), end = start;
#pragma omp parallel num_threads(num_threads) reduction(+ : done)
    while (omp_get_wtime() - start < seconds) done += isa->kernels->fma_loop(10000);
    end = omp_get_wtime();
    return done / (end - start);
}
