"""What a loader does with every batch, stage by stage, and what it counts on the way."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from featstore.config import Budget
from featstore.errors import BudgetError
from featstore.gather.buffers import block_bytes
from featstore.gather.device import Apart
from featstore.gather.executor import Tally
from featstore.gather.plan import Tier
from featstore.load.held import Held
from featstore.load.minibatch import MiniBatch
from featstore.load.transfer import Assembled, HandOver, host_rows
from featstore.storage.rowfile import ReadStats
from featstore.strategies.base import EpochRun, Prepared
from featstore.strategies.requests import BATCHES, guess, larger, least_total, would_do
from featstore.strategies.setup import Setup

__all__ = ["Stages"]


@dataclass(frozen=True)
class Item:
    """A batch between sampling and assembly, and the bytes of its sample.

    What was gathered for it stays with it while memory is found for the rest.
    """

    prepared: Prepared
    n_bytes: int
    held: Held | None
    features: dict[str, torch.Tensor] = field(default_factory=dict)
    apart: dict[str, Apart] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)


class Stages:
    """Sample batches, assemble them, hand them over. Thread-safe: several epochs may run at once.

    Parameters
    ----------
    setup : Setup
        The runner's.
    """

    def __init__(self, setup: Setup) -> None:
        self.watch = setup.watch
        self._g, self._setup, self._row_bytes = setup.graph, setup, setup.row_bytes
        self._share, self._limit = setup.share, setup.limit
        self._hand_over = HandOver(setup.device, self.watch)
        self._delivered: list[tuple[weakref.ref[MiniBatch], int]] = []
        self._n_running = 0
        if setup.device.type == "cuda":
            self._g.pool.page_lock(self._hand_over.device)
        self._lock = threading.Lock()
        self._trimmed_for = -1
        self._largest_bytes = 0
        self._largest_rows = setup.batches.most_rows or 0
        self._g.budget.require(self)
        if setup.needs is not None:
            setup.needs.worker = self

    def receive(self, batch: MiniBatch) -> None:
        """Take note of a batch, in the loop's thread, before the loop has it."""
        self._hand_over.receive(batch)
        with self._lock:
            self._delivered = [*self._living(), (weakref.ref(batch), batch.nbytes)]

    def _living(self) -> list[tuple[weakref.ref[MiniBatch], int]]:
        """Return the batches that somebody still holds; the lock is held."""
        return [(each, n_bytes) for each, n_bytes in self._delivered if each() is not None]

    def required(self, *, idle: bool) -> int:
        """Return what batches take at the least: those of a running epoch, else those that are still held; see Budget.require."""
        with self._lock:
            held = sum(n_bytes for _, n_bytes in self._living()) * 9 // 8
            rows, n_bytes = self._largest_rows, self._largest_bytes
        if not idle and not self._n_running:
            return held
        needs, ahead = self._setup.needs, max(0, self._setup.prefetch - 1)
        if needs is not None:
            rows = larger(max(rows, needs.batch.n_rows))
            return max(held, needs.loop_bytes(rows) + ahead * needs.batch_bytes(rows))
        return max(held, (2 + ahead) * self._batch_bytes(larger(rows), n_bytes))

    def _batch_bytes(self, n_rows: int, n_bytes: int) -> int:
        """Return the bytes of a batch of ``n_rows`` with its sample of ``n_bytes``, and an eighth for what lies beside."""
        return (n_bytes + sum(block_bytes(n_rows * width) for width in self._row_bytes.values())) * 9 // 8

    def begin(self) -> None:
        """Hear that an epoch begins."""
        with self._lock:
            self._n_running += 1

    def end(self) -> None:
        """Hear that an epoch is over."""
        with self._lock:
            self._n_running -= 1

    def of(
        self, run: EpochRun
    ) -> tuple[Callable[[int], Item], Callable[[int, Item], Any], Callable[[int, Any], MiniBatch] | None]:
        """Return an epoch's stages for a :class:`Pipeline`; the last is None where a batch is whole once it is assembled."""
        if self._setup.device.type == "cpu" and not run.devices:
            return partial(self._sample, run), partial(self._assemble_whole, run), None
        return partial(self._sample, run), partial(self._assemble, run), self._hand_over

    def spare(self, run: EpochRun) -> bool:
        """Give back memory as :meth:`EpochRun.spare` does; first, once a batch, what nobody uses now."""
        with self._lock:
            n_batches = self._setup.counts.n_batches
            trimmed, self._trimmed_for = self._trimmed_for == n_batches, n_batches
        if trimmed:
            return run.spare()
        before = self._g.budget.used
        for idle in (self._setup.batches, self._g.pool, self._g.reader):
            trim = getattr(idle, "trim", None)
            if trim is not None:
                trim()
        return self._g.budget.used < before or run.spare()

    def _sample(self, run: EpochRun, position: int) -> Item:
        try:
            prepared = run.batch(position)
            n_bytes = prepared.sampled.nbytes
            return Item(prepared, n_bytes, None if self._share is None else Held(self._share, n_bytes))
        except BudgetError as error:
            # How many rows it would have had is unknown: as many as the largest batch so far.
            rows = self._largest_rows
            needed = error.needed
            if needed is not None and rows:
                needed = max(needed, self._needed(rows, self._largest_bytes, self._g.budget))
            elif needed is not None and self._setup.needs is None and self._setup.batches.most_rows is None:
                needed = max(needed, guess(self._setup, sum(self._row_bytes.values())))
            elif needed is not None:
                needed = max(needed, self._by_needs(0, needed))
            raise self._too_small(position, error, needed) from None

    def _assemble(self, run: EpochRun, position: int, item: Item) -> Assembled:
        sampled, plans = item.prepared.sampled, item.prepared.plans or {}
        n_rows = len(sampled.input_ids)
        sizes = {name: host_rows(n_rows, plans.get(name), self._setup.device) * width for name, width in self._row_bytes.items()}
        n_bytes = sum(sizes.values())
        budget = self._limit
        try:
            if item.held is not None:
                item.held.resize(item.n_bytes + n_bytes)
            budget = self._g.budget
            self._gather_features(run, item)
        except BudgetError as error:
            raise self._too_small(position, error, max(self._needed(n_rows, item.n_bytes, budget), error.needed or 0)) from None
        with self.watch.time("labels"):
            y = None if self._setup.labels is None else self._g.node_data[self._setup.labels][sampled.seeds]
        batch = MiniBatch(sampled.seeds, sampled.input_ids, sampled.blocks, item.features, y, sampled.index, item.held)
        with self._lock:
            if n_rows > self._largest_rows:
                self._largest_rows, self._largest_bytes = n_rows, item.n_bytes
        self._setup.counts.add(n_rows * len(self._setup.features), item.tally.rows)
        return Assembled(batch, item.apart, item.n_bytes + n_rows * sum(self._row_bytes.values()), item.held)

    def _assemble_whole(self, run: EpochRun, position: int, item: Item) -> MiniBatch:
        """Assemble a batch that needs no handing over."""
        return self._assemble(run, position, item).batch

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

    def _gather(self, run: EpochRun, name: str, item: Item) -> torch.Tensor:
        """Return the rows of a feature that the host assembles."""
        tally = item.tally
        plan, tiers = run.plan(name, item.prepared, tally)
        part, before = None if plan is None else plan.device, tally.read.waited_s
        whole = None if part is None else run.devices[name].memory_for(part)  # before anything has run
        rows: torch.Tensor = self._g.features[name].gather(item.prepared.sampled.input_ids, plan, tiers, tally)
        if Tier.PACKED in tiers:
            self.watch.add("read", tally.read.waited_s - before)
        if part is not None:
            item.apart[name] = Apart(run.devices[name], part, rows, whole)
            tally.count(Tier.DEVICE, len(part.slots))
        return rows

    def _needed(self, n_rows: int, n_bytes: int, budget: Budget) -> int:
        """Return the least budget for the batch that the loop holds and the next one, both as large as the largest known."""
        rows = larger(max(n_rows, self._largest_rows))
        batches = 2 * self._batch_bytes(rows, n_bytes * rows // max(1, n_rows))
        if budget is not self._g.budget:
            return budget.used - budget.report().get(BATCHES, 0) + batches
        return self._by_needs(n_rows, least_total(self._g, batches, self))

    def _by_needs(self, n_rows: int, otherwise: int) -> int:
        """Return the least memory for batches of up to ``n_rows``, where it is known what all stages need."""
        needs = self._setup.needs
        return otherwise if needs is None else max(otherwise, needs.least(n_rows))

    def _too_small(self, position: int, error: BudgetError, needed: int | None) -> BudgetError:
        reason = error.message.split("; at least")[0]  # that least is for one allocation, not for the batch
        least = "" if needed is None else would_do(needed)
        with self._lock:
            n_held = len(self._living())
        holds = "the loop holds the one before it"
        if n_held > 1:
            holds = f"{n_held} earlier batches are held (let go of them, or keep copies of what is needed of them)"
        return BudgetError(f"batch {position} does not fit while {holds}: {reason}{least}", needed)
