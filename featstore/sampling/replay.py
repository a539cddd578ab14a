"""The hops of a batch of a window, made of the logs of what was drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.epochs import replay
from featstore.sampling.batch import Block
from featstore.sampling.hops import FanoutSampler
from featstore.sampling.neighbor import NeighborSampler
from featstore.sampling.scratch import Int64s, Scratch
from featstore.sampling.typed import HopLists, JoinedLists, lists_of_type, number_owners

__all__ = ["Replay", "has_places"]


def has_places(sampler: FanoutSampler) -> bool:
    """Tell whether logs hold one more word for each neighbour: its place in its list, which cannot be drawn again by key."""
    return sampler.edges and not isinstance(sampler, NeighborSampler)


class Replay:
    """Maker of a batch's blocks, hop after hop, for :meth:`HopSampler.expand`; for one batch, once.

    Parameters
    ----------
    sampler : FanoutSampler
    read : callable
        ``read(hop)`` reads the hop's log of the batch.
    wide : bool
        Logs hold 64-bit words.
    epoch, index : int
        Key of the batch's draws.
    edges : bool
        Number edges: by their logged places (:func:`has_places`), or else by drawing once more.

    Attributes
    ----------
    joined : JoinedLists or None
        Numbers of the batch's lists; None if each node has one list, whose number is the node's.
    """

    def __init__(
        self, sampler: FanoutSampler, read: Callable[[int], npt.NDArray[Any]], wide: bool, epoch: int, index: int, *, edges: bool
    ) -> None:
        self._sampler, self._read, self._wide, self._edges = sampler, read, wide, edges
        self._epoch, self._index = epoch, index
        self._has_places = has_places(sampler)
        types, fanouts = sampler.graph.types, sampler.fanouts_of_types
        self.joined = None if fanouts is None else JoinedLists(types, fanouts, redraw=sampler.redraw)
        self._kinds = [(types.edges[key], each) for key, each in (fanouts or {}).items()]

    def __call__(self, scratch: Scratch, hop: int) -> list[Block]:
        """Number the nodes that a hop adds; return its block, or one of each type of edges."""
        if self.joined is None:
            return [self._block(scratch, hop)]
        self.joined.join(scratch.nodes[: scratch.hops.n_nodes], hop)
        return self._blocks(self.joined, scratch, hop)

    def _block(self, scratch: Scratch, hop: int) -> Block:
        n_dst, starts = scratch.hops.n_nodes, None
        if self._edges and self._has_places:
            first = scratch.n_located if hop else 0
            scratch.locate_edges(self._sampler.topology, first, n_dst)
            scratch.n_located, starts = n_dst, scratch.starts
        src, dst, edge_pos = self._replayed(scratch, hop, n_dst, scratch.place, starts)
        if self._edges and starts is None:
            assert isinstance(self._sampler, NeighborSampler)
            edge_pos = self._sampler.draw_again(scratch, n_dst, dst, (self._epoch, self._index, hop))
        return Block(src, dst, scratch.hops.n_nodes, n_dst, edge_pos)

    def _blocks(self, joined: JoinedLists, scratch: Scratch, hop: int) -> list[Block]:
        sampler, pool = self._sampler, self._sampler.graph.pool
        n_dst, lists, starts = scratch.hops.n_nodes, joined.drawing(hop), None
        found = []
        if self._edges:
            owners = zip(self._kinds, np.split(lists.owners, lists.ends[:-1]), strict=True)
            found = [
                lists_of_type(scratch, sampler.topology, kind, at, sampler.graph.pool, edges=True) for (kind, _), at in owners
            ]
        if self._edges and self._has_places:
            starts = pool.array((joined.n,), np.int64)
            starts[lists.places] = np.concatenate([each.starts for each in found])
        ends = pool.array((joined.n,), np.int64)
        src, dst, edge_pos = self._replayed(scratch, hop, joined.n, ends, starts, lists)
        blocks, first, n_lists = list[Block](), 0, 0
        for number, (_, fanouts) in enumerate(self._kinds):
            has_lists, n_lists = lists.ends[number] > n_lists, lists.ends[number]
            end = int(ends[lists.places[n_lists - 1]]) if has_lists else first
            numbers = None if edge_pos is None else edge_pos[first:end]
            if self._edges and starts is None:
                assert isinstance(sampler, NeighborSampler)
                own = dst[first:end]
                numbers = sampler.draw_type_again(scratch, found[number], fanouts[hop], own, (self._epoch, self._index, hop))
                number_owners(own.numpy(), found[number].at, sampler.graph.pool)
            blocks.append(Block(src[first:end], dst[first:end], scratch.hops.n_nodes, n_dst, numbers))
            first = end
        return blocks

    def _replayed(
        self, scratch: Scratch, hop: int, n_lists: int, counts: Int64s, starts: Int64s | None, lists: HopLists | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Make ``src`` and ``dst`` of a hop's log, and number the nodes that it adds; with ``starts`` also ``edge_pos``."""
        pool, hops = self._sampler.graph.pool, scratch.hops
        edges: list[torch.Tensor] = []

        def array(n: int) -> tuple[Int64s, ...]:
            edges.extend(pool.tensor((n,), torch.int64) for _ in range(2 if starts is None else 3))
            return tuple(each.numpy() for each in edges)

        order = (None, None) if lists is None else (lists.places, lists.owners)
        replay(hops, self._read(hop), self._wide, n_lists, counts, array, self._has_places, starts, *order)
        while not hops.number():
            scratch.need(2 * scratch.room)
        edge_pos = None if starts is None else edges[2]
        self._sampler.number_edges(scratch, edge_pos)
        return edges[0], edges[1], edge_pos
