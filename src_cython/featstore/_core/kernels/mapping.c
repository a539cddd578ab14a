#include "mapping.h"

#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

#define FS_HUGE (2UL << 20)
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static _Atomic uint64_t fs_mapped;

/* The last byte of a page, which is 4 KiB or 64 KiB: a mask. */
static uint64_t fs_page_mask(void)
{
    return (uint64_t)sysconf(_SC_PAGESIZE) - 1;
}

void *fs_map(uint64_t bytes, int forked)
{
    const uint64_t slack = bytes >= FS_HUGE ? FS_HUGE : 0;
    if (bytes > PTRDIFF_MAX - FS_HUGE)
        return NULL;
    bytes = (bytes + fs_page_mask()) & ~fs_page_mask();
    uint8_t *p = mmap(NULL, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    if (slack) {
        uint8_t *aligned = (uint8_t *)(((uintptr_t)p + FS_HUGE - 1) & ~(FS_HUGE - 1));
        if (aligned > p)
            munmap(p, (uint64_t)(aligned - p));
        if (aligned + bytes < p + bytes + slack)
            munmap(aligned + bytes, (uint64_t)(p + slack - aligned));
        p = aligned;
        madvise(p, bytes, MADV_HUGEPAGE);
    }
    if (!forked)
        madvise(p, bytes, MADV_DONTFORK);
    atomic_fetch_add_explicit(&fs_mapped, bytes, memory_order_relaxed);
    return p;
}

void fs_unmap(void *p, uint64_t bytes)
{
    bytes = (bytes + fs_page_mask()) & ~fs_page_mask();
    munmap(p, bytes);
    atomic_fetch_sub_explicit(&fs_mapped, bytes, memory_order_relaxed);
}

uint64_t fs_mapped_bytes(void)
{
    return atomic_load_explicit(&fs_mapped, memory_order_relaxed);
}

/* Advise the kernel of the whole pages of a range. */
static int fs_advise(void *p, uint64_t bytes, int advice)
{
    const uintptr_t mask = fs_page_mask(), first = ((uintptr_t)p + mask) & ~mask, end = ((uintptr_t)p + bytes) & ~mask;
    return end > first ? madvise((void *)first, end - first, advice) : 0;
}

int fs_populate(void *p, uint64_t bytes)
{
    return fs_advise(p, bytes, MADV_POPULATE_WRITE);
}

int fs_discard(void *p, uint64_t bytes)
{
    return fs_advise(p, bytes, MADV_DONTNEED);
}
