"""Neighbour lists: where they lie, in the file or in the neighbour cache, and checks of them.

The kernels are in kernels/neighbors.c.
"""

from libc.stdint cimport int64_t

from featstore._core.ids cimport Ids, check_length


cdef extern from "kernels/neighbors.h" nogil:
    void fs_offsets(const int64_t *, const int64_t *, int64_t, int64_t *, int64_t *) noexcept
    int64_t fs_lookup(const int64_t *, const void *, int, const int64_t *, int64_t, int64_t *, int64_t *, int64_t *) noexcept
    int64_t fs_first_bad(const void *, int, int64_t, int64_t) noexcept
    int64_t fs_fill_records(const char *, int64_t, int64_t, const int64_t *, const int64_t *, int64_t, int64_t, char *,
                            int) noexcept
    int64_t fs_first_bad_record(const int64_t *, const int64_t *, int64_t, const void *, int, int64_t, int64_t) noexcept
    int64_t fs_take_edge_ids(const void *, int, int64_t, int64_t, int64_t *, int64_t) noexcept
    int64_t fs_first_bad_offset(const int64_t *, int64_t, int64_t, int64_t) noexcept


def offsets(const int64_t[::1] indptr not None, const int64_t[::1] ids not None, int64_t[::1] starts not None,
            int64_t[::1] degrees not None):
    """Look up where each node's list starts and how long it is.

    Parameters
    ----------
    indptr : int64 array, shape (N + 1,)
    ids : int64 array, shape (k,)
        Nodes in ``[0, N)``; the caller has checked them.
    starts, degrees : int64 array, shape (k,)
        Output.
    """
    cdef int64_t n = ids.shape[0]
    check_length("starts", starts.shape[0], n)
    check_length("degrees", degrees.shape[0], n)
    if n:
        with nogil:
            fs_offsets(&indptr[0], &ids[0], n, &starts[0], &degrees[0])


def lookup(const int64_t[::1] offset_of_node not None, records, int id_bytes, const int64_t[::1] ids not None,
           int64_t[::1] place not None, int64_t[::1] degree not None, int64_t[::1] missing not None):
    """Look nodes up in the neighbour cache.

    Parameters
    ----------
    offset_of_node : int64 array, shape (N,)
        Index of a node's record ``[degree, n1 … nd]``, or -1.
    records : buffer of int32 or int64
    ids : int64 array, shape (k,)
        Nodes in ``[0, N)``; the caller has checked them.
    place, degree : int64 array, shape (k,)
        Output: index of the first neighbour, and degree; 0 for a node that is absent.
    missing : int64 array, shape (k + 1,)
        Output: positions in ``ids`` of the absent ones.

    Returns
    -------
    int
        How many are absent.
    """
    cdef int64_t n = ids.shape[0], n_missing = 0
    cdef Ids held
    check_length("place", place.shape[0], n)
    check_length("degree", degree.shape[0], n)
    check_length("missing", missing.shape[0], n + 1)
    held = Ids(records, id_bytes)
    if n:
        with nogil:
            n_missing = fs_lookup(&offset_of_node[0], held.data, held.wide, &ids[0], n, &place[0], &degree[0], &missing[0])
    return n_missing


def set_places(const int64_t[::1] missing not None, const int64_t[::1] starts not None, const int64_t[::1] degrees not None,
               int64_t[::1] place not None, int64_t[::1] degree not None):
    """Enter places in the file: ``place[missing] = ~starts`` and ``degree[missing] = degrees``."""
    cdef int64_t i, n = missing.shape[0], room = place.shape[0]
    check_length("starts", starts.shape[0], n)
    check_length("degrees", degrees.shape[0], n)
    check_length("degree", degree.shape[0], room)
    with nogil:
        for i in range(n):
            if 0 <= missing[i] < room:
                place[missing[i]] = ~starts[i]
                degree[missing[i]] = degrees[i]


def edge_places(const int64_t[::1] place not None, int64_t first, int64_t[::1] starts not None):
    """Write where the numbers of lists' edges begin: ``first + place`` in memory; in the file, where ``~place`` says.

    ``starts`` may be ``place``.
    """
    cdef int64_t i, n = place.shape[0]
    check_length("starts", starts.shape[0], n)
    with nogil:
        for i in range(n):
            starts[i] = place[i] + first if place[i] >= 0 else ~place[i]


def take_edge_ids(edge_ids, int width, int64_t first, int64_t[::1] positions not None):
    """Put the numbers of edges that are in memory in the place of where they are.

    Parameters
    ----------
    edge_ids : buffer of int32 or int64
    width : {4, 8}
    first : int
        What was added to an index in ``edge_ids``: positions below are in the file.
    positions : int64 array, shape (n,)
        Written over: with the number, or with ``~position`` of those in the file.

    Returns
    -------
    int
        How many are in the file.

    Raises
    ------
    ValueError
        A position is beyond ``edge_ids``.
    """
    cdef int64_t n = positions.shape[0], n_missing = 0
    cdef Ids kept = Ids(edge_ids, width)
    if n:
        with nogil:
            n_missing = fs_take_edge_ids(kept.data, kept.wide, kept.n, first, &positions[0], n)
    if n_missing < 0:
        raise ValueError(f"position {positions[~n_missing]} is beyond the {kept.n} numbers from {first} on")
    return n_missing


def missing_edges(const int64_t[::1] positions not None, int64_t[::1] missing not None, int64_t[::1] stored not None):
    """List the positions that :func:`take_edge_ids` has inverted: their indices, and what they were."""
    cdef int64_t i, n = 0, room = missing.shape[0]
    check_length("stored", stored.shape[0], room)
    with nogil:
        for i in range(positions.shape[0]):
            if positions[i] < 0 and n < room:
                missing[n] = i
                stored[n] = ~positions[i]
                n += 1
    return n


def first_bad_id(ids, int id_bytes, int64_t num_nodes):
    """Return the position of the first id out of ``[0, num_nodes)`` in a buffer of int32 or int64, or -1."""
    cdef Ids held = Ids(ids, id_bytes)
    cdef int64_t bad
    with nogil:
        bad = fs_first_bad(held.data, held.wide, held.n, num_nodes)
    return bad


def first_bad_offset(const int64_t[::1] offsets not None, int64_t least, int64_t most):
    """Return the index of the first offset below the one before (``least`` before the first) or above ``most``; -1 if none."""
    cdef int64_t bad, n = offsets.shape[0]
    if n == 0:
        return -1
    with nogil:
        bad = fs_first_bad_offset(&offsets[0], n, least, most)
    return bad


def first_bad_record(const int64_t[::1] indptr not None, const int64_t[::1] offset_of_node not None, records, int id_bytes,
                     int64_t num_nodes):
    """Return the first node whose cached record leaves the array, has another degree or an id out of range, or -1.

    ``indptr`` and ``offset_of_node`` may be those of a run of nodes; ids are in ``[0, num_nodes)``.
    """
    cdef Ids held
    cdef int64_t bad = -1, n = offset_of_node.shape[0]
    if indptr.shape[0] != n + 1:
        raise ValueError("indptr and offset_of_node disagree in length")
    held = Ids(records, id_bytes)
    if n:
        with nogil:
            bad = fs_first_bad_record(&indptr[0], &offset_of_node[0], n, held.data, held.wide, held.n, num_nodes)
    return bad


def fill_records(block, int64_t first, const int64_t[::1] indptr not None, const int64_t[::1] offset_of_node not None,
                 int64_t node, records, int id_bytes):
    """Copy the lists of cached nodes that lie in a block of the file into their records, each after its length.

    Parameters
    ----------
    block : buffer
        Neighbour ids of the edges ``first …``.
    first : int
    indptr : int64 array, shape (N + 1,)
        Checked: ascends. Of all nodes, or of a run of nodes that are numbered from 0 here.
    offset_of_node : int64 array, shape (N,)
        Offsets that leave room for the lists.
    node : int
        Node to go on with: what the call for the block before returned; 0 at first.
    records : writable buffer
        Zeros where nothing was written: the record of an empty list is left as it is.
    id_bytes : int

    Returns
    -------
    int
        Node to go on with.
    """
    cdef Ids source, target
    cdef int64_t n = offset_of_node.shape[0]
    if indptr.shape[0] != n + 1 or node < 0:
        raise ValueError("indptr and offset_of_node disagree in length, or the node is negative")
    if n == 0:
        return 0
    source, target = Ids(block, id_bytes), Ids(records, id_bytes, True)
    with nogil:
        node = fs_fill_records(<const char *>source.data, first, source.n, &indptr[0], &offset_of_node[0], n, node,
                               <char *>target.data, id_bytes)
    return node
