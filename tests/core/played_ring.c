/* Runs a gather (backends.c) or a stream (pagestream.c) on an io_uring whose kernel is played: uring.c's system calls come here.
 *
 * Arguments: "gather" or "stream", depth, number of reads, 0 to complete the oldest read first or 1 the newest, and a script: what
 * each io_uring_enter does, a letter each, the last for ever.
 *   r  take all reads that are staged, complete one if the caller waits
 *   h  take them, complete none, as if a signal had come (EINTR)
 *   p  take half of them, complete none
 *   k  as r, after 20 ms, of which a signal ends the wait; it returns what it took, so the caller does not see that
 *   a  refuse: EAGAIN; b: EBUSY; x: ENXIO
 * While the caller sleeps, the kernel completes one read that it has taken.
 *
 * Prints, a line a wait of the script's r, how many reads were in flight and how many had not been handed out yet; then the reads
 * done, the error's kind and number, reads that the kernel still had at the end, and sleeps. A second run, whose kernel refuses
 * nothing, must succeed on the same ring. Exit status 1: rows are wrong where no error was told, or the second run failed. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static long played_call(long number, ...);
static void *played_map(size_t bytes, uint64_t offset);
static void played_sleep(void);
#define syscall(...) played_call(__VA_ARGS__)
#define mmap(address, bytes, protection, flags, fd, offset) played_map(bytes, (uint64_t)(offset))
#define munmap(address, bytes) free(address)
#define madvise(...) (void)0
#define nanosleep(...) played_sleep()
#define close(fd) (void)0

#include "backends.c"
#include "pagestream.c"
#include "rowcopy.c"
#include "rowio.c"
#include "starts.c"
#include "uring.c"
#include "xxh3.c"

enum { MOST = 4096 };
static struct { uint32_t head, tail, mask, array[MOST]; } *queue;
static struct { uint32_t head, tail, mask, unused; struct fs_cqe entries[2 * MOST]; } *landed;
static struct fs_sqe *sqes, taken[MOST];
static unsigned n_taken, newest_first, n_sleeps, quiet, n_signals;
static uint64_t n_reads, n_begun;
static const char *script = "r"; /* setting up enters, too */

static void land(void) {
    if (!n_taken) return;
    unsigned which = newest_first ? n_taken - 1 : 0;
    const struct fs_sqe read = taken[which];
    memmove(&taken[which], &taken[which + 1], (n_taken - which - 1) * sizeof *taken);
    n_taken--;
    for (uint64_t at = 0; at < read.len; at += 8) memcpy((char *)(uintptr_t)read.addr + at, &(uint64_t){read.off + at}, 8);
    landed->entries[landed->tail++ & landed->mask] = (struct fs_cqe){read.user_data, (int32_t)read.len, 0};
}

static void played_sleep(void) {
    n_sleeps++;
    land();
}

static long refuse(int error) {
    errno = error;
    return -1;
}

static long played_call(long number, ...) {
    va_list list;
    va_start(list, number);
    if (number == __NR_io_uring_setup) {
        const unsigned entries = va_arg(list, unsigned);
        struct fs_uring_params *p = va_arg(list, struct fs_uring_params *);
        va_end(list);
        for (p->sq_entries = 1; p->sq_entries < entries; p->sq_entries *= 2) {}
        p->cq_entries = 2 * p->sq_entries;
        p->features = 0;
        p->sq_off = (struct fs_sq_offsets){.head = 0, .tail = 4, .ring_mask = 8, .array = 12};
        p->cq_off = (struct fs_cq_offsets){.head = 0, .tail = 4, .ring_mask = 8, .cqes = 16};
        queue = calloc(1, sizeof *queue);
        landed = calloc(1, sizeof *landed);
        sqes = calloc(MOST, sizeof *sqes);
        queue->mask = p->sq_entries - 1;
        landed->mask = p->cq_entries - 1;
        return 1000;
    }
    (void)va_arg(list, int);
    const unsigned n_staged = va_arg(list, unsigned), min_complete = va_arg(list, unsigned);
    va_end(list);
    if (n_staged != queue->tail - queue->head) abort();
    const char what = *script;
    if (script[1]) script++;
    if (what == 'a' || what == 'b' || what == 'x') return refuse(what == 'a' ? EAGAIN : what == 'b' ? EBUSY : ENXIO);
    const unsigned n = what == 'p' ? n_staged / 2 : n_staged;
    for (unsigned i = 0; i < n; i++) taken[n_taken++] = sqes[queue->array[queue->head++ & queue->mask]];
    n_begun += n;
    if (what == 'k') {
        n_signals++;
        poll(NULL, 0, 20);
        land();
    }
    if (what == 'r' && min_complete) {
        if (!quiet) printf("%u %llu\n", n_taken, (unsigned long long)(n_reads - n_begun));
        land();
    }
    return n || what != 'h' ? (long)n : refuse(EINTR);
}

static void *played_map(size_t bytes, uint64_t offset) {
    (void)bytes;
    return offset == FS_OFF_SQ_RING ? (void *)queue : offset == FS_OFF_CQ_RING ? (void *)landed : (void *)sqes;
}

static int is_signalled(void) { return n_signals > 0; }

/* Every other page, so that each row is a read. */
static fs_job gather(fs_uring *ring, uint8_t *out) {
    fs_job job = {0};
    uint64_t *keys = calloc(n_reads, sizeof *keys);
    for (uint64_t i = 0; i < n_reads; i++) keys[i] = (2 * i) << FS_INDEX_BITS | i;
    job.n = n_reads;
    job.keys = keys;
    job.row_bytes = job.group_bytes = FS_PAGE;
    job.group_rows = job.cap_pages = 1;
    job.out = out;
    fs_uring_run(ring, &job, is_signalled);
    free(keys);
    return job;
}

static fs_job stream(fs_ring *ring, uint8_t *out) {
    fs_stream s = {.buffer_bytes = FS_PAGE, .n_buffers = (unsigned)n_reads, .n_pieces = n_reads, .allowed = n_reads, .arena = out};
    uint64_t *pages = calloc(n_reads, sizeof *pages);
    uint32_t *counts = calloc(n_reads, sizeof *counts);
    for (uint64_t i = 0; i < n_reads; i++) pages[i] = 2 * i, counts[i] = 1;
    s.pages = pages, s.counts = counts;
    s.slots = calloc(n_reads, sizeof *s.slots);
    pthread_mutex_init(&s.lock, NULL);
    pthread_cond_init(&s.landed, NULL);
    pthread_cond_init(&s.freed, NULL);
    fs_stream_uring(&s, ring);
    free(pages), free(counts), free(s.slots);
    return s.job;
}

static int is_right(const uint8_t *out) {
    for (uint64_t i = 0; i < n_reads; i++)
        for (uint64_t at = 0, word; at < FS_PAGE; at += 8) {
            memcpy(&word, out + i * FS_PAGE + at, 8);
            if (word != 2 * i * FS_PAGE + at) return 0;
        }
    return 1;
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    const int is_stream = !strcmp(argv[1], "stream");
    n_reads = (uint64_t)atoi(argv[3]);
    newest_first = (unsigned)atoi(argv[4]);
    fs_uring *ring = calloc(1, sizeof *ring);
    uint8_t *out = malloc(n_reads * FS_PAGE);
    ring->depth = (unsigned)atoi(argv[2]);
    ring->arena_bytes = MOST * FS_PAGE;
    ring->arena = malloc(ring->arena_bytes);
    if (fs_ring_open(&ring->ring, ring->depth)) return 2;
    int is_good = 1;
    for (int run = 0; run < 2; run++) {
        memset(out, 255, n_reads * FS_PAGE);
        script = run ? "r" : argv[5];
        quiet = run, n_signals = 0;
        const fs_job job = is_stream ? stream(&ring->ring, out) : gather(ring, out);
        is_good &= job.error_kind ? !run : is_right(out);
        if (!run) printf("%llu %d %d %u %u\n", (unsigned long long)job.n_reads, job.error_kind, job.error_number, n_taken, n_sleeps);
    }
    fs_ring_close(&ring->ring, 1);
    free(ring->arena), free(ring), free(out);
    return !is_good;
}
