"""Logs that many batches, or ranges of nodes, are written to side by side: in memory, and in run files once that is full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core.epochs import BLOCK_BYTES, LEAST_BLOCK_WORDS, LEAST_BLOCKS, LOG_BYTES, Logs
from featstore.cache.rowmap import huge_array
from featstore.storage.rundir import DiskQuota
from featstore.storage.sections import SectionWriter

__all__ = ["SpillingLogs", "least_log_bytes"]

Words = npt.NDArray[Any]

_MOST_BLOCK = 4096  # words
_FEW = 8  # logs, of which one can be a large part of all
_FILLED = 4  # blocks a log that an arena should have: more of them leave less of it unused when it is spilled


def _block_words(n_logs: int, n_bytes: int, width: int) -> int:
    """Return the words of a block where so many logs share an arena."""
    words = _MOST_BLOCK
    while words // 2 >= LEAST_BLOCK_WORDS and words * width * (_FILLED * n_logs + LEAST_BLOCKS) > n_bytes:
        words //= 2
    return words


def least_log_bytes(n_logs: int, n_workers: int, wide: bool) -> int:
    """Return the least memory in which :class:`SpillingLogs` works, if slowly."""
    width = 8 if wide else 4
    block = 2 * LEAST_BLOCK_WORDS * width + BLOCK_BYTES
    return n_workers * (n_logs * LOG_BYTES + LEAST_BLOCKS * block)


class SpillingLogs:
    """Logs of words, one set a worker; reading a log gives all workers' words of it.

    ``wide`` words are int64, not int32. ``n_bytes``, at least :func:`least_log_bytes`, are reserved by the caller. ``path()``
    names another run file when memory is full. A worker's words of a log stay in order. Each worker is one thread at a time;
    all have come to their end before anybody reads.
    """

    def __init__(
        self, n_logs: int, n_workers: int, wide: bool, n_bytes: int, path: Callable[[], str], disk: DiskQuota | None = None
    ) -> None:
        self._wide, self._path, self._disk = wide, path, disk
        self.n_logs = n_logs
        width = 8 if wide else 4
        each = n_bytes // n_workers - n_logs * LOG_BYTES
        if n_logs <= _FEW:
            # The rest is for a log on its way to the disk.
            each = max(each // 2, least_log_bytes(n_logs, 1, wide) - n_logs * LOG_BYTES)
        words = _block_words(n_logs, each, width)
        n_blocks = each // (words * width + BLOCK_BYTES)
        self.workers = [Logs(n_logs, huge_array(n_blocks * words * width).view(np.int8), words, wide) for _ in range(n_workers)]
        # A file a worker, however often it spills; of each log the numbers of its sections, and its words there.
        self._files: list[SectionWriter | None] = [None] * n_workers
        self._sections: list[dict[int, list[int]]] = [{} for _ in range(n_workers)]
        self._spilled = np.zeros((n_workers, n_logs), np.int64)

    @property
    def dtype(self) -> type[np.int32] | type[np.int64]:
        """Of the words."""
        return np.int64 if self._wide else np.int32

    @property
    def spilled_bytes(self) -> int:
        """Bytes in run files."""
        return int(self._spilled.sum()) * (8 if self._wide else 4)

    def spill(self, worker: int) -> None:
        """Write a worker's logs to its run file, and empty them; an OSError (the disk is full) loses what it spilled."""
        logs, file = self.workers[worker], self._files[worker]
        if file is None:
            file = self._files[worker] = SectionWriter(self._path(), "log", self._disk)
        for log in range(self.n_logs):
            n = logs.length(log)
            if n:
                self._sections[worker].setdefault(log, []).append(file.append(self._copy(logs, log)))
                self._spilled[worker, log] += n
        logs.clear()

    def _copy(self, logs: Logs, log: int, array: Callable[..., Words] = np.empty) -> Words:
        words = array(logs.length(log), self.dtype)
        logs.copy(log, words.view(np.int8))
        return words

    def length(self, log: int) -> int:
        """Return the words of a log."""
        return int(self._spilled[:, log].sum()) + sum(logs.length(log) for logs in self.workers)

    def pieces(self, log: int, array: Callable[..., Words] = np.empty) -> Iterator[Words]:
        """Yield a log's words, piece after piece, in arrays that ``array(n, dtype)`` makes; those of one worker in order."""
        for logs, file, sections in zip(self.workers, self._files, self._sections, strict=True):
            if file is not None:
                for number in sections.get(log, ()):
                    yield file.read(number, array)
            if logs.length(log):
                yield self._copy(logs, log, array)

    def read(self, log: int, array: Callable[..., Words] = np.empty) -> Words:
        """Return a log's words in one array that ``array(n, dtype)`` makes."""
        pieces = self.pieces(log, array)
        first, second = next(pieces, None), next(pieces, None)
        if first is None:
            return np.empty(0, self.dtype)
        if second is None:
            return first
        words = array(self.length(log), self.dtype)
        at = 0
        for piece in (first, second):
            words[at : at + len(piece)] = piece
            at += len(piece)
        del first, second
        for piece in pieces:
            words[at : at + len(piece)] = piece
            at += len(piece)
        return words

    def clear(self) -> None:
        """Empty all logs, and remove their run files."""
        for logs in self.workers:
            if not logs.is_empty:
                logs.clear()
        for worker, file in enumerate(self._files):
            if file is not None:
                file.abort()
            self._files[worker] = None
            self._sections[worker].clear()
        self._spilled[:] = 0

    def close(self) -> None:
        """Give the memory back, and remove the run files; there are no logs any more."""
        self.clear()
        self.workers = []
