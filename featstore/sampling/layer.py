"""Layer-wise importance sampling, hop by hop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from featstore._core.layerwise import Candidates
from featstore.config import check_flag, check_integer, listed
from featstore.sampling.batch import Block
from featstore.sampling.hops import HopKey, HopSampler
from featstore.sampling.scratch import EMPTY, Int64s, Scratch
from featstore.sampling.typed import ListsOfType
from featstore.sampling.wholelists import Pieces

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["LayerSampler"]

_OPS = ("sum", "mean")


class LayerSampler(HopSampler):
    """Sample a fixed number of nodes a layer, by importance, and weigh the edges to them (FastGCN, LADIES).

    A layer's destinations are all nodes that the batch has so far. Of the distinct nodes in their neighbour lists, the layer
    takes ``sizes[hop]``. The edges from these nodes to the destinations form the block. A batch has at most ``sum(sizes)`` nodes
    besides its seeds, however many neighbours they have.

    Parameters
    ----------
    g, seed, edges
        See :class:`~featstore.NeighborSampler`.
    sizes : sequence of int
        Nodes that each layer takes, that of the seeds first; at least 1. A layer with fewer neighbours takes all of them.
    skip : bool
        Skip connections: neighbours that the batch has already are taken in addition, with probability 1. The batch has their
        rows, so they cost edges only.
    replace : bool
        Draw ``sizes[hop]`` times with replacement, as the papers do. Each draw of a node counts, so layers have fewer distinct
        nodes. If false, all are distinct.
    op : {"sum", "mean"}
        Estimate of the weighted sum over a block's edges: the sum over all neighbours of a destination, or their mean.

    Raises
    ------
    ValueError, TypeError
        ``sizes`` is empty, a size is below 1 or 2³¹ or more, a seed is out of range, ``op`` is another word; wrong types.

    Notes
    -----
    The importance of node ``u`` is the squared norm of its column in the adjacency of the layer, as in LADIES: with ``"sum"`` the
    number of edges from ``u`` to destinations, with ``"mean"`` the sum over these edges of ``1 / degree(destination) ** 2``. The
    probability ``q(u)`` is its share of the importance of all. A neighbour that is in a list twice has two edges.

    Let ``n`` be the layer's size. With ``replace``, each edge from ``u`` has the weight ``1 / (n q(u))`` (float32) times the
    number of draws of ``u``. Without, nodes are drawn with probabilities of exactly ``min(1, c n q(u))``, and the weight is one
    over this probability. ``c`` is such that the probabilities sum to ``n``; it is 1 if no node is certain to be taken (ordered
    pivotal sampling). With ``"mean"`` each weight is also divided by the destination's degree. Either way **the weighted sum over
    the block's edges has no bias**. Weights of one over ``n q(u)`` for distinct nodes drawn one after the other, as in some
    released code, do not have this property.

    A destination without a taken neighbour has no edges, so its sum is 0. A model must cope with that, as with a graph that has
    such nodes. The sum of a destination's weights estimates its degree (or 1), so dividing by that sum gives a mean that varies
    less, with a small bias.

    Blocks, the order of edges and nodes, and threads are as with :class:`~featstore.NeighborSampler`. A layer goes through the
    lists of all destinations, so its time is proportional to their degrees. Lists that are not in memory are read whole, a piece
    at a time, and a second time if they do not fit one piece (:class:`Pieces`). About a hundred bytes are held for each distinct
    neighbour of the destinations.

    References
    ----------
    Chen, Ma, Xiao: FastGCN, ICLR 2018 (section 3, importance sampling). Zou et al.: Layer-dependent importance sampling for
    training deep and large graph convolutional networks (LADIES), NeurIPS 2019 (section 3). Huang et al.: Adaptive sampling
    towards fast graph representation learning, NeurIPS 2018 (section 4.3, skip connections). PaGraph, TPDS 2021 (sections 5.1 and
    5.8), trains with both. Deville, Tillé: Unequal probability sampling without replacement through a splitting method,
    Biometrika 1998 (pivotal sampling).

    Examples
    --------
    >>> sampler = LayerSampler(g, sizes=[512, 512])
    >>> batch = sampler.sample(torch.arange(1000), epoch=0, index=0)
    """

    def __init__(
        self,
        g: OutOfCoreGraph,
        sizes: Sequence[int],
        seed: int = 0,
        skip: bool = False,
        replace: bool = False,
        op: str = "sum",
        edges: bool = False,
    ) -> None:
        if not isinstance(sizes, Iterable):
            raise TypeError(f"sizes must be a sequence of integers, one a layer, such as [512, 256], not {sizes!r}")
        super().__init__(g, [check_integer("a layer's size", size) for size in sizes], seed, redraw=True, edges=edges)
        if not self._hop_sizes:
            raise ValueError("sizes is empty: give the number of nodes of each layer")
        for size in self._hop_sizes:
            if not 1 <= size < 2**31:
                raise ValueError(f"a layer has from 1 to 2**31 - 1 nodes, not {size}")
        self.skip, self.replace = check_flag("skip", skip), check_flag("replace", replace)
        if op not in _OPS:
            raise ValueError(f"op is one of {listed(_OPS)}, not {op!r}")
        self.op = op

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes that each layer takes, that of the seeds first."""
        return self._hop_sizes

    def __repr__(self) -> str:
        options = f"seed={self.seed}, skip={self.skip}, replace={self.replace}, op={self.op!r}" + ", edges=True" * self.edges
        return f"LayerSampler(sizes={list(self.sizes)}, {options})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._g, self.sizes, self.seed, self.skip, self.replace, self.op, self.edges)

    def _expand(self, scratch: Scratch, lists: ListsOfType, size: int, at: HopKey) -> Block:
        pool, hops, sources = self._g.pool, scratch.hops, scratch.sources
        pieces = Pieces(self._g, scratch, self.topology, lists.n, self._read)
        sources.hops.begin(EMPTY)
        candidates = Candidates(sources.hops, pieces.lists, self.op == "mean")
        factors = self._draw(sources, pieces, candidates, size, at)
        n = candidates.n_edges
        src, dst = (pool.tensor((n,), torch.int64) for _ in range(2))
        weight = pool.tensor((n,), torch.float32)
        edge_pos = pool.tensor((n,), torch.int64) if self.edges else None
        numbers = (None, None) if edge_pos is None else (lists.starts, edge_pos.numpy())
        taken = src.numpy(), dst.numpy(), weight.numpy(), *numbers
        if pieces.is_one:  # and numbered already
            candidates.take_edges(pieces.listed, pieces.owners, factors, *taken)
        else:
            for n_ids in pieces:
                _number(sources, candidates, pieces, n_ids)
                candidates.take_edges(pieces.listed, pieces.owners, factors, *taken)
        while not candidates.number_edges(taken[0]):
            scratch.need(2 * scratch.room)
        self.number_edges(scratch, edge_pos)
        return Block(src, dst, hops.n_nodes, lists.n, edge_pos, weight)

    def _draw(self, sources: Scratch, pieces: Pieces, candidates: Candidates, size: int, at: HopKey) -> npt.NDArray[np.float64]:
        """Weigh the sources of all lists, draw from them, and return the factors of the sources' edges."""
        pool = self._g.pool
        importance, n_edges = pool.array((sources.room,), np.float64), pool.array((sources.room,), np.int64)
        for n_ids in pieces:
            known = candidates.n_sources
            _number(sources, candidates, pieces, n_ids)
            if len(importance) < candidates.n_sources:
                importance = _longer(pool.array((sources.room,), np.float64), importance[:known])
                n_edges = _longer(pool.array((sources.room,), np.int64), n_edges[:known])
            candidates.accumulate(pieces.listed, pieces.owners, importance, n_edges)
        upto = drawn = None
        if self.replace:
            upto, drawn = pool.array((max(1, candidates.n_sources),), np.float64), pool.array((size,), np.int64)
        candidates.draw(importance, n_edges, size, self.hop_key(at)[0], self.skip, upto, drawn)
        return importance


def _number(sources: Scratch, candidates: Candidates, pieces: Pieces, n_ids: int) -> None:
    candidates.begin(n_ids)
    while not candidates.number(pieces.listed):
        sources.need(2 * sources.room)


def _longer(new: npt.NDArray[Any], old: npt.NDArray[np.float64] | Int64s) -> npt.NDArray[Any]:
    new[: len(old)] = old
    return new
