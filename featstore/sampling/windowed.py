"""The batches of an epoch in windows: a window is drawn on request or ahead, and so is the next epoch's first window."""

from __future__ import annotations

import itertools
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from featstore._core.epochs import TARGET_WORDS
from featstore.budget import Reservation
from featstore.errors import ClosedError
from featstore.sampling.batch import SampledBatch
from featstore.sampling.hops import FanoutSampler
from featstore.sampling.window import EpochWindow, Seeds, drawn_bytes, has_places, is_wide, least_bytes
from featstore.storage.calls import NO_SPACE
from featstore.storage.rundir import DiskQuota, RunDirectory, finalize_here, free_share

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["Coming", "Cut", "WindowedBatches", "Windows", "disk_of"]

HOLDER = "epoch samples"
LOG_WORDS = 2048  # words that a batch's log of a hop should have in memory before it is spilled
DISK_FRACTION = 1 / 4  # of the free disk, for run files
MEMORY_FRACTION = 1 / 4  # of the free memory, for windows without a given reservation


class Drawer(Protocol):
    """The part of :class:`~featstore.EpochSampler` that windows use."""

    window: int | str
    disk: int | None
    run_dir: str
    access: str

    @property
    def graph(self) -> OutOfCoreGraph: ...
    @property
    def threads(self) -> int: ...
    @property
    def hops(self) -> FanoutSampler: ...
    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch: ...
    def memory_bytes(self, n_batches: int, n_seeds: int) -> tuple[int, int]: ...
    def expected(self, n_seeds: int) -> tuple[int, int]: ...
    def count(self, window: EpochWindow) -> None: ...


@dataclass(frozen=True)
class Windows:
    """Division of an epoch into windows, and the memory and disk that would make it one window.

    The epoch has ``n`` windows of ``size`` batches. ``memory`` and ``disk``: the bytes that one window would take; None if they
    suffice already.
    """

    size: int
    n: int
    memory: int | None = None
    disk: int | None = None


class Cut:
    """Sizes of the windows of an epoch of ``n`` batches of ``n_seeds`` seeds, if the user did not set them.

    ``batch``: nodes and edges of a sampled batch, used with a fan-out of -1, which does not bound the lists.
    """

    def __init__(self, sampler: Drawer, n: int, n_seeds: int, batch: tuple[int, int] | None = None) -> None:
        self._graph, self._fanouts, self._n = sampler.graph, sampler.hops.list_fanouts, n
        self._wide = is_wide(sampler.graph)
        width = 8 if self._wide else 4
        targets, edges = sampler.expected(n_seeds)
        if batch is not None and -1 in sampler.hops.drawn_fanouts:
            targets, edges = sampler.hops.most_lists * batch[0], batch[1]
        self._stored = max(1, drawn_bytes(edges, targets, width, has_places(sampler.hops)) + TARGET_WORDS * width * targets)
        self._each = 2 * LOG_WORDS * width * len(self._fanouts)

    def size(self, held: int, disk: int) -> int:
        """Compute the batches of a window within ``held`` bytes of memory and ``disk`` bytes of run files."""
        size = max(1, min(self._n, held // self._each, disk // self._stored))
        if size < self._n:
            size = max(1, size // 2)  # two windows at once
        while size > 1 and least_bytes(self._graph, self._fanouts, size, self._wide) > held:
            size //= 2
        return size

    def windows(self, held: int, disk: int) -> Windows:
        """Cut an epoch into windows, and find the memory and disk that would make it one window."""
        n, most = self._n, self._n * self._stored
        all_of_it = max(held, n * self._each, least_bytes(self._graph, self._fanouts, n, self._wide))
        size = self.size(held, disk)
        memory = held + bisect_left(range(held, all_of_it), True, key=lambda held: self.size(held, most) == n)
        needed = disk + bisect_left(range(disk, most), True, key=lambda disk: self.size(all_of_it, disk) == n)
        return Windows(size, -(-n // max(1, size)), memory if memory > held else None, needed if needed > disk else None)


def disk_of(sampler: Drawer) -> int:
    """Return the bytes that a sampler's run files may take."""
    if sampler.disk is not None:
        return sampler.disk
    return free_share(sampler.run_dir, DISK_FRACTION)


@dataclass(frozen=True)
class _Plan:
    """Division of an epoch into windows, as :class:`WindowedBatches` uses it."""

    size: int  # batches of a window
    most: int  # windows at once
    n_bytes: int  # memory of each


class _Open:
    """A window that is drawn, or being drawn, by its own thread; :meth:`close` removes its run files."""

    def __init__(
        self, sampler: Drawer, seeds: Seeds, epoch: int, first: int, stop: int, plan: _Plan, *, ahead: bool = False
    ) -> None:
        self.plan, self.n_users = plan, 0
        self.left = set(range(first, stop))  # batches not taken yet
        self._sampler, self._runs = sampler, list[RunDirectory]()
        self._numbers, self._making = itertools.count(), threading.Lock()
        disk = None if sampler.disk is None else sampler.disk // plan.most
        self.window = EpochWindow(
            sampler.hops,
            sampler.graph,
            seeds,
            epoch,
            first,
            stop,
            n_bytes=plan.n_bytes,
            n_workers=sampler.threads,
            path=self._path,
            disk=DiskQuota(disk, "what is sampled ahead"),
            access=sampler.access,
            ahead=ahead,
        )
        thread = ThreadPoolExecutor(1, thread_name_prefix="featstore-window")
        self.drawing: Future[None] = thread.submit(self.window.draw)
        thread.shutdown(wait=False)

    def _path(self) -> str:
        with self._making:
            if not self._runs:
                self._runs.append(RunDirectory(self._sampler.run_dir))
            return self._runs[0].file(f"drawn-{next(self._numbers)}")

    def close(self) -> None:
        """Stop drawing, and remove the run files; no thread may take batches any more."""
        self.window.stop_drawing()
        self.drawing.exception()  # waits
        self._sampler.count(self.window)
        self.window.close()
        while self._runs:
            self._runs.pop().close()


class Coming:
    """The first window of the next epoch, drawn while the current epoch is trained on. Thread-safe."""

    def __init__(self, seeds_of: Callable[[int], Seeds]) -> None:
        self._seeds_of, self._pid = seeds_of, os.getpid()
        self._lock = threading.Lock()
        self._held: tuple[int, _Open] | None = None

    def begin(self, sampler: Drawer, epoch: int, stop: int, plan: _Plan) -> None:
        """Start drawing the first window of ``epoch``, unless a window is held already."""
        with self._lock:
            if self._held is None:
                self._held = epoch, _Open(sampler, self._seeds_of(epoch), epoch, 0, min(stop, plan.size), plan, ahead=True)

    def take(self, epoch: int, start: int) -> _Open | None:
        """Take the window if it begins at batch ``start`` of ``epoch``; drop any other window, and return None."""
        with self._lock:
            held, self._held = self._held, None
        if held is None:
            return None
        if (epoch, start) == (held[0], 0):
            return held[1]
        held[1].close()
        return None

    def keep(self, n_bytes: int) -> None:
        """Drop the window if it takes more than ``n_bytes`` of memory; no thread that draws one ahead may call."""
        if os.getpid() != self._pid:  # the parent's, whose thread draws it
            return
        with self._lock:
            held = self._held
            if held is None or held[1].plan.n_bytes <= n_bytes:
                return
            self._held = None
        held[1].close()


class WindowedBatches:
    """The batches of an epoch, drawn in windows as they are taken. Thread-safe; made by :meth:`EpochSampler.windowed`."""

    def __init__(
        self, sampler: Drawer, seeds: Seeds, epoch: int, start: int, stop: int, memory: Reservation | None, coming: Coming | None
    ) -> None:
        self._sampler, self._seeds, self._epoch, self._stop = sampler, seeds, epoch, stop
        # Code takes the lock itself, not the condition: Ctrl-C may leave Condition.__enter__ with the lock taken for good.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._memory, self._own, self._coming = memory, list[Reservation](), coming
        self._plan: _Plan | None = None
        self._next = start  # the first batch without a window
        self._windows: deque[_Open] = deque()  # oldest first; only the last one may still be drawn
        self._closed = False
        self._passes_s = 0.0  # of dropped windows
        if start:
            self._coming = None  # the plan for the rest of an epoch does not fit a whole one
        found = None if coming is None else coming.take(epoch, start)
        if found is not None:
            if memory is not None and found.plan.n_bytes == memory.n_bytes // found.plan.most:
                self._plan, self._next = found.plan, found.window.stop
                self._append(found)
            else:
                found.close()
        finalize_here(self, _release, self._own)

    @property
    def passes_s(self) -> float:
        """Seconds of passes over neighbour lists so far."""
        with self._lock:
            return self._passes_s + sum(each.window.passes_s for each in self._windows)

    def sample(self, position: int) -> SampledBatch:
        """Make a batch from its window; a batch whose window is gone, or before the first, is sampled alone.

        Errors are those of the sampler, and OSError if run files do not fit the disk. The next request then draws the window
        anew.
        """
        found = self._enter(position)
        if found is None:
            return self._sampler.sample(self._seeds(position), self._epoch, self._seeds.number(position))
        try:
            sampled = found.window.sample(position)
            found.left.discard(position)
            return sampled
        finally:
            with self._lock:
                found.n_users -= 1
                if not found.left and not found.n_users and found in self._windows:
                    self._drop(found)
                    self._look_ahead()
                self._changed.notify_all()

    def _enter(self, position: int) -> _Open | None:
        """Wait until a batch's window is drawn; return the window, marked as used, or None if it is gone."""
        with self._lock:
            while True:
                if self._closed:
                    raise ClosedError("the epoch is over")
                found = next((each for each in self._windows if each.window.first <= position < each.window.stop), None)
                if found is None and position < self._next:
                    return None
                if found is not None and found.drawing.done():
                    error = found.drawing.exception()
                    if error is None:
                        self._look_ahead()
                        found.n_users += 1
                        return found
                    was_awaited = found.window.is_urgent and not found.window.ahead  # which could not take all memory back
                    self._drop(found)
                    self._next = found.window.first
                    self._changed.notify_all()
                    if self._shrink(error):
                        continue
                    if was_awaited:
                        raise error
                    continue  # drawing ahead failed; now that a thread waits, it may succeed
                if found is None and not self._make_room():
                    continue
                if found is not None:
                    found.window.hurry()
                self._changed.wait()

    def _make_room(self) -> bool:
        """Begin the next window, in place of the oldest one if there are too many; return whether the caller must wait."""
        if self._plan is None:
            self._plan = self._divide()
        if len(self._windows) >= self._plan.most:
            oldest = self._windows[0]
            if oldest.n_users or not oldest.drawing.done():
                return True
            self._drop(oldest)
        self._begin(self._plan)
        return False

    def _shrink(self, error: BaseException) -> bool:
        """Halve the size of windows if one did not fit the disk and the user did not set the size; return whether it did."""
        plan = self._plan
        if plan is None or plan.size == 1 or not isinstance(self._sampler.window, str):
            return False
        if not (isinstance(error, OSError) and error.errno in NO_SPACE):
            return False
        self._plan = replace(plan, size=plan.size // 2)
        return True

    def _look_ahead(self) -> None:
        plan = self._plan
        if plan is None or self._closed or len(self._windows) >= plan.most:
            return
        with suppress(Exception):  # a request for one of its batches tries again, and raises the error
            if self._next < self._stop:
                self._begin(plan)
            elif self._coming is not None:
                self._coming.begin(self._sampler, self._epoch + 1, self._stop, plan)

    def _drop(self, which: _Open) -> None:
        self._windows.remove(which)
        self._passes_s += which.window.passes_s
        which.close()

    def _begin(self, plan: _Plan) -> None:
        first, stop = self._next, min(self._stop, self._next + plan.size)
        self._append(_Open(self._sampler, self._seeds, self._epoch, first, stop, plan))
        self._next = stop

    def _append(self, which: _Open) -> None:
        self._windows.append(which)
        which.drawing.add_done_callback(self._tell)

    def _tell(self, _: object) -> None:
        with self._lock:
            self._changed.notify_all()

    def _divide(self) -> _Plan:
        """Choose the number of batches of a window, and reserve memory for it."""
        sampler, graph, n = self._sampler, self._sampler.graph, self._stop - self._next
        seeds, wide = self._seeds(self._next), is_wide(graph)
        if self._memory is None:
            least, useful = sampler.memory_bytes(n, len(seeds))
            n_bytes = max(least, min(useful, int(graph.budget.available * MEMORY_FRACTION)))
            self._memory = graph.budget.reserve(HOLDER, n_bytes)
            self._own.append(self._memory)
        held, size = self._memory.n_bytes, n
        if not isinstance(sampler.window, str):
            size = min(sampler.window, n)
        else:
            batch = None
            if -1 in sampler.hops.drawn_fanouts:
                alone = sampler.sample(seeds, self._epoch, self._seeds.number(self._next))
                batch = len(alone.input_ids), sum(len(block.src) for block in alone.blocks)
            size = Cut(sampler, n, len(seeds), batch).size(held, disk_of(sampler))
        follows = size < n or self._coming is not None
        has_room = 2 * least_bytes(graph, sampler.hops.list_fanouts, size, wide) <= held
        most = 2 if follows and has_room else 1
        return _Plan(size, most, held // most)

    def stop(self) -> None:
        """Stop drawing, and raise ClosedError in waiting threads; does not wait for them."""
        with self._lock:
            self._closed = True
            for each in self._windows:
                each.window.stop_drawing()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop drawing, and remove the run files; may be called again."""
        self.stop()
        with self._lock:
            self._changed.wait_for(lambda: not any(each.n_users for each in self._windows))
            windows = list(self._windows)
            self._windows.clear()
            self._passes_s += sum(each.window.passes_s for each in windows)
        for each in windows:  # not under the lock, which drawing threads take at their end
            each.close()
        _release(self._own)


def _release(held: list[Reservation]) -> None:
    while held:
        held.pop().release()
