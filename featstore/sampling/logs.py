"""Logs of many batches, or ranges of nodes, that are written at the same time: in memory, and in run files once it is full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core.epochs import BLOCK_BYTES, LEAST_BLOCK_WORDS, LEAST_BLOCKS, LOG_BYTES, Logs
from featstore.gather.buffers import huge_array
from featstore.storage.rundir import DiskQuota
from featstore.storage.sections import SectionWriter

__all__ = ["SpillingLogs", "least_log_bytes"]

Words = npt.NDArray[Any]

_MOST_BLOCK = 4096  # words
_FEW = 8  # logs: with so few, one log can have a large part of all words
_FILLED = 4  # blocks per log that an arena should have: with more blocks, less of the arena is unused when it is spilled


def _block_words(n_logs: int, n_bytes: int, width: int) -> int:
    """Choose the words of a block if ``n_logs`` logs share an arena of ``n_bytes``."""
    words = _MOST_BLOCK
    while words // 2 >= LEAST_BLOCK_WORDS and words * width * (_FILLED * n_logs + LEAST_BLOCKS) > n_bytes:
        words //= 2
    return words


def least_log_bytes(n_logs: int, wide: bool) -> int:
    """Return the least memory of a worker, in bytes, in which :class:`SpillingLogs` works, if slowly."""
    width = 8 if wide else 4
    block = 2 * LEAST_BLOCK_WORDS * width + BLOCK_BYTES
    return n_logs * LOG_BYTES + LEAST_BLOCKS * block


class SpillingLogs:
    """Logs of words, one set a worker; reading a log gives all workers' words of it.

    ``wide`` words are int64, otherwise int32. The caller has reserved ``n_bytes``, at least :func:`least_log_bytes` a worker.
    ``path()`` names another run file when memory is full. A worker's words of a log stay in order. Each worker is one thread at
    a time; no log is read before all workers have ended.
    """

    def __init__(
        self, n_logs: int, n_workers: int, wide: bool, n_bytes: int, path: Callable[[], str], disk: DiskQuota | None = None
    ) -> None:
        self._wide, self._path, self._disk = wide, path, disk
        self.n_logs = n_logs
        width = 8 if wide else 4
        each = n_bytes // n_workers - n_logs * LOG_BYTES
        if n_logs <= _FEW:
            # The rest holds a log that is being spilled.
            each = max(each // 2, least_log_bytes(n_logs, wide) - n_logs * LOG_BYTES)
        words = _block_words(n_logs, each, width)
        n_blocks = each // (words * width + BLOCK_BYTES)
        self.workers = [Logs(n_logs, huge_array(n_blocks * words * width).view(np.int8), words, wide) for _ in range(n_workers)]
        # One file per worker, however often it spills; for each log its sections' numbers, and its number of words there.
        self._files: list[SectionWriter | None] = [None] * n_workers
        self._sections: list[dict[int, list[int]]] = [{} for _ in range(n_workers)]
        self._spilled = np.zeros((n_workers, n_logs), np.int64)

    @property
    def dtype(self) -> type[np.int32] | type[np.int64]:
        """Dtype of the words."""
        return np.int64 if self._wide else np.int32

    @property
    def spilled_bytes(self) -> int:
        """Bytes in run files."""
        return int(self._spilled.sum()) * (8 if self._wide else 4)

    def spill(self, worker: int) -> None:
        """Write a worker's logs to its run file, and empty them; after an OSError (the disk is full) the logs are of no use."""
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
        """Count the words of a log."""
        return int(self._spilled[:, log].sum()) + sum(logs.length(log) for logs in self.workers)

    def pieces(self, log: int, array: Callable[..., Words] = np.empty) -> Iterator[Words]:
        """Yield a log's words, piece after piece, in arrays of ``array(n, dtype)``; the words of one worker are in order."""
        for logs, file, sections in zip(self.workers, self._files, self._sections, strict=True):
            if file is not None:
                for number in sections.get(log, ()):
                    yield file.read(number, array)
            if logs.length(log):
                yield self._copy(logs, log, array)

    def read(self, log: int, array: Callable[..., Words] = np.empty) -> Words:
        """Read a log's words into one array of ``array(n, dtype)``."""
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
        """Give the memory back, and remove the run files; the logs cannot be used again."""
        self.clear()
        self.workers = []
