"""Checks of buffers of node ids, which have 4 or 8 bytes each, and of the room that arrays have."""

from libc.stdint cimport int64_t


cdef inline int check_width(int id_bytes) except -1:
    if id_bytes != 4 and id_bytes != 8:
        raise ValueError(f"ids have 4 or 8 bytes, not {id_bytes}")
    return 0


cdef inline int64_t count_of(Py_buffer *view, int id_bytes) except -1:
    """Number of ids in a contiguous buffer of such ids or of bytes."""
    check_width(id_bytes)
    if view.itemsize != id_bytes and view.itemsize != 1:
        raise ValueError(f"ids of {id_bytes} bytes expected, not of {view.itemsize}")
    if view.len % id_bytes:
        raise ValueError(f"{view.len} bytes are no whole number of ids of {id_bytes} bytes")
    return view.len // id_bytes


cdef inline int check_length(name, int64_t length, int64_t needed) except -1:
    if length < needed:
        raise ValueError(f"{name} has room for {length}, not for {needed}")
    return 0
