#include "pagestream.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

static int fs_stream_over(fs_stream *s) { return s->closed || s->job.error_kind != FS_OK || s->begun >= s->n_pieces; }

static int fs_stream_can_begin(fs_stream *s) {
    return !fs_stream_over(s) && s->begun < s->allowed && s->begun < s->consumed + s->n_buffers;
}

static uint8_t *fs_stream_buffer(fs_stream *s, uint64_t piece) { return s->arena + piece % s->n_buffers * s->buffer_bytes; }

static uint64_t fs_stream_begin(fs_stream *s) {
    uint64_t piece = s->begun++;
    fs_piece *slot = &s->slots[piece % s->n_buffers];
    slot->page = s->parts ? s->at[piece] : s->pages[piece];
    slot->file = s->parts ? s->files[piece] : 0;
    slot->len = s->counts[piece] * FS_PAGE;
    slot->done = 0;
    slot->retries = 0;
    slot->landed = 0;
    return piece;
}

static int fs_stream_fd(const fs_stream *s, const fs_piece *slot) { return s->parts ? s->parts[slot->file].fd : s->job.fd; }

static int fs_stream_is_good(const fs_stream *s, const fs_piece *slot, uint64_t page, const uint8_t *data) {
    if (!s->parts) return fs_check_page(&s->job, page, data);
    const fs_stream_file *part = &s->parts[slot->file];
    const uint64_t *sums = part->sums[page / FS_SUMS_PER_PAGE];
    return sums && s->job.hash(data, FS_PAGE, &part->secret) == fs_read64((const uint8_t *)(sums + page % FS_SUMS_PER_PAGE));
}

static void fs_stream_fail(fs_stream *s, int kind, int number, uint64_t offset, uint32_t file) {
    pthread_mutex_lock(&s->lock);
    if (s->job.error_kind == FS_OK) s->error_file = file;
    fs_job_fail(&s->job, kind, number, offset);
    pthread_cond_broadcast(&s->landed);
    pthread_cond_broadcast(&s->freed);
    pthread_mutex_unlock(&s->lock);
}

/* A piece is in memory: check its pages and hand it on. */
static void fs_stream_land(fs_stream *s, uint64_t piece) {
    fs_piece *slot = &s->slots[piece % s->n_buffers];
    const uint8_t *data = fs_stream_buffer(s, piece);
    if (s->job.sums)
        for (uint64_t p = 0; p < slot->len / FS_PAGE; p++)
            if (!fs_stream_is_good(s, slot, slot->page + p, data + p * FS_PAGE)) {
                fs_stream_fail(s, FS_ERR_SUM, 0, (slot->page + p) * FS_PAGE, slot->file);
                return;
            }
    pthread_mutex_lock(&s->lock);
    slot->landed = 1;
    s->job.n_reads++;
    s->job.read_bytes += slot->len;
    pthread_cond_broadcast(&s->landed);
    pthread_mutex_unlock(&s->lock);
}

/* What a read that returned `res` means: 1 the piece is whole, 0 go on at slot->done, -1 failed. */
static int fs_stream_progress(fs_stream *s, fs_piece *slot, int64_t res) {
    pthread_mutex_lock(&s->lock); /* the script of injected faults and the error are shared */
    if (s->job.error_kind == FS_OK) s->error_file = slot->file;
    int64_t got = fs_progress(&s->job, fs_inject(&s->job, res), slot->len - slot->done, slot->page * FS_PAGE + slot->done, &slot->retries);
    if (got < 0) {
        pthread_cond_broadcast(&s->landed);
        pthread_cond_broadcast(&s->freed);
    } else {
        slot->done += (uint64_t)got;
    }
    pthread_mutex_unlock(&s->lock);
    return got < 0 ? -1 : slot->done == slot->len;
}

static void fs_stream_stage(fs_stream *s, fs_ring *ring, uint64_t piece) {
    fs_piece *slot = &s->slots[piece % s->n_buffers];
    fs_ring_read(ring, fs_stream_fd(s, slot), fs_stream_buffer(s, piece) + slot->done, (uint32_t)(slot->len - slot->done), slot->page * FS_PAGE + slot->done, piece);
}

void fs_stream_uring(fs_stream *s, fs_ring *ring) {
    for (;;) {
        pthread_mutex_lock(&s->lock);
        /* With nothing in flight no completion comes: wait for the consumer instead. */
        while (!ring->in_flight && !fs_stream_over(s) && !fs_stream_can_begin(s)) pthread_cond_wait(&s->freed, &s->lock);
        while (ring->in_flight < ring->entries && fs_stream_can_begin(s)) fs_stream_stage(s, ring, fs_stream_begin(s));
        pthread_mutex_unlock(&s->lock);
        if (!ring->in_flight) return;
        int r = fs_ring_enter(ring, 1);
        if (r < 0 && r != -EINTR) fs_stream_fail(s, FS_ERR_OS, -r, 0, 0);
        struct fs_cqe cqe;
        while (fs_ring_reap(ring, &cqe)) {
            int whole = fs_stream_progress(s, &s->slots[cqe.user_data % s->n_buffers], cqe.res);
            if (whole > 0)
                fs_stream_land(s, cqe.user_data);
            else if (whole == 0 && s->job.error_kind == FS_OK)
                fs_stream_stage(s, ring, cqe.user_data);
        }
    }
}

void fs_stream_pread(fs_stream *s) {
    for (;;) {
        pthread_mutex_lock(&s->lock);
        while (!fs_stream_over(s) && !fs_stream_can_begin(s)) pthread_cond_wait(&s->freed, &s->lock);
        if (fs_stream_over(s)) {
            pthread_mutex_unlock(&s->lock);
            return;
        }
        uint64_t piece = fs_stream_begin(s);
        pthread_mutex_unlock(&s->lock);
        fs_piece *slot = &s->slots[piece % s->n_buffers];
        int whole = 0;
        while (!whole) {
            int64_t res = pread(fs_stream_fd(s, slot), fs_stream_buffer(s, piece) + slot->done, slot->len - slot->done, (off_t)(slot->page * FS_PAGE + slot->done));
            whole = fs_stream_progress(s, slot, res < 0 ? -errno : res);
        }
        if (whole > 0) fs_stream_land(s, piece);
    }
}

const uint8_t *fs_stream_next(fs_stream *s, uint64_t *n_bytes) {
    pthread_mutex_lock(&s->lock);
    fs_piece *slot = &s->slots[s->consumed % s->n_buffers];
    uint64_t start = 0;
    for (;;) {
        if (s->consumed < s->begun && slot->landed) break;
        if (s->closed || s->job.error_kind != FS_OK || s->consumed >= s->n_pieces || s->consumed >= s->allowed) {
            pthread_mutex_unlock(&s->lock);
            return NULL;
        }
        if (!start) start = fs_nanoseconds();
        pthread_cond_wait(&s->landed, &s->lock);
    }
    if (start) s->waited_ns += fs_nanoseconds() - start;
    pthread_mutex_unlock(&s->lock);
    *n_bytes = slot->len - s->taken;
    return fs_stream_buffer(s, s->consumed) + s->taken;
}

void fs_stream_took(fs_stream *s, uint64_t n_bytes) {
    s->taken += n_bytes;
    if (s->taken < s->slots[s->consumed % s->n_buffers].len) return;
    s->taken = 0;
    pthread_mutex_lock(&s->lock);
    s->slots[s->consumed % s->n_buffers].landed = 0;
    s->consumed++;
    pthread_cond_broadcast(&s->freed);
    pthread_mutex_unlock(&s->lock);
}

int fs_stream_scatter(fs_stream *s, uint64_t row_bytes, uint64_t n, const int32_t *p32, const int64_t *p64, uint8_t *out) {
    const fs_stream_fn stream = fs_choose_stream(out, row_bytes, row_bytes * n);
    uint64_t i = 0, part = 0, left;
    while (i < n) {
        const uint8_t *data = fs_stream_next(s, &left);
        if (!data) return 0;
        const uint64_t all = left;
        if (!part && left >= row_bytes) {
            uint64_t k = left / row_bytes < n - i ? left / row_bytes : n - i;
            uint8_t *dst = p32 || p64 ? out : out + i * row_bytes;
            fs_copy copy = {.src = data, .dst = dst, .dst32 = p32 ? p32 + i : NULL, .dst64 = p64 ? p64 + i : NULL, .row_bytes = row_bytes, .stream = stream};
            fs_copy_range(&copy, 0, (int64_t)k);
            i += k;
            data += k * row_bytes;
            left -= k * row_bytes;
        }
        if (i < n && left) { /* a row that the piece cuts */
            uint64_t k = row_bytes - part < left ? row_bytes - part : left;
            memcpy(out + fs_index(p32, p64, (int64_t)i) * row_bytes + part, data, k);
            left -= k;
            part += k;
            if (part == row_bytes) {
                part = 0;
                i++;
            }
        }
        if (i == n) left -= left % FS_PAGE; /* pieces end with a page */
        fs_stream_took(s, all - left);
    }
    return 1;
}
