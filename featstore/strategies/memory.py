"""Memory of a loader: the bytes of its batches, and the fraction of the rest that each automatic size gets.

A batch is measured (:mod:`featstore.estimate.batchsize`), and room for two batches is left free. Of the rest, each other part of
an epoch gets its fraction, but no more than is of use. Caches that size themselves get all that is left then. This module
reserves nothing: a part reserves its bytes when it allocates, and the budget then takes loans back first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from featstore.budget import MemoryReport
from featstore.config import format_size, parse_size
from featstore.errors import BudgetError
from featstore.estimate.batchsize import REUSE, BatchSize, larger, measure, most_of, pooled_bytes
from featstore.gather.buffers import HOLDER
from featstore.sampling.batch import SampledBatch
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
    "ask_of_bytes",
]

# Holders: their names in the budget's report.
SAMPLED_AHEAD, PLANNER, EDGE_PLANNER = "epoch samples", "planner", "planner of edges"
AHEAD, WINDOWS, PACKING = "read ahead", "extents read ahead", "packing"

# The most that each holder gets of the memory that batches leave. A planner may have all of it, since superbatches are made to
# fit the planner's memory.
FRACTIONS = {
    SAMPLED_AHEAD: 1 / 4,  # beyond it, batches drawn at once go to disk
    WINDOWS: 1 / 12,
    PACKING: 1 / 3,
    PLANNER: 1.0,
    AHEAD: 1 / 12,
    EDGE_PLANNER: 1.0,
    LISTS: 1 / 8,
}
NEIGHBORS = "neighbor cache"
PLAN_ARRAYS = 8  # of 8 bytes a row: a batch's plan for the host cache; of 8 bytes an edge: its plan for edges
SPLIT_ARRAYS = 4  # of 8 bytes a row: the rows of a batch that the device has, and their slots
LARGEST = 4 / 3  # the largest batch to come, in batches as measured, for the number in an error


Needs: TypeAlias = "Mapping[str, tuple[int, int]]"


def ask(
    context: Context, needs: Callable[[BatchSize], Needs] | Needs | None = None, caches: int = 0, *, plans: bool = False
) -> tuple[Context, Memory]:
    """Measure the loader's first batch, unless it is measured, and compute the memory that the loader needs.

    Parameters
    ----------
    context : Context
    needs : mapping of str to (int, int), or callable (batch) -> mapping, optional
        Memory of an epoch whose batches are like ``batch``. For each holder: the bytes without which the epoch cannot run, and
        the bytes beyond which more are of no use.
    caches : int
        Bytes of the caches whose size was given.
    plans : bool
        Batches come with plans from a file, and others are sampled meanwhile.

    Returns
    -------
    context : Context
        The context with the size of a batch. The run uses the batch that was sampled for it.
    memory : Memory

    Raises
    ------
    BudgetError
        There is no memory to sample a batch. The error names a memory that suffices for two of the largest batches possible.
    """
    lists = context.batches.lists
    if lists is not None:
        lists.use(0)  # their memory is divided anew
    if context.batch is not None:
        context.graph.pool.trim()
        return context, Memory(context, needs, caches, plans=plans)
    try:
        nodes = context.nodes
        rows = {name: nodes.rows_of(name) for name in nodes.stores}
        context = replace(context, batch=measure(context.graph, context.batches, rows))
    except BudgetError as error:
        most = replace(context, batch=most_of(context.graph, context.batches, context.nodes.stores))
        raise Memory(most, needs, caches, plans=plans).too_small(error) from None
    return context, Memory(context, needs, caches, plans=plans)


def ask_of_bytes(context: Context, size: int | float | str | None) -> Context:
    """Measure the loader's first batch if caches of ``size`` are divided by what it asks for, and it is not measured.

    They are if ``size`` is in bytes, and features have different rows. Raises as :func:`ask`.
    """
    if context.batch is not None or not context.nodes.is_mixed or not isinstance(size, (int, str)) or size == "auto":
        return context
    return ask(context, caches=parse_size(size))[0]


class Memory:
    """The memory that a loader's batches need, and the division of the rest among its holders. Thread-safe.

    Parameters
    ----------
    context : Context
    needs, caches, plans
        See :func:`ask`.

    Attributes
    ----------
    batch : BatchSize
        The largest batch that is known.
    needs : dict of str to (int, int)
        The least and the useful bytes of each holder; see :func:`ask`.
    granted : dict of str to int
        Bytes that each holder gets; empty before :meth:`divide`.
    leasts : dict of str to int
        Bytes of each holder without which an epoch cannot run.
    tables : int
        Bytes of the checksums of files that an epoch opens. They are reserved when the files are opened.
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
        self._columns = [next(iter(part.stores), "") for part in context.nodes.each]  # a feature of those with the same rows
        self._threads, self._ahead = context.threads, max(0, context.prefetch - 1)
        self._has_tier, self._device_on_host = context.on_device is not None, context.device.type == "cpu"
        self._plans, self._caches, self._has_types = plans, caches, context.has_types
        self.batch = context.batch or BatchSize(0)
        self.granted: dict[str, int] = {}
        self.tables = 0
        self.needs = dict(needs(self.batch) if callable(needs) else needs or {})
        if (ahead := context.batches.ahead_bytes()) != (0, 0):  # a sampler that draws many batches at once
            self.needs = {SAMPLED_AHEAD: ahead, **self.needs}
        self.leasts = {holder: least for holder, (least, _) in self.needs.items()}
        self._fixed = self._fixed_now()  # without the loader's own parts, which are reserved after this
        self._lock = threading.RLock()  # the collector may end an earlier epoch in a thread that holds it
        self._delivered: list[tuple[weakref.ref[Any], int]] = []
        self._n_running = 0
        self._closed = False

    # Bytes of batches.

    def batch_bytes(self, n_rows: int) -> int:
        """Count the bytes that a batch of ``n_rows`` holds while the loop has it."""
        batch = self.batch.of(n_rows)
        rows = self._rows_bytes({**dict.fromkeys(self._row_bytes, n_rows), **batch.rows_of, **batch.delivered_of})
        n_edges = batch.n_edges
        rows += sum(max(n_edges * width, pooled_bytes(n_edges * width)) for width in self._edge_row_bytes.values())
        return batch.sample_bytes * REUSE // (REUSE - 1) + rows

    def _rows_bytes(self, n_rows_of: Mapping[str, int]) -> int:
        sizes = (n_rows_of[name] * width for name, width in self._row_bytes.items())
        return sum(max(n_bytes, pooled_bytes(n_bytes)) for n_bytes in sizes)

    def _beside(self, n_rows: int) -> int:
        """Count the bytes of a batch that only exist until it is delivered: its plans, and its rows on the device."""
        batch, n_bytes = self.batch.of(n_rows), 0
        if self._plans:
            n_bytes += PLAN_ARRAYS * pooled_bytes(8 * n_rows) + batch.sample_bytes  # a sample that waits to be written
        if batch.delivered_of:  # the rows as they were gathered, and the nodes' ids
            n_bytes += self._rows_bytes({**dict.fromkeys(self._row_bytes, n_rows), **batch.rows_of}) + batch.sample_bytes
        if self._has_types:  # the sample, beside the batch whose ids are within types
            n_bytes += batch.sample_bytes
        if EDGE_PLANNER in self.needs:
            n_bytes += PLAN_ARRAYS * pooled_bytes(8 * batch.n_edges) + max(self._edge_row_bytes.values()) * batch.n_edges
        if self._has_tier:
            n_bytes += SPLIT_ARRAYS * sum(pooled_bytes(8 * batch.rows_of.get(name, n_rows)) for name in self._columns)
            n_bytes += sum(self._row_bytes.values()) * n_rows * self._device_on_host
        return n_bytes

    def loop_bytes(self, n_rows: int) -> int:
        """Count the bytes of the loop's batch and of the next one, which is being made."""
        one = self.batch_bytes(n_rows)
        return max(2 * one + self._beside(n_rows), one + self.batch.of(n_rows).sampling_bytes)

    @property
    def _loop(self) -> int:
        return self.loop_bytes(larger(self.batch.n_rows))

    @property
    def _one_more(self) -> int:
        """Bytes of one more batch, if plans are run: two are alive while the loop goes from one to the next."""
        return self.batch_bytes(larger(self.batch.n_rows)) if self._plans else 0

    @property
    def _sampler_bytes(self) -> int:
        """Bytes of a thread that samples beside others."""
        batch = self.batch.of(larger(self.batch.n_rows))
        return batch.sampling_bytes + batch.scratch_bytes

    # Memory that is left.

    def _held_of(self, report: MemoryReport) -> int:
        """Return the bytes held, except those of batches, of the reader (which grow with the memory), and of lists given back."""
        held = sum(n_bytes for holder, n_bytes in report.items() if holder != HOLDER)
        return held - self._graph.reader.held_bytes - self._freed

    def _fixed_now(self) -> int:
        """Return the bytes of :meth:`_held_of` that are not on loan."""
        report = self._budget.report()
        on_loan = sum(each.on_loan_bytes for holder, each in report.holders.items() if holder != HOLDER)
        return max(0, self._held_of(report) - on_loan)

    def _others(self, *, idle: bool) -> int:
        """Return the bytes that other loaders' batches need; see :meth:`Budget.required`."""
        return self._budget.required(self, idle=idle)

    def unused(self, returned: int = 0) -> int:
        """Return the bytes that can still be taken beside batches, without taking loans back.

        ``returned``: bytes that are held now, and given back before.
        """
        held = self._held_of(self._budget.report()) - returned + self._graph.reader.least_bytes(self._budget.total) + self.tables
        return max(0, self._budget.total - held - self._loop - self._others(idle=True))

    def divide(self, for_caches: int = 0) -> None:
        """Divide the memory that batches and caches of a given size leave: each holder gets its fraction, or the useful bytes.

        ``for_caches`` bytes are left for caches that size themselves. Batches drawn ahead are granted before that.

        Raises
        ------
        BudgetError
            Two batches like the measured one do not fit.
        """
        lists = self._sampling.lists
        if not self.suffices:
            raise self._refusal()
        whole = left = self._to_divide()
        for holder, (least, useful) in self.needs.items():
            free = left if holder == SAMPLED_AHEAD else max(0, left - for_caches)
            self.granted[holder] = max(least, min(useful, least + min(free, int(whole * FRACTIONS[holder]))))
            left -= self.granted[holder] - least
        if lists is not None:
            lists.use(max(0, min(left - for_caches, lists.useful_bytes, int(whole * FRACTIONS[LISTS]))))

    def _to_divide(self) -> int:
        """Compute the bytes to divide: those that batches leave, beyond the holders' leasts and caches of a given size."""
        left = max(0, self.unused() - self._caches - sum(self.leasts.values()))
        lists_held = self._budget.report().holders.get(NEIGHBORS)
        # One more batch waits if there is no memory; but if neighbour lists are on loan, it takes their memory instead.
        most = left if lists_held is not None and lists_held.on_loan_bytes else left // 2
        return left - min(most, self._one_more)

    @property
    def sampled_ahead(self) -> int:
        """Bytes that a sampler which draws many batches at once will be granted, first of all holders."""
        least, useful = self.needs.get(SAMPLED_AHEAD, (0, 0))
        return max(least, min(useful, least + int(self._to_divide() * FRACTIONS[SAMPLED_AHEAD])))

    @property
    def held(self) -> dict[str, tuple[int, int]]:
        """The least and the granted bytes of each holder, for :class:`~featstore.epochmemory.EpochMemory`."""
        return {holder: (self.leasts[holder], n_bytes) for holder, n_bytes in self.granted.items()}

    @property
    def suffices(self) -> bool:
        """Whether two batches like the measured one fit."""
        return self._needed(self.batch.n_rows) <= self._budget.total

    def left_for_caches(self, room: int, prefetch: int, returned: int = 0) -> tuple[int, int]:
        """Divide ``room`` bytes between caches and batches made ahead; return the bytes for caches, and the number of batches.

        Fewer batches than ``prefetch`` are made ahead if they would leave less than half for the caches. ``returned``: bytes
        that are held now, and given back before.
        """
        loop, one = self._loop, self.batch_bytes(larger(self.batch.n_rows))
        threads = (self._threads - 1) * self._sampler_bytes
        free = max(0, min(room, self.unused(returned) + loop) - self._one_more)
        while prefetch > 1 and loop + (prefetch - 1) * one + threads > free // 2:
            prefetch -= 1
        return max(0, free - loop - max(0, prefetch - 1) * one - threads), prefetch

    def left_for_caches_after_grants(self, prefetch: int) -> int:
        """Compute the bytes of :meth:`left_for_caches` once all holders have their granted memory."""
        granted = sum(self.granted.values())
        return self.left_for_caches(self.unused() - self._caches - granted + self._loop, prefetch)[0]

    def left_while_sampling(self, returned: int = 0) -> int:
        """Return the bytes that can be taken while nothing is gathered, beside samplers and batches made ahead.

        ``returned``: as for :meth:`left_for_caches`.
        """
        one = self.batch_bytes(larger(self.batch.n_rows))
        free = self.unused(returned) + self._loop
        return max(0, free - (1 + self._ahead) * one - self._threads * self._sampler_bytes)

    def samplers(self) -> int:
        """Compute the number of threads that may sample beside the loop, at least one; each needs memory of its own."""
        return max(1, min(self._threads, self.unused() // max(1, self._sampler_bytes)))

    # The memory that an error names.

    def _parts(self, n_rows: int) -> dict[str, int]:
        """List the parts of :meth:`_needed` by what they are for; they add up to it."""
        parts = {"what is held already": self._fixed, **self.leasts, "caches": self._caches}
        parts["what was taken since"] = max(0, self._fixed_now() - sum(parts.values()))
        parts["two batches"] = self.loop_bytes(n_rows)
        parts["other loaders' batches"] = self._others(idle=True)
        parts["checksums of run files"] = self.tables
        total = n_bytes = sum(parts.values())
        while (more := n_bytes + self._graph.reader.least_bytes(total)) > total:  # the reader's part grows with it
            total = more
        parts["reading"] = total - n_bytes
        return parts

    def _needed(self, n_rows: int) -> int:
        """Compute a total memory that suffices for batches of up to ``n_rows``, with all that is held and not on loan."""
        return sum(self._parts(n_rows).values())

    def too_small(self, error: BudgetError, n_rows: int = 0, *, before: str = "") -> BudgetError:
        """Make a BudgetError that names a memory that suffices, for batches of ``n_rows`` and a third larger ones.

        If no batch is known, the largest possible one counts. The bytes of the topology that is not open yet are added.
        ``before`` precedes the text of ``error``.
        """
        if not max(n_rows, self.batch.n_rows):
            self.batch = most_of(self._graph, self._sampling, self._row_bytes)
        n_rows = int(LARGEST * max(n_rows, self.batch.n_rows))
        needed = self._needed(n_rows) + self._one_more
        # The number of ``error`` is for one allocation; an eighth is added for later and optional ones.
        needed = max(needed, (error.needed or 0) * 9 // 8) + self._graph.topology_bytes()
        return BudgetError(f"{before}{error.reason}; smaller batches need less", needed)

    def _refusal(self) -> BudgetError:
        parts, budget = self._parts(self.batch.n_rows), self._budget
        text = ", ".join(f"{name} {format_size(n_bytes)}" for name, n_bytes in parts.items() if n_bytes)
        asked = f"{format_size(sum(parts.values()))} are asked for ({text})"
        return self.too_small(BudgetError(f"the {budget.name} budget of {format_size(budget.total)} is too small: {asked}"))

    # Batches as they run.

    def begin(self) -> None:
        """Note that an epoch begins."""
        with self._lock:
            self._n_running += 1

    def end(self) -> None:
        """Note that an epoch is over."""
        with self._lock:
            self._n_running -= 1

    def close(self) -> None:
        """Note that no epoch begins any more: from now on only batches still held count in :meth:`required`."""
        self._closed = True

    def rows_like(self, sampled: SampledBatch) -> int:
        """Return the rows that stand for this batch: its own, or, if more, those of the measured one scaled to its nodes."""
        return self.batch.rows_like(len(sampled.input_ids), sampled.n_nodes)

    def saw(self, n_rows: int, sample_bytes: int) -> None:
        """Note the size of a batch; the largest is kept in ``batch``."""
        with self._lock:
            if n_rows > self.batch.n_rows:
                known = self.batch if self.batch.sample_bytes else BatchSize(n_rows, 0, sample_bytes, sample_bytes)
                self.batch = known.of(n_rows)

    def delivered(self, batch: Any) -> None:
        """Note that a batch is delivered to the loop."""
        with self._lock:
            self._delivered = [*self._living(), (weakref.ref(batch), batch.nbytes)]

    def _living(self) -> list[tuple[weakref.ref[Any], int]]:
        return [(each, n_bytes) for each, n_bytes in self._delivered if each() is not None]

    @property
    def n_delivered(self) -> int:
        """Number of delivered batches that are still alive."""
        with self._lock:
            return len(self._living())

    def required(self, *, idle: bool) -> int:
        """Count the least bytes that the loader's batches need; see Budget.require.

        While an epoch runs, or with ``idle``, the batches of an epoch count; else, and once the loader is closed, delivered
        batches that are still alive.
        """
        with self._lock:
            held = sum(n_bytes for _, n_bytes in self._living()) * REUSE // (REUSE - 1)
            rows = larger(self.batch.n_rows)
        if self._closed or (not idle and not self._n_running):
            return held
        return max(held, self.loop_bytes(rows) + self._ahead * self.batch_bytes(rows))
