"""Numbers that edges had where the user gave them: written while lists are sorted, looked up by samplers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.errors import CorruptionError
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.rowfile import RowFile
from featstore.storage.writer import FileRecord, RowFileWriter

__all__ = ["EDGE_IDS", "EdgeIds", "EdgeIdsWriter", "id_bytes_of"]

Int64s = npt.NDArray[np.int64]

EDGE_IDS = "edge_ids"  # the field's name
_STEP = 1 << 16  # edges


def id_bytes_of(num_edges: int) -> int:
    """Return the bytes of an edge's number."""
    return 4 if num_edges < 1 << 31 else 8


class EdgeIdsWriter:
    """Write which edge of the input each stored edge is, unless each is its own: then there is no file.

    Parameters
    ----------
    num_edges : int
    open_writer : callable (row_bytes, dtype) -> RowFileWriter
        Called once, if an edge has moved.

    Notes
    -----
    Holds at most half a megabyte. Edges before the first one that has moved are written when that comes.
    """

    def __init__(self, num_edges: int, open_writer: Callable[[int, str], RowFileWriter]) -> None:
        self._width = id_bytes_of(num_edges)
        self._open_writer = open_writer
        self._writer: RowFileWriter | None = None
        self._n = 0

    def write(self, ids: Int64s | None, n: int) -> None:
        """Append the numbers of the next ``n`` stored edges; None: they are stored as they were given."""
        if self._writer is None:
            if ids is None or bool((ids == np.arange(self._n, self._n + n)).all()):
                self._n += n
                return
            self._writer = self._open_writer(self._width, f"int{8 * self._width}")
            self._count(0, self._n)
        if ids is None:
            self._count(self._n, self._n + n)
        else:
            self._put(ids)
        self._n += n

    def _count(self, first: int, end: int) -> None:
        for begin in range(first, end, _STEP):
            self._put(np.arange(begin, min(begin + _STEP, end)))

    def _put(self, ids: Int64s) -> None:
        assert self._writer is not None
        self._writer.write(np.ascontiguousarray(ids, f"<i{self._width}").view(np.uint8).reshape(len(ids), self._width))

    def finish(self) -> FileRecord | None:
        """Complete the file, which is durable then; None where no edge has moved."""
        return None if self._writer is None else self._writer.commit()

    def close(self) -> None:
        """Remove a file that was not finished; may be called again."""
        if self._writer is not None:
            self._writer.abort()


class EdgeIds:
    """Look-up of the numbers that edges had in the input, by where they are stored. Thread-safe if ``file`` is.

    Parameters
    ----------
    file : RowFile
        A row of 4 or 8 bytes for each stored edge.
    """

    def __init__(self, file: RowFile) -> None:
        self._file = file
        self._dtype = np.dtype(f"<i{file.row_bytes}")

    def replace(self, positions: Int64s, array: Callable[[tuple[int], npt.DTypeLike], npt.NDArray[Any]]) -> None:
        """Put each edge's number in the input in the place of its number among the stored edges.

        Parameters
        ----------
        positions : int64 array, shape (n,)
            In ``[0, num_edges)``; written over.
        array : callable
            ``array(shape, dtype)`` makes an array; the numbers are read into one.

        Raises
        ------
        CorruptionError
            The file holds a number that is no edge's.
        OSError, ClosedError, BudgetError

        Notes
        -----
        One batch of asynchronous reads of the pages that hold the numbers.
        """
        if not len(positions):
            return
        width = self._dtype.itemsize
        found = array((len(positions),), self._dtype)
        self._file.gather(positions, found.view(np.uint8).reshape(len(positions), width))
        wrong = (found < 0) | (found >= self._file.n_rows)
        if wrong.any():
            bad = int(wrong.argmax())
            where = PAGE_BYTES + int(positions[bad]) * width // PAGE_BYTES * PAGE_BYTES
            raise CorruptionError(f"edge {positions[bad]} cannot be number {found[bad]} of the input", self._file.path, where)
        positions[:] = found
