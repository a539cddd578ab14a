"""Draws in proportion to the weights of edges, and the weights in the order of the lists.

The kernels are in kernels/weighted.c.
"""

from libc.stdint cimport int64_t, uint64_t

from featstore._core.ids cimport Ids, check_length
from featstore._core.sampler cimport Hops


cdef extern from "kernels/weighted.h" nogil:
    enum:
        FS_LONGEST
    ctypedef struct fs_column:
        pass
    ctypedef struct fs_weighted:
        const fs_column *columns
        const int64_t *lists
        const int64_t *place
        const int64_t *degree
        const int64_t *first
        int64_t fanout
        uint64_t key
        int replace
        int64_t *src
        int64_t *dst
        int64_t *scratch
        int64_t n_edges
        int64_t n_missing
    ctypedef void (*fs_draw_weighted_fn)(fs_weighted *, int64_t, int64_t) noexcept
    fs_draw_weighted_fn fs_choose_draw_weighted(int) noexcept
    int64_t fs_first_bad_weight(const double *, int64_t, int64_t *) noexcept
    void fs_place_weights(const double *, int64_t, int64_t, const void *, int, int64_t, double *) noexcept
    void fs_make_columns(double *, int64_t) noexcept


# Edges that a list with weights may have.
LONGEST = FS_LONGEST


def turn(Hops hops not None, int64_t begin, int64_t n_dst, int64_t fanout, bint all_positive, const int64_t[::1] starts not None,
         int64_t room, int64_t[::1] first not None, int64_t[::1] positions not None):
    """Choose the next lists of a hop whose weights are read together, and list the positions of their edges.

    Parameters
    ----------
    hops : Hops
        Whose first ``n_dst`` lists the hop draws from.
    begin, n_dst, fanout : int
    all_positive : bool
        No weight is 0: lists that are taken whole need no weights. To be false if draws are with replacement.
    starts : int64 array, shape (n_dst,)
        The stored position of each list's first edge.
    room : int
        Most positions, but for a list that is longer.
    first : int64 array, shape (n_dst,)
        Receives where the weights of each chosen list begin among those read; -1: they are not needed.
    positions : int64 array
        Receives the positions. If it is empty, they are only counted.

    Returns
    -------
    int, int
        The first list that is left, and the number of positions.
    """
    cdef int64_t i = begin, n = 0, j, degree, there = positions.shape[0]
    cdef bint is_full = False
    if begin < 0 or n_dst > hops._n_lists() or starts.shape[0] < n_dst or first.shape[0] < n_dst:
        raise ValueError("more destinations than lists, or than their starts")
    with nogil:
        while i < n_dst:
            degree = hops.hop.degree[i]
            if fanout == 0 or (all_positive and (fanout < 0 or degree <= fanout)):
                first[i] = -1
                i += 1
                continue
            if n and n + degree > room:
                break
            if there:
                if n + degree > there:
                    is_full = True
                    break
                for j in range(degree):
                    positions[n + j] = starts[i] + j
            first[i] = n
            n += degree
            i += 1
    if is_full:
        raise ValueError(f"positions has room for {there} only")
    return i, n


def draw(Hops hops not None, int64_t begin, int64_t end, int64_t fanout, bint replace, uint64_t key,
         const double[::1] columns not None, const int64_t[::1] first not None, int64_t[::1] src not None,
         int64_t[::1] dst not None, int64_t n_edges, int64_t[::1] scratch not None, int level=2):
    """Draw from lists ``begin … end - 1`` of a hop, in proportion to weights.

    Parameters
    ----------
    hops : Hops
    begin, end, fanout, replace, key
        As for :meth:`Hops.start`; the first ``begin`` lists are drawn from already.
    columns : float64 array
        What :func:`make_columns` has made of the weights.
    first : int64 array, shape (at least end,)
        Index of each list's first column; -1, for a list that is taken whole: all of its weights are positive.
    src, dst : int64 array, as long as :meth:`Hops.count` tells
        Receive where each drawn neighbour lies, as for :meth:`Hops.start` with ``drawn``, and its list.
    n_edges : int
        Edges drawn before, which are there.
    scratch : int64 array
        A word for each draw from one list.
    level : int
        Widest vector form to use, if the processor has it: 0 none, 1 AVX2, 2 AVX-512. All draw the same.

    Returns
    -------
    int, int
        Edges drawn by now, and how many of the new ones are in the file.
    """
    cdef fs_weighted hop
    cdef fs_draw_weighted_fn draw_lists = fs_choose_draw_weighted(level)
    cdef int64_t i, n, n_columns = columns.shape[0], needed = n_edges, longest = 0, bad = -1
    if begin < 0 or end > hops._n_lists() or first.shape[0] < end or n_edges < 0:
        raise ValueError("more destinations than lists, or than their first columns")
    if begin >= end:
        return n_edges, 0
    hop.lists, hop.place, hop.degree, hop.first = hops.hop.lists, hops.hop.place, hops.hop.degree, &first[0]
    with nogil:
        for i in range(begin, end):
            n = hop.degree[i]
            if n > FS_LONGEST and fanout:
                bad = i
            if fanout >= 0 and (n > fanout or (replace and n)):
                longest = fanout
                n = fanout
                if first[i] < 0 and fanout:
                    bad = i
            if fanout and first[i] >= 0 and first[i] > n_columns - hop.degree[i]:
                bad = i
            needed += n
    if bad >= 0:
        raise ValueError(f"the columns of list {bad} are not there")
    check_length("src", src.shape[0], needed)
    check_length("dst", dst.shape[0], needed)
    check_length("scratch", scratch.shape[0], longest)
    if needed == n_edges:
        return n_edges, 0
    hop.columns = <const fs_column *>&columns[0] if n_columns else NULL
    hop.fanout, hop.key, hop.replace = fanout, key, replace
    hop.src, hop.dst, hop.scratch = &src[0], &dst[0], &scratch[0] if longest else NULL
    hop.n_edges, hop.n_missing = n_edges, 0
    with nogil:
        draw_lists(&hop, begin, end)
    return hop.n_edges, hop.n_missing


def first_bad_weight(const double[::1] weights not None):
    """Find the first weight that is negative, infinite or NaN.

    Returns
    -------
    int, int
        Its index or -1, and how many weights are 0, if all are good.
    """
    cdef int64_t bad, zeros = 0
    if not weights.shape[0]:
        return -1, 0
    with nogil:
        bad = fs_first_bad_weight(&weights[0], weights.shape[0], &zeros)
    return bad, zeros


def place_weights(const double[::1] weights not None, int64_t first, ids, double[::1] out not None):
    """Put weights in the order of stored edges.

    Parameters
    ----------
    weights : float64 array
        Those of edges ``first …``, by number.
    ids : buffer of int32 or int64
        The number of each stored edge.
    out : float64 array
        Receives the weight of each of these edges whose weight is there; the others stay.
    """
    cdef Ids numbers = Ids(ids, 0)
    check_length("out", out.shape[0], numbers.n)
    if numbers.n and weights.shape[0]:
        with nogil:
            fs_place_weights(&weights[0], first, weights.shape[0], numbers.data, numbers.wide, numbers.n, &out[0])


def make_columns(double[::1] weights not None, const int64_t[::1] offsets not None):
    """Make columns in the place of the weights of lists, of which list ``i`` has ``offsets[i] … offsets[i + 1] - 1``.

    Returns
    -------
    int
        The first list that is longer than ``LONGEST``, from which on nothing is made; or -1.
    """
    cdef int64_t n = offsets.shape[0] - 1, i, bad = -1
    cdef bint is_bad = False
    if n < 1:
        return -1
    with nogil:
        for i in range(n):
            is_bad |= offsets[i] < 0 or offsets[i + 1] < offsets[i]
    if is_bad or offsets[n] > weights.shape[0]:
        raise ValueError("offsets do not lie in the weights")
    if weights.shape[0]:
        with nogil:
            for i in range(n):
                if offsets[i + 1] - offsets[i] > FS_LONGEST:
                    bad = i
                    break
                if offsets[i + 1] > offsets[i]:
                    fs_make_columns(&weights[offsets[i]], offsets[i + 1] - offsets[i])
    return bad


def make_columns_of(Hops hops not None, int64_t begin, int64_t end, const int64_t[::1] first not None,
                    double[::1] weights not None):
    """Make columns in the place of the weights of lists ``begin … end - 1`` of a hop, as :func:`turn` has placed them."""
    cdef int64_t i, n = weights.shape[0]
    cdef bint is_bad = False
    if begin < 0 or end > hops._n_lists() or first.shape[0] < end:
        raise ValueError("more destinations than lists, or than their first columns")
    with nogil:
        for i in range(begin, end):
            if first[i] < 0:
                continue
            if first[i] > n - hops.hop.degree[i] or hops.hop.degree[i] > FS_LONGEST:
                is_bad = True
                break
            if hops.hop.degree[i]:
                fs_make_columns(&weights[first[i]], hops.hop.degree[i])
    if is_bad:
        raise ValueError(f"the weights of list {i} are not there")
