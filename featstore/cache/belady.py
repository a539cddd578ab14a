"""Belady's optimal replacement at batch granularity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core import belady as _core
from featstore.cache.base import PolicyContext, register_policy
from featstore.cache.planned import PlannedBatch, PlannedPolicy, Window, position_dtype
from featstore.gather.plan import Changeset

__all__ = ["Belady"]

Ints = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

EMPTY_ROWS = np.empty(0, np.int64)


@register_policy("belady")
class Belady(PlannedPolicy):
    """Keep the rows whose next use is nearest; no schedule with that memory loads fewer rows over the accesses it sees.

    After each batch, of the rows cached and the rows just loaded, those used soonest stay; rows not used again within the window
    are never admitted, and neither is a row that would have to go again before its use. Among rows used in the same batch, rows
    that were hit before stay first, so fewer are inserted for the same loads.

    Parameters
    ----------
    spill : callable, optional
        ``spill(n_batches)`` returns a list-like to which the window's next positions, an array a batch, are written instead of
        memory: 4 bytes an access (8 from 2³¹ positions on).

    Notes
    -----
    Three passes, each linear in the accesses, whatever the capacity. Memory: 4 or 8 bytes an access, 1/4 byte an access of bits,
    4 bytes a row, 8 more a row while a window is planned; with ``spill`` and ids from disk only the bits grow with the trace.

    References
    ----------
    Belady, IBM Systems Journal 1966; Ginex (VLDB 2022), section 4.3.
    """

    def __init__(self, spill: Callable[[int], Any] | None = None) -> None:
        self._spill = spill
        self._capacity = 0
        self._slot_of_row: Int32s = np.empty(0, np.int32)
        self._slots: _core.Slots | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held between windows: 4 a row and 4 a slot."""
        return self._slot_of_row.nbytes + 4 * self._capacity

    def start(self, capacity: int, context: PolicyContext, residents: Int64s = EMPTY_ROWS) -> None:
        """See :class:`PlannedPolicy`."""
        self._capacity = min(capacity, context.n)
        self._slot_of_row = np.full(context.n, -1, np.int32)
        self._slot_of_row[residents] = np.arange(len(residents), dtype=np.int32)
        free = np.arange(self._capacity, dtype=np.int32)[::-1].copy()
        self._slots = _core.Slots(self._slot_of_row, free, len(residents))

    def plan(self, window: Window) -> Iterator[PlannedBatch]:
        """See :class:`PlannedPolicy`; the first batch's changeset also evicts what the window does not use.

        Raises
        ------
        IndexError
            A row is not in ``[0, n)``.
        """
        if self._slots is None or window.n != len(self._slot_of_row):
            raise ValueError("start() was not called for a field of this many rows")
        offsets = np.ascontiguousarray(window.offsets, np.int64)
        length = int(offsets[-1])
        kind = position_dtype(length)
        next_of: Any = [None] * window.n_batches if self._spill is None else self._spill(window.n_batches)
        last = np.full(window.n, length, kind)
        for b in range(window.n_batches - 1, -1, -1):
            ids = window.ids(b)
            nxt: Ints = np.empty(len(ids), kind)
            bad = _core.link(ids, int(offsets[b]), last, nxt)
            if bad >= 0:
                raise IndexError(f"row {ids[bad]} at position {bad} of batch {b} is out of range for {window.n} rows")
            next_of[b] = nxt
        bits = _core.Bits(length, self._capacity)
        residents = np.flatnonzero(self._slot_of_row >= 0)
        first_use = last[residents]
        del last
        bits.start(first_use[first_use < length])
        for b in range(window.n_planned):
            bits.run(next_of[b], offsets, b, b + 1, int(offsets[b]))
        # What came from the last window and will not be hit, or not before it must go, makes room before anything else.
        stays = np.empty(len(residents), np.uint8)
        _core.bits_at(bits, first_use, stays)
        leaving = residents[stays == 0]
        self._slots.release(leaving)
        yield from self._batches(window, offsets, next_of, bits, leaving)

    def _batches(
        self, window: Window, offsets: Int64s, next_of: Any, bits: _core.Bits, leaving: Int64s
    ) -> Iterator[PlannedBatch]:
        assert self._slots is not None
        for b in range(window.n_planned):
            ids, nxt = window.ids(b), next_of[b]
            k = len(ids)
            slots = np.empty(k, np.int32)
            in_positions, out_rows, in_slots = np.empty(k, np.int64), np.empty(k, np.int64), np.empty(k, np.int32)
            _, n_in, n_out = self._slots.changes(bits, ids, nxt, int(offsets[b]), slots, in_positions, in_slots, out_rows)
            positions = in_positions[:n_in].copy()
            gone = out_rows[:n_out].copy()
            changes = Changeset(
                in_rows=ids[positions].astype(np.int64),
                in_positions=positions,
                in_slots=in_slots[:n_in].copy(),
                out_rows=np.concatenate([leaving, gone]) if len(leaving) else gone,
            )
            leaving = EMPTY_ROWS
            yield PlannedBatch(slots, changes)
