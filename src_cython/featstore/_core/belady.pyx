"""Belady's algorithm over a known trace, at batch granularity, linear in the number of accesses.

Trace positions are numbered. A backward pass gives each access the position of its row's next one. "In the cache until its next
use" is then one bit a future position: a hit test reads the next bit in order, and eviction clears set bits from the far end. A
third pass turns the bits, which by then say which rows are really used again, into slots; so a row is admitted only if it will
be hit, and leaves at its last hit. Belady 1966; at batch granularity Ginex (VLDB 2022), section 4.3.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free

cdef extern from *:
    """
    #include <stdint.h>
    #define fs_touch(p) __builtin_prefetch((p), 1, 1)
    #define fs_peek(p) __builtin_prefetch((p), 0, 1)
    #define fs_popcount __builtin_popcountll
    #define fs_top(x) (63 - __builtin_clzll(x))
    """
    void fs_touch(const void *p) nogil
    void fs_peek(const void *p) nogil
    int fs_popcount(uint64_t x) nogil
    int fs_top(uint64_t x) nogil

ctypedef fused row_t:
    int32_t
    int64_t

ctypedef fused pos_t:
    int32_t
    int64_t

cdef enum:
    AHEAD = 24


def link(const row_t[::1] rows not None, int64_t first, pos_t[::1] last not None, pos_t[::1] nxt not None):
    """One stretch of the backward pass: positions ``first … first + len(rows) - 1``, stretches from the trace's end to its start.

    ``last[row]`` is the row's next position so far (the trace's length: none); ``nxt[i]`` becomes that of each access.

    Returns the index of an access whose row is out of range, or −1.
    """
    cdef int64_t i, k = rows.shape[0], n = last.shape[0], bad = -1
    cdef int64_t row
    if nxt.shape[0] != k:
        raise ValueError("one next position an access")
    if k == 0:
        return -1
    cdef const row_t *r = &rows[0]
    cdef pos_t *out = &nxt[0]
    cdef pos_t *seen
    with nogil:
        for i in range(k):
            if <uint64_t>r[i] >= <uint64_t>n:
                bad = i
                break
    if bad >= 0:
        return bad
    seen = &last[0]
    with nogil:
        for i in range(k - 1, -1, -1):
            if i >= AHEAD:
                fs_touch(seen + r[i - AHEAD])
            row = r[i]
            out[i] = seen[row]
            seen[row] = <pos_t>(first + i)
    return -1


cdef class Bits:
    """One bit a trace position: whether the row accessed there is in the cache until then. Two more bits a position mark bits of
    rows that have been hit since they came in, and words that are not empty. One owner thread.
    """

    cdef uint64_t *words  # two a 64 positions: kept, and hit before
    cdef uint64_t *summary  # one bit a word
    cdef readonly int64_t length
    cdef readonly int64_t count
    cdef int64_t top_word  # no set bit of a future position lies above it
    cdef int64_t capacity

    def __cinit__(self, int64_t length, int64_t capacity):
        cdef int64_t n_words = length // 64 + 1
        self.length = length
        self.capacity = capacity
        self.words = <uint64_t *>calloc(2 * n_words, sizeof(uint64_t))
        self.summary = <uint64_t *>calloc(n_words // 64 + 1, sizeof(uint64_t))
        if self.words == NULL or self.summary == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.words)
        free(self.summary)

    @property
    def nbytes(self):
        """Bytes held."""
        return (2 * (self.length // 64 + 1) + self.length // 4096 + 1) * sizeof(uint64_t)

    cdef void keep(self, int64_t position) noexcept nogil:
        cdef int64_t w = position >> 6
        self.words[2 * w] |= <uint64_t>1 << (position & 63)
        self.summary[w >> 6] |= <uint64_t>1 << (w & 63)
        if w > self.top_word:
            self.top_word = w

    def start(self, const pos_t[::1] positions not None):
        """Mark what the cache holds at the start: the first position of each resident row (paid for, so as if hit before)."""
        cdef int64_t i
        for i in range(positions.shape[0]):
            if not 0 <= positions[i] < self.length:
                raise ValueError("a resident row is not accessed in this trace")
            self.keep(positions[i])
            self.words[2 * (positions[i] >> 6) + 1] |= <uint64_t>1 << (positions[i] & 63)
            self.count += 1

    cdef int64_t highest(self) noexcept nogil:
        """The highest word that is not empty, from ``top_word`` down; −1 if none."""
        cdef int64_t s = self.top_word >> 6
        cdef uint64_t mask = self.summary[s] & (<uint64_t>-1 >> (63 - (self.top_word & 63)))
        while mask == 0:
            s -= 1
            if s < 0:
                return -1
            mask = self.summary[s]
        return (s << 6) + fs_top(mask)

    cdef int64_t clear(self, int64_t low, int64_t high, int64_t n, bint spare_hit) noexcept nogil:
        """Clear up to ``n`` bits in ``low … high``, highest first; with ``spare_hit`` never-hit ones. Returns the count."""
        cdef int64_t w, done = 0
        cdef uint64_t chosen, bit
        for w in range(high >> 6, (low >> 6) - 1, -1):
            chosen = self.words[2 * w]
            if chosen == 0:
                continue
            if w == low >> 6:
                chosen &= <uint64_t>-1 << (low & 63)
            if w == high >> 6:
                chosen &= <uint64_t>-1 >> (63 - (high & 63))
            if spare_hit:
                chosen &= ~self.words[2 * w + 1]
            if fs_popcount(chosen) <= n - done:
                done += fs_popcount(chosen)
                self.words[2 * w] &= ~chosen
            else:
                while done < n:
                    bit = <uint64_t>1 << fs_top(chosen)
                    self.words[2 * w] &= ~bit
                    chosen &= ~bit
                    done += 1
            if self.words[2 * w] == 0:
                self.summary[w >> 6] &= ~(<uint64_t>1 << (w & 63))
            if done == n:
                break
        return done

    cdef int64_t count_in(self, int64_t low, int64_t high) noexcept nogil:
        cdef int64_t w, total = 0
        cdef uint64_t word
        for w in range(low >> 6, (high >> 6) + 1):
            word = self.words[2 * w]
            if w == low >> 6:
                word &= <uint64_t>-1 << (low & 63)
            if w == high >> 6:
                word &= <uint64_t>-1 >> (63 - (high & 63))
            total += fs_popcount(word)
        return total

    cdef void evict(self, const int64_t *offsets, int64_t n_batches, int64_t now) noexcept nogil:
        """Bring the count down to the capacity: whole batches from the far end, then part of one, never-hit rows first."""
        cdef int64_t w, position, low, high, middle, inside, excess
        while self.count > self.capacity:
            w = self.highest()
            self.top_word = w
            position = (w << 6) + fs_top(self.words[2 * w])
            low, high = now, n_batches  # the batch that holds the position
            while high - low > 1:
                middle = (low + high) >> 1
                if offsets[middle] <= position:
                    low = middle
                else:
                    high = middle
            inside = self.count_in(offsets[low], position)
            excess = self.count - self.capacity
            if inside <= excess:
                self.count -= self.clear(offsets[low], position, inside, False)
            else:
                excess -= self.clear(offsets[low], position, excess, True)
                self.clear(offsets[low], position, excess, False)
                self.count = self.capacity

    def run(self, const pos_t[::1] nxt not None, const int64_t[::1] offsets not None, int64_t begin, int64_t end, int64_t origin):
        """Run batches ``begin … end - 1``; batch b is positions ``offsets[b] … offsets[b+1] - 1``; ``nxt[0]`` is ``origin``'s."""
        cdef int64_t b, p, q, s, e, n_batches = offsets.shape[0] - 1, length = self.length
        cdef int64_t w, qa
        cdef uint64_t hit, bit
        if begin < 0 or end > n_batches or begin >= end:
            return
        if offsets[n_batches] != length or offsets[end] - origin > nxt.shape[0] or origin > offsets[begin]:
            raise ValueError("the stretch does not cover its batches")
        if offsets[end] == offsets[begin]:
            return
        cdef const pos_t *next_of = &nxt[0] - origin
        cdef const int64_t *offset = &offsets[0]
        cdef uint64_t *words = self.words
        with nogil:
            for b in range(begin, end):
                s, e = offset[b], offset[b + 1]
                for p in range(s, e):
                    if p + AHEAD < e:
                        qa = next_of[p + AHEAD] >> 6
                        fs_touch(words + 2 * qa)
                        fs_touch(self.summary + (qa >> 6))
                    hit = words[2 * (p >> 6)] >> (p & 63) & 1
                    q = next_of[p]
                    # "Never" is the position behind the last: its bit is set too, and not counted.
                    w = q >> 6
                    bit = <uint64_t>1 << (q & 63)
                    words[2 * w] |= bit
                    words[2 * w + 1] |= bit * hit
                    self.summary[w >> 6] |= <uint64_t>(q < length) << (w & 63)
                    if w > self.top_word and q < length:
                        self.top_word = w
                    self.count += (q < length) - <int64_t>hit
                words[2 * (length >> 6)] &= ~(<uint64_t>1 << (length & 63))
                self.evict(offset, n_batches, b)


cdef class Slots:
    """Slots of the rows in the cache, and the free ones. One owner thread."""

    cdef int32_t[::1] slot_of_row
    cdef int32_t[::1] free_slots
    cdef readonly int64_t n_free

    def __init__(self, int32_t[::1] slot_of_row not None, int32_t[::1] free_slots not None, int64_t n_taken=0):
        """``slot_of_row``: −1 where absent; ``free_slots``: every slot once, the last taken first; the last ``n_taken`` are."""
        if not 0 <= n_taken <= free_slots.shape[0]:
            raise ValueError("more slots are taken than there are")
        self.slot_of_row = slot_of_row
        self.free_slots = free_slots
        self.n_free = free_slots.shape[0] - n_taken

    def release(self, const row_t[::1] rows not None):
        """Free the slots of cached ``rows``."""
        cdef int64_t i
        cdef int32_t slot
        for i in range(rows.shape[0]):
            slot = self.slot_of_row[rows[i]]
            if slot < 0:
                raise ValueError(f"row {rows[i]} is not cached")
            self.slot_of_row[rows[i]] = -1
            self.free_slots[self.n_free] = slot
            self.n_free += 1

    def changes(self, Bits bits not None, const row_t[::1] rows not None, const pos_t[::1] nxt not None, int64_t first,
                int32_t[::1] slots not None, int64_t[::1] in_positions not None, int32_t[::1] in_slots not None,
                int64_t[::1] out_rows not None):
        """Turn the bits of one batch, positions ``first …``, into its slots (−1: missed) and its changeset.

        Returns (hits, rows admitted, rows evicted); the three last arrays have room for a whole batch.
        """
        cdef int64_t i, k = rows.shape[0], n_in = 0, n_out = 0, n_hits = 0, p, q, row
        cdef uint64_t *words = bits.words
        cdef int64_t length = bits.length
        cdef int32_t *table
        cdef int32_t slot
        cdef bint hit, kept, good = True
        if min(nxt.shape[0], slots.shape[0], in_positions.shape[0], in_slots.shape[0], out_rows.shape[0]) < k:
            raise ValueError("arrays shorter than the batch")
        if first < 0 or first + k > length:
            raise ValueError("positions outside the trace")
        if k == 0:
            return 0, 0, 0
        table = &self.slot_of_row[0]
        with nogil:
            for i in range(k):
                if i + AHEAD < k:
                    fs_touch(table + rows[i + AHEAD])
                    fs_peek(words + 2 * (nxt[i + AHEAD] >> 6))
                p = first + i
                q = nxt[i]
                row = rows[i]
                hit = words[2 * (p >> 6)] >> (p & 63) & 1
                kept = q < length and words[2 * (q >> 6)] >> (q & 63) & 1
                slot = -1
                if hit:
                    n_hits += 1
                    slot = table[row]
                    if not kept:  # its slot is free for this batch's own admissions: hits are copied before them
                        table[row] = -1
                        out_rows[n_out] = row
                        n_out += 1
                        self.free_slots[self.n_free] = slot
                        self.n_free += 1
                elif kept:
                    in_positions[n_in] = i
                    n_in += 1
                slots[i] = slot
            good = n_in <= self.n_free
            if good:
                for i in range(n_in):
                    self.n_free -= 1
                    slot = self.free_slots[self.n_free]
                    in_slots[i] = slot
                    table[rows[in_positions[i]]] = slot
        if not good:
            raise AssertionError("more rows admitted than slots")
        return n_hits, n_in, n_out


def bits_at(Bits bits not None, const pos_t[::1] positions not None, uint8_t[::1] out not None):
    """Write whether each position's bit is set; positions behind the trace have none."""
    cdef int64_t i, q
    for i in range(positions.shape[0]):
        q = positions[i]
        out[i] = q < bits.length and bits.words[2 * (q >> 6)] >> (q & 63) & 1


def next_uses(const row_t[::1] rows not None, int64_t batch, int64_t[::1] ptr not None, const int64_t[::1] end not None,
              const pos_t[::1] iters not None, int64_t[::1] out not None, bint advance):
    """Write the first batch above ``batch`` that touches each row, −1 if none; ``advance`` moves ``ptr`` there."""
    cdef int64_t i, at, row
    for i in range(rows.shape[0]):
        row = rows[i]
        if not 0 <= row < ptr.shape[0]:
            raise IndexError(f"row {row} at position {i} is out of range for {ptr.shape[0]} rows")
        at = ptr[row]
        while at < end[row] and iters[at] <= batch:
            at += 1
        if advance:
            ptr[row] = at
        out[i] = iters[at] if at < end[row] else -1


def fill_iters(const row_t[::1] rows not None, int64_t batch, int64_t[::1] cursor not None, pos_t[::1] iters not None):
    """Second pass of the CSR form: append ``batch`` to each row's list."""
    cdef int64_t i, k = rows.shape[0]
    for i in range(k):
        if i + AHEAD < k:
            fs_touch(&cursor[rows[i + AHEAD]])
        iters[cursor[rows[i]]] = <pos_t>batch
        cursor[rows[i]] += 1
