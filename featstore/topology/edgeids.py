"""Positions of edges in the user's input: written while lists are sorted, looked up by samplers, and read in sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore._core import lists as _core
from featstore.errors import CorruptionError
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.rowfile import RowFile
from featstore.storage.writer import FileRecord, RowFileWriter

__all__ = ["EDGE_IDS", "EdgeIds", "EdgeIdsWriter", "id_bytes_of"]

Int64s = npt.NDArray[np.int64]

EDGE_IDS = "edge_ids"  # the field's name
_STEP = 1 << 16  # edges


def id_bytes_of(num_edges: int) -> int:
    """Choose the width of an edge's number."""
    return 4 if num_edges < 1 << 31 else 8


class EdgeIdsWriter:
    """Write the position in the input of each stored edge; there is no file if no edge has moved.

    ``open_writer(row_bytes, dtype)`` is called once, at the first edge that has moved; the numbers of all edges before are
    written then. The writer holds at most half a megabyte.
    """

    def __init__(self, num_edges: int, open_writer: Callable[[int, str], RowFileWriter]) -> None:
        self._width = id_bytes_of(num_edges)
        self._open_writer = open_writer
        self._writer: RowFileWriter | None = None
        self._n = 0

    def write(self, ids: Int64s | None, n: int) -> None:
        """Append the numbers of the next ``n`` stored edges; ``ids`` is None if these edges have not moved."""
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
        """Complete the file and make it durable; return its record, or None if no edge has moved."""
        return None if self._writer is None else self._writer.commit()

    def close(self) -> None:
        """Remove a file that was not finished; may be called again."""
        if self._writer is not None:
            self._writer.abort()


class EdgeIds:
    """Look-up of the numbers that edges had in the input, by their stored positions. Thread-safe if ``file`` is.

    ``file`` has a row of 4 or 8 bytes for each stored edge. All reading methods raise CorruptionError for a number that is no
    edge.
    """

    def __init__(self, file: RowFile) -> None:
        self._file = file
        self.dtype = np.dtype(f"<i{file.row_bytes}")  # of a number

    def read(self, first: int, out: npt.NDArray[Any]) -> None:
        """Read the numbers of the stored edges ``first …`` into ``out``, an array of :attr:`dtype`."""
        width = self.dtype.itemsize
        self._file.read(first, len(out), out.view(np.uint8).reshape(len(out), width))
        bad = _core.first_bad_id(out, width, self._file.n_rows)
        if bad >= 0:
            raise self.damage(first + bad, int(out[bad]))

    def pieces(self, first: int, stop: int, buffer: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield the numbers of the stored edges ``first … stop - 1`` in pieces, each of which lies in ``buffer``."""
        for begin in range(first, stop, len(buffer)):
            ids = buffer[: min(len(buffer), stop - begin)]
            self.read(begin, ids)
            yield begin, ids

    def damage(self, position: int, found: int) -> CorruptionError:
        """Make the error of a stored edge whose number cannot be ``found``."""
        where = PAGE_BYTES + position * self.dtype.itemsize // PAGE_BYTES * PAGE_BYTES
        return CorruptionError(f"edge {position} cannot be number {found} of the input", self._file.path, where)

    def replace(self, positions: Int64s, array: Callable[[tuple[int], npt.DTypeLike], npt.NDArray[Any]]) -> None:
        """Replace positions of stored edges, int64 ``[n]``, by their numbers in the input.

        ``array(shape, dtype)`` allocates the array for the numbers. They are read in one batch of asynchronous reads.
        """
        if not len(positions):
            return
        width = self.dtype.itemsize
        found = array((len(positions),), self.dtype)
        self._file.gather(positions, found.view(np.uint8).reshape(len(positions), width))
        bad = _core.first_bad_id(found, width, self._file.n_rows)
        if bad >= 0:
            raise self.damage(int(positions[bad]), int(found[bad]))
        positions[:] = found
