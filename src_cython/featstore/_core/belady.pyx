"""Belady's algorithm over a known trace, at batch granularity, linear in the number of accesses.

Trace positions are numbered. A backward pass gives each access the position of its row's next one. "In the cache until its next
use" is then one bit a future position: a hit test reads the next bit in order, and eviction clears set bits from the far end. A
third pass turns the bits, which by then say which rows are really used again, into slots; so a row is admitted only if it will
be hit, and leaves at its last hit. Belady 1966; at batch granularity Ginex (VLDB 2022), section 3.4.

The inner loops hold no branch that depends on the data: what is used "never", or too far ahead to stay, goes to a position
behind the last, whose bit is cleared after each batch.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from featstore._core.bits cimport AHEAD, fs_low, fs_peek, fs_popcount, fs_top, fs_touch, outside, row_t

ctypedef fused pos_t:
    int32_t
    int64_t

# As AHEAD: of passes that look up bits, and slots.
cdef enum:
    AHEAD_BITS = 48
    AHEAD_SLOTS = 96


cdef inline pos_t within(pos_t q, pos_t limit, pos_t length) noexcept nogil:
    """The position where it lies in ``0 … limit - 1``, else ``length``; in the position's own width, which is half the work."""
    if pos_t is int32_t:
        return q if <uint32_t>q < <uint32_t>limit else length
    else:
        return q if <uint64_t>q < <uint64_t>limit else length


def link(const row_t[::1] rows not None, int64_t first, pos_t[::1] last not None, pos_t[::1] nxt not None):
    """One stretch of the backward pass: positions ``first … first + len(rows) - 1``, stretches from the trace's end to its start.

    ``last[row]`` is the row's next position so far (the trace's length: none); ``nxt[i]`` becomes that of each access.

    Returns the index of an access whose row is out of range, or −1.
    """
    cdef int64_t i, k = rows.shape[0], bad
    cdef row_t row
    if nxt.shape[0] != k:
        raise ValueError("one next position an access")
    if k == 0:
        return -1
    cdef const row_t *r = &rows[0]
    cdef pos_t *out = &nxt[0]
    cdef pos_t *seen
    with nogil:
        bad = outside(r, k, last.shape[0])
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
    """One bit a trace position: whether the row accessed there is in the cache until then. Beside each word of 64 lies another
    whose bits mark rows that have been hit since they came in. One owner thread.

    No position from ``limit`` on is kept: rows whose next use lies there lost to nearer ones, so they are not even entered. Where
    that leaves the cache with room, the batch is gone through again with a farther limit. So the bits that are touched lie in a
    stretch of a few batches, which fits a processor's own cache, and eviction looks at no others.
    """

    cdef uint64_t[::1] memory
    cdef uint64_t *words  # two a 64 positions: kept, and hit before
    cdef uint8_t *marks  # one a 512 positions: 0 if all its words are empty
    cdef readonly int64_t length
    cdef readonly int64_t capacity
    cdef readonly int64_t count
    cdef readonly int64_t limit
    cdef int64_t limit_batch  # limit == offsets[limit_batch], unless nothing was evicted yet

    @staticmethod
    def words_for(int64_t length):
        """Return how many 64-bit words of memory a trace of ``length`` accesses needs: a quarter byte an access."""
        return 2 * (length // 64 + 1) + length // 4096 + 1

    def __init__(self, uint64_t[::1] memory not None, int64_t length, int64_t capacity):
        """``memory``: zeroed, :meth:`words_for` words."""
        if memory.shape[0] < Bits.words_for(length):
            raise ValueError("too little memory for the bits")
        self.memory = memory
        self.words = &memory[0]
        self.marks = <uint8_t *>(self.words + 2 * (length // 64 + 1))
        self.length = self.limit = length
        self.limit_batch = -1
        self.capacity = capacity

    def start(self, const pos_t[::1] positions not None):
        """Mark what the cache holds at the start: the first position of each resident row (paid for, so as if hit before)."""
        cdef int64_t i, q
        cdef uint64_t bit
        cdef bint good = True
        with nogil:
            for i in range(positions.shape[0]):
                q = positions[i]
                good = 0 <= q < self.length
                if not good:
                    break
                bit = <uint64_t>1 << (q & 63)
                self.words[2 * (q >> 6)] |= bit
                self.words[2 * (q >> 6) + 1] |= bit
                self.marks[q >> 9] = 1
                self.count += 1
        if not good:
            raise ValueError("a resident row is not accessed in this trace")

    cdef int64_t highest(self) noexcept nogil:
        """The highest kept position; −1 if none."""
        cdef int64_t w, block = self.limit >> 9
        while block >= 0:
            if self.marks[block]:
                for w in range(min((block << 3) + 7, self.length >> 6), (block << 3) - 1, -1):
                    if self.words[2 * w]:
                        return (w << 6) + fs_top(self.words[2 * w])
                self.marks[block] = 0
            block -= 1
        return -1

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
        cdef int64_t position, low = now, high, middle, inside, excess
        while self.count > self.capacity:
            position = self.highest()
            if position < 0:  # next positions that are no trace's
                self.count = 0
                break
            low, high = now, n_batches if self.limit_batch < 0 else self.limit_batch  # the batch that holds the position
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
        # The far end moves on by about a batch a batch; an eighth of the distance more, so that it is seldom met too early.
        self.limit_batch = min(n_batches, low + 2 + ((low - now) >> 3))
        self.limit = offsets[self.limit_batch]

    cdef void enter(self, const pos_t *nxt, int64_t first, int64_t last, int64_t low, int64_t high) noexcept nogil:
        """Keep the rows of positions ``first … last - 1`` whose next use lies in ``low … high - 1``."""
        cdef int64_t p, q
        cdef uint64_t hit
        for p in range(first, last):
            q = nxt[p - first]
            if low <= q < high:
                hit = self.words[2 * (p >> 6)] >> (p & 63) & 1
                self.words[2 * (q >> 6)] |= <uint64_t>1 << (q & 63)
                self.words[2 * (q >> 6) + 1] |= hit << (q & 63)
                self.marks[q >> 9] = 1
                self.count += 1

    def run(self, const pos_t[::1] nxt not None, const int64_t[::1] offsets not None, int64_t batch):
        """Run one batch, positions ``offsets[batch] … offsets[batch + 1] - 1``, whose next positions are ``nxt``.

        Returns the limit: what stays in the cache after this batch is used again before it.
        """
        cdef int64_t p, s, e, high, n_batches = offsets.shape[0] - 1, length = self.length, count = 0
        cdef pos_t q, near, limit = <pos_t>self.limit, behind = <pos_t>self.length
        cdef uint64_t hit
        cdef uint64_t *words = self.words
        cdef uint64_t *pair
        cdef uint8_t *marks = self.marks
        if not 0 <= batch < n_batches or offsets[n_batches] != length:
            raise ValueError("the offsets are not this trace's")
        s, e = offsets[batch], offsets[batch + 1]
        if not 0 <= s <= e <= length or nxt.shape[0] != e - s:
            raise ValueError("one next position an access")
        if s == e:
            return self.limit
        cdef const pos_t *next_of = &nxt[0]
        cdef const int64_t *offset = &offsets[0]
        with nogil:
            for p in range(s, e):
                if p + AHEAD_BITS < e:
                    fs_touch(words + 2 * (within(next_of[p - s + AHEAD_BITS], limit, behind) >> 6))
                hit = words[2 * (p >> 6)] >> (p & 63) & 1
                q = within(next_of[p - s], limit, behind)
                near = q != behind
                pair = words + 2 * (q >> 6)
                pair[0] |= <uint64_t>1 << (q & 63)
                pair[1] |= hit << (q & 63)
                marks[q >> 9] = 1
                count += <int64_t>near - <int64_t>hit
            pair = words + 2 * (length >> 6)
            pair[0] &= ~(<uint64_t>1 << (length & 63))
            pair[1] &= ~(<uint64_t>1 << (length & 63))
            self.count += count
            while self.count < self.capacity and self.limit < length:  # rows beyond the limit would have found room
                high = min(n_batches, self.limit_batch + 1 + max(0, self.limit_batch - batch))
                self.enter(next_of, s, e, self.limit, offset[high])
                self.limit_batch = high
                self.limit = offset[high]
            if self.count > self.capacity:
                self.evict(offset, n_batches, batch)
        return self.limit

    def missed(self, int64_t first, int64_t last, int32_t[::1] out not None):
        """Write which positions of ``first … last - 1`` miss, counted from ``first``, ascending; returns how many.

        They are those of a batch that :meth:`run` has run, or of several; nothing later changes them.
        """
        cdef int64_t w, low, n = 0
        cdef uint64_t word
        if not 0 <= first <= last <= self.length or out.shape[0] < last - first:
            raise ValueError("positions outside the trace, or more than there is room for")
        if first == last:
            return 0
        with nogil:
            for w in range(first >> 6, ((last - 1) >> 6) + 1):
                low = w << 6
                word = ~self.words[2 * w]
                if low < first:
                    word &= <uint64_t>-1 << (first & 63)
                if low + 64 > last:
                    word &= <uint64_t>-1 >> (64 - (last - low))
                while word:
                    out[n] = <int32_t>(low + fs_low(word) - first)
                    n += 1
                    word &= word - 1
        return n


cdef class Slots:
    """The free slots, and the slots of a horizon's cached rows. One owner thread."""

    cdef int32_t[::1] slot_of
    cdef int32_t[::1] free_slots
    cdef readonly int64_t n_free

    def __init__(self, int32_t[::1] free_slots not None, int64_t n_taken=0):
        """``free_slots``: every slot once, the last taken first; the last ``n_taken`` are."""
        if not 0 <= n_taken <= free_slots.shape[0]:
            raise ValueError("more slots are taken than there are")
        self.free_slots = free_slots
        self.n_free = free_slots.shape[0] - n_taken

    def begin(self, int32_t[::1] slot_of not None):
        """Begin a horizon; ``slot_of``: by the number of a row its slot, −1 where it has none."""
        self.slot_of = slot_of

    def release(self, const int32_t[::1] slots not None):
        """Free taken ``slots``."""
        cdef int64_t i
        if self.n_free + slots.shape[0] > self.free_slots.shape[0]:
            raise ValueError("more slots are free than there are")
        with nogil:
            for i in range(slots.shape[0]):
                self.free_slots[self.n_free] = slots[i]
                self.n_free += 1

    def changes(self, Bits bits not None, const row_t[::1] rows not None, const row_t[::1] numbers not None,
                const pos_t[::1] nxt not None, int64_t limit, int32_t[::1] slots not None, int64_t[::1] in_rows not None,
                int64_t[::1] in_positions not None, int32_t[::1] in_slots not None, int64_t[::1] out_rows not None):
        """Turn the final bits at one batch's next positions into its slots (−1: missed) and its changeset.

        ``numbers`` are those by which the table of slots knows the rows; ``limit`` is what :meth:`Bits.run` returned for the
        batch. Returns (rows admitted, rows evicted); the four last arrays have room for a whole batch.
        """
        cdef int64_t i, j, k = rows.shape[0], n_in = 0, n_out = 0, bad
        cdef const uint64_t *words = bits.words
        cdef int32_t *table
        cdef int32_t slot, hit, stays
        cdef pos_t q, before = <pos_t>limit, behind = <pos_t>bits.length
        if min(numbers.shape[0], nxt.shape[0], slots.shape[0], in_rows.shape[0], in_positions.shape[0], in_slots.shape[0],
               out_rows.shape[0]) < k:
            raise ValueError("arrays shorter than the batch")
        if not 0 <= limit <= bits.length:
            raise ValueError("a limit outside the trace")
        if k == 0:
            return 0, 0
        if self.slot_of is None:
            raise ValueError("no horizon was begun")
        cdef const row_t *r = &rows[0]
        cdef const row_t *at = &numbers[0]
        cdef const pos_t *next_of = &nxt[0]
        cdef int32_t *slot_at = &slots[0]
        cdef int64_t *position_in = &in_positions[0]
        cdef int64_t *out = &out_rows[0]
        with nogil:
            bad = outside(at, k, self.slot_of.shape[0])
        if bad >= 0:
            raise IndexError(f"row {rows[bad]} at position {bad} is out of range for {self.slot_of.shape[0]} rows")
        table = &self.slot_of[0]
        with nogil:
            for i in range(k):
                if i + AHEAD_SLOTS < k:
                    fs_peek(table + at[i + AHEAD_SLOTS])
                    fs_peek(words + 2 * (within(next_of[i + AHEAD_SLOTS], before, behind) >> 6))
                q = within(next_of[i], before, behind)
                stays = words[2 * (q >> 6)] >> (q & 63) & 1
                slot = table[at[i]]
                slot_at[i] = slot
                hit = slot >= 0
                out[n_out] = i
                n_out += hit & ~stays
                position_in[n_in] = i
                n_in += stays & ~hit
            # Slots that come free are there for this batch's own admissions: hits are copied before them.
            for j in range(n_out):
                i = out[j]
                self.free_slots[self.n_free] = slot_at[i]
                self.n_free += 1
                table[at[i]] = -1
                out[j] = r[i]
            if n_in <= self.n_free:
                for j in range(n_in):
                    i = position_in[j]
                    self.n_free -= 1
                    slot = self.free_slots[self.n_free]
                    in_slots[j] = slot
                    in_rows[j] = r[i]
                    table[at[i]] = slot
            else:
                bad = n_in
        if bad >= 0:
            raise AssertionError("more rows admitted than slots")
        return n_in, n_out


def bits_at(Bits bits not None, const pos_t[::1] positions not None, uint8_t[::1] out not None):
    """Write whether each position's bit is set; positions behind the trace have none."""
    cdef int64_t i, q
    if out.shape[0] < positions.shape[0]:
        raise ValueError("an array shorter than the positions")
    with nogil:
        for i in range(positions.shape[0]):
            q = positions[i]
            out[i] = 0 <= q < bits.length and bits.words[2 * (q >> 6)] >> (q & 63) & 1


def next_uses(const row_t[::1] rows not None, int64_t batch, int64_t[::1] ptr not None, const int64_t[::1] end not None,
              const pos_t[::1] iters not None, int64_t[::1] out not None, bint advance):
    """Write the first batch above ``batch`` that touches each row, −1 if none; ``advance`` moves ``ptr`` there."""
    cdef int64_t i, at, stop, row, n = ptr.shape[0], k = rows.shape[0], bad = -1
    if end.shape[0] != n or out.shape[0] < k:
        raise ValueError("arrays shorter than the rows")
    with nogil:
        for i in range(k):
            row = rows[i]
            if not 0 <= row < n:
                bad = i
                break
            at, stop = ptr[row], end[row]
            if at < 0 or stop > iters.shape[0]:
                bad = i
                break
            while at < stop and iters[at] <= batch:
                at += 1
            if advance:
                ptr[row] = at
            out[i] = iters[at] if at < stop else -1
    if bad >= 0:
        raise IndexError(f"row {rows[bad]} at position {bad} is out of range for {n} rows")


def fill_iters(const row_t[::1] rows not None, int64_t batch, int64_t[::1] cursor not None, pos_t[::1] iters not None):
    """Second pass of the CSR form: append ``batch`` to each row's list."""
    cdef int64_t i, at, k = rows.shape[0], bad = -1
    if k == 0:
        return
    with nogil:
        bad = outside(&rows[0], k, cursor.shape[0])
        if bad < 0:
            for i in range(k):
                if i + AHEAD < k:
                    fs_touch(&cursor[rows[i + AHEAD]])
                at = cursor[rows[i]]
                if not 0 <= at < iters.shape[0]:
                    bad = i
                    break
                iters[at] = <pos_t>batch
                cursor[rows[i]] = at + 1
    if bad >= 0:
        raise IndexError(f"row {rows[bad]} at position {bad} is out of range for {cursor.shape[0]} rows, or its list is full")
