"""Planned policies: accesses are known ahead, and the cache's changes are planned batch by batch before the batches run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from featstore._core import belady as _core
from featstore.cache.base import Policy, PolicyContext
from featstore.gather.plan import Changeset
from featstore.lazy import lazy

__all__ = ["NO_ROWS", "Horizon", "NextAccess", "PlannedBatch", "PlannedPolicy", "position_dtype"]

Ints = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

NO_ROWS = np.empty(0, np.int64)


def position_dtype(n_positions: int) -> type[np.int32 | np.int64]:
    """Choose the narrowest integer that numbers the positions of a trace and one behind its end."""
    return np.int32 if n_positions < 2**31 - 1 else np.int64


@dataclass(frozen=True)
class Horizon:
    """The accesses that a planned policy sees: batches to plan, then batches that are only looked ahead to.

    Parameters
    ----------
    n : int
        Rows of the field.
    offsets : int64 array, shape (n_batches + 1,)
        Batch ``b`` is trace positions ``offsets[b] … offsets[b + 1] - 1``.
    ids : callable
        ``ids(b)`` returns the distinct rows of batch ``b``, int32 or int64; from memory or from disk.
    n_planned : int
        Batches ``0 … n_planned - 1`` are to be planned; the rest is look-ahead.
    spill : callable, optional
        Given where memory is short. ``spill(n_batches)`` returns a list-like that keeps one array for each planned batch on disk.
        Each array is written once, in any order, then read. A policy stores there the arrays that grow with the accesses.
    announce : callable, optional
        Given where packing can begin with the misses alone. ``announce(b, positions)`` announces which of batch ``b``'s accesses
        will miss, int32, ascending. A policy that knows the misses before the slots calls it for every planned batch, in order,
        before it yields the first. Other policies do not call it.
    """

    n: int
    offsets: Int64s
    ids: Callable[[int], Ints]
    n_planned: int
    spill: Callable[[int], Any] | None = None
    announce: Callable[[int, Int32s], None] | None = None

    @property
    def n_batches(self) -> int:
        """Batches, look-ahead included."""
        return len(self.offsets) - 1

    @lazy
    def next_access(self) -> NextAccess:
        """The CSR form of the next accesses; made at first use."""
        return NextAccess(self)

    def first_rows(self, capacity: int) -> Int64s:
        """Find the ``capacity`` rows that are used first, ascending; all rows if the horizon has fewer.

        Of rows that are first used in the same batch, those at its beginning are taken. Takes a byte a row while it runs.

        References
        ----------
        The initial content of Ginex's feature cache (VLDB 2022, section 3.3).
        """
        seen = np.zeros(self.n, bool)
        left = min(capacity, self.n)
        for b in range(self.n_batches):
            ids = self.ids(b)
            fresh = ids[~seen.take(ids)][:left]
            seen.put(fresh, True)
            left -= len(fresh)
            if not left:
                break
        return np.flatnonzero(seen)


class NextAccess:
    """Next accesses in CSR form: for each row, in order, the batches that touch it.

    Parameters
    ----------
    horizon : Horizon

    Attributes
    ----------
    ptr : int64 array, shape (n + 1,)
        The batches of row ``r`` are ``iters[ptr[r]:ptr[r + 1]]``.
    iters : integer array, shape (n_accesses,)
        Batch numbers, ascending within a row; as wide as the number of batches needs.

    Notes
    -----
    Two passes over the horizon: counts, then batch numbers. Memory: 16 bytes a row and 4 an access (8 from 2³¹ batches on).

    References
    ----------
    Ginex (VLDB 2022), section 3.4.
    """

    def __init__(self, horizon: Horizon) -> None:
        counts = np.zeros(horizon.n + 1, np.int64)
        for b in range(horizon.n_batches):
            counts[horizon.ids(b).astype(np.int64, copy=False) + 1] += 1  # distinct within a batch
        self.ptr: Int64s = np.cumsum(counts)
        self.iters: Ints = np.empty(int(self.ptr[-1]), position_dtype(horizon.n_batches))
        cursor = self.ptr[:-1].copy()
        for b in range(horizon.n_batches):
            _core.fill_iters(horizon.ids(b), b, cursor, self.iters)
        self._at = self.ptr[:-1].copy()

    def next(self, rows: Ints, batch: int) -> Int64s:
        """Find the first batch after ``batch`` that touches each row, int64; −1 if none does.

        Each row's list is advanced to ``batch``, so ``batch`` must not fall from call to call; the whole run costs one pass.
        """
        out = np.empty(len(rows), np.int64)
        _core.next_uses(rows, batch, self._at, self.ptr[1:], self.iters, out, True)
        return out


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The plan of one batch: the rows that it finds in the cache, and the changes after it.

    Parameters
    ----------
    slots : int32 array, shape (k,)
        Slot of each row of the batch; −1 for a miss.
    changes : Changeset
    """

    slots: Int32s
    changes: Changeset


class PlannedPolicy(Policy):
    """Policy that knows accesses ahead, horizon by horizon, and plans the cache's admissions and evictions after each batch.

    The cache keeps its rows between horizons: a horizon begins with the rows that the last one left.

    Attributes
    ----------
    looks_ahead : bool
        Whether the plan of a batch depends on later batches. False: horizons have no look-ahead and no next accesses, and no
        memory is counted for these.
    """

    looks_ahead: ClassVar[bool] = True

    @abstractmethod
    def start(self, capacity: int, context: PolicyContext, residents: Int64s = NO_ROWS) -> None:
        """Begin with a cache of ``capacity`` slots; forget all earlier state.

        Parameters
        ----------
        capacity : int
        context : PolicyContext
        residents : int64 array, shape (k,), optional
            Rows that are in the cache already, ``residents[i]`` in slot ``i``; at most ``capacity``. Empty in the rolling
            schedule.
        """

    @abstractmethod
    def plan(self, horizon: Horizon) -> Iterator[PlannedBatch]:
        """Yield one planned batch for each of the horizon's first ``n_planned`` batches, in order."""

    def keep_memory(self, keep: bool) -> None:
        """Set whether arrays may be kept after a last horizon, for the next :meth:`start`; by default they are not kept.

        False releases kept arrays. A caller that passes True has reserved memory for them.
        """

    @property
    def nbytes(self) -> int:
        """Bytes held between horizons."""
        return 0
