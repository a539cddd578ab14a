"""Gate to the bytes of a cache's slots: many gathers copy from them at a time, or one admission writes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Gate"]


class _Mine(threading.local):
    """State of one thread: how many times it has entered as a reader without leaving, and whether it writes."""

    depth = 0
    is_writing = False


class Gate:
    """Many readers, or one writer. A thread may enter again as a reader; waiting writers go first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # taken itself: Ctrl-C may leave Condition.__enter__ with the lock taken for good
        self._changed = threading.Condition(self._lock)
        self._n_readers = 0
        self._n_writers_waiting = 0
        self._is_writing = False
        self.mine = _Mine()

    @property
    def is_mine(self) -> bool:
        """Whether this thread is between :meth:`enter` and :meth:`leave`, or inside :meth:`write`."""
        return self.mine.depth > 0 or self.mine.is_writing

    def enter(self) -> None:
        """Enter as a reader; wait while a thread writes or waits to write. A reader that enters again does not wait."""
        mine = self.mine
        depth = mine.depth
        with self._lock:
            while not depth and (self._is_writing or self._n_writers_waiting):
                self._changed.wait()
            self._n_readers += 1
            mine.depth = depth + 1  # Ctrl-C does not come between two assignments

    def leave(self, depth: int) -> None:
        """Go back to ``depth``, the thread's depth before an :meth:`enter`, whether or not that call completed."""
        mine = self.mine
        if mine.depth == depth:
            return
        with self._lock:
            self._n_readers -= mine.depth - depth
            mine.depth = depth
            if self._n_writers_waiting and not self._n_readers:
                self._changed.notify_all()

    @contextmanager
    def write(self) -> Iterator[None]:
        """Let one writer in for a ``with`` block; wait until no thread reads or writes. RuntimeError for a reader."""
        if self.mine.depth:
            raise RuntimeError("apply() inside pinned() would wait for itself; leave pinned() first")
        entered = False
        try:
            with self._lock:
                self._n_writers_waiting += 1
                try:
                    self._changed.wait_for(lambda: not (self._is_writing or self._n_readers))
                    self._is_writing = entered = self.mine.is_writing = True
                finally:
                    self._n_writers_waiting -= 1
            yield
        finally:
            with self._lock:
                if entered:
                    self._is_writing = self.mine.is_writing = False
                self._changed.notify_all()
