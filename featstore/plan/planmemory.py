"""The memory of planning a window: its size, a run file for next positions when that is too much, and who has it in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from featstore.plan.planfile import write_bytes
from featstore.storage.rundir import DiskQuota
from featstore.storage.sections import SectionFile, SectionWriter

__all__ = ["PLANNER_DIVISOR", "Spill", "Switch", "planning_bytes"]

PLANNER_DIVISOR = 8  # next positions that make planning need more than this part of the memory are spilled
BATCH_BYTES = 72  # an access of the longest batch: its ids, next positions, slots and changes while it is planned
SLOT_BYTES = 13  # a slot: whether it is free, whether its row stays when a window begins, and that row where it leaves


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
    """Return the bytes that planning windows holds.

    The field's ``n_rows`` take a quarter byte each at the most, where they are more than the accesses of a window, look-ahead
    included, which take two bits each and a position for each distinct row. Of the ``n_planned`` accesses, all by default, next
    positions are held, unless ``spilled`` to disk. ``longest``: accesses of the longest batch. ``capacity``: most slots of the
    cache. ``checked`` plans have an entry a row in a table of slots, and one a slot in a table of rows. A policy that does not
    look ahead has a quarter byte a row, and a batch.
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
    """Next positions of a window's planned batches in a run file, for as long as they are needed."""

    def __init__(self, path: str, disk: DiskQuota) -> None:
        self._writer = SectionWriter(path, "next", disk)
        self._numbers: dict[int, int] = {}
        self._file: SectionFile | None = None

    def __setitem__(self, batch: int, positions: npt.NDArray[np.int32 | np.int64]) -> None:
        self._numbers[batch] = self._writer.append(positions)

    def __getitem__(self, batch: int) -> npt.NDArray[np.int32 | np.int64]:
        """Read one back; nothing more can be written afterwards."""
        if self._file is None:
            self._file = self._writer.finish()
        return self._file[self._numbers[batch]]

    def remove(self) -> None:
        if self._file is None:
            self._writer.abort()
        else:
            self._file.remove()


class Switch(Protocol):
    """What is done between sampling and running a superbatch where both use one memory, one after the other.

    ``check`` is called now and then; what it raises (the epoch is over) is passed on.
    """

    def to_neighbors(self, check: Callable[[], None]) -> None:
        """Before sampling: no batch of an earlier superbatch is still to run."""
        ...

    def to_features(self, rows: npt.NDArray[np.int64], check: Callable[[], None]) -> None:
        """Before running: the plans begin with ``rows`` in the cache, the i-th in slot i."""
        ...
