"""Neighbour lists of some parts, read in sequence from the adjacency in part order, for batches with seeds in these parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore._core import nearby as _core
from featstore.errors import CorruptionError
from featstore.gather.buffers import BufferPool, carve
from featstore.storage.rowfile import RowFile
from featstore.topology.base import Topology

__all__ = ["NearbyLists", "PartLists", "Uint8s"]

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]

_BESIDE_BYTES = 272  # for aligning arrays, and for a table of few entries


class NearbyLists:
    """Neighbour lists of some nodes, in memory; made by :meth:`PartLists.load`, then read-only.

    The place of a list in the file is ``~position``. Positions from ``num_edges`` on are those of the lists in memory. So
    samplers draw positions as they do for lists in the file, and read them with :meth:`read_edges`.
    """

    def __init__(
        self, topology: Topology, nodes: Int64s, starts: Int64s, table: npt.NDArray[np.int32], ids: npt.NDArray[Any]
    ) -> None:
        self._topology, self._base = topology, topology.num_edges
        self._nodes, self._starts, self._table, self._ids = nodes, starts, table, ids

    def __len__(self) -> int:
        """Count the nodes whose list is in memory."""
        return len(self._nodes)

    def locate(self, ids: Int64s, place: Int64s) -> None:
        """Change ``place``, for nodes whose list is in memory, from the position in the file to that in memory."""
        _core.find_lists(self._nodes, self._starts, self._table, self._base, ids, place)

    def read_edges(self, positions: Int64s, out: npt.NDArray[Any], pool: BufferPool) -> int:
        """Read the neighbour ids at ``positions`` into ``out``; return the number of ids that were read from the file."""
        topology = self._topology
        n = _core.count_far(positions, self._base, len(self._ids))
        if n == len(positions):
            topology.read_edges(positions, out)
            return n
        far = pool.array((n,), np.int64)
        _core.take_near(positions, self._base, self._ids, topology.id_bytes, out, far)
        if n:
            read = pool.array((n,), topology.id_dtype)
            topology.read_edges(far, read)
            _core.put_far(positions, self._base, read, topology.id_bytes, out)
        return n


class PartLists:
    """The adjacency in part order, as a dataset keeps it.

    ``nodes`` is the file of nodes by part, and ``ids`` the file of their lists in that order. ``offsets``, int64 ``[2 * (n_parts
    + 1)]``, are the offsets of each part in the nodes, then in the ids; CorruptionError unless they ascend.
    """

    def __init__(self, topology: Topology, nodes: RowFile, ids: RowFile, offsets: torch.Tensor) -> None:
        self._topology, self._files = topology, (nodes, ids)
        self._held = offsets  # counted while it lives
        self._offsets = offsets.numpy().reshape(2, -1)
        for each, end, file in zip(self._offsets, (topology.num_lists, topology.num_edges), self._files, strict=True):
            if each[0] != 0 or each[-1] != end or bool((np.diff(each) < 0).any()):
                raise CorruptionError(f"parts do not ascend from 0 to {end}", file.path)

    @property
    def n_parts(self) -> int:
        return self._offsets.shape[1] - 1

    def sizes(self, parts: npt.NDArray[np.int32]) -> Int64s:
        """Bound the bytes in memory of the lists of each of some parts."""
        nodes, edges = (each.take(parts + 1) - each.take(parts) for each in self._offsets)
        found: Int64s = nodes * _node_bytes() + edges * self._topology.id_bytes
        return found

    @staticmethod
    def beside() -> int:
        """Bound the bytes of lists in memory beside the :meth:`sizes` of their parts."""
        return _BESIDE_BYTES

    def load(self, parts: npt.NDArray[np.int32], memory: Uint8s) -> NearbyLists:
        """Read the lists of distinct parts in sequence: of the first ones in ``parts`` that fit ``memory``.

        The lists lie in ``memory``, which must stay unchanged while they are used.
        """
        n_fit = int(np.searchsorted(np.cumsum(self.sizes(parts)), len(memory) - self.beside(), "right"))
        parts = np.sort(parts[:n_fit])
        n, n_ids = (int((each.take(parts + 1) - each.take(parts)).sum()) for each in self._offsets)
        topology, array = self._topology, carve(memory)
        nodes, starts, degrees = (array(n, np.int64) for _ in range(3))
        table = array(_core.table_entries(n), np.int32)
        ids = array(n_ids, topology.id_dtype)
        some = degrees.view(topology.id_dtype)[:n]  # in the dtype of the file
        self._read(0, parts, some, topology.num_lists)
        nodes[:] = some
        topology.offsets(nodes, starts, degrees)
        starts[:] = degrees
        try:
            end = _core.enter_lists(nodes, starts, table)
        except ValueError as error:
            raise CorruptionError(f"the nodes of the parts: {error}", self._files[0].path) from None
        if end != n_ids:
            raise CorruptionError(f"the lists of {n} nodes have {end} ids, and {n_ids} are there", self._files[1].path)
        self._read(1, parts, ids, topology.num_nodes)
        return NearbyLists(topology, nodes, starts, table, ids)

    def _read(self, which: int, parts: npt.NDArray[np.int32], out: npt.NDArray[Any], stop: int) -> None:
        """Read the rows of ascending parts from a file, and check that all of them are nodes."""
        file, offsets, begin = self._files[which], self._offsets[which], 0
        rows = out.view(np.uint8).reshape(-1, self._topology.id_bytes)
        for first, end in _runs(offsets, parts):  # without reading ahead: waking a thread takes as long as reading a small part
            file.read(first, end - first, rows[begin : begin + end - first])
            begin += end - first
        if len(out) and not (int(out.min()) >= 0 and int(out.max()) < stop):
            raise CorruptionError(f"an id is beyond the {stop} nodes", file.path)


def _runs(offsets: Int64s, parts: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Yield the first and the end of each run of adjacent rows, for ascending parts."""
    first = end = -1
    for begin, stop in zip(offsets.take(parts).tolist(), offsets.take(parts + 1).tolist(), strict=True):
        if begin != end:
            if end > first:
                yield first, end
            first = begin
        end = stop
    if end > first:
        yield first, end


def _node_bytes() -> int:
    """Count a node's bytes beside its list: three numbers, and its entries in a table that is up to a quarter full."""
    return 3 * 8 + 4 * 4
