/* Shares a job among threads, on a machine that others use too.
 *
 * Items are handed out one at a time, so threads of unequal speed finish together. That does not help when another
 * process has taken a thread's core. Such a thread holds its last item, or has not even begun, for as many milliseconds
 * as the scheduler gives to the other process, and the whole job waits. Two things are taken as a sign of it: a job
 * whose first thread waited that long for the last, and jobs that waited for longer than they worked. A thread without
 * a core runs only when the thread that waits for it has stopped spinning. So the calling thread then works alone for a
 * while and tries again, and doubles the while as long as the sign comes back. Alone it competes with nobody: the
 * scheduler has one core for it and one for the other process.
 *
 * Results do not depend on any of this. The memory of the sign belongs to the calling thread, so models that run in
 * several threads of one process do not disturb one another, except that they share the cores. */
#include <omp.h>
#include <pthread.h>
#include <string.h>

#include "host.h"

#define MIN_PARALLEL_COST 1e5 /* multiply-adds: some 5 us, a few times what it takes to wake the other threads */
#define LONG_WAIT 1e-3        /* seconds: beyond another thread's brief errand, below a scheduler's time slice */
#define WATCHED 4e-3          /* seconds of jobs, after which waiting is compared with working */
#define ALONE_MIN 0.02        /* seconds */
#define ALONE_MAX 1.28

#define MAX_THREADS 256

static void *wait_for(void *gate) {
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* Starts so many threads at once, and ends them. OpenMP ends the process if it cannot start one: this tells before. */
static int try_threads(int count) {
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t others[MAX_THREADS];
    int started = 0, error = 0;
    pthread_mutex_lock(&gate); /* until all are there at once */
    while (started < count && started < MAX_THREADS) {
        if ((error = pthread_create(&others[started], NULL, wait_for, &gate))) break;
        started++;
    }
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < started; i++) pthread_join(others[i], NULL);
    return error;
}

int host_check_threads(int num_threads) {
    int error = try_threads(num_threads - 1);
    if (!error) return 0;
    return fail("threads: %d cannot be started (%s), expected memory for a stack each; lower --threads, or raise the "
                "limits of the process (ulimit -v, -u)", num_threads, strerror(error));
}

static _Thread_local struct {
    double until; /* work alone to then */
    double length;
    double waited, worked; /* since they were last compared */
} alone;

static void note_wait(double start, double first_done, long items, int threads) {
    double now = omp_get_wtime(), per_item = (first_done - start) * threads / items;
    int is_long = now - first_done >= LONG_WAIT + 2 * per_item, is_vain = 0;
    alone.waited += now - first_done;
    alone.worked += first_done - start;
    if (alone.waited + alone.worked > WATCHED) {
        is_vain = alone.waited > alone.worked;
        alone.waited = alone.worked = 0;
    }
    if (!is_long && !is_vain) return;
    int is_again = now - alone.until < alone.length;
    alone.length = !is_again ? ALONE_MIN : alone.length < ALONE_MAX ? 2 * alone.length : ALONE_MAX;
    alone.until = now + alone.length;
}

void parallel_for(int num_threads, long items, double cost, void (*run)(const void *job, long item), const void *job) {
    static _Thread_local int most = 1; /* threads that this one has worked with */
    int threads = cost < MIN_PARALLEL_COST ? 1 : num_threads < items ? num_threads : (int)items;
    double start = threads > 1 ? omp_get_wtime() : 0, first_done = 0;
    if (threads > most && start >= alone.until) {
        if (try_threads(threads - 1)) threads = 1; /* no memory for another stack at the moment: later perhaps */
        else most = threads;
    }
    if (threads <= 1 || start < alone.until) {
        for (long item = 0; item < items; item++) run(job, item);
        return;
    }
    long next = 0;
    int num_done = 0;
#pragma omp parallel num_threads(threads)
    {
        for (long item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items;) run(job, item);
        if (__atomic_fetch_add(&num_done, 1, __ATOMIC_RELAXED) == 0) first_done = omp_get_wtime();
    }
    note_wait(start, first_done, items, threads);
}
