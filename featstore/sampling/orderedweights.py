"""Weights of edges in the order of the lists, where they were given in another and do not fit the memory."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.graph.feature import FeatureStore
from featstore.storage.spill import SpillFiles
from featstore.topology.edgeids import EdgeIds
from featstore.topology.types import EdgeType

__all__ = ["as_doubles", "spilled_bytes", "weights_in_order"]

_MEMORY_FRACTION = 1 / 2  # of what is left of the budget
_IDS_A_PART = 256  # at once, so that files are opened 2/256 times an edge at most
_MOST_IDS = 1 << 22
_BYTES_A_ROW = 32  # a part's weights: as they are read, converted, the rows themselves, and those of the part before
_BYTES_AN_ID = 64  # an edge's number, its part, its place in a sort, its weight
_EXACT_IN_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.bool)


def as_doubles(rows: torch.Tensor) -> npt.NDArray[np.float64]:
    """Convert rows of one number, of any dtype."""
    found = np.empty(rows.numel(), np.float64)
    torch.from_numpy(found).copy_(rows.reshape(-1))
    return found


def _dtype(store: FeatureStore) -> np.dtype[Any]:
    """Choose the dtype that holds all weights of a feature as they are."""
    return np.dtype("<f4" if store.dtype in _EXACT_IN_FLOAT32 else "<f8")


def spilled_bytes(store: FeatureStore, numbers: EdgeIds, n_edges: int) -> int:
    """Compute the bytes of disk that putting weights in order takes."""
    return n_edges * (_dtype(store).itemsize + numbers.dtype.itemsize)


def weights_in_order(
    store: FeatureStore, kind: EdgeType, numbers: EdgeIds, folder: str, budget: Budget
) -> Generator[npt.NDArray[Any], None, None]:
    """Yield the weights of a type of edges in the order of its lists.

    Parameters
    ----------
    store : FeatureStore
        The edge feature, in the order of the input.
    kind : EdgeType
    numbers : EdgeIds
        The numbers that stored edges had in the input.
    folder : str
        For files that are gone afterwards.
    budget : Budget
        Half of what is left of it is used.

    Raises
    ------
    BudgetError
        What is left of the budget is less than some 40 MB for a billion edges, 1 MB and 1.3 MB for a million.
    CorruptionError, OSError
        A number is of no edge of the type; reading or writing failed, as where the disk has no room (ENOSPC).

    Notes
    -----
    The numbers are divided among files, by the part of the weights in which they lie; each part is read once, and gives the
    weights of its file; going over the numbers again puts them in order. So the drive reads and writes some 40 bytes an edge.
    """
    n, dtype = kind.n_edges, _dtype(store)
    with _Memory(budget, n) as memory:
        n_rows, n_ids, n_parts = memory.n_rows, memory.n_ids, memory.n_parts
        with SpillFiles(folder, numbers.dtype, n_parts) as ids_of_part, SpillFiles(folder, dtype, n_parts) as found:
            if n_parts > 1:
                for ids in _numbers(numbers, kind, n_ids):
                    for part, at in _parts(ids, n_rows, n_parts):
                        ids_of_part[part].append(ids[at])
            for part in range(n_parts):
                rows = _rows(store, part * n_rows, min(n, (part + 1) * n_rows), dtype)
                if n_parts == 1:
                    for ids in _numbers(numbers, kind, n_ids):
                        yield rows.take(ids)
                    return
                for ids in ids_of_part[part].drain(n_ids):
                    at = ids - part * n_rows
                    if len(at) and not 0 <= at.min() <= at.max() < len(rows):
                        raise ids_of_part[part].damage()
                    found[part].append(rows.take(at))
            for ids in _numbers(numbers, kind, n_ids):
                weights = np.empty(len(ids), dtype)
                for part, at in _parts(ids, n_rows, n_parts):
                    weights[at] = found[part].take(len(at))
                yield weights


def _rows(store: FeatureStore, first: int, stop: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return as_doubles(store[first:stop]).astype(dtype)


def _numbers(numbers: EdgeIds, kind: EdgeType, n: int) -> Iterator[npt.NDArray[Any]]:
    """Yield the numbers within the type of its stored edges, ``n`` at a time; CorruptionError for one of another type."""
    buffer = np.empty(n, numbers.dtype)
    for begin, ids in numbers.pieces(kind.first_edge, kind.first_edge + kind.n_edges, buffer):
        ids -= kind.first_edge
        bad = (ids < 0) | (ids >= kind.n_edges)
        if bad.any():
            at = int(bad.argmax())
            raise numbers.damage(begin + at, int(ids[at]) + kind.first_edge)
        yield ids


class _Memory:
    """Memory while weights are put in order, reserved within the context: the rows of a part, and the numbers at once."""

    def __init__(self, budget: Budget, n_edges: int) -> None:
        half = int(budget.available * _MEMORY_FRACTION) // 2
        # The least memory for this many edges is where rows and numbers take the same.
        rows = max(half // _BYTES_A_ROW, math.isqrt(_BYTES_AN_ID * _IDS_A_PART * n_edges // _BYTES_A_ROW), 1)
        self.n_rows = max(n_edges, 1) if rows >= n_edges else 1 << rows.bit_length() - 1  # a power of two divides by a shift
        self.n_parts = -(-n_edges // self.n_rows)
        self.n_ids = max(1, min(max(min(half // _BYTES_AN_ID, _MOST_IDS), _IDS_A_PART * self.n_parts), n_edges))
        n_bytes = self.n_rows * _BYTES_A_ROW + self.n_ids * _BYTES_AN_ID
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
