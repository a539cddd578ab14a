"""Neighbour sampling, hop by hop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from featstore._core import sampler as _core
from featstore.config import check_flag
from featstore.sampling.batch import Block
from featstore.sampling.hops import FanoutSampler, HopKey
from featstore.sampling.listweights import ListWeights
from featstore.sampling.scratch import EMPTY, Int64s, Scratch
from featstore.sampling.typed import ListsOfType
from featstore.topology.types import ONE_EDGE, EdgeKey

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["NeighborSampler"]


class NeighborSampler(FanoutSampler):
    """Sample in-neighbours hop by hop (GraphSAGE).

    Parameters
    ----------
    g : OutOfCoreGraph
        A loader takes the sampler for this graph only, or for the same dataset opened again. Samples take the graph's memory.
    fanouts : sequence of int, or mapping of (str, str, str) to such
        Neighbours a node draws in each hop, the seeds' own first; -1 takes all. In a graph of several types: for each type of
        edges, which a node at its end draws from; a type that is not named is not drawn from, and one sequence is for all types.
    replace : bool
        Draw with replacement: every node with neighbours draws exactly its fan-out.
    seed : int
        In ``[0, 2**64)``.
    redraw : bool
        A node draws anew in every later hop. If false, it draws once, in the hop after it joined, and keeps these neighbours, as
        PyG's samplers do: each block then begins with the edges of the next inner one.
    edges : bool
        Fill ``edge_pos`` of the blocks: the number of each edge in the order in which the edges were given to
        :meth:`~featstore.OutOfCoreGraph.create` or :meth:`~featstore.OutOfCoreGraph.from_edge_index`.
    disjoint : bool
        A subgraph for each seed, which shares no node with another one: each draws for itself, and a node that several seeds
        reach is in the batch several times. The batch says which subgraph each node is of (``batch.batch``). Lists and rows are
        read once a batch.
    weight : str, optional
        An edge feature of one number an edge, shape ``(num_edges,)`` or ``(num_edges, 1)``, by which neighbours are drawn. In a
        graph of several types: a feature of this name of each type of edges that is drawn from.

    Raises
    ------
    ValueError, TypeError
        No fan-outs, a fan-out below -1 or of 2³¹ or more, a seed out of range; ``edges`` or ``disjoint`` is no bool. A weight
        is negative, infinite or NaN, and the error names its edge; the feature is not of one number an edge.
    KeyError
        There is no such edge feature.

    Notes
    -----
    Each hop draws neighbours of every node listed so far (without ``redraw``: of every node that the last hop added), in list
    order. Draws are uniform, and without replacement unless ``replace``; a list that is not longer than the fan-out is taken
    whole. Drawn neighbours come in the order of their list, and new nodes join in order of first appearance.

    With ``weight`` neighbours are drawn one after the other, each in proportion to its weight among those that are left (A-Res).
    So are they with ``replace``, among all. A neighbour of weight 0 is never drawn, also not with a fan-out of -1. A list with
    fewer positive weights than the fan-out gives all of these. Blocks hold no weights: ask for the feature with ``edges=True``
    and the loader's ``edge_features``. A positive weight below 1.2e-38 of the mean of its list counts as that much.

    A batch is a pure function of the graph, the options and the arguments of :meth:`sample`. It does not depend on caches,
    threads or the order of batches.

    Thread-safe; any number of threads may sample at once. Each thread has scratch of 56 to 88 bytes a node (less on a small
    graph, 8 more with ``edges``). The scratch doubles until the largest batch fits, and is kept for the next one. Sampling
    releases the GIL. Lists that are not in memory cost one batch of asynchronous reads a hop. With ``edges``, if lists were not
    given in ascending order, the numbers of a hop's edges cost another batch of reads, of the pages that hold them.

    Making a sampler with ``weight`` reads the feature once, to check it. The weights stay in memory if they take at most half of
    what is left of the budget (:class:`~featstore.sampling.listweights.ListWeights`), once for all samplers of the graph. Long
    lists then cost little more than short ones. Otherwise a run file beside the dataset gets their alias tables, 8 bytes an edge
    (8 to 16 more while it is made, if edges were not given sorted by destination and source), and is removed with the last of
    the samplers; each hop reads short lists' tables, and of long ones the few entries that draws look at. A FeatstoreWarning
    says so where disk or memory does not suffice for the file, and the weights of whole lists are then read.

    References
    ----------
    Efraimidis, Spirakis: Weighted random sampling with a reservoir, Information Processing Letters 97(5), 2006.

    Examples
    --------
    >>> sampler = NeighborSampler(g, fanouts=[10, 10])
    >>> batch = sampler.sample(torch.arange(1000), epoch=0, index=0)
    """

    draws_types: ClassVar[bool] = True
    numbers_drawn: ClassVar[bool] = True  # whether a batch has exactly the edges that its hops draw

    def __init__(
        self,
        g: OutOfCoreGraph,
        fanouts: Sequence[int] | Mapping[EdgeKey, Sequence[int]],
        replace: bool = False,
        seed: int = 0,
        redraw: bool = True,
        edges: bool = False,
        disjoint: bool = False,
        weight: str | None = None,
    ) -> None:
        super().__init__(g, fanouts, seed, redraw, edges)
        self.replace, self.disjoint = check_flag("replace", replace), check_flag("disjoint", disjoint)
        self.weight, self._weights = weight, None if weight is None else self._list_weights(weight)

    @property
    def weights_bytes(self) -> int:
        """See :class:`~featstore.sampling.hops.HopSampler`."""
        return 0 if self._weights is None else self._weights.read_bytes(self.disjoint)

    def __repr__(self) -> str:
        more = ", redraw=False" * (not self.redraw) + ", edges=True" * self.edges + ", disjoint=True" * self.disjoint
        more += "" if self.weight is None else f", weight={self.weight!r}"
        return f"{type(self).__name__}(fanouts={self._shown_fanouts}, replace={self.replace}, seed={self.seed}{more})"

    def __reduce__(self) -> tuple[Any, ...]:
        options = self.replace, self.seed, self.redraw, self.edges, self.disjoint, self.weight
        return type(self), (self._g, self.given_fanouts, *options)

    def _list_weights(self, weight: str) -> ListWeights:
        part, given = self._g.own_part, self.fanouts_of_types
        if part is not None and part.row_of is not None:
            raise NotImplementedError(f"weight={weight!r}: edge features are in the dataset that {part} was exported from")
        drawn = [ONE_EDGE] if given is None else [key for key, each in given.items() if any(each)]
        return ListWeights.of(self._g, weight, drawn or list(self._g.types.edges))

    def _expand(self, scratch: Scratch, lists: ListsOfType, size: int, at: HopKey) -> Block:
        pool, hops, topology, cache, n_dst = self._g.pool, scratch.hops, self.topology, scratch.cache, lists.n
        (key,) = self.hop_key(at)
        is_weighed = self._weights is not None
        if self._weights is None:
            n_edges, n_missing, any_drawn = hops.count(n_dst, size, self.replace)
            src = pool.tensor((n_edges,), torch.int64)
            dst = pool.tensor((n_edges,), torch.int64)
        else:
            src, dst, n_missing = self._weights.draw(scratch, lists, size, self.replace, key, topology, pool)
            n_edges, any_drawn = len(src), False
        edge_pos = pool.tensor((n_edges,), torch.int64) if self.edges and self.numbers_drawn else None
        n_draw = _core.draw_scratch(size) if any_drawn else 0
        draw = pool.array((n_draw,), np.int64) if n_draw else EMPTY
        positions = pool.array((n_missing,), np.int64) if n_missing else EMPTY
        edges = pool.array((n_missing,), np.int64) if n_missing else EMPTY
        records = None if cache is None else cache.records
        edge_ids = None if cache is None or edge_pos is None else cache.edge_ids
        starts, numbers = (None, None) if edge_pos is None else (lists.starts, edge_pos.numpy())
        arrays = src.numpy(), dst.numpy(), draw, positions, edges
        more = starts, numbers, edge_ids, lists.offsets
        hops.start(n_dst, size, self.replace, key, records, topology.id_bytes, *arrays, *more, drawn=is_weighed)
        if n_missing:
            found = pool.array((n_missing,), topology.id_dtype)
            self._read(scratch, positions, found)
            bad = hops.fill(found, topology.id_bytes)
            if bad >= 0:
                raise topology.bad_id(int(positions[bad]), int(found[bad]))
        while not hops.number():
            scratch.need(2 * scratch.room)
        if cache is not None and edge_pos is not None and edge_ids is not None:
            cache.number_missing(edge_pos.numpy(), n_missing, pool.array)
        else:
            self.number_edges(scratch, edge_pos)
        return Block(src, dst, hops.n_nodes, n_dst, edge_pos)

    def draw_again(self, scratch: Scratch, n_dst: int, dst: torch.Tensor, at: HopKey) -> torch.Tensor:
        """Repeat a hop's draws to number its edges, if only the drawn ids are known.

        To be called for hop after hop of a batch. Draws are a function of the key, the list and its length, so the repeated
        draws are the same.
        """
        pool, hop, cache = self._g.pool, at[2], scratch.cache
        first = scratch.n_located if hop else 0
        edge_ids = None if cache is None else cache.edge_ids
        if cache is not None and edge_ids is not None:
            cache.locate(scratch.nodes[first:n_dst], scratch.starts[first:n_dst], scratch.degree[first:n_dst])
            place = scratch.starts[:n_dst]
        else:
            scratch.locate_edges(self.topology, first, n_dst)
            place = pool.array((n_dst,), np.int64)
            np.invert(scratch.starts[:n_dst], out=place)
        scratch.n_located = n_dst
        degree = scratch.degree[:n_dst]
        edge_pos = self._positions(scratch, place, degree, self.fanouts[hop], dst, at)
        if not self.redraw:
            degree[:] = 0  # as while they were drawn
        return edge_pos

    def draw_type_again(self, scratch: Scratch, lists: ListsOfType, size: int, dst: torch.Tensor, at: HopKey) -> torch.Tensor:
        """Repeat a hop's draws from the lists of one type, to number their edges; ``dst`` are positions among the lists then."""
        cache = scratch.cache
        place = lists.place if cache is not None and cache.edge_ids is not None else np.invert(lists.starts)
        scratch.hops.expand_lists(lists.lists, lists.place, lists.degree)
        return self._positions(scratch, place, lists.degree, size, dst, at)

    def _positions(
        self, scratch: Scratch, place: Int64s, degree: Int64s, fanout: int, dst: torch.Tensor, at: HopKey
    ) -> torch.Tensor:
        """Draw again from lists of these lengths, which are at ``place`` of the cached numbers, or begin at edge ``~place``."""
        pool, cache, n_dst = self._g.pool, scratch.cache, len(degree)
        edge_ids = None if cache is None else cache.edge_ids
        (key,) = self.hop_key(at)
        edge_pos = pool.tensor((len(dst),), torch.int64)
        is_drawn = self.replace or int(degree.max(initial=0)) > fanout
        n_draw = _core.draw_scratch(fanout) if is_drawn else 0
        draw = pool.array((n_draw,), np.int64) if n_draw else EMPTY
        arrays = place, degree, dst.numpy(), draw, edge_pos.numpy(), edge_ids
        n_missing = scratch.hops.draw_positions(n_dst, fanout, self.replace, key, *arrays)
        if cache is not None and edge_ids is not None:
            cache.number_missing(edge_pos.numpy(), n_missing, pool.array)
        else:
            self.number_edges(scratch, edge_pos)
        return edge_pos
