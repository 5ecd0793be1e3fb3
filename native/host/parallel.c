/* Shares a job's items among threads that stay, on a machine that others use too.
 *
 * Each calling thread has a team of its own. An item belongs to one of its workers from the start, neighbouring ones to
 * the same; who is done with its own takes the others' last ones. So threads of unequal speed finish together, and one
 * that has no core holds nothing but the item that it has begun. That one is done again by the caller, where it may be:
 * see may_be_taken(). A worker whose item was taken, and that came back much later, has no core of its own. It stays
 * away for a while, twice as long as the last time where that was not long ago: the cores left are for the others.
 *
 * Workers wait for the next job of a step awake, then they sleep. Results do not depend on any of this. */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "host.h"

#define MIN_PARALLEL_COST 1e5 /* multiply-adds: some 5 us, a few times what it takes to hand a job out */
#define AWAKE 50e-6           /* seconds that a worker waits awake: longer than what one thread does between jobs */
#define NAP 500e-6            /* of sleep while a job runs: where a core falls idle, the scheduler finds it a thread */
#define GRACE 20e-6           /* seconds, and twice an item's time, until an item that was begun is done again */
#define LONG_WAIT 1e-3        /* seconds: beyond a core's brief errand, below a scheduler's time slice */
#define AWAY_MIN 0.02         /* seconds */
#define AWAY_MAX 1.28
#define STACK_BYTES (1 << 20)
#define MAX_THREADS 256

enum { IDLE, BUSY, OPEN, TAKEN };

/* A worker, on cache lines of its own. */
typedef struct Worker {
    uint64_t range; /* items not begun: the first in the low half, the end in the high one */
    int32_t state;  /* IDLE: has no item; BUSY: perhaps one; OPEN: one that may be taken; TAKEN: had one */
    int32_t is_away, is_working;
    int64_t item;
    double taken; /* when its item was */
    double back, length; /* of the time that it was away last */
    struct Team *team;
    pthread_t thread;
} __attribute__((aligned(128))) Worker;

typedef struct Team {
    uint32_t num_jobs __attribute__((aligned(128))); /* so far; what workers wait for */
    int32_t is_running, is_over, num_active; /* workers from num_active on have no part in the job */
    void (*run)(const void *job, long item);
    const void *job;
    int32_t num_sleeping __attribute__((aligned(128)));
    int32_t num_workers, stays_awake;
    Worker workers[MAX_THREADS]; /* the first is the caller */
} Team;

#define GET(place) __atomic_load_n(&(place), __ATOMIC_ACQUIRE)
#define PUT(place, value) __atomic_store_n(&(place), value, __ATOMIC_SEQ_CST)
#define ADD_TO(place, value) __atomic_fetch_add(&(place), value, __ATOMIC_SEQ_CST)

static int32_t num_taken;     /* items of jobs that are over, which a worker still works on */
static pthread_key_t own_key; /* a thread's Worker. A _Thread_local would end the process where memory for it lacks */
static pthread_once_t once = PTHREAD_ONCE_INIT;

double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

static struct timespec timespec_of(double time) {
    return (struct timespec){(time_t)time, (long)(1e9 * (time - (time_t)time))};
}

static void sleep_for(double time) {
    struct timespec left = timespec_of(time);
    nanosleep(&left, NULL);
}

/* Sleeps until somebody wakes those at this word, or for `time`, unless the word is another number by now. */
static void sleep_at(void *word, uint32_t number, const struct timespec *time) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, number, time, NULL, 0);
}

static void wake_at(void *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0); }

static void relax(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

static int swap(int32_t *state, int32_t from, int32_t to) {
    return __atomic_compare_exchange_n(state, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* This thread's Worker while it works on a job, else NULL. */
static Worker *own_worker(void) {
    Worker *worker = pthread_getspecific(own_key);
    return worker && worker->is_working ? worker : NULL;
}

void may_be_taken(void) {
    Worker *own = own_worker();
    if (own) PUT(own->state, OPEN);
}

int was_taken(void) {
    Worker *own = own_worker();
    return own && !swap(&own->state, OPEN, BUSY);
}

int colibri_rest(void) {
    while (GET(num_taken)) sleep_for(NAP);
    return 0;
}

/* An item of that worker's, its first or its last, that is this thread's from now on; -1: none. */
static long claim(Worker *worker, int from_end) {
    uint64_t range = GET(worker->range);
    while ((uint32_t)range < range >> 32) {
        uint64_t left = from_end ? range - (1ULL << 32) : range + 1;
        if (__atomic_compare_exchange_n(&worker->range, &range, left, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return (long)(from_end ? left >> 32 : (uint32_t)range);
    }
    return -1;
}

/* The next item for a worker: of its own, or of the one that has most left. */
static long next_item(Team *t, Worker *worker) {
    long item = claim(worker, 0);
    while (item < 0) {
        Worker *richest = NULL;
        int64_t most = 0;
        for (Worker *other = t->workers; other < t->workers + t->num_workers; other++) {
            uint64_t range = GET(other->range);
            int64_t left = (int64_t)(range >> 32) - (uint32_t)range;
            if (left > most) most = left, richest = other;
        }
        if (!richest) return -1;
        item = claim(richest, 1);
    }
    return item;
}

/* Works on items until there are none to begin; the number done. */
static long take_part(Team *t, Worker *worker) {
    long count = 0, item;
    worker->is_working = 1;
    PUT(worker->state, BUSY);
    while ((item = next_item(t, worker)) >= 0) {
        worker->item = item;
        t->run(t->job, item);
        if (GET(worker->state) == TAKEN) break;
        count++;
    }
    worker->is_working = 0;
    return count;
}

static void stay_away(Worker *worker) {
    double now = seconds();
    ADD_TO(num_taken, -1);
    if (now - worker->taken >= LONG_WAIT) {
        int is_again = now - worker->back < worker->length;
        worker->length = !is_again ? AWAY_MIN : worker->length < AWAY_MAX ? 2 * worker->length : AWAY_MAX;
        PUT(worker->is_away, 1);
        PUT(worker->state, IDLE);
        const struct timespec length = timespec_of(worker->length);
        sleep_at(&worker->team->is_over, 0, &length);
        worker->back = seconds();
        PUT(worker->is_away, 0);
    }
    PUT(worker->state, IDLE);
}

static void sleep_until_job(Team *t, uint32_t seen) {
    struct timespec nap = timespec_of(NAP);
    ADD_TO(t->num_sleeping, 1);
    sleep_at(&t->num_jobs, seen, GET(t->is_running) ? &nap : NULL);
    ADD_TO(t->num_sleeping, -1);
}

/* Waits until there are other jobs than `seen`; their number. */
static uint32_t wait_for_job(Team *t, uint32_t seen) {
    double asleep = GET(t->stays_awake) ? seconds() + AWAKE : 0;
    for (int i = 1; GET(t->num_jobs) == seen; i++) {
        relax();
        if (i % 32 == 0 && seconds() > asleep) sleep_until_job(t, seen);
    }
    return GET(t->num_jobs);
}

static void *work(void *argument) {
    Worker *worker = argument;
    Team *t = worker->team;
    if (pthread_setspecific(own_key, worker)) return NULL;
    for (uint32_t seen = 0; seen = wait_for_job(t, seen), !GET(t->is_over);) {
        if (worker - t->workers >= GET(t->num_active)) continue;
        take_part(t, worker);
        if (GET(worker->state) == TAKEN) stay_away(worker);
        PUT(worker->state, IDLE);
    }
    return NULL;
}

static int start(pthread_t *thread, void *(*run)(void *), void *argument) {
    pthread_attr_t attributes;
    sigset_t all, before;
    sigfillset(&all); /* signals are for the program's own threads; but a fault is the one's that has it */
    for (int i = 0; i < 4; i++) sigdelset(&all, (const int[]){SIGBUS, SIGSEGV, SIGFPE, SIGILL}[i]);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, &attributes, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return error;
}

static void announce(Team *t) {
    ADD_TO(t->num_jobs, 1);
    if (GET(t->num_sleeping)) wake_at(&t->num_jobs);
}

/* Ends the team of a thread that ends; a worker has none of its own. */
static void end_team(void *argument) {
    Team *t = ((Worker *)argument)->team;
    if (argument != t->workers) return;
    PUT(t->is_over, 1);
    wake_at(&t->is_over);
    announce(t);
    for (int i = 1; i < t->num_workers; i++) pthread_join(t->workers[i].thread, NULL);
    free(t);
}

/* A fork has the memory of its parent's threads, but not the threads. */
static void forget_team(void) {
    num_taken = 0;
    pthread_setspecific(own_key, NULL);
}

static void prepare(void) {
    pthread_key_create(&own_key, end_team);
    pthread_atfork(NULL, NULL, forget_team);
}

/* This thread's team, of so many workers where there is memory for their stacks, else of fewer; NULL: for none. */
static Team *team_of(int num_threads) {
    Worker *own = pthread_getspecific(own_key);
    Team *t = own ? own->team : NULL;
    if (!t) {
        if (posix_memalign((void **)&t, 128, sizeof *t)) return NULL;
        memset(t, 0, sizeof *t);
        t->num_workers = 1;
        t->workers[0].team = t;
        if (pthread_setspecific(own_key, t->workers)) return free(t), NULL;
    }
    for (; t->num_workers < num_threads && t->num_workers < MAX_THREADS; t->num_workers++) {
        Worker *worker = &t->workers[t->num_workers];
        worker->team = t;
        if (start(&worker->thread, work, worker)) break;
        cpu_set_t cores;
        PUT(t->stays_awake, !sched_getaffinity(0, sizeof cores, &cores) && t->num_workers < CPU_COUNT(&cores));
    }
    return t;
}

/* Gives each worker that is there its share of the items. */
static void share_out(Team *t, int num_threads, long items) {
    int present[MAX_THREADS], count = 0;
    for (int i = 0; i < t->num_workers && i < num_threads; i++)
        if (!GET(t->workers[i].is_away) && GET(t->workers[i].state) != TAKEN) present[count++] = i;
    PUT(t->num_active, num_threads);
    for (int i = 0; i < count; i++) {
        uint64_t first = items * i / count, end = items * (i + 1) / count;
        __atomic_store_n(&t->workers[present[i]].range, first | end << 32, __ATOMIC_RELEASE);
    }
}

/* Does the item of a worker again, if it may be taken. */
static void take(Team *t, Worker *worker) {
    ADD_TO(num_taken, 1);
    worker->taken = seconds();
    if (swap(&worker->state, OPEN, TAKEN)) t->run(t->job, worker->item);
    else ADD_TO(num_taken, -1);
}

/* Waits until all items are done. */
static void finish(Team *t, double patience) {
    double begin = seconds();
    for (Worker *worker = t->workers + 1; worker < t->workers + t->num_workers; worker++) {
        for (int i = 1, state; (state = GET(worker->state)) != IDLE && state != TAKEN; i++) {
            relax();
            if (i % 32) continue;
            double waited = seconds() - begin;
            if (waited > patience && state == OPEN) take(t, worker);
            else if (waited > LONG_WAIT) sleep_for(NAP);
        }
    }
}

void parallel_for(int num_threads, long items, double cost, void (*run)(const void *job, long item), const void *job) {
    pthread_once(&once, prepare);
    int threads = cost < MIN_PARALLEL_COST || own_worker() ? 1 : num_threads < items ? num_threads : (int)items;
    Team *t = threads > 1 ? team_of(threads) : NULL;
    if (!t) {
        for (long item = 0; item < items; item++) run(job, item);
        return;
    }
    double begin = seconds();
    t->run = run;
    t->job = job;
    PUT(t->is_running, 1);
    share_out(t, threads, items);
    announce(t);
    long count = take_part(t, t->workers);
    finish(t, GRACE + 2 * (seconds() - begin) / (count + 1));
    PUT(t->is_running, 0);
}

static void *wait_for(void *gate) {
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* Starts so many threads at once, and ends them. */
int host_check_threads(int num_threads) {
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t others[MAX_THREADS];
    int started = 0, error = 0;
    pthread_mutex_lock(&gate); /* until all are there at once */
    while (started < num_threads - 1 && started < MAX_THREADS) {
        if ((error = start(&others[started], wait_for, &gate))) break;
        started++;
    }
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < started; i++) pthread_join(others[i], NULL);
    if (!error) return 0;
    return fail("threads: %d cannot be started (%s), expected memory for a stack each; lower --threads, or raise the "
                "limits of the process (ulimit -v, -u)", num_threads, strerror(error));
}
