"""Turns of work by the file that it reads: several drives are kept busy, each at its rate."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

__all__ = ["FileTurns"]


class FileTurns:
    """Pieces of work, by number, to be taken by several workers. The caller holds a lock.

    ``file_of`` has the number of the file that each piece reads, from 0. A worker gets the next piece of the file with the
    fewest other workers; of several such files, the one with the most pieces left. So one worker waits for a slow drive while
    others go on with a faster one. Pieces of one file are taken in order.
    """

    def __init__(self, file_of: npt.NDArray[np.int64]) -> None:
        n_files = int(file_of.max(initial=0)) + 1
        self._left = [deque(np.flatnonzero(file_of == file).tolist()) for file in range(n_files)]
        self._at: dict[int, int] = {}  # worker -> file

    def take(self, worker: int) -> int | None:
        """Record that a worker's last piece is done, and return the number of its next one; None if there are no more."""
        self._at.pop(worker, None)
        busy = list(self._at.values())
        files = [file for file, left in enumerate(self._left) if left]
        if not files:
            return None
        self._at[worker] = min(files, key=lambda file: (busy.count(file), -len(self._left[file])))
        return int(self._left[self._at[worker]].popleft())
