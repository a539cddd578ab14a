"""Belady's optimal replacement at batch granularity."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core import belady as _core
from featstore._core import distinct
from featstore.cache.base import PolicyContext, register_policy
from featstore.cache.planned import Horizon, PlannedBatch, PlannedPolicy, position_dtype
from featstore.gather.buffers import huge_array
from featstore.gather.plan import Changeset

__all__ = ["Belady"]

Ints = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

EMPTY_ROWS = np.empty(0, np.int64)
FREE, TAKEN, STAYS = 0, 1, 2  # a slot, when a horizon begins
PIECE_SLOTS = 1 << 16


class _Kept:
    """Arrays that are reused from horizon to horizon, since touching fresh pages costs as much as a pass over them."""

    def __init__(self) -> None:
        self._memory: dict[str, npt.NDArray[np.uint8]] = {}

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    def drop(self, name: str) -> None:
        self._memory.pop(name, None)

    def array(self, name: str, length: int, dtype: npt.DTypeLike) -> Ints:
        """Get an array of ``length`` items, uninitialised; memory of this ``name`` is reused if it suffices."""
        n_bytes = length * np.dtype(dtype).itemsize
        if self._memory.get(name, EMPTY_ROWS).nbytes < n_bytes:
            self.drop(name)  # before the new one is made
            self._memory[name] = huge_array(n_bytes)
        held = self._memory.get(name)
        return np.empty(0, dtype) if held is None else held[:n_bytes].view(dtype)


class _Numbers:
    """Numbers of rows in a horizon's tables: the rows themselves, or their ranks if the field has more rows than accesses.

    A rank counts the horizon's distinct rows. Tables by rank grow with the accesses, not with the field: a table over a field of
    67 M rows would take 268 MB.
    """

    def __init__(self, horizon: Horizon, offsets: Int64s, kept: _Kept) -> None:
        self.count = horizon.n
        self._ranks: distinct.Ranks | None = None
        if horizon.n <= int(offsets[-1]):
            kept.drop("ranks")
            return
        memory = kept.array("ranks", distinct.Ranks.words_for(horizon.n), np.uint64)
        memory.fill(0)
        self._ranks = distinct.Ranks(memory, horizon.n)
        for b in range(horizon.n_batches):
            ids = horizon.ids(b)
            _check(self._ranks.mark(ids), ids, b, horizon.n)
        self.count = self._ranks.number()

    def of(self, rows: Ints) -> Ints:
        """Number each row; -1 for a row that is not in the horizon."""
        if self._ranks is None:
            return rows
        numbers = np.empty(len(rows), rows.dtype)
        self._ranks.of(rows, numbers)
        return numbers


def _check(bad: int, ids: Ints, b: int, n: int) -> None:
    if bad >= 0:
        raise IndexError(f"row {ids[bad]} at position {bad} of batch {b} is out of range for {n} rows")


@register_policy("belady")
class Belady(PlannedPolicy):
    """Keep the rows whose next use is nearest; no schedule with that memory loads fewer rows over the accesses it sees.

    After each batch, of the rows cached and the rows just loaded, those used soonest stay. A row that is not used again within
    the horizon, or would be evicted before its use, is never admitted. Among rows used in the same batch, rows that were hit
    before stay first, so fewer are inserted for the same loads. ``Bits.evict`` in ``_core/belady.pyx`` chooses the rows to
    evict: one bit per access tells whether the row is still cached at that access.

    Notes
    -----
    Three passes, each linear in the accesses, whatever the capacity. Memory: 4 bytes an access that is planned (8 in a horizon
    of 2³¹ accesses or more; none if the horizon spills them), 1/4 byte an access of the horizon, 4 bytes a row that the horizon
    has, 9 a slot, and 8 for each row that is evicted at the beginning. If the field has more rows than the horizon has
    accesses, one more pass numbers the horizon's rows first, in 1/4 byte a row of the field. Memory of a horizon with look-
    ahead is reused for the next one. With :meth:`keep_memory` the memory of the last horizon is reused, too.

    References
    ----------
    Belady, IBM Systems Journal 1966; Ginex (VLDB 2022), section 3.4.
    """

    def __init__(self) -> None:
        self._n = self._capacity = 0
        self._free: Int32s = np.empty(0, np.int32)
        self._row_of_slot: Ints = np.empty(0, np.int32)  # of the slots that are taken
        self._slots: _core.Slots | None = None
        self._kept = _Kept()
        self._keeps = False

    def keep_memory(self, keep: bool) -> None:
        self._keeps = keep
        if not keep:
            self._kept, self._slots = _Kept(), None
            self._free = self._row_of_slot = np.empty(0, np.int32)

    @property
    def nbytes(self) -> int:
        return self._free.nbytes + self._row_of_slot.nbytes + self._kept.nbytes

    def start(self, capacity: int, context: PolicyContext, residents: Int64s = EMPTY_ROWS) -> None:
        self._n, self._capacity = context.n, min(capacity, context.n)
        kind = np.dtype(position_dtype(context.n))
        if len(self._free) != self._capacity or self._row_of_slot.dtype != kind:
            self._free = self._row_of_slot = np.empty(0, np.int32)  # before others are made
            self._free = huge_array(4 * self._capacity).view(np.int32)
            self._row_of_slot = huge_array(kind.itemsize * self._capacity).view(kind)
        self._free[:] = np.arange(self._capacity - 1, -1, -1, dtype=np.int32)
        self._row_of_slot[: len(residents)] = residents
        self._slots = _core.Slots(self._free, len(residents))
        if not self._keeps:
            self._kept = _Kept()

    def plan(self, horizon: Horizon) -> Iterator[PlannedBatch]:
        """Plan the batches of a horizon; the first changeset also evicts the cached rows that will not be hit."""
        if self._slots is None or horizon.n != self._n:
            raise ValueError("start() was not called for a field of this many rows")
        offsets = np.ascontiguousarray(horizon.offsets, np.int64)
        numbers = _Numbers(horizon, offsets, self._kept)
        next_of, last = self._link(horizon, offsets, numbers)
        length = int(offsets[-1])
        memory = self._kept.array("bits", _core.Bits.words_for(length), np.uint64)
        memory.fill(0)
        bits = _core.Bits(memory, length, self._capacity)
        state = np.full(self._capacity, TAKEN, np.uint8)
        for first in range(0, self._slots.n_free, PIECE_SLOTS):
            state.put(self._free[first : min(first + PIECE_SLOTS, self._slots.n_free)], FREE)
        for _, first_use in self._first_uses(state, numbers, last, length):
            bits.start(first_use[first_use < length])
        limits = []
        for b in range(horizon.n_planned):
            limits.append(bits.run(next_of[b], offsets, b))
            if horizon.announce is not None:
                missed = np.empty(int(offsets[b + 1] - offsets[b]), np.int32)
                horizon.announce(b, missed[: bits.missed(int(offsets[b]), int(offsets[b + 1]), missed)])
        for slots, first_use in self._first_uses(state, numbers, last, length):
            stays = np.empty(len(slots), np.uint8)
            _core.bits_at(bits, first_use, stays)
            state[slots[stays != 0]] = STAYS
        first_out = self._leave(state, numbers, last.view(np.int32)[: numbers.count], int(offsets[min(1, horizon.n_planned)]))
        del state, last
        yield from self._batches(horizon, next_of, bits, limits, numbers, *first_out)

    def _first_uses(
        self, state: npt.NDArray[np.uint8], numbers: _Numbers, last: Ints, length: int
    ) -> Iterator[tuple[Int64s, Ints]]:
        """Yield, piece by piece, the taken slots and the first position of each slot's row; ``length`` for a row without one."""
        for first in range(0, self._capacity, PIECE_SLOTS):
            slots = np.flatnonzero(state[first : first + PIECE_SLOTS]) + first
            found = numbers.of(self._row_of_slot[slots])
            first_use = np.full(len(slots), length, last.dtype)
            known = found >= 0
            first_use[known] = last.take(found[known])
            yield slots, first_use

    def _leave(self, state: npt.NDArray[np.uint8], numbers: _Numbers, slot_of: Int32s, room: int) -> tuple[Int64s, int]:
        """Begin the horizon's slot table with the rows that stay, and free the slots of the other cached rows.

        The others came from the last horizon, and will not be hit before they would be evicted. Returns them in an array with
        space for ``room`` more rows, and their number.
        """
        assert self._slots is not None
        slot_of.fill(-1)
        self._slots.begin(slot_of)
        rows = np.empty(np.count_nonzero(state == TAKEN) + room, np.int64)
        n = 0
        for first in range(0, self._capacity, PIECE_SLOTS):
            piece = state[first : first + PIECE_SLOTS]
            kept, gone = (np.flatnonzero(piece == what) + first for what in (STAYS, TAKEN))
            slot_of.put(numbers.of(self._row_of_slot[kept]), kept)
            rows[n : n + len(gone)] = self._row_of_slot[gone]
            n += len(gone)
            self._slots.release(gone.astype(np.int32))
        return rows, n

    def _link(self, horizon: Horizon, offsets: Int64s, numbers: _Numbers) -> tuple[Any, Ints]:
        """Run the backward pass: link each planned access to its row's next position, and find each row's first position.

        First positions are indexed by the row's number.
        """
        length = int(offsets[-1])
        kind = position_dtype(length)
        last = self._kept.array("last", numbers.count, kind)
        last.fill(length)
        longest = int(np.diff(offsets[horizon.n_planned :]).max(initial=0))
        next_of: Any
        if horizon.spill is None:
            held = self._kept.array("next", int(offsets[horizon.n_planned]), kind)
            next_of = [held[offsets[b] : offsets[b + 1]] for b in range(horizon.n_planned)]
        else:
            self._kept.drop("next")
            next_of = horizon.spill(horizon.n_planned)
        unused = self._kept.array("unused", longest, kind)
        for b in range(horizon.n_batches - 1, -1, -1):
            ids = horizon.ids(b)
            # Of a batch that is only looked ahead to, only the first positions of its rows count.
            is_planned = b < horizon.n_planned
            nxt: Ints = (next_of[b] if horizon.spill is None else np.empty(len(ids), kind)) if is_planned else unused[: len(ids)]
            bad = _core.link(numbers.of(ids), int(offsets[b]), last, nxt)
            _check(bad, ids, b, horizon.n)
            if is_planned and horizon.spill is not None:
                next_of[b] = nxt
        return next_of, last

    def _batches(
        self,
        horizon: Horizon,
        next_of: Any,
        bits: _core.Bits,
        limits: list[int],
        numbers: _Numbers,
        leaving: Int64s,
        n_leaving: int,
    ) -> Iterator[PlannedBatch]:
        assert self._slots is not None
        longest = int(np.diff(horizon.offsets[: horizon.n_planned + 1]).max(initial=0))
        in_rows, in_positions, out_rows = (self._kept.array(name, longest, np.int64) for name in ("in", "at", "out"))
        in_slots = self._kept.array("slots", longest, np.int32)
        for b in range(horizon.n_planned):
            ids = horizon.ids(b)
            slots = np.empty(len(ids), np.int32)
            n_in, n_out = self._slots.changes(
                bits, ids, numbers.of(ids), next_of[b], limits[b], slots, in_rows, in_positions, in_slots, out_rows
            )
            self._row_of_slot.put(in_slots[:n_in], in_rows[:n_in])
            if n_leaving:
                leaving[n_leaving : n_leaving + n_out] = out_rows[:n_out]
            changes = Changeset(
                in_rows=in_rows[:n_in].copy(),
                in_positions=in_positions[:n_in].copy(),
                in_slots=in_slots[:n_in].copy(),
                out_rows=leaving[: n_leaving + n_out] if n_leaving else out_rows[:n_out].copy(),
            )
            leaving, n_leaving = EMPTY_ROWS, 0
            yield PlannedBatch(slots, changes)
        if horizon.n_planned == horizon.n_batches and not self._keeps:  # nothing was looked ahead to, so no horizon follows
            self._kept = _Kept()
