"""``kernels/bits.h`` as the modules that use it see it, and the check of rows before they are looked up."""

from libc.stdint cimport int32_t, int64_t, uint64_t

cdef extern from "kernels/bits.h" nogil:
    void fs_fetch(const void *p)
    void fs_touch(const void *p)
    void fs_peek(const void *p)
    int fs_popcount(uint64_t x)
    int fs_top(uint64_t x)
    int fs_low(uint64_t x)

ctypedef fused row_t:
    int32_t
    int64_t

cdef enum:
    AHEAD = 96  # accesses ahead that a pass fetches, by measurement on R22: far enough to hide a miss of the last-level cache


cdef inline int64_t outside(const row_t *rows, int64_t k, int64_t n) noexcept nogil:
    """Index of the first row that is not in ``0 … n - 1``; −1 if none."""
    cdef int64_t i
    cdef row_t any_sign = 0, most = 0
    for i in range(k):
        any_sign |= rows[i]
        most = max(most, rows[i])
    if any_sign >= 0 and (most < n or k == 0):
        return -1
    for i in range(k):
        if rows[i] < 0 or rows[i] >= n:
            return i
    return -1
