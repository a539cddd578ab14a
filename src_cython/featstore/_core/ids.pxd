"""Buffers of node ids, which have 4 or 8 bytes each, and checks of the room that arrays have."""

from libc.stdint cimport int64_t


cdef class Ids:
    cdef Py_buffer view
    cdef void *data
    cdef int64_t n
    cdef int wide


cdef inline int check_width(int id_bytes) except -1:
    if id_bytes != 4 and id_bytes != 8:
        raise ValueError(f"ids have 4 or 8 bytes, not {id_bytes}")
    return 0


cdef inline int check_length(name, int64_t length, int64_t needed) except -1:
    if length < needed:
        raise ValueError(f"{name} has room for {length}, not for {needed}")
    return 0
