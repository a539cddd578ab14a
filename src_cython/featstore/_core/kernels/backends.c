#include "backends.h"
#include "rowcopy.h"
#include "starts.h"
#include "threads.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

static void fs_uring_stage(fs_uring *u, const fs_job *job, uint64_t seq) {
    fs_slot *slot = &u->slots[seq % FS_WINDOW];
    fs_ring_read(&u->ring, job->fd, u->arena + slot->start + slot->done, slot->len - slot->done,
                 slot->op.page0 * FS_PAGE + slot->done, seq);
}

void fs_uring_run(fs_uring *u, fs_job *job, fs_poll_fn poll) {
    uint64_t head = 0, tail = 0, arena_head = 0, arena_tail = 0, next_poll = fs_nanoseconds() + FS_POLL_NS;
    const unsigned *in_flight = &u->ring.in_flight;
    int pending = 0, exhausted = 0;
    fs_op op;
    for (;;) {
        /* Keep the queue full: refill as completions arrive, no barriers. */
        while (!atomic_load_explicit(&job->stop, memory_order_relaxed) && *in_flight < u->depth && head - tail < FS_WINDOW) {
            if (!pending && !(pending = fs_next_op(job, &op))) {
                exhausted = 1;
                break;
            }
            uint64_t len = (op.page1 - op.page0) * FS_PAGE, at = arena_head % u->arena_bytes;
            uint64_t skip = at + len > u->arena_bytes ? u->arena_bytes - at : 0;
            if (arena_head + skip + len - arena_tail > u->arena_bytes) break;
            fs_slot *slot = &u->slots[head % FS_WINDOW];
            slot->op = op;
            slot->start = (arena_head + skip) % u->arena_bytes;
            arena_head += skip + len;
            slot->arena_end = arena_head;
            slot->len = (uint32_t)len;
            slot->done = 0;
            slot->retries = 0;
            slot->complete = 0;
            fs_uring_stage(u, job, head++);
            pending = 0;
        }
        if (!*in_flight) {
            if (exhausted || atomic_load(&job->stop)) break;
            continue;
        }
        int r = fs_ring_enter(&u->ring, *in_flight >= 64 ? 16 : 1);
        if (r < 0 && r != -EINTR) {
            fs_job_fail(job, FS_ERR_OS, -r, 0);
        } else if (r || fs_nanoseconds() >= next_poll) { /* a wait that a signal ended returns 0 if it had reads to begin */
            if (!atomic_load(&job->stop) && poll()) fs_job_fail(job, FS_ERR_SIGNAL, 0, 0);
            next_poll = fs_nanoseconds() + FS_POLL_NS;
        }
        struct fs_cqe cqe;
        while (fs_ring_reap(&u->ring, &cqe)) {
            fs_slot *slot = &u->slots[cqe.user_data % FS_WINDOW];
            uint64_t offset = slot->op.page0 * FS_PAGE + slot->done, bad_page;
            int64_t got = fs_progress(job, fs_inject(job, cqe.res), slot->len - slot->done, offset, &slot->retries);
            if (got >= 0) {
                slot->done += (uint32_t)got;
                if (slot->done < slot->len && !atomic_load_explicit(&job->stop, memory_order_relaxed)) {
                    fs_uring_stage(u, job, cqe.user_data);
                    continue;
                }
            }
            if (slot->done == slot->len && !atomic_load_explicit(&job->stop, memory_order_relaxed)) {
                job->n_reads++;
                job->read_bytes += slot->len;
                if (fs_finish_op(job, &slot->op, u->arena + slot->start, &bad_page) != FS_OK)
                    fs_job_fail(job, FS_ERR_SUM, 0, bad_page * FS_PAGE);
            }
            slot->complete = 1;
        }
        while (tail < head && u->slots[tail % FS_WINDOW].complete) arena_tail = u->slots[tail++ % FS_WINDOW].arena_end;
    }
}

static void fs_pool_work(fs_pool *pool, fs_job *job, uint8_t *buf) {
    fs_op op;
    for (;;) {
        pthread_mutex_lock(&pool->lock);
        int got_op = !atomic_load(&job->stop) && fs_next_op(job, &op);
        pthread_mutex_unlock(&pool->lock);
        if (!got_op) return;
        uint64_t len = (op.page1 - op.page0) * FS_PAGE, done = 0, bad_page = 0, offset = op.page0 * FS_PAGE;
        unsigned retries = 0;
        int kind = FS_OK;
        while (done < len) {
            int64_t res = pread(job->fd, buf + done, len - done, (off_t)(offset + done));
            if (res < 0) res = -errno;
            if (job->script || res != (int64_t)(len - done)) {
                pthread_mutex_lock(&pool->lock);
                res = fs_progress(job, fs_inject(job, res), len - done, offset + done, &retries);
                pthread_mutex_unlock(&pool->lock);
                if (res < 0) return;
            }
            done += (uint64_t)res;
        }
        job->n_reads++;
        job->read_bytes += len;
        kind = fs_finish_op(job, &op, buf, &bad_page);
        if (kind != FS_OK) {
            pthread_mutex_lock(&pool->lock);
            fs_job_fail(job, kind, 0, bad_page * FS_PAGE);
            pthread_mutex_unlock(&pool->lock);
        }
    }
}

static void *fs_pool_main(void *arg) {
    fs_pool *pool = (fs_pool *)arg;
    prctl(PR_SET_NAME, "fs-pread");
    pthread_mutex_lock(&pool->lock);
    uint8_t *buf = pool->arena + pool->buffer_bytes * pool->next_buffer++;
    for (;;) {
        while (!pool->tickets && !pool->shutdown) pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->shutdown) break;
        pool->tickets--;
        pool->active++;
        fs_job *job = pool->job;
        pthread_mutex_unlock(&pool->lock);
        fs_pool_work(pool, job, buf);
        pthread_mutex_lock(&pool->lock);
        if (--pool->active == 0 && !pool->tickets) pthread_cond_signal(&pool->idle);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

void fs_pool_close(fs_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->shutdown = 1;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (unsigned i = 0; i < pool->n_started; i++) pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->idle);
    pthread_mutex_destroy(&pool->lock);
    free(pool->threads);
    pool->threads = NULL;
    pool->n_started = 0;
}

int fs_pool_open(fs_pool *pool, unsigned n_threads, uint8_t *arena, uint64_t buffer_bytes) {
    memset(pool, 0, sizeof *pool);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->idle, NULL);
    pthread_cond_init(&pool->work, NULL);
    pool->arena = arena;
    pool->buffer_bytes = buffer_bytes;
    pool->n_threads = n_threads;
    pool->threads = (pthread_t *)calloc(n_threads, sizeof(pthread_t));
    if (!pool->threads) return -ENOMEM;
    int error;
    pool->n_started = (unsigned)fs_start_threads((int)n_threads, fs_pool_main, pool, pool->threads, &error);
    if (error && pool->n_started < 4) { /* a few threads do, slower; fewer is a failure that must be named */
        fs_pool_close(pool);
        return -error;
    }
    pool->n_threads = pool->n_started;
    return 0;
}

void fs_pool_run(fs_pool *pool, fs_job *job, fs_poll_fn poll) {
    /* No more threads than there can be reads: waking one costs more than a small gather. */
    uint64_t reads = job->n * (1 + job->row_bytes / (job->cap_pages * FS_PAGE));
    uint64_t wanted = reads < pool->n_threads ? reads : pool->n_threads;
    pthread_mutex_lock(&pool->lock);
    pool->job = job;
    pool->tickets = (unsigned)wanted;
    if (wanted == pool->n_threads) pthread_cond_broadcast(&pool->work);
    else
        for (uint64_t i = 0; i < wanted; i++) pthread_cond_signal(&pool->work);
    while (pool->tickets || pool->active) {
        const struct timespec until = fs_next_poll();
        if (pthread_cond_timedwait(&pool->idle, &pool->lock, &until) == ETIMEDOUT && !atomic_load(&job->stop)) {
            pthread_mutex_unlock(&pool->lock);
            int interrupted = poll();
            pthread_mutex_lock(&pool->lock);
            if (interrupted) fs_job_fail(job, FS_ERR_SIGNAL, 0, 0);
        }
    }
    pool->job = NULL;
    pthread_mutex_unlock(&pool->lock);
}
