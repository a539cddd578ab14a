"""The stages of a batch in a loader, and what each of them counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.errors import BudgetError, ClosedError
from featstore.gather.device import Apart, DeviceArray, spare_bytes
from featstore.gather.executor import Tally
from featstore.gather.plan import BatchPlan, DeviceRows, EdgePlan, Tier
from featstore.load.edges import gather_edges
from featstore.load.history import BatchHistory, History
from featstore.load.minibatch import MiniBatch
from featstore.load.prepared import PreparedCheck
from featstore.load.transfer import Assembled, Transfer
from featstore.sampling.numbered import edge_numbers
from featstore.storage.rowfile import ReadStats
from featstore.strategies.base import EpochRun, Prepared
from featstore.strategies.counters import Overlap
from featstore.strategies.memory import Memory
from featstore.strategies.setup import Setup

__all__ = ["Item", "Stages"]


@dataclass(frozen=True)
class Item:
    """A batch between sampling and assembly, and the bytes of its sample.

    ``split``: of a batch without plans, what the device holds, and the others. ``edges``: by which numbers its edges' rows are
    gathered, for all edge features. What was gathered for it stays with it while memory is found for the rest.
    """

    prepared: Prepared
    n_bytes: int
    split: tuple[DeviceRows, torch.Tensor] | None = None
    features: dict[str, torch.Tensor] = field(default_factory=dict)
    apart: dict[str, Apart] = field(default_factory=dict)
    edges: list[EdgePlan | npt.NDArray[np.int64]] = field(default_factory=list)
    edge_features: dict[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


class Stages:
    """Sample batches, assemble them, transfer them. Thread-safe: several epochs may run at once.

    Parameters
    ----------
    setup : Setup
    memory : Memory
        The runner's.
    history : History, optional
    """

    def __init__(self, setup: Setup, memory: Memory, history: History | None = None) -> None:
        self._history = history
        self.watch, self.memory, self.overlap = setup.watch, memory, Overlap()
        self._g, self._setup = setup.graph, setup
        self._stores = {name: setup.graph.features[name] for name in setup.features}
        self._on_device = setup.on_device
        # None: a batch is whole once it is assembled.
        is_whole = setup.device.type == "cpu" and self._on_device is None
        self._transfer = None if is_whole else Transfer(setup.device, self.watch)
        # A stage of its own has threads of its own; otherwise the store's are meant.
        own = setup.copy_threads not in (None, setup.graph.options.threads)
        self._copying: dict[str, Any] = {"threads": setup.copy_threads} if own else {}
        self._lock = threading.Lock()
        self._trimmed_for = -1
        self._short: set[EpochRun] = set()  # epochs that make do with one queue of reads
        self._g.budget.require(memory)

    def receive(self, batch: MiniBatch) -> None:
        """Take note of a batch, in the loop's thread, before the loop has it."""
        if self._transfer is not None:
            self._transfer.receive(batch)
        self.memory.delivered(batch)
        if self._history is not None and batch.history is not None:
            self._history.deliver(batch.history)

    def begin(self, run: EpochRun) -> None:
        """Note that an epoch begins."""
        self.memory.begin()
        if self._history is not None:
            self._history.begin(run)

    def check_step(self) -> None:
        """Raise ValueError, in the loop's thread, where it did not do with a batch what it has to."""
        if self._history is not None:
            self._history.check_merged()

    def step_done(self) -> None:
        """Note, in the loop's thread, that it has computed on a batch."""
        if self._on_device is not None:
            self._on_device.step_done(self._setup)

    def of(
        self, run: EpochRun, check: PreparedCheck | None = None
    ) -> tuple[Callable[[int], Item], Callable[[int, Item], Any], Callable[[int, Any], MiniBatch] | None]:
        """Return an epoch's stages for a :class:`Pipeline`; the last is None where a batch is whole once it is assembled.

        ``check`` hears of every batch that the strategy prepares.
        """
        sample = self._for_device(partial(self._sample, check=check), run)
        assemble = self._for_device(self._assemble, run)
        last: Callable[..., MiniBatch] = self._transfer or assemble
        return (sample, last, None) if self._transfer is None else (sample, self._for_device(self._assemble_apart, run), last)

    def _for_device(self, stage: Callable[..., Any], run: EpochRun) -> Callable[..., Any]:
        """Return a stage of an epoch whose memory is for the device that batches are delivered on."""
        pool, device = self._g.pool, self._setup.device

        def stage_of(*given: Any) -> Any:
            with pool.copied_to(device):
                return stage(run, *given)

        return stage_of if device.type == "cuda" else partial(stage, run)

    def may_grow(self) -> bool:
        """Whether there is memory for one batch more ahead, and three for others, that nobody has to give back for it.

        On a CUDA device as well, where batches wait for the loop.
        """
        needed = 4 * self.memory.batch_bytes(self.memory.batch.n_rows)
        if self.memory.unused() < needed or self._g.budget.available < needed:
            return False
        on_device = spare_bytes(self._setup.device)
        return on_device is None or on_device >= needed

    def spare(self, run: EpochRun) -> bool:
        """Give back memory as :meth:`EpochRun.spare` does; first, once a batch, what nobody uses now."""
        with self._lock:
            n_batches = self._setup.counts.n_batches
            trimmed, self._trimmed_for = self._trimmed_for == n_batches, n_batches
            first = run not in self._short
            self._short.add(run)
        if trimmed and not first:
            return run.spare()
        before = self._g.budget.used
        if first:  # reads of other loops may hold memory that a busy machine takes long to give back
            self._g.reader.make_do()
        for idle in (self._setup.batches, self._g.pool, self._g.reader):
            trim = getattr(idle, "trim", None)
            if trim is not None:
                trim()
        return self._g.budget.used < before or run.spare()

    def over(self, run: EpochRun) -> None:
        """Note that an epoch is over: what it did without is there again."""
        self.memory.end()
        if self._history is not None:
            self._history.end(run)
        with self._lock:
            was_short = run in self._short
            self._short.discard(run)
        if was_short:
            self._g.reader.made_do()

    def _sample(self, run: EpochRun, position: int, check: PreparedCheck | None = None) -> Item:
        try:
            prepared = run.batch(position)
            if check is not None:
                check(prepared, position)
            n_bytes, tier = prepared.sampled.nbytes, None if self._on_device is None else self._on_device.tier
            split = None
            if tier is not None and prepared.plans is None:
                part, others = tier.split(prepared.sampled.input_ids.numpy(), self._g.pool.array)
                split = part, torch.from_numpy(others)
            return Item(prepared, n_bytes, split)
        except BudgetError as error:
            raise self._too_small(position, error) from None  # how many rows it would have had is unknown

    def _assemble(self, run: EpochRun, position: int, item: Item) -> MiniBatch:
        """Return a batch of what the host has of it: whole, unless a device has some of its rows."""
        sampled = item.prepared.sampled
        n_rows = len(sampled.input_ids)
        try:
            self._gather_edges(item)
            self._gather_features(run, item)
        except BudgetError as error:
            self.memory.saw(n_rows, item.n_bytes)
            raise self._too_small(position, error, n_rows) from None
        with self.watch.time("labels"):
            labels = {name: self._g.node_data[name][sampled.seeds] for name in self._setup.labels}
        batch = MiniBatch(sampled.seeds, sampled.input_ids, sampled.blocks, item.features, labels, sampled.index)
        batch.edge_features = item.edge_features
        if self._history is not None and sampled.history is not None:
            batch.history = BatchHistory(sampled.history, sampled.blocks[-1].n_src, self._history, run)
        self.memory.saw(n_rows, item.n_bytes)
        self._setup.counts.add(n_rows * len(self._setup.features), item.tally.rows, item.tally.hits_lost)
        return batch

    def _assemble_apart(self, run: EpochRun, position: int, item: Item) -> Assembled:
        """Assemble a batch that is to be transferred."""
        return Assembled(self._assemble(run, position, item), item.apart)

    def _gather_features(self, run: EpochRun, item: Item) -> None:
        """Gather what the batch lacks, and count seconds and reads, also where it fails: what was read was read."""
        begin, tally = time.perf_counter(), item.tally
        try:
            for name in self._setup.features:
                if name not in item.features:
                    item.features[name] = self._gather(run, name, item)
            run.passed(item.prepared.position)
        finally:
            self.watch.add("gather", time.perf_counter() - begin - tally.update_s)
            if tally.update_s:
                self.watch.add("update", tally.update_s)
            self._setup.reads.add(tally.read)
            tally.read, tally.update_s = ReadStats(), 0.0

    def _gather_edges(self, item: Item) -> None:
        """Gather the rows of the batch's edges, of all blocks of a feature at once; what was gathered is not gathered again."""
        setup, blocks, planned = self._setup, item.prepared.sampled.blocks, item.prepared.edges
        for name in setup.edge_features:
            if name not in item.edge_features:
                tally, store = Tally(), self._g.edge_features[name]
                try:
                    with self.watch.time("edges"):
                        if not item.edges:  # checked and joined once, however often memory is looked for
                            item.edges.append(
                                edge_numbers(blocks, len(store), self._g.pool.array) if planned is None else planned
                            )
                        item.edge_features[name] = gather_edges(store, blocks, self._g.pool, tally, item.edges[0])
                finally:
                    setup.edge_reads.add(tally.read)
        item.edges.clear()  # their memory may serve the features

    def _gather(self, run: EpochRun, name: str, item: Item) -> torch.Tensor:
        """Return the rows of a feature that the host assembles."""
        tally = item.tally
        plan, tiers = run.plan(name, item.prepared, tally)
        part, before = self._device_part(plan, item), tally.read.waited_s
        array = None if part is None else self._device_array(name)
        whole = None if part is None or array is None else array.memory_for(part)  # before anything has run
        ids = item.prepared.sampled.input_ids if plan is not None or item.split is None else item.split[1]
        rows: torch.Tensor = self._stores[name].gather(ids, plan, tiers, tally, **self._copying)
        if Tier.PACKED in tiers:
            self.watch.add("read", tally.read.waited_s - before)
        if part is not None and array is not None:
            item.apart[name] = Apart(array, part, rows, whole)
            tally.count(Tier.DEVICE, len(part.slots))
        return rows

    @staticmethod
    def _device_part(plan: BatchPlan | None, item: Item) -> DeviceRows | None:
        """Return what of a batch the device holds, by its plan, or as it was split without one."""
        if plan is not None:
            return plan.device
        return None if item.split is None else item.split[0]

    def _device_array(self, name: str) -> DeviceArray:
        tier = None if self._on_device is None else self._on_device.tier
        if tier is None:
            raise ClosedError("the plan names rows on the device, which holds none")
        return tier.arrays[name]

    def _too_small(self, position: int, error: BudgetError, n_rows: int = 0) -> BudgetError:
        holds, n_held = "the loop holds the one before it", self.memory.n_delivered
        if n_held > 1:
            holds = f"{n_held} earlier batches are held (let go of them, or keep copies of what is needed of them)"
        return self.memory.too_small(error, n_rows, before=f"batch {position} does not fit while {holds}: ")
