"""``Streamed``: Belady packs made superbatch by superbatch: fresh samples, read at sequential speed."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from featstore.cache.base import Policy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.config import Reservation
from featstore.errors import BudgetError
from featstore.gather.buffers import take_pages
from featstore.pack.packing import PackArenas, RunPacker
from featstore.plan.overlapped import MissedRows, Pack, Packed
from featstore.storage.extents import PAGES, ExtentMap, least_memory, most_memory
from featstore.storage.format import file_bytes, sums_bytes
from featstore.storage.pagestream import MOST_WINDOW_BYTES, Arenas, least_window
from featstore.storage.reuse import SpareFiles
from featstore.storage.rowfile import RowFile
from featstore.storage.rundir import DiskBudget, RunDirectory, finalize_here
from featstore.strategies.base import Runner, Strategy
from featstore.strategies.leases import make_room
from featstore.strategies.lookahead import look_ahead, rows_in_memory
from featstore.strategies.options import CACHE, DISK, LENGTH, RUN_DIR, option, policy_of
from featstore.strategies.profile import Profile
from featstore.strategies.registry import register_strategy
from featstore.strategies.requests import BatchSize, larger
from featstore.strategies.setup import Setup
from featstore.strategies.sizing import ask
from featstore.strategies.superbatch import SuperbatchRunner, least_size, plan_ahead, run_planned

__all__ = ["Streamed", "StreamedRunner", "window_for"]

Int64s = npt.NDArray[np.int64]

OPEN_FILES = 4  # superbatches whose extents are read, wait to be, or are filled
QUEUE_BYTES = 64 << 10  # scratch of the queue that reads their checksums


def window_for(available: int, n_features: int) -> int:
    """Return how many bytes each feature's extents are read ahead into: a sixteenth of what is available, for all of them."""
    return max(least_window(), min(MOST_WINDOW_BYTES, available // (16 * max(1, n_features))))


@register_strategy("streamed")
@dataclass(frozen=True)
class Streamed(Strategy):
    """As :class:`~featstore.Superbatch`, and copy what the cache will lack into extents that are read sequentially.

    One pass over the features copies the rows of a whole superbatch, beside the rest of its planning.

    Parameters
    ----------
    cache, policy, length, run_dir
        As of :class:`~featstore.Superbatch`.
    disk : int, str or None
        As of :class:`~featstore.Superbatch`; extents of two superbatches lie on disk, too.
    """

    cache: int | float | str | None = option("auto", CACHE, "rows in memory: bytes (1GiB), a share (10%, 0.1) or auto")
    policy: str | Policy | type[Policy] = option("belady", policy_of(PlannedPolicy), "which rows stay in memory")
    length: int | str = option("auto", LENGTH, "batches a superbatch")
    disk: int | str | None = option(None, DISK, "most bytes of run files, or a multiple of the features (1.5x)")
    run_dir: str | os.PathLike[str] | None = option(None, RUN_DIR, "where run files go")

    def run(self, setup: Setup) -> Runner:
        """See :class:`~featstore.Strategy`."""
        planning = plan_ahead(setup, self.policy, self.length, self.disk, self.run_dir)
        setup = replace(setup, planning=planning)
        if self.length != "auto" or isinstance(setup.batches, Profile):
            return run_planned(setup, StreamedRunner, self.cache)
        make_room(setup.graph, setup.features)
        setup = ask(setup, StreamedRunner, self.cache, planning.policy)
        profile, miss_share = look_ahead(setup, planning, rows_in_memory(setup, self.cache))
        if profile is None:
            return run_planned(setup, StreamedRunner, self.cache)
        left = None if planning.disk is None else planning.disk - profile.n_bytes
        planning = replace(planning, disk=left, miss_share=miss_share)
        try:
            runner = run_planned(replace(setup, batches=profile, planning=planning), StreamedRunner, self.cache)
        except BaseException:
            profile.close()
            raise
        runner.profile = profile
        return runner


class StreamedRunner(SuperbatchRunner):
    """As :class:`SuperbatchRunner`; then one pass over the features copies what the cache will lack into an extent a batch."""

    def __init__(self, setup: Setup) -> None:
        self._packing = Reservation(setup.graph.budget, "packing")
        self._least_packing = self._useful_packing = 0
        self.profile: Profile | None = None  # closed with this
        super().__init__(setup)
        self._ahead.resize(0)  # nothing is read of the features' own files while batches run
        graph = setup.graph
        self._bases: Mapping[str, RowFile] = {name: graph.features[name].pages for name in setup.features}
        widths = [base.row_bytes for base in self._bases.values()]
        needs = setup.needs
        assert needs is not None
        least = _packing_bytes(setup, self._n_accesses, int(self._planning.superbatch))
        own = len(widths) * least_window() + _packing_bytes(setup, self._n_accesses, least_size(setup))
        spare = needs.spare(own)
        self._window_bytes = max(
            least_window(), min(window_for(graph.budget.available, len(widths)), spare // max(1, len(widths)))
        )
        held: list[Reservation] = []
        self._on_death.append(weakref.finalize(self, _release, held))
        try:
            held.append(graph.budget.reserve("extents read ahead", self._window_bytes * len(widths)))
            most = max((most_memory(width, self._n_accesses, int(self._planning.superbatch)) for width in widths), default=0)
            spare = least + needs.spare(least)
            self._packing.resize(max(least, min(most, graph.budget.available // 4, spare)))
            held.append(self._packing)
        except BaseException:
            _release(held)
            super().close()
            raise
        self._held = held
        assert setup.planning is not None
        self._spares = SpareFiles(setup.planning.run_dir)
        # A quarter of the memory is left to what is held before the first buffer is: rows to pack, sums.
        windows = {name: Arenas(self._window_bytes) for name in setup.features}
        self._arenas = PackArenas(Arenas(self._packing.n_bytes // 4 * 3), windows)
        self._least_packing, self._useful_packing = least, self._packing.n_bytes
        self._on_death.append(finalize_here(self, self._spares.close))

    @classmethod
    def least_bytes(cls, setup: Setup, batch: BatchSize) -> int:
        """See :class:`SuperbatchRunner`; and what one batch is packed in, and each feature's extents are read into."""
        windows = len(setup.features) * least_window()
        size = least_size(setup)
        tables = OPEN_FILES * sum(_sums_bytes(setup, name, larger(batch.n_rows), size) for name in setup.features)
        return super().least_bytes(setup, batch) + windows + tables + QUEUE_BYTES + _packing_bytes(setup, batch.n_rows, size)

    def _idle_bytes(self) -> int:
        lent = super()._idle_bytes()
        busy = self._is_running or self._idle.locked()
        return lent if busy else lent + max(0, self._packing.n_bytes - self._least_packing)

    def _shrink(self) -> int:
        before = self._packing.n_bytes
        self._arenas.drop()
        self._packing.resize(min(before, self._least_packing))
        self._arenas.packing = Arenas(self._packing.n_bytes // 4 * 3)
        return super()._shrink() + before - self._packing.n_bytes

    def _grow(self) -> None:
        super()._grow()
        if self._packing.n_bytes < self._useful_packing:
            with suppress(BudgetError):  # a superbatch is then packed in more passes
                self._packing.resize(self._useful_packing)
                self._arenas.packing = Arenas(self._packing.n_bytes // 4 * 3)

    def close(self, failed: bool = False) -> None:
        """Give the memory back; may be called again."""
        self._arenas.drop()
        _release(self._held)
        self._spares.close()
        super().close(failed)
        if self.profile is not None:
            self.profile.close()

    def _packed_bytes(self, n_accesses: int) -> int:
        planning = self._setup.planning
        assert planning is not None
        widths = sum(self._setup.graph.features[name].row_bytes for name in self._setup.features)
        return (
            int(n_accesses * widths * planning.miss_share) // 2
        )  # extents of two superbatches lie on disk at once, samples of four

    def _packer(self, runs: RunDirectory, disk: DiskBudget) -> Pack | None:
        planning = self._setup.planning
        # How many rows are missed was estimated to choose the size: where a superbatch misses more than the disk holds, its rows
        # are read where they are.
        may_skip = planning is not None and isinstance(planning.superbatch, str)
        self._spares.use(disk)
        window = self._window_bytes
        pack = RunPacker(
            self._bases,
            self._setup.graph.reader,
            runs,
            disk,
            self._packing,
            window,
            self._spares,
            self._arenas,
            self._setup.reads.add,
            may_skip=may_skip,
        )
        return _PreparingPack(pack, self._setup, self._n_accesses * 9 // 8)


class _PreparingPack:
    """Take the pages that the first gathers will write to while the device is busy with the first superbatch's extents."""

    def __init__(self, pack: RunPacker, setup: Setup, n_rows: int) -> None:
        self._pack, self._setup, self._n_rows = pack, setup, n_rows

    @property
    def most_held(self) -> int:
        return self._pack.most_held

    def fits(self, n_missed: Int64s, n_bytes: int) -> bool:
        return self._pack.fits(n_missed, n_bytes)

    def __call__(self, k: int, n_missed: Int64s, rows_of: MissedRows, check: Callable[[], None]) -> Packed | None:
        if k:
            return self._pack(k, n_missed, rows_of, check)
        over = threading.Event()
        thread = threading.Thread(target=self._prepare, args=(lambda: not over.is_set(),), name="featstore-pages", daemon=True)
        thread.start()
        try:
            return self._pack(k, n_missed, rows_of, check)
        finally:
            over.set()
            thread.join()

    def _prepare(self, go_on: Callable[[], bool]) -> None:
        graph = self._setup.graph
        for name in self._setup.features:
            store = graph.features[name]
            cache: FeatureCache | None = store.cache
            if cache is not None:
                take_pages(cache.array.reshape(-1), partial(_is_whole, cache, go_on))
            # The loop's batch, one in the making, and those made ahead.
            graph.pool.prepare(self._n_rows * store.row_bytes, self._setup.prefetch + 2, go_on)


def _is_whole(cache: FeatureCache, go_on: Callable[[], bool]) -> bool:
    """Whether to go on while a cache has given no page back."""
    return go_on() and not cache.is_cut


def _sums_bytes(setup: Setup, name: str, n_rows: int, size: int) -> int:
    """Return the bytes of checksums of ``size`` extents of ``n_rows`` rows of a feature."""
    extents = ExtentMap(np.full(size, n_rows), setup.graph.features[name].row_bytes)
    return sums_bytes(file_bytes(PAGES, extents.total_pages))


def _packing_bytes(setup: Setup, n_rows: int, size: int) -> int:
    """Return the bytes in which superbatches of ``size`` batches of ``n_rows`` rows can be packed, a batch at a time."""
    longest = larger(n_rows)
    most = 0
    for name in setup.features:
        width = setup.graph.features[name].row_bytes
        most = max(most, least_memory(width, longest) + _sums_bytes(setup, name, longest, size) + 8 * size)
    return most


def _release(held: list[Reservation]) -> None:
    while held:
        held.pop().release()
