"""Edges as pairs of ids, in the order in which they were read: written to a file, and read again when all nodes are known."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core.descriptor import open_fd
from featstore.storage.calls import close_quietly, fsync_fd, pread_exactly, pwrite_all

__all__ = ["Pairs"]

Int64s = npt.NDArray[np.int64]

_MOST = 1 << 18  # edges that are read at once


class Pairs:
    """A file of pairs in ``directory``. One owner thread.

    ``left`` is the :meth:`state` of an earlier call's file, behind whose pairs this one goes on.
    """

    name = "pairs.tmp"

    def __init__(self, directory: str, left: list[list[int]] | None = None) -> None:
        self._path = os.path.join(directory, self.name)
        self._fd = open_fd(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._blocks: list[list[int]] = [list(each) for each in left or ()]  # first byte, edges, bytes of an id, kind of edges
        self.n_bytes = 0
        if self._blocks:
            first, n_edges, width, _ = self._blocks[-1]
            self.n_bytes = first + 2 * n_edges * width

    def append(self, number: int, src: Int64s, dst: Int64s) -> None:
        """Append edges of the type with this number."""
        most = max(int(src.max(initial=0)), int(dst.max(initial=0)))
        rows = np.empty((2, len(src)), "<i4" if most < 1 << 31 else "<i8")
        rows[0], rows[1] = src, dst
        pwrite_all(self._fd, rows.view(np.uint8).reshape(-1).data, self.n_bytes, self._path)
        self._blocks.append([self.n_bytes, len(src), rows.itemsize, number])
        self.n_bytes += rows.nbytes

    def read(self, n: int) -> Iterator[tuple[int, Int64s, Int64s]]:
        """Yield number of the type, sources and destinations of the next edges, at most ``n``.

        Edges that were appended by and by come together: whoever divides them among files writes more to each at once.
        """
        n = min(n, _MOST)
        for number, blocks in itertools.groupby(self._blocks, key=lambda block: block[3]):
            src, dst, held = np.empty(n, np.int64), np.empty(n, np.int64), 0
            for first, n_edges, width, _ in blocks:
                done = 0
                while done < n_edges:
                    k = min(n - held, n_edges - done)
                    for row, ends in enumerate((src, dst)):
                        data = pread_exactly(self._fd, k * width, first + (row * n_edges + done) * width, self._path)
                        ends[held : held + k] = np.frombuffer(data, f"<i{width}")
                    held, done = held + k, done + k
                    if held == n:
                        yield number, src, dst
                        src, dst, held = np.empty(n, np.int64), np.empty(n, np.int64), 0
            if held:
                yield number, src[:held], dst[:held]

    def state(self) -> Any:
        """Make the pairs durable; describe them for a later call, as JSON values."""
        fsync_fd(self._fd, self._path)
        return self._blocks

    def close(self) -> None:
        """Close the file, which stays."""
        close_quietly(self._fd)
