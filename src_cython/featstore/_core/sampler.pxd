"""The hops of a batch as the modules that draw for them see them: their C (``kernels/sampler.c``), and what is in the type."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from featstore._core.ids cimport Ids

cdef extern from "kernels/sampler.h" nogil:
    ctypedef struct fs_shape:
        uint64_t multiplier
        uint64_t mask
        int shift
    ctypedef struct fs_hop:
        const void *records
        int wide
        int64_t *nodes
        const int64_t *lists
        const int64_t *place
        const int64_t *degree
        const int64_t *offsets
        int64_t n_nodes
        int64_t limit
        uint64_t *table
        fs_shape shape
        int exact
        uint32_t base
        int64_t n_dst
        int64_t fanout
        int64_t n_edges
        uint64_t key
        int replace
        int is_drawn
        int64_t *src
        int64_t *dst
        int64_t *scratch
        const int64_t *starts
        int64_t *edge_pos
        const void *edge_ids
        int edge_ids_wide
        int64_t *positions
        int64_t *edges
        int64_t n_missing
        int64_t next_dst
        int64_t drawn
        int64_t gathered
        int64_t numbered
    ctypedef void (*fs_draw_lanes_fn)(const uint64_t *, const uint32_t *, int, int, uint8_t (*)[2], int, void *) noexcept


cdef class Hops:
    cdef fs_hop hop
    cdef fs_draw_lanes_fn draw_lanes
    cdef int64_t num_nodes, num_ids
    cdef bint in_hop
    cdef Ids records, edge_ids
    cdef const int64_t[::1] lists_view, list_place_view, list_degree_view, offsets_view
    cdef int64_t[::1] nodes_view, place_view, degree_view, src_view, dst_view, scratch_view, positions_view, edges_view
    cdef int64_t[::1] starts_view, edge_pos_view
    cdef uint64_t[::1] table_view
    cdef int _begin_hop(self, fs_hop *hop, int64_t n_dst, int64_t fanout, bint replace, uint64_t key,
                        int64_t[::1] scratch) except -1
    cdef int _begin_drawn(self, int64_t n_dst, int64_t[::1] src, int64_t[::1] dst) except -1
    cdef int _expand_nodes(self) except -1
    cdef int64_t _n_lists(self)
    cdef int _check_dst(self, int64_t n_dst) except -1
    cdef int _check_room(self) except -1
    cdef int _end_hop(self) except -1
    cdef int _check_in_hop(self) except -1
