"""The memory of a loader: what it needs at the least is asked for once, added up here, and the rest divided here.

A :class:`Request` says what a strategy holds for as long as it runs. :class:`Memory` adds the leasts of all requests, the caches
whose size was given, the batches of the loop, and what other loaders need. Where that is beyond the budget, it raises, and names
the least. Otherwise it divides what is left: a part to each request, then batches made ahead; caches that size themselves get the
rest.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from featstore.budget import Budget, MemoryReport
from featstore.config import format_size
from featstore.errors import BudgetError
from featstore.gather.buffers import HOLDER
from featstore.sampling.macrolists import HOLDER as LISTS
from featstore.sampling.macrolists import SHARE as LISTS_SHARE
from featstore.sampling.scratch import SCRATCH
from featstore.strategies.batchsize import REUSE, BatchSize, foresee, larger, largest, measure, pooled_bytes
from featstore.strategies.setup import Setup

__all__ = ["SAMPLED_AHEAD", "SAMPLED_SHARE", "Memory", "Request", "ask", "before_asking", "too_small"]

SAMPLED_AHEAD = "epoch samples"  # holder
SAMPLED_SHARE = 4  # of what is left beyond the leasts: what is drawn for many batches at once goes to disk beyond it


@dataclass(frozen=True)
class Request:
    """What a strategy holds for as long as it runs.

    Parameters
    ----------
    holder : str
        What the budget's report calls it.
    least, useful : int
        Bytes without which it cannot work, and beyond which more does nothing.
    share : int
        Beyond its least it gets one part of so many of what is left, at most: other loaders may follow.
    otherwise : int, optional
        What does as well as any other size below ``useful``.
    is_held : bool
        The runner's :class:`~featstore.strategies.holdings.Holdings` reserve it; else whoever needs it does, when it is needed.
    is_first : bool
        It is held before all else, and given back: the least of these requests need not fit beside batches, caches and other
        requests. No more than the least is granted.
    """

    holder: str
    least: int
    useful: int = 0
    share: int = 1
    otherwise: int | None = None
    is_held: bool = True
    is_first: bool = False


def ask(
    setup: Setup,
    requests: Callable[[Setup, BatchSize], Sequence[Request]] | None = None,
    cache_bytes: int = 0,
    capacity: int = 0,
    *,
    plans: bool = False,
) -> tuple[Setup, Memory]:
    """Add up what a loader needs, before any of its stages begins.

    Parameters
    ----------
    setup : Setup
    requests : callable (setup, batch) -> sequence of Request, optional
        What the strategy holds where batches are like ``batch``.
    cache_bytes, capacity : int
        Of the feature caches whose size was given, and the rows of each.
    plans : bool
        Batches come with plans from a file, and others are sampled meanwhile.

    Returns
    -------
    setup : Setup
        Knows how large batches are; the one that was sampled for that need not be sampled again.
    memory : Memory

    Raises
    ------
    BudgetError
        The memory does not suffice for two batches, or for what the loader takes itself; names what does.
    """
    setup, known = _measured(setup)
    given = [] if requests is None else [*requests(setup, known)]
    least, useful = setup.batches.ahead_bytes()  # of a sampler that draws many batches at once
    if useful:
        given.insert(0, Request(SAMPLED_AHEAD, least, useful, SAMPLED_SHARE))
    lists = setup.batches.lists
    if lists is not None:
        given.append(Request(LISTS, 0, lists.useful_bytes, LISTS_SHARE, is_held=False))
    memory = Memory(setup, known, given, cache_bytes, capacity, plans=plans)
    if setup.refused is not None:
        raise too_small(setup.refused, memory.least() + setup.refused_bytes) from None
    memory.divide()
    if lists is not None:
        lists.use(memory.granted[LISTS])
    return setup, memory


def before_asking(setup: Setup, cache_bytes: int = 0, *, plans: bool = False) -> tuple[Setup, Memory]:
    """As :func:`ask`, for looking at batches before it is known what to ask for: nothing is divided, and nothing refused.

    Where there is too little for the loop, ``memory.suffices`` is false, or ``setup.refused`` says why.
    """
    setup, known = _measured(setup)
    memory, lists = Memory(setup, known, (), cache_bytes, plans=plans), setup.batches.lists
    if lists is not None:
        lists.use(min(lists.useful_bytes, memory.unused() // LISTS_SHARE))  # on loan
    return setup, memory


def _measured(setup: Setup) -> tuple[Setup, BatchSize]:
    """Return a setup that knows how large batches are, or why not; and how large they are, or are expected to be."""
    lists = setup.batches.lists
    if lists is not None:
        lists.use(0)  # what they had is divided anew
    if setup.batch is not None:  # more was sampled since, by several threads
        for idle in (setup.batches, setup.graph.pool):
            idle.trim()
    elif setup.refused is None:
        try:
            setup = replace(setup, batch=measure(setup.graph, setup.batches))
        except BudgetError as error:
            setup = replace(setup, refused=error)
    return setup, setup.batch or foresee(setup.graph, setup.batches)


def too_small(error: BudgetError, needed: int | None, *, before: str = "") -> BudgetError:
    """Return an error that names ``needed``, or what ``error`` does, whichever is more: its own least is for one allocation."""
    if needed is not None:
        # Just enough for this allocation would be short for the next, and what is optional takes a part of what is added.
        needed = max(needed, (error.needed or 0) * 9 // 8)
    return BudgetError(before + error.reason, needed)


def _tables_bytes(n: int, capacity: int) -> int:
    """Return the bytes of a plan of ``n`` rows for a cache of ``capacity`` rows."""
    return sum(pooled_bytes(width * rows) for rows in (n, min(n, capacity)) for width in (8, 4, 8, 8))


class Memory:
    """What a loader's stages need, together, and what each of them gets. Thread-safe.

    Parameters
    ----------
    setup : Setup
    batch : BatchSize
        The first batch; no rows where none is known yet.
    requests : sequence of Request
    cache_bytes, capacity : int
        See :func:`ask`.
    plans : bool
        See :func:`ask`.

    Attributes
    ----------
    batch : BatchSize
        The largest batch that is known.
    granted : dict of str to int
        Bytes of each request, once :meth:`divide` was called.
    """

    def __init__(
        self,
        setup: Setup,
        batch: BatchSize | None = None,
        requests: Sequence[Request] = (),
        cache_bytes: int = 0,
        capacity: int = 0,
        *,
        plans: bool = False,
    ) -> None:
        graph = setup.graph
        self._budget: Budget = graph.budget
        self._graph, self._row_bytes = graph, setup.row_bytes
        self._edge_row_bytes = setup.edge_row_bytes
        self._edge_capacity = 0 if setup.planning is None else setup.planning.edge_capacity
        self._threads, self._ahead = setup.threads, max(0, setup.prefetch - 1)
        self._sampling = setup.batches
        self._has_tier, self._device_on_host = setup.on_device is not None, setup.device.type == "cpu"
        if batch is None:
            batch = BatchSize(0) if setup.batches.most_rows is None else foresee(graph, setup.batches)
        self.batch = batch
        self.requests = tuple(requests)
        self.granted: dict[str, int] = {}
        self._is_measured = setup.batch is not None  # a batch was sampled; otherwise its size is what is expected
        self._cache_bytes, self._capacity, self._plans = cache_bytes, capacity, plans
        # From here on the loader's own parts come on top, as they are reserved.
        self._fixed = self._fixed_now()
        self._lock = threading.Lock()
        self._delivered: list[tuple[weakref.ref[Any], int]] = []
        self._n_running = 0
        self._closed = False

    # What is needed.

    def _held(self) -> int:
        """Bytes held now, but for those of batches, and for what the reader holds, which grows with the memory."""
        return self._held_of(self._budget.report())

    def _held_of(self, report: MemoryReport) -> int:
        held = sum(n_bytes for holder, n_bytes in report.items() if holder != HOLDER)
        return int(held - self._graph.reader.held_bytes)

    def _fixed_now(self) -> int:
        """Bytes of :meth:`_held` that are not on loan."""
        report = self._budget.report()
        on_loan = sum(each.on_loan_bytes for holder, each in report.holders.items() if holder != HOLDER)
        return max(0, self._held_of(report) - on_loan)

    def _solve(self, n_bytes: int) -> int:
        """Return the least memory that has ``n_bytes`` beside the reader's queue and tables, which grow with it."""
        total = n_bytes
        while (more := n_bytes + self._graph.reader.least_bytes(total)) > total:
            total = more
        return total

    def _others(self, *, idle: bool) -> int:
        """Return what other loaders' batches need, see :meth:`Budget.required`."""
        return self._budget.required(self, idle=idle)

    @property
    def _asked(self) -> int:
        """The leasts of all requests but those that come first, and caches of a given size."""
        return self.least_of_requests(first=False) + self._cache_bytes

    def least_of_requests(self, *, first: bool) -> int:
        """Return the leasts of the requests that come first, or of the others."""
        return sum(each.least for each in self.requests if each.is_first == first)

    def _plan_bytes(self, n_rows: int) -> int:
        if not self._plans or not n_rows:
            return 0
        return _tables_bytes(n_rows, self._capacity) * REUSE // (REUSE - 1)

    def _edge_plan_bytes(self, n_rows: int) -> int:
        """Return what planned edges of a batch take beside their rows: the plan, and distinct rows of the widest feature."""
        if not self._edge_capacity:
            return 0
        n = self.batch.of(n_rows).n_edges
        n_bytes = _tables_bytes(n, self._edge_capacity)
        n_bytes += sum(pooled_bytes(width * n) for width in (4, 4, 8, max(self._edge_row_bytes.values())))
        return n_bytes * REUSE // (REUSE - 1)

    def _split_bytes(self, n_rows: int) -> int:
        """Return what a batch takes until it is put together with the device's rows."""
        if not self._has_tier or not n_rows:
            return 0
        split = pooled_bytes(8 * n_rows) * 3 + pooled_bytes(4 * n_rows)
        on_host = sum(pooled_bytes(n_rows * width) for width in self._row_bytes.values()) if self._device_on_host else 0
        return split * REUSE // (REUSE - 1) + on_host

    def batch_bytes(self, n_rows: int) -> int:
        """Return what a batch of ``n_rows`` holds while the loop has it."""
        rows = sum(max(n_rows * width, pooled_bytes(n_rows * width)) for width in self._row_bytes.values())
        n_edges = self.batch.of(n_rows).n_edges
        rows += sum(max(n_edges * width, pooled_bytes(n_edges * width)) for width in self._edge_row_bytes.values())
        return self.batch.of(n_rows).sample_bytes * REUSE // (REUSE - 1) + rows

    def loop_bytes(self, n_rows: int) -> int:
        """Return what the loop's batch and the next one, being made, take."""
        one, batch = self.batch_bytes(n_rows), self.batch.of(n_rows)
        beside = self._plan_bytes(n_rows) + batch.sample_bytes if self._plans else 0  # a sample that waits to be written
        beside += self._split_bytes(n_rows) + self._edge_plan_bytes(n_rows)
        return max(2 * one + beside, one + batch.sampling_bytes)

    def _third_bytes(self) -> int:
        """Return what one more batch takes where plans are run; before caches on loan get anything, not among the leasts.

        While the loop goes from its batch to the next one both are alive, and the one after them is begun. Of what is divided it
        is half at most: with little to read ahead and to pack in, an epoch is several times slower.
        """
        return self.batch_bytes(larger(self.batch.n_rows)) if self._plans else 0

    def _total(self, n_rows: int, *, idle: bool = False) -> int:
        """Return the least memory in which an epoch runs whose largest batch has ``n_rows``.

        Beside the epochs that are running, and the batches that their loops still hold; with ``idle``, or beside that of another
        loader that rests.
        """
        needed = max(self._asked + self.loop_bytes(n_rows), self.least_of_requests(first=True))
        return self._solve(self._fixed + self._unsampled() + needed + self._others(idle=idle))

    def _unsampled(self) -> int:
        """Return what sampling will hold once it has begun, where no batch was sampled yet."""
        graph = self._graph
        if self._is_measured or self._sampling.most_rows is not None or not hasattr(graph, "num_edges"):
            return 0
        report = self._budget.report()
        offsets: int = graph.topology_bytes()
        scratch = self._sampling.scratch_bytes(self.batch.n_rows)
        return offsets + max(0, scratch - report.get(SCRATCH, 0))

    def least(self, n_rows: int = 0) -> int:
        """Return the least that an error names: for larger batches than those that are known, beside what others took since.

        And with what does as well as any other size: in the very least, superbatches would have a batch each.
        """
        rows = larger(max(n_rows, self.batch.n_rows))
        more = sum(max(0, (each.otherwise or 0) - each.least) for each in self.requests)
        held_now = self._solve(self._fixed_now() + self.loop_bytes(rows) + self._others(idle=True))
        return more + max(self._total(rows, idle=True), held_now)

    def expect(self) -> None:
        """Before an error: learn from the degrees how large batches are, where nothing is known of them."""
        if not self.batch.n_rows:
            self.batch = foresee(self._graph, self._sampling)

    # What each gets.

    def divide(self) -> None:
        """Divide what is left beyond the leasts.

        Raises
        ------
        BudgetError
            Not even the first batch's rows can be gathered beside those of another one like it.
        """
        total = self._budget.total
        if not self.suffices:
            raise self._refusal()
        left = total - self._held() - self._graph.reader.least_bytes(total) - self._asked
        left = max(0, left - self.loop_bytes(larger(self.batch.n_rows)) - self._others(idle=True))
        whole = left = left - min(left // 2, self._third_bytes())
        for request in (each for each in self.requests if not each.is_first):
            granted = max(request.least, min(request.useful, request.least + min(left, whole // request.share)))
            if granted < request.useful and request.otherwise is not None:
                granted = max(request.least, min(granted, request.otherwise))
            self.granted[request.holder] = granted
            left -= granted - request.least

    @property
    def suffices(self) -> bool:
        """Whether the first batch's rows can be gathered beside those of another one like it."""
        return self._total(self.batch.n_rows) <= self._budget.total

    def _refusal(self) -> BudgetError:
        self.batch = largest(self._graph, self._sampling, self.batch)
        parts = {
            "what is held already": self._fixed,
            "two batches": self.loop_bytes(self.batch.n_rows),
            "other loaders' batches": self._others(idle=False),
            **{each.holder: each.least for each in self.requests if not each.is_first},
            "caches": self._cache_bytes,
            "or first": self.least_of_requests(first=True),
        }
        text = ", ".join(f"{name} {format_size(n_bytes)}" for name, n_bytes in parts.items() if n_bytes)
        budget = self._budget
        return BudgetError(f"the {budget.name} budget of {format_size(budget.total)} is too small: {text}", self.least())

    def unused(self, returned: int = 0) -> int:
        """Return the bytes that may still be taken, when strategy and caches have theirs, and ``returned`` were given back."""
        left = self._budget.total - (self._held() - returned) - self._graph.reader.least_bytes(self._budget.total)
        return int(max(0, left - self.loop_bytes(larger(self.batch.n_rows)) - self._others(idle=True)))

    def spare(self) -> int:
        """Return what of :meth:`unused` nobody reserves later, when it is needed."""
        later = sum(self.granted.get(each.holder, 0) for each in self.requests if not each.is_held and each.least)
        return max(0, self.unused() - later)

    def left_for_caches(self, room: int, prefetch: int, returned: int = 0) -> tuple[int, int]:
        """Return what caches may take of ``room`` bytes, and how many batches are made ahead beside them.

        Where less than half would be left for the caches, fewer batches are made ahead. ``returned``: bytes that are held for
        now, and given back before.
        """
        loop, one = self.loop_bytes(larger(self.batch.n_rows)), self.batch_bytes(larger(self.batch.n_rows))
        threads = (self._threads - 1) * self._sampler_bytes
        free = max(0, min(room, self.unused(returned) + loop) - self._third_bytes())
        while prefetch > 1 and loop + (prefetch - 1) * one + threads > free // 2:
            prefetch -= 1
        return max(0, free - loop - max(0, prefetch - 1) * one - threads), prefetch

    def left_while_sampling(self, returned: int = 0) -> int:
        """Return the bytes that may be taken while nothing is gathered: but for samplers, and batches that were made before.

        ``returned``: as for caches.
        """
        one = self.batch_bytes(larger(self.batch.n_rows))
        free = self.unused(returned) + self.loop_bytes(larger(self.batch.n_rows))
        return max(0, free - (1 + self._ahead) * one - self._threads * self._sampler_bytes)

    @property
    def _sampler_bytes(self) -> int:
        """What a thread takes that samples beside others."""
        batch = self.batch.of(larger(self.batch.n_rows))
        return batch.sampling_bytes + self._sampling.scratch_bytes(batch.n_rows)

    def samplers(self) -> int:
        """Return how many threads may sample beside the loop: one takes its turn where memory is short, others need some each."""
        return max(1, min(self._threads, self.unused() // max(1, self._sampler_bytes)))

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
        """Return what batches take at the least: those of a running epoch, else those that are still held; see Budget.require.

        Those that are still held, too, once the loader is closed.
        """
        with self._lock:
            held = sum(n_bytes for _, n_bytes in self._living()) * REUSE // (REUSE - 1)
            rows = larger(self.batch.n_rows)
        if self._closed or (not idle and not self._n_running):
            return held
        return max(held, self.loop_bytes(rows) + self._ahead * self.batch_bytes(rows))
