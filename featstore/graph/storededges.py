"""The adjacency of a dataset, read back: offsets, degrees, a node's neighbours, and all edges in blocks."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt
import torch

from featstore.config import check_flag
from featstore.graph.crossedges import blocks_in
from featstore.graph.kept import Kept
from featstore.graph.listblocks import ListBlock
from featstore.graph.opentopology import stored_pieces
from featstore.graph.topology import Topology

__all__ = ["StoredEdges"]

_PIECE = 1 << 16  # nodes or edges handled at once where that takes temporary arrays
_MOST_BLOCK_BYTES = 4 << 20


class StoredEdges(Kept):
    """A dataset whose adjacency can be read back, in either form; results count in its budget while they live."""

    @property
    def indptr(self) -> torch.Tensor:
        """Where the in-neighbours of each node begin, int64 ``[num_nodes + 1]``, as given to :meth:`~OutOfCoreGraph.create`.

        Read anew whenever it is asked for, as are :attr:`in_degree` and :attr:`out_degree`: keep the tensor, which is yours. The
        budget counts its 8 bytes a node while it lives. Raises BudgetError, ClosedError, CorruptionError and OSError.
        """
        found = self._per_node(self.num_nodes + 1)
        found[0] = 0
        array = found.numpy()
        for first, offsets in self._offset_pieces():
            array[first : first + len(offsets)] = offsets
        return found

    @property
    def in_degree(self) -> torch.Tensor:
        """In-neighbours of each node, repeated ones counted: int64 ``[num_nodes]``; see :attr:`indptr`."""
        found = self._per_node(self.num_nodes)
        array = found.numpy()
        for first, offsets in self._offset_pieces():
            np.subtract(offsets[1:], offsets[:-1], out=array[first : first + len(offsets) - 1])
        return found

    @property
    def out_degree(self) -> torch.Tensor:
        """Out-neighbours of each node, repeated ones counted: int64 ``[num_nodes]``; see :attr:`indptr`."""
        found = self._per_node(self.num_nodes)
        rows = found.numpy().view(np.uint8).reshape(-1, 8)
        file = self._out_degrees()
        for first in range(0, self.num_nodes, _PIECE):
            piece = rows[first : first + _PIECE]
            file.read(first, len(piece), piece)
        return found

    def _per_node(self, n: int) -> torch.Tensor:
        self._check_open()
        return self.pool.tensor(n, torch.int64)

    def _offset_pieces(self) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        with self._or_closed():
            yield from stored_pieces(self._snapshot, lambda: self.topology, _PIECE)

    @overload
    def neighbors(self, node: int, edge_pos: Literal[False] = False) -> torch.Tensor: ...
    @overload
    def neighbors(self, node: int, edge_pos: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...

    def neighbors(self, node: int, edge_pos: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return all in-neighbours of one node.

        Parameters
        ----------
        node : int
            In ``[0, num_nodes)``.
        edge_pos : bool
            Return also which edge of the input each is, as ``edge_pos`` of sampled blocks does.

        Returns
        -------
        neighbors : int64 tensor, shape (in-degree,)
            Ascending; a neighbour by several edges occurs as often.
        edge_pos : int64 tensor, shape (in-degree,)
            If asked for.

        Raises
        ------
        IndexError
            No such node.
        TypeError
            Not an integer. For many nodes: ``NeighborSampler(g, [-1])``.
        BudgetError, ClosedError, CorruptionError, OSError

        Notes
        -----
        Reads the pages that hold the list. The first call opens :attr:`~OutOfCoreGraph.topology`, as samplers do.
        """
        check_flag("edge_pos", edge_pos)
        index = self._node(node)
        topology = self.topology
        with self._or_closed():
            starts, degrees = topology.offsets(np.array([index]))
            first, stop = int(starts[0]), int(starts[0] + degrees[0])
            found = self.pool.tensor(stop - first, torch.int64)
            array = found.numpy()
            for begin in range(first, stop, _PIECE):
                positions = np.arange(begin, min(begin + _PIECE, stop))
                ids = np.empty(len(positions), topology.id_dtype)
                topology.read_edges(positions, ids)
                topology.check_found(positions, ids)
                array[begin - first : begin - first + len(ids)] = ids
            return (found, self._edge_pos(topology, first, stop)) if edge_pos else found

    def _node(self, node: Any) -> int:
        try:
            index = operator.index(node)
        except TypeError:
            index = None
        if index is None or isinstance(node, (bool, np.bool_)):
            what = f"a {type(node).__name__}" if isinstance(node, (torch.Tensor, np.ndarray, list, tuple)) else repr(node)
            raise TypeError(f"node must be one integer, not {what}; the lists of many nodes come of NeighborSampler(g, [-1])")
        if not 0 <= index < self.num_nodes:
            nodes = f"the graph has nodes 0 … {self.num_nodes - 1}" if self.num_nodes else "the graph has none"
            raise IndexError(f"node {index} is not a node: {nodes}")
        return index

    def _edge_pos(self, topology: Topology, first: int, stop: int) -> torch.Tensor:
        """Look up which edges of the input the stored edges ``first … stop - 1`` are."""
        found = self.pool.tensor(stop - first, torch.int64)
        array, numbers = found.numpy(), topology.edge_ids
        for begin in range(first, stop, _PIECE):
            out = array[begin - first : min(begin + _PIECE, stop) - first]
            if numbers is None:
                out[:] = np.arange(begin, begin + len(out))
            else:
                read = np.empty(len(out), numbers.dtype)
                numbers.read(begin, read)
                out[:] = read
        return found

    @overload
    def edges(self, edge_pos: Literal[False] = False) -> Iterator[torch.Tensor]: ...
    @overload
    def edges(self, edge_pos: Literal[True]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]: ...

    def edges(self, edge_pos: bool = False) -> Iterator[torch.Tensor] | Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Read all edges once, in sequence and in blocks.

        Parameters
        ----------
        edge_pos : bool
            Yield also which edge of the input each is: its row in :attr:`~OutOfCoreGraph.edge_features`.

        Yields
        ------
        edge_index : int64 tensor, shape (2, k)
            Sources and destinations, as :meth:`~OutOfCoreGraph.from_edge_index` takes them; ``k`` is at least 1. Ascending by
            destination, then by source. Each block is yours, and counts in the budget while it lives.
        edge_pos : int64 tensor, shape (k,)
            If asked for; then a pair is yielded.

        Raises
        ------
        BudgetError, ClosedError, CorruptionError, OSError

        Notes
        -----
        A block has at most half a million edges, fewer where little memory is left; what is read ahead counts as ``edges``. Opens
        :attr:`~OutOfCoreGraph.topology`, as samplers do.
        """
        check_flag("edge_pos", edge_pos)
        topology = self.topology
        return self._edges_with_pos(topology) if edge_pos else (edges for _, edges in self._edge_blocks(topology))

    def _edges_with_pos(self, topology: Topology) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for first, edges in self._edge_blocks(topology):
            yield edges, self._edge_pos(topology, first, first + edges.shape[1])

    def _edge_blocks(self, topology: Topology) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of a first stored edge, and the edges from there on."""
        with self._or_closed():
            for block in blocks_in(topology, self.budget, "edges", _MOST_BLOCK_BYTES):
                edges = self.pool.tensor((2, len(block.ids)), torch.int64)
                _write_edges(block, edges.numpy())
                yield block.first_edge, edges


def _write_edges(block: ListBlock, out: npt.NDArray[np.int64]) -> None:
    """Write sources and destinations of a block's edges."""
    out[0] = block.ids
    for begin in range(0, len(block.offsets) - 1, _PIECE):
        ends = np.clip(block.offsets[begin : begin + _PIECE + 1] - block.first_edge, 0, len(block.ids))
        degrees = np.diff(ends)
        first = block.first_node + begin
        out[1, ends[0] : ends[-1]] = np.repeat(np.arange(first, first + len(degrees)), degrees)
