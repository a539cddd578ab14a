"""Neighbour lists at hand: where they are among those of the file, and ids from both. The kernels are in kernels/nearby.c."""

from libc.stdint cimport INT32_MAX, int32_t, int64_t

from featstore._core.ids cimport Ids


cdef extern from "kernels/nearby.h" nogil:
    int64_t fs_enter_lists(const int64_t *, int64_t *, int64_t, int32_t *, int64_t, int64_t *) noexcept
    void fs_find_lists(const int64_t *, const int64_t *, const int32_t *, int64_t, int64_t, const int64_t *, int64_t *,
                       int64_t) noexcept
    int64_t fs_count_far(const int64_t *, int64_t, int64_t, int64_t) noexcept
    void fs_take_near32(const int64_t *, int64_t, int64_t, const int32_t *, int32_t *, int64_t *) noexcept
    void fs_take_near64(const int64_t *, int64_t, int64_t, const int64_t *, int64_t *, int64_t *) noexcept
    void fs_put_far32(const int64_t *, int64_t, int64_t, const int32_t *, int32_t *) noexcept
    void fs_put_far64(const int64_t *, int64_t, int64_t, const int64_t *, int64_t *) noexcept


def table_entries(int64_t n):
    """Return how many entries the table of ``n`` nodes has: a power of two, twice as many or more."""
    cdef int64_t size = 2
    while size < 2 * n:
        size *= 2
    return size


cdef int64_t _mask_of(int64_t n, int64_t size) except -1:
    if size < 2 or size & (size - 1) or size <= n:
        raise ValueError(f"a table of {n} nodes has more entries than those, a power of two, not {size}")
    return size - 1


def enter_lists(const int64_t[::1] nodes not None, int64_t[::1] starts not None, int32_t[::1] table not None):
    """Number nodes whose lists lie one after the other; return where the last one ends.

    Parameters
    ----------
    nodes : int64 array, shape (n,)
        Distinct.
    starts : int64 array, shape (n,)
        Their degrees, replaced by where their lists begin.
    table : int32 array, shape (table_entries(n),)
        Written.

    Raises
    ------
    ValueError
        A node occurs twice; arrays that do not fit each other.
    """
    cdef int64_t n = nodes.shape[0], twice = -1, end = 0, mask, i
    mask = _mask_of(n, table.shape[0])
    if starts.shape[0] != n or n > INT32_MAX:
        raise ValueError("nodes and starts have one length, below 2**31")
    with nogil:
        for i in range(mask + 1):
            table[i] = -1
        if n:
            twice = fs_enter_lists(&nodes[0], &starts[0], n, &table[0], mask, &end)
    if twice >= 0:
        raise ValueError(f"node {nodes[twice]} occurs twice")
    return end


def find_lists(const int64_t[::1] nodes not None, const int64_t[::1] starts not None, const int32_t[::1] table not None,
               int64_t base, const int64_t[::1] ids not None, int64_t[::1] place not None):
    """Give the nodes ``ids`` whose list is at hand a place there: ``~(base + start)`` where ``place`` is in the file (negative).

    Parameters
    ----------
    nodes, starts, table
        What :func:`enter_lists` wrote.
    base : int
        Above all positions in the file.
    ids, place : int64 array, shape (k,)
    """
    cdef int64_t n = nodes.shape[0], k = ids.shape[0], mask
    mask = _mask_of(n, table.shape[0])
    if starts.shape[0] != n or place.shape[0] != k or base < 0:
        raise ValueError("nodes and starts have one length, ids and places another, and positions are not negative")
    if n and k:
        with nogil:
            fs_find_lists(&nodes[0], &starts[0], &table[0], mask, base, &ids[0], &place[0], k)


def count_far(const int64_t[::1] positions not None, int64_t base, int64_t n_ids):
    """Return how many positions are in the file, below ``base``; IndexError where one is not below ``base + n_ids``."""
    cdef int64_t n = positions.shape[0], found = 0
    if n:
        with nogil:
            found = fs_count_far(&positions[0], n, base, n_ids)
    if found < 0:
        raise IndexError(f"a position is beyond the {n_ids} ids at hand")
    return found


def take_near(const int64_t[::1] positions not None, int64_t base, ids, int id_bytes, out, int64_t[::1] far not None):
    """Copy ids at hand, and list the positions in the file.

    Parameters
    ----------
    positions : int64 array, shape (n,)
    base : int
    ids : buffer of int32 or int64
        The ids at hand; position ``base`` is their first.
    id_bytes : int
    out : writable buffer of the same, shape (n,)
        Gets those at hand at their places.
    far : int64 array, shape (count_far(positions, base, n_ids),)
        Gets the positions in the file, in their order.
    """
    cdef Ids source = Ids(ids, id_bytes), target = Ids(out, id_bytes, True)
    cdef int64_t n = positions.shape[0]
    cdef int64_t *in_file = &far[0] if far.shape[0] else NULL
    if target.n != n or count_far(positions, base, source.n) != far.shape[0]:
        raise ValueError("out has an id a position, and far an entry for each that is in the file")
    if n:
        with nogil:
            if target.wide:
                fs_take_near64(&positions[0], n, base, <const int64_t *>source.data, <int64_t *>target.data, in_file)
            else:
                fs_take_near32(&positions[0], n, base, <const int32_t *>source.data, <int32_t *>target.data, in_file)


def put_far(const int64_t[::1] positions not None, int64_t base, read, int id_bytes, out):
    """Copy ids that were read from the file, in the order of :func:`take_near`, to their places in ``out``."""
    cdef int64_t n = positions.shape[0], far = count_far(positions, base, (<int64_t>1 << 62) - base)
    cdef Ids source = Ids(read, id_bytes), target = Ids(out, id_bytes, True)
    if target.n != n or source.n != far:
        raise ValueError("out has an id a position, and read one for each that is in the file")
    if n:
        with nogil:
            if target.wide:
                fs_put_far64(&positions[0], n, base, <const int64_t *>source.data, <int64_t *>target.data)
            else:
                fs_put_far32(&positions[0], n, base, <const int32_t *>source.data, <int32_t *>target.data)
