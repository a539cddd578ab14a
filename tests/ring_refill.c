/* Runs fs_uring_run (backends.h) on a ring that is played: each wait completes one read, the oldest or the newest of those in
 * flight. Prints, a line a wait, how many reads were in flight and how many had not been handed out yet; then the reads done.
 * Arguments: depth, number of reads, 0 for the oldest or 1 for the newest first. */
#define FEATSTORE_URING_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fs_cqe { uint64_t user_data; int32_t res; uint32_t flags; };
typedef struct {
    unsigned entries, n_staged;
    _Atomic unsigned *sq_tail;
} fs_ring;

#define MOST 4096
static struct { uint64_t tag; uint32_t len; } flying[MOST];
static unsigned n_flying, newest_first;
static uint64_t n_reads, n_begun;
static struct fs_cqe landed;
static int has_landed;

static void fs_ring_read(fs_ring *ring, int fd, void *buf, uint32_t len, uint64_t offset, uint64_t tag) {
    (void)ring, (void)fd, (void)offset;
    memset(buf, 0, len);
    flying[n_flying].tag = tag;
    flying[n_flying++].len = len;
    n_begun++;
}

static int fs_ring_enter(fs_ring *ring, unsigned min_complete) {
    (void)ring, (void)min_complete;
    printf("%u %llu\n", n_flying, (unsigned long long)(n_reads - n_begun));
    unsigned which = newest_first ? n_flying - 1 : 0;
    landed = (struct fs_cqe){flying[which].tag, (int32_t)flying[which].len, 0};
    memmove(&flying[which], &flying[which + 1], (n_flying - which - 1) * sizeof flying[0]);
    n_flying--;
    has_landed = 1;
    return 0;
}

static int fs_ring_reap(fs_ring *ring, struct fs_cqe *out) {
    (void)ring;
    int got = has_landed;
    has_landed = 0;
    *out = landed;
    return got;
}

#include "backends.h"

static int no_signal(void) { return 0; }

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    unsigned depth = (unsigned)atoi(argv[1]);
    n_reads = (uint64_t)atoi(argv[2]);
    newest_first = (unsigned)atoi(argv[3]);
    fs_uring *ring = calloc(1, sizeof *ring);
    fs_job job = {0};
    uint64_t *keys = calloc(n_reads, sizeof *keys); /* every other page, so that each row is a read */
    for (uint64_t i = 0; i < n_reads; i++) keys[i] = (2 * i) << FS_INDEX_BITS | i;
    ring->depth = depth;
    ring->arena_bytes = MOST * FS_PAGE;
    ring->arena = malloc(ring->arena_bytes);
    job.n = n_reads;
    job.keys = keys;
    job.row_bytes = job.group_bytes = FS_PAGE;
    job.group_rows = job.cap_pages = 1;
    job.out = malloc(n_reads * FS_PAGE);
    fs_uring_run(ring, &job, no_signal);
    printf("%llu %d\n", (unsigned long long)job.n_reads, job.error_kind);
    free(keys), free(ring->arena), free(ring), free(job.out);
    return 0;
}
