"""The C of sorting keys (``kernels/pairs.c``) as the modules that use it see it."""

from libc.stdint cimport uint64_t

cdef extern from "kernels/pairs.h" nogil:
    uint64_t *fs_sort_keys(uint64_t *keys, uint64_t *spare, uint64_t n, int low, int high)
