"""Loops of the cache table: look rows up, choose what to admit, select the best-scored rows.

A map is ``slot_of_row`` int32[n]: the slot of a cached row, -1 where it is absent, and -2 - slot where the slot is taken but its
bytes have not been copied yet. Every negative value is a miss. Arguments are checked by the callers, ids here as well: a wrong id
raises.
"""

from libc.stdint cimport INT32_MIN, int32_t, int64_t, uint32_t, uint64_t

from featstore._core.bits cimport fs_fetch, outside, row_t

cdef extern from *:
    """
    #include <stdint.h>
    #include "kernels/bits.h"

    /* Hints only: an id that is out of range may be hinted at before it is checked, hence integer arithmetic. */
    static inline void featstore_prefetch_entry(const int32_t *table, uint64_t entry)
    {
        fs_fetch((const void *)((uintptr_t)table + (uintptr_t)entry * sizeof *table));
    }
    """
    void featstore_prefetch_entry(const int32_t *table, uint64_t entry) noexcept nogil

# Tuned on a 32 MB map: far enough ahead to cover a miss to memory, near enough to stay in the line-fill buffers.
cdef enum:
    AHEAD = 32


ctypedef fused held_t:  # what a table of rows by slot is made of
    int32_t
    int64_t


def lookup(const int64_t[::1] rows not None, const int32_t[::1] slot_of_row not None, int32_t[::1] slots not None):
    """Write the slot of every row, -1 where absent; return how many have one, or -1 - the position of the first id out of range.
    """
    cdef int64_t i, value, n = rows.shape[0], n_hits = 0
    cdef uint64_t n_rows = <uint64_t>slot_of_row.shape[0]
    cdef int32_t slot
    if slots.shape[0] < n:
        raise ValueError("an output is too short")
    if n == 0:
        return 0
    if n_rows == 0:
        return -1
    cdef const int64_t *row = &rows[0]
    cdef const int32_t *table = &slot_of_row[0]
    cdef int32_t *out = &slots[0]
    with nogil:
        for i in range(n):
            if i + AHEAD < n:
                featstore_prefetch_entry(table, <uint64_t>row[i + AHEAD])
            value = row[i]
            if <uint64_t>value >= n_rows:
                n_hits = -1 - i
                break
            slot = table[value]
            out[i] = slot if slot >= 0 else -1
            n_hits += slot >= 0
    return n_hits


def divide(const int64_t[::1] rows not None, int32_t[::1] slots not None, int64_t[::1] hit_positions not None,
           int64_t[::1] miss_positions not None, int64_t[::1] missed not None):
    """Divide looked-up rows into hits, whose slots move to the front of ``slots``, and misses.

    Outputs have one entry more than they need, for what is written in vain: hits and misses mix at random, and a branch would be
    mispredicted.
    """
    cdef int64_t i, n = rows.shape[0], n_hits = 0, n_misses = 0
    cdef int32_t slot
    cdef bint is_hit
    if slots.shape[0] != n:
        raise ValueError("rows and slots differ in length")
    with nogil:
        for i in range(n):
            n_hits += slots[i] >= 0
    if hit_positions.shape[0] <= n_hits or min(miss_positions.shape[0], missed.shape[0]) <= n - n_hits:
        raise ValueError("an output is too short")
    with nogil:
        n_hits = 0
        for i in range(n):
            slot = slots[i]
            is_hit = slot >= 0
            slots[n_hits] = slot
            hit_positions[n_hits] = i
            miss_positions[n_misses] = i
            missed[n_misses] = rows[i]
            n_hits += is_hit
            n_misses += not is_hit


def assign(const int64_t[::1] rows not None, const int32_t[::1] values not None, int32_t[::1] slot_of_row not None):
    """Set ``slot_of_row[rows] = values``; return 0, or -1 - the position of the first id out of range, where it stops."""
    cdef int64_t i, n = rows.shape[0], bad = 0
    cdef uint64_t n_rows = <uint64_t>slot_of_row.shape[0]
    if values.shape[0] != n:
        raise ValueError("rows and values differ in length")
    with nogil:
        for i in range(n):
            if i + AHEAD < n and n_rows > 0:
                featstore_prefetch_entry(&slot_of_row[0], <uint64_t>rows[i + AHEAD])
            if <uint64_t>rows[i] >= n_rows:
                bad = -1 - i
                break
            slot_of_row[rows[i]] = values[i]
    return bad


def release(const int64_t[::1] rows not None, int32_t[::1] slot_of_row not None):
    """Set ``slot_of_row[rows] = -1``; return 0, or -1 - the position of the first id out of range, where it stops."""
    cdef int64_t i, n = rows.shape[0], bad = 0
    cdef uint64_t n_rows = <uint64_t>slot_of_row.shape[0]
    with nogil:
        for i in range(n):
            if i + AHEAD < n and n_rows > 0:
                featstore_prefetch_entry(&slot_of_row[0], <uint64_t>rows[i + AHEAD])
            if <uint64_t>rows[i] >= n_rows:
                bad = -1 - i
                break
            slot_of_row[rows[i]] = -1
    return bad


def exchange(const int64_t[::1] out_rows not None, const int64_t[::1] in_rows not None, const int32_t[::1] in_slots not None,
             int32_t[::1] slot_of_row not None, held_t[::1] row_of_slot not None):
    """Carry out a planner's changes of the tables: ``out_rows`` leave their slots, then ``in_rows`` take ``in_slots``.

    Returns
    -------
    what, position : int
        ``(0, 0)``; or what is wrong and where, the tables then changed in part: 1, ``out_rows[position]`` is not cached; 2,
        ``in_slots[position]`` is taken or does not exist; 3, ``in_rows[position]`` is cached or does not exist.
    """
    cdef int64_t i, n_out = out_rows.shape[0], n_in = in_rows.shape[0], row
    cdef uint64_t n_rows = <uint64_t>slot_of_row.shape[0], n_slots = <uint64_t>row_of_slot.shape[0]
    cdef int32_t slot
    if in_slots.shape[0] != n_in:
        raise ValueError("rows and slots differ in length")
    if n_rows == 0 or n_slots == 0:
        return 1 if n_out else 2 if n_in else 0, 0
    cdef int32_t *slots = &slot_of_row[0]
    cdef held_t *rows = &row_of_slot[0]
    cdef int what = 0
    with nogil:
        for i in range(n_out):
            if i + AHEAD < n_out:
                featstore_prefetch_entry(slots, <uint64_t>out_rows[i + AHEAD])
            row = out_rows[i]
            slot = slots[row] if <uint64_t>row < n_rows else -1
            if slot < 0:
                what = 1
                break
            slots[row] = -1
            rows[slot] = -1
        if not what:
            for i in range(n_in):
                if i + AHEAD < n_in:
                    featstore_prefetch_entry(slots, <uint64_t>in_rows[i + AHEAD])
                row, slot = in_rows[i], in_slots[i]
                if slot < 0 or <uint64_t>slot >= n_slots or rows[slot] >= 0:
                    what = 2
                    break
                if <uint64_t>row >= n_rows or slots[row] >= 0:
                    what = 3
                    break
                rows[slot] = <held_t>row
                slots[row] = slot
    return what, i if what else 0


def check_hits(const row_t[::1] rows not None, const int32_t[::1] slots not None, const held_t[::1] row_of_slot not None):
    """Return the position of the first slot that is not -1 and does not hold its row; -1 where there is none.

    ``row_of_slot[s]`` is the row in slot ``s``, -1 where it is empty.
    """
    cdef int64_t i, n = slots.shape[0]
    cdef uint32_t n_slots = <uint32_t>row_of_slot.shape[0], slot, ahead
    cdef bint is_slot, is_wrong = False
    cdef const held_t *table
    if rows.shape[0] != n:
        raise ValueError("rows and slots differ in length")
    if n == 0:
        return -1
    if n_slots == 0:
        with nogil:
            for i in range(n):
                if slots[i] != -1:
                    is_wrong = True
                    break
        return i if is_wrong else -1
    table = &row_of_slot[0]
    with nogil:
        # No branch: which rows hit is as good as random to the processor. Of what is no slot, slot 0 is looked at in vain.
        for i in range(n):
            if i + AHEAD < n:
                ahead = <uint32_t>slots[i + AHEAD]
                fs_fetch(table + ahead * <bint>(ahead < n_slots))
            slot = <uint32_t>slots[i]
            is_slot = slot < n_slots
            is_wrong |= (is_slot & (table[slot * is_slot] != rows[i])) | ((not is_slot) & (slots[i] != -1))
        if is_wrong:
            for i in range(n):
                slot = <uint32_t>slots[i]
                if slots[i] != -1 and (slot >= n_slots or table[slot] != rows[i]):
                    break
    return i if is_wrong else -1


def claim(const int64_t[::1] rows not None, const int64_t[::1] positions not None, int32_t[::1] slot_of_row not None,
          int64_t[::1] new_rows not None, int64_t[::1] new_positions not None,
          int64_t[::1] held_rows not None, int64_t[::1] held_positions not None, int32_t[::1] held_slots not None):
    """Choose what a batch's misses may bring in: the first ``len(new_rows)`` distinct absent rows, and the held ones.

    Rows that came in meanwhile are left out. The map is marked while this runs and is as before when it returns.

    Returns
    -------
    n_new, n_held : int
        ``n_new`` is -1 - position instead where an id is out of range.
    """
    cdef int64_t i, row, n = rows.shape[0], limit = new_rows.shape[0], n_new = 0, n_held = 0, bad = 0
    cdef uint64_t n_rows = <uint64_t>slot_of_row.shape[0]
    cdef int32_t slot
    if positions.shape[0] != n or new_positions.shape[0] < limit:
        raise ValueError("arguments differ in length")
    if min(held_rows.shape[0], held_positions.shape[0], held_slots.shape[0]) < n:
        raise ValueError("an output is too short")
    with nogil:
        for i in range(n):
            if i + AHEAD < n and n_rows > 0:
                featstore_prefetch_entry(&slot_of_row[0], <uint64_t>rows[i + AHEAD])
            row = rows[i]
            if <uint64_t>row >= n_rows:
                bad = -1 - i
                break
            slot = slot_of_row[row]
            if slot == -1:
                if n_new < limit:
                    slot_of_row[row] = INT32_MIN  # seen: a repetition is no second candidate
                    new_rows[n_new] = row
                    new_positions[n_new] = positions[i]
                    n_new += 1
            elif slot < -1 and slot != INT32_MIN:
                held_rows[n_held] = row
                held_positions[n_held] = positions[i]
                held_slots[n_held] = -2 - slot
                n_held += 1
        for i in range(n_new):
            slot_of_row[new_rows[i]] = -1
    return (bad if bad else n_new), n_held


def distinct_slots(const int32_t[::1] slots not None, uint64_t[::1] bitmap not None, int32_t[::1] out not None):
    """Write the distinct slots in order of first appearance; return how many. ``bitmap`` is all zero before and after."""
    cdef int64_t i, n = slots.shape[0], n_out = 0, bad = -1
    cdef uint32_t slot
    cdef uint64_t word, bit
    if out.shape[0] < n:
        raise ValueError("an output is too short")
    if n:
        with nogil:
            bad = outside(&slots[0], n, 64 * bitmap.shape[0])
    if bad >= 0:
        raise ValueError("a slot without a bit")
    with nogil:
        for i in range(n):
            slot = <uint32_t>slots[i]
            word = bitmap[slot >> 6]
            bit = <uint64_t>1 << (slot & 63)
            bitmap[slot >> 6] = word | bit
            out[n_out] = slot
            n_out += (word & bit) == 0
        for i in range(n):
            bitmap[<uint32_t>slots[i] >> 6] = 0
    return n_out


def check_victims(const int32_t[::1] slots not None, const int64_t[::1] row_of_slot not None, uint64_t[::1] bitmap not None):
    """Return (0, 0) where slots are in range, distinct and occupied; else (reason, position): 1 range, 2 repeated, 3 empty."""
    cdef int64_t i, n = slots.shape[0], n_slots = row_of_slot.shape[0], reason = 0, where = 0
    cdef int32_t slot
    cdef uint64_t bit
    if 64 * bitmap.shape[0] < n_slots:
        raise ValueError("slots without a bit")
    with nogil:
        for i in range(n):
            slot = slots[i]
            if slot < 0 or slot >= n_slots:
                reason = 1
            else:
                bit = <uint64_t>1 << (slot & 63)
                if bitmap[slot >> 6] & bit:
                    reason = 2
                elif row_of_slot[slot] < 0:
                    reason = 3
                bitmap[slot >> 6] |= bit
            if reason:
                where = i
                break
        for i in range(n):
            slot = slots[i]
            if 0 <= slot < n_slots:
                bitmap[slot >> 6] = 0
    return reason, where


def still_held(const int64_t[::1] rows not None, const int64_t[::1] positions not None, const int32_t[::1] slots not None,
               const int32_t[::1] slot_of_row not None, int64_t[::1] rows_out not None, int64_t[::1] positions_out not None,
               int32_t[::1] slots_out not None):
    """Keep the triples whose row still awaits its bytes in that very slot; return how many."""
    cdef int64_t i, n = rows.shape[0], n_out = 0
    cdef uint64_t n_rows = <uint64_t>slot_of_row.shape[0]
    if positions.shape[0] != n or slots.shape[0] != n:
        raise ValueError("arguments differ in length")
    if min(rows_out.shape[0], positions_out.shape[0], slots_out.shape[0]) < n:
        raise ValueError("an output is too short")
    with nogil:
        for i in range(n):
            if i + AHEAD < n and n_rows > 0:
                featstore_prefetch_entry(&slot_of_row[0], <uint64_t>rows[i + AHEAD])
            if <uint64_t>rows[i] < n_rows and slots[i] >= 0 and slot_of_row[rows[i]] == -2 - slots[i]:
                rows_out[n_out] = rows[i]
                positions_out[n_out] = positions[i]
                slots_out[n_out] = slots[i]
                n_out += 1
    return n_out


def count_digits(const uint64_t[::1] keys not None, int shift, uint64_t prefix, int64_t[::1] counts not None):
    """Count the 16-bit digits at ``shift`` of those keys whose higher digits equal ``prefix``; adds to ``counts`` (65,536)."""
    cdef int64_t i, n = keys.shape[0]
    cdef uint64_t key
    if counts.shape[0] != 65536 or shift not in (0, 16, 32, 48):
        raise ValueError("counts must have 65,536 entries and shift be 0, 16, 32 or 48")
    with nogil:
        if shift == 48:
            for i in range(n):
                counts[keys[i] >> 48] += 1
        else:
            for i in range(n):
                key = keys[i] >> shift
                counts[key & 0xFFFF] += (key >> 16) == prefix


def take_top(const uint64_t[::1] keys not None, int64_t first_row, uint64_t threshold, int64_t n_equal,
             int64_t[::1] rows not None, int64_t n_rows):
    """Append to ``rows[n_rows:]`` the rows with a key above ``threshold``, and the first ``n_equal`` with that key, ascending.

    Returns
    -------
    n_rows, n_equal : int
        The new length, and how many with the threshold's key are still wanted.
    """
    cdef int64_t i, n = keys.shape[0], limit = rows.shape[0]
    if not 0 <= n_rows <= limit:
        raise ValueError("rows has no such length")
    with nogil:
        for i in range(n):
            if n_rows == limit:
                break
            if keys[i] > threshold:
                rows[n_rows] = first_row + i
                n_rows += 1
            elif keys[i] == threshold and n_equal > 0:
                rows[n_rows] = first_row + i
                n_rows += 1
                n_equal -= 1
    return n_rows, n_equal
