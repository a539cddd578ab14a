"""The objects that a loader hands to its strategy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from featstore.budget import Budget
from featstore.cache.base import Policy
from featstore.cache.devicetier import DeviceTier
from featstore.cache.planned import PlannedPolicy
from featstore.pack.batches import PackBatches
from featstore.pack.layout import LayoutOptions
from featstore.pack.offline import Pack
from featstore.sampling.drawn import SampledBatches
from featstore.strategies.batchsize import BatchSize
from featstore.strategies.counters import BatchCounts, ReadCounts, Stopwatch
from featstore.strategies.domain import Domain

__all__ = ["Divides", "OnDevice", "Planning", "Setup"]


class Divides(Protocol):
    """What shares the memory of the caches."""

    def divide(
        self, setup: Setup, memory: Any, cache: int | float | str | None, policy: Policy, *, in_turn: bool = False
    ) -> None:
        """See :class:`~featstore.strategies.savedsplit.HistorySplit`."""
        ...


class OnDevice:
    """The rows that a loader keeps on its device.

    Parameters
    ----------
    tier : DeviceTier, optional
        There from then on, unchanged; plans that were made before name none of its rows.
    """

    def __init__(self, tier: DeviceTier | None = None) -> None:
        self.tier = tier
        self.why = ""  # there is none

    def step_done(self, setup: Setup) -> None:
        """Note, in the loop's thread, that a step is done: what is sized by it is sized then."""

    def expected_rows(self, setup: Setup, taken: int = 0) -> int:
        """Return how many rows there are; of a size that is not known yet, how many there would be now.

        ``taken``: bytes of host memory that caches will have.
        """
        return 0 if self.tier is None else len(self.tier)

    def close(self) -> None:
        """Give the memory back; may be called again. No batch may be under way."""
        tier, self.tier = self.tier, None
        if tier is not None:
            self.why = "the loader is closed"
            tier.close()


@dataclass(frozen=True)
class Planning:
    """What a strategy that looks ahead may use.

    Parameters
    ----------
    policy : Policy
        A planned one; for packs also a static one.
    superbatch : int or "auto"
        Batches a superbatch.
    disk : int or None
        Most bytes of run files at once.
    run_dir : str
        Where run directories are made.
    overlap : bool
        Sample and plan while earlier batches are gathered and trained on; otherwise one after the other.
    miss_share : float
        Of a batch's rows, those that the cache will lack, as far as is known: how much is packed of each.
    capacity : int, optional
        Rows of the cache, where its size was given.
    edge_policy : PlannedPolicy, optional
        Plans the caches of edge features, if there are any.
    edge_capacity : int
        Rows of each of those.
    layout : LayoutOptions, optional
        The layout of a pack that is run; it is made first where the pack has it not.
    """

    policy: Policy
    superbatch: int | str
    disk: int | None
    run_dir: str
    overlap: bool = True
    miss_share: float = 1.0
    capacity: int | None = None
    edge_policy: PlannedPolicy | None = None
    edge_capacity: int = 0
    layout: LayoutOptions | None = None


@dataclass(frozen=True)
class Setup:
    """What a strategy may use.

    Parameters
    ----------
    graph : OutOfCoreGraph or PackedGraph
    batches : SampledBatches
    threads : int
        Batches sampled at once.
    copy_threads : int, optional
        Threads that copy the rows of a batch; None: the graph's.
    features : tuple of str
    edge_features : tuple of str
    device : torch.device
        Where batches are delivered.
    device_rows : int or None
        Of a pack's layout, rows that are to stay on the device; None: as many as a layout that is there has.
    on_device : OnDevice, optional
        Rows on the device; those of a pack once its layout is open.
    labels : tuple of str
        Node data that the loader delivers.
    prefetch : int
        Batches made ahead of the one that the loop holds, while memory suffices.
    watch : Stopwatch
        Measures the stages.
    reads : ReadCounts
        Gets what is read of features.
    edge_reads : ReadCounts
        Gets what is read of edge features.
    counts : BatchCounts
        Gets what is delivered.
    planning : Planning, optional
        For strategies that look ahead.
    batch : BatchSize, optional
        What the first batch came to, once one was sampled to know.
    lends_caches : bool
        Caches are on loan although their size is given: another strategy chose it.
    miss_share : float
        Of a batch's rows, those that the cache will lack, as far as is known.
    profile_bytes : int
        Bytes of run files that hold batches sampled ahead.
    divides : Divides, optional
        Takes a part of the memory that caches are left with; a strategy asks it before it sizes them.
    has_history : bool
        Batches depend on those before them: they are pruned by a history.
    """

    graph: Any
    batches: SampledBatches
    threads: int
    features: tuple[str, ...] = ()
    edge_features: tuple[str, ...] = ()
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    device_rows: int | None = None
    on_device: OnDevice | None = None
    labels: tuple[str, ...] = ()
    prefetch: int = 0
    watch: Stopwatch = field(default_factory=Stopwatch)
    reads: ReadCounts = field(default_factory=ReadCounts)
    edge_reads: ReadCounts = field(default_factory=ReadCounts)
    counts: BatchCounts = field(default_factory=BatchCounts)
    planning: Planning | None = None
    batch: BatchSize | None = None
    lends_caches: bool = False
    miss_share: float = 1.0
    profile_bytes: int = 0
    copy_threads: int | None = None
    divides: Divides | None = None
    has_history: bool = False

    @property
    def n_copying(self) -> int:
        """Threads that copy the rows of a batch."""
        threads: int = self.graph.options.threads if self.copy_threads is None else self.copy_threads
        return threads

    @property
    def pack(self) -> Pack | None:
        """The pack whose batches these are, if they are a pack's."""
        return self.batches.pack if isinstance(self.batches, PackBatches) else None

    @property
    def tier(self) -> DeviceTier | None:
        """The rows that are on the device now."""
        return None if self.on_device is None else self.on_device.tier

    @property
    def nodes(self) -> Domain:
        """The nodes and the features that are gathered of them."""
        return Domain(self.graph, self.graph.num_nodes, {name: self.graph.features[name] for name in self.features}, self.reads)

    @property
    def edges(self) -> Domain:
        """The edges and the features that are gathered of them."""
        stores = {name: self.graph.edge_features[name] for name in self.edge_features}
        return Domain(self.graph, self.graph.num_edges if stores else 0, stores, self.edge_reads)

    @property
    def row_bytes(self) -> dict[str, int]:
        """Bytes of each node feature's row."""
        return self.nodes.row_bytes

    @property
    def budget(self) -> Budget:
        """The graph's budget."""
        found: Budget = self.graph.budget
        return found
