/* The part of the io_uring kernel ABI that reads need: set up, map the rings, enter. No library to install. */
#ifndef FEATSTORE_URING_H
#define FEATSTORE_URING_H

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

struct fs_sqe {
    uint8_t opcode, flags;
    uint16_t ioprio;
    int32_t fd;
    uint64_t off, addr;
    uint32_t len, rw_flags;
    uint64_t user_data, rest[3];
};

struct fs_cqe { uint64_t user_data; int32_t res; uint32_t flags; };

typedef struct {
    int fd;
    unsigned entries, n_staged, in_flight; /* reads staged; reads staged or taken by the kernel, and not reaped */
    unsigned n_refused;
    void *sq_map, *cq_map;
    size_t sq_map_bytes, cq_map_bytes, sqe_bytes;
    struct fs_sqe *sqes;
    _Atomic uint32_t *sq_head, *sq_tail, *cq_head, *cq_tail;
    uint32_t *sq_array, sq_mask, cq_mask;
    struct fs_cqe *cqes;
} fs_ring;

/* `mapped` is 0 in a forked child, which never had the mappings (MADV_DONTFORK) and may have others in their place. */
void fs_ring_close(fs_ring *ring, int mapped);

/* Stage one read. The caller keeps at most `entries` reads in flight, so there is always room. */
void fs_ring_read(fs_ring *ring, int fd, void *buf, uint32_t len, uint64_t offset, uint64_t tag);

/* Hand over what is staged and wait for `min_complete` completions. 0 or -EINTR: there may be some. Another -errno: the kernel
 * refuses, so nothing that was staged is in flight any more; what it has taken before lands all the same: reap until nothing is. */
int fs_ring_enter(fs_ring *ring, unsigned min_complete);

/* Take the next completion; 0 when there is none. */
int fs_ring_reap(fs_ring *ring, struct fs_cqe *out);

/* Create a ring; 0 or -errno. */
int fs_ring_open(fs_ring *ring, unsigned entries);

#endif
