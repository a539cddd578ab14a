"""A gate to the bytes of a cache's slots: gathers copy out of them side by side, an admission writes them alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Gate"]


class Gate:
    """Many readers, or one writer. A thread may enter again as a reader; waiting writers go first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # taken itself: Ctrl-C may leave Condition.__enter__ with the lock taken for good
        self._changed = threading.Condition(self._lock)
        self._n_readers = 0
        self._n_writers_waiting = 0
        self._is_writing = False
        self._mine = threading.local()

    @property
    def is_mine(self) -> bool:
        """Whether this thread is inside :meth:`read` or :meth:`write`."""
        return bool(getattr(self._mine, "depth", 0) or getattr(self._mine, "is_writing", False))

    @contextmanager
    def read(self) -> Iterator[None]:
        """Context manager of a reader; waits while somebody writes or waits to write."""
        depth = getattr(self._mine, "depth", 0)
        entered = 0
        try:
            with self._lock:
                if not depth:
                    self._changed.wait_for(lambda: not (self._is_writing or self._n_writers_waiting))
                self._n_readers += 1
                entered = 1
                self._mine.depth = depth + 1
            yield
        finally:
            with self._lock:
                self._mine.depth = depth
                self._n_readers -= entered
                self._changed.notify_all()

    @contextmanager
    def write(self) -> Iterator[None]:
        """Context manager of the writer; waits until nobody reads or writes. RuntimeError inside :meth:`read`."""
        if getattr(self._mine, "depth", 0):
            raise RuntimeError("apply() inside pinned() would wait for itself; leave pinned() first")
        entered = False
        try:
            with self._lock:
                self._n_writers_waiting += 1
                try:
                    self._changed.wait_for(lambda: not (self._is_writing or self._n_readers))
                    self._is_writing = entered = self._mine.is_writing = True
                finally:
                    self._n_writers_waiting -= 1
            yield
        finally:
            with self._lock:
                if entered:
                    self._is_writing = self._mine.is_writing = False
                self._changed.notify_all()
