"""Sampling a whole epoch at a time: one hop of all batches in one pass over the neighbour lists (in-situ sampling)."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from featstore._core.epochs import TARGET_WORDS
from featstore.budget import Reservation
from featstore.config import Options, check_at_least, parse_size
from featstore.errors import ClosedError
from featstore.sampling.batch import SampledBatch
from featstore.sampling.hops import Graph
from featstore.sampling.neighbor import NeighborSampler
from featstore.sampling.window import Window, drawn_bytes, is_wide, least_bytes, useful_bytes
from featstore.storage.rundir import DiskBudget, RunDirectory, finalize_here

__all__ = ["WINDOW", "EpochSampler", "Turns"]

WINDOW = "epoch samples"  # holder
LOG_WORDS = 2048  # that a batch's log of a hop should have in memory before it is spilled
DISK_SHARE = 4  # of the free disk
MEMORY_SHARE = 4  # of the memory that is left, where nobody divides it


class Dataset(Graph, Protocol):
    """What is needed of a graph beside what every sampler needs."""

    @property
    def path(self) -> str:
        """Its directory."""
        ...

    @property
    def options(self) -> Options:
        """How it was opened."""
        ...


class EpochSampler(NeighborSampler):
    """Sample many batches at once, hop by hop, each hop in one pass over the neighbour lists.

    The batches are those of :class:`NeighborSampler` with the same ``fanouts``, ``replace``, ``seed`` and ``redraw``, bit for
    bit. A loader that takes an epoch's batches one after the other has them drawn a window at a time: the nodes of all batches
    that draw in a hop are sorted, the lists that they need are read in sequence, and every node draws under its own batch's key,
    for this hop and all later ones. So a list is read once a hop for a window, and not once a batch. :meth:`sample`, for one
    batch alone, reads as :class:`NeighborSampler` does.

    Parameters
    ----------
    g : OutOfCoreGraph
    fanouts : sequence of int
    replace : bool
    seed : int
    redraw : bool
        See :class:`NeighborSampler`.
    window : int or "auto"
        Batches drawn at once; ``"auto"``: the epoch, or as many as ``disk`` and the memory hold.
    disk : int, str or None
        Most bytes of run files at once, for what is drawn and does not fit the memory; None: a quarter of the free disk.
    run_dir : path-like or None
        Where run files go, in a directory of their own that is removed afterwards, and after a crash by the next run; None:
        ``<dataset>.runs`` beside the dataset.

    Raises
    ------
    ValueError
        As :class:`NeighborSampler`; or ``window`` is below 1.

    Notes
    -----
    A window's cost is, a hop: the lists that its batches need, read once in the order of the file (lists in the neighbour cache
    are not read); the nodes that draw, sorted; and what they draw, written in logs by batch. Where the epoch has several windows,
    the next one is drawn while batches of this one are taken, each in half of the memory. Batches that are asked for again, or
    out of turn, are sampled alone.

    Thread-safe. Memory is counted in the graph's budget as ``epoch samples``.

    References
    ----------
    Song et al., In situ neighborhood sampling for large-scale GNN training, DaMoN 2024, section 2.3.

    Examples
    --------
    >>> sampler = EpochSampler(g, fanouts=[20, 15, 10])                                  # doctest: +SKIP
    >>> loader = featstore.Loader(g, sampler, seeds, batch_size=1000, strategy="streamed")  # doctest: +SKIP
    """

    def __init__(
        self,
        g: Dataset,
        fanouts: Sequence[int],
        replace: bool = False,
        seed: int = 0,
        redraw: bool = True,
        *,
        window: int | str = "auto",
        disk: int | str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(g, fanouts, replace, seed, redraw)
        self._dataset = g
        if isinstance(window, str):
            if window != "auto":
                raise ValueError(f"window is a number of batches or 'auto', not {window!r}")
        else:
            check_at_least("window", window, 1)
        self.window = window
        self._drawn = {"windows": 0, "passes_s": 0.0, "list_bytes": 0, "spilled_bytes": 0}
        self._counting = threading.Lock()
        self.disk = None if disk is None else parse_size(disk)
        self.run_dir = None if run_dir is None else os.path.abspath(os.fsdecode(run_dir))

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, window={self.window!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"window": self.window, "disk": self.disk, "run_dir": self.run_dir}
        return _make, (type(self), self._g, self.fanouts, self.replace, self.seed, self.redraw, options)

    @property
    def threads(self) -> int:
        """Threads that draw side by side."""
        return self._dataset.options.threads

    @property
    def path(self) -> str:
        """The dataset's directory."""
        return self._dataset.path

    def stats(self) -> dict[str, float]:
        """Return totals as :meth:`NeighborSampler.stats`, and of windows that were drawn and are done.

        Returns
        -------
        dict
            ``windows``; ``passes_s``, seconds that their threads waited for lists; ``list_bytes`` that they read; and
            ``spilled_bytes``, which lay in run files.
        """
        with self._counting:
            return {**super().stats(), **self._drawn}

    def count(self, window: Window) -> None:
        """Count a window that is done."""
        with self._counting:
            self._drawn["windows"] += 1
            for name in ("passes_s", "list_bytes", "spilled_bytes"):
                self._drawn[name] += getattr(window, name)

    def in_turn(
        self, seeds: Callable[[int], torch.Tensor], epoch: int, start: int, stop: int, memory: Reservation | None = None
    ) -> Turns:
        """Return the batches ``start … stop - 1`` of an epoch, for whoever takes them about in order.

        Parameters
        ----------
        seeds : callable
            ``seeds(index)`` returns a batch's seeds; pure, thread-safe.
        epoch, start, stop : int
        memory : Reservation, optional
            What drawing may hold; by default some is reserved of what the budget has left.
        """
        return Turns(self, seeds, epoch, start, stop, memory)

    def memory_bytes(self, n_batches: int, n_seeds: int) -> tuple[int, int]:
        """Return the least and the most useful bytes to draw an epoch with, by its batches and their seeds."""
        n = n_batches if isinstance(self.window, str) else min(self.window, n_batches)
        width = 8 if is_wide(self._g) else 4
        targets, edges = self.expected(n_seeds)
        useful = useful_bytes(self._g, self.fanouts, n, drawn_bytes(edges, targets, width), targets, self.threads)
        return least_bytes(self._g, self.fanouts, 1 if isinstance(self.window, str) else n, width == 8), useful

    def expected(self, n_seeds: int) -> tuple[int, int]:
        """Return how many nodes of a batch draw, and how many edges: the most that there can be, or the mean of -1."""
        n_nodes = self._g.num_nodes
        mean = self._g.topology.num_edges // max(1, n_nodes) + 1
        n, targets, edges = n_seeds, 0, 0
        for fanout in self.fanouts:
            each = mean if fanout < 0 else fanout
            targets, n, edges = n, min(n_nodes, n * (1 + each)), edges + n * each
        return targets, edges


def _make(cls: type[EpochSampler], *args: Any) -> EpochSampler:
    return cls(*args[:-1], **args[-1])


@dataclass(eq=False)
class _Open:
    """A window that is drawn, or being drawn."""

    window: Window
    drawing: Future[None]
    left: set[int]  # batches that nobody has taken
    n_users: int = 0


class Turns:
    """The batches of an epoch, drawn in windows as they are taken. Thread-safe; made by :meth:`EpochSampler.in_turn`."""

    def __init__(
        self,
        sampler: EpochSampler,
        seeds: Callable[[int], torch.Tensor],
        epoch: int,
        start: int,
        stop: int,
        memory: Reservation | None,
    ) -> None:
        self._sampler, self._seeds, self._epoch, self._stop = sampler, seeds, epoch, stop
        self._changed = threading.Condition(threading.RLock())
        self._memory, self._own = memory, list[Reservation]()
        self._size = 0  # batches of a window, once it is known
        self._most = 1  # windows at once
        self._next = start  # the first batch that no window has
        self._windows: deque[_Open] = deque()  # oldest first; of those only the last may be in the making
        self._runs: RunDirectory | None = None
        self._disk = DiskBudget(sampler.disk, "what is sampled ahead")
        self._numbers = itertools.count()
        self._closed = False
        self._passes_s = 0.0  # of windows that are gone
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="featstore-window")
        finalize_here(self, _release, self._own)

    def __len__(self) -> int:
        return self._stop

    @property
    def passes_s(self) -> float:
        """Seconds that passes over neighbour lists have taken so far."""
        with self._changed:
            return self._passes_s + sum(each.window.passes_s for each in self._windows)

    def sample(self, position: int) -> SampledBatch:
        """Return a batch; one that was passed, or lies before the first, is sampled alone.

        Raises
        ------
        ClosedError, BudgetError, OSError, CorruptionError
            As the sampler's ``sample``; OSError also where run files do not fit the disk. The window is then drawn anew by
            whoever asks next.
        """
        found = self._enter(position)
        if found is None:
            return self._sampler.sample(self._seeds(position), self._epoch, position)
        try:
            sampled = found.window.sample(position)
            found.left.discard(position)
            return sampled
        finally:
            with self._changed:
                found.n_users -= 1
                if not found.left and not found.n_users and found in self._windows:
                    self._drop(found)
                    self._look_ahead()
                self._changed.notify_all()

    def _enter(self, position: int) -> _Open | None:
        """Wait until a batch's window is drawn, and return it, in use; None for a batch whose window is gone."""
        with self._changed:
            while True:
                if self._closed:
                    raise ClosedError("the epoch is over")
                found = next((each for each in self._windows if each.window.first <= position < each.window.stop), None)
                if found is None and position < self._next:
                    return None
                if found is not None and found.drawing.done():
                    error = found.drawing.exception()
                    if error is None:
                        found.n_users += 1
                        self._look_ahead()
                        return found
                    self._drop(found)
                    self._next = found.window.first
                    self._changed.notify_all()
                    raise error
                if found is None and not self._make_room():
                    continue
                if found is not None:
                    found.window.hurry()
                self._changed.wait()

    def _make_room(self) -> bool:
        """Begin the next window, in the place of the oldest if there are too many; False where one was begun."""
        if len(self._windows) >= self._most:
            oldest = self._windows[0]
            if oldest.n_users or not oldest.drawing.done():
                return True
            self._drop(oldest)
        self._begin()
        return False

    def _look_ahead(self) -> None:
        if self._size and self._next < self._stop and len(self._windows) < self._most and not self._closed:
            self._begin()

    def _drop(self, which: _Open) -> None:
        self._windows.remove(which)
        self._passes_s += which.window.passes_s
        self._sampler.count(which.window)
        which.window.close()

    def _begin(self) -> None:
        """Let the next window be drawn."""
        if not self._size:
            self._plan()
        assert self._memory is not None
        sampler, first = self._sampler, self._next
        stop = min(self._stop, first + self._size)
        window = Window(
            sampler,
            sampler.graph,
            self._seeds,
            self._epoch,
            first,
            stop,
            n_bytes=self._memory.n_bytes // self._most,
            n_workers=sampler.threads,
            path=self._path,
            disk=self._disk,
        )
        drawing = self._thread.submit(window.draw)
        self._windows.append(_Open(window, drawing, set(range(first, stop))))
        self._next = stop
        drawing.add_done_callback(self._tell)

    def _tell(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def _plan(self) -> None:
        """Choose how many batches a window has, and have memory for it."""
        sampler, graph, n = self._sampler, self._sampler.graph, self._stop - self._next
        seeds, wide = self._seeds(self._next), is_wide(graph)
        if self._memory is None:
            least, useful = sampler.memory_bytes(n, len(seeds))
            n_bytes = max(least, min(useful, graph.budget.available // MEMORY_SHARE))
            self._memory = graph.budget.reserve(WINDOW, n_bytes)
            self._own.append(self._memory)
        held, size = self._memory.n_bytes, n
        if not isinstance(sampler.window, str):
            size = min(sampler.window, n)
        else:
            width = 8 if wide else 4
            targets, edges = sampler.expected(len(seeds))
            if -1 in sampler.fanouts:  # which says nothing of the longest lists
                alone = sampler.sample(seeds, self._epoch, self._next)
                targets, edges = len(alone.input_ids), sum(len(block.src) for block in alone.blocks)
            stored = drawn_bytes(edges, targets, width) + TARGET_WORDS * width * targets
            disk = sampler.disk
            if disk is None:
                disk = shutil.disk_usage(os.path.dirname(self._run_dir) or ".").free // DISK_SHARE
            in_memory = held // (2 * LOG_WORDS * width * len(sampler.fanouts))
            size = max(1, min(n, in_memory, disk // max(1, stored)))
            if size < n:
                size = max(1, size // 2)  # two windows at once
            while size > 1 and least_bytes(graph, sampler.fanouts, size, wide) > held:
                size //= 2
        has_room = 2 * least_bytes(graph, sampler.fanouts, size, wide) <= held
        self._size, self._most = size, 2 if size < n and has_room else 1

    @property
    def _run_dir(self) -> str:
        given = self._sampler.run_dir
        return f"{self._sampler.path}.runs" if given is None else given

    def _path(self) -> str:
        with self._changed:
            if self._runs is None:
                self._runs = RunDirectory(self._run_dir)
            return self._runs.file(f"drawn-{next(self._numbers)}")

    def stop(self) -> None:
        """Stop drawing, and send whoever waits away; does not wait for them."""
        with self._changed:
            self._closed = True
            for each in self._windows:
                each.window.stop_drawing()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop drawing, and remove the run files; may be called again."""
        self.stop()
        self._thread.shutdown()
        with self._changed:
            self._changed.wait_for(lambda: not any(each.n_users for each in self._windows))
            while self._windows:
                self._drop(self._windows[-1])
            if self._runs is not None:
                self._runs.close()
        _release(self._own)


def _release(held: list[Reservation]) -> None:
    while held:
        held.pop().release()
