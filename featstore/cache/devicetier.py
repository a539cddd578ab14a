"""Rows that a loader keeps on its device, in the same slots for each feature, and the map from rows to slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.cache.rowmap import RowMap
from featstore.gather.buffers import BufferPool
from featstore.gather.device import DeviceArray, Read
from featstore.gather.plan import DeviceRows

__all__ = ["REST_BYTES", "DeviceTier"]

Int64s = npt.NDArray[np.int64]

MAP = "device map"  # holder
REST_BYTES = 13  # that rest() allocates per row of a batch


class DeviceTier:
    """Rows of several features on one device, which do not change once they are filled: ``rows[i]`` is in slot ``i``.

    ``features`` has the shape and dtype of a row, by name. ``pool`` has the host memory in which batches are assembled. Its
    budget pays for host memory: row map, row numbers, and the rows if the device is the CPU. Given ``n`` rows of each feature, a
    row map of 4 bytes a row is made for :meth:`split`. Without ``n``, plans made ahead name the slots. ``n_threads`` threads
    copy if the device is the CPU. After BudgetError, or RuntimeError for lack of memory on the device
    (``torch.cuda.OutOfMemoryError``), nothing is held.

    References
    ----------
    Bai et al., PaGraph, TPDS 2021, section 3.1: the static cache of hot vertices on the device.
    """

    def __init__(
        self,
        rows: Int64s,
        features: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        pool: BufferPool,
        n: int | None = None,
        n_threads: int = 1,
    ) -> None:
        self.arrays: dict[str, DeviceArray] = {}
        self._rows = rows
        with ExitStack() as undo:
            self._held = [] if n is None else [pool.budget.reserve(MAP, 4 * n + rows.nbytes, owner=self)]
            undo.callback(self.close)
            self.map = None if n is None else RowMap(n)
            if self.map is not None:
                self.map.assign(rows, np.arange(len(rows), dtype=np.int32))
            for name, (shape, dtype) in features.items():
                self.arrays[name] = DeviceArray(len(rows), shape, dtype, device, pool, n_threads)
            undo.pop_all()

    def __len__(self) -> int:
        """Rows of each feature."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def fill(self, name: str, step: int, read: Read, go_on: Callable[[], bool] = lambda: True) -> bool:
        """Load a feature's rows, see :meth:`DeviceArray.fill`; return whether all were loaded."""
        return self.arrays[name].fill(self._rows, step, read, go_on)

    def split(self, ids: Int64s, array: Callable[..., npt.NDArray[Any]] = np.empty) -> tuple[DeviceRows, Int64s]:
        """Split a batch (distinct ``ids``, int64) into the rows that the device holds and the others, in the batch's order.

        ``array(n, dtype)`` makes the arrays of the result, 20 bytes a row at most; its exceptions propagate. One pass that
        releases the GIL. Thread-safe.
        """
        assert self.map is not None
        positions, slots, others, rest = self.map.split(ids, array)
        return DeviceRows(slots, positions, others), rest

    def rest(self, ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Find the rows of a batch that the device does not hold, in the dtype of ``ids``; takes ``REST_BYTES`` a row."""
        assert self.map is not None
        return ids[np.take(self.map.slot_of_row, ids) < 0]

    def close(self) -> None:
        """Give the memory back; may be called again. No batch may use the tier any more."""
        while self.arrays:
            self.arrays.popitem()[1].close()
        self.map, self._rows = None, self._rows[:0]
        while self._held:
            self._held.pop().release()
