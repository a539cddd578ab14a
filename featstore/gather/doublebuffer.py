"""Sequential reading of a file's rows by a thread that reads ahead while the consumer works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

__all__ = ["double_buffer"]

Rows = npt.NDArray[np.uint8]


def double_buffer(read: Callable[[int, int, Rows], object], blocks: Iterable[tuple[int, Rows]]) -> Iterator[tuple[int, Rows]]:
    """Yield blocks of rows once they are read, while a thread reads the next block; an error is raised at its block's turn.

    ``read(first, n, out)`` reads rows as :meth:`RowFile.read` does. Each of ``blocks`` is a first row, and the array of shape
    (n, row_bytes), C-contiguous, that its rows go to. Two arrays can take turns: a block is valid until the next one is
    requested.
    """
    coming = iter(blocks)
    block, following = next(coming, None), next(coming, None)
    if block is None:
        return
    read(block[0], len(block[1]), block[1])
    if following is None:
        yield block
        return
    with ThreadPoolExecutor(1, thread_name_prefix="featstore-read") as thread:  # leaving waits for the read
        while following is not None:
            reading = thread.submit(read, following[0], len(following[1]), following[1])
            yield block
            reading.result()
            block, following = following, next(coming, None)
        yield block
