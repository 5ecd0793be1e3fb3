/* Measures the machine's ceilings, with which speeds are compared, with the instructions of the kernels. */

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

typedef struct Loop {
    const Kernels *kernels;
    double end; /* by seconds() */
    int64_t *done;
} Loop;

static void fma_item(const void *job, long item) {
    const Loop *loop = job;
    int64_t done = 0;
    (void)item;
    while (seconds() < loop->end) done += loop->kernels->fma_loop(10000);
    __atomic_fetch_add(loop->done, done, __ATOMIC_RELAXED);
}

double colibri_fma_rate(double duration, int num_threads) {
    int64_t done = 0;
    if (!host_isa()) return -1;
    const double start = seconds();
    Loop loop = {host_kernels(), start + duration, &done};
    parallel_for(num_threads, num_threads, 1e9, fma_item, &loop);
    return done / (seconds() - start);
}
