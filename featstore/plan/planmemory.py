"""The memory of planning a window: its size, and a run file for next positions when that is too much."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from featstore.plan.planfile import write_bytes
from featstore.storage.rundir import DiskBudget
from featstore.storage.sections import SectionFile, SectionWriter

__all__ = ["PLANNER_SHARE", "Spill", "planning_bytes"]

PLANNER_SHARE = 8  # next positions that make planning need more than this part of the memory are spilled
BATCH_BYTES = 64  # an access of the longest batch: its ids, next positions, slots and changes while it is planned


def planning_bytes(
    n_rows: int, n_accesses: int, n_planned: int | None = None, longest: int = 0, *, spilled: bool = False, checked: bool = False
) -> int:
    """Return what planning windows holds.

    Parameters
    ----------
    n_rows : int
        For each: the last position, the slot, and a list of those cached.
    n_accesses : int
        Of a window, look-ahead included; a bit or two each.
    n_planned : int, optional
        Accesses that are planned, whose next positions are held; all by default.
    longest : int
        Accesses of a window's longest batch.
    spilled : bool
        Next positions are on disk.
    checked : bool
        Plans are checked: a row has another entry in a table of slots, and a slot one in a table of rows.
    """
    width = 4 if n_accesses < 2**31 - 1 else 8
    writing = 2 * write_bytes(longest)
    held = 0 if spilled else (width + 1) * (n_accesses if n_planned is None else n_planned)
    return held + n_accesses // 3 + writing + BATCH_BYTES * longest + (width + (20 if checked else 12)) * n_rows


class Spill:
    """Next positions of a window's planned batches in a run file, for as long as they are needed."""

    def __init__(self, path: str, disk: DiskBudget) -> None:
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
        """Delete the file."""
        if self._file is None:
            self._writer.abort()
        else:
            self._file.remove()
