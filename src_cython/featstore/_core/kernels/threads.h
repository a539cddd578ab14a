/* Split a loop over the cores: a small pool of threads, made at first use, remade in a forked child. What links this has a pool of its
 * own: of the modules one alone does, and lends it to the others. No signal interrupts them: a loop is over when the call returns.
 *
 * No OpenMP: a second runtime beside torch's is trouble, and torch's hangs in a forked child. A caller that finds the pool busy
 * runs its loop itself.
 */
#ifndef FEATSTORE_THREADS_H
#define FEATSTORE_THREADS_H

#include <stdint.h>
#include <time.h>

#define FS_MAX_THREADS 64
#define FS_POLL_NS 50000000 /* between two looks for signals, of a thread that waits */

/* When a wait of pthread_cond_timedwait is interrupted for a look for signals. */
static inline struct timespec fs_next_poll(void) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += FS_POLL_NS;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    return until;
}

typedef void (*fs_body_fn)(void *context, int64_t begin, int64_t end);

/* Run body(context, begin, end) over 0 … n - 1 in chunks, on up to n_threads threads, the caller's included. */
void fs_parallel_for(fs_body_fn body, void *context, int64_t n, int64_t chunk, int n_threads);

#endif
