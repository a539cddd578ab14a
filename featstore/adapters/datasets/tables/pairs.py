"""Edges as pairs of ids, in the order in which they were read: written to a file, and read again when all nodes are known."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.storage.calls import close_quietly, fsync_fd, pread_exactly, pwrite_all

__all__ = ["Pairs"]

Int64s = npt.NDArray[np.int64]


class Pairs:
    """A file of pairs in ``directory``. One owner thread.

    ``left`` is the :meth:`state` of an earlier call's file, behind whose pairs this one goes on.
    """

    name = "pairs.tmp"

    def __init__(self, directory: str, left: list[list[int]] | None = None) -> None:
        self._path = os.path.join(directory, self.name)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._blocks: list[list[int]] = [list(each) for each in left or ()]  # first byte, edges, bytes of an id, kind of edges
        self._end = 0
        if self._blocks:
            first, n_edges, width, _ = self._blocks[-1]
            self._end = first + 2 * n_edges * width

    def append(self, number: int, src: Int64s, dst: Int64s) -> None:
        """Append edges of the type with this number."""
        most = max(int(src.max(initial=0)), int(dst.max(initial=0)))
        rows = np.empty((2, len(src)), "<i4" if most < 1 << 31 else "<i8")
        rows[0], rows[1] = src, dst
        pwrite_all(self._fd, rows.view(np.uint8).reshape(-1).data, self._end, self._path)
        self._blocks.append([self._end, len(src), rows.itemsize, number])
        self._end += rows.nbytes

    def read(self, n: int) -> Iterator[tuple[int, Int64s, Int64s]]:
        """Yield number of the type, sources and destinations of the next edges, at most ``n``."""
        for first, n_edges, width, number in self._blocks:
            for at in range(0, n_edges, n):
                k = min(n, n_edges - at)
                ends = [
                    np.frombuffer(
                        pread_exactly(self._fd, k * width, first + (row * n_edges + at) * width, self._path), f"<i{width}"
                    )
                    for row in range(2)
                ]
                yield number, ends[0].astype(np.int64), ends[1].astype(np.int64)

    def state(self) -> Any:
        """Make the pairs durable; describe them for a later call, as JSON values."""
        fsync_fd(self._fd, self._path)
        return self._blocks

    def close(self) -> None:
        """Close the file, which stays."""
        close_quietly(self._fd)
