"""Scratch memory of samplers that go hop by hop: a batch's nodes, the places of their lists, the table of their numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from featstore._core import sampler as _core
from featstore.budget import Budget
from featstore.gather.buffers import BufferPool, huge_array
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.sampling.batch import NodeCopies
from featstore.topology.base import Topology, huge_bytes
from featstore.topology.partlists import NearbyLists

__all__ = ["EMPTY", "LEAST_ROOM", "SCRATCH", "Int64s", "Scratch", "edge_starts"]

Int64s = npt.NDArray[np.int64]

SCRATCH = "sampler scratch"  # in the budget's report
LEAST_ROOM = 4096  # nodes
_TABLE = 4  # entries per node: three in four stay free, so that most look-ups end at their first entry
EMPTY = np.zeros(0, np.int64)
MOST_COPIES, MOST_IDS = 2**31, 2**63 - 1  # of a batch: subgraphs, and ids of their nodes


class Scratch:
    """The arrays of one batch at a time: its nodes, the places of their lists, and the table of their numbers. One owner thread.

    With ``edges``, ``starts`` holds the position of the first edge of each node's list; otherwise it is empty. Positions are
    those of stored edges, or of :meth:`NeighborCache.edge_places` if ``cache`` keeps the edge ids.

    ``disjoint``: a batch has a subgraph for each seed, and a node has an id of its own in each of them. ``nodes`` has these ids:
    the subgraph's number times ``num_nodes``, and the node's id. Subgraph 0 has the graph's ids.
    """

    def __init__(self, num_nodes: int, budget: Budget, room: int, edges: bool = False, disjoint: bool = False) -> None:
        self.num_nodes, self._edges, self.disjoint = num_nodes, edges, disjoint
        self.n_copies = max(1, min(MOST_COPIES, MOST_IDS // max(1, num_nodes))) if disjoint else 1
        self._num_ids = num_nodes * self.n_copies
        self._reservation = budget.reserve(SCRATCH, 0, owner=self)
        self.hops = self._new_hops()
        self.room = 0
        self.nodes = self.place = self.degree = self.starts = EMPTY
        self.batches = self.n_edges = self.n_nodes = self.rows_read = 0
        self.seconds = 0.0
        self.cache: NeighborCache | None = None  # these two are of the current batch
        self.lists: NearbyLists | None = None
        self.n_located = 0  # nodes of the batch whose lists were looked up, if hops are made from logs and edges are numbered
        self._sources: Scratch | None = None
        self._budget = budget
        self.need(room)

    def _new_hops(self) -> _core.Hops:
        return _core.Hops(self.num_nodes, self._num_ids <= 2**32, copies=self.n_copies)

    def ids_of(self, nodes: Int64s, pool: BufferPool) -> Int64s:
        """Get the ids that nodes of the batch have in the graph."""
        return np.remainder(nodes, self.num_nodes, out=pool.array((len(nodes),), np.int64)) if self.disjoint else nodes

    def offsets_of(self, nodes: Int64s, pool: BufferPool) -> Int64s | None:
        """Get what is added to the ids of each node's neighbours; None: nothing, a batch is one subgraph."""
        if not self.disjoint:
            return None
        ids = self.ids_of(nodes, pool)
        return np.subtract(nodes, ids, out=ids)

    @property
    def sources(self) -> Scratch:
        """Second scratch, made at first use, to number nodes of the graph besides those of the batch."""
        if self._sources is None:
            self._sources = Scratch(self.num_nodes, self._budget, LEAST_ROOM)
        self._sources.need(LEAST_ROOM)
        return self._sources

    def begin(self, seeds: Int64s) -> tuple[int, int]:
        """Forget the last batch and number ``seeds``, see :meth:`Hops.begin`."""
        self.need(len(seeds))
        if not self.disjoint:
            return self.hops.begin(seeds)
        self.sources.need(len(seeds))
        found = self.sources.hops.begin(seeds)
        if max(found) < 0:
            if len(seeds) > self.n_copies:
                raise ValueError(f"{len(seeds)} subgraphs of {self.num_nodes} nodes each have more ids than an int64 holds")
            self.hops.begin(np.arange(len(seeds)) * self.num_nodes + seeds)
        return found

    def distinct(self, nodes: Int64s, pool: BufferPool) -> tuple[Int64s, NodeCopies]:
        """Find the distinct ids of a disjoint batch's ``nodes``, its seeds first, and where each of the nodes is among these."""
        n, hops = len(nodes), self.sources.hops  # in which begin() has numbered the seeds
        ids, owners = pool.array((n,), np.int64), pool.array((n,), np.int64)
        rows, batch = pool.tensor((n,), torch.int64), pool.tensor((n,), torch.int64)
        np.divmod(nodes, max(1, self.num_nodes), out=(batch.numpy(), ids))
        hops.expand_lists(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([n]))  # one list, which has all ids
        hops.start(1, -1, False, 0, ids, ids.itemsize, rows.numpy(), owners, EMPTY, EMPTY, EMPTY)
        while not hops.number():
            self.sources.need(2 * self.sources.room)
        return self.sources.nodes[: hops.n_nodes], NodeCopies(rows, batch)

    def need(self, room: int) -> None:
        """Grow to room for ``room`` nodes, or for all nodes if there are fewer; keep the content."""
        room = min(room, self._num_ids + 1)
        if room <= self.room:
            return
        table = _table_entries(room, self._num_ids)
        n_bytes = (4 if self._edges else 3) * huge_bytes(room * 8) + huge_bytes(table * 8)
        held = self._reservation.n_bytes
        self._reservation.resize(held + n_bytes)
        try:
            nodes, place, degree = (huge_array(room * 8).view(np.int64) for _ in range(3))
            starts = huge_array(room * 8).view(np.int64) if self._edges else EMPTY
            n = self.hops.n_nodes
            nodes[:n], place[:n], degree[:n] = self.nodes[:n], self.place[:n], self.degree[:n]
            starts[:n] = self.starts[:n]
            self.hops.attach(nodes, place, degree, huge_array(table * 8).view(np.uint64))
        except BaseException:
            self._reservation.resize(held)
            raise
        self.nodes, self.place, self.degree, self.starts = nodes, place, degree, starts
        self.room = room
        self._reservation.resize(n_bytes)

    def locate_edges(self, topology: Topology, first: int, end: int) -> None:
        """Look up the first edges and degrees of nodes ``first … end - 1``, whose lists are not looked up."""
        edge_starts(topology, self.cache, self.nodes[first:end], None, self.starts[first:end], self.degree[first:end])

    def drop(self) -> None:
        """Give the memory back; :meth:`need` takes new memory."""
        self.hops = self._new_hops()
        self.nodes = self.place = self.degree = self.starts = EMPTY
        self.room = 0
        self._reservation.release()
        if self._sources is not None:
            self._sources.drop()


def edge_starts(
    topology: Topology, cache: NeighborCache | None, lists: Int64s, place: Int64s | None, starts: Int64s, degree: Int64s
) -> None:
    """Look up the first edges of lists into ``starts``, and their lengths; ``place`` is there if they are located."""
    if cache is not None and cache.places_edges:
        if place is None:
            place = starts
            cache.locate(lists, place, degree)
        cache.edge_places(place, starts)
    elif cache is None and place is not None:
        np.invert(place, out=starts)
    else:
        topology.offsets(lists, starts, degree)


def _table_entries(room: int, num_ids: int) -> int:
    """Count the entries of the table for ``room`` nodes' numbers; at most an entry an id that there is, without hashing."""
    return min(_power_of_two(_TABLE * room), _power_of_two(num_ids))


def _power_of_two(n: int) -> int:
    """Return the least power of two that is at least ``n`` and 2."""
    return 1 << max(1, (n - 1).bit_length())
