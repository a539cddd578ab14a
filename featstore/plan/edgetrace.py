"""Traces of edges: the edges of each batch of a superbatch, in a run file. Caches of edge features are planned over them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.sampling.batch import Block
from featstore.sampling.edgenumbers import edge_numbers
from featstore.storage.rundir import DiskQuota
from featstore.storage.sections import SectionFile, SectionWriter

__all__ = ["DistinctEdges", "EdgeTrace", "EdgeTraceWriter", "distinct_edges"]

KIND = "edges"
SECTIONS = 2  # a batch: its distinct edges, and the position of each edge of its blocks among them
FINDING_BYTES = 48  # an edge, while the distinct edges of a batch are computed

Ints = npt.NDArray[np.int32 | np.int64]
Int64s = npt.NDArray[np.int64]
# The distinct edges of a batch, and the position among them of each edge of its blocks, block after block. The positions are
# empty if all edges are distinct.
DistinctEdges: TypeAlias = tuple[Ints, npt.NDArray[np.int32]]


def distinct_edges(blocks: tuple[Block, ...], n_edges: int, budget: Budget) -> DistinctEdges:
    """Compute the distinct edges of a batch's blocks, of ``n_edges`` in all; ``budget`` counts the memory of the computation.

    Several hops may draw the same edge; its row is needed once. After a BudgetError the call may be repeated.
    """
    with budget.reserve("edges of a batch", FINDING_BYTES * sum(len(block.src) for block in blocks)):
        numbers = edge_numbers(blocks, n_edges, whole=True)
        ids, places = np.unique(numbers, return_inverse=True)
        dtype = np.int32 if n_edges < 2**31 else np.int64
        if len(ids) == len(numbers):
            return numbers.astype(dtype), np.empty(0, np.int32)
        return ids.astype(dtype), places.astype(np.int32)


class EdgeTraceWriter(SectionWriter):
    """Write the edges of a superbatch, batch after batch."""

    def __init__(self, path: str | os.PathLike[str], disk: DiskQuota | None = None) -> None:
        super().__init__(path, KIND, disk)

    def add(self, edges: DistinctEdges) -> None:
        for array in edges:
            self.append(array)

    def finish_trace(self) -> EdgeTrace:
        """Close the file and open it for reading."""
        return EdgeTrace(self.finish())


class EdgeTrace:
    """The edges of a superbatch, by the number of the batch; every array is checked when it is read."""

    def __init__(self, file: SectionFile) -> None:
        self._file = file
        self.lengths: Int64s = file.lengths[::SECTIONS]

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, number: int, array: Callable[..., npt.NDArray[Any]] = np.empty) -> Ints:
        """Return the distinct edges of a batch; ``array(n, dtype)`` allocates them."""
        return self._file.read(SECTIONS * number, array)

    def places(self, number: int, array: Callable[..., npt.NDArray[Any]] = np.empty) -> npt.NDArray[np.int32]:
        """Return the position of each edge of a batch's blocks among its distinct edges; empty if all are distinct."""
        return self._file.read(SECTIONS * number + 1, array)

    def remove(self) -> None:
        self._file.remove()
