"""Self-reliant parts: training nodes put into parts by their in-neighbourhoods. The kernels are in kernels/trainparts.c.

PaGraph, TPDS 2021, section 3.2 and algorithm 1.
"""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free

cimport cython

from featstore._core.ids cimport Ids, check_block


cdef extern from "kernels/trainparts.h" nogil:
    ctypedef struct fs_trainparts:
        int64_t n_train
        int64_t n_parts
        int64_t hops
        int64_t stride
        int32_t *part
        uint8_t *member
        int64_t *trained
        int64_t *size
        double *count
        int64_t n_above
        uint64_t *seen
        int64_t *queue
        int64_t n_visits
    int64_t fs_put_train(fs_trainparts *, int64_t) noexcept
    int64_t fs_put_exact(fs_trainparts *, const int64_t *, int64_t, const int32_t *, const int64_t *, const void *, int,
                         int64_t) noexcept
    void fs_add_paths(const int64_t *, const void *, int, int64_t, int64_t, const int32_t *, int64_t, int64_t, const float *,
                      float *) noexcept
    void fs_bring_neighbors(const int64_t *, const void *, int, int64_t, int64_t, int64_t, const uint8_t *, uint8_t *) noexcept
    void fs_join(fs_trainparts *, const uint8_t *, int64_t) noexcept


def table_bytes(int64_t n_nodes, int64_t n_parts):
    """Return the bytes that a :class:`TrainPlacer` allocates."""
    return 8 * (n_nodes + 1) + 8 * (n_nodes // 64 + 1) + 24 * n_parts


@cython.final
cdef class TrainPlacer:
    """Puts training nodes into parts, in the order in which they come. One owner thread.

    Parameters
    ----------
    part : int32 array, shape (N,)
        Receives the part of each training node; all -1.
    member : uint8 array, shape (N, (n_parts + 7) // 8)
        Receives which parts have a node, bit ``i % 8`` of byte ``i // 8``; all 0.
    n_train : int
        How many nodes will come, in all.
    n_parts : int
        Training nodes of two parts differ by one at most in the end.
    hops : int
    """

    cdef fs_trainparts state
    cdef int64_t n_nodes
    cdef int32_t[::1] part_view
    cdef uint8_t[:, ::1] member_view

    def __cinit__(self, int32_t[::1] part not None, uint8_t[:, ::1] member not None, int64_t n_train, int64_t n_parts,
                  int64_t hops):
        cdef int64_t n = part.shape[0]
        if not 1 <= n_parts <= INT32_MAX or hops < 1 or not 0 <= n_train <= n:
            raise ValueError(f"no {n_parts} parts of {n_train} training nodes among {n}, over {hops} hops")
        if member.shape[0] != n or member.shape[1] != (n_parts + 7) // 8:
            raise ValueError("member has a row a node, with a bit a part")
        self.n_nodes, self.part_view, self.member_view = n, part, member
        self.state.n_train, self.state.n_parts, self.state.hops, self.state.stride = n_train, n_parts, hops, member.shape[1]
        self.state.part = &part[0] if n else NULL
        self.state.member = &member[0, 0] if n else NULL
        self.state.trained = <int64_t *>calloc(n_parts, sizeof(int64_t))
        self.state.size = <int64_t *>calloc(n_parts, sizeof(int64_t))
        self.state.count = <double *>calloc(n_parts, sizeof(double))
        self.state.seen = <uint64_t *>calloc(n // 64 + 1, sizeof(uint64_t))
        self.state.queue = <int64_t *>calloc(n + 1, sizeof(int64_t))
        if (self.state.trained == NULL or self.state.size == NULL or self.state.count == NULL or self.state.seen == NULL
                or self.state.queue == NULL):
            raise MemoryError(f"no memory for {n_parts} parts of {n} nodes")

    def __dealloc__(self):  # what was not allocated is NULL
        free(self.state.trained)
        free(self.state.size)
        free(self.state.count)
        free(self.state.seen)
        free(self.state.queue)

    @property
    def n_visits(self):
        """Edges that :meth:`put_exact` followed, in all."""
        return self.state.n_visits

    def put_exact(self, const int64_t[::1] nodes not None, const int32_t[::1] slot not None, const int64_t[::1] starts not None,
                  ids, int id_bytes, int64_t most):
        """Put nodes by their whole in-neighbourhoods, and these with them.

        Parameters
        ----------
        nodes : int64 array
            Distinct training nodes that are in no part.
        slot : int32 array, shape (N,)
            The list of each node, or -1.
        starts : int64 array, shape (n_lists + 1,)
            List ``j`` is ``ids[starts[j]:starts[j + 1]]``. The ids are nodes: **not** checked.
        ids : buffer
        id_bytes : {4, 8}
        most : int
            No further node is put once so many edges were followed.

        Returns
        -------
        int
            How many were put.
        """
        cdef Ids held = Ids(ids, id_bytes)
        cdef int64_t n = nodes.shape[0], n_lists = starts.shape[0] - 1, put
        if slot.shape[0] != self.n_nodes or n_lists < 0 or not 0 <= starts[0] <= starts[n_lists] <= held.n:
            raise ValueError("slots, starts and ids disagree in length")
        self._check(nodes)
        if not n:
            return 0
        with nogil:
            put = fs_put_exact(&self.state, &nodes[0], n, &slot[0], &starts[0], held.data, held.wide, most)
        if put < 0:
            raise ValueError(f"the list of node {-1 - put} is not there")
        return put

    def put_by(self, const int64_t[::1] nodes not None, const float[:, ::1] counts not None):
        """Put nodes by what is counted of each part in their neighbourhoods, float32 ``[n, n_parts]``; they bring no others."""
        cdef int64_t n = nodes.shape[0], i, p
        if counts.shape[0] != n or counts.shape[1] != self.state.n_parts:
            raise ValueError("counts have a row a node, and a column a part")
        self._check(nodes)
        with nogil:
            for i in range(n):
                for p in range(self.state.n_parts):
                    self.state.count[p] = counts[i, p]
                fs_put_train(&self.state, nodes[i])
            for p in range(self.state.n_parts):
                self.state.count[p] = 0

    cdef int _check(self, const int64_t[::1] nodes) except -1:
        cdef int64_t i, bad = -1, left = self.state.n_train
        for i in range(self.state.n_parts):
            left -= self.state.trained[i]
        if nodes.shape[0] > left:
            raise ValueError(f"{nodes.shape[0]} training nodes, where {left} were to come")
        with nogil:
            for i in range(nodes.shape[0]):
                if not 0 <= nodes[i] < self.n_nodes or self.state.part[nodes[i]] != -1:
                    bad = i
                    break
        if bad >= 0:
            raise ValueError(f"{nodes[bad]} is no node, or in a part")
        return 0

    def join(self, const uint8_t[:, ::1] bits not None):
        """Add nodes to parts: those whose bits are set, as in ``member``."""
        if bits.shape[0] != self.n_nodes or bits.shape[1] != self.state.stride:
            raise ValueError("bits have the shape of member")
        if self.n_nodes:
            with nogil:
                fs_join(&self.state, &bits[0, 0], self.n_nodes)

    def sizes(self, int64_t[::1] trained not None, int64_t[::1] size not None):
        """Write how many training nodes, and how many nodes in all, each part has."""
        cdef int64_t i
        if trained.shape[0] != self.state.n_parts or size.shape[0] != self.state.n_parts:
            raise ValueError(f"there are {self.state.n_parts} parts")
        for i in range(self.state.n_parts):
            trained[i], size[i] = self.state.trained[i], self.state.size[i]


def add_paths(const int64_t[::1] offsets not None, int64_t first_node, block, int id_bytes, int64_t first,
              const int32_t[::1] part not None, int64_t begin, const float[:, ::1] paths, float[:, ::1] more not None):
    """Add the paths over the edges of a block back to training nodes, by the part of these.

    Parameters
    ----------
    offsets : int64 array, shape (k + 1,)
        Ascends; the edges of node ``first_node + i`` are ``offsets[i] … offsets[i + 1]``.
    first_node : int
    block : buffer
        Neighbour ids of the edges ``first …``, which lie between the first and the last of ``offsets``; nodes, **not** checked.
    id_bytes : {4, 8}
    first : int
    part : int32 array, shape (N,)
        The part of each training node; -1 for others.
    begin : int
        First part to count.
    paths : float32 array, shape (N, width), or None
        From each node, over a hop less; None at the first hop.
    more : float32 array, shape (N, width)
        Added to.
    """
    cdef Ids ids = Ids(block, id_bytes)
    cdef int64_t n = part.shape[0], width = more.shape[1]
    check_block(offsets, first_node, n, first, ids.n)
    if more.shape[0] != n or width < 1 or (paths is not None and (paths.shape[0] != n or paths.shape[1] != width)):
        raise ValueError("paths and more have a row a node, and a column a part")
    cdef const float *counts = NULL
    if ids.n:
        if paths is not None:
            counts = &paths[0, 0]
        with nogil:
            fs_add_paths(&offsets[0], ids.data, ids.wide, first, ids.n, &part[0], begin, width, counts, &more[first_node, 0])


def bring_neighbors(const int64_t[::1] offsets not None, int64_t first_node, block, int id_bytes, int64_t first,
                    const uint8_t[:, ::1] bits not None, uint8_t[:, ::1] into not None):
    """Put the sources of a block's edges into the parts of their destinations.

    Parameters
    ----------
    offsets, first_node, block, id_bytes, first
        As for :func:`add_paths`.
    bits, into : uint8 array, shape (N, stride)
        Parts of each node, a bit a part: read for destinations, set for sources.
    """
    cdef Ids ids = Ids(block, id_bytes)
    cdef int64_t n = bits.shape[0], stride = bits.shape[1]
    check_block(offsets, first_node, n, first, ids.n)
    if into.shape[0] != n or into.shape[1] != stride:
        raise ValueError("bits of two shapes")
    if ids.n:
        with nogil:
            fs_bring_neighbors(&offsets[0], ids.data, ids.wide, first, ids.n, stride, &bits[first_node, 0], &into[0, 0])
