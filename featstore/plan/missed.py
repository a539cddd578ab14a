"""The rows that each batch of a superbatch will miss, for packing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["MissedRows"]

Ids = npt.NDArray[Any]


class MissedRows:
    """Rows by batch, ascending: kept in memory as batches are planned where they fit, read back where they do not.

    Parameters
    ----------
    read : callable
        ``read(batch)`` returns a batch's rows, when all are planned.
    most_bytes : int
        What may be kept; counted by the caller.
    """

    def __init__(self, read: Callable[[int], Ids], most_bytes: int) -> None:
        self._read, self._most = read, most_bytes
        self._kept: list[Ids] | None = []
        self.nbytes = 0

    def add(self, rows: Ids) -> None:
        """Keep the next batch's rows; where they are too many, none are kept."""
        self.nbytes += rows.nbytes
        if self.nbytes > self._most:
            self.drop()
        elif self._kept is not None:
            self._kept.append(rows)

    def drop(self) -> None:
        """Keep nothing from now on."""
        self._kept, self._most, self.nbytes = None, 0, 0

    def kept(self, batch: int) -> Ids | None:
        """Return a batch's rows where they are in memory."""
        kept = self._kept
        return None if kept is None else kept[batch]

    def __call__(self, batch: int) -> npt.NDArray[np.int32 | np.int64]:
        """Return a batch's rows.

        Raises
        ------
        CorruptionError, OSError
            They could not be read back.
        """
        kept = self.kept(batch)
        return self._read(batch) if kept is None else kept
