"""Mapped memory as the modules that use it see it."""

from libc.stdint cimport uint8_t, uint64_t


cdef class Arena:
    cdef uint8_t *data
    cdef readonly uint64_t nbytes
    cdef bint in_use
    cdef bint is_forked
    cdef int pid


cdef Arena arena_for(Arena given, uint64_t nbytes)
