"""The objects that a loader hands to its strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from featstore.budget import Budget
from featstore.cache.devicetier import DeviceTier
from featstore.estimate.batchsize import BatchSize
from featstore.estimate.misses import UNKNOWN, MissCurves
from featstore.gather.counters import BatchCounts, StageTimer
from featstore.pack.batches import PackBatches
from featstore.pack.offline import Pack
from featstore.pack.packgraph import Graph
from featstore.ranks import ChosenByFirst
from featstore.sampling.sampledbatches import SampledBatches
from featstore.strategies.domain import Domain

__all__ = ["Chosen", "Context", "OnDevice"]


class OnDevice:
    """The rows that a loader keeps on its device.

    Parameters
    ----------
    tiers : sequence of DeviceTier or None
        The rows of features that have the same rows, in the order of :attr:`Domain.each`, None where there are none. Empty: no
        rows yet. Once set, the tiers do not change. Plans that were made before do not use them.
    """

    def __init__(self, tiers: Sequence[DeviceTier | None] = ()) -> None:
        self.tiers = tuple(tiers)
        self.why = ""  # why there are no tiers

    def step_done(self, context: Context) -> None:
        """Note, in the loop's thread, that a training step is done; a tier sized by the first step is sized now."""

    def of(self, name: str) -> DeviceTier | None:
        """Get the tier that has a feature's rows."""
        return next((tier for tier in self.tiers if tier is not None and name in tier.arrays), None)

    @property
    def n_rows(self) -> tuple[int, ...]:
        """Rows of each tier; empty if there are no tiers."""
        return tuple(0 if tier is None else len(tier) for tier in self.tiers)

    @property
    def nbytes(self) -> int:
        return sum(0 if tier is None else tier.nbytes for tier in self.tiers)

    def expected_rows(self, context: Context, taken: int = 0) -> tuple[int, ...]:
        """Return the number of rows of each tier; if the tiers are not sized yet, the numbers that would fit now.

        ``taken``: bytes of host memory that caches will have.
        """
        return self.n_rows

    def close(self) -> None:
        """Give the memory back; may be called again. No batch may be under way."""
        tiers, self.tiers = self.tiers, ()
        for tier in tiers:
            self.why = "the loader is closed"
            if tier is not None:
                tier.close()


@dataclass(frozen=True)
class Chosen:
    """The facts that ``Auto`` passes to the strategy that it chose.

    Parameters
    ----------
    lends_caches : bool
        Caches are on loan although their size is given.
    misses : MissCurves
        The share of a batch's rows that a cache will lack, as far as it is known.
    profile_bytes : int
        Bytes of run files that hold batches sampled ahead.
    freed : int
        Bytes of neighbour lists that are given back before anything else takes memory.
    pack_rows : tuple of int
        Rows of the caches of each part of the features that a pack's layouts are to have; empty: as many as the size given.
    """

    lends_caches: bool = False
    misses: MissCurves = UNKNOWN
    profile_bytes: int = 0
    freed: int = 0
    pack_rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Context:
    """The loader's objects and settings that a strategy uses.

    Parameters
    ----------
    graph : OutOfCoreGraph or PackedGraph
    batches : SampledBatches
    nodes, edges : Domain
        The features of nodes and of edges that are gathered, with counts of their reads.
    threads : int
        Batches sampled at once.
    copy_threads : int
        Threads that copy the rows of a batch.
    device : torch.device
        Device to which batches are delivered.
    device_rows : tuple of int, or None
        Number of rows of a pack's layouts that stay on the device, for each of ``nodes.each``; None: as many as existing layouts
        have.
    on_device : OnDevice, optional
        Rows on the device. For a pack, set when its layout is opened.
    labels : tuple of str
        Node data that the loader delivers.
    prefetch : int
        Batches made ahead of the one that the loop holds, while memory suffices.
    timer : StageTimer
        Measures the stages.
    counts : BatchCounts
        Counts the batches delivered.
    batch : BatchSize, optional
        The size of a batch, once one was sampled to measure it.
    chosen : Chosen
        Facts from the strategy that chose this one, if one did.
    divide : callable (context, memory, cache, policy), optional
        Takes a part of the memory that is left for caches; a strategy calls it before it sizes them. See
        ``HistorySplit.divide`` in ``load/savedsplit.py``.
    has_history : bool
        A history prunes the batches, so that each depends on earlier ones.
    has_types : bool
        The graph has several types: a batch's nodes have the rows of ``nodes.rows``, and some have none.
    first : ChosenByFirst
        What rank 0 chooses for all ranks of the loader.
    lists : str, optional
        How many neighbour lists the loader keeps in memory by itself, or why none; None: that is not settled.
    """

    graph: Graph
    batches: SampledBatches
    nodes: Domain
    edges: Domain
    threads: int
    copy_threads: int
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    device_rows: tuple[int, ...] | None = None
    on_device: OnDevice | None = None
    labels: tuple[str, ...] = ()
    prefetch: int = 0
    timer: StageTimer = field(default_factory=StageTimer)
    counts: BatchCounts = field(default_factory=BatchCounts)
    batch: BatchSize | None = None
    chosen: Chosen = Chosen()
    divide: Callable[..., None] | None = None
    has_history: bool = False
    has_types: bool = False
    first: ChosenByFirst[Any] = field(default_factory=partial(ChosenByFirst, (0, 1)))
    lists: str | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features of nodes that are gathered."""
        return tuple(self.nodes.stores)

    @property
    def pack(self) -> Pack | None:
        """The pack that holds the batches, or None."""
        return self.batches.pack if isinstance(self.batches, PackBatches) else None

    @property
    def tiers(self) -> tuple[DeviceTier | None, ...]:
        """The rows that are on the device now, one tier for each of ``nodes.each``; empty if there are none."""
        return () if self.on_device is None else self.on_device.tiers

    def drop_caches(self, *, edges: bool = False) -> None:
        """Give back the caches of node features, with ``edges`` those of edge features, too, before others replace them."""
        self.nodes.drop_caches()
        if edges:
            self.edges.drop_caches()

    @property
    def budget(self) -> Budget:
        """The graph's budget."""
        return self.graph.budget
