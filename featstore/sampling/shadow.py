"""Sampling of one induced subgraph a batch, shared by all layers (shaDow)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as with_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from featstore._core.layerwise import keep_members
from featstore.config import check_at_least, listed
from featstore.gather.buffers import BufferPool
from featstore.sampling.batch import Block, SampledBatch
from featstore.sampling.neighbor import NeighborSampler
from featstore.sampling.scratch import EMPTY, Int64s, Scratch
from featstore.sampling.typed import ListsOfType, lists_of_type, nodes_of_types, number_owners
from featstore.sampling.wholelists import Pieces
from featstore.topology.types import EdgeKey

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["ShadowSampler"]


class ShadowSampler(NeighborSampler):
    """Sample the seeds' neighbourhood, and give every layer all edges among its nodes (shaDow-GNN).

    The nodes are those of ``NeighborSampler(g, fanouts, replace, seed, redraw=False)``: ``len(fanouts)`` hops around the seeds.
    The edges are all edges of the graph between them, not only those that were drawn. So the number of layers does not depend on
    the number of hops, and a deep model does not need a large neighbourhood.

    Parameters
    ----------
    g, seed, edges
        See :class:`~featstore.NeighborSampler`.
    fanouts : sequence of int, or mapping of (str, str, str) to such
        Neighbours that a node draws in the hop after it joined, the seeds' own first; -1 takes all. In a graph of several types
        see :class:`~featstore.NeighborSampler`.
    layers : int, optional
        Blocks of a batch, one a layer of the model; at least 1, by default one a hop.
    replace : bool
        Draw with replacement.
    edge_types : sequence of (str, str, str), optional
        Types of edges in the subgraph, by default all of them, whether the nodes were drawn along them or not. The blocks of
        other types have no edges.
    weight : str, optional
        An edge feature by which the nodes are drawn, see :class:`~featstore.NeighborSampler`. All edges between them are in the
        subgraph, also those of weight 0.

    Raises
    ------
    ValueError, TypeError
        The errors of :class:`~featstore.NeighborSampler`; ``layers`` below 1, or no integer; ``edge_types`` that the graph has
        not.

    Notes
    -----
    All blocks but the last have all nodes as sources and as destinations, and all edges. The last one has the seeds as
    destinations, and only their edges: the last layer needs no output of other nodes. All blocks are views of the same tensors,
    so a batch takes the memory of one. For a read-out over all nodes of the subgraph, use ``blocks[0]`` for every layer. Run
    files and packs hold each block's edges.

    In a graph of several types, each layer has a block of each type of edges, with the edges of this type among all nodes.

    There is one subgraph a batch, as in DGL's ``ShaDowKHopSampler``. PyG's sampler makes one subgraph a seed, with a copy of each
    node for each seed that reaches it. With one seed a batch, both are the same. A neighbour that is in a list twice has two
    edges. Edges are ordered by destination, then as in its list.

    The sampler goes through the lists of all nodes, so a batch's time is proportional to their degrees. With hubs among the
    nodes, that is far more than their edges in the subgraph. Lists that are not in memory are read whole, a piece at a time
    (:class:`Pieces`). Threads and scratch are as with :class:`~featstore.NeighborSampler`.

    References
    ----------
    Zeng et al.: Decoupling the depth and scope of graph neural networks (shaDow-GNN), NeurIPS 2021.

    Examples
    --------
    >>> sampler = ShadowSampler(g, fanouts=[10, 5], layers=5)
    >>> batch = sampler.sample(torch.arange(1000), epoch=0, index=0)
    """

    numbers_drawn = False  # the subgraph's edges are found and numbered after the draws

    def __init__(
        self,
        g: OutOfCoreGraph,
        fanouts: Sequence[int] | Mapping[EdgeKey, Sequence[int]],
        layers: int | None = None,
        replace: bool = False,
        seed: int = 0,
        edges: bool = False,
        edge_types: Sequence[EdgeKey] | None = None,
        weight: str | None = None,
    ) -> None:
        super().__init__(g, fanouts, replace, seed, redraw=False, edges=edges, weight=weight)
        self.layers = len(self.fanouts) if layers is None else check_at_least("layers", layers, 1)
        self.edge_types = None if edge_types is None else _read_types(g, edge_types)

    @property
    def reach(self) -> int:
        """Hops from the seeds whose lists are read: those of the last hop's nodes, too."""
        return len(self.fanouts) + 1

    def __repr__(self) -> str:
        options = f"layers={self.layers}, replace={self.replace}, seed={self.seed}" + ", edges=True" * self.edges
        options += "" if self.edge_types is None else f", edge_types={list(self.edge_types)}"
        options += "" if self.weight is None else f", weight={self.weight!r}"
        return f"ShadowSampler(fanouts={self._shown_fanouts}, {options})"

    def __reduce__(self) -> tuple[Any, ...]:
        options = self.layers, self.replace, self.seed, self.edges, self.edge_types, self.weight
        return type(self), (self._g, self.given_fanouts, *options)

    def assemble(self, scratch: Scratch, ids: Int64s, hops: list[Block], epoch: int, index: int) -> SampledBatch:
        """Make the batch of the nodes that :meth:`expand` has numbered."""
        n = scratch.hops.n_nodes
        if self.fanouts_of_types is None:
            self._locate(scratch, 0, n)
            outer = [self._induced(scratch, ListsOfType(n, scratch.starts[:n]))]
        else:
            outer = self._induced_of_types(scratch, n)
        inner = [_own(block, len(ids)) for block in outer]
        input_ids = self._g.pool.tensor((n,), torch.int64)
        input_ids.numpy()[:] = scratch.nodes[:n]
        scratch.batches += 1
        scratch.n_nodes += n
        scratch.n_edges += sum(len(block.src) for block in outer)
        return SampledBatch(index, epoch, input_ids, len(ids), (*outer * (self.layers - 1), *inner))

    def _induced_of_types(self, scratch: Scratch, n: int) -> list[Block]:
        """Find the edges of each type among all ``n`` nodes; types that the subgraph is without have none."""
        types, blocks = self._g.types, []
        nodes = nodes_of_types(types, scratch.nodes[:n], 0)
        for key, kind in types.edges.items():
            at = nodes[kind.dst.name] if self.edge_types is None or key in self.edge_types else EMPTY
            lists = lists_of_type(scratch, self.topology, kind, at, self._g.pool, edges=self.edges)
            scratch.hops.expand_lists(lists.lists, lists.place, lists.degree)
            block = self._induced(scratch, lists)
            number_owners(block.dst.numpy(), lists.at, self._g.pool)
            blocks.append(block)
        return blocks

    def _induced(self, scratch: Scratch, lists: ListsOfType) -> Block:
        """Find the edges in ``lists`` from nodes of the batch, ordered by destination, a position among the lists."""
        pool, n = self._g.pool, scratch.hops.n_nodes
        pieces = Pieces(self._g, scratch, self.topology, lists.n, self._read)
        room = max(1, len(pieces.owners))
        numbers, positions = pool.array((room,), np.int32), pool.array((room,), np.int64) if self.edges else None
        kept, kept_positions = [], []
        for n_ids in pieces:
            starts = None if positions is None else lists.starts
            n_kept = keep_members(pieces.lists, pieces.listed, pieces.owners, n_ids, numbers, starts, positions)
            if n_kept:
                found = pool.array((2, n_kept), np.int32)
                found[0], found[1] = numbers[:n_kept], pieces.owners[:n_kept]
                kept.append(found)
                if positions is not None:
                    kept_positions.append(_copy(positions[:n_kept], pool))
        n_edges = sum(found.shape[1] for found in kept)
        edges = pool.tensor((2, n_edges), torch.int64)
        end = 0
        for found in kept:
            first, end = end, end + found.shape[1]
            edges.numpy()[:, first:end] = found
        edge_pos = None
        if positions is not None:
            edge_pos = pool.tensor((n_edges,), torch.int64)
            if kept_positions:
                np.concatenate(kept_positions, out=edge_pos.numpy())
        self.number_edges(scratch, edge_pos)
        return Block(edges[0], edges[1], n, n, edge_pos)


def _own(block: Block, n_seeds: int) -> Block:
    """Make the last layer's block: the edges of the seeds alone."""
    n = int(np.searchsorted(block.dst.numpy(), n_seeds))
    return with_(block.map(lambda values: values[:n]), n_dst=n_seeds)


def _read_types(g: OutOfCoreGraph, edge_types: Any) -> tuple[EdgeKey, ...]:
    if isinstance(edge_types, str) or not isinstance(edge_types, Sequence):
        raise TypeError(f"edge_types is a list of (source, relation, destination), not {edge_types!r}")
    if g.types.is_one:
        raise ValueError("edge_types: a graph of one type has no types to name; leave the argument out")
    for key in edge_types:
        if key not in g.types.edges:
            raise ValueError(f"edge_types: the graph has no edge type {key!r}; it has {listed(g.types.edges)}")
    return tuple(edge_types)


def _copy(values: Int64s, pool: BufferPool) -> Int64s:
    copied = pool.array(values.shape, np.int64)
    copied[:] = values
    return copied
