"""Pairs of numbers that are sorted: records divided among buckets, and keys sorted by radix."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "kernels/pairs.h" nogil:
    ctypedef struct fs_pairs:
        const uint32_t *records
        int64_t n
        int64_t words
        int64_t at
        int64_t wide
        int64_t low
        int64_t width
        int64_t n_buckets
    int64_t fs_bucket_pairs(const fs_pairs *pairs, uint16_t *bucket, int64_t *ends)
    void fs_move_pairs(const fs_pairs *pairs, const uint16_t *bucket, int64_t *ends, uint32_t *out)


def divide(const uint8_t[::1] records not None, int64_t record_bytes, int64_t at, int64_t number_bytes, int64_t low,
           int64_t width, uint16_t[::1] bucket not None, int64_t[::1] begins not None, uint8_t[::1] out not None):
    """Write records to ``out`` by the buckets of one of their numbers, those of a bucket in their order.

    Parameters
    ----------
    records : uint8 array, shape (k * record_bytes,)
        Records of 8, 12, 16, 20 or 24 bytes, of which ``number_bytes`` (4 or 8) from ``at`` on are the number.
    low, width : int
        Bucket ``b`` has the numbers from ``low + b * width`` on; ValueError for one that no bucket has.
    bucket : uint16 array, shape (k,)
        Overwritten.
    begins : int64 array, shape (buckets,)
        Gets the record in ``out`` at which each bucket begins.
    out : uint8 array, shape (k * record_bytes,)
    """
    cdef fs_pairs pairs
    cdef int64_t bad
    if record_bytes not in (8, 12, 16, 20, 24) or number_bytes not in (4, 8):
        raise ValueError("records have 8, 12, 16, 20 or 24 bytes, and a number 4 or 8")
    if at % 4 or not 0 <= at <= record_bytes - number_bytes:
        raise ValueError("the number lies in the records, at a multiple of 4 bytes")
    if width < 1 or not 1 <= begins.shape[0] <= 1 << 16:
        raise ValueError("buckets have a number or more each, and there are from 1 to 65536")
    pairs.n = bucket.shape[0]
    if records.shape[0] % record_bytes or records.shape[0] // record_bytes != pairs.n or out.shape[0] != records.shape[0]:
        raise ValueError("a bucket and a place for each record")
    pairs.words, pairs.at, pairs.wide = record_bytes // 4, at // 4, number_bytes == 8
    pairs.low, pairs.width, pairs.n_buckets = low, width, begins.shape[0]
    if pairs.n == 0:
        begins[:] = 0
        return
    pairs.records = <const uint32_t *>&records[0]
    if (<size_t>&records[0] | <size_t>&out[0]) % 4:
        raise ValueError("records are aligned to 4 bytes")
    with nogil:
        bad = fs_bucket_pairs(&pairs, &bucket[0], &begins[0])
        if bad < 0:
            fs_move_pairs(&pairs, &bucket[0], &begins[0], <uint32_t *>&out[0])
    if bad >= 0:
        raise ValueError(f"no bucket has the number of record {bad}")


def sort_keys(int64_t[::1] keys not None, int64_t[::1] spare not None, int low, int high):
    """Sort keys stably by their bits from ``low`` up to ``high``; return whether they are in ``spare`` then, which is as long.

    Time is linear: two passes over the keys for each 11 bits.
    """
    cdef uint64_t *found
    cdef int64_t n = keys.shape[0]
    if spare.shape[0] != n:
        raise ValueError("as much spare room as there are keys")
    if not 0 <= low <= high <= 64:
        raise ValueError("the bits must be of 64")
    if n == 0:
        return False
    with nogil:
        found = fs_sort_keys(<uint64_t *>&keys[0], <uint64_t *>&spare[0], <uint64_t>n, low, high)
    return found != <uint64_t *>&keys[0]
