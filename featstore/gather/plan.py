"""The batch plan: the tier and address of each row of a batch, and the changes of the host cache after the gather."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["NO_CHANGES", "Addresses", "BatchPlan", "Changeset", "DeviceRows", "EdgePlan", "Tier", "TierRows"]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
Addresses: TypeAlias = "Int64s | Int32s | range"


class Tier(enum.IntEnum):
    """Tiers that a row can be read from; up to ``BASE`` the fastest first."""

    __hash__ = int.__hash__  # Enum's own hash costs a Python call at each look-up
    DEVICE = 0
    HOST = 1
    DISK_CACHE = 2
    PACKED = 3  # the batch's own extent, read whole: its addresses are 0, 1, 2 …
    BASE = 4
    AHEAD = 5  # rows of BASE that were read already, and count as such: their addresses are 0, 1, 2 …


@dataclass(slots=True)  # plans are not changed once made; frozen, each of these would take three times as long to make
class TierRows:
    """The rows of a batch that one tier holds.

    Parameters
    ----------
    tier : Tier
    addresses : integer array, shape (k,), or range
        Row number within the tier's source: slot in a cache, row of a segment file or extent, row of the field.
    positions : int64 array, shape (k,), or None
        Row of the output that each address fills; None for ``0 … k-1``.
    """

    tier: Tier
    addresses: Addresses
    positions: Int64s | None = None


_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Changeset:
    """Changes of the host cache after a batch's gather: rows admitted, and rows evicted.

    Parameters
    ----------
    in_rows : int64 array, shape (k,)
        Rows admitted.
    in_positions : int64 array, shape (k,)
        Position of each in the batch's output.
    in_slots : int32 array, shape (k,)
        Slot of each; distinct.
    out_rows : int64 array
        Rows evicted: cached before, absent afterwards.
    path : str
        The file that the changes were read from, if any. If they do not fit the cache, this file is damaged.
    """

    in_rows: Int64s
    in_positions: Int64s
    in_slots: Int32s
    out_rows: Int64s
    path: str = ""

    def within(self, capacity: int, is_cached: npt.NDArray[np.bool_]) -> Changeset:
        """Leave out changes that do not fit a cache with only the first ``capacity`` slots left.

        ``is_cached``: for each of ``out_rows``, whether the row is still cached.
        """
        left = self.in_slots < capacity
        out_rows = self.out_rows[is_cached]
        return Changeset(self.in_rows[left], self.in_positions[left], self.in_slots[left], out_rows, self.path)


NO_CHANGES = Changeset(_NO_ROWS, _NO_ROWS, np.empty(0, np.int32), _NO_ROWS)


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The rows of a batch that the training device holds, and the positions of the other rows, which the host assembles.

    ``slots``, int32, are the slots in the tier ``DEVICE``; ``positions``, int64, are the positions in the batch that they fill.
    ``others``, int64, are the positions that the host's rows fill, in order. ``positions`` and ``others`` partition the batch.
    """

    slots: Int32s
    positions: Int64s
    others: Int64s


@dataclass(slots=True)
class BatchPlan:
    """Tier and address of every row that the host assembles; the parts' positions partition ``range(n_rows)``.

    ``device`` has the batch's other rows; without it the host assembles all rows. Rows are the feature's own, from 0.
    """

    n_rows: int
    parts: tuple[TierRows, ...]
    changes: Changeset | None = None
    device: DeviceRows | None = None

    def count(self, tier: Tier) -> int:
        return sum(len(part.addresses) for part in self.parts if part.tier == tier)

    def within(self, capacity: int, rows: Callable[[], Int64s]) -> BatchPlan:
        """Turn hits beyond the first ``capacity`` slots into misses; ``rows()`` returns the batch's rows."""
        parts: list[TierRows] = []
        for part in self.parts:
            slots = np.asarray(part.addresses)
            if part.tier == Tier.HOST and not (left := slots < capacity).all():
                positions = np.arange(self.n_rows) if part.positions is None else part.positions
                lost = positions[~left]
                parts.append(TierRows(Tier.BASE, rows()[lost], lost))
                part = TierRows(Tier.HOST, slots[left], positions[left])
            parts.append(part)
        return replace(self, parts=tuple(parts))

    def read_ahead(self, n_rows: int) -> BatchPlan:
        """Move ``BASE`` to ``AHEAD``: its ``n_rows`` rows were read already, in the plan's order."""
        missed = self.count(Tier.BASE)
        if missed != n_rows:
            raise ValueError(f"{n_rows} rows were read ahead for a plan that misses {missed}")
        moved = (TierRows(Tier.AHEAD, range(n_rows), part.positions) if part.tier == Tier.BASE else part for part in self.parts)
        return replace(self, parts=tuple(moved))


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """Plan for the rows of a batch's edges, each row gathered once.

    ``ids``, int64, are distinct edge ids, whose rows ``plan`` gathers. ``places``, int32, has the index in ``ids`` of
    each edge of the blocks, one block after the other. It is empty if ``ids`` already has the edges in this order.
    """

    ids: Int64s
    places: Int32s
    plan: BatchPlan
