"""The executor: runs any batch plan. It looks nothing up and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from featstore._core.rows import copy_rows
from featstore.errors import ClosedError
from featstore.gather.plan import Addresses, BatchPlan, Tier
from featstore.storage.rowfile import ReadStats, RowFile

__all__ = ["Executor", "FileSource", "MemorySource", "Source", "Tally"]


@dataclass
class Tally:
    """What some gathers came to; whoever asks for them owns it, one thread at a time.

    Parameters
    ----------
    rows : dict of Tier to int
        Rows delivered from each tier.
    read : ReadStats
        What was read for them, also by gathers that failed afterwards.
    update_s : float
        Seconds of choosing what the host cache admits and of copying it there.
    """

    rows: dict[Tier, int] = field(default_factory=dict)
    read: ReadStats = field(default_factory=ReadStats)
    update_s: float = 0.0

    def count(self, tier: Tier, n_rows: int) -> None:
        """Count rows that a tier delivered."""
        self.rows[tier] = self.rows.get(tier, 0) + n_rows

    def count_plan(self, plan: BatchPlan) -> None:
        """Count the rows of a plan that was carried out."""
        for part in plan.parts:
            self.count(part.tier, len(part.addresses))


class Source(Protocol):
    """One tier's rows, by address."""

    def gather(self, addresses: Addresses, out: npt.NDArray[np.uint8], positions: npt.NDArray[Any] | None) -> ReadStats:
        """Copy row ``addresses[i]`` to row ``positions[i]`` of ``out`` (``i`` where positions is None); return what was read."""
        ...


class MemorySource:
    """Rows of an array in memory.

    Parameters
    ----------
    array : uint8 array, shape (n, row_bytes), C-contiguous
    n_threads : int
        Threads that copy.
    """

    def __init__(self, array: npt.NDArray[np.uint8], n_threads: int) -> None:
        self.array = array
        self.n_threads = n_threads

    def gather(self, addresses: Addresses, out: npt.NDArray[np.uint8], positions: npt.NDArray[Any] | None) -> ReadStats:
        """See :class:`Source`. Bound by memory bandwidth."""
        copy_rows(self.array, np.asarray(addresses), out, positions, self.n_threads)
        return ReadStats()


class FileSource:
    """Rows of a row file.

    Parameters
    ----------
    file : RowFile
    gap_bytes : int, optional
        See :meth:`RowFile.gather`.
    """

    def __init__(self, file: RowFile, gap_bytes: int | None = None) -> None:
        self.file = file
        self.gap_bytes = gap_bytes

    def gather(self, addresses: Addresses, out: npt.NDArray[np.uint8], positions: npt.NDArray[Any] | None) -> ReadStats:
        """See :class:`Source`. At most one read per distinct page."""
        return self.file.gather(np.asarray(addresses, np.int64), out, positions, self.gap_bytes)


class Executor:
    """Run batch plans over a set of tiers.

    Parameters
    ----------
    sources : mapping of Tier to Source
    """

    def __init__(self, sources: Mapping[Tier, Source]) -> None:
        self.sources = dict(sources)

    def execute(
        self, plan: BatchPlan, out: npt.NDArray[np.uint8], tiers: frozenset[Tier] | None = None, tally: Tally | None = None
    ) -> None:
        """Fill ``out`` with the rows that the plan's parts name.

        Parameters
        ----------
        plan : BatchPlan
        out : uint8 array, shape (plan.n_rows, row_bytes), C-contiguous
        tiers : set of Tier, optional
            Only parts of these tiers.
        tally : Tally, optional
            Gets what was read.

        Raises
        ------
        CorruptionError, OSError
            A source failed; ``out`` is then undefined, and the plan's changes must not be applied.
        ClosedError
            A tier of the plan is gone.
        """
        for part in sorted(plan.parts, key=lambda part: part.tier):  # what is in memory first
            if len(part.addresses) and (tiers is None or part.tier in tiers):
                if part.tier not in self.sources:  # the plan was made while there was one
                    raise ClosedError(f"the {part.tier.name.lower()} tier was closed")
                cost = self.sources[part.tier].gather(part.addresses, out, part.positions)
                if tally is not None:
                    tally.read.add(cost)
