"""Memory of planning a horizon: its size, a run file for next positions that do not fit, and the contract of a switch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from featstore.plan.planfile import write_bytes
from featstore.storage.rundir import DiskQuota
from featstore.storage.sections import SectionFile, SectionWriter

__all__ = ["PLANNER_FRACTION", "Spill", "Switch", "planning_bytes"]

PLANNER_FRACTION = 1 / 8  # of the memory: next positions are spilled if planning would need more
BATCH_BYTES = 72  # an access of the longest batch: its ids, next positions, slots and changes while it is planned
SLOT_BYTES = 13  # a slot: whether it is free, whether its row stays when a horizon begins, and the row if it leaves


def planning_bytes(
    n_rows: int,
    n_accesses: int,
    n_planned: int | None = None,
    longest: int = 0,
    *,
    capacity: int | None = None,
    spilled: bool = False,
    checked: bool = False,
    looks_ahead: bool = True,
) -> int:
    """Compute the bytes that planning a horizon holds.

    Parameters
    ----------
    n_rows : int
        Rows of the field. They take a quarter byte each if they outnumber the accesses.
    n_accesses : int
        Accesses of the horizon, look-ahead included. Each takes a third of a byte; each distinct row takes a position.
    n_planned : int, optional
        Accesses of the batches to plan, by default all. Their next positions are held, unless ``spilled`` to disk.
    longest : int
        Accesses of the longest batch.
    capacity : int, optional
        Most slots of the cache, by default one a row.
    spilled : bool
        Next positions are on disk.
    checked : bool
        Plans are checked against two tables: the slot of each row, and the row in each slot.
    looks_ahead : bool
        False: the policy holds a quarter byte a row and one batch alone, beside the tables of the checks.
    """
    width = 4 if n_accesses < 2**31 - 1 else 8
    id_width = 4 if n_rows < 2**31 - 1 else 8
    writing = 2 * write_bytes(longest)
    slots = n_rows if capacity is None else min(capacity, n_rows)
    table_of_checks = 4 * n_rows + id_width * slots if checked else 0
    if not looks_ahead:
        return n_rows // 4 + 16 + writing + BATCH_BYTES * longest + table_of_checks
    held = 0 if spilled else (width + 1) * (n_accesses if n_planned is None else n_planned)
    tables = width * min(n_rows, n_accesses) + (n_rows // 4 + 16 if n_rows > n_accesses else 0)
    return held + n_accesses // 3 + writing + BATCH_BYTES * longest + tables + (SLOT_BYTES + id_width) * slots + table_of_checks


class Spill:
    """Next positions of a horizon's planned batches in a run file: all are written, then read, then the file is removed."""

    def __init__(self, path: str, disk: DiskQuota) -> None:
        self._writer = SectionWriter(path, "next", disk)
        self._numbers: dict[int, int] = {}
        self._file: SectionFile | None = None

    def __setitem__(self, batch: int, positions: npt.NDArray[np.int32 | np.int64]) -> None:
        self._numbers[batch] = self._writer.append(positions)

    def __getitem__(self, batch: int) -> npt.NDArray[np.int32 | np.int64]:
        """Read the positions of a batch back; nothing more can be written afterwards."""
        if self._file is None:
            self._file = self._writer.finish()
        return self._file[self._numbers[batch]]

    def remove(self) -> None:
        if self._file is None:
            self._writer.abort()
        else:
            self._file.remove()


class Switch(Protocol):
    """Switch one memory between the neighbour cache, for sampling, and the feature caches, for running a superbatch.

    Both methods call ``check`` from time to time, which raises once the epoch is over; the error is passed on.
    """

    def to_neighbors(self, check: Callable[[], None]) -> None:
        """Give the memory to the neighbour cache before sampling. All batches of earlier superbatches have run."""
        ...

    def to_features(self, rows: Mapping[str, npt.NDArray[np.int64]], check: Callable[[], None]) -> None:
        """Give the memory to the feature caches before running; plans begin with ``rows[name]`` in each, the i-th in slot i."""
        ...
