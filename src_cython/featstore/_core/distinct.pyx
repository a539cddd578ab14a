"""Distinct rows of a stretch of a trace, by a bit a row: numbered from nought, or checked on their way into a trace."""

from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memset

from featstore._core.bits cimport AHEAD, fs_peek, fs_popcount, fs_touch, outside, row_t


cdef class Ranks:
    """The distinct rows of a window, numbered 0, 1, … in ascending order: a bitmap, and beside each word of 64 bits how many lie
    before it. Tables of what a window knows of each row then grow with its rows and not with the field's. One owner thread.
    """

    cdef uint64_t[::1] memory
    cdef uint64_t *pairs  # a word of bits and its rank, a 64 rows
    cdef readonly int64_t n
    cdef readonly int64_t count

    @staticmethod
    def words_for(int64_t n):
        """Return how many 64-bit words of memory a field of ``n`` rows needs: a quarter byte a row."""
        return 2 * (n // 64 + 1)

    def __init__(self, uint64_t[::1] memory not None, int64_t n):
        """``memory``: zeroed, :meth:`words_for` words."""
        if n < 0 or memory.shape[0] < Ranks.words_for(n):
            raise ValueError("too little memory for the rows")
        self.memory = memory
        self.pairs = &memory[0]
        self.n = n

    def mark(self, const row_t[::1] rows not None):
        """Note that the window has ``rows``. Returns the index of one that is out of range, or −1."""
        cdef int64_t i, k = rows.shape[0], bad
        cdef uint64_t *pairs = self.pairs
        if k == 0:
            return -1
        cdef const row_t *r = &rows[0]
        with nogil:
            bad = outside(r, k, self.n)
            if bad < 0:
                for i in range(k):
                    if i + AHEAD < k:
                        fs_touch(pairs + 2 * (r[i + AHEAD] >> 6))
                    pairs[2 * (r[i] >> 6)] |= <uint64_t>1 << (r[i] & 63)
        return bad

    def number(self):
        """Number the rows that were marked; nothing is marked afterwards. Returns how many there are."""
        cdef int64_t w
        cdef uint64_t total = 0
        with nogil:
            for w in range(self.n // 64 + 1):
                self.pairs[2 * w + 1] = total
                total += fs_popcount(self.pairs[2 * w])
        self.count = <int64_t>total
        return self.count

    def of(self, const row_t[::1] rows not None, row_t[::1] out not None):
        """Write the number of each row, −1 for one that the window does not have; each is in ``0 … n - 1``."""
        cdef int64_t i, k = rows.shape[0], bad
        cdef uint64_t word, below
        cdef uint64_t *pair
        if out.shape[0] < k:
            raise ValueError("an array shorter than the rows")
        if k == 0:
            return
        cdef const row_t *r = &rows[0]
        with nogil:
            bad = outside(r, k, self.n)
        if bad >= 0:
            raise IndexError(f"row {rows[bad]} is out of range for {self.n} rows")
        with nogil:
            for i in range(k):
                if i + AHEAD < k:
                    fs_peek(self.pairs + 2 * (r[i + AHEAD] >> 6))
                pair = self.pairs + 2 * (r[i] >> 6)
                word = pair[0]
                below = (<uint64_t>1 << (r[i] & 63)) - 1
                out[i] = <row_t>(pair[1] + fs_popcount(word & below)) if word >> (r[i] & 63) & 1 else -1


def first_bad(const row_t[::1] rows not None, int64_t n, int32_t[::1] narrowed, uint64_t[::1] bits not None):
    """Return the index of the first row that is not in ``0 … n - 1`` or is there before; −1 if none. One pass.

    Parameters
    ----------
    rows : int32 or int64 array, shape (k,)
    n : int
    narrowed : int32 array, shape (k,), or None
        Receives the rows, up to the one that is returned; ``n`` is then below 2³¹.
    bits : uint64 array
        A bit a row, zero before and after; empty: repeats are not looked for.
    """
    cdef int64_t i, k = rows.shape[0], found = -1, words = bits.shape[0], done
    cdef int64_t row
    cdef uint64_t bit
    cdef int32_t *out = NULL
    cdef uint64_t *seen = NULL
    if words and words < n // 64 + (n % 64 != 0):
        raise ValueError("too few bits for the rows")
    if narrowed is not None:
        if narrowed.shape[0] != k or n >= <int64_t>1 << 31:
            raise ValueError("no room for the rows")
        out = &narrowed[0] if k else NULL
    if k == 0:
        return -1
    cdef const row_t *r = &rows[0]
    if words:
        seen = &bits[0]
    with nogil:
        for i in range(k):
            row = r[i]
            if not 0 <= row < n:
                found = i
                break
            if out != NULL:
                out[i] = <int32_t>row
            if seen != NULL:
                if i + AHEAD < k and 0 <= r[i + AHEAD] < n:
                    fs_touch(seen + (r[i + AHEAD] >> 6))
                bit = <uint64_t>1 << (row & 63)
                if seen[row >> 6] & bit:
                    found = i
                    break
                seen[row >> 6] |= bit
        if seen != NULL:
            done = k if found < 0 else found
            if words <= done:
                memset(seen, 0, 8 * words)
            else:
                for i in range(done):
                    seen[r[i] >> 6] = 0
    return found
