"""Weights of edges in the order of the lists, in a run file: where they do not fit the memory, a list's are one read."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.config import format_size
from featstore.gather.buffers import BufferPool
from featstore.graph.feature import FeatureStore
from featstore.storage.format import sums_seed
from featstore.storage.layout import RowLayout
from featstore.storage.rundir import RunDirectory, free_share, runs_directory
from featstore.storage.spill import SpillFiles
from featstore.storage.writer import RowFileWriter
from featstore.topology.edgeids import EdgeIds
from featstore.topology.types import EdgeType

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["OrderedWeights", "disk_bytes", "row_dtype"]

Int64s = npt.NDArray[np.int64]

_MEMORY_FRACTION = 1 / 2  # of what is left of the budget, while the file is made
_DISK_FRACTION = 1 / 2  # of the free disk
_IDS_A_PART = 256  # at once, so that files are opened 2/256 times an edge at most
_MOST_IDS = 1 << 22
_WRITE_BYTES = 1 << 20  # of the writer's two buffers
_BYTES_A_ROW = 32  # a part's weights: as they are read, converted, the rows themselves, and those of the part before
_BYTES_AN_ID = 64  # an edge's number, its part, its place in a sort, its weight
_EXACT_IN_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.bool)


def row_dtype(store: FeatureStore) -> np.dtype[Any]:
    """Choose the dtype that holds all weights of a feature as they are."""
    return np.dtype("<f4" if store.dtype in _EXACT_IN_FLOAT32 else "<f8")


def disk_bytes(store: FeatureStore, numbers: EdgeIds, n_edges: int) -> int:
    """Compute the bytes of disk that are taken at most while weights are put in order; the file keeps a row an edge of them."""
    return n_edges * (2 * row_dtype(store).itemsize + numbers.dtype.itemsize)


class OrderedWeights:
    """The weights of a type of edges in the order of its lists, in a run file that is removed with this object.

    Parameters
    ----------
    g : OutOfCoreGraph
    store : FeatureStore
        The edge feature, in the order of the input.
    kind : EdgeType
        The type of edges.
    numbers : EdgeIds
        The numbers that stored edges had in the input.

    Raises
    ------
    BudgetError
        What is left of the budget is less than some 40 MB for a billion edges, 1 MB and 1.3 MB for a million.
    CorruptionError, OSError
        A number is of no edge of the type; reading or writing failed, as where the disk has no room (ENOSPC).

    Notes
    -----
    The numbers are divided among files, by the part of the weights in which they lie; each part is read once, and gives the
    weights of its file; going over the numbers again puts them in order. So the drive reads and writes some 50 bytes an edge.
    Half of what is left of the budget is used meanwhile.
    """

    def __init__(self, g: OutOfCoreGraph, store: FeatureStore, kind: EdgeType, numbers: EdgeIds) -> None:
        self._kind, self._dtype = kind, row_dtype(store)
        folder = runs_directory(g.path)
        needed, free = disk_bytes(store, numbers, kind.n_edges), free_share(os.path.dirname(folder) or ".", _DISK_FRACTION)
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"putting weights in the order of the lists takes {format_size(needed)}, and half of the free disk is "
                f"{format_size(free)}",
                folder,
            )
        self._runs = RunDirectory(folder)
        try:
            with _Memory(g.budget, kind.n_edges) as memory:
                record = self._write(store, numbers, memory)
            path = self._runs.file("weights")
            self._runs.file("weights.sums")
            seed = record.seed
            self._file = g.reader.open(
                path, layout=record.layout, n_rows=record.n_rows, seed=seed, sums_seed=sums_seed(seed), n_bytes=record.n_bytes
            )
        except BaseException:
            self._runs.close()
            raise

    def _write(self, store: FeatureStore, numbers: EdgeIds, memory: _Memory) -> Any:
        kind, width = self._kind, self._dtype.itemsize
        layout = RowLayout(width, 1, width)
        options: Any = {"kind": "edge weights", "dtype": f"float{8 * width}", "buffer_bytes": _WRITE_BYTES}
        with RowFileWriter(self._runs.path, "weights", layout, **options) as writer:
            for weights in self._in_order(store, numbers, memory):
                writer.write(weights.view(np.uint8).reshape(len(weights), width))
            assert writer.n_rows == kind.n_edges
            return writer.commit()

    def _in_order(self, store: FeatureStore, numbers: EdgeIds, memory: _Memory) -> Iterator[npt.NDArray[Any]]:
        """Yield the weights in the order of the lists."""
        n, n_rows, n_ids, n_parts = self._kind.n_edges, memory.n_rows, memory.n_ids, memory.n_parts
        folder = self._runs.path
        with SpillFiles(folder, numbers.dtype, n_parts) as ids_of_part, SpillFiles(folder, self._dtype, n_parts) as found:
            if n_parts > 1:
                for ids in self._numbers(numbers, n_ids):
                    for part, at in _parts(ids, n_rows, n_parts):
                        ids_of_part[part].append(ids[at])
            for part in range(n_parts):
                rows = self._rows(store, part * n_rows, min(n, (part + 1) * n_rows))
                if n_parts == 1:
                    for ids in self._numbers(numbers, n_ids):
                        yield rows[ids]
                    return
                for ids in ids_of_part[part].drain(n_ids):
                    found[part].append(rows[ids - part * n_rows])
            for ids in self._numbers(numbers, n_ids):
                weights = np.empty(len(ids), self._dtype)
                for part, at in _parts(ids, n_rows, n_parts):
                    weights[at] = found[part].take(len(at))
                yield weights

    def _rows(self, store: FeatureStore, first: int, stop: int) -> npt.NDArray[Any]:
        rows: npt.NDArray[Any] = store[first:stop].reshape(-1).to(torch.float64).numpy().astype(self._dtype)
        return rows

    def _numbers(self, numbers: EdgeIds, n: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the numbers within the type of its stored edges, ``n`` at a time; CorruptionError for one of another type."""
        kind, buffer = self._kind, np.empty(n, numbers.dtype)
        for begin, ids in numbers.pieces(kind.first_edge, kind.first_edge + kind.n_edges, buffer):
            ids -= kind.first_edge
            bad = (ids < 0) | (ids >= kind.n_edges)
            if bad.any():
                at = int(bad.argmax())
                raise numbers.damage(begin + at, int(ids[at]) + kind.first_edge)
            yield ids

    def read(self, positions: Int64s, pool: BufferPool) -> npt.NDArray[np.float64]:
        """Read the weights of stored edges; ``positions`` are overwritten."""
        if self._kind.first_edge:
            positions -= self._kind.first_edge
        n, width = len(positions), self._dtype.itemsize
        rows, weights = pool.array((n,), self._dtype), pool.array((n,), np.float64)
        self._file.gather(positions, rows.view(np.uint8).reshape(n, width))
        weights[:] = rows
        return weights

    def close(self) -> None:
        """Remove the file; may be called again."""
        self._file.close()
        self._runs.close()


class _Memory:
    """Memory while weights are put in order, reserved within the context: the rows of a part, and the numbers at once."""

    def __init__(self, budget: Budget, n_edges: int) -> None:
        half = int(budget.available * _MEMORY_FRACTION) // 2
        # The least memory for this many edges is where rows and numbers take the same.
        rows = max(half // _BYTES_A_ROW, math.isqrt(_BYTES_AN_ID * _IDS_A_PART * n_edges // _BYTES_A_ROW), 1)
        self.n_rows = max(n_edges, 1) if rows >= n_edges else 1 << rows.bit_length() - 1  # a power of two divides by a shift
        self.n_parts = -(-n_edges // self.n_rows)
        self.n_ids = max(1, min(max(min(half // _BYTES_AN_ID, _MOST_IDS), _IDS_A_PART * self.n_parts), n_edges))
        n_bytes = self.n_rows * _BYTES_A_ROW + self.n_ids * _BYTES_AN_ID + _WRITE_BYTES
        self._reservation = budget.reserve("weights put in order", n_bytes)

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self._reservation.release()


def _parts(ids: npt.NDArray[Any], n_rows: int, n_parts: int) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield each part of ``n_rows`` numbers, a power of two, that occurs, and where its numbers are, in their order."""
    part = ids >> (n_rows.bit_length() - 1)
    if n_parts <= 1 << 16:
        part = part.astype(np.uint16)  # which NumPy sorts by radix
    order, begin = np.argsort(part, kind="stable"), 0
    counts = np.bincount(part)
    for number in np.flatnonzero(counts).tolist():
        end = begin + int(counts[number])
        yield number, order[begin:end]
        begin = end
