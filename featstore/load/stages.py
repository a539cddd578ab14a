"""The stages of a batch in a loader, with their counts and seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.errors import BudgetError, ClosedError, PluginError
from featstore.gather.counters import GatherCounts, Overlap
from featstore.gather.device import Apart, DeviceArray, available_bytes
from featstore.gather.plan import EdgePlan, Tier
from featstore.load.disjoint import Places, batch_nodes, places_of, room_for
from featstore.load.edges import gather_edges
from featstore.load.heterobatch import typed_batch
from featstore.load.history import BatchHistory, History
from featstore.load.minibatch import LoadedBatch, MiniBatch
from featstore.load.seedlabels import SeedLabels
from featstore.load.transfer import Assembled, Transfer
from featstore.sampling.batch import Block
from featstore.sampling.batches import EpochSeeds
from featstore.sampling.edgenumbers import blocks_of, edge_numbers, edge_type_of
from featstore.sampling.sampledbatches import Drawn
from featstore.storage.rowfile import ReadStats
from featstore.strategies.base import Batch, EpochRun
from featstore.strategies.context import Context
from featstore.strategies.memory import Memory
from featstore.topology.noderows import NodeRows
from featstore.topology.types import EdgeKey, NodeType, Types

__all__ = ["Stages"]


class Stages:
    """Sample, assemble and transfer batches. Thread-safe: several epochs may run at once.

    Parameters
    ----------
    context : Context
    memory : Memory
        The runner's.
    labels : SeedLabels
    history : History, optional
    types : Types, optional
        Of a graph of several types, whose batches have ids within them.
    kind : NodeType, optional
        The type of the seeds, then.
    """

    def __init__(
        self,
        context: Context,
        memory: Memory,
        labels: SeedLabels,
        history: History | None = None,
        types: Types | None = None,
        kind: NodeType | None = None,
    ) -> None:
        self._labels, self._history = labels, history
        self._types, self._kind = types, kind
        self.timer, self.memory, self.overlap = context.timer, memory, Overlap()
        self._g, self._context = context.graph, context
        self._stores = context.nodes.stores
        self._on_device = context.on_device
        # None: a batch is complete once it is assembled.
        is_whole = context.device.type == "cpu" and self._on_device is None
        self._transfer = None if is_whole else Transfer(context.device, self.timer)
        # Passed to stores only if the loader's number of copying threads differs from the graph's.
        own = context.copy_threads != context.graph.options.threads
        self._copying: dict[str, Any] = {"threads": context.copy_threads} if own else {}
        self._lock = threading.RLock()  # the collector may end an earlier epoch in a thread that holds it
        self._trimmed_for = -1
        self._short: set[EpochRun] = set()  # epochs that make do with one queue of reads
        self._orders: dict[EpochRun, EpochSeeds | None] = {}  # the seeds of running epochs, as they were given
        self._g.budget.require(memory)

    def receive(self, batch: LoadedBatch) -> None:
        """Note, in the loop's thread, that a batch is about to be delivered."""
        if self._transfer is not None:
            self._transfer.receive(batch)
        self.memory.delivered(batch)
        if self._history is not None and batch.history is not None:
            self._history.deliver(batch.history)

    def begin(self, run: EpochRun, epoch: int) -> None:
        """Note that ``run`` begins, which is of this epoch."""
        self.memory.begin()
        self._orders[run] = self._labels.order(epoch)
        if self._history is not None:
            self._history.begin(run)

    def check_step(self) -> None:
        """Raise ValueError, in the loop's thread, if the loop did not merge the last batch into the history."""
        if self._history is not None:
            self._history.check_merged()

    def step_done(self) -> None:
        """Note, in the loop's thread, that the loop has done a step with a batch."""
        if self._on_device is not None:
            self._on_device.step_done(self._context)

    def of(
        self, run: EpochRun, check: Callable[[Any, int], None] | None = None
    ) -> tuple[Callable[[int], Batch], Callable[[int, Batch], Any], Callable[[int, Any], Any] | None]:
        """Return an epoch's stages for a :class:`Pipeline`; the last is None if a batch is complete once it is assembled.

        ``check(batch, position)`` is called for every batch that the strategy prepares.
        """
        sample = self._for_device(partial(self._sample, check=check), run)
        assemble = self._for_device(self._assemble, run)
        if self._transfer is None:
            return sample, lambda position, batch: assemble(position, batch).batch, None
        return sample, assemble, self._transfer

    def _for_device(self, stage: Callable[..., Any], run: EpochRun) -> Callable[..., Any]:
        """Bind a stage to an epoch; for a CUDA device, its memory comes from pinned buffers."""
        pool, device = self._g.pool, self._context.device

        def stage_of(*given: Any) -> Any:
            with pool.copied_to(device):
                return stage(run, *given)

        return stage_of if device.type == "cuda" else partial(stage, run)

    def may_grow(self) -> bool:
        """Return whether there is free memory for one more batch ahead and three for other loops, without taking loans back.

        On a CUDA device, where batches wait for the loop, the device must have that memory, too.
        """
        needed = 4 * self.memory.batch_bytes(self.memory.batch.n_rows)
        if self.memory.unused() < needed or self._g.budget.available < needed:
            return False
        on_device = available_bytes(self._context.device)
        return on_device is None or on_device >= needed

    def releasing(self) -> AbstractContextManager[None]:
        """Make the context in which reservations take no costly loans back."""
        return self._g.budget.sparing()

    def release(self, run: EpochRun) -> bool:
        """Give back idle memory, once a batch; if there is none, memory of :meth:`EpochRun.release`.

        Returns whether memory may have come free.
        """
        with self._lock:
            n_batches = self._context.counts.n_batches
            trimmed, self._trimmed_for = self._trimmed_for == n_batches, n_batches
            first = run not in self._short
            self._short.add(run)
        if trimmed and not first:
            return run.release()
        before = self._g.budget.used
        if first:  # reads of other loops hold memory, and on a busy machine they take long
            self._g.reader.make_do()
        for idle in (self._context.batches, self._g.pool, self._g.reader):
            idle.trim()
        return self._g.budget.used < before or run.release()

    def over(self, run: EpochRun) -> None:
        """Note that an epoch is over; if it made do with one queue of reads, further queues may be made again."""
        self.memory.end()
        self._orders.pop(run, None)
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
            own = self._g.own_part
            if own is not None:  # a sampler of another package may go anywhere
                own.check(batch.sampled.input_ids.numpy())
            tiers = self._context.tiers if batch.plans is None else ()
            for part, tier in zip(self._context.nodes.each, tiers, strict=bool(tiers)):
                if tier is not None and tier.map is not None:  # without a map plans alone name its slots
                    held, others = tier.split(batch.rows_of(part.rows, self._g.pool), self._g.pool.array)
                    batch.split[part.rows] = held, torch.from_numpy(others)
            return batch
        except BudgetError as error:
            raise self._too_small(position, error) from None  # the number of rows is unknown

    def _assemble(self, run: EpochRun, position: int, batch: Batch) -> Assembled:
        """Assemble the host's part of a batch: the whole batch, if there is no stage after it."""
        sampled, counts = batch.sampled, batch.counts
        n_rows = self.memory.rows_like(sampled)
        try:
            self._gather_edges(batch)
            self._gather_features(run, batch)
            features, places = self._delivered(batch)
            with self.timer.time("labels"):
                of_seeds = self._labels.of(sampled, self._orders.get(run))
            made = self._made(run, batch, features, *of_seeds)
            run.passed(batch.position)  # last: once a batch has passed, it may not ask for memory again
        except BudgetError as error:
            self.memory.saw(n_rows, sampled.nbytes)
            raise self._too_small(position, error, n_rows) from None
        self.memory.saw(n_rows, sampled.nbytes)
        self._context.counts.add(sum(counts.rows.values()), counts.rows, counts.hits_lost)
        return Assembled(made, batch.apart, places)

    def _made(
        self,
        run: EpochRun,
        batch: Batch,
        features: dict[str, torch.Tensor],
        labels: dict[str, torch.Tensor],
        number: torch.Tensor,
        positions: torch.Tensor | None,
    ) -> LoadedBatch:
        """Make the batch that the loop gets."""
        sampled, pool = batch.sampled, self._g.pool
        if self._types is not None and self._kind is not None:
            return typed_batch(self._types, self._kind, self._context.nodes, batch, features, pool, labels, number, positions)
        nodes = batch_nodes(sampled, pool)
        seeds = nodes[: sampled.n_seeds]
        of_nodes = None if sampled.copies is None else sampled.copies.batch
        of_edges = batch.edge_features
        made = MiniBatch(
            seeds, nodes, sampled.blocks, features, labels, sampled.index, number, positions, of_edges, batch=of_nodes
        )
        if self._history is not None and sampled.history is not None:
            made.history = BatchHistory(sampled.history, sampled.blocks[-1].n_src, self._history, run)
        return made

    def _delivered(self, batch: Batch) -> tuple[dict[str, torch.Tensor], dict[str, Places]]:
        """Make the rows that the loop gets from the gathered ones, or find the places where the transfer gets them."""
        copies = batch.sampled.copies
        if copies is None:
            return batch.features, {}
        pool, nodes, on_host = self._g.pool, self._context.nodes, self._context.device.type == "cpu"
        at: dict[NodeRows, torch.Tensor] = {}
        places: dict[str, Places] = {}
        for name, gathered in batch.features.items():
            rows = nodes.rows_of(name)
            if rows not in at:
                at[rows] = places_of(rows, batch.sampled, copies, pool)
            places[name] = Places(at[rows], room_for(gathered, at[rows], pool) if on_host else None)
        if self._transfer is not None:
            return batch.features, places
        with self.timer.time("gather"):
            return {name: places[name].of(rows, self._context.copy_threads) for name, rows in batch.features.items()}, {}

    def _gather_features(self, run: EpochRun, batch: Batch) -> None:
        """Gather the features that the batch still lacks; count the seconds and reads, also of a gather that fails."""
        begin, counts = time.perf_counter(), batch.counts
        try:
            for name in self._context.features:
                if name not in batch.features:
                    batch.features[name] = self._gather(run, name, batch)
        finally:
            self.timer.add("gather", time.perf_counter() - begin - counts.update_s)
            if counts.update_s:
                self.timer.add("update", counts.update_s)
            self._context.nodes.reads.add(counts.read)
            counts.read, counts.update_s = ReadStats(), 0.0

    def _gather_edges(self, batch: Batch) -> None:
        """Gather the edge features that the batch still lacks, each for all blocks at once."""
        context, types = self._context, self._types
        of_types: dict[EdgeKey | None, tuple[Block, ...]] = {None: batch.sampled.blocks}
        for name, store in context.edges.stores.items():
            if name not in batch.edge_features:
                counts, kind = GatherCounts(), None if types is None else edge_type_of(types, name).key
                if types is not None and kind not in of_types:  # the blocks of the type alone, and the numbers within it
                    of_types[kind] = blocks_of(types, name, batch.sampled.blocks)
                blocks = of_types[kind]
                try:
                    with self.timer.time("edges"):
                        plan_or_ids: EdgePlan | npt.NDArray[np.int64] | None = batch.edge_plans.get(name)
                        if plan_or_ids is None:  # checked and joined once, even if the gather is repeated for lack of memory
                            if kind not in batch.edge_numbers:
                                batch.edge_numbers[kind] = self._numbers(blocks, len(store))
                            plan_or_ids = batch.edge_numbers[kind]
                        batch.edge_features[name] = gather_edges(store, blocks, self._g.pool, counts, plan_or_ids)
                finally:
                    context.edges.reads.add(counts.read)
        batch.edge_plans, batch.edge_numbers = {}, {}  # frees their memory for the features

    def _numbers(self, blocks: tuple[Block, ...], n_edges: int) -> npt.NDArray[np.int64]:
        """Collect the numbers of a batch's edges; the PluginError names the sampler."""
        try:
            return edge_numbers(blocks, n_edges, self._g.pool.array)
        except PluginError as error:
            drawn = self._context.batches
            raise PluginError(f"sampler {drawn.sampler.label!r}: {error}" if isinstance(drawn, Drawn) else str(error)) from None

    def _gather(self, run: EpochRun, name: str, batch: Batch) -> torch.Tensor:
        """Gather the rows of a feature that the host assembles; the batch gets the device's part of the feature."""
        counts = batch.counts
        plan, tiers = run.plan(name, batch)
        # The rows of the batch that the device holds: from the plan, or, without a plan, from the split.
        of = self._context.nodes.rows_of(name)
        split = batch.split.get(of) if plan is None else None
        part = plan.device if plan is not None else None if split is None else split[0]
        array, before = None if part is None else self._device_array(name), counts.read.waited_s
        whole = None if part is None or array is None else array.memory_for(part)  # before the plan runs: it runs once
        ids = torch.from_numpy(batch.rows_of(of, self._g.pool)) if split is None else split[1]
        rows: torch.Tensor = self._stores[name].gather(ids, plan, tiers, counts, **self._copying)
        if Tier.PACKED in tiers:
            self.timer.add("read", counts.read.waited_s - before)
        if part is not None and array is not None:
            batch.apart[name] = Apart(array, part, rows, whole)
            counts.count(Tier.DEVICE, len(part.slots))
        return rows

    def _device_array(self, name: str) -> DeviceArray:
        tier = None if self._on_device is None else self._on_device.of(name)
        if tier is None:
            raise ClosedError("the plan names rows on the device, which holds none")
        return tier.arrays[name]

    def _too_small(self, position: int, error: BudgetError, n_rows: int = 0) -> BudgetError:
        holds, n_held = "the loop holds the one before it", self.memory.n_delivered
        if n_held > 1:
            holds = f"{n_held} earlier batches are held (let go of them, or keep copies of what is needed of them)"
        return self.memory.too_small(error, n_rows, before=f"batch {position} does not fit while {holds}: ")
