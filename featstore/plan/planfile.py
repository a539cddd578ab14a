"""Plans of consecutive batches in a file: the tier and address of each row, and the changesets of the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from featstore._core.blocks import hits_of, missed_positions
from featstore._core.rows import copy_rows
from featstore.cache.planned import PlannedBatch
from featstore.errors import CorruptionError
from featstore.gather.plan import BatchPlan, Changeset, Tier, TierRows
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.sections import SectionFile

__all__ = ["STORED_PER_ACCESS", "Append", "PlanFile", "most_bytes", "write_bytes", "write_plan"]

Ints = npt.NDArray[np.int32 | np.int64]
Int64s = npt.NDArray[np.int64]
Append: TypeAlias = Callable[[npt.NDArray[Any]], object]  # SectionWriter.append, or a substitute
SECTIONS = 5  # a batch: slots, positions missed, positions and slots admitted, rows evicted
BYTES_PER_ACCESS = 6  # of a plan on disk, about
STORED_PER_ACCESS = 12  # bytes on disk to allow for: half of the rows missed, and as many evicted


def write_bytes(longest: int) -> int:
    """Return the bytes of each of the two buffers that write plans of batches of up to ``longest`` accesses."""
    return min(1 << 20, -(-max(1, BYTES_PER_ACCESS * longest) // PAGE_BYTES) * PAGE_BYTES)


def most_bytes(n_batches: int, n_accesses: int, n_missed: int, capacity: int) -> int:
    """Bound the bytes of a file of plans: one slot an access; each missed row may be admitted, and evicted later."""
    return 4 * n_accesses + 20 * n_missed + 8 * capacity + PAGE_BYTES * (2 + n_batches)


class PlanFile:
    """Plans of consecutive batches, read from a file.

    ``tier`` has the rows that the host cache lacks: ``BASE``, or ``PACKED`` in the order in which extents hold them. A plan
    that names a slot from ``n_slots`` on is refused. CorruptionError: the number of sections is no multiple of five.
    """

    def __init__(self, file: SectionFile, tier: Tier = Tier.BASE, n_slots: int | None = None) -> None:
        self._file = file
        self.tier = tier
        self._n_slots = 1 << 31 if n_slots is None else n_slots
        if len(file) % SECTIONS:
            raise CorruptionError(f"{len(file)} sections are no plans", file.path)

    def __len__(self) -> int:
        return len(self._file) // SECTIONS

    @property
    def n_missed(self) -> Int64s:
        """Number of rows that each batch misses."""
        return self._file.lengths[1::SECTIONS]

    def missed(self, number: int, array: Callable[..., npt.NDArray[Any]] = np.empty) -> npt.NDArray[np.int32]:
        """Return the positions of a batch's rows that the host cache lacks; for the tier ``PACKED``, ascending by row."""
        found = self._file.read(SECTIONS * number + 1, array)
        if found.dtype != np.int32:
            raise CorruptionError(f"the plan of batch {number} is not of integers", self._file.path)
        return found

    def plan(self, number: int, ids: npt.NDArray[np.int64], array: Callable[..., npt.NDArray[Any]] = np.empty) -> BatchPlan:
        """Return the plan of a batch whose input ids are ``ids``; CorruptionError if the file is damaged, or of other batches.

        ``array(n, dtype)`` allocates the plan: 12 bytes a row, and up to 16 more for each miss. Reading needs another 4 bytes a
        row, and 12 for each missed or admitted row. Exceptions of ``array`` propagate.
        """
        arrays = self._file.run(SECTIONS * number, SECTIONS, array)
        slots, missed, in_positions, in_slots, out_rows = arrays
        if any(each.dtype != np.int32 for each in arrays[:-1]) or out_rows.dtype.kind != "i":
            raise CorruptionError(f"the plan of batch {number} is not of integers", self._file.path)
        k = len(slots)
        hit_positions, hit_slots = array(k, np.int64), array(k, np.int32)
        n_hits = hits_of(slots, hit_positions, hit_slots)
        if n_hits + len(missed) != k or k != len(ids) or len(in_positions) != len(in_slots) or not _are_within(missed, k):
            raise CorruptionError(f"the plan of batch {number} does not place its {len(ids)} rows", self._file.path)
        if any(len(each) and int(each.max()) >= self._n_slots for each in (slots, in_slots)):
            raise CorruptionError(f"the plan of batch {number} names a slot beyond the cache's {self._n_slots}", self._file.path)
        changes = None
        if len(in_slots) or len(out_rows):
            positions = _copy(in_positions, np.int64, array)
            slots = _copy(in_slots, np.int32, array)  # a view would keep the whole buffer alive
            in_rows, gone = self._take(ids, positions, array), _copy(out_rows, np.int64, array)
            changes = Changeset(in_rows, positions, slots, gone, self._file.path)
        missed_at = _copy(missed, np.int64, array)
        if self.tier == Tier.PACKED:
            others = TierRows(Tier.PACKED, range(len(missed)), missed_at)
        else:
            others = TierRows(Tier.BASE, self._take(ids, missed_at, array), missed_at)
        return BatchPlan(k, (TierRows(Tier.HOST, hit_slots[:n_hits], hit_positions[:n_hits]), others), changes)

    def close(self) -> None:
        self._file.close()

    def misses(self, number: int, ids: Ints, array: Callable[..., npt.NDArray[Any]] = np.empty) -> Int64s:
        """Return the rows that a batch of ``ids`` reads from the file, in the plan's order; ``array`` as for :meth:`plan`."""
        rows = self._take(ids, self.missed(number, array), array)
        return rows if rows.dtype == np.int64 else _copy(rows, np.int64, array)

    def _take(self, ids: Ints, positions: Ints, array: Callable[..., npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return ``ids[positions]`` in memory of ``array``; CorruptionError: a position is out of range."""
        taken, width = array(len(positions), ids.dtype), ids.itemsize
        try:
            copy_rows(ids.view(np.uint8).reshape(-1, width), positions, taken.view(np.uint8).reshape(-1, width), None)
        except IndexError:
            raise CorruptionError(f"a plan names rows beyond the {len(ids)} of its batch", self._file.path) from None
        return taken

    def remove(self) -> None:
        self._file.remove()


def _are_within(positions: Ints, n: int) -> bool:
    return not len(positions) or 0 <= int(positions.min()) <= int(positions.max()) < n


def _copy(values: npt.NDArray[Any], dtype: npt.DTypeLike, array: Callable[..., npt.NDArray[Any]]) -> npt.NDArray[Any]:
    copied = array(len(values), dtype)
    copied[:] = values
    return copied


def write_plan(
    append: Append, planned: PlannedBatch, ids: Ints | None = None, missed: Int64s | None = None
) -> npt.NDArray[np.int32]:
    """Append a batch's plan to a file; return the positions missed, in the order stored.

    With the batch's ``ids`` these positions ascend by row, as extents are filled; without, they ascend. ``missed`` gives the
    positions in an order of the caller's own.
    """
    changes = planned.changes
    rows = changes.out_rows
    slots = np.ascontiguousarray(planned.slots, np.int32)
    append(slots)
    if missed is None:
        found = np.empty(len(slots), np.int32)
        found = found[: missed_positions(slots, found)]
        found = found if ids is None else found[np.argsort(ids.take(found))]
    else:
        found = missed.astype(np.int32)
    append(found)
    append(changes.in_positions.astype(np.int32))
    append(changes.in_slots)
    append(rows.astype(np.int32) if not len(rows) or int(rows.max()) < 2**31 else rows)
    return found
