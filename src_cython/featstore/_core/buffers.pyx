"""Blocks of memory that tensors borrow: given back when the tensor and all its views have died."""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint8_t, uint64_t
cimport cython

cdef extern from *:
    """
    #include <stdint.h>
    #include <sys/mman.h>

    #define FS_HUGE (2UL << 20)

    static uint64_t fs_mapped;  /* bytes of all blocks; atomic */

    /* Zeroed memory; from 2 MiB on aligned to, and asked to be of, huge pages. */
    static void *fs_block_map(uint64_t bytes) {
        uint64_t slack = bytes >= FS_HUGE ? FS_HUGE : 0;
        if (bytes > PTRDIFF_MAX - FS_HUGE) return NULL;
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        uint8_t *p = (uint8_t *)mmap(NULL, bytes + slack, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (p == (uint8_t *)MAP_FAILED) return NULL;
        if (slack) {
            uint8_t *aligned = (uint8_t *)(((uintptr_t)p + FS_HUGE - 1) & ~(FS_HUGE - 1));
            if (aligned > p) munmap(p, (uint64_t)(aligned - p));
            if (aligned + bytes < p + bytes + slack) munmap(aligned + bytes, (uint64_t)(p + slack - aligned));
            p = aligned;
            madvise(p, bytes, MADV_HUGEPAGE);
        }
        __atomic_fetch_add(&fs_mapped, bytes, __ATOMIC_RELAXED);
        return p;
    }

    /* Take the pages of a range now; 0, or -1 where the kernel cannot (before Linux 5.14) or has no memory. */
    static int fs_populate(void *p, uint64_t bytes) {
    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23
    #endif
        uintptr_t first = ((uintptr_t)p + 4095) & ~(uintptr_t)4095, end = ((uintptr_t)p + bytes) & ~(uintptr_t)4095;
        return end > first ? madvise((void *)first, end - first, MADV_POPULATE_WRITE) : 0;
    }

    /* Give the whole pages of a range back; what is read there afterwards is zero. 0, or -1. */
    static int fs_discard(void *p, uint64_t bytes) {
        uintptr_t first = ((uintptr_t)p + 4095) & ~(uintptr_t)4095, end = ((uintptr_t)p + bytes) & ~(uintptr_t)4095;
        return end > first ? madvise((void *)first, end - first, MADV_DONTNEED) : 0;
    }

    static void fs_block_unmap(void *p, uint64_t bytes) {
        if (p == NULL) return;
        munmap(p, bytes);
        __atomic_fetch_sub(&fs_mapped, bytes, __ATOMIC_RELAXED);
    }

    static uint64_t fs_mapped_bytes(void) { return __atomic_load_n(&fs_mapped, __ATOMIC_RELAXED); }
    """
    void *fs_block_map(uint64_t n_bytes) nogil
    void fs_block_unmap(void *p, uint64_t n_bytes) nogil
    int fs_populate(void *p, uint64_t n_bytes) nogil
    int fs_discard(void *p, uint64_t n_bytes) nogil
    uint64_t fs_mapped_bytes() nogil


def mapped_bytes():
    """Count the bytes of all blocks that live in this process, whether their pages were touched or not."""
    return fs_mapped_bytes()


def populate(uint8_t[::1] memory not None):
    """Take the memory's pages now, what is in them unchanged: the first write to a page does not wait for the kernel then.

    Returns whether it could: a kernel before Linux 5.14 cannot, and pages come as they are touched.
    """
    cdef int error = 0
    cdef uint64_t n_bytes = memory.shape[0]
    if n_bytes:
        with nogil:
            error = fs_populate(&memory[0], n_bytes)
    return error == 0


def discard(uint8_t[::1] memory not None):
    """Give the whole pages of private memory back to the system; what was in them is zero from then on.

    Returns whether the kernel did so.
    """
    cdef int error = 0
    cdef uint64_t n_bytes = memory.shape[0]
    if n_bytes:
        with nogil:
            error = fs_discard(&memory[0], n_bytes)
    return error == 0


cdef class Block:
    """Memory of fixed size, unmapped when the object dies."""

    cdef void *data
    cdef readonly uint64_t nbytes

    def __cinit__(self, uint64_t nbytes):
        self.data = NULL
        self.nbytes = nbytes
        self.data = fs_block_map(max(nbytes, 1))
        if self.data == NULL:
            raise MemoryError(f"cannot map {nbytes} bytes")

    def __dealloc__(self):
        fs_block_unmap(self.data, max(self.nbytes, 1))

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.data, <Py_ssize_t>self.nbytes, 0, flags)


@cython.no_gc_clear
cdef class Lease:
    """The first ``nbytes`` of a block as a writable buffer; calls ``give_back(block)`` when nobody uses it any more."""

    cdef Block block
    cdef object give_back
    cdef readonly uint64_t nbytes

    def __init__(self, Block block not None, uint64_t nbytes, give_back):
        if nbytes > block.nbytes:
            raise ValueError("the block is too small")
        self.block = block
        self.nbytes = nbytes
        self.give_back = give_back

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.block.data, <Py_ssize_t>self.nbytes, 0, flags)

    def __dealloc__(self):
        if self.give_back is not None:
            self.give_back(self.block)
