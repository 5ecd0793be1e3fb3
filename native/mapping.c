/* A file that is cut off while it is mapped faults at the first touch of what is gone. Here that fault gets words. */
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "colibri.h"
#include "error.h"

#define MAX_GUARDS 64 /* the mappings beyond these go without words */
#define MAX_LINE 1024

typedef struct Guard {
    uintptr_t start;
    volatile int64_t bytes; /* 0: free */
    int64_t length;         /* of the line */
    char line[MAX_LINE];
} Guard;

static Guard guards[MAX_GUARDS];
static struct sigaction previous;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Calls only what a signal handler may call. A fault elsewhere is as it would be without this handler. */
static void on_fault(int number, siginfo_t *info, void *context) {
    static int told;
    (void)context;
    uintptr_t address = (uintptr_t)info->si_addr;
    for (const Guard *guard = guards; info->si_code > 0 && guard < guards + MAX_GUARDS; guard++) {
        if (address - guard->start >= (uint64_t)guard->bytes) continue;
        while (__atomic_exchange_n(&told, 1, __ATOMIC_SEQ_CST)) pause(); /* another thread is writing the line */
        ssize_t written = write(STDERR_FILENO, guard->line, guard->length);
        (void)written;
        _exit(2);
    }
    sigaction(number, &previous, NULL); /* the access is repeated on return; a signal that was sent is not */
    if (info->si_code <= 0) raise(number);
}

static int install(void) {
    static int installed;
    if (installed) return 0;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    if (sigaction(SIGBUS, &action, &previous)) return fail("SIGBUS: sigaction failed, expected to handle it");
    installed = 1;
    return 0;
}

int colibri_guard(const void *data, int64_t bytes, const char *line) {
    pthread_mutex_lock(&lock);
    Guard *guard = guards, *end = guards + MAX_GUARDS;
    while (guard < end && guard->bytes) guard++;
    int result = install();
    if (!result && guard < end) {
        guard->start = (uintptr_t)data;
        guard->length = strnlen(line, MAX_LINE);
        memcpy(guard->line, line, guard->length);
        __atomic_store_n(&guard->bytes, bytes, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int colibri_unguard(const void *data) {
    colibri_rest();
    pthread_mutex_lock(&lock);
    for (Guard *guard = guards; guard < guards + MAX_GUARDS; guard++)
        if (guard->bytes && guard->start == (uintptr_t)data) {
            guard->bytes = 0;
            break;
        }
    pthread_mutex_unlock(&lock);
    return 0;
}
