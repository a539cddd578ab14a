"""Gather of one feature's rows: the executor runs a batch plan, made here or ahead; then the host cache changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.cache.table import FeatureCache
from featstore.errors import BudgetError, ClosedError
from featstore.gather.buffers import BufferPool, carve
from featstore.gather.copythreads import CopyThreads
from featstore.gather.counters import GatherCounts
from featstore.gather.executor import execute
from featstore.gather.plan import BatchPlan, Changeset, Tier, TierRows
from featstore.gather.sources import MemorySource, RowSource

__all__ = ["Gather"]

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]

# A gather through a cache is planned in parts, so that the plan's arrays (20 bytes a row) stay small beside the rows.
MOST_ROWS_AT_ONCE = 1 << 21  # as many as the reader sorts at once: a page is read once a part
# A plan of so few rows takes ordinary memory, which is never refused: a gather ends, however short the budget is.
FEWEST_ROWS_AT_ONCE = 512
_MEMORY = frozenset({Tier.HOST})
_ALL = frozenset(Tier)
_OTHERS = _ALL - _MEMORY
_NO_ROWS = np.empty(0, np.int64)


class Gather:
    """Reader of one feature's rows: from its host cache, if any, and otherwise from its source. Thread-safe.

    ``n_threads`` threads copy. ``n_takes`` counts gathers of at least one row.
    """

    def __init__(self, source: RowSource, pool: BufferPool, n_threads: int) -> None:
        self.source = source
        self._pool = pool
        self._n_threads = n_threads
        self._beside_extents = CopyThreads(n_threads)
        self.n_takes = 0
        self.use_cache(None)

    @property
    def cache(self) -> FeatureCache | None:
        return self._tiers[0]

    def use_cache(self, cache: FeatureCache | None) -> None:
        """Gather through a host cache from now on; with None, without one."""
        sources: dict[Tier, RowSource] = {Tier.BASE: self.source}
        if cache is not None:
            sources[Tier.HOST] = MemorySource(cache.array, self._n_threads)
        # One attribute, so that a concurrent gather never plans by one cache and copies from another.
        self._tiers: tuple[FeatureCache | None, dict[Tier, RowSource]] = cache, sources

    def rows(
        self,
        rows: Int64s | range,
        out: Uint8s,
        counts: GatherCounts | None = None,
        gap_bytes: int | None = None,
        threads: int | None = None,
    ) -> None:
        """Gather rows by a plan that is made now; after an error ``out`` is undefined.

        Parameters
        ----------
        rows : int64 array, shape (k,), or range of step 1
            In ``[0, n_rows)``; any order, repeats allowed.
        out : uint8 array, shape (k, row_bytes), C-contiguous
        counts : GatherCounts, optional
            The counts of this call are added to it.
        gap_bytes : int, optional
            See :meth:`RowSource.gather`.
        threads : int, optional
            Number of threads that copy cached rows, in place of ``n_threads``.
        """
        n, done, at_once = len(rows), 0, MOST_ROWS_AT_ONCE
        if not n:
            self.source.check_open()
            return
        self.n_takes += 1
        while done < n:
            tiers, given = self._tiers, None
            room: Any = np.empty
            cache, sources = tiers if threads is None else self._copied_by(tiers, threads)
            part: Any = rows[done:] if cache is None else rows[done : done + at_once]
            if cache is None:
                given = BatchPlan(len(part), (TierRows(Tier.BASE, part),))
            else:
                if len(part) > FEWEST_ROWS_AT_ONCE:
                    try:
                        # Reserved before anything changes, so that gathered rows can be admitted, too.
                        room = carve(self._pool.array(cache.scratch_bytes(len(part)), np.uint8))
                    except BudgetError:
                        self._pool.trim()
                        at_once = max(len(part) // 2, FEWEST_ROWS_AT_ONCE)
                        continue
                if isinstance(part, range):
                    part = np.arange(part.start, part.stop, dtype=np.int64)
            try:
                self._run(cache, sources, given, partial(np.asarray, part), out[done : done + len(part)], counts, gap_bytes, room)
            except ClosedError:
                if tiers is self._tiers:
                    raise
                continue  # The cache was replaced meanwhile: repeat with the new one.
            done += len(part)

    @staticmethod
    def _copied_by(
        tiers: tuple[FeatureCache | None, dict[Tier, RowSource]], threads: int | None
    ) -> tuple[FeatureCache | None, dict[Tier, RowSource]]:
        """Set the number of ``threads`` that copy a cache's rows; None keeps the number."""
        cache, sources = tiers
        if cache is None or threads is None:
            return tiers
        return cache, {**sources, Tier.HOST: MemorySource(cache.array, threads)}

    def planned(
        self,
        plan: BatchPlan,
        rows: Callable[[], Int64s],
        out: Uint8s,
        counts: GatherCounts | None = None,
        tiers: Mapping[Tier, RowSource] | None = None,
        threads: int | None = None,
    ) -> None:
        """Gather a batch by a plan that was made ahead, and apply the plan's changes to the host cache.

        After an error ``out`` is undefined. After a BudgetError the cache, and tiers that are read in order, are as before the
        call, which may be repeated.

        Parameters
        ----------
        plan : BatchPlan
            Made for the cache as it is now; plans run in the order in which they were made, by one thread.
        rows : callable
            Returns the batch's rows, int64 [plan.n_rows]. They are needed for hits in slots that the cache has given back, which
            are read from the source.
        out, counts, threads
            As for :meth:`rows`.
        tiers : mapping of Tier to RowSource, optional
            Sources of the plan's tiers besides the cache and the feature's own source.
        """
        self.n_takes += plan.n_rows > 0
        cache, sources = self._copied_by(self._tiers, threads)
        if tiers:
            sources = {**sources, **tiers}
        if cache is None or threads is not None or Tier.PACKED not in sources:
            self._run(cache, sources, plan, rows, out, counts)
            return
        # Other threads read extents and plans meanwhile; a copying thread that waits for a core delays the whole copy.
        copying, begin = self._beside_extents, time.perf_counter()
        sources[Tier.HOST] = MemorySource(cache.array, copying.now)
        self._run(cache, sources, plan, rows, out, counts)
        copying.ran(out.nbytes, time.perf_counter() - begin)

    @staticmethod
    def _run(
        cache: FeatureCache | None,
        sources: Mapping[Tier, RowSource],
        given: BatchPlan | None,
        rows: Callable[[], Int64s],
        out: Uint8s,
        counts: GatherCounts | None,
        gap_bytes: int | None = None,
        room: Any = np.empty,
    ) -> None:
        """Run the ``given`` plan, or else a plan of the cache, whose arrays ``room`` allocates."""
        if cache is None:
            assert given is not None
            plan, filled = given, 0
        else:
            # Slots that are not pinned may be overwritten: hits are copied before any admission.
            depth = cache.pins()
            try:
                cache.pin()
                plan = cache.plan(rows(), room) if given is None else cache.surviving(given, rows)
                filled = execute(plan, sources, out, _MEMORY, counts)
            finally:
                cache.unpin(depth)
        if filled < plan.n_rows:
            # Without a cache hits have no source: it was closed after the plan was made, and ClosedError says so.
            execute(plan, sources, out, _ALL if cache is None else _OTHERS, counts, gap_bytes)
        if cache is not None and (given is not None or filled < plan.n_rows or cache.has_failed):
            begin = time.perf_counter()
            if given is None:
                changes = _admitted(cache, plan, room)
            else:
                cache.count(plan)
                changes = plan.changes
            if changes is not None:
                cache.apply(changes, out)
                if counts is not None:
                    counts.update_s += time.perf_counter() - begin
        if counts is not None:
            counts.count_plan(plan)
            if given is not None and given is not plan:
                counts.hits_lost += given.count(Tier.HOST) - plan.count(Tier.HOST)


def _admitted(cache: FeatureCache, plan: BatchPlan, room: Any) -> Changeset | None:
    """Let an online policy choose which missed rows of a plan to admit; None for any other cache."""
    missed = plan.parts[-1]
    rows = np.asarray(missed.addresses, np.int64) if missed.tier == Tier.BASE else _NO_ROWS
    return cache.admit(rows, missed.positions if len(rows) else None, room) if cache.is_online else None
