"""Memory for rows that a thread writes, while their maker makes the next ones."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

__all__ = ["WriteBehind"]


class WriteBehind:
    """Memory that is filled by its owner and written by a thread, in turns; a context manager. One owner thread.

    Parameters
    ----------
    n_bytes : int
        Of the memory; the caller counts them.

    Notes
    -----
    What a write raises is raised by the next :meth:`memory`, or on leaving. Leaving with another exception waits for the write
    under way, and lets that exception pass.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._memory = np.empty(n_bytes, np.uint8)
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="featstore-write")

    def memory(self) -> npt.NDArray[np.uint8]:
        """Return the memory, shape (n_bytes,), once what it holds is written."""
        self._wait()
        return self._memory

    def start(self, write: Callable[[], None]) -> None:
        """Have the thread call ``write``, which may read the memory, until the memory is asked for again."""
        self._wait()
        self._writing = self._thread.submit(write)

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._thread.shutdown()
        if error is None:
            self._wait()
