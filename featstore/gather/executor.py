"""The executor: runs any batch plan. It looks nothing up and decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from featstore._core.rows import copy_rows
from featstore.gather.plan import BatchPlan, Tier
from featstore.storage.reader import RowFile

__all__ = ["Executor", "FileSource", "MemorySource", "Source"]


class Source(Protocol):
    """One tier's rows, by address."""

    def gather(self, addresses: npt.NDArray[Any], out: npt.NDArray[np.uint8], positions: npt.NDArray[np.int64] | None) -> None:
        """Copy row ``addresses[i]`` to row ``positions[i]`` of ``out`` (``i`` where positions is None)."""
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

    def gather(self, addresses: npt.NDArray[Any], out: npt.NDArray[np.uint8], positions: npt.NDArray[np.int64] | None) -> None:
        """See :class:`Source`. Bound by memory bandwidth."""
        copy_rows(self.array, addresses, out, positions, self.n_threads)


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

    def gather(self, addresses: npt.NDArray[Any], out: npt.NDArray[np.uint8], positions: npt.NDArray[np.int64] | None) -> None:
        """See :class:`Source`. At most one read per distinct page."""
        self.file.gather(addresses, out, positions, self.gap_bytes)


class Executor:
    """Run batch plans over a set of tiers.

    Parameters
    ----------
    sources : mapping of Tier to Source
    """

    def __init__(self, sources: Mapping[Tier, Source]) -> None:
        self.sources = dict(sources)

    def execute(self, plan: BatchPlan, out: npt.NDArray[np.uint8], tiers: frozenset[Tier] | None = None) -> None:
        """Fill ``out`` with the rows that the plan's parts name.

        Parameters
        ----------
        plan : BatchPlan
        out : uint8 array, shape (plan.n_rows, row_bytes), C-contiguous
        tiers : set of Tier, optional
            Only parts of these tiers.

        Raises
        ------
        CorruptionError, OSError
            A source failed; ``out`` is then undefined, and the plan's changes must not be applied.
        """
        for part in sorted(plan.parts, key=lambda part: part.tier):  # what is in memory first
            if len(part.addresses) and (tiers is None or part.tier in tiers):
                self.sources[part.tier].gather(part.addresses, out, part.positions)
