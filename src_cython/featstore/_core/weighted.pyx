"""Draws in proportion to the weights of edges, and the weights in the order of the lists.

The kernels are in kernels/weighted.c.
"""

from libc.stdint cimport int64_t, uint64_t

from featstore._core.ids cimport Ids, check_length
from featstore._core.sampler cimport Hops


cdef extern from "kernels/weighted.h" nogil:
    enum:
        FS_LONGEST
        FS_SPARSE
        FS_LEAST_SPARSE
    ctypedef struct fs_column:
        pass
    ctypedef struct fs_weighted:
        const fs_column *columns
        const int64_t *lists
        const int64_t *place
        const int64_t *degree
        const int64_t *first
        int64_t n_trials
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
    int64_t fs_sparse_trials(int64_t, int) noexcept
    void fs_try_columns(uint64_t, int64_t, int64_t, int64_t, int64_t *) noexcept
    int fs_lacks(const fs_weighted *, int64_t) noexcept
    int64_t fs_first_bad_weight(const double *, int64_t, int64_t *) noexcept
    void fs_place_weights(const double *, int64_t, int64_t, const void *, int, int64_t, double *) noexcept
    int fs_make_columns(double *, int64_t) noexcept
    int64_t fs_first_bad_column(const fs_column *, int64_t, int64_t) noexcept


# Edges that a list with weights may have.
LONGEST = FS_LONGEST


def sparse_trials(int64_t fanout, bint replace):
    """Count the trials of long lists whose columns are read, in place of all columns of the list; 0: none are."""
    return fs_sparse_trials(fanout, replace)


def turn(Hops hops not None, int64_t begin, int64_t n_dst, int64_t fanout, bint replace, uint64_t key, bint all_positive,
         const int64_t[::1] starts not None, int64_t room, int64_t[::1] first not None, int64_t[::1] positions not None,
         int64_t n_trials=0):
    """Choose the next lists of a hop whose weights, or columns, are read together, and list the positions of their edges.

    Parameters
    ----------
    hops : Hops
        Whose first ``n_dst`` lists the hop draws from.
    begin, n_dst : int
    fanout, replace, key
        As for :meth:`Hops.start`.
    all_positive : bool
        No weight is 0: lists that are taken whole need no weights. To be false if draws are with replacement.
    starts : int64 array, shape (n_dst,)
        The stored position of each list's first edge.
    room : int
        Most positions, but for a list that is longer.
    first : int64 array, shape (n_dst,)
        Receives where the columns of each chosen list begin among those read; -1: they are not needed; -2 and less: they are
        those of its trials, and begin at -2 less this.
    positions : int64 array
        Receives the positions. If it is empty, they are only counted.
    n_trials : int
        Of a list of more than four times as many edges, columns are read of so many trials (:func:`sparse_trials`); 0: of all.

    Returns
    -------
    int, int
        The first list that is left, and the number of positions.
    """
    cdef int64_t i = begin, n = 0, j, degree, needed, there = positions.shape[0]
    cdef bint is_full = False, is_sparse
    if begin < 0 or n_dst > hops._n_lists() or starts.shape[0] < n_dst or first.shape[0] < n_dst or n_trials < 0:
        raise ValueError("more destinations than lists, or than their starts")
    with nogil:
        while i < n_dst:
            degree = hops.hop.degree[i]
            if fanout == 0 or (all_positive and (fanout < 0 or degree <= fanout)):
                first[i] = -1
                i += 1
                continue
            is_sparse = n_trials > 0 and (replace or degree > fanout) and degree > FS_LEAST_SPARSE * n_trials
            needed = n_trials if is_sparse else degree
            if n and n + needed > room:
                break
            if there:
                if n + needed > there:
                    is_full = True
                    break
                if is_sparse:
                    fs_try_columns(key, hops.hop.lists[i], degree, n_trials, &positions[n])
                for j in range(needed):
                    positions[n + j] = starts[i] + (positions[n + j] if is_sparse else j)
            first[i] = FS_SPARSE - n if is_sparse else n
            n += needed
            i += 1
    if is_full:
        raise ValueError(f"positions has room for {there} only")
    return i, n


cdef int64_t _begin(fs_weighted *hop, Hops hops, int64_t begin, int64_t end, int64_t fanout, bint replace, uint64_t key,
                    const double[::1] columns, const int64_t[::1] first, int64_t n_trials) except -1:
    """Fill in what draws from lists read, and check that it is there; returns the room that their draws need."""
    cdef int64_t i, n, begins, n_columns = columns.shape[0], needed = 0, bad = -1
    if begin < 0 or end > hops._n_lists() or first.shape[0] < end:
        raise ValueError("more destinations than lists, or than their first columns")
    if n_trials and n_trials != fs_sparse_trials(fanout, replace):
        raise ValueError("n_trials is of another fan-out")
    hop.lists, hop.place, hop.degree, hop.first = hops.hop.lists, hops.hop.place, hops.hop.degree, &first[0]
    with nogil:
        for i in range(begin, end):
            n = hop.degree[i]
            begins = n
            if n > FS_LONGEST and fanout:
                bad = i
            if fanout >= 0 and (n > fanout or (replace and n)):
                if first[i] == -1 and fanout:
                    bad = i
                if first[i] <= FS_SPARSE:
                    begins = n_trials
                n = fanout
            if first[i] <= FS_SPARSE and (not n_trials or n != fanout or begins != n_trials):
                bad = i
            if fanout and first[i] != -1 and (first[i] if first[i] >= 0 else FS_SPARSE - first[i]) > n_columns - begins:
                bad = i
            needed += n
    if bad >= 0:
        raise ValueError(f"the columns of list {bad} are not there")
    hop.columns = <const fs_column *>&columns[0] if n_columns else NULL
    hop.fanout, hop.key, hop.replace, hop.n_trials = fanout, key, replace, n_trials
    return needed


def lacking(Hops hops not None, int64_t begin, int64_t end, int64_t fanout, bint replace, uint64_t key,
            const double[::1] columns not None, int64_t[::1] first not None, int64_t room, int64_t n_trials):
    """Find the lists of a turn whose trials do not suffice: all of their columns are needed, behind those that are there.

    Parameters
    ----------
    hops, begin, end, fanout, replace, key, columns, first, n_trials
        As for :func:`draw`. ``first`` receives where the columns of these lists are to begin.
    room : int
        Most columns of such lists, but for one that is longer.

    Returns
    -------
    int, int
        The first list that is left, as its columns have no room; and how many columns are needed.
    """
    cdef fs_weighted hop
    cdef int64_t i = begin, n = 0, n_columns = columns.shape[0]
    if begin >= end:
        return end, 0
    _begin(&hop, hops, begin, end, fanout, replace, key, columns, first, n_trials)
    with nogil:
        while i < end:
            if fs_lacks(&hop, i):
                if n and n + hop.degree[i] > room:
                    break
                first[i] = n_columns + n
                n += hop.degree[i]
            i += 1
    return i, n


def place_lacking(Hops hops not None, int64_t begin, int64_t end, int64_t n_columns, const int64_t[::1] starts not None,
                  const int64_t[::1] first not None, int64_t[::1] positions not None):
    """List the positions of the edges of lists that :func:`lacking` has found, which begin behind ``n_columns`` columns."""
    cdef int64_t i, j, n = 0, there = positions.shape[0]
    cdef bint is_full = False
    if begin < 0 or end > hops._n_lists() or starts.shape[0] < end or first.shape[0] < end:
        raise ValueError("more destinations than lists, or than their starts")
    with nogil:
        for i in range(begin, end):
            if first[i] < n_columns:
                continue
            if n + hops.hop.degree[i] > there:
                is_full = True
                break
            for j in range(hops.hop.degree[i]):
                positions[n + j] = starts[i] + j
            n += hops.hop.degree[i]
    if is_full:
        raise ValueError(f"positions has room for {there} only")


def draw(Hops hops not None, int64_t begin, int64_t end, int64_t fanout, bint replace, uint64_t key,
         const double[::1] columns not None, const int64_t[::1] first not None, int64_t[::1] src not None,
         int64_t[::1] dst not None, int64_t n_edges, int64_t[::1] scratch not None, int64_t n_trials=0, int level=2):
    """Draw from lists ``begin … end - 1`` of a hop, in proportion to weights.

    Parameters
    ----------
    hops : Hops
    begin, end, fanout, replace, key
        As for :meth:`Hops.start`; the first ``begin`` lists are drawn from already.
    columns : float64 array
        What :func:`make_columns` has made of the weights.
    first : int64 array, shape (at least end,)
        Index of each list's first column; -1, for a list that is taken whole: all of its weights are positive; -2 less the index
        where only the columns of its trials are there, which suffice (:func:`lacking`).
    src, dst : int64 array, as long as :meth:`Hops.count` tells
        Receive where each drawn neighbour lies, as for :meth:`Hops.start` with ``drawn``, and its list.
    n_edges : int
        Edges drawn before, which are there.
    scratch : int64 array
        A word for each draw from one list.
    n_trials : int
        As for :func:`turn`.
    level : int
        Widest vector form to use, if the processor has it: 0 none, 1 AVX2, 2 AVX-512. All draw the same.

    Returns
    -------
    int, int
        Edges drawn by now, and how many of the new ones are in the file.
    """
    cdef fs_weighted hop
    cdef fs_draw_weighted_fn draw_lists = fs_choose_draw_weighted(level)
    cdef int64_t needed, longest
    if n_edges < 0:
        raise ValueError("a number of edges is negative")
    if begin >= end:
        return n_edges, 0
    needed = _begin(&hop, hops, begin, end, fanout, replace, key, columns, first, n_trials)
    longest = max(0, min(fanout, needed))
    needed += n_edges
    check_length("src", src.shape[0], needed)
    check_length("dst", dst.shape[0], needed)
    if needed == n_edges:
        return n_edges, 0
    check_length("scratch", scratch.shape[0], longest)
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

    Raises
    ------
    ArithmeticError
        A weight is none.
    """
    cdef int64_t n = offsets.shape[0] - 1, i, bad = -1
    cdef bint is_bad = False, is_none = False
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
                if offsets[i + 1] > offsets[i] and fs_make_columns(&weights[offsets[i]], offsets[i + 1] - offsets[i]):
                    is_none = True
                    break
    if is_none:
        raise ArithmeticError("a weight is negative, infinite or NaN")
    return bad


def make_columns_of(Hops hops not None, int64_t begin, int64_t end, const int64_t[::1] first not None,
                    double[::1] weights not None):
    """Make columns in the place of the weights of lists ``begin … end - 1`` of a hop, as :func:`turn` has placed them.

    ArithmeticError for a weight that is negative, infinite or NaN.
    """
    cdef int64_t i, n = weights.shape[0]
    cdef bint is_bad = False, is_none = False
    if begin < 0 or end > hops._n_lists() or first.shape[0] < end:
        raise ValueError("more destinations than lists, or than their first columns")
    with nogil:
        for i in range(begin, end):
            if first[i] < 0:
                continue
            if first[i] > n - hops.hop.degree[i] or hops.hop.degree[i] > FS_LONGEST:
                is_bad = True
                break
            if hops.hop.degree[i] and fs_make_columns(&weights[first[i]], hops.hop.degree[i]):
                is_none = True
                break
    if is_bad:
        raise ValueError(f"the weights of list {i} are not there")
    if is_none:
        raise ArithmeticError("a weight is negative, infinite or NaN")


def first_bad_column(Hops hops not None, int64_t begin, int64_t end, const double[::1] columns not None,
                     const int64_t[::1] first not None, int64_t n_trials, int64_t least=0):
    """Check that columns which were read name edges of their lists, as draws take it for granted.

    Parameters
    ----------
    hops, begin, end, columns, first, n_trials
        As for :func:`draw`.
    least : int
        Columns before this one were checked.

    Returns
    -------
    int
        The index of the first that does not, or -1.
    """
    cdef int64_t i, at, degree, n, n_columns = columns.shape[0], bad = -1
    if begin < 0 or end > hops._n_lists() or first.shape[0] < end or least < 0 or n_trials < 0:
        raise ValueError("more destinations than lists, or than their first columns")
    with nogil:
        for i in range(begin, end):
            at = first[i] if first[i] >= -1 else FS_SPARSE - first[i]
            degree = hops.hop.degree[i]
            n = n_trials if first[i] <= FS_SPARSE else degree
            if at < least or not n:
                continue
            if at > n_columns - n:
                bad = n_columns
                break
            bad = fs_first_bad_column(<const fs_column *>&columns[at], n, degree)
            if bad >= 0:
                bad += at
                break
    return bad
