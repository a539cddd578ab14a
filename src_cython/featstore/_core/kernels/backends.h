/* The two ways to run a job (rowio.h): io_uring from the calling thread, or pread on a pool of threads. */
#ifndef FEATSTORE_BACKENDS_H
#define FEATSTORE_BACKENDS_H

#include <pthread.h>
#include "rowio.h"
#include "uring.h"

typedef int (*fs_poll_fn)(void); /* runs pending signal handlers; non-zero: an exception is set, stop */

/* ---- io_uring ---- */

#define FS_WINDOW 2048 /* reads handed out but not yet retired, in order; several times the depth, so a slow one holds up none */

typedef struct {
    fs_op op;
    uint64_t start, arena_end; /* place in the arena, and the arena's head after it */
    uint32_t len, done;
    unsigned retries;
    int complete;
} fs_slot;

typedef struct {
    fs_ring ring;
    unsigned depth;
    uint8_t *arena;
    uint64_t arena_bytes;
    fs_slot slots[FS_WINDOW];
} fs_uring;

void fs_uring_run(fs_uring *u, fs_job *job, fs_poll_fn poll);

/* ---- pread pool ---- */

typedef struct fs_pool fs_pool;

struct fs_pool {
    pthread_mutex_t lock;
    pthread_cond_t work, idle;
    pthread_t *threads;
    unsigned n_threads, n_started, tickets, active, next_buffer;
    int shutdown;
    uint64_t buffer_bytes;
    uint8_t *arena;
    fs_job *job;
};

/* Stop the threads; nothing is in flight. */
void fs_pool_close(fs_pool *pool);

/* Start the threads; 0 or -errno. */
int fs_pool_open(fs_pool *pool, unsigned n_threads, uint8_t *arena, uint64_t buffer_bytes);

void fs_pool_run(fs_pool *pool, fs_job *job, fs_poll_fn poll);

#endif
