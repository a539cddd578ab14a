"""Whole neighbour lists of a batch's nodes, a piece of bounded memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from featstore._core.layerwise import Lists
from featstore.gather.buffers import BufferPool
from featstore.sampling.scratch import Int64s, Scratch
from featstore.topology.base import Topology

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["Pieces"]

_LEAST, _MOST = 1 << 14, 1 << 20  # ids a piece
_BYTES_AN_ID = 32  # an id read, its position, its copy, its owner, and the result made of it
_FRACTION = 1 / 64  # of the budget, for the pieces of one thread

Read = Callable[[Scratch, Int64s, npt.NDArray[Any]], None]


class Pieces:
    """The whole lists of the first ``n_dst`` nodes of a batch, already located, in pieces; may be iterated several times.

    Iterating yields the number of ids of each piece. The ids are in ``listed``, which the caller may overwrite; ``owners`` has
    the numbers of the nodes whose lists they are in, ascending. A piece has 16,384 to 1,048,576 ids, by the graph's total memory:
    32 bytes an id, and 8 more of the caller's if edges are numbered. ``read(scratch, positions, out)`` reads ids that
    are not in memory, which are then checked.
    """

    def __init__(self, g: OutOfCoreGraph, scratch: Scratch, topology: Topology, n_dst: int, read: Read) -> None:
        pool, cache = g.pool, scratch.cache
        self.lists = Lists(scratch.hops, n_dst, None if cache is None else cache.records, topology.id_bytes)
        self._scratch, self._topology, self._read = scratch, topology, read
        most = min(max(int(g.budget.total * _FRACTION) // _BYTES_AN_ID, _LEAST), _MOST)
        room, n_read = min(self.lists.n_ids, most), min(self.lists.n_missing, most)
        self.listed, self._found = (_array(pool, n, topology.id_dtype) for n in (room, n_read))
        self.owners = _array(pool, room, np.int32)
        self._positions = _array(pool, n_read, np.int64)
        self.is_one = self.lists.n_ids <= room

    def __iter__(self) -> Iterator[int]:
        lists, topology = self.lists, self._topology
        if not lists.n_ids:
            return
        lists.rewind()
        while not lists.done:
            n = lists.turn(self._positions)
            if n:
                self._read(self._scratch, self._positions[:n], self._found[:n])
                topology.check_found(self._positions[:n], self._found[:n])
            while taken := lists.take(self._found[:n], self.listed, self.owners):
                yield taken


def _array(pool: BufferPool, n: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return pool.array((n,), dtype) if n else np.empty(0, dtype)
