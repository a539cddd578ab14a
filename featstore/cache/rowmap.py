"""Row maps: the slot of each row, by direct addressing. The interface is small, so that a map could be paged for very large n."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core import cache as _core
from featstore.gather.buffers import huge_array
from featstore.gather.plan import Tier, TierRows

__all__ = ["CLAIM_BYTES", "RowMap"]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

PIECE_ROWS = 1 << 16
CLAIM_BYTES = 36  # that claim() allocates per row


class RowMap:
    """Slot of every row: 4 bytes a row. One writer at a time; concurrent look-ups see each row as before or after a change.

    ``slot_of_row``, int32 ``[n]``, is the slot of a cached row, and negative if a look-up misses: -1 for an absent row,
    ``-2 - slot`` for a *held* row, whose bytes have not arrived in its slot yet. An array that is given is used as it is, and may
    be read-only if nothing changes the map.
    """

    def __init__(self, n: int, slot_of_row: Int32s | None = None) -> None:
        if slot_of_row is None:
            slot_of_row = huge_array(4 * n).view(np.int32)
            slot_of_row.fill(-1)
        self.slot_of_row = slot_of_row

    def __len__(self) -> int:
        return len(self.slot_of_row)

    @property
    def nbytes(self) -> int:
        return self.slot_of_row.nbytes

    def _check(self, code: int, rows: Int64s) -> int:
        if code < 0:
            position = -1 - code
            raise IndexError(f"row {rows[position]} at position {position} is out of range for {len(self)} rows")
        return code

    def find(self, rows: Int64s, array: Callable[..., npt.NDArray[Any]] = np.empty) -> tuple[Int32s, int]:
        """Look up the slot of every row, int32 [k], -1 for a miss, and count the hits; one pass without the GIL.

        Rows are in any order, repeats allowed. IndexError names the first row that is out of range. ``array(n, dtype)``
        allocates the result.
        """
        slots = array(len(rows), np.int32)
        n_hits = _core.lookup(rows, self.slot_of_row, slots)
        if n_hits < 0:
            self._check(n_hits, rows)
        return slots, n_hits

    def lookup(self, rows: Int64s) -> Int32s:
        """Look up the slots without the count, see :meth:`find`."""
        return self.find(rows)[0]

    @staticmethod
    def divide(
        rows: Int64s, slots: Int32s, n_hits: int, array: Callable[..., npt.NDArray[Any]] = np.empty
    ) -> tuple[Int64s, Int32s, Int64s, Int64s]:
        """Divide a batch into hits and misses by the result of :meth:`find`; ``slots`` is overwritten.

        Returns the hits' positions (int64, ascending) and slots (int32), then the misses' positions (int64, ascending) and
        rows.
        """
        n = len(rows) - n_hits
        hit_positions, miss_positions, missed = array(n_hits + 1, np.int64), array(n + 1, np.int64), array(n + 1, np.int64)
        _core.divide(rows, slots, hit_positions, miss_positions, missed)
        return hit_positions[:n_hits], slots[:n_hits], miss_positions[:n], missed[:n]

    def split(self, rows: Int64s, array: Callable[..., npt.NDArray[Any]] = np.empty) -> tuple[Int64s, Int32s, Int64s, Int64s]:
        """Look up and divide a batch, see :meth:`find` and :meth:`divide`."""
        return self.divide(rows, *self.find(rows, array), array)

    def parts(
        self, rows: Int64s, array: Callable[..., npt.NDArray[Any]] = np.empty, copied: bool = False
    ) -> tuple[tuple[TierRows, ...], Int32s]:
        """Make the parts of a batch's plan; return them, and the hits' slots.

        With ``copied`` the missed rows are the plan's own copy. The rows read are then the rows admitted, even if the caller
        changes ``rows`` meanwhile.
        """
        slots, n_hits = self.find(rows, array)
        if n_hits == len(rows):
            return (TierRows(Tier.HOST, slots),), slots
        if n_hits:
            positions, slots, miss_positions, missed = self.divide(rows, slots, n_hits, array)
            return (TierRows(Tier.HOST, slots, positions), TierRows(Tier.BASE, missed, miss_positions)), slots
        if copied:
            rows, given = array(len(rows), np.int64), rows
            rows[:] = given
        return (TierRows(Tier.BASE, rows),), slots[:0]

    def assign(self, rows: Int64s, slots: Int32s) -> None:
        """Record that ``slots`` hold ``rows``."""
        self._check(_core.assign(rows, slots, self.slot_of_row), rows)

    def assign_first(self, rows: Int64s) -> None:
        """Record, in pieces, that the first slots hold ``rows``, in their order."""
        for first in range(0, len(rows), PIECE_ROWS):
            piece = rows[first : first + PIECE_ROWS]
            self.assign(piece, np.arange(first, first + len(piece), dtype=np.int32))

    def hold(self, rows: Int64s, slots: Int32s) -> None:
        """Record that ``slots`` are given to ``rows``, whose bytes are still to come."""
        self._check(_core.assign(rows, np.subtract(-2, slots, dtype=np.int32), self.slot_of_row), rows)

    def release(self, rows: Int64s) -> None:
        """Record that ``rows`` are absent."""
        self._check(_core.release(rows, self.slot_of_row), rows)

    def release_from(self, slot: int) -> None:
        """Record that the rows of ``slot`` and all later slots are absent; a pass over the map, in pieces."""
        for first in range(0, len(self), PIECE_ROWS):
            piece = self.slot_of_row[first : first + PIECE_ROWS]
            piece[piece >= slot] = -1

    def exchange(self, out_rows: Int64s, in_rows: Int64s, in_slots: Int32s, row_of_slot: Int32s | Int64s) -> str | None:
        """Apply a planner's changes in one pass over each list: ``out_rows`` leave, then ``in_rows`` take ``in_slots``.

        ``row_of_slot`` is the row of every slot, -1 for a free slot; it changes along with the map. Returns None, or a
        description of the first fault; the map is then changed in part.
        """
        what, position = _core.exchange(out_rows, in_rows, in_slots, self.slot_of_row, row_of_slot)
        if what == 1:
            return f"evicts row {out_rows[position]}, which is not cached"
        if what == 2:
            return f"admits a row into slot {in_slots[position]}, which is taken or does not exist"
        if what == 3:
            return f"admits row {in_rows[position]}, which is cached or does not exist"
        return None

    def claim(
        self, rows: Int64s, positions: Int64s, limit: int, array: Callable[..., npt.NDArray[Any]] = np.empty
    ) -> tuple[Int64s, Int64s, Int64s, Int64s, Int32s]:
        """Find the rows to admit among a batch's misses, ``rows`` at ``positions`` of its output.

        ``array(n, dtype)`` allocates the result, ``CLAIM_BYTES`` a row at most.

        Returns
        -------
        new_rows, new_positions : int64 array
            The first ``limit`` distinct absent rows, in the batch's order.
        held_rows, held_positions, held_slots : int64, int64, int32 array
            Rows that are held, repeats included. Rows that were cached meanwhile are in neither group.
        """
        k = len(rows)
        limit = min(limit, k)
        new_rows, new_positions = array(limit, np.int64), array(limit, np.int64)
        held_rows, held_positions, held_slots = array(k, np.int64), array(k, np.int64), array(k, np.int32)
        n_new, n_held = _core.claim(
            rows, positions, self.slot_of_row, new_rows, new_positions, held_rows, held_positions, held_slots
        )
        self._check(n_new, rows)
        return new_rows[:n_new], new_positions[:n_new], held_rows[:n_held], held_positions[:n_held], held_slots[:n_held]

    def still_held(self, rows: Int64s, positions: Int64s, slots: Int32s) -> tuple[Int64s, Int64s, Int32s]:
        """Keep the (row, position, slot) triples whose row is still held by that slot."""
        k = len(rows)
        rows_out, positions_out, slots_out = np.empty(k, np.int64), np.empty(k, np.int64), np.empty(k, np.int32)
        n = _core.still_held(rows, positions, slots, self.slot_of_row, rows_out, positions_out, slots_out)
        return rows_out[:n], positions_out[:n], slots_out[:n]
