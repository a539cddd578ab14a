"""Edges that a dataset is made of, as offsets and ids or as pairs: checked before anything is written, or as they are read.

Errors name the argument, the first wrong position, and its value. An id that is no node raises IndexError, as everywhere.
Offsets that do not ascend raise ValueError. Values that are no integers raise TypeError.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.creation.source import ArrayLike, NpySource, Source, dtype_name, open_source
from featstore.gather.arrays import as_array

__all__ = ["CscInput", "EdgeBlocks", "PairInput", "not_a_node"]

Int64s = npt.NDArray[np.int64]

_CHECK_BYTES = 1 << 20  # of offsets, checked together


def not_a_node(which: str, n: int) -> IndexError:
    """Make the error of an id that is none of ``n`` nodes; ``which`` says where it is, and its value: ``"ids[3]: 7"``."""
    return IndexError(f"{which} is not a node: " + (f"ids are 0 … {n - 1}" if n else "there are none"))


# --- offsets and ids ------------------------------------------------------------------------------------------------------------


class _Cursor:
    """Read a one-dimensional integer source ``n`` at a time, as int64."""

    def __init__(self, source: Source, block_bytes: int) -> None:
        self._is_uint64 = source.dtype == "uint64"
        self._blocks = source.values(block_bytes)
        self._rest: npt.NDArray[Any] = np.empty(0, dtype=np.int64)

    def read(self, n: int) -> Int64s:
        """Read the next ``n`` values, fewer at the end, into an array that the caller may change."""
        out = np.empty(n, dtype=np.int64)
        done = 0
        while done < n:
            if not len(self._rest):
                found = next(self._blocks, None)
                if found is None:
                    break
                self._rest = found
                continue
            take = self._rest[: n - done]
            out[done : done + len(take)] = take  # a uint64 beyond int64 turns negative, which no id or offset may be
            done += len(take)
            self._rest = self._rest[len(take) :]
        return out[:done]

    def given(self, value: np.int64) -> int:
        """Undo the wrap of a uint64 value, for messages."""
        return int(value) % (1 << 64) if self._is_uint64 else int(value)


class CscInput:
    """Neighbour lists as compressed columns: the list of node ``v`` is ``indices[indptr[v]:indptr[v + 1]]``.

    ``n_sources``: ids are below it, by default below the number of lists. TypeError or ValueError if one of the two holds no
    integers or has several dimensions, or ``indptr`` is empty.
    """

    def __init__(self, indptr: ArrayLike, indices: ArrayLike, n_sources: int | None = None) -> None:
        self._indptr, self._indices = _integers("indptr", indptr), _integers("indices", indices)
        if not self._indptr.n_rows:
            raise ValueError("indptr is empty; it has one entry more than there are nodes")
        self.num_nodes, self.num_edges = self._indptr.n_rows - 1, self._indices.n_rows
        self._n_sources = self.num_nodes if n_sources is None else n_sources

    def check_offsets(self) -> None:
        """Read the offsets, and raise the errors of :meth:`offsets`; skipped if they can be read only once."""
        if not self._indptr.is_read_once:
            for _ in self.offsets(_CHECK_BYTES // 8, _CHECK_BYTES):
                pass

    def offsets(self, step: int, block_bytes: int) -> Iterator[Int64s]:
        """Yield the begins of the next ``step`` lists, and the end of the last of them: int64 ``[k + 1]``.

        ValueError unless they ascend from 0 to the number of ids.
        """
        n, n_edges, cursor = self.num_nodes, self.num_edges, _Cursor(self._indptr, block_bytes)
        rule = f"offsets ascend from 0 to {n_edges}, the number of indices"
        last = cursor.read(1)
        if last[0] != 0:
            raise ValueError(f"indptr[0] is {cursor.given(last[0])}: {rule}")
        for first in range(0, n, step):
            bounds = np.concatenate((last, cursor.read(min(step, n - first))))
            bad = (bounds < 0) | (bounds > n_edges)
            bad[1:] |= bounds[1:] < bounds[:-1]
            if bad.any():
                at = int(bad.argmax())
                raise ValueError(f"indptr[{first + at}] is {cursor.given(bounds[at])}, after {bounds[at - 1]}: {rule}")
            last = bounds[-1:]
            if first + step < n:
                yield bounds
        if last[0] != n_edges:
            raise ValueError(f"indptr[{n}], the last one, is {last[0]}: {rule}")
        if n:
            yield bounds

    def pairs(self, n_pairs: int, block_bytes: int) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield sources and destinations of the next edges, at most ``n_pairs``."""
        node, ids = 0, self.ids(block_bytes)
        for bounds in self.offsets(max(1, n_pairs // 4), block_bytes):
            nodes = np.arange(node, node + len(bounds) - 1)
            for first in range(int(bounds[0]), int(bounds[-1]), n_pairs):
                ends = np.clip(bounds, first, first + n_pairs)
                yield ids(int(ends[-1] - ends[0])), np.repeat(nodes, np.diff(ends))
            node += len(nodes)

    def ids(self, block_bytes: int) -> Callable[[int], Int64s]:
        """Make ``read(n)``, which reads the next ``n`` ids, fewer at the end; it raises IndexError for an id that is no node."""
        cursor, done = _Cursor(self._indices, block_bytes), 0

        def read(n: int) -> Int64s:
            nonlocal done
            ids = cursor.read(n)
            bad = (ids < 0) | (ids >= self._n_sources)
            if bad.any():
                at = int(bad.argmax())
                raise not_a_node(f"indices[{done + at}] is {cursor.given(ids[at])}, which", self._n_sources)
            done += n
            return ids

        return read


def _integers(name: str, value: ArrayLike) -> Source:
    if isinstance(value, (list, tuple)) and not value:
        value = np.empty(0, dtype=np.int64)  # NumPy would make it float64
    source = open_source(name, value, wider=True)
    if source.dtype == "bool" or "int" not in source.dtype:
        raise TypeError(f"{name} must hold integers, not {source.dtype}")
    if len(source.shape) != 1:
        hint = "; from_edge_index takes pairs of nodes" if len(source.shape) == 2 and 2 in source.shape else ""
        raise ValueError(f"{name} must have one dimension, not shape {source.shape}{hint}")
    return source


# --- pairs ----------------------------------------------------------------------------------------------------------------------


_FORMS = "an array [2, E], a tensor, lists, the path of a .npy file, or an iterable of blocks [2, k]"


class EdgeBlocks:
    """Blocks ``[2, k]`` of edges, whose number is announced: edges are then numbered, and progress shown, from the start."""

    def __init__(self, num_edges: int, blocks: Iterable[Any]) -> None:
        self.num_edges = num_edges
        self._blocks = blocks

    def __iter__(self) -> Iterator[Any]:
        return iter(self._blocks)


class PairInput:
    """Edges as pairs: ``edge_index``, int ``[2, num_edges]``, sources and destinations, or blocks of such shape.

    ``num_edges`` is None for an iterable, whose number of edges is known only at its end, unless it is an :class:`EdgeBlocks`.
    TypeError or ValueError for any other input.
    """

    def __init__(self, edge_index: Any, num_nodes: int, n_destinations: int | None = None) -> None:
        self._bounds = np.array([[num_nodes], [num_nodes if n_destinations is None else n_destinations]])
        self.num_edges: int | None = None
        if isinstance(edge_index, (str, os.PathLike)):
            edge_index = open_source("edge_index", edge_index, wider=True)
        elif isinstance(edge_index, np.ndarray):
            edge_index = as_array("edge_index", edge_index)
        elif isinstance(edge_index, (list, tuple)) and not (edge_index and all(map(_is_block, edge_index))):
            edge_index = as_array("edge_index", edge_index or [[], []])
            if not edge_index.size:
                edge_index = edge_index.astype(np.int64)  # NumPy would make it float64
        if isinstance(edge_index, (Source, np.ndarray, torch.Tensor)):
            _check_pairs(tuple(edge_index.shape), edge_index.dtype)
            self.num_edges = int(edge_index.shape[1])
        elif isinstance(edge_index, EdgeBlocks):
            self.num_edges = edge_index.num_edges
        elif not isinstance(edge_index, Iterable):
            raise TypeError(f"edge_index must be {_FORMS}, not {type(edge_index).__name__}")
        self._given = edge_index

    def blocks(self, n_pairs: int) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield sources and destinations of the next edges, at most ``n_pairs``; IndexError for an id that is no node."""
        done = 0
        for block in self._blocks(n_pairs):
            ids = block.astype(np.int64)  # a uint64 beyond int64 turns negative, which no id may be
            bad = (ids < 0) | (ids >= self._bounds)
            if bad.any():
                row, column = (int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape))
                raise not_a_node(f"edge_index[{row}, {done + column}] is {block[row, column]}, which", int(self._bounds[row, 0]))
            done += ids.shape[1]
            if self.num_edges is not None and done > self.num_edges:
                raise ValueError(f"edge_index: the blocks hold more than the {self.num_edges} edges announced")
            yield ids[0], ids[1]
        if self.num_edges is not None and done != self.num_edges:
            raise ValueError(f"edge_index: the blocks hold {done} edges instead of the {self.num_edges} announced")

    def _blocks(self, n_pairs: int) -> Iterator[npt.NDArray[Any]]:
        if isinstance(self._given, NpySource):
            yield from self._given.columns(16 * n_pairs)
        elif isinstance(self._given, (np.ndarray, torch.Tensor)):
            yield from _slices(self._given, n_pairs)
        else:
            for number, block in enumerate(self._given):
                where = f"block {number} of edge_index"
                array = block if isinstance(block, torch.Tensor) else as_array(where, block)
                _check_pairs(tuple(array.shape), array.dtype, where)
                yield from _slices(array, n_pairs)


def _is_block(given: object) -> bool:
    return isinstance(given, (np.ndarray, torch.Tensor)) and given.ndim == 2


def _check_pairs(shape: tuple[int, ...], dtype: object, what: str = "edge_index") -> None:
    if len(shape) != 2 or shape[0] != 2:
        hint = ""
        if shape == (2,):
            hint = "; single pairs are given as np.array(list(pairs)).T"
        elif len(shape) == 2 and shape[1] == 2:
            hint = "; a list of pairs is given as np.array(pairs).T"
        raise ValueError(f"{what} must have shape [2, E], not {list(shape)}{hint}")
    if "int" not in dtype_name(dtype, wider=True, of=what):
        raise TypeError(f"{what} must hold integers, not {dtype}")


def _slices(array: npt.NDArray[Any] | torch.Tensor, n_pairs: int) -> Iterator[npt.NDArray[Any]]:
    for first in range(0, array.shape[1], n_pairs):
        block = array[:, first : first + n_pairs]
        yield block.detach().cpu().numpy() if isinstance(block, torch.Tensor) else block
