"""Overlapped packing: the extents of a superbatch are filled while its plans are still being made."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from featstore.errors import PluginError
from featstore.plan.superbatchextents import SuperbatchExtents

__all__ = ["MissedRows", "OverlappedPacking", "PackSuperbatch"]

Ids = npt.NDArray[Any]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Check = Callable[[], None]

MOST_PENDING = 4  # batches whose misses are known and not yet sorted
WAIT_S = 0.05  # between two checks whether the epoch is over


class MissedRows:
    """The missed rows of each batch of a superbatch, ascending.

    They are kept in memory while batches are planned, up to ``most_bytes``; beyond that none are, and ``read(batch)`` reads a
    batch's rows back once all batches are planned. The caller reserves ``most_bytes``; without, none are kept.
    """

    def __init__(self, read: Callable[[int], Ids], most_bytes: int = 0) -> None:
        self._read, self._most = read, most_bytes
        self._kept: list[Ids] | None = [] if most_bytes else None
        self.nbytes = 0

    def add(self, rows: Ids) -> None:
        """Keep the rows of the next batch. If all together exceed ``most_bytes``, keep none."""
        self.nbytes += rows.nbytes
        if self.nbytes > self._most:
            self.drop()
        elif self._kept is not None:
            self._kept.append(rows)

    def drop(self) -> None:
        """Drop all rows, and keep none from now on."""
        self._kept, self._most, self.nbytes = None, 0, 0

    def kept(self, batch: int) -> Ids | None:
        """Return a batch's rows if they are in memory, else None."""
        kept = self._kept
        return None if kept is None else kept[batch]

    def __call__(self, batch: int) -> npt.NDArray[np.int32 | np.int64]:
        kept = self.kept(batch)
        return self._read(batch) if kept is None else kept


class PackSuperbatch(Protocol):
    """Copy the rows that the batches of a superbatch miss into extents."""

    @property
    def most_held(self) -> int:
        """Bytes of missed rows that may be kept until they are packed, a part of the memory for packing."""
        ...

    def fits(self, n_missed: Int64s, n_bytes: int) -> bool:
        """Return whether the disk has room for the extents of a superbatch and for ``n_bytes`` more."""
        ...

    def __call__(self, k: int, n_missed: Int64s, rows_of: MissedRows, check: Check) -> SuperbatchExtents | None:
        """Pack superbatch ``k``. Return None if the disk has no room for it: its rows are then read from the base file.

        ``rows_of(b)`` returns the rows that batch ``b`` of the superbatch misses, ascending. Packing calls ``check`` from time
        to time, which raises once the epoch is over; the error is passed on.
        """
        ...


class OverlappedPacking:
    """Pack a superbatch in a thread of its own, as soon as the misses of all its batches are known.

    A policy may announce its misses before its slots and changes (:class:`~featstore.cache.planned.Horizon`). The extents are
    then filled while those are worked out and written. Packing follows planning if the policy announces nothing, or if
    ``may_begin(n_missed)`` finds no room for both at once.

    ``ids(b)`` returns the rows of batch ``b``; it is thread-safe. ``missed(b)`` returns the rows that batch ``b`` misses,
    ascending, once all batches are planned. At most ``most_held`` bytes of missed rows are kept. The thread calls
    ``pack(n_missed, rows_of, check)``, and ``check`` ends it by raising.

    Used as a context manager: if an exception leaves the block, the thread is stopped and the extents are removed.
    """

    def __init__(
        self,
        n: int,
        ids: Callable[[int], Ids],
        missed: Callable[[int], Ids],
        most_held: int,
        pack: Callable[[Int64s, MissedRows, Check], SuperbatchExtents | None],
        may_begin: Callable[[Int64s], bool],
        check: Check,
    ) -> None:
        self._ids, self._missed, self._pack, self._may_begin, self._check = ids, missed, pack, may_begin, check
        self._rows = MissedRows(self._read_back, most_held)
        self._n_missed: Int64s = np.zeros(n, np.int64)
        self._n_announced = 0
        self._is_planned = threading.Event()
        self._stopped = False
        self._pending: deque[Future[None]] = deque()
        self._packing: Future[SuperbatchExtents | None] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="featstore-pack")

    def announce(self, batch: int, positions: Int32s) -> None:
        """Note which accesses of a batch will miss; the policy calls this batch after batch.

        PluginError: the policy announced another batch than the next.
        """
        if batch != self._n_announced or batch >= len(self._n_missed):
            raise PluginError(f"a policy announced batch {batch} where {self._n_announced} of {len(self._n_missed)} came next")
        self._n_announced += 1
        self._n_missed[batch] = len(positions)
        self._settle(MOST_PENDING)
        self._pending.append(self._worker.submit(self._sort, batch, positions))
        if self._n_announced == len(self._n_missed) and self._may_begin(self._n_missed):
            self._packing = self._worker.submit(self._pack, self._n_missed, self._rows, self._go_on)

    def planned(self, batch: int, rows: Ids) -> None:
        """Note the rows that a planned batch misses, ascending; called batch after batch.

        PluginError: the policy announced other misses.
        """
        if not self._n_announced:
            self._n_missed[batch] = len(rows)
            self._rows.add(rows)
            return
        self._settle()
        kept = self._rows.kept(batch)
        is_announced = self._n_announced == len(self._n_missed) and len(rows) == self._n_missed[batch]
        if not is_announced or (kept is not None and not np.array_equal(kept, rows)):
            raise PluginError(f"batch {batch} misses other rows than its policy announced")

    def finish(self) -> SuperbatchExtents | None:
        """End planning and wait for the extents; return None if the disk had no room for them."""
        self._is_planned.set()
        if self._packing is None:
            self._packing = self._worker.submit(self._pack, self._n_missed, self._rows, self._go_on)
        return self._packing.result()

    def __enter__(self) -> OverlappedPacking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped = kind is not None
        self._is_planned.set()
        self._worker.shutdown()
        if kind is not None and self._packing is not None and self._packing.exception() is None:
            packed = self._packing.result()
            if packed is not None:
                packed.remove()

    def _settle(self, most: int = 0) -> None:
        while len(self._pending) > most:
            self._pending.popleft().result()

    # The thread's side.

    def _sort(self, batch: int, positions: Int32s) -> None:
        self._rows.add(np.sort(self._ids(batch).take(positions)))

    def _go_on(self) -> None:
        self._check()
        if self._stopped:
            raise RuntimeError("planning failed")  # never seen: the error of planning is raised

    def _read_back(self, batch: int) -> Ids:
        while not self._is_planned.wait(WAIT_S):
            self._check()
        self._go_on()
        return self._missed(batch)
