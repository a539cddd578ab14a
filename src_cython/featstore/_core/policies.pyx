"""Loops of the online policies. Every function works on arrays of the cache's capacity that the Python class owns.

Slots that a caller names wrongly (out of range, empty where occupied ones are due, or the reverse) raise ValueError; the state is
undefined until the next start, memory is not harmed.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

cdef enum:
    # Indices into the int64 state of a log (LRU, SIEVE).
    BEGIN = 0
    END = 1
    HAND = 2

    # A byte a slot of CLOCK and SIEVE.
    EMPTY = 0
    UNVISITED = 1
    VISITED = 2

    # Indices into the int64 state of S3-FIFO: head and length of two rings of slots, and the ghost ring's next position.
    SMALL_HEAD = 0
    N_SMALL = 1
    MAIN_HEAD = 2
    N_MAIN = 3
    GHOST_NEXT = 4

    # A byte a slot of S3-FIFO: two bits of frequency, two of queue.
    FREQUENCY = 3
    IN_SMALL = 4
    IN_MAIN = 8


cdef int _refuse(const char *hook, int64_t slot, const char *why) except -1:
    raise ValueError(f"{hook.decode()}: slot {slot} {why.decode()}")


cdef int _check_log(const int32_t[::1] log, int64_t capacity, const int64_t[::1] state, bint has_hand) except -1:
    """Refuse arrays that are no log's of so many slots, and a state that points outside it."""
    if log.shape[0] < 2 * capacity or state.shape[0] < (3 if has_hand else 2):
        raise ValueError(f"the log of {capacity} slots has {log.shape[0]} entries, and a state of {state.shape[0]}")
    if not 0 <= state[BEGIN] <= state[END] <= log.shape[0] or (has_hand and not -1 <= state[HAND] < log.shape[0]):
        raise ValueError("the state points outside the log")
    return 0


cdef int _check_rings(int64_t capacity, int64_t n_small, int64_t n_main, int64_t n_rows, int64_t n_ghost, int64_t n_table,
                      const int64_t[::1] state) except -1:
    """Refuse arrays that are not those of a cache of so many slots, and a state that points outside them."""
    if min(n_small, n_main, n_rows) < capacity or n_table < 1 or n_table & (n_table - 1) or n_table <= n_ghost:
        raise ValueError(f"arrays that do not fit {capacity} slots")
    if state.shape[0] < 5 or not (0 <= state[SMALL_HEAD] < max(capacity, 1) and 0 <= state[MAIN_HEAD] < max(capacity, 1)
                                  and 0 <= state[N_SMALL] <= capacity and 0 <= state[N_MAIN] <= capacity
                                  and 0 <= state[GHOST_NEXT] < max(n_ghost, 1)):
        raise ValueError("the state points outside the queues")
    return 0


# -- LRU: a log of slots in order of use; an entry counts where the slot's last use is that very entry ---------------------------


cdef void _lru_compact(int32_t *log, int32_t *last_use, int64_t *state) noexcept nogil:
    cdef int64_t i, kept = 0
    cdef int32_t slot
    for i in range(state[BEGIN], state[END]):
        slot = log[i]
        if last_use[slot] == i:
            log[kept] = slot
            last_use[slot] = <int32_t>kept
            kept += 1
    state[BEGIN] = 0
    state[END] = kept


def lru_use(const int32_t[::1] slots not None, bint is_new, int32_t[::1] log not None, int32_t[::1] last_use not None,
            int64_t[::1] state not None):
    """Make ``slots`` the most recently used, in their order; ``is_new`` says whether they were empty or occupied before."""
    cdef int64_t i, end, n = slots.shape[0], capacity = last_use.shape[0], bad = -1
    cdef int32_t slot
    if n == 0:
        return
    if n > capacity:
        raise ValueError(f"{n} slots at once in a cache of {capacity}")
    _check_log(log, capacity, state, False)
    with nogil:
        if state[END] + n > log.shape[0]:
            _lru_compact(&log[0], &last_use[0], &state[0])
        end = state[END]
        for i in range(n):
            slot = slots[i]
            if slot < 0 or slot >= capacity or (last_use[slot] < 0) != is_new:
                bad = i
                break
            last_use[slot] = <int32_t>end
            log[end] = slot
            end += 1
        state[END] = end
    if bad >= 0:
        _refuse(b"insert" if is_new else b"hit", slots[bad], b"is out of range, empty or occupied")


def lru_victims(int32_t[::1] out not None, int32_t[::1] log not None, int32_t[::1] last_use not None,
                int64_t[::1] state not None):
    """Fill ``out`` with the least recently used slots, the oldest first, and forget them."""
    cdef int64_t i, found = 0, n = out.shape[0]
    cdef int32_t slot
    _check_log(log, last_use.shape[0], state, False)
    with nogil:
        i = state[BEGIN]
        while found < n and i < state[END]:
            slot = log[i]
            if last_use[slot] == i:
                last_use[slot] = -1
                out[found] = slot
                found += 1
            i += 1
        state[BEGIN] = i
    if found < n:
        raise ValueError(f"victims: {n} asked for, {found} occupied")


# -- CLOCK -----------------------------------------------------------------------------------------------------------------------


def mark_visited(const int32_t[::1] slots not None, uint8_t[::1] mark not None):
    """Set the visited bit of occupied ``slots`` (CLOCK, SIEVE)."""
    cdef int64_t i, n = slots.shape[0], capacity = mark.shape[0], bad = -1
    with nogil:
        for i in range(n):
            if slots[i] < 0 or slots[i] >= capacity or mark[slots[i]] == EMPTY:
                bad = i
                break
            mark[slots[i]] = VISITED
    if bad >= 0:
        _refuse(b"hit", slots[bad], b"is out of range or empty")


def mark_occupied(const int32_t[::1] slots not None, uint8_t[::1] mark not None):
    """Mark empty ``slots`` occupied and unvisited (CLOCK)."""
    cdef int64_t i, n = slots.shape[0], capacity = mark.shape[0], bad = -1
    with nogil:
        for i in range(n):
            if slots[i] < 0 or slots[i] >= capacity or mark[slots[i]] != EMPTY:
                bad = i
                break
            mark[slots[i]] = UNVISITED
    if bad >= 0:
        _refuse(b"insert", slots[bad], b"is out of range or occupied")


def clock_victims(int32_t[::1] out not None, uint8_t[::1] mark not None, int64_t hand):
    """Fill ``out`` by sweeping the slots from ``hand``: a visited one gets a second chance. Return the new hand."""
    cdef int64_t found = 0, empty_steps = 0, n = out.shape[0], capacity = mark.shape[0]
    if capacity and not 0 <= hand < capacity:
        raise ValueError(f"a hand at slot {hand} of {capacity}")
    with nogil:
        while found < n and empty_steps < capacity:  # a whole turn over empty slots: there are not n
            if mark[hand] == EMPTY:
                empty_steps += 1
            else:
                empty_steps = 0
                if mark[hand] == VISITED:
                    mark[hand] = UNVISITED
                else:
                    mark[hand] = EMPTY
                    out[found] = <int32_t>hand
                    found += 1
            hand += 1
            if hand == capacity:
                hand = 0
    if found < n:
        raise ValueError(f"victims: {n} asked for, {found} occupied")
    return hand


# -- SIEVE: a log of slots in order of insertion, -1 where one was evicted -------------------------------------------------------


cdef void _sieve_compact(int32_t *log, int64_t *state) noexcept nogil:
    cdef int64_t i, kept = 0, hand = -1
    for i in range(state[BEGIN], state[END]):
        if log[i] >= 0:
            if i == state[HAND]:
                hand = kept
            log[kept] = log[i]
            kept += 1
    state[BEGIN] = 0
    state[END] = kept
    state[HAND] = hand


def sieve_insert(const int32_t[::1] slots not None, int32_t[::1] log not None, uint8_t[::1] mark not None,
                 int64_t[::1] state not None):
    """Put empty ``slots`` at the head of the queue, unvisited."""
    cdef int64_t i, end, n = slots.shape[0], capacity = mark.shape[0], bad = -1
    if n == 0:
        return
    if n > capacity:
        raise ValueError(f"{n} slots at once in a cache of {capacity}")
    _check_log(log, capacity, state, True)
    with nogil:
        if state[END] + n > log.shape[0]:
            _sieve_compact(&log[0], &state[0])
        end = state[END]
        for i in range(n):
            if slots[i] < 0 or slots[i] >= capacity or mark[slots[i]] != EMPTY:
                bad = i
                break
            mark[slots[i]] = UNVISITED
            log[end] = slots[i]
            end += 1
        state[END] = end
    if bad >= 0:
        _refuse(b"insert", slots[bad], b"is out of range or occupied")


def sieve_victims(int32_t[::1] out not None, int64_t n_occupied, int32_t[::1] log not None, uint8_t[::1] mark not None,
                  int64_t[::1] state not None):
    """Fill ``out`` by moving the hand from the tail (oldest) to the head: the visited lose their mark and stay in place.

    ``state[HAND]`` is the entry at the hand, never a hole, or -1 for "start at the tail".
    """
    cdef int64_t found = 0, n = out.shape[0], begin, end, hand
    cdef int32_t slot
    if n > n_occupied:
        raise ValueError(f"victims: {n} asked for, {n_occupied} occupied")
    _check_log(log, mark.shape[0], state, True)
    with nogil:
        begin, end, hand = state[BEGIN], state[END], state[HAND]
        while found < n:
            if hand < 0:
                while log[begin] < 0:
                    begin += 1
                hand = begin
            slot = log[hand]
            if mark[slot] == VISITED:
                mark[slot] = UNVISITED
            else:
                mark[slot] = EMPTY
                log[hand] = -1
                out[found] = slot
                found += 1
            hand += 1
            while hand < end and log[hand] < 0:
                hand += 1
            if hand == end:
                hand = -1  # what is inserted later is newer than this turn: it starts at the tail again
        while begin < end and log[begin] < 0:
            begin += 1
        state[BEGIN], state[HAND] = begin, hand


# -- S3-FIFO ---------------------------------------------------------------------------------------------------------------------
# The ghost queue is a ring of the rows last evicted from the small queue; an open-addressing table, at most half full, finds a
# row in it. A row that comes back leaves a hole (-1), which ages like any entry.


cdef inline uint64_t _home(int64_t row, uint64_t mask) noexcept nogil:
    cdef uint64_t hashed = <uint64_t>row * <uint64_t>0x9E3779B97F4A7C15
    return (hashed ^ (hashed >> 32)) & mask


cdef int64_t _ghost_find(int64_t row, const int64_t *ghost, const int32_t *table, uint64_t mask) noexcept nogil:
    """Return the table cell of ``row``, or -1."""
    cdef uint64_t cell = _home(row, mask)
    while table[cell] >= 0:
        if ghost[table[cell]] == row:
            return <int64_t>cell
        cell = (cell + 1) & mask
    return -1


cdef void _ghost_forget(uint64_t cell, const int64_t *ghost, int32_t *table, uint64_t mask) noexcept nogil:
    """Empty a table cell, moving later entries of its run back, so that no search ends early."""
    cdef uint64_t hole = cell, probe = (cell + 1) & mask
    while table[probe] >= 0:
        if ((probe - _home(ghost[table[probe]], mask)) & mask) >= ((probe - hole) & mask):
            table[hole] = table[probe]
            hole = probe
        probe = (probe + 1) & mask
    table[hole] = -1


cdef void _ghost_add(int64_t row, int64_t *ghost, int64_t n_ghost, int32_t *table, uint64_t mask, int64_t *state) noexcept nogil:
    cdef int64_t at = state[GHOST_NEXT]
    cdef uint64_t cell
    if n_ghost == 0:
        return
    if ghost[at] >= 0:
        _ghost_forget(<uint64_t>_ghost_find(ghost[at], ghost, table, mask), ghost, table, mask)
    ghost[at] = row
    cell = _home(row, mask)
    while table[cell] >= 0:
        cell = (cell + 1) & mask
    table[cell] = <int32_t>at
    state[GHOST_NEXT] = at + 1 if at + 1 < n_ghost else 0


cdef inline void _push(int32_t *ring, int64_t capacity, int64_t *head, int64_t *length, int32_t slot) noexcept nogil:
    cdef int64_t at = head[0] + length[0]
    ring[at if at < capacity else at - capacity] = slot
    length[0] += 1


cdef inline int32_t _pop(const int32_t *ring, int64_t capacity, int64_t *head, int64_t *length) noexcept nogil:
    cdef int32_t slot = ring[head[0]]
    head[0] = head[0] + 1 if head[0] + 1 < capacity else 0
    length[0] -= 1
    return slot


def s3fifo_hit(const int32_t[::1] slots not None, uint8_t[::1] mark not None):
    """Count an access of occupied ``slots``, up to three."""
    cdef int64_t i, n = slots.shape[0], capacity = mark.shape[0], bad = -1
    cdef uint8_t value
    with nogil:
        for i in range(n):
            if slots[i] < 0 or slots[i] >= capacity or mark[slots[i]] == EMPTY:
                bad = i
                break
            value = mark[slots[i]]
            mark[slots[i]] = value + ((value & FREQUENCY) < FREQUENCY)
    if bad >= 0:
        _refuse(b"hit", slots[bad], b"is out of range or empty")


def s3fifo_insert(const int64_t[::1] rows not None, const int32_t[::1] slots not None, int64_t most_small,
                  int32_t[::1] small not None,
                  int32_t[::1] main not None, uint8_t[::1] mark not None, int64_t[::1] row_of_slot not None,
                  int64_t[::1] ghost not None, int32_t[::1] table not None, int64_t[::1] state not None):
    """Put ``rows`` in empty ``slots``: those that the ghost queue remembers, or that ``most_small`` leaves, in the main queue."""
    cdef int64_t i, cell, ghost_at, n = slots.shape[0], capacity = mark.shape[0], bad = -1
    cdef uint64_t mask = <uint64_t>table.shape[0] - 1
    cdef int32_t slot
    if rows.shape[0] != n:
        raise ValueError("rows and slots differ in length")
    _check_rings(capacity, small.shape[0], main.shape[0], row_of_slot.shape[0], ghost.shape[0], table.shape[0], state)
    with nogil:
        for i in range(n):
            slot = slots[i]
            if slot < 0 or slot >= capacity or mark[slot] != EMPTY:
                bad = i
                break
            row_of_slot[slot] = rows[i]
            cell = _ghost_find(rows[i], &ghost[0], &table[0], mask) if ghost.shape[0] > 0 else -1
            if cell >= 0:
                ghost_at = table[cell]
                _ghost_forget(<uint64_t>cell, &ghost[0], &table[0], mask)
                ghost[ghost_at] = -1
            if cell >= 0 or state[N_SMALL] >= most_small:
                mark[slot] = IN_MAIN
                _push(&main[0], capacity, &state[MAIN_HEAD], &state[N_MAIN], slot)
            else:
                mark[slot] = IN_SMALL
                _push(&small[0], capacity, &state[SMALL_HEAD], &state[N_SMALL], slot)
    if bad >= 0:
        _refuse(b"insert", slots[bad], b"is out of range or occupied")


def s3fifo_victims(int32_t[::1] out not None, int64_t main_limit, int32_t[::1] small not None, int32_t[::1] main not None,
                   uint8_t[::1] mark not None, int64_t[::1] row_of_slot not None, int64_t[::1] ghost not None,
                   int32_t[::1] table not None, int64_t[::1] state not None):
    """Fill ``out`` from the main queue's tail while it is over its share or the small one is empty, else from the small one's."""
    cdef int64_t found = 0, n = out.shape[0], n_occupied, capacity = mark.shape[0]
    cdef uint64_t mask = <uint64_t>table.shape[0] - 1
    cdef int64_t *ghosts = &ghost[0] if ghost.shape[0] > 0 else NULL
    cdef int32_t slot
    _check_rings(capacity, small.shape[0], main.shape[0], row_of_slot.shape[0], ghost.shape[0], table.shape[0], state)
    n_occupied = state[N_SMALL] + state[N_MAIN]
    if n > n_occupied:
        raise ValueError(f"victims: {n} asked for, {n_occupied} occupied")
    with nogil:
        while found < n:
            if state[N_MAIN] > main_limit or state[N_SMALL] == 0:
                slot = _pop(&main[0], capacity, &state[MAIN_HEAD], &state[N_MAIN])
                if mark[slot] & FREQUENCY:
                    mark[slot] -= 1
                    _push(&main[0], capacity, &state[MAIN_HEAD], &state[N_MAIN], slot)
                    continue
            else:
                slot = _pop(&small[0], capacity, &state[SMALL_HEAD], &state[N_SMALL])
                if (mark[slot] & FREQUENCY) > 1:
                    mark[slot] = IN_MAIN
                    _push(&main[0], capacity, &state[MAIN_HEAD], &state[N_MAIN], slot)
                    continue
                _ghost_add(row_of_slot[slot], ghosts, ghost.shape[0], &table[0], mask, &state[0])
            mark[slot] = EMPTY
            row_of_slot[slot] = -1
            out[found] = slot
            found += 1
