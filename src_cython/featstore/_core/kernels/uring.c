#include "uring.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#endif
#define FS_SETUP_CLAMP (1U << 4)
#define FS_SETUP_COOP_TASKRUN (1U << 8)
#define FS_FEAT_SINGLE_MMAP (1U << 0)
#define FS_ENTER_GETEVENTS (1U << 0)
#define FS_OP_READ 22
#define FS_OFF_SQ_RING 0ULL
#define FS_OFF_CQ_RING 0x8000000ULL
#define FS_OFF_SQES 0x10000000ULL
#define FS_MAX_REFUSALS 400 /* in a row, with a longer wait after each: 4 s in all */
#define FS_REFUSED_NS 50000L
struct fs_sq_offsets { uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, resv1; uint64_t resv2; };
struct fs_cq_offsets { uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, resv1; uint64_t resv2; };

struct fs_uring_params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd, resv[3];
    struct fs_sq_offsets sq_off;
    struct fs_cq_offsets cq_off;
};

void fs_ring_close(fs_ring *ring, int mapped) {
    if (mapped) {
        if (ring->sqes) munmap(ring->sqes, ring->sqe_bytes);
        if (ring->cq_map && ring->cq_map != ring->sq_map) munmap(ring->cq_map, ring->cq_map_bytes);
        if (ring->sq_map) munmap(ring->sq_map, ring->sq_map_bytes);
    }
    if (ring->fd >= 0) close(ring->fd);
    memset(ring, 0, sizeof *ring);
    ring->fd = -1;
}

static void *fs_ring_map(fs_ring *ring, size_t bytes, uint64_t offset) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd, (off_t)offset);
    if (p == MAP_FAILED) return NULL;
    madvise(p, bytes, MADV_DONTFORK); /* a child must never reap its parent's completions */
    return p;
}

void fs_ring_read(fs_ring *ring, int fd, void *buf, uint32_t len, uint64_t offset, uint64_t tag) {
    uint32_t tail = atomic_load_explicit(ring->sq_tail, memory_order_relaxed);
    uint32_t index = tail & ring->sq_mask;
    struct fs_sqe *sqe = &ring->sqes[index];
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = FS_OP_READ;
    sqe->fd = fd;
    sqe->off = offset;
    sqe->addr = (uint64_t)(uintptr_t)buf;
    sqe->len = len;
    sqe->user_data = tag;
    ring->sq_array[index] = index;
    atomic_store_explicit(ring->sq_tail, tail + 1, memory_order_release);
    ring->n_staged++;
    ring->in_flight++;
}

int fs_ring_enter(fs_ring *ring, unsigned min_complete) {
    int r = (int)syscall(__NR_io_uring_enter, ring->fd, ring->n_staged, min_complete, min_complete ? FS_ENTER_GETEVENTS : 0, NULL, 0);
    if (r >= 0) {
        ring->n_staged -= (unsigned)r;
        ring->n_refused = 0;
        return 0;
    }
    r = -errno;
    if (r == -EINTR) return r;
    ring->n_refused = ring->in_flight > ring->n_staged ? 0 : ring->n_refused + 1; /* what was taken lands, whatever is refused */
    if ((r == -EAGAIN || r == -EBUSY) && ring->n_refused < FS_MAX_REFUSALS) {
        r = -EINTR; /* short of memory for requests or completions, which passes */
    } else {
        ring->n_refused = 0;
        ring->in_flight -= ring->n_staged;
        atomic_fetch_sub_explicit(ring->sq_tail, ring->n_staged, memory_order_release);
        ring->n_staged = 0;
    }
    if (ring->in_flight) nanosleep(&(struct timespec){0, FS_REFUSED_NS * (1 + ring->n_refused)}, NULL);
    return r;
}

int fs_ring_reap(fs_ring *ring, struct fs_cqe *out) {
    uint32_t head = atomic_load_explicit(ring->cq_head, memory_order_relaxed);
    if (head == atomic_load_explicit(ring->cq_tail, memory_order_acquire)) return 0;
    *out = ring->cqes[head & ring->cq_mask];
    atomic_store_explicit(ring->cq_head, head + 1, memory_order_release);
    ring->in_flight--;
    return 1;
}

int fs_ring_open(fs_ring *ring, unsigned entries) {
    struct fs_uring_params p;
    memset(ring, 0, sizeof *ring);
    memset(&p, 0, sizeof p);
    p.flags = FS_SETUP_CLAMP | FS_SETUP_COOP_TASKRUN;
    ring->fd = (int)syscall(__NR_io_uring_setup, entries, &p);
    if (ring->fd < 0 && errno == EINVAL) { /* before Linux 5.19 */
        memset(&p, 0, sizeof p);
        p.flags = FS_SETUP_CLAMP;
        ring->fd = (int)syscall(__NR_io_uring_setup, entries, &p);
    }
    if (ring->fd < 0) {
        ring->fd = -1;
        return -errno;
    }
    ring->entries = p.sq_entries;
    ring->sq_map_bytes = p.sq_off.array + p.sq_entries * sizeof(uint32_t);
    ring->cq_map_bytes = p.cq_off.cqes + p.cq_entries * sizeof(struct fs_cqe);
    ring->sqe_bytes = p.sq_entries * sizeof(struct fs_sqe);
    if (p.features & FS_FEAT_SINGLE_MMAP) {
        if (ring->cq_map_bytes > ring->sq_map_bytes) ring->sq_map_bytes = ring->cq_map_bytes;
        ring->sq_map = fs_ring_map(ring, ring->sq_map_bytes, FS_OFF_SQ_RING);
        ring->cq_map = ring->sq_map;
    } else {
        ring->sq_map = fs_ring_map(ring, ring->sq_map_bytes, FS_OFF_SQ_RING);
        ring->cq_map = fs_ring_map(ring, ring->cq_map_bytes, FS_OFF_CQ_RING);
    }
    ring->sqes = (struct fs_sqe *)fs_ring_map(ring, ring->sqe_bytes, FS_OFF_SQES);
    if (!ring->sq_map || !ring->cq_map || !ring->sqes) {
        fs_ring_close(ring, 1);
        return -ENOMEM;
    }
    uint8_t *sq = (uint8_t *)ring->sq_map, *cq = (uint8_t *)ring->cq_map;
    ring->sq_head = (_Atomic uint32_t *)(sq + p.sq_off.head);
    ring->sq_tail = (_Atomic uint32_t *)(sq + p.sq_off.tail);
    ring->sq_mask = *(uint32_t *)(sq + p.sq_off.ring_mask);
    ring->sq_array = (uint32_t *)(sq + p.sq_off.array);
    ring->cq_head = (_Atomic uint32_t *)(cq + p.cq_off.head);
    ring->cq_tail = (_Atomic uint32_t *)(cq + p.cq_off.tail);
    ring->cq_mask = *(uint32_t *)(cq + p.cq_off.ring_mask);
    ring->cqes = (struct fs_cqe *)(cq + p.cq_off.cqes);
    int error = fs_ring_enter(ring, 0); /* it may be refused where setting up is not */
    if (error) fs_ring_close(ring, 1);
    return error;
}
