"""Base of samplers that go hop by hop: seeds, look-up of lists, numbering of nodes, blocks."""

from __future__ import annotations

import contextlib
import operator
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from featstore.config import check_at_least, check_flag, check_integer, listed, refuse_path
from featstore.display import Stats
from featstore.errors import ClosedError
from featstore.gather.arrays import id_array
from featstore.lazy import lazy
from featstore.sampling.batch import Block, CheckedSampler, SampledBatch
from featstore.sampling.rng import absorb, batch_key
from featstore.sampling.scratch import EMPTY, LEAST_ROOM, Int64s, Scratch, edge_starts
from featstore.sampling.typed import (
    Fanouts,
    ListsOfType,
    fanouts_of_types,
    lists_of_type,
    most_drawn,
    nodes_of_types,
    number_owners,
)
from featstore.topology.base import Topology
from featstore.topology.partlists import NearbyLists
from featstore.topology.types import ONE_EDGE, Types

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["Draw", "FanoutSampler", "HopKey", "HopSampler", "Prune", "as_ids", "refuse_types"]

Prune = Callable[[Int64s], npt.NDArray[np.bool_]]  # marks the sources of the seeds' own hop that are not expanded
LARGE_FANOUT = 4096  # a larger fan-out takes more than 100 kB of scratch
HopKey = tuple[int, int, int]  # key of a hop's draws: epoch, index of the batch, number of the hop


# Makes the block of a hop, by its number, and numbers the nodes that it adds; with several edge types a block of each.
Draw = Callable[[Scratch, int], list[Block]]


class HopSampler(CheckedSampler):
    """A sampler that goes hop by hop: each hop adds a block, and its new nodes join the list of the batch.

    Subclasses draw in :meth:`_expand`, and override :meth:`hop_key` if their draws have another key. Their batches depend only on
    the graph, their options and the arguments of :meth:`sample`. ``hop_sizes`` has the number to draw in each hop. With ``edges``
    subclasses record the stored position of each edge, counted from :attr:`Scratch.starts`; :meth:`number_edges` turns these into
    the numbers of the input.

    In a graph of several types, each hop has a block of each type of edges, in their order.
    """

    draws_types: ClassVar[bool] = False  # whether several types of edges are drawn from
    fanouts_of_types: Fanouts | None = None  # in a graph of several types

    def __init__(self, g: OutOfCoreGraph, hop_sizes: Sequence[int], seed: int, redraw: bool, edges: bool = False) -> None:
        refuse_path(g)
        types = g.types
        self._g = g
        self._topology: Topology | None = None
        if self.fanouts_of_types is None:
            refuse_types(type(self), types)
        self._hop_sizes = tuple(hop_sizes)
        self.redraw, self.edges = check_flag("redraw", redraw), check_flag("edges", edges)
        part = g.own_part
        self._is_of_part = part is not None
        if part is not None:
            part.check_hops(self.reach, type(self).__name__)
            if self.edges:
                part.check_edge_ids("edges=True")
        self.seed = check_at_least("seed", seed, 0, 2**64 - 1)
        # Deques, whose append and pop are atomic: no lock that a fork could find taken.
        self._idle: deque[Scratch] = deque()
        self._all: deque[Scratch] = deque()
        self._room = LEAST_ROOM

    @property
    def graph(self) -> OutOfCoreGraph:
        """The graph that the sampler draws from."""
        return self._g

    @property
    def reach(self) -> int:
        """Hops from the seeds whose lists are read."""
        return len(self._hop_sizes)

    @property
    def topology(self) -> Topology:
        """The adjacency that the sampler draws from."""
        if self._topology is None:
            self._topology = self._g.topology  # kept, since this takes the graph's lock
        return self._topology

    @property
    def weights_bytes(self) -> int:
        """Memory to read what a hop draws by; 0 without weights, and if they are in memory."""
        return 0

    def stats(self) -> Stats:
        """Return totals since the sampler was made, over all threads.

        ``batches``; ``nodes``, distinct ones of each batch, seeds included; ``edges`` drawn; ``edge_rows_read``, ids read from
        the file; ``seconds``, summed over threads.
        """
        scratches = list(self._all)
        return Stats(
            {
                "batches": sum(s.batches for s in scratches),
                "nodes": sum(s.n_nodes for s in scratches),
                "edges": sum(s.n_edges for s in scratches),
                "edge_rows_read": sum(s.rows_read for s in scratches),
                "seconds": sum(s.seconds for s in scratches),
            }
        )

    def trim(self) -> bool:
        """Give back the scratch of threads that do not sample now, except for one; return whether any was held."""
        idle = []
        with contextlib.suppress(IndexError):
            while True:
                idle.append(self._idle.pop())  # the one that was used last first, as for sampling
        held = [scratch for scratch in idle[1:] if scratch.room]
        for scratch in held:
            scratch.drop()
        self._idle.extend(reversed(idle))
        return bool(held)

    def sample(
        self, seeds: torch.Tensor, epoch: int = 0, index: int = 0, lists: NearbyLists | None = None, prune: Prune | None = None
    ) -> SampledBatch:
        """Sample one batch.

        Parameters
        ----------
        seeds : integer tensor or array, shape (n,)
            Distinct node ids, at most 2³¹; may be empty.
        epoch, index : int
            Key of the draws; in ``[0, 2**64)``.
        lists : NearbyLists, optional
            Lists that are in memory for this batch: looked up after the neighbour cache, before the file is read. The batch does
            not depend on them.
        prune : callable, optional
            Marks the sources of the seeds' own hop that are not expanded; never a seed. All blocks but the last are then those
            of a batch that begins with the other sources. In a sampler in which each node draws for itself, the draws of the
            other sources do not change.

        Returns
        -------
        SampledBatch
            Blocks of int64 tensors in pooled memory, outermost hop first. In a graph of several types, ids here are those of all
            types, type after type, and each hop has a block of each type of edges; a loader's batches have ids within types.

        Raises
        ------
        IndexError, ValueError, TypeError
            A seed is no node, or given twice: the message names the seed and its position. Seeds are not 1-D, or not integers.
        CorruptionError, BudgetError, OSError
            The file holds an id that is no node's; the scratch or the batch does not fit the memory; the drive failed.
        """
        epoch, index = operator.index(epoch), operator.index(index)
        if not (0 <= epoch < 2**64 and 0 <= index < 2**64):
            raise ValueError(f"epoch and index must be in [0, 2**64), not {epoch} and {index}")
        ids = as_ids(seeds, self._g.num_nodes)
        with self.scratch(len(ids), lists) as scratch:
            if prune is None:
                hops = self.expand(scratch, ids, self._drawing(epoch, index))
            else:
                hops = self.expand(scratch, ids, self._drawing(epoch, index), 1)
                sources = scratch.nodes[: scratch.hops.n_nodes].copy()
                kept = sources[~prune(sources)]
                hops += self.expand(scratch, kept, self._drawing(epoch, index), first=1)
            return self.assemble(scratch, ids, hops, epoch, index)

    def sources(self, seeds: torch.Tensor, epoch: int, index: int, lists: NearbyLists | None = None) -> Int64s:
        """Sample the sources of a batch's last block, the seeds first; arguments and errors as of :meth:`sample`."""
        ids = as_ids(seeds, self._g.num_nodes)
        with self.scratch(len(ids), lists) as scratch:
            self.expand(scratch, ids, self._drawing(epoch, index), 1)
            return scratch.nodes[: scratch.hops.n_nodes].copy()

    @contextlib.contextmanager
    def scratch(self, n_seeds: int, lists: NearbyLists | None = None) -> Iterator[Scratch]:
        """Lend scratch memory to a thread for one batch, with ``lists`` attached; new scratch has room for ``n_seeds``."""
        start = time.perf_counter()
        try:
            scratch = self._idle.pop()
        except IndexError:
            scratch = Scratch(self._g.num_nodes, self._g.budget, max(self._room, n_seeds), self.edges, self.disjoint)
            self._all.append(scratch)
        try:
            with self._g.neighbor_lists.using() as scratch.cache:
                scratch.lists = lists
                yield scratch
            self._room = max(self._room, scratch.room)
            scratch.seconds += time.perf_counter() - start
        finally:
            scratch.cache = scratch.lists = None
            if scratch.room >= self._room:
                self._idle.append(scratch)
            else:  # too small now: taken last, since it would have to grow
                self._idle.appendleft(scratch)

    def expand(self, scratch: Scratch, ids: Int64s, draw: Draw, n_hops: int | None = None, first: int = 0) -> list[Block]:
        """Number the seeds ``ids``, then ``draw`` hops ``first … n_hops - 1``, by default up to the last.

        Returns a block a hop, or one of each edge type.
        """
        bad, twice = scratch.begin(ids)
        if bad >= 0:
            raise IndexError(f"seed {ids[bad]} at position {bad} is out of range for {self._g.num_nodes} nodes")
        if twice >= 0:
            once = int(np.flatnonzero(ids == ids[twice])[0])
            raise ValueError(f"seeds must be distinct: {ids[twice]} is at positions {once} and {twice}")
        if self._is_of_part:
            part = self._g.own_part
            if part is None:  # the topology of a view is the whole graph's, and open
                raise ClosedError(f"{self._g.path} is closed")
            part.check_seeds(ids, self.reach - first)
        hops = range(first, len(self._hop_sizes) if n_hops is None else n_hops)
        return [block for hop in hops for block in draw(scratch, hop)]

    def assemble(self, scratch: Scratch, ids: Int64s, hops: list[Block], epoch: int, index: int) -> SampledBatch:
        """Make the batch of all ``hops`` that :meth:`expand` has returned."""
        k = 1 if self.fanouts_of_types is None else len(self.fanouts_of_types)
        of_types = [hops[first::k] if self.redraw else self._nested(hops[first::k]) for first in range(k)]
        blocks = [block for layer in zip(*map(reversed, of_types), strict=True) for block in layer]  # outermost hop first
        nodes = scratch.nodes[: scratch.hops.n_nodes]
        copies = None
        if self.disjoint:
            nodes, copies = scratch.distinct(nodes, self._g.pool)
        input_ids = self._g.pool.tensor((len(nodes),), torch.int64)
        input_ids.numpy()[:] = nodes
        scratch.batches += 1
        scratch.n_nodes += len(nodes)
        scratch.n_edges += sum(len(block.src) for block in hops)
        return SampledBatch(index, epoch, input_ids, len(ids), tuple(blocks), copies=copies)

    def _drawing(self, epoch: int, index: int) -> Draw:
        """Make the function that looks up the lists of a batch's nodes, and draws from them."""
        if self.fanouts_of_types is not None:
            n_drawn = 0

            def draw_types(scratch: Scratch, hop: int) -> list[Block]:
                nonlocal n_drawn
                first, n_drawn = 0 if self.redraw else n_drawn, scratch.hops.n_nodes
                return self._draw_types(scratch, first, (epoch, index, hop))

            return draw_types
        n_located = 0

        def draw(scratch: Scratch, hop: int) -> list[Block]:
            nonlocal n_located
            n_dst = scratch.hops.n_nodes
            self._locate(scratch, n_located, n_dst)
            n_located = n_dst
            lists = ListsOfType(n_dst, scratch.starts[:n_dst], offsets=scratch.offsets_of(scratch.nodes[:n_dst], self._g.pool))
            block = self._expand(scratch, lists, self._hop_sizes[hop], (epoch, index, hop))
            if not self.redraw:
                scratch.degree[:n_dst] = 0  # these nodes have drawn; without neighbours they draw none later
            return [block]

        return draw

    def _draw_types(self, scratch: Scratch, first: int, at: HopKey) -> list[Block]:
        """Draw a hop of each type of edges, for the batch's nodes from number ``first`` on; return a block of each type."""
        assert self.fanouts_of_types is not None
        types, hops, blocks = self._g.types, scratch.hops, []
        n_dst = hops.n_nodes
        nodes = nodes_of_types(types, scratch.ids_of(scratch.nodes[:n_dst], self._g.pool), first)
        for key, fanouts in self.fanouts_of_types.items():
            # A type without a fan-out looks nothing up.
            ends = nodes[key[2]] if fanouts[at[2]] else EMPTY
            lists = lists_of_type(scratch, self.topology, types.edges[key], ends, self._g.pool, edges=self.edges)
            hops.expand_lists(lists.lists, lists.place, lists.degree)
            block = self._expand(scratch, lists, fanouts[at[2]], at)
            number_owners(block.dst.numpy(), lists.at, self._g.pool)
            blocks.append(block)
        return [replace(block, n_src=hops.n_nodes, n_dst=n_dst) for block in blocks]

    def _nested(self, hops: list[Block]) -> list[Block]:
        """Make the layers' blocks, innermost first, from the edges that each hop added; each block is a prefix of one array."""
        n_edges = sum(len(block.src) for block in hops)
        edges = self._g.pool.tensor((2, n_edges), torch.int64)
        src, dst = edges[0], edges[1]
        edge_pos = self._g.pool.tensor((n_edges,), torch.int64) if self.edges else None
        blocks, n = [], 0
        for block in hops:
            end = n + len(block.src)
            src.numpy()[n:end], dst.numpy()[n:end] = block.src.numpy(), block.dst.numpy()
            if edge_pos is not None and block.edge_pos is not None:
                edge_pos.numpy()[n:end] = block.edge_pos.numpy()
            positions = None if edge_pos is None else edge_pos[:end]
            blocks.append(Block(src[:end], dst[:end], block.n_src, block.n_dst, positions))
            n = end
        return blocks

    def number_edges(self, scratch: Scratch, edge_pos: torch.Tensor | None) -> None:
        """Replace a hop's stored positions of edges in ``edge_pos``, if any, by the edge ids in the input."""
        ids, cache = self.topology.edge_ids, scratch.cache
        if ids is None or edge_pos is None:
            return
        put = ids.replace if cache is None or cache.edge_ids is None else cache.number_edges
        put(edge_pos.numpy(), self._g.pool.array)

    def _locate(self, scratch: Scratch, first: int, end: int) -> None:
        """Look up the lists of nodes ``first … end - 1``, which joined in the last hop."""
        if first == end:
            return
        nodes = scratch.ids_of(scratch.nodes[first:end], self._g.pool)
        place, degree = scratch.place[first:end], scratch.degree[first:end]
        cache = scratch.cache
        if cache is None:
            self.topology.offsets(nodes, place, degree)
            np.invert(place, out=place)
        else:
            cache.locate(nodes, place, degree)
        if self.edges:
            edge_starts(self.topology, cache, nodes, place, scratch.starts[first:end], degree)
        if scratch.lists is not None:
            scratch.lists.locate(nodes, place)

    def _read(self, scratch: Scratch, positions: Int64s, out: npt.NDArray[Any]) -> None:
        """Read the neighbour ids at ``positions``, from the lists in memory or from the file."""
        if scratch.lists is None:
            self.topology.read_edges(positions, out)
            scratch.rows_read += len(positions)
        else:
            scratch.rows_read += scratch.lists.read_edges(positions, out, self._g.pool)

    def hop_key(self, at: HopKey) -> tuple[int, ...]:
        """Compute the words that key a hop's draws (:mod:`featstore.sampling.rng`): here one word, of all of ``at``."""
        epoch, index, hop = at
        return (absorb(batch_key(self.seed, epoch, index), hop),)

    @abstractmethod
    def _expand(self, scratch: Scratch, lists: ListsOfType, size: int, at: HopKey) -> Block:
        """Draw from ``lists``, which ``scratch.hops`` goes from, and number the drawn nodes; ``size`` is the hop's.

        The block's destinations are positions among the lists. If edges are numbered, the lists have their ``starts``.
        """


class FanoutSampler(HopSampler):
    """A sampler with a fan-out for each hop: the number of neighbours that a node draws."""

    replace = False  # a node may draw a neighbour several times

    def __init__(self, g: OutOfCoreGraph, fanouts: Any, seed: int, redraw: bool, edges: bool = False) -> None:
        refuse_path(g)
        types = g.types
        if not types.is_one and self.draws_types:
            self.fanouts_of_types = fanouts_of_types(types, fanouts)
            fanouts = most_drawn(types, self.fanouts_of_types)
        elif isinstance(fanouts, Mapping):
            raise ValueError(f"fanouts: a graph of one type has one list of fan-outs, such as [10, 5], not {fanouts!r}")
        try:
            hop_sizes = [check_integer("a fan-out", fanout) for fanout in fanouts]
        except TypeError:
            raise TypeError(f"fanouts must be a sequence of integers, one a hop, such as [10, 5], not {fanouts!r}") from None
        super().__init__(g, hop_sizes, seed, redraw, edges)
        if not self._hop_sizes:
            raise ValueError("fanouts is empty: give one number a hop")
        for fanout in self._hop_sizes:
            if not -1 <= fanout < 2**31:
                raise ValueError(f"a fan-out is -1 (all), or from 0 to 2**31 - 1, not {fanout}")

    @property
    def fanouts(self) -> tuple[int, ...]:
        """Neighbours that a node draws in each hop, the seeds' own first; of several types of edges together, at most."""
        return self._hop_sizes

    @property
    def given_fanouts(self) -> Any:
        """The fan-outs as they are given."""
        return self.fanouts if self.fanouts_of_types is None else self.fanouts_of_types

    @property
    def _shown_fanouts(self) -> Any:
        return list(self.fanouts) if self.fanouts_of_types is None else self.fanouts_of_types

    @lazy
    def drawn_of_types(self) -> Fanouts:
        """The fan-outs of each type of edges, with -1 in place of a large one that no list of the graph is longer than.

        Memory that is sized by them is then no larger than the graph needs. A large fan-out costs a pass over the offsets, once.
        """
        given = {ONE_EDGE: self.fanouts} if self.fanouts_of_types is None else self.fanouts_of_types
        if self.replace or max(map(max, given.values())) <= LARGE_FANOUT:
            return given
        largest = self._g.topology.largest_degree
        return {key: tuple(-1 if fanout >= largest else fanout for fanout in fanouts) for key, fanouts in given.items()}

    @lazy
    def drawn_fanouts(self) -> tuple[int, ...]:
        """Neighbours that a node draws in each hop, at most, by :attr:`drawn_of_types`."""
        return most_drawn(self._g.types, self.drawn_of_types)

    @lazy
    def list_fanouts(self) -> tuple[int, ...]:
        """The largest number drawn from one list in each hop, by :attr:`drawn_of_types`; -1: lists are taken whole, if at all."""
        return tuple(map(max, zip(*self.drawn_of_types.values(), strict=True)))

    @lazy
    def most_lists(self) -> int:
        """Lists that a node draws from, at most."""
        n_types = Counter(key[2] for key, fanouts in self.drawn_of_types.items() if any(fanouts))
        return max(n_types.values(), default=1)


def refuse_types(sampler: type, types: Types) -> None:
    """Raise NotImplementedError if a graph has several types, which a sampler does not draw."""
    if not types.is_one:
        there = f"of which the graph has {listed(types.edges)}: take a NeighborSampler"
        raise NotImplementedError(f"{sampler.__name__} does not sample several types of edges, {there}")


def as_ids(seeds: Any, num_nodes: int) -> Int64s:
    """Convert seeds to a contiguous int64 array; range and distinctness are left to check."""
    array = id_array("seeds", seeds)
    if array.ndim != 1:
        raise ValueError(f"seeds must be 1-D, not of shape {array.shape}")
    if array.dtype.kind not in "iu":
        if len(array) == 0 and not isinstance(seeds, (torch.Tensor, np.ndarray)):
            return EMPTY
        raise TypeError(f"seeds must be integers, not {array.dtype}")
    if array.dtype == np.uint64 and len(array) and int(array.max()) >= 2**63:
        position = int((array >= 2**63).argmax())
        raise IndexError(f"seed {array[position]} at position {position} is out of range for {num_nodes} nodes")
    return np.ascontiguousarray(array, np.int64)
