"""Prefetching of rows: plans name the misses of coming batches, which can be read before the cache is up to date.

A thread reads the misses of several batches at a time into memory of its own. So the drive's queue stays full while hits are
copied, the cache is updated and the loop computes. Close pages that different batches need share a read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featstore._core.buffers import Arena
from featstore.errors import BudgetError
from featstore.storage.rowfile import ReadStats

__all__ = ["RowPrefetcher"]

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]

HALVES = 2  # of the memory: one is filled while the other delivers rows


@dataclass
class _Group:
    """Consecutive batches read at once: the first batch, and the bounds of each batch's rows in ``rows``."""

    first: int
    bounds: list[int]
    rows: dict[str, Uint8s]

    @property
    def stop(self) -> int:
        return self.first + len(self.bounds) - 1


class RowPrefetcher:
    """Read the misses of batches ``start … stop - 1``, in order, in a thread, before the batches take them.

    A batch that does not fit half of the memory is not read ahead. The memory is held only while it has rows, or rows are read
    into it. If all rows were taken, none is held while the thread waits for plans.

    Parameters
    ----------
    misses : callable
        ``misses(position, wait, most)`` returns the rows that a batch misses, int64, or their number if there are more than
        ``most``. It returns None if the epoch is over, or if the plan is not there yet and ``wait`` is false.
    read : mapping of str to callable
        ``read[name](rows, out)`` reads rows of a feature, as bytes.
    row_bytes : mapping of str to int
    start, stop : int
    n_bytes : int
        Memory to read into, counted by the caller; one half is filled while the other half delivers rows.
    count : callable
        Called with the cost of each read.
    """

    def __init__(
        self,
        misses: Callable[[int, bool, int], Int64s | int | None],
        read: Mapping[str, Callable[[Int64s, Uint8s], ReadStats]],
        row_bytes: Mapping[str, int],
        start: int,
        stop: int,
        n_bytes: int,
        count: Callable[[ReadStats], None],
    ) -> None:
        self._misses = misses
        self._read = read
        self._row_bytes = row_bytes
        self._count = count
        self._stop = stop
        self._position = start  # batches before this one were read or skipped
        self._n_passed = start
        self._half_bytes = n_bytes // HALVES // 4096 * 4096
        self._memory: Uint8s | None = None
        self._is_loading = False
        self._groups: list[_Group] = []
        self._error: BaseException | None = None
        self._closed = False
        self._is_given_back = False
        self._is_over = False  # nothing more will be read
        # Taken itself, not by way of the condition: Ctrl-C may leave Condition.__enter__ with the lock taken for good.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread = threading.Thread(target=self._run, name="featstore-prefetch", daemon=True)

    def begin(self) -> None:
        """Start the thread. Not done by the constructor, so that the caller can first arrange for :meth:`close`."""
        self._thread.start()

    def take(self, position: int, name: str) -> Uint8s | None:
        """Wait for the rows of ``name`` that a batch misses, and return them; None if they were not read ahead."""
        with self._lock:
            self._changed.wait_for(lambda: self._position > position or self._error is not None or self._is_over)
            if self._position <= position:
                if self._error is not None:
                    raise self._error
                return None
            for group in self._groups:
                if group.first <= position < group.stop:
                    begin, end = group.bounds[position - group.first : position - group.first + 2]
                    return group.rows[name][begin:end]
        return None

    def passed(self, position: int) -> None:
        """Record that the rows of all batches up to ``position`` were taken; memory without rows to come is dropped."""
        with self._lock:
            self._n_passed = position + 1
            self._groups = [group for group in self._groups if group.stop > position + 1]
            if not self._groups and not self._is_loading:
                self._memory = None
            self._changed.notify_all()

    def give_back(self) -> bool:
        """Drop all rows read ahead, and read no more; return whether this freed memory, held now or later.

        Must not run beside :meth:`take`. Batches whose rows are gone are read as if never read ahead. Waits for a read under way.
        """
        with self._lock:
            held = self._half_bytes > 0 and not self._is_given_back
            self._closed = self._is_given_back = self._is_over = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_loading)
            self._groups.clear()
            self._memory = None
        return held

    def close(self) -> None:
        """Stop the thread and drop all rows read ahead; may be called again."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread() and self._thread.is_alive():  # else it never began, or ends by itself
            self._thread.join()
        self._groups.clear()
        self._memory = None

    # The thread's side.

    def _run(self) -> None:
        n_groups = 0
        try:
            while self._position < self._stop:
                group = None
                try:
                    rows = self._collect()
                    if rows is None:
                        return
                    if rows:
                        group = self._load(rows, n_groups % HALVES)
                        n_groups += 1
                except BudgetError:  # this batch is read when it is needed
                    rows = None
                with self._lock:
                    self._is_loading = False
                    self._position = self._position + 1 if group is None else group.stop
                    if group is not None and not self._is_given_back:
                        self._groups.append(group)
                    del group, rows  # this thread keeps no memory while it waits
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        finally:
            with self._lock:
                self._is_loading = False
                self._is_over = True
                self._changed.notify_all()

    def _collect(self) -> list[Int64s] | None:
        """Collect the misses of the batches to read next; [] if the next batch is too large, None at the end."""
        room = self._half_bytes // max(1, sum(self._row_bytes.values()))
        rows = self._misses(self._position, True, room)
        if rows is None or isinstance(rows, int):
            return None if rows is None else []
        found = [rows]
        room -= len(rows)
        with self._lock:  # a half is free, or the group only grows
            self._changed.wait_for(lambda: len(self._groups) < HALVES or self._closed)
            if self._closed:
                return None
            self._is_loading = True
        while self._position + len(found) < self._stop:
            more = self._misses(self._position + len(found), False, room)
            if more is None or isinstance(more, int):
                break
            found.append(more)
            room -= len(more)
        return found

    def _load(self, rows: list[Int64s], half: int) -> _Group:
        if self._memory is None:
            self._memory = np.frombuffer(Arena(HALVES * self._half_bytes), np.uint8).reshape(HALVES, -1)
        memory = self._memory[half]
        bounds = [0, *np.cumsum([len(some) for some in rows]).tolist()]
        wanted = np.concatenate(rows)
        group = _Group(self._position, bounds, {})
        begin = 0
        for name, width in self._row_bytes.items():
            end = begin + len(wanted) * width
            out = group.rows[name] = memory[begin:end].reshape(len(wanted), width)
            if len(wanted):
                self._count(self._read[name](wanted, out))
            begin = end
        return group
