"""A record, beside a file of extents, of the part that is on the drive: a writer goes on where a killed one was."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from featstore.errors import CorruptionError, FormatError
from featstore.storage.sections import SectionFile, SectionWriter
from featstore.storage.writer import fsync_directory

__all__ = ["Checkpoint", "forget_checkpoint", "read_checkpoint", "write_checkpoint"]

KIND = "progress"


@dataclass
class Checkpoint:
    """A state of a file of extents that can be gone on from.

    Extents before ``end`` are whole. ``rows``, int64 ``[n_extents]``, say how many rows of each extent behind it are there,
    from its begin. ``sums``, uint64 ``[n, 512]``, are the file's so far.
    """

    end: int
    rows: npt.NDArray[np.int64]
    file_id: bytes
    sums: npt.NDArray[np.uint64]


def write_checkpoint(path: str, state: Checkpoint) -> None:
    """Record a state, durably and at once; what it says is on the drive already."""
    temporary = f"{path}.new"
    for name in (temporary, f"{temporary}.tmp"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    with SectionWriter(temporary, KIND) as writer:
        writer.append(np.array([state.end], np.int64))
        writer.append(np.frombuffer(state.file_id, np.uint8))
        writer.append(state.sums.reshape(-1))
        writer.append(state.rows)
        writer.finish(durable=True).close()
    os.rename(temporary, path)
    fsync_directory(os.path.dirname(path) or ".")


def read_checkpoint(path: str, n_extents: int, n_sums_bytes: int) -> Checkpoint | None:
    """Return what was recorded; None where nothing was, or not of such a file: nothing is lost but time."""
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
    return Checkpoint(end, rows.copy(), file_id, sums.reshape(-1, 512).copy())


def forget_checkpoint(path: str) -> None:
    """Remove a record, and what was being written of another."""
    for name in (path, f"{path}.new", f"{path}.new.tmp"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
