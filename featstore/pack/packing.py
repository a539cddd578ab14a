"""Packing: the rows that a plan's host cache misses are copied next to each other, an extent a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.budget import Reservation
from featstore.errors import BudgetError
from featstore.plan.overlapped import MissedRows
from featstore.plan.superbatchextents import SuperbatchExtents
from featstore.storage.extentmap import whole_memory
from featstore.storage.extents import ExtentMap, ExtentWriter, Kept, least_memory
from featstore.storage.pagestream import Arenas, PagedRows
from featstore.storage.reader import Reader
from featstore.storage.reuse import FileReuse
from featstore.storage.rowfile import ReadStats
from featstore.storage.rundir import DiskQuota, RunDirectory

__all__ = ["PackArenas", "PackCounts", "RowsOf", "RunPacker", "fill_extents"]

Int64s = npt.NDArray[np.int64]
RowsOf = Callable[[int], npt.NDArray[Any]]


def fill_extents(
    writer: ExtentWriter, base: PagedRows, rows_of: RowsOf, memory: Reservation, held: int = 0, **options: Any
) -> None:
    """Fill a file of extents within the bytes that ``memory`` holds; ``held`` of these are in use elsewhere.

    ``options`` go to :meth:`ExtentWriter.fill`. BudgetError: the bytes do not suffice for one batch; ``needed`` is the least
    total of the budget that does.
    """
    id_bytes = 4 if base.n_rows < 2**31 else 8
    try:
        writer.fill(base, rows_of, memory.n_bytes - writer.nbytes - held, id_bytes, **options)
    except BudgetError as error:
        if error.needed is None:
            raise
        needed = memory.budget.total + error.needed + writer.nbytes + held - memory.n_bytes
        raise BudgetError(error.reason, needed) from None


@dataclass
class PackArenas:
    """Memory that is reused for every superbatch: for packing, and for reading each feature's extents (``windows``)."""

    packing: Arenas
    windows: Mapping[str, Arenas]

    def keep(self, packing: int, windows: int) -> None:
        """Keep at most ``packing`` bytes for packing, and ``windows`` bytes over all features, from now on."""
        self.packing.keep(packing)
        for arenas in self.windows.values():
            arenas.keep(windows // len(self.windows))

    def drop(self) -> None:
        """Keep no memory from now on."""
        self.keep(0, 0)


@dataclass
class PackCounts:
    """Counts of packing an epoch's superbatches so far.

    ``done`` superbatches took ``passes`` passes over the features. One superbatch takes several if memory is short, at most
    ``most_passes`` so far. The superbatches of the numbers ``skipped`` had no room on disk. ``memory_bytes`` of memory would have
    sufficed for one pass each, and ``disk_bytes`` of disk for all superbatches.
    """

    done: int = 0
    passes: int = 0
    skipped: set[int] = field(default_factory=set)
    most_passes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0

    @property
    def unpacked(self) -> int:
        """Number of superbatches that had no room on disk."""
        return len(self.skipped)

    @classmethod
    def joined(cls, each: Sequence[PackCounts]) -> PackCounts:
        """Join the counts of packers that each pack a part of the features of every superbatch.

        A superbatch is done when all its parts are, and takes the passes of the part with most. If one part had no room on disk,
        the superbatch counts as unpacked.
        """

        def most(name: str) -> int:
            return max((getattr(counts, name) for counts in each), default=0)

        return cls(
            min((counts.done for counts in each), default=0),
            most("passes"),
            set().union(*(counts.skipped for counts in each)),
            most("most_passes"),
            most("memory_bytes"),
            most("disk_bytes"),
        )


class RunPacker:
    """Packer of superbatches into run files; see :class:`featstore.plan.overlapped.PackSuperbatch`.

    ``bases`` are the features' files. Packing may hold ``memory``; reading a feature's extents takes ``window_bytes``, which are
    reserved. Files of ``reuse``, whose batches have run, are overwritten. ``reads`` is called with the cost of reads while
    packing, and of extents read in vain. ``keep(name)`` lends the rows of a feature, if any, that a pass also copies to memory.
    ``may_skip``: do not pack a superbatch that does not fit the disk. ``label`` is a part of the names of the files.
    """

    def __init__(
        self,
        bases: Mapping[str, PagedRows],
        reader: Reader,
        runs: RunDirectory,
        disk: DiskQuota,
        memory: Reservation,
        window_bytes: int,
        reuse: FileReuse,
        arenas: PackArenas,
        reads: Callable[[ReadStats], None],
        *,
        keep: Callable[[str], AbstractContextManager[Kept | None]],
        may_skip: bool = False,
        label: str = "",
    ) -> None:
        self._label = label
        self._keep, self._may_skip, self._reuse = keep, may_skip, reuse
        self.counts = PackCounts()
        self._bases, self._reader, self._runs, self._disk = bases, reader, runs, disk
        self._memory, self._window_bytes, self._arenas, self._reads = memory, window_bytes, arenas, reads

    @property
    def most_held(self) -> int:
        return self._memory.n_bytes // 8

    def fits(self, n_missed: Int64s, n_bytes: int = 0) -> bool:
        if self._disk.total is None:
            return True
        return self._disk.used - self._reuse.n_bytes + self._needed(n_missed) + n_bytes <= self._disk.total

    def _needed(self, n_missed: Int64s) -> int:
        return sum(ExtentMap(n_missed, base.row_bytes).disk_bytes for base in self._bases.values())

    def __call__(self, k: int, n_missed: Int64s, rows_of: MissedRows, check: Callable[[], None]) -> SuperbatchExtents | None:
        counts = self.counts
        if self._may_skip and not self.fits(n_missed):
            counts.done += 1
            counts.skipped.add(k)
            counts.disk_bytes = max(counts.disk_bytes, self._disk.used - self._reuse.n_bytes + self._needed(n_missed))
            return None
        n_passes = 0
        packed = SuperbatchExtents(self._reader, self._disk, self._window_bytes, self._reuse, self._arenas.windows, self._reads)
        try:
            for number, (name, base) in enumerate(self._bases.items()):
                extents = ExtentMap(n_missed, base.row_bytes)
                path = self._runs.file(f"extents-{self._label}{k}-{number}.rows")
                with ExtentWriter(path, extents, self._disk, reuse=self._reuse) as writer:
                    least = least_memory(base.row_bytes, int(extents.n_rows.max(initial=0)))
                    if writer.nbytes + rows_of.nbytes + least > self._memory.n_bytes:
                        rows_of.drop()
                    held, arenas = rows_of.nbytes, self._arenas.packing
                    try:
                        with self._keep(name) as kept:
                            fill_extents(writer, base, rows_of, self._memory, held, check=check, arenas=arenas, kept=kept)
                    finally:
                        self._reads(writer.read)
                    n_passes = max(n_passes, writer.n_episodes)
                    if writer.n_episodes > 1:  # kept missed rows take up to an eighth
                        needed = whole_memory(extents, 4 if base.n_rows < 2**31 else 8) + writer.nbytes
                        counts.memory_bytes = max(counts.memory_bytes, needed * 8 // 7 + 1)
                    record = writer.finish()
                packed.add(name, self._runs.path, record, extents)
        except BaseException:
            packed.remove()
            raise
        counts.done, counts.passes = counts.done + 1, counts.passes + n_passes
        counts.most_passes = max(counts.most_passes, n_passes)
        return packed
