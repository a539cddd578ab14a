#include "packer.h"
#include "threads.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static void fs_packer_give(fs_packer *p, uint8_t *buffer) {
    pthread_mutex_lock(&p->lock);
    p->idle[p->n_idle++] = buffer;
    pthread_cond_broadcast(&p->freed);
    pthread_mutex_unlock(&p->lock);
}

void fs_packer_write(fs_packer *p) {
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (!p->q_len && !p->closed) pthread_cond_wait(&p->queued, &p->lock);
        if (!p->q_len) break;
        fs_write w = p->queue[p->q_head];
        p->q_head = (p->q_head + 1) % p->n_buffers;
        p->q_len--;
        p->writing++;
        int error = p->error_number;
        pthread_mutex_unlock(&p->lock);
        uint64_t done = 0;
        int is_short = 0; /* the write before ended within its first page */
        if ((w.offset + w.len) / FS_PAGE > p->n_sums_pages * FS_SUMS_PER_PAGE) error = EFBIG; /* an extent that the file has not */
        for (uint64_t page = w.offset / FS_PAGE, k = 0; !error && k < w.len / FS_PAGE; page++, k++)
            p->sums[page / FS_SUMS_PER_PAGE * 512 + page % FS_SUMS_PER_PAGE] = p->hash(w.data + k * FS_PAGE, FS_PAGE, &p->secret);
        while (!error && done < w.len) {
            ssize_t r = pwrite(p->fd, w.data + done, w.len - done, (off_t)(w.offset + done));
            if (r < 0 && errno != EINTR) error = errno;
            if (r == 0) error = EIO;
            if (r > 0) done += (uint64_t)r & ~(FS_PAGE - 1); /* a direct write goes on at a whole page */
            if (r > 0 && (uint64_t)r < FS_PAGE && is_short) error = ENOSPC; /* twice: nothing goes on */
            is_short = r > 0 && (uint64_t)r < FS_PAGE;
        }
        pthread_mutex_lock(&p->lock);
        p->writing--;
        p->written_bytes += done;
        if (error && !p->error_number) p->error_number = error;
        p->idle[p->n_idle++] = w.data;
        pthread_cond_broadcast(&p->freed);
    }
    pthread_mutex_unlock(&p->lock);
}

void fs_packer_hand_over(fs_packer *p, uint64_t b) {
    uint64_t len = (p->filled[b] + FS_PAGE - 1) & ~(FS_PAGE - 1);
    memset(p->buffer[b] + p->filled[b], 0, len - p->filled[b]);
#if defined(__x86_64__)
    _mm_sfence(); /* streamed stores, before another thread reads them */
#endif
    pthread_mutex_lock(&p->lock);
    p->queue[(p->q_head + p->q_len) % p->n_buffers] = (fs_write){p->buffer[b], p->offset[b], len};
    p->q_len++;
    pthread_cond_signal(&p->queued);
    pthread_mutex_unlock(&p->lock);
    p->offset[b] += len;
    p->buffer[b] = NULL;
    p->filled[b] = 0;
}

int fs_packer_append(fs_packer *p, uint64_t b, const uint8_t *src, uint64_t len) {
    while (len) {
        if (!p->buffer[b]) {
            pthread_mutex_lock(&p->lock);
            while (!p->n_idle && !p->error_number && !p->closed) pthread_cond_wait(&p->freed, &p->lock);
            if (p->error_number || p->closed) {
                pthread_mutex_unlock(&p->lock);
                return 0;
            }
            p->buffer[b] = p->idle[--p->n_idle];
            pthread_mutex_unlock(&p->lock);
        }
        uint64_t room = p->buffer_bytes - p->filled[b], k = len < room ? len : room;
        uint8_t *dst = p->buffer[b] + p->filled[b];
        /* The drive reads it next, not we: past the cache. */
        if (p->stream && k % 64 == 0 && (uintptr_t)dst % 64 == 0) p->stream(dst, src, k);
        else memcpy(dst, src, k);
        p->filled[b] += k;
        src += k;
        len -= k;
        if (p->filled[b] == p->buffer_bytes) fs_packer_hand_over(p, b);
    }
    return 1;
}

/* Copy what a piece, bytes lo … hi - 1 of the file, has of the rows that are kept; 0 where they do not ascend or lie in no piece. */
static int fs_packer_keep(fs_packer *p, const uint8_t *data, uint64_t lo, uint64_t hi) {
    const uint64_t row_bytes = p->source.row_bytes;
    uint64_t before = 0;
    for (; p->kept < p->n_kept; p->kept++) {
        const uint64_t start = fs_row_start(&p->source, (uint64_t)p->kept_rows[p->kept]), stop = start + row_bytes;
        if (start >= hi) return 1;
        if (stop <= lo || start < before) return 0;
        before = stop;
        const uint64_t a = start > lo ? start : lo, z = stop < hi ? stop : hi;
        memcpy(p->kept_at + p->kept * row_bytes + (a - start), data + (a - lo), z - a);
        if (stop > hi) return 1; /* the rest is in the next piece */
    }
    return 1;
}

int64_t fs_packer_run(fs_packer *p, fs_stream *s, int64_t most) {
    for (int64_t taken = 0; taken < most; taken++) {
        uint64_t n_bytes;
        const uint8_t *data = fs_stream_next(s, &n_bytes);
        if (!data) return taken;
        const uint64_t lo = s->pages[s->consumed] * FS_PAGE, hi = lo + n_bytes, row_bytes = p->source.row_bytes;
        for (uint64_t b = 0; b < p->n_batches; b++) {
            uint64_t i = p->cursor[b];
            const uint64_t end = p->end[b];
            uint64_t before = 0; /* the end of the row before */
            while (i < end) {
                uint64_t row = (uint64_t)(p->rows32 ? p->rows32[i] : p->rows64[i]);
                uint64_t start = fs_row_start(&p->source, row), stop = start + row_bytes;
                if (start >= hi) break;
                if (stop <= lo || start < before) return -2;
                before = stop;
                uint64_t a = start > lo ? start : lo, z = stop < hi ? stop : hi;
                if (!fs_packer_append(p, b, data + (a - lo), z - a)) return -1;
                if (stop > hi) break; /* the rest is in the next piece */
                i++;
            }
            p->cursor[b] = i;
        }
        if (!fs_packer_keep(p, data, lo, hi)) return -2;
        fs_stream_took(s, n_bytes);
    }
    return most;
}

int fs_packer_flush(fs_packer *p) {
    for (uint64_t b = 0; b < p->n_batches; b++) {
        const uint64_t tail = p->filled[b] % FS_PAGE;
        uint8_t *full = p->buffer[b];
        if (!full || p->filled[b] < FS_PAGE) continue;
        p->buffer[b] = NULL;
        const uint64_t whole = p->filled[b] - tail;
        p->filled[b] = 0;
        if (tail && !fs_packer_append(p, b, full + whole, tail)) { /* takes another buffer */
            fs_packer_give(p, full);
            return 0;
        }
        uint8_t *rest = p->buffer[b];
        p->buffer[b] = full;
        p->filled[b] = whole;
        fs_packer_hand_over(p, b);
        p->buffer[b] = rest;
        p->filled[b] = tail;
    }
    return 1;
}

int fs_packer_drain(fs_packer *p) {
    const struct timespec until = fs_next_poll();
    int error = 0;
    pthread_mutex_lock(&p->lock);
    while ((p->q_len || p->writing) && !error) error = pthread_cond_timedwait(&p->freed, &p->lock, &until);
    const int drained = !p->q_len && !p->writing;
    pthread_mutex_unlock(&p->lock);
    return drained;
}
