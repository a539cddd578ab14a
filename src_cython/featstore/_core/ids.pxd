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


cdef inline int check_block(const int64_t[::1] offsets, int64_t first_node, int64_t n_nodes, int64_t first,
                            int64_t n) except -1:
    """Check that a block of ``n`` ids, from edge ``first`` on, belongs to nodes whose lists begin at ``offsets``."""
    cdef int64_t k = offsets.shape[0] - 1
    if k < 0 or not 0 <= first_node <= n_nodes - k:
        raise ValueError(f"{k} nodes from {first_node} on are not among {n_nodes}")
    if not offsets[0] <= first <= offsets[k] - n:
        raise ValueError(f"no block of {n} ids begins at {first}")
    return 0
