"""The trace that a cache of edge features is planned over: the edges of each batch of a superbatch, in a run file."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.sampling.batch import SampledBatch
from featstore.sampling.edgenumbers import edge_numbers
from featstore.storage.rundir import DiskQuota
from featstore.storage.sections import SectionFile, SectionWriter

__all__ = ["DistinctEdges", "EdgeTrace", "EdgeTraceWriter", "distinct_edges"]

KIND = "edges"
SECTIONS = 2  # a batch's: its distinct edges, and where each of its blocks' edges is among them
FINDING_BYTES = 48  # an edge, while a batch's distinct edges are found

Ints = npt.NDArray[np.int32 | np.int64]
Int64s = npt.NDArray[np.int64]
# A batch's distinct edges, and where each edge of its blocks is among them, block after block; no places if all are distinct.
DistinctEdges: TypeAlias = tuple[Ints, npt.NDArray[np.int32]]


def distinct_edges(batch: SampledBatch, n_edges: int, budget: Budget) -> DistinctEdges:
    """Return the distinct edges of a batch of a graph of ``n_edges``; ``budget`` counts the memory of finding them.

    Hops that draw anew draw an edge several times; its row is needed once. A BudgetError may be tried again.
    """
    with budget.reserve("edges of a batch", FINDING_BYTES * sum(len(block.src) for block in batch.blocks)):
        numbers = edge_numbers(batch.blocks, n_edges, whole=True)
        ids, places = np.unique(numbers, return_inverse=True)
        dtype = np.int32 if n_edges < 2**31 else np.int64
        if len(ids) == len(numbers):
            return numbers.astype(dtype), np.empty(0, np.int32)
        return ids.astype(dtype), places.astype(np.int32)


class EdgeTraceWriter(SectionWriter):
    """Write the edges of a superbatch's batches, in order."""

    def __init__(self, path: str | os.PathLike[str], disk: DiskQuota | None = None) -> None:
        super().__init__(path, KIND, disk)

    def add(self, edges: DistinctEdges) -> None:
        for array in edges:
            self.append(array)

    def finish_trace(self) -> EdgeTrace:
        """Close the file and open it for reading."""
        return EdgeTrace(self.finish())


class EdgeTrace:
    """Edges of the batches of a superbatch, by number; every array is checked when it is read."""

    def __init__(self, file: SectionFile) -> None:
        self._file = file
        self.lengths: Int64s = file.lengths[::SECTIONS]

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, number: int, array: Callable[..., npt.NDArray[Any]] = np.empty) -> Ints:
        """Return a batch's distinct edges; ``array(n, dtype)`` makes the memory."""
        return self._file.read(SECTIONS * number, array)

    def places(self, number: int, array: Callable[..., npt.NDArray[Any]] = np.empty) -> npt.NDArray[np.int32]:
        """Return where the edges of a batch's blocks are among its distinct ones."""
        return self._file.read(SECTIONS * number + 1, array)

    def remove(self) -> None:
        self._file.remove()
