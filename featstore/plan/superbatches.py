"""Superbatches (Ginex): sample many batches ahead, and plan the cache over them and one superbatch further.

One background thread samples superbatches. Another thread plans and packs superbatch ``k`` once ``k + 1`` is sampled. Next uses
in ``k + 1`` therefore count, and the cache's rows survive from one superbatch to the next. Meanwhile ``k + 2`` is sampled, and
the batches of ``k - 1`` are gathered and trained on. With a policy that does not look ahead, ``k`` is planned as soon as it is
sampled; one whose rows stay plans each batch as it is sampled.

With a :class:`Switch` the schedule is the paper's. One thread waits until superbatch ``k - 1`` has run, and gives the feature
caches' memory to the neighbour cache. The thread samples ``k + 1`` while another one plans ``k`` alone. Then it gives the memory
back to the feature caches, filled with the rows that are used first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.cache.devicetier import DeviceTier
from featstore.errors import BudgetError, ClosedError
from featstore.gather.buffers import BufferPool
from featstore.gather.plan import BatchPlan, EdgePlan
from featstore.gather.sources import ExtentSource
from featstore.plan.cacheplans import PlanWriter
from featstore.plan.daemonthreads import DaemonThreads
from featstore.plan.edgeplans import EdgePlanner
from featstore.plan.edgetrace import DistinctEdges, EdgeTraceWriter
from featstore.plan.planmemory import Switch
from featstore.plan.rowplans import RowPlanner
from featstore.plan.sampledsuperbatch import PlannedEdges, SampledSuperbatch
from featstore.plan.samples import SampleWriter
from featstore.sampling.batch import SampledBatch
from featstore.storage.rundir import DiskQuota, RunDirectory

__all__ = ["AT_ONCE", "SuperbatchInspector"]

AT_ONCE = 4  # superbatches whose run files lie on disk

Int64s = npt.NDArray[np.int64]
_Sample: TypeAlias = "tuple[SampledBatch, list[DistinctEdges]]"


class SuperbatchInspector:
    """One epoch's superbatches: sampled, planned, handed out by batch number. Thread-safe.

    Parameters
    ----------
    sample : callable
        ``sample(position)`` samples the batch that runs as number ``position``; called from several threads.
    start, stop, size : int
        Number of the first batch, number behind the last, and batches a superbatch.
    planners : sequence of RowPlanner
        The planners of the features of nodes, those with the same rows together; at least one. They plan one after the other,
        in the same memory.
    runs : RunDirectory
    disk : DiskQuota
        Where run files of samples go, and what counts their bytes.
    budget : Budget
    pool : BufferPool
    num_nodes : int
        Of the graph.
    threads : int
        Batches sampled at once.
    time : callable
        ``time(stage)`` is a context manager that measures ``"sample"``, ``"switch"`` or ``"load"``.
    switch : Switch, optional
        Makes the schedule serial: one superbatch after the other, each planned alone.
    tiers : callable () -> sequence of DeviceTier or None
        Called when a superbatch is planned. Returns the rows on the device, which the superbatch's plans leave out: a tier for
        each of the planners, or none at all.
    edges : sequence of EdgePlanner
        The planners of the caches of edge features, one a type of edges, in the same memory; by default none.
    """

    def __init__(
        self,
        sample: Callable[[int], SampledBatch],
        *,
        start: int,
        stop: int,
        size: int,
        planners: Sequence[RowPlanner],
        runs: RunDirectory,
        disk: DiskQuota,
        budget: Budget,
        pool: BufferPool,
        num_nodes: int,
        threads: int,
        time: Callable[[str], AbstractContextManager[None]],
        switch: Switch | None = None,
        tiers: Callable[[], Sequence[DeviceTier | None]] = tuple,
        edges: Sequence[EdgePlanner] = (),
    ) -> None:
        self._sample, self._tiers, self._edges = sample, tiers, edges
        self._start, self._stop, self._size = start, stop, size
        self._planners, self._pool, self._num_nodes = planners, pool, num_nodes
        self._runs, self._disk, self._budget = runs, disk, budget
        self._threads, self._time, self._switch = threads, time, switch
        self._looks_ahead = any(planner.looks_ahead for planner in planners)
        self._n = -(-(stop - start) // size)
        self._ready: dict[int, SampledSuperbatch] = {}
        self._n_alive = self._n_sampling = 0  # samples being made or not yet written; samples being made
        self._is_paused = False
        self._awaited: Future[_Sample] | None = None  # the sample to be written next
        self._shortage: BudgetError | None = None
        self._n_freed = 0  # counts events that may have freed memory: threads that lacked memory then try again
        self._reached = 0  # superbatch that is being consumed
        self._n_passed = start  # batches before this one have run
        self._error: BaseException | None = None
        self._closed = False
        # Code takes the lock itself, not the condition: Ctrl-C may leave Condition.__enter__ with the lock taken for good.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._inspect, name="featstore-inspect", daemon=True)

    def begin(self) -> None:
        """Start the thread. The constructor does not, so that the caller can first arrange to close the inspector."""
        self._thread.start()

    @property
    def _current(self) -> int:
        """The superbatch of the next batch to run."""
        return (self._n_passed - self._start) // self._size

    # The consumer's side.

    def batch(self, position: int) -> tuple[SampledBatch, list[tuple[RowPlanner, Int64s, BatchPlan]]]:
        """Return a batch, and for each planner its rows and plan, waiting until its superbatch is planned.

        Raises
        ------
        BudgetError
            No memory for the batch, or for sampling its superbatch. The call may be repeated after memory came free.
        """
        k, number = divmod(position - self._start, self._size)
        with self._lock:
            self._reached = max(self._reached, k)
            if k == self._current and k not in self._ready:
                self._is_paused = False
                self._shortage = None  # out of date: the loop may have dropped the last batch since
            self._note_freed()
            self._changed.wait_for(lambda: k in self._ready or self._error or self._shortage or self._closed)
            if k not in self._ready:
                if self._shortage is not None and self._error is None:
                    # The caller may free memory and ask again; sampling goes on meanwhile.
                    raise BudgetError(self._shortage.reason, self._shortage.needed)
                raise self._error or ClosedError("the epoch is over")
            superbatch = self._ready[k]
        with self._time("load"):
            sampled = superbatch.samples.batch(number, self._pool)
            array, ids, found = self._pool.array, sampled.input_ids.numpy(), []
            for planner, part in zip(self._planners, superbatch.parts, strict=True):
                rows = part.rows.of(ids, array)
                found.append((planner, rows, planner.of(part, number, rows, array)))
            return sampled, found

    def edges(self, position: int) -> dict[str, EdgePlan]:
        """Return the plans for the edge rows of a batch that :meth:`batch` has returned, by feature; none without planners.

        Raises as :meth:`batch` does.
        """
        if not self._edges:
            return {}
        k, number = divmod(position - self._start, self._size)
        with self._lock:
            superbatch = self._ready.get(k)
        if superbatch is None:
            raise ClosedError("the epoch is over")
        found: dict[str, EdgePlan] = {}
        with self._time("load"):
            for planner, edges in zip(self._edges, superbatch.edges, strict=True):
                found |= dict.fromkeys(planner.names, planner.of(edges, number))
        return found

    def may_begin(self, position: int) -> bool:
        """Return whether a batch's superbatch can be prepared now; with a switch, all earlier ones must have run."""
        return self._switch is None or (position - self._start) // self._size <= self._current

    def misses(self, at: int, position: int, wait: bool, most: int) -> Int64s | int | None:
        """Return the rows of planner number ``at`` that a batch will miss; if they are more than ``most``, their number alone.

        None: the batch is not planned. With ``wait`` the call waits for the plan, and None means that the epoch ended or failed.
        Waiting here does not hasten planning, as waiting in :meth:`batch` does.
        """
        k, number = divmod(position - self._start, self._size)
        with self._lock:
            if wait:
                self._changed.wait_for(lambda: k in self._ready or self._error is not None or self._closed)
            superbatch = None if self._closed else self._ready.get(k)
        part = None if superbatch is None else superbatch.parts[at]
        if part is None or part.plans is None:
            return None
        n_missed = int(part.plans.n_missed[number])
        if n_missed > most:
            return n_missed
        array = self._pool.array
        return part.plans.misses(number, part.ids(number, array), array)

    def source(self, position: int, name: str) -> ExtentSource | None:
        """Return the tier ``PACKED`` for a batch that :meth:`batch` has returned; None if its superbatch is not packed."""
        k = (position - self._start) // self._size
        with self._lock:
            for old, earlier in self._ready.items():
                if old < k:
                    for part in earlier.parts:
                        if part.packed is not None:
                            part.packed.stop()
            superbatch = self._ready.get(k)
            if superbatch is None:
                raise ClosedError("the epoch is over")
            at = next(at for at, planner in enumerate(self._planners) if name in planner.names)
            packed = superbatch.parts[at].packed
            return None if packed is None else packed.source(name)

    def passed(self, position: int) -> None:
        """Note that the batch and all before it have run; remove the run files of earlier superbatches."""
        k = (position - self._start) // self._size
        with self._lock:
            self._n_passed = max(self._n_passed, position + 1)
            self._is_paused = False
            for old in [each for each in self._ready if each < k]:
                self._ready.pop(old).remove()
            self._note_freed()

    def freed(self) -> None:
        """Note that memory came free: sampling is tried again before :meth:`batch` raises for lack of memory."""
        with self._lock:
            self._shortage = None
            self._note_freed()

    def _note_freed(self) -> None:
        """Wake all waiting threads, and let sampling that lacked memory try again; the lock is held."""
        self._n_freed += 1
        self._changed.notify_all()

    def pause(self) -> bool:
        """Pause sampling until a batch has run: wait for the samples being made, and give back idle buffers.

        Called when memory is short for a batch. Returns whether the pause may help: False if sampling is paused already, or if
        the batch's superbatch is not planned yet.
        """
        with self._lock:
            if self._is_paused or self._closed or self._current not in self._ready:
                return False
            self._is_paused = True
            # After an error some samples are never written.
            self._changed.wait_for(lambda: (not self._n_sampling and self._is_written()) or self._error or self._closed)
        self._pool.trim()
        return True

    def _is_written(self) -> bool:
        """Return whether all samples are written, except those queued behind one still being made; the lock is held."""
        return not self._n_alive or (self._awaited is not None and not self._awaited.done())

    def stop(self) -> None:
        """End the epoch: wake the thread and callers that wait in :meth:`batch` or :meth:`misses`. Waits for none of them."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread and remove the run files; may be called again. No thread may be reading them."""
        self.stop()
        if self._thread is not threading.current_thread() and self._thread.is_alive():  # else it never began, or ends by itself
            self._thread.join()
        with self._lock:
            for superbatch in self._ready.values():
                superbatch.remove()
            self._ready.clear()

    # The inspector's side.

    def _inspect(self) -> None:
        sampled: dict[int, SampledSuperbatch] = {}
        with DaemonThreads(self._threads, "featstore-presample") as workers:
            sampler = threading.Thread(target=self._sample_ahead, args=(sampled, workers), name="featstore-samples", daemon=True)
            try:
                if self._switch is None:
                    sampler.start()
                for k in range(self._n):
                    self._wait_for(k)
                    if self._switch is not None and k not in sampled:
                        sampled[k] = self._sample_superbatch(k, workers)
                    superbatch = self._take(k, sampled)
                    try:
                        if self._switch is None:
                            self._plan(k, superbatch, sampled.get(k + 1) if self._looks_ahead else None, self._tiers())
                        else:
                            self._plan_beside_sampling(k, superbatch, sampled, workers)
                    except BaseException:
                        superbatch.remove()
                        raise
                    superbatch.samples.forget()
                    with self._lock:
                        self._ready[k] = superbatch
                        self._note_freed()
            except BaseException as error:
                self._fail(error)
            finally:
                if sampler.ident is not None:
                    sampler.join()
                for left in sampled.values():
                    left.remove()

    def _fail(self, error: BaseException) -> None:
        """Record why no more superbatches come, unless an error is recorded already; wake all waiting threads."""
        with self._lock:
            if not isinstance(error, _Stopped):
                self._error = self._error or error
            self._changed.notify_all()

    def _sample_ahead(self, sampled: dict[int, SampledSuperbatch], workers: Executor) -> None:
        """Sample one superbatch after the other, beside planning and packing, while at most four lie on disk."""
        try:
            for k in range(self._n):
                with self._lock:
                    self._changed.wait_for(partial(self._may_sample, k))
                    self._check()
                    if self._error is not None:
                        return
                superbatch = self._sample_superbatch(k, workers)
                with self._lock:
                    sampled[k] = superbatch
                    self._changed.notify_all()
        except BaseException as error:
            self._fail(error)

    def _may_sample(self, k: int) -> bool:
        return k - self._current < AT_ONCE or self._error is not None or self._closed

    def _take(self, k: int, sampled: dict[int, SampledSuperbatch]) -> SampledSuperbatch:
        """Return superbatch ``k`` once it is sampled; if planning looks ahead, once the next one is sampled, too."""
        last = min(k + self._looks_ahead, self._n - 1)
        with self._lock:
            self._changed.wait_for(lambda: last in sampled or self._error or self._closed)
            self._check()
            if last not in sampled:
                raise _Stopped
            return sampled.pop(k)

    def _wait_for(self, k: int) -> None:
        """Wait until superbatch ``k`` may be planned: the loop is at ``k - 1``, or, with a switch, all before ``k`` have run."""
        first = self._start + k * self._size

        def may() -> bool:
            return self._reached >= k - 1 if self._switch is None else self._reached >= k and self._n_passed >= first

        with self._lock:
            self._changed.wait_for(lambda: may() or self._closed)
            self._check()
            if self._switch is not None:
                for old in list(self._ready):
                    self._ready.pop(old).remove()
        if self._switch is not None and (k == 0 or k + 1 < self._n):  # else nothing is left to be sampled
            with self._time("switch"):
                self._switch.to_neighbors(self._check)

    def _check(self) -> None:
        if self._closed:
            raise _Stopped

    def _sample_superbatch(self, k: int, workers: Executor) -> SampledSuperbatch:
        first = self._start + k * self._size
        positions = range(first, min(first + self._size, self._stop))
        pending: deque[Future[_Sample]] = deque()
        with (
            self._time("sample"),
            SampleWriter(self._runs.file(f"samples-{k}"), self._num_nodes, self._disk, self._budget) as writer,
            ExitStack() as opened,
        ):
            edges = [opened.enter_context(planner.writer(k)) for planner in self._edges]
            plans = [planner.writer(k) for planner in self._planners]
            for each in filter(None, plans):
                opened.enter_context(each)
            store = partial(self._store, writer=writer, edges=edges, plans=plans)
            try:
                for position in positions:
                    pending.append(workers.submit(self._sample_patiently, position))
                    if len(pending) > self._threads:
                        store(pending.popleft())
                while pending:
                    store(pending.popleft())
            finally:
                for future in pending:
                    future.cancel()
            samples = writer.finish_samples()
            superbatch = SampledSuperbatch(samples)
            try:
                for planner, plan in zip(self._planners, plans, strict=True):
                    superbatch.parts.append(planner.sampled(samples, plan))
                for trace in edges:
                    superbatch.edges.append(PlannedEdges(trace.finish_trace()))
            except BaseException:
                superbatch.remove()
                raise
            return superbatch

    def _store(
        self,
        future: Future[_Sample],
        writer: SampleWriter,
        edges: Sequence[EdgeTraceWriter],
        plans: Sequence[PlanWriter | None],
    ) -> None:
        with self._lock:
            self._awaited = future
            self._changed.notify_all()
        try:
            sampled, distinct = future.result()
            ids = writer.add(sampled)
            for planner, plan in zip(self._planners, plans, strict=True):
                if plan is not None:
                    plan.add(planner.rows.stored(ids))
            for trace, of_type in zip(edges, distinct, strict=True):
                trace.add(of_type)
        except BaseException as error:
            # Recorded before the workers are waited for: some of them, and pause(), wait for this error themselves.
            with self._lock:
                if not isinstance(error, _Stopped):
                    self._error = error
                self._changed.notify_all()
            raise
        with self._lock:
            self._n_alive -= 1
            self._awaited = None
            self._note_freed()
            self._check()

    def _sample_patiently(self, position: int) -> _Sample:
        """Sample a batch. If memory is short, try again whenever some may have come free.

        Meanwhile record the shortage if no other sample can give memory back.
        """
        while True:
            with self._lock:
                self._changed.wait_for(lambda: not self._is_paused or self._error or self._closed)
                self._check()
                if self._error is not None:
                    raise _Stopped
                self._n_alive += 1
                self._n_sampling += 1
                seen = self._n_freed
            try:
                sampled = self._sample(position)
                distinct = [planner.distinct(sampled) for planner in self._edges]
            except BaseException as error:
                with self._lock:
                    self._n_alive -= 1
                    self._n_sampling -= 1
                    self._changed.notify_all()
                    if not isinstance(error, BudgetError):
                        raise
                    # Samples queued behind this one give nothing back.
                    if not self._n_sampling and self._is_written():
                        self._shortage = error
                self._pool.trim()
                with self._lock:
                    self._changed.wait_for(partial(self._may_try, seen))
            else:
                with self._lock:
                    self._n_sampling -= 1
                    self._shortage = None
                    self._note_freed()
                return sampled, distinct

    def _may_try(self, seen: int) -> bool:
        return self._n_freed != seen or self._error is not None or self._closed

    def _plan_beside_sampling(
        self, k: int, superbatch: SampledSuperbatch, sampled: dict[int, SampledSuperbatch], workers: Executor
    ) -> None:
        """Plan superbatch ``k`` while ``k + 1`` is sampled, then give the memory to the feature caches (Ginex, figure 9)."""
        assert self._switch is not None
        tiers = self._tiers()
        with ThreadPoolExecutor(1, thread_name_prefix="featstore-plan") as planner:
            planned = planner.submit(self._plan, k, superbatch, None, tiers)
            try:
                if k + 1 < self._n:
                    sampled[k + 1] = self._sample_superbatch(k + 1, workers)
            finally:
                planned.result()
        first_rows = {name: planner.first_rows for planner in self._planners for name in planner.names}
        with self._time("switch"):
            self._switch.to_features(first_rows, self._check)

    def _plan(
        self, k: int, superbatch: SampledSuperbatch, ahead: SampledSuperbatch | None, tiers: Sequence[DeviceTier | None]
    ) -> None:
        """Plan superbatch ``k`` by all planners, and pack the rows that it misses."""
        first = self._start + k * self._size
        for each in (superbatch,) if ahead is None else (superbatch, ahead):
            for at, part in enumerate(each.parts):
                part.tier = tiers[at] if tiers else None  # that of the next superbatch until it is planned itself
        held = sum(planner.nbytes for planner in self._edges)
        for at, of_edges in enumerate(self._edges):
            next_edges = None if ahead is None else ahead.edges[at]
            of_edges.plan(k, superbatch.edges[at], next_edges, first, self._check, held - of_edges.nbytes)
        held = sum(planner.nbytes for planner in self._planners)
        for at, planner in enumerate(self._planners):
            next_part = None if ahead is None else ahead.parts[at]
            planner.plan(k, superbatch.parts[at], next_part, first, self._check, held - planner.nbytes)


class _Stopped(Exception):
    """The consumer closed the epoch."""
