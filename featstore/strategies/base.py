"""The contract of strategies, which supply the batches of an epoch and the plans for their rows.

A :class:`Strategy` holds options. It makes a :class:`Runner` for each loader. The runner begins epochs. An :class:`EpochRun`
returns each batch, and the tier and address of its rows. The loader owns threads, order and statistics; they are the same for
all strategies. A strategy that looks ahead samples and plans in threads of its own. Its :meth:`EpochRun.batch` reads run files,
and returns a plan for each feature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from featstore.estimate.cost import Estimate, Machine, Workload
from featstore.estimate.length import Length
from featstore.gather.buffers import BufferPool
from featstore.gather.counters import GatherCounts
from featstore.gather.device import Apart
from featstore.gather.plan import BatchPlan, DeviceRows, EdgePlan, Tier
from featstore.gather.sources import RowSource
from featstore.pack.packgraph import Graph
from featstore.sampling.batch import SampledBatch
from featstore.sampling.sampledbatches import SampledBatches
from featstore.strategies.context import Context
from featstore.strategies.memory import Memory
from featstore.strategies.options import check_fields
from featstore.topology.noderows import NodeRows
from featstore.topology.types import EdgeKey

__all__ = ["Batch", "EpochRun", "Runner", "Strategy"]


@dataclass(eq=False)
class Batch:
    """A batch on its way to the loop: drawn by a strategy, gathered and delivered by the loader, which sets the attributes.

    Parameters
    ----------
    position : int
        Number of the batch in its epoch, in the order in which batches run.
    sampled : SampledBatch
    plans : mapping of str to BatchPlan, optional
        A plan for each feature, of the rows that are not in :attr:`Context.tiers`. Without plans, the loader splits the batch,
        and the store plans the rows that are not on the device.
    edge_plans : mapping of str to EdgePlan
        A plan for each edge feature. Without a plan, the loader numbers the edges, and the feature's store plans the gather.

    Attributes
    ----------
    split : dict of NodeRows to (DeviceRows, tensor)
        Of a batch without plans: the rows that the device holds, and the others, of features with these rows.
    edge_numbers : dict of (str, str, str) to int64 array
        The edge ids, by type of edges (None: there are no types), of features without a plan.
    features, edge_features : dict
        The rows that the host has gathered. They are kept while the loader finds memory for the rest.
    apart : dict of str to Apart
        Features of which the device holds rows.
    counts : GatherCounts
        Seconds and reads of gathering.
    rows : dict of NodeRows to int64 array
        The rows of the batch's nodes, where nodes of some types have none; see :meth:`rows_of`.
    """

    position: int
    sampled: SampledBatch
    plans: Mapping[str, BatchPlan] | None = None
    edge_plans: Mapping[str, EdgePlan] = field(default_factory=dict)
    split: dict[NodeRows, tuple[DeviceRows, torch.Tensor]] = field(default_factory=dict, init=False)
    edge_numbers: dict[EdgeKey | None, npt.NDArray[np.int64]] = field(default_factory=dict, init=False)
    features: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    edge_features: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict, init=False)
    apart: dict[str, Apart] = field(default_factory=dict, init=False)
    counts: GatherCounts = field(default_factory=GatherCounts, init=False)
    rows: dict[NodeRows, npt.NDArray[np.int64]] = field(default_factory=dict, init=False)

    def rows_of(self, of: NodeRows, pool: BufferPool) -> npt.NDArray[np.int64]:
        """Find the rows of the batch's nodes, once, in pooled memory. Without types these are the nodes."""
        if not of.kinds:
            return self.sampled.input_ids.numpy()
        if of not in self.rows:
            self.rows[of] = of.of(self.sampled.input_ids.numpy(), pool.array)
        return self.rows[of]


class EpochRun(ABC):
    """A running epoch. By default, rows are read on demand, and the methods that are not abstract do nothing else."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """Number of threads that may call :meth:`batch` at once."""

    @abstractmethod
    def batch(self, position: int) -> Batch:
        """Return the batch that runs as number ``position``. The call may be repeated after memory was short."""

    def plan(self, name: str, batch: Batch) -> tuple[BatchPlan | None, Mapping[Tier, RowSource]]:
        """Return the plan by which feature ``name`` of the batch is gathered now, and the row sources of the plan's tiers.

        One thread calls this in the order of the batches, and then gathers. It calls again for the same batch if memory was
        short. Without a plan, the default, the store makes one. Reads that are made here are added to ``batch.counts``.
        """
        return None, {}

    def may_begin(self, position: int) -> bool:
        """Return whether :meth:`batch` can return before all earlier batches were gathered. Does not wait."""
        return True

    def passed(self, position: int) -> None:
        """Note that batch ``position``, and all before it, have all their features."""

    def release(self) -> bool:
        """Give back memory that only makes the epoch faster, because a batch does not fit; return whether there was some.

        Called by the thread that works on the batch, while nothing else is gathered.
        """
        return False

    def stop(self) -> None:
        """End the epoch: wake threads that wait in :meth:`batch` or :meth:`plan`. Does not wait for them."""

    def close(self) -> None:
        """Release threads, files and memory; may be called again."""


class Runner(ABC):
    """The caches, memory and files of a strategy in one loader. By default, the methods that are not abstract do nothing.

    Attributes
    ----------
    context : Context
        The context as the loader uses it from now on; a strategy may have replaced the batches in it.
    memory : Memory
        The memory that the loader's batches need, as ``ask`` of ``strategies/memory.py`` measured it, or not known yet.
    prefetch : int
        Batches made ahead, fewer than were asked for if memory is short.
    """

    def __init__(self, context: Context, memory: Memory | None = None) -> None:
        self.context, self.prefetch = context, context.prefetch
        self.memory = Memory(context) if memory is None else memory

    @abstractmethod
    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch`` at batch number ``start``."""

    def stats(self) -> dict[str, Any]:
        """Return this strategy's own entries of :meth:`featstore.Loader.stats`."""
        return {}

    def close(self, failed: bool = False) -> None:
        """Release everything held between epochs; may be called again. ``failed``: the loop ended with an error."""


@dataclass(frozen=True)
class Strategy(ABC):
    """Options of one strategy: a frozen dataclass, whose fields ``featstore.options.option`` declares.

    Examples
    --------
    >>> @featstore.register_strategy("mine")
    ... @dataclass(frozen=True)
    ... class Mine(featstore.Strategy):
    ...     length: int = featstore.options.option(8, featstore.options.number_of("batches"), "batches that are ordered together")
    ...
    ...     def run(self, context):
    ...         return MyRunner(self, context)
    """

    _registered: ClassVar[str] = ""
    # True: batches run as number 0, 1, 2 …, and come from an epoch's ``windowed``. Not inherited: each class declares it.
    takes_history: ClassVar[bool] = False
    # Whether the strategy takes graphs of several types, whose rows are those of Context.nodes.rows; and features of different
    # types, each of which it then treats by itself. Not inherited, either.
    takes_types: ClassVar[bool] = False
    takes_mixed: ClassVar[bool] = False
    # Whether rank 0 of a process group chooses for all ranks (``Context.first``), which then wait for it to make its loader.
    chooses: ClassVar[bool] = False
    # Policies for which ``auto`` asks for an estimate of superbatches: the default, and other values of the option ``policy``.
    judged_with: ClassVar[tuple[str, ...]] = ("belady",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("takes_history", "takes_types", "takes_mixed"):
            setattr(cls, name, bool(vars(cls).get(name, False)))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def name(self) -> str:
        """The name under which the strategy is registered, or the name of its class."""
        return str(type(self).__dict__.get("_registered") or type(self).__qualname__)

    def batches(
        self, graph: Graph, *, batch_size: int | None, shuffle: bool, seed: int, drop_last: bool
    ) -> SampledBatches | None:
        """Return the strategy's own batches, those of a pack; None: the loader's sampler draws the batches.

        Raises
        ------
        ValueError
            The arguments ask for batches that the pack does not have.
        """
        return None

    @classmethod
    def estimate(cls, workload: Workload, machine: Machine) -> Estimate | Sequence[Estimate] | None:
        """Estimate the seconds of an epoch; :class:`~featstore.Auto` compares strategies by it. None: not a candidate.

        The strategy with the least estimate runs with the estimate's policy, and with those options of ``Auto`` that it has.
        Estimates are not inherited: each class makes its own.

        Parameters
        ----------
        workload : Workload
            The rows that an epoch asks for, the rows that policies load, the seconds of sampling.
        machine : Machine
            The measured rates of the drive and the memory.

        Returns
        -------
        Estimate, sequence of Estimate, or None
            An estimate for each policy that the strategy considers. ``strategy`` is the registered name; ``policy`` is
            ``"none"`` if nothing is cached; seconds are finite. ``featstore.estimate.cost`` has the formulas of the built-in
            strategies.
        """
        return None

    def estimate_length(self, context: Context) -> Length | None:
        """Estimate the length of a run's superbatches, for ``Workload.superbatch``; None, the default: there are none.

        Parameters
        ----------
        context : Context
            As of :meth:`run`.

        Raises
        ------
        BudgetError
            The memory does not suffice for a run.
        """
        return None

    @abstractmethod
    def run(self, context: Context) -> Runner:
        """Make the runner of a loader.

        Raises
        ------
        BudgetError
            The memory does not suffice; the error names a memory that does.
        """
