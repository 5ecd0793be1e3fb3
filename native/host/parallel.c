#include <omp.h>

#include "host.h"

#define MIN_PARALLEL_COST 1e5 /* multiply-adds: some 5 us, a few times what it takes to wake the other threads */

void parallel_for(int num_threads, long items, double cost, void (*run)(const void *job, long item), const void *job) {
    int threads = cost < MIN_PARALLEL_COST ? 1 : num_threads < items ? num_threads : (int)items;
    if (threads <= 1) {
        for (long item = 0; item < items; item++) run(job, item);
        return;
    }
    long next = 0;
#pragma omp parallel num_threads(threads)
    for (long item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items;) run(job, item);
}
