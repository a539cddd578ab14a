"""The contract of strategies: how the batches of an epoch come about, and where their rows are.

A :class:`Strategy` is its options. It makes a :class:`Runner` for each loader, which begins epochs; an :class:`EpochRun` says
what each batch holds and where its rows are. The loader owns threads, order and statistics, the same for all. A strategy that
looks ahead samples in threads of its own, plans, and answers :meth:`EpochRun.batch` from its run files, with a plan a feature.
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
from featstore.gather.device import Apart
from featstore.gather.executor import Tally
from featstore.gather.plan import BatchPlan, DeviceRows, EdgePlan, Tier
from featstore.gather.sources import RowSource
from featstore.pack.packgraph import Graph
from featstore.sampling.batch import SampledBatch
from featstore.sampling.sampledbatches import SampledBatches
from featstore.strategies.context import Context
from featstore.strategies.memory import Memory
from featstore.strategies.options import check_fields

__all__ = ["Batch", "EpochRun", "Runner", "Strategy"]


@dataclass(eq=False)
class Batch:
    """A batch on its way to the loop: drawn by a strategy, gathered and delivered by the loader, which fills in the rest.

    Parameters
    ----------
    position : int
        When it runs in its epoch.
    sampled : SampledBatch
    plans : mapping of str to BatchPlan, optional
        A plan a feature, of the rows that :attr:`Context.tier` leaves; without plans the loader splits the batch, and the store
        plans the others on the fly.
    edges : EdgePlan or int64 array, optional
        The plan of all edge features; without, the loader numbers the edges, and their stores plan on the fly.

    Attributes
    ----------
    split : (DeviceRows, tensor) or None
        Of a batch without plans, what the device holds, and the others.
    features, edge_features : dict
        The rows that the host has gathered; they stay while memory is found for the rest.
    apart : dict of str to Apart
        Features of which the device holds rows.
    tally : Tally
        What gathering took.
    """

    position: int
    sampled: SampledBatch
    plans: Mapping[str, BatchPlan] | None = None
    edges: EdgePlan | npt.NDArray[np.int64] | None = None
    split: tuple[DeviceRows, torch.Tensor] | None = field(default=None, init=False)
    features: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    edge_features: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict, init=False)
    apart: dict[str, Apart] = field(default_factory=dict, init=False)
    tally: Tally = field(default_factory=Tally, init=False)


class EpochRun(ABC):
    """One epoch under way. What is not overridden does nothing, or reads on demand."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """How many threads may call :meth:`batch` at once."""

    @abstractmethod
    def batch(self, position: int) -> Batch:
        """Return the batch that runs as number ``position``; pure, so that it may be asked for again where memory was short."""

    def plan(self, name: str, batch: Batch) -> tuple[BatchPlan | None, Mapping[Tier, RowSource]]:
        """Return the plan by which feature ``name`` is gathered for the batch now, and the tiers that the plan names.

        Called in order, by one thread, which then gathers; again for the same batch where memory was short for that. Without a
        plan, as here, the store makes one. ``batch.tally`` gets what is read before.
        """
        return None, {}

    def may_begin(self, position: int) -> bool:
        """Whether :meth:`batch` need not wait until earlier batches were gathered; waits for nobody."""
        return True

    def passed(self, position: int) -> None:
        """Note that batch ``position`` has all its features, as have those before it."""

    def spare(self) -> bool:
        """Give back memory that only makes the epoch faster, as a batch does not fit; return whether there was some.

        Called by the thread that works on the batch, while nothing else is gathered.
        """
        return False

    def stop(self) -> None:
        """Note that the epoch is over: whoever waits in :meth:`batch` or :meth:`plan` is sent away. Waits for nobody."""

    def close(self) -> None:
        """Let go of threads, files and memory; may be called again."""


class Runner(ABC):
    """What a strategy has made for one loader: its caches, its memory, its files. What is not overridden does nothing.

    Attributes
    ----------
    context : Context
        What the loader goes by from now on: the batches as they will run, and what all stages need.
    memory : Memory
        What the loader's batches need of the memory, as :func:`~featstore.strategies.memory.ask` has measured, or will see.
    prefetch : int
        Batches made ahead; fewer than were asked for where memory is short.
    """

    def __init__(self, context: Context, memory: Memory | None = None) -> None:
        self.context, self.prefetch = context, context.prefetch
        self.memory = Memory(context) if memory is None else memory

    @abstractmethod
    def prepare(self, epoch: int, start: int) -> EpochRun:
        """Begin ``epoch`` at batch number ``start``."""

    def stats(self) -> dict[str, Any]:
        """Report this strategy's own entries of :meth:`featstore.Loader.stats`."""
        return {}

    def close(self, failed: bool = False) -> None:
        """Give back what is held between epochs; may be called again. ``failed``: the loop ended with an error."""


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
    # Batches run as number 0, 1, 2 …, and come from an epoch's ``in_turn``. Each class says so of itself: it is not inherited.
    takes_history: ClassVar[bool] = False
    # Policies of whose superbatches ``auto`` asks for an estimate: the default one, and others that its option ``policy`` takes.
    judged_with: ClassVar[tuple[str, ...]] = ("belady",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes_history = bool(vars(cls).get("takes_history", False))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def name(self) -> str:
        """The name that it is registered under, or its class's."""
        return str(type(self).__dict__.get("_registered") or type(self).__qualname__)

    def batches(
        self, graph: Graph, *, batch_size: int | None, shuffle: bool, seed: int, drop_last: bool
    ) -> SampledBatches | None:
        """Return the batches that the strategy brings, those of a pack; None: the loader's sampler draws them.

        Raises
        ------
        ValueError
            Other batches are asked for than those.
        """
        return None

    @classmethod
    def estimate(cls, workload: Workload, machine: Machine) -> Estimate | Sequence[Estimate] | None:
        """Estimate the seconds of an epoch, for :class:`~featstore.Auto` to compare strategies by; None: it is not considered.

        Where an estimate is least, the strategy runs with those options of ``Auto`` that it has, too, and with the estimate's
        policy. Each class estimates itself: what a base class estimates is not inherited.

        Parameters
        ----------
        workload : Workload
            What an epoch asks for, how many rows policies load, seconds of sampling.
        machine : Machine
            What the drive and the memory were measured to do.

        Returns
        -------
        Estimate, sequence of Estimate, or None
            An estimate for each policy that it considers. ``strategy`` is the registered name, ``policy`` is ``"none"`` where
            nothing is cached, seconds are finite. :mod:`featstore.estimate.cost` has the formulas of the built-in strategies.
        """
        return None

    def foreseen(self, context: Context) -> Length | None:
        """Return how long the superbatches of a run would be, for ``Workload.superbatch``; None, as here: it has none.

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
        """Make what a loader runs.

        Raises
        ------
        BudgetError
            The memory does not suffice; names the least that does.
        """
