"""The adjacency of an open dataset: opened at its first use, and read back as offsets, degrees, lists or all edges in blocks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.cache.base import StaticPolicy
from featstore.config import check_flag
from featstore.errors import FormatError
from featstore.graph.base import StoredGraph
from featstore.graph.neighbors.listscores import WriteScores, scores_by_degrees
from featstore.graph.opentopology import held_bytes, load_topology, stored_pieces
from featstore.graph.snapshot import Snapshot
from featstore.progress import Progress
from featstore.storage.rowfile import RowFile
from featstore.topology.base import Topology
from featstore.topology.crossedges import blocks_in
from featstore.topology.listblocks import ListBlock

__all__ = ["PIECE_NODES", "SHOWN_AFTER_S", "Adjacency", "write_edges"]

Int64s = npt.NDArray[np.int64]

PIECE_NODES, MOST_DEGREE = 1 << 18, (1 << 16) - 1
SHOWN_AFTER_S = 0.5  # a progress bar of shorter work would only flicker
_PIECE = 1 << 16  # nodes or edges handled at once if that takes temporary arrays
_MOST_BLOCK_BYTES = 4 << 20


class Adjacency:
    """The adjacency of a graph's dataset, in either form; arrays read from it count in the graph's budget while they live."""

    def __init__(self, graph: StoredGraph, snapshot: Snapshot) -> None:
        self._graph, self._snapshot = graph, snapshot
        self._topology: Topology | None = None

    @property
    def topology(self) -> Topology:
        """See :attr:`featstore.OutOfCoreGraph.topology`."""
        graph = self._graph
        with graph.locked():
            if self._topology is None:
                n_bytes = 8 * (self._snapshot.types.num_lists + 1)
                with Progress("offsets", n_bytes, graph.shows_progress, delay_s=SHOWN_AFTER_S) as bar:
                    self._topology = load_topology(self._snapshot, graph.budget, bar.add)
            return self._topology

    def bytes_to_come(self, total: int | None = None) -> int:
        """Bound the bytes that the adjacency will hold after its first use, in a budget of ``total`` bytes; 0 if it is open."""
        with self._graph.locked():
            total = self._graph.budget.total if total is None else total
            return 0 if self._topology is not None else held_bytes(self._snapshot, total)

    def close(self) -> None:
        if self._topology is not None:
            self._topology.close()

    # -- offsets and degrees -----------------------------------------------------------------------------------------------------

    def _out_degrees(self) -> RowFile:
        """Get the file of out-degrees, int64."""
        file, width = self._snapshot.topology_file("out_degree", self._graph.num_nodes)
        if width != 8:
            raise FormatError(f"{file.path}: out-degrees of {width} bytes", file.path)
        return file

    def read_out_degrees(self, first: int, out: Int64s) -> None:
        """Read the out-degrees of the nodes ``first …`` into ``out``."""
        self._out_degrees().read(first, len(out), out.view(np.uint8).reshape(-1, 8))

    def list_degrees(self, first: int, stop: int) -> Int64s:
        """Look up the lengths of the lists ``first … stop - 1``."""
        return self.topology.degrees(first, stop)

    def list_scores(self, policy: StaticPolicy, note: Callable[[int], None] = lambda n_bytes: None) -> WriteScores:
        """Make a function that writes the scores of all lists by a policy that ``goes_by_degrees``."""
        return scores_by_degrees(policy, self.topology, self._out_degrees(), self._snapshot.types, note)

    def own_scores(self, scores: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Give lists that may not be cached the score -inf."""
        return scores

    def list_words(self) -> int | None:
        """Count the words of a cache of all lists that may be cached, one a list and one an edge; None: of all there are."""
        return None

    def short_degrees(self) -> npt.NDArray[np.uint16]:
        """Read the out-degrees, uint16 [n], in pieces; higher degrees become ``MOST_DEGREE``."""
        n = self._graph.num_nodes
        found = np.empty(n, np.uint16)
        for first in range(0, n, PIECE_NODES):
            piece = np.empty(min(PIECE_NODES, n - first), np.int64)
            self.read_out_degrees(first, piece)
            found[first : first + len(piece)] = np.minimum(piece, MOST_DEGREE)
        return found

    def indptr(self) -> torch.Tensor:
        """See :attr:`featstore.OutOfCoreGraph.indptr`."""
        found = self._per_node(self._graph.num_nodes + 1)
        found[0] = 0
        array = found.numpy()
        for first, offsets in self._offset_pieces():
            array[first : first + len(offsets)] = offsets
        return found

    def in_degree(self) -> torch.Tensor:
        """See :attr:`featstore.OutOfCoreGraph.in_degree`."""
        found = self._per_node(self._graph.num_nodes)
        array = found.numpy()
        for first, offsets in self._offset_pieces():
            np.subtract(offsets[1:], offsets[:-1], out=array[first : first + len(offsets) - 1])
        return found

    def out_degree(self) -> torch.Tensor:
        """See :attr:`featstore.OutOfCoreGraph.out_degree`."""
        found = self._per_node(self._graph.num_nodes)
        array = found.numpy()
        for first in range(0, len(array), _PIECE):
            self.read_out_degrees(first, array[first : first + _PIECE])
        return found

    def _per_node(self, n: int) -> torch.Tensor:
        self._graph.check_open()
        return self._graph.pool.tensor(n, torch.int64)

    def _offset_pieces(self) -> Iterator[tuple[int, Int64s]]:
        with self._graph.or_closed():
            yield from stored_pieces(self._snapshot, lambda: self.topology, _PIECE)

    # -- edges -------------------------------------------------------------------------------------------------------------------

    def neighbors(self, node: int, edge_pos: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`featstore.OutOfCoreGraph.neighbors`."""
        self._check_edge_pos(edge_pos)
        index = self._node(node)
        part = self._graph.own_part
        if part is not None:
            part.check_list(index)
        topology = self.topology
        with self._graph.or_closed():
            starts, degrees = topology.offsets(np.array([index]))
            first, stop = int(starts[0]), int(starts[0] + degrees[0])
            found = self._graph.pool.tensor(stop - first, torch.int64)
            array = found.numpy()
            for begin in range(first, stop, _PIECE):
                positions = np.arange(begin, min(begin + _PIECE, stop))
                ids = np.empty(len(positions), topology.id_dtype)
                topology.read_edges(positions, ids)
                topology.check_found(positions, ids)
                array[begin - first : begin - first + len(ids)] = ids
            return (found, self._edge_pos(topology, first, stop)) if edge_pos else found

    def _check_edge_pos(self, edge_pos: bool) -> None:
        part = self._graph.own_part
        if check_flag("edge_pos", edge_pos) and part is not None:
            part.check_edge_ids("edge_pos=True")

    def _node(self, node: Any) -> int:
        try:
            index = operator.index(node)
        except TypeError:
            index = None
        if index is None or isinstance(node, (bool, np.bool_)):
            what = f"a {type(node).__name__}" if isinstance(node, (torch.Tensor, np.ndarray, list, tuple)) else repr(node)
            raise TypeError(f"node must be one integer, not {what}; the lists of many nodes come of NeighborSampler(g, [-1])")
        n = self._graph.num_nodes
        if not 0 <= index < n:
            nodes = f"the graph has nodes 0 … {n - 1}" if n else "the graph has none"
            raise IndexError(f"node {index} is not a node: {nodes}")
        return index

    def _edge_pos(self, topology: Topology, first: int, stop: int) -> torch.Tensor:
        """Look up the positions in the input of the stored edges ``first … stop - 1``."""
        found = self._graph.pool.tensor(stop - first, torch.int64)
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

    def edges(self, edge_pos: bool) -> Iterator[torch.Tensor] | Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """See :meth:`featstore.OutOfCoreGraph.edges`."""
        self._check_edge_pos(edge_pos)
        topology = self.topology
        return self._edges_with_pos(topology) if edge_pos else (edges for _, edges in self._edge_blocks(topology))

    def _edges_with_pos(self, topology: Topology) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for first, edges in self._edge_blocks(topology):
            yield edges, self._edge_pos(topology, first, first + edges.shape[1])

    def _edge_blocks(self, topology: Topology) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield blocks of edges: the number of the first stored edge, and the edges, int64 ``[2, k]``."""
        with self._graph.or_closed():
            for block in blocks_in(topology, self._graph.budget, "edges", _MOST_BLOCK_BYTES):
                edges = self._graph.pool.tensor((2, len(block.ids)), torch.int64)
                write_edges(block, edges.numpy())
                yield block.first_edge, edges


def write_edges(block: ListBlock, out: npt.NDArray[np.int64]) -> None:
    """Write the sources and destinations of a block's edges."""
    out[0] = block.ids
    for begin in range(0, len(block.offsets) - 1, _PIECE):
        ends = np.clip(block.offsets[begin : begin + _PIECE + 1] - block.first_edge, 0, len(block.ids))
        degrees = np.diff(ends)
        first = block.first_node + begin
        out[1, ends[0] : ends[-1]] = np.repeat(np.arange(first, first + len(degrees)), degrees)
