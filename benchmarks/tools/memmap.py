"""Rows of a ``.npy`` file through ``np.memmap``: the reference of every benchmark that compares with a memory map.

It is the best that a PyTorch user can do with a map in the same memory. ``MADV_RANDOM`` turns read-ahead off, which would fetch
32 pages for each row. A thread that touches a missing page waits for it, so one thread keeps one read in flight, and many threads
keep many. On two cores and a virtual SSD (Intel Xeon), 8 to 64 threads read 3 to 5 times as many rows a second as one, and more
than 16 are hardly faster. ``torch.index_select`` on as many threads is as fast, but their number is then the whole process's.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

N_THREADS = 16
PARTS_PER_THREAD = 4  # so that no thread is left with the last, slow part


class MemmapRows:
    """Two-dimensional ``.npy`` file, mapped for random access.

    Parameters
    ----------
    path : str, path or memmap
    n_threads : int
        Threads that read; 1 is what ``rows[ids]`` does.
    """

    def __init__(self, path: str | os.PathLike[str] | np.memmap, n_threads: int = N_THREADS) -> None:
        self.rows = path if isinstance(path, np.memmap) else np.load(path, mmap_mode="r")
        self.rows._mmap.madvise(mmap.MADV_RANDOM)
        self.n_threads = n_threads
        self._pool = ThreadPoolExecutor(n_threads)

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows ``ids`` (int64, shape (n,), none negative) in a tensor of their own."""
        wanted = ids.numpy()
        out = np.empty((len(wanted), self.rows.shape[1]), self.rows.dtype)
        step = -(-len(wanted) // (PARTS_PER_THREAD * self.n_threads)) or 1

        def read(first: int) -> None:
            # NumPy copies through a buffer unless ids are clipped; ids out of range are the caller's error.
            np.take(self.rows, wanted[first : first + step], axis=0, out=out[first : first + step], mode="clip")

        list(self._pool.map(read, range(0, len(wanted), step)))
        return torch.from_numpy(out)


def copied(path: Path, shape: tuple[int, int], blocks: Iterable[npt.NDArray[np.float32]]) -> Iterator[npt.NDArray[np.float32]]:
    """Yield blocks of rows that are written to a ``.npy`` file, too."""
    mapped, first = np.lib.format.open_memmap(path, "w+", np.float32, shape), 0
    for block in blocks:
        mapped[first : first + len(block)] = block
        first += len(block)
        yield block
    mapped.flush()
