"""Choice of a cache's neighbour lists: nodes are weighed by the keys of their scores, and given places one after the other.

A score's key is an unsigned integer that orders as the score does, so that a threshold is found digit by digit. A list costs its
record: its entries, which are its ids and one place more for its length.
"""

from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    SIGN = 63

cdef double NEVER = 2.0 ** 50  # cost of a record that cannot be written: no memory affords it


cdef inline uint64_t key_of(const double *at) noexcept nogil:
    cdef uint64_t bits
    cdef double score
    memcpy(&score, at, 8)  # not as a double: places may be written into the same memory
    score += 0.0  # of the two zeros only one is left
    memcpy(&bits, &score, 8)
    return ~bits if bits >> SIGN else bits | <uint64_t>1 << SIGN


cdef inline double cost_of(const int64_t *indptr, int64_t node, int id_bytes, int entry_bytes) noexcept nogil:
    cdef int64_t degree = indptr[node + 1] - indptr[node]
    if id_bytes == 4 and degree > 0x7FFFFFFF:  # its record has no room for the length
        return NEVER
    return <double>((degree + 1) * entry_bytes)


cdef _check(const double[::1] scores, const int64_t[::1] indptr, int64_t first, int id_bytes, int entry_bytes):
    if id_bytes != 4 and id_bytes != 8:
        raise ValueError(f"ids have 4 or 8 bytes, not {id_bytes}")
    if entry_bytes < id_bytes:
        raise ValueError(f"an entry has at least the {id_bytes} bytes of its id, not {entry_bytes}")
    if first < 0 or first + scores.shape[0] + 1 > indptr.shape[0]:
        raise ValueError("scores reach beyond the nodes")


def weigh(const double[::1] scores not None, const int64_t[::1] indptr not None, int64_t first, int id_bytes, int entry_bytes,
          int shift, uint64_t known, double[::1] weights not None):
    """Add what the lists of nodes ``first …`` cost to the weight of the digit that each node's key has at ``shift``.

    Parameters
    ----------
    scores : float64 array, shape (k,)
    indptr : int64 array, shape (N + 1,)
        Ascends.
    first : int
        The node of the first score.
    id_bytes : {4, 8}
    entry_bytes : int
        What an entry of a record takes: its id, and whatever is kept beside it.
    shift : int
        Bits below the digit, in ``[0, 64)``.
    known : int
        What a key must have above the digit to be counted; 0 where the digit is the highest.
    weights : float64 array, shape (a power of two,)
        One for each value of the digit, in bytes.

    Returns
    -------
    int
        Index of a score that is NaN, or −1.

    Raises
    ------
    ValueError
        Lengths disagree, or a width or a digit is out of range.
    """
    cdef int64_t i, k = scores.shape[0], bad = -1
    cdef uint64_t last = weights.shape[0] - 1, key, above
    cdef int bits = 0
    _check(scores, indptr, first, id_bytes, entry_bytes)
    if weights.shape[0] >= 2:
        while last >> bits:
            bits += 1
    if not bits or (last & (last + 1)) or shift < 0 or shift + bits > 64:
        raise ValueError("a digit has a power of two of values and lies within 64 bits")
    if k == 0:
        return -1
    cdef const double *s = &scores[0]
    cdef const int64_t *offsets = &indptr[0]
    cdef double *w = &weights[0]
    with nogil:
        for i in range(k):
            if s[i] != s[i]:
                bad = i
                break
            key = key_of(s + i) >> shift
            above = key >> bits
            if above == known:
                w[key & last] += cost_of(offsets, first + i, id_bytes, entry_bytes)
    return bad


def place(const double[::1] scores not None, const int64_t[::1] indptr not None, int64_t first, int id_bytes, int entry_bytes,
          uint64_t threshold, double left, int64_t end, int64_t[::1] out not None):
    """Give the records of chosen nodes among ``first …`` their places, in node order from ``end`` on; -1 to the others.

    Chosen are the keys above ``threshold``, and of those equal to it the first ones that ``left`` bytes suffice for.

    Parameters
    ----------
    scores, indptr, first, id_bytes, entry_bytes
        As for :func:`weigh`; no NaN.
    threshold : int
    left : float
        Bytes; negative: nothing equal to the threshold is chosen any more.
    end : int
        Place of the first record, counted in entries.
    out : int64 array, shape (k,)
        May be the memory of ``scores``.

    Returns
    -------
    tuple of float and int
        ``left`` and ``end`` for the nodes that follow.

    Raises
    ------
    ValueError
        Lengths disagree, or a width is out of range.
    """
    cdef int64_t i, k = scores.shape[0]
    cdef uint64_t key
    cdef double cost
    cdef bint chosen
    _check(scores, indptr, first, id_bytes, entry_bytes)
    if out.shape[0] != k:
        raise ValueError("one place a node")
    if k == 0:
        return left, end
    cdef const double *s = &scores[0]
    cdef const int64_t *offsets = &indptr[0]
    cdef int64_t *places = &out[0]
    with nogil:
        for i in range(k):
            key = key_of(s + i)
            chosen = key > threshold
            if key == threshold:
                cost = cost_of(offsets, first + i, id_bytes, entry_bytes)
                chosen = cost <= left
                left = left - cost if chosen else -1.0  # a prefix: nothing after the first that does not fit
            places[i] = end if chosen else -1
            end += offsets[first + i + 1] - offsets[first + i] + 1 if chosen else 0
    return left, end
