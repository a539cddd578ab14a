"""The stages of a batch in a loader, and what each of them counts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from featstore.errors import BudgetError, ClosedError
from featstore.gather.counters import Overlap
from featstore.gather.device import Apart, DeviceArray, spare_bytes
from featstore.gather.executor import Tally
from featstore.gather.plan import Tier
from featstore.load.edges import gather_edges
from featstore.load.history import BatchHistory, History
from featstore.load.minibatch import MiniBatch
from featstore.load.transfer import Transfer
from featstore.sampling.edgenumbers import edge_numbers
from featstore.storage.rowfile import ReadStats
from featstore.strategies.base import Batch, EpochRun
from featstore.strategies.context import Context
from featstore.strategies.memory import Memory

__all__ = ["Stages"]


class Stages:
    """Sample batches, assemble them, transfer them. Thread-safe: several epochs may run at once.

    Parameters
    ----------
    context : Context
    memory : Memory
        The runner's.
    history : History, optional
    """

    def __init__(self, context: Context, memory: Memory, history: History | None = None) -> None:
        self._history = history
        self.watch, self.memory, self.overlap = context.watch, memory, Overlap()
        self._g, self._context = context.graph, context
        self._stores = context.nodes.stores
        self._on_device = context.on_device
        # None: a batch is whole once it is assembled.
        is_whole = context.device.type == "cpu" and self._on_device is None
        self._transfer = None if is_whole else Transfer(context.device, self.watch)
        # A stage of its own has threads of its own; otherwise the store's are meant.
        own = context.copy_threads != context.graph.options.threads
        self._copying: dict[str, Any] = {"threads": context.copy_threads} if own else {}
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
            self._on_device.step_done(self._context)

    def of(
        self, run: EpochRun, check: Callable[[Any, int], None] | None = None
    ) -> tuple[Callable[[int], Batch], Callable[[int, Batch], Any], Callable[[int, Any], MiniBatch] | None]:
        """Return an epoch's stages for a :class:`Pipeline`; the last is None where a batch is whole once it is assembled.

        ``check`` hears of every batch that the strategy prepares.
        """
        sample = self._for_device(partial(self._sample, check=check), run)
        assemble = self._for_device(self._assemble, run)
        last: Callable[..., MiniBatch] = self._transfer or assemble
        return (sample, last, None) if self._transfer is None else (sample, self._for_device(self._assemble_apart, run), last)

    def _for_device(self, stage: Callable[..., Any], run: EpochRun) -> Callable[..., Any]:
        """Return a stage of an epoch whose memory is for the device that batches are delivered on."""
        pool, device = self._g.pool, self._context.device

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
        on_device = spare_bytes(self._context.device)
        return on_device is None or on_device >= needed

    def sparing(self) -> AbstractContextManager[None]:
        """Take no memory on loan that is dear to its holder."""
        return self._g.budget.sparing()

    def spare(self, run: EpochRun) -> bool:
        """Give back memory as :meth:`EpochRun.spare` does; first, once a batch, what nobody uses now."""
        with self._lock:
            n_batches = self._context.counts.n_batches
            trimmed, self._trimmed_for = self._trimmed_for == n_batches, n_batches
            first = run not in self._short
            self._short.add(run)
        if trimmed and not first:
            return run.spare()
        before = self._g.budget.used
        if first:  # reads of other loops may hold memory that a busy machine takes long to give back
            self._g.reader.make_do()
        for idle in (self._context.batches, self._g.pool, self._g.reader):
            idle.trim()
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

    def _sample(self, run: EpochRun, position: int, check: Callable[[Any, int], None] | None = None) -> Batch:
        try:
            batch = run.batch(position)
            if check is not None:
                check(batch, position)
            tier = None if self._on_device is None else self._on_device.tier
            if tier is not None and batch.plans is None:
                part, others = tier.split(batch.sampled.input_ids.numpy(), self._g.pool.array)
                batch.split = part, torch.from_numpy(others)
            return batch
        except BudgetError as error:
            raise self._too_small(position, error) from None  # how many rows it would have had is unknown

    def _assemble(self, run: EpochRun, position: int, batch: Batch) -> MiniBatch:
        """Return a batch of what the host has of it: whole, unless a device has some of its rows."""
        sampled, tally = batch.sampled, batch.tally
        n_rows = len(sampled.input_ids)
        try:
            self._gather_edges(batch)
            self._gather_features(run, batch)
        except BudgetError as error:
            self.memory.saw(n_rows, sampled.nbytes)
            raise self._too_small(position, error, n_rows) from None
        with self.watch.time("labels"):
            labels = {name: self._g.node_data[name][sampled.seeds] for name in self._context.labels}
        made = MiniBatch(sampled.seeds, sampled.input_ids, sampled.blocks, batch.features, labels, sampled.index)
        made.edge_features = batch.edge_features
        if self._history is not None and sampled.history is not None:
            made.history = BatchHistory(sampled.history, sampled.blocks[-1].n_src, self._history, run)
        self.memory.saw(n_rows, sampled.nbytes)
        self._context.counts.add(n_rows * len(self._context.features), tally.rows, tally.hits_lost)
        return made

    def _assemble_apart(self, run: EpochRun, position: int, batch: Batch) -> tuple[MiniBatch, Mapping[str, Apart]]:
        """Assemble a batch that is to be transferred."""
        return self._assemble(run, position, batch), batch.apart

    def _gather_features(self, run: EpochRun, batch: Batch) -> None:
        """Gather what the batch lacks, and count seconds and reads, also where it fails: what was read was read."""
        begin, tally = time.perf_counter(), batch.tally
        try:
            for name in self._context.features:
                if name not in batch.features:
                    batch.features[name] = self._gather(run, name, batch)
            run.passed(batch.position)
        finally:
            self.watch.add("gather", time.perf_counter() - begin - tally.update_s)
            if tally.update_s:
                self.watch.add("update", tally.update_s)
            self._context.nodes.reads.add(tally.read)
            tally.read, tally.update_s = ReadStats(), 0.0

    def _gather_edges(self, batch: Batch) -> None:
        """Gather the rows of the batch's edges, of all blocks of a feature at once; what was gathered is not gathered again."""
        context, blocks = self._context, batch.sampled.blocks
        for name, store in context.edges.stores.items():
            if name not in batch.edge_features:
                tally = Tally()
                try:
                    with self.watch.time("edges"):
                        if batch.edges is None:  # checked and joined once, however often memory is looked for
                            batch.edges = edge_numbers(blocks, len(store), self._g.pool.array)
                        batch.edge_features[name] = gather_edges(store, blocks, self._g.pool, tally, batch.edges)
                finally:
                    context.edges.reads.add(tally.read)
        batch.edges = None  # its memory may serve the features

    def _gather(self, run: EpochRun, name: str, batch: Batch) -> torch.Tensor:
        """Return the rows of a feature that the host assembles."""
        tally = batch.tally
        plan, tiers = run.plan(name, batch)
        # What of the batch the device holds, by its plan, or as it was split without one.
        part = plan.device if plan is not None else None if batch.split is None else batch.split[0]
        array, before = None if part is None else self._device_array(name), tally.read.waited_s
        whole = None if part is None or array is None else array.memory_for(part)  # before anything has run
        ids = batch.sampled.input_ids if plan is not None or batch.split is None else batch.split[1]
        rows: torch.Tensor = self._stores[name].gather(ids, plan, tiers, tally, **self._copying)
        if Tier.PACKED in tiers:
            self.watch.add("read", tally.read.waited_s - before)
        if part is not None and array is not None:
            batch.apart[name] = Apart(array, part, rows, whole)
            tally.count(Tier.DEVICE, len(part.slots))
        return rows

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
