"""Layer-neighbour sampling (LABOR), hop by hop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from featstore._core import labor as _core
from featstore.config import check_at_least, check_flag
from featstore.sampling.batch import Block
from featstore.sampling.hops import FanoutSampler, HopKey
from featstore.sampling.rng import source_keys
from featstore.sampling.scratch import EMPTY, Int64s, Scratch
from featstore.sampling.typed import ListsOfType
from featstore.topology.types import EdgeKey

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["LaborSampler"]

_LEAST_READ = 1 << 16  # ids that are read at once at the least, if so many are missing

_MOST_DEPENDENCY = 2**32  # batches: 64-bit words distinguish their phases

_CONVERGED = 1e-4  # the iteration ends with a step that lowers the expected number of sources by a smaller share


class LaborSampler(FanoutSampler):
    """Sample in-neighbours layer by layer, so that the nodes of a hop share their neighbours (LABOR).

    In each hop every source has one random number, the same for all destinations. A destination with ``d`` neighbours takes
    those whose number is at most ``fanout / d``. It takes as many as with :class:`~featstore.NeighborSampler` on average, but
    shares them with other destinations. So a batch has fewer nodes, and fewer rows are read.

    Parameters
    ----------
    g, seed, redraw, edges
        See :class:`~featstore.NeighborSampler`.
    fanouts : sequence of int
        Neighbours that a node takes on average in each hop, the seeds' own first; -1 takes all.
    batch_dependency : int
        Number of batches ``K`` for which a source keeps its number. In every batch one source in ``K`` gets a new number. So
        consecutive batches share sources, and a cache of recently read rows has more hits. 1: all numbers are new in every batch.
    layer_dependency : bool
        A source has the same number in every hop. The hops of a batch then share sources, too.
    importance_sampling : int
        Steps of the iteration that finds importance probabilities (LABOR-i): sources that many destinations have in common become
        more likely, and fewer distinct sources are taken. 0: no steps, equal probabilities. -1: steps until the probabilities
        converge (``LABOR-*``).

    Raises
    ------
    ValueError, TypeError
        The errors of :class:`~featstore.NeighborSampler`; a batch dependency below 1 or above 2³², ``importance_sampling`` below
        -1.

    Notes
    -----
    This is Poisson sampling. Each neighbour is taken with probability ``min(1, fanout / d)``, so the number taken is random. A
    list that is not longer than the fan-out is taken whole. A longer one gives ``fanout`` neighbours on average, and **none at
    all** with probability ``(1 - fanout / d) ** d``, about ``exp(-fanout)``. A model must cope with nodes without neighbours, as
    with a graph that has such nodes. Probabilities are multiples of 2⁻³². A neighbour that is in a list twice counts twice in
    ``d``, and is taken twice or not at all. The mean over the neighbours taken estimates the mean over all.

    With ``importance_sampling`` each hop weighs the sources of all its destinations: neighbour ``t`` of ``s`` is taken with
    probability ``c[s] * p[t]``. The mean over the neighbours taken, each with the weight ``1 / (d * c[s] * p[t])``
    (Horvitz-Thompson), has no bias. ``c[s]`` is such that the mean's variance is that of ``fanout`` uniform draws. Each step
    lowers the expected number of distinct sources of the hop, or keeps it. More edges are taken than without. **Blocks hold no
    weights**, so a plain mean leans towards the sources that destinations share.

    Blocks, the order of edges and nodes, threads and scratch are as with :class:`~featstore.NeighborSampler`. With
    ``batch_dependency`` above 1 a batch depends on ``index`` as its place in the epoch. Numbers are new in every epoch.

    A hop goes through whole lists. It costs less than a nanosecond a neighbour of its destinations (more with
    ``batch_dependency``). Lists that are not in memory are read whole, in turns of as many ids as the hop is expected to have
    edges, 65,536 at least. :class:`~featstore.EpochSampler` reads them in sequence, once a hop for many batches. Importance
    probabilities need all lists of a hop at once: 4 or 8 bytes a neighbour, and about a hundred a distinct source.

    References
    ----------
    Balin, Çatalyürek: Layer-neighbor sampling: defusing neighborhood explosion in GNNs, NeurIPS 2023 (section 3).

    Examples
    --------
    >>> sampler = LaborSampler(g, fanouts=[10, 10], batch_dependency=64)
    >>> batch = sampler.sample(torch.arange(1000), epoch=0, index=0)
    """

    draws_types: ClassVar[bool] = True

    def __init__(
        self,
        g: OutOfCoreGraph,
        fanouts: Sequence[int] | Mapping[EdgeKey, Sequence[int]],
        batch_dependency: int = 1,
        seed: int = 0,
        layer_dependency: bool = False,
        redraw: bool = True,
        importance_sampling: int = 0,
        edges: bool = False,
    ) -> None:
        super().__init__(g, fanouts, seed, redraw, edges)
        self.batch_dependency = check_at_least("batch_dependency", batch_dependency, 1, _MOST_DEPENDENCY)
        self.layer_dependency = check_flag("layer_dependency", layer_dependency)
        self.importance_sampling = check_at_least("importance_sampling", importance_sampling, -1)

    def __repr__(self) -> str:
        more = ", layer_dependency=True" * self.layer_dependency + ", redraw=False" * (not self.redraw)
        if self.importance_sampling:
            more += f", importance_sampling={self.importance_sampling}"
        more += ", edges=True" * self.edges
        return f"LaborSampler(fanouts={self._shown_fanouts}, batch_dependency={self.batch_dependency}, seed={self.seed}{more})"

    def __reduce__(self) -> tuple[Any, ...]:
        options = self.batch_dependency, self.seed, self.layer_dependency, self.redraw, self.importance_sampling, self.edges
        return type(self), (self._g, self.given_fanouts, *options)

    def hop_key(self, at: HopKey) -> tuple[int, int, int, int]:
        """Compute the keys of the sources' numbers in a hop: ``early, late, phase, turn``."""
        epoch, index, hop = at
        return source_keys(self.seed, epoch, index, 0 if self.layer_dependency else hop, self.batch_dependency)

    def _expand(self, scratch: Scratch, lists: ListsOfType, size: int, at: HopKey) -> Block:
        pool, hops, cache, n_dst = self._g.pool, scratch.hops, scratch.cache, lists.n
        id_bytes = self.topology.id_bytes
        keys = self.hop_key(at)
        records = None if cache is None else cache.records
        layer = _core.Layer(hops, n_dst, size, *keys, records, id_bytes)
        counts = pool.array((n_dst,), np.int64)
        n_read = min(layer.n_missing, max(layer.n_expected, _LEAST_READ))
        if self.importance_sampling and 0 < layer.n_expected < layer.n_ids:  # else all lists are taken whole, or none
            layer = _core.Layer(hops, n_dst, -1, *keys, records, id_bytes)
            chosen, positions = self._choose(scratch, layer, counts, n_read, lists.starts)
            self._weigh(scratch.sources, layer, size, chosen, counts, positions)
        else:
            chosen, positions = self._choose(scratch, layer, counts, n_read, lists.starts)
        src = pool.tensor((layer.n_chosen,), torch.int64)
        dst = pool.tensor((layer.n_chosen,), torch.int64)
        while not layer.number(chosen, counts, src.numpy(), dst.numpy()):
            scratch.need(2 * scratch.room)
        edge_pos = None
        if positions is not None:
            edge_pos = pool.tensor((layer.n_chosen,), torch.int64)
            edge_pos.numpy()[:] = positions[: layer.n_chosen]
            self.number_edges(scratch, edge_pos)
        return Block(src, dst, hops.n_nodes, n_dst, edge_pos)

    def _weigh(
        self, scratch: Scratch, layer: _core.Layer, fanout: int, listed: npt.NDArray[Any], counts: Int64s, edge_pos: Int64s | None
    ) -> None:
        """Cut whole lists, in place, to the neighbours taken with importance probabilities; ``scratch`` numbers their sources."""
        scratch.hops.begin(EMPTY)
        importance = _core.Importance(layer, scratch.hops, fanout, listed, counts)
        while not importance.number():
            scratch.need(2 * scratch.room)
        weights = self._g.pool.array((importance.n_sources, 2), np.float64)
        importance.weigh(weights, self.importance_sampling, _CONVERGED)
        importance.keep(edge_pos)

    def _choose(
        self, scratch: Scratch, layer: _core.Layer, counts: Int64s, n_read: int, starts: Int64s
    ) -> tuple[npt.NDArray[Any], Int64s | None]:
        """Choose neighbours from all lists, reading the file ``n_read`` ids at a time; return their ids and edge positions."""
        pool, topology, n = self._g.pool, self.topology, layer.n_expected
        if n < layer.n_ids:  # the number taken is random, and draws are correlated: this is not always enough
            n = min(n + 4 * math.isqrt(n), layer.n_ids)
        n += _core.STEP
        chosen = pool.array((n,), topology.id_dtype)
        edge_pos = pool.array((n,), np.int64) if self.edges else None
        positions = pool.array((n_read,), np.int64) if n_read else EMPTY
        found = pool.array((n_read,), topology.id_dtype)
        while not layer.done:
            n = layer.turn(positions)
            self._read(scratch, positions[:n], found[:n])
            topology.check_found(positions[:n], found[:n])
            while not layer.choose(found[:n], chosen, counts, None if edge_pos is None else starts, edge_pos):
                room, done = len(chosen) * 3 // 2 + _core.STEP, layer.n_chosen
                more = pool.array((room,), topology.id_dtype)
                more[:done] = chosen[:done]
                chosen = more
                if edge_pos is not None:
                    longer = pool.array((room,), np.int64)
                    longer[:done] = edge_pos[:done]
                    edge_pos = longer
        return chosen, edge_pos
