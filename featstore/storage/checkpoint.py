"""Checkpoints: a record beside a file of extents of the part that is on the drive, so that a later writer can resume."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import numpy.typing as npt

from featstore.errors import CorruptionError, FormatError
from featstore.storage.sections import SectionFile, replacing

__all__ = ["forget_checkpoint", "read_checkpoint", "write_checkpoint"]

Rows = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]

KIND = "progress"


def write_checkpoint(path: str, end: int, rows: Rows, file_id: bytes, sums: Sums) -> None:
    """Record a state of a file of extents, from which a later writer resumes; the recorded rows are on the drive already.

    Extents before ``end`` are whole. ``rows``, int64 ``[n_extents]``, counts for each later extent the rows that are written
    from its beginning. ``sums``, uint64 ``[n, 512]``, are the file's page checksums so far.
    """
    arrays = (np.array([end], np.int64), np.frombuffer(file_id, np.uint8), sums.reshape(-1), rows)
    with replacing(path, KIND) as writer:
        for each in arrays:
            writer.append(each)


def read_checkpoint(path: str, n_extents: int, n_sums_bytes: int) -> tuple[int, Rows, bytes, Sums] | None:
    """Read a checkpoint; None if there is none, it is damaged, or it is of another file, which costs only time."""
    try:
        file = SectionFile(path, KIND)
        try:
            end, file_id, sums, rows = int(file[0][0]), file[1].tobytes(), file[2], file[3]
        finally:
            file.close()
    except (FormatError, CorruptionError, FileNotFoundError, IndexError):
        return None
    if sums.nbytes != n_sums_bytes or len(rows) != n_extents:
        return None
    return end, rows.copy(), file_id, sums.reshape(-1, 512).copy()


def forget_checkpoint(path: str) -> None:
    """Remove a checkpoint, and the unfinished file of another one."""
    for name in (path, f"{path}.tmp"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
