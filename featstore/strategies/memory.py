"""The memory of a loader: what its batches take, and the fraction of the rest that each automatic size gets.

A batch is measured (:mod:`featstore.estimate.batchsize`); room for two of them is left free. Of the rest what an epoch holds
beside batches gets its fraction, or as much of it as is of use; caches that size themselves get what is left then. Nothing is
reserved here: whoever allocates reserves, and takes back first what is on loan.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from featstore.budget import MemoryReport
from featstore.config import format_size
from featstore.errors import BudgetError
from featstore.estimate.batchsize import REUSE, BatchSize, larger, measure, most_of, pooled_bytes
from featstore.gather.buffers import HOLDER
from featstore.sampling.macrolists import HOLDER as LISTS
from featstore.strategies.context import Context

__all__ = [
    "AHEAD",
    "EDGE_PLANNER",
    "FRACTIONS",
    "PACKING",
    "PLANNER",
    "SAMPLED_AHEAD",
    "WINDOWS",
    "Memory",
    "ask",
]

# Holders, as the budget's report calls them.
SAMPLED_AHEAD, PLANNER, EDGE_PLANNER = "epoch samples", "planner", "planner of edges"
AHEAD, WINDOWS, PACKING = "read ahead", "extents read ahead", "packing"

# Of the memory that batches leave, at most; planners have superbatches that fit what they get, so they may have all of it.
FRACTIONS = {
    SAMPLED_AHEAD: 1 / 4,  # what is drawn for many batches at once goes to disk beyond it
    WINDOWS: 1 / 12,
    PACKING: 1 / 3,
    PLANNER: 1.0,
    AHEAD: 1 / 12,
    EDGE_PLANNER: 1.0,
    LISTS: 1 / 8,
}
NEIGHBORS = "neighbor cache"
PLAN_ARRAYS = 8  # of 8 bytes a row: a batch's plan for the host cache, or one of its edges
SPLIT_ARRAYS = 4  # which rows of a batch the device has, and where
LARGEST = 4 / 3  # of the batches to come, by the one that was measured, for a number in an error


Needs: TypeAlias = "Mapping[str, tuple[int, int]]"


def ask(
    context: Context, needs: Callable[[BatchSize], Needs] | Needs | None = None, caches: int = 0, *, plans: bool = False
) -> tuple[Context, Memory]:
    """Measure the loader's first batch, unless it was, and return what the loader needs.

    Parameters
    ----------
    context : Context
    needs : mapping of str to (int, int), or callable (batch) -> mapping, optional
        What an epoch holds where batches are like ``batch``: by holder the bytes without which it cannot run, and those beyond
        which more does nothing.
    caches : int
        Bytes of the caches whose size was given.
    plans : bool
        Batches come with plans from a file, and others are sampled meanwhile.

    Returns
    -------
    context : Context
        Knows how large batches are; the one that was sampled for that need not be sampled again.
    memory : Memory

    Raises
    ------
    BudgetError
        There is no memory to sample a batch; names what suffices for two of the largest that there could be.
    """
    lists = context.batches.lists
    if lists is not None:
        lists.use(0)  # what they had is divided anew
    if context.batch is not None:
        context.graph.pool.trim()
        return context, Memory(context, needs, caches, plans=plans)
    try:
        context = replace(context, batch=measure(context.graph, context.batches))
    except BudgetError as error:
        most = replace(context, batch=most_of(context.graph, context.batches))
        raise Memory(most, needs, caches, plans=plans).too_small(error) from None
    return context, Memory(context, needs, caches, plans=plans)


class Memory:
    """What a loader's batches need, and what of the budget they leave to whom. Thread-safe.

    Parameters
    ----------
    context : Context
    needs, caches, plans
        See :func:`ask`.

    Attributes
    ----------
    batch : BatchSize
        The largest batch that is known.
    granted, leasts : dict of str to int
        Bytes by holder, once :meth:`divide` was called: what it gets, and what an epoch cannot run without.
    tables : int
        Bytes that checksums take of files which an epoch opens, and which are reserved then.
    """

    def __init__(
        self,
        context: Context,
        needs: Callable[[BatchSize], Needs] | Needs | None = None,
        caches: int = 0,
        *,
        plans: bool = False,
    ) -> None:
        self._budget = context.graph.budget
        self._graph, self._sampling, self._freed = context.graph, context.batches, context.chosen.freed
        self._row_bytes, self._edge_row_bytes = context.nodes.row_bytes, context.edges.row_bytes
        self._threads, self._ahead = context.threads, max(0, context.prefetch - 1)
        self._has_tier, self._device_on_host = context.on_device is not None, context.device.type == "cpu"
        self._plans, self._caches = plans, caches
        self.batch = context.batch or BatchSize(0)
        self.granted: dict[str, int] = {}
        self.tables = 0
        self.needs = dict(needs(self.batch) if callable(needs) else needs or {})
        if (ahead := context.batches.ahead_bytes()) != (0, 0):  # a sampler that draws many batches at once
            self.needs = {SAMPLED_AHEAD: ahead, **self.needs}
        self.leasts = {holder: least for holder, (least, _) in self.needs.items()}
        self._fixed = self._fixed_now()  # from here on the loader's own parts come on top, as they are reserved
        self._lock = threading.Lock()
        self._delivered: list[tuple[weakref.ref[Any], int]] = []
        self._n_running = 0
        self._closed = False

    # What batches take.

    def batch_bytes(self, n_rows: int) -> int:
        """Count the bytes that a batch of ``n_rows`` holds while the loop has it."""
        rows = sum(max(n_rows * width, pooled_bytes(n_rows * width)) for width in self._row_bytes.values())
        n_edges = self.batch.of(n_rows).n_edges
        rows += sum(max(n_edges * width, pooled_bytes(n_edges * width)) for width in self._edge_row_bytes.values())
        return self.batch.of(n_rows).sample_bytes * REUSE // (REUSE - 1) + rows

    def _beside(self, n_rows: int) -> int:
        """Count a batch's bytes until it is delivered, beside what the loop gets: plans, and its rows on the device."""
        batch, n_bytes = self.batch.of(n_rows), 0
        if self._plans:
            n_bytes += PLAN_ARRAYS * pooled_bytes(8 * n_rows) + batch.sample_bytes  # a sample that waits to be written
        if EDGE_PLANNER in self.needs:
            n_bytes += PLAN_ARRAYS * pooled_bytes(8 * batch.n_edges) + max(self._edge_row_bytes.values()) * batch.n_edges
        if self._has_tier:
            n_bytes += SPLIT_ARRAYS * pooled_bytes(8 * n_rows)
            n_bytes += sum(self._row_bytes.values()) * n_rows * self._device_on_host
        return n_bytes

    def loop_bytes(self, n_rows: int) -> int:
        """Count the bytes of the loop's batch and of the next one, being made."""
        one = self.batch_bytes(n_rows)
        return max(2 * one + self._beside(n_rows), one + self.batch.of(n_rows).sampling_bytes)

    @property
    def _loop(self) -> int:
        return self.loop_bytes(larger(self.batch.n_rows))

    @property
    def _one_more(self) -> int:
        """What one more batch takes where plans are run, as two are alive while the loop goes from one to the next."""
        return self.batch_bytes(larger(self.batch.n_rows)) if self._plans else 0

    @property
    def _sampler_bytes(self) -> int:
        """What a thread takes that samples beside others."""
        batch = self.batch.of(larger(self.batch.n_rows))
        return batch.sampling_bytes + batch.scratch_bytes

    # What is left.

    def _held_of(self, report: MemoryReport) -> int:
        """Return the bytes held, but for those of batches, and for what the reader holds, which grows with the memory."""
        held = sum(n_bytes for holder, n_bytes in report.items() if holder != HOLDER)
        return held - self._graph.reader.held_bytes - self._freed

    def _fixed_now(self) -> int:
        """Return those of them that are not on loan."""
        report = self._budget.report()
        on_loan = sum(each.on_loan_bytes for holder, each in report.holders.items() if holder != HOLDER)
        return max(0, self._held_of(report) - on_loan)

    def _others(self, *, idle: bool) -> int:
        """Count the bytes that other loaders' batches need, see :meth:`Budget.required`."""
        return self._budget.required(self, idle=idle)

    def unused(self, returned: int = 0) -> int:
        """Return the bytes that may still be taken beside batches, and without loans; ``returned`` of them are given back."""
        held = self._held_of(self._budget.report()) - returned + self._graph.reader.least_bytes(self._budget.total) + self.tables
        return max(0, self._budget.total - held - self._loop - self._others(idle=True))

    def divide(self, spare: int = 0) -> None:
        """Divide what batches and caches of a given size leave: to each holder its fraction, or what is of use.

        ``spare`` bytes are left for caches that size themselves, but of what samples take that are drawn ahead.

        Raises
        ------
        BudgetError
            The batch that was measured would not fit beside another one like it.
        """
        lists = self._sampling.lists
        if not self.suffices:
            raise self._refusal()
        whole = left = self._to_divide()
        for holder, (least, useful) in self.needs.items():
            free = left if holder == SAMPLED_AHEAD else max(0, left - spare)
            self.granted[holder] = max(least, min(useful, least + min(free, int(whole * FRACTIONS[holder]))))
            left -= self.granted[holder] - least
        if lists is not None:
            lists.use(max(0, min(left - spare, lists.useful_bytes, int(whole * FRACTIONS[LISTS]))))

    def _to_divide(self) -> int:
        """Return the bytes that batches leave, beside what an epoch cannot run without."""
        left = max(0, self.unused() - self._caches - sum(self.leasts.values()))
        lists_held = self._budget.report().holders.get(NEIGHBORS)
        # Another batch would wait where there is no memory, but not while neighbour lists are on loan: it would have those.
        most = left if lists_held is not None and lists_held.on_loan_bytes else left // 2
        return left - min(most, self._one_more)

    @property
    def sampled_ahead(self) -> int:
        """Bytes that a sampler which draws many batches at once will be granted, before anything else is."""
        least, useful = self.needs.get(SAMPLED_AHEAD, (0, 0))
        return max(least, min(useful, least + int(self._to_divide() * FRACTIONS[SAMPLED_AHEAD])))

    @property
    def held(self) -> dict[str, tuple[int, int]]:
        """What :class:`~featstore.epochmemory.EpochMemory` is to hold."""
        return {holder: (self.leasts[holder], n_bytes) for holder, n_bytes in self.granted.items()}

    @property
    def suffices(self) -> bool:
        """Whether the batch that was measured fits beside another one like it."""
        return self._needed(self.batch.n_rows) <= self._budget.total

    def left_for_caches(self, room: int, prefetch: int, returned: int = 0) -> tuple[int, int]:
        """Divide ``room`` bytes between caches and batches made ahead; return bytes of the former and number of the latter.

        Where less than half would be left for the caches, fewer batches are made ahead. ``returned``: bytes that are held for
        now, and given back before.
        """
        loop, one = self._loop, self.batch_bytes(larger(self.batch.n_rows))
        threads = (self._threads - 1) * self._sampler_bytes
        free = max(0, min(room, self.unused(returned) + loop) - self._one_more)
        while prefetch > 1 and loop + (prefetch - 1) * one + threads > free // 2:
            prefetch -= 1
        return max(0, free - loop - max(0, prefetch - 1) * one - threads), prefetch

    def foreseen_for_caches(self, prefetch: int) -> int:
        """Foresee :meth:`left_for_caches` once all have the memory that they were granted."""
        granted = sum(self.granted.values())
        return self.left_for_caches(self.unused() - self._caches - granted + self._loop, prefetch)[0]

    def left_while_sampling(self, returned: int = 0) -> int:
        """Return the bytes that may be taken while nothing is gathered: but for samplers, and batches that were made before.

        ``returned``: as for caches.
        """
        one = self.batch_bytes(larger(self.batch.n_rows))
        free = self.unused(returned) + self._loop
        return max(0, free - (1 + self._ahead) * one - self._threads * self._sampler_bytes)

    def samplers(self) -> int:
        """Return how many threads may sample beside the loop: one takes its turn where memory is short, others need some each."""
        return max(1, min(self._threads, self.unused() // max(1, self._sampler_bytes)))

    # What an error names.

    def _needed(self, n_rows: int) -> int:
        """Return a memory that suffices where the largest batch has ``n_rows``, beside what is held and cannot be taken back."""
        own = self._fixed + sum(self.leasts.values()) + self._caches
        n_bytes = max(own, self._fixed_now()) + self.tables + self.loop_bytes(n_rows) + self._others(idle=True)
        total = n_bytes
        while (more := n_bytes + self._graph.reader.least_bytes(total)) > total:  # the reader's part grows with it
            total = more
        return total

    def too_small(self, error: BudgetError, n_rows: int = 0, *, before: str = "") -> BudgetError:
        """Return the error with a number that suffices, for batches of ``n_rows`` and somewhat larger ones; ``before`` its text.

        Where no batch is known, for the largest that there could be, and what sampling has not opened yet.
        """
        if not max(n_rows, self.batch.n_rows):
            self.batch = most_of(self._graph, self._sampling)
        n_rows = int(LARGEST * max(n_rows, self.batch.n_rows))
        needed = self._needed(n_rows) + self._one_more
        # What it names itself is for one allocation: what comes after it, and what is optional, is a part of what is added.
        needed = max(needed, (error.needed or 0) * 9 // 8) + self._graph.topology_bytes()
        return BudgetError(before + error.reason, needed)

    def _refusal(self) -> BudgetError:
        parts = {
            "what is held already": self._fixed,
            "two batches": self._loop,
            "other loaders' batches": self._others(idle=False),
            **self.leasts,
            "caches": self._caches,
            "checksums of run files": self.tables,
        }
        text = ", ".join(f"{name} {format_size(n_bytes)}" for name, n_bytes in parts.items() if n_bytes)
        budget = self._budget
        return self.too_small(BudgetError(f"the {budget.name} budget of {format_size(budget.total)} is too small: {text}"))

    # What batches turn out to be.

    def begin(self) -> None:
        """Note that an epoch begins."""
        with self._lock:
            self._n_running += 1

    def end(self) -> None:
        """Note that an epoch is over."""
        with self._lock:
            self._n_running -= 1

    def close(self) -> None:
        """Note that no epoch begins any more: batches that are still held are all that others leave room for."""
        self._closed = True

    def saw(self, n_rows: int, sample_bytes: int) -> None:
        """Note how large a batch was."""
        with self._lock:
            if n_rows > self.batch.n_rows:
                known = self.batch if self.batch.sample_bytes else BatchSize(n_rows, 0, sample_bytes, sample_bytes)
                self.batch = known.of(n_rows)

    def delivered(self, batch: Any) -> None:
        """Note that the loop gets a batch."""
        with self._lock:
            self._delivered = [*self._living(), (weakref.ref(batch), batch.nbytes)]

    def _living(self) -> list[tuple[weakref.ref[Any], int]]:
        return [(each, n_bytes) for each, n_bytes in self._delivered if each() is not None]

    @property
    def n_delivered(self) -> int:
        """Delivered batches that somebody still holds."""
        with self._lock:
            return len(self._living())

    def required(self, *, idle: bool) -> int:
        """Count the least bytes of batches: those of a running epoch, else those that are still held; see Budget.require.

        Those that are still held, too, once the loader is closed.
        """
        with self._lock:
            held = sum(n_bytes for _, n_bytes in self._living()) * REUSE // (REUSE - 1)
            rows = larger(self.batch.n_rows)
        if self._closed or (not idle and not self._n_running):
            return held
        return max(held, self.loop_bytes(rows) + self._ahead * self.batch_bytes(rows))
