"""Stored blocks: 32-bit sources and a count a destination on disk, 64-bit source and destination numbers in a batch."""

from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcmp


def count_destinations(const int64_t[::1] dst not None, int32_t[::1] counts not None):
    """Write how often each destination occurs in ``dst``, which ascends; ``counts`` has one entry a destination."""
    cdef int64_t i, n = counts.shape[0], k = dst.shape[0], bad = -1
    with nogil:
        for i in range(n):
            counts[i] = 0
        for i in range(k):
            if not 0 <= dst[i] < n or (i and dst[i] < dst[i - 1]):
                bad = i
                break
            counts[dst[i]] += 1
    if bad >= 0:
        raise ValueError(f"destination {dst[bad]} at edge {bad} is out of order or out of range")


def expand(const int32_t[::1] counts not None, const int32_t[::1] sources not None, int64_t n_src,
           int64_t[::1] dst not None, int64_t[::1] src not None):
    """Write the edges' sources and destinations; returns whether counts and sources fit each other and ``n_src``."""
    cdef int64_t i, j, at = 0, n = counts.shape[0], k = sources.shape[0]
    cdef bint good = dst.shape[0] == k and src.shape[0] == k
    if not good:
        return False
    with nogil:
        for i in range(n):
            if counts[i] < 0 or counts[i] > k - at:
                good = False
                break
            for j in range(at, at + counts[i]):
                dst[j] = i
            at += counts[i]
        good = good and at == k
        for j in range(k):
            src[j] = sources[j]
            good = good and 0 <= sources[j] < n_src
    return good


def narrow(const int64_t[::1] values not None, int32_t[::1] out not None):
    """Copy to 32 bits; the caller knows that the values fit."""
    cdef int64_t i
    if out.shape[0] != values.shape[0]:
        raise ValueError("out must be as long as values")
    with nogil:
        for i in range(values.shape[0]):
            out[i] = <int32_t>values[i]


def hits_of(const int32_t[::1] slots not None, int64_t[::1] positions not None, int32_t[::1] hit_slots not None):
    """Write where ``slots`` are not −1, ascending, and those slots; the outputs have room for all. Returns how many there are."""
    cdef int64_t i, h = 0, k = slots.shape[0]
    if min(positions.shape[0], hit_slots.shape[0]) < k:
        raise ValueError("outputs shorter than the batch")
    with nogil:
        for i in range(k):
            # No branch: which rows hit is as good as random to the processor.
            positions[h] = i
            hit_slots[h] = slots[i]
            h += slots[i] >= 0
    return h


def missed_positions(const int32_t[::1] slots not None, int32_t[::1] out not None):
    """Write where ``slots`` are −1, ascending; ``out`` has room for all. Returns how many there are."""
    cdef int64_t i, m = 0, k = slots.shape[0]
    if out.shape[0] < k:
        raise ValueError("out is shorter than the batch")
    with nogil:
        for i in range(k):
            out[m] = <int32_t>i
            m += slots[i] < 0
    return m


def begins_with(const int64_t[::1] values not None, const int64_t[::1] first not None):
    """Whether ``values`` begin with ``first``. Keeps the GIL for some 10 µs: another thread might keep it for milliseconds."""
    cdef int64_t k = first.shape[0]
    return values.shape[0] >= k and (k == 0 or memcmp(&values[0], &first[0], k * sizeof(int64_t)) == 0)
