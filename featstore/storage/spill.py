"""Spill files: values that do not fit the memory, divided among files which are appended to and read in the order of writing."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from featstore._core.descriptor import open_fd
from featstore.errors import CorruptionError
from featstore.storage.calls import close_fd, close_quietly, pread_exactly, pwrite_all

__all__ = ["SpillFile", "SpillFiles"]


class SpillFile:
    """Values of one dtype in a file, made by the first :meth:`append`. One owner thread.

    ``n_written`` is their number, also of those that are there already, which another object wrote: ``digest`` is its
    :attr:`digest`, without which they are not checked. The file is opened for each write and read: thousands of open descriptors
    would exceed the limit of open files.

    Notes
    -----
    What was read is compared with what was written once all of it is read. Until then values may be any: who uses them before
    checks their range.
    """

    def __init__(self, path: str, dtype: np.dtype[Any], n_written: int = 0, digest: int | None = None) -> None:
        self.path, self.dtype = path, dtype
        self.n_written, self._n_read = n_written, 0
        self._written, self._read = None if n_written else xxhash.xxh3_64(), xxhash.xxh3_64()
        self._digest = digest

    @property
    def digest(self) -> int | None:
        """Digest of all that was written; None if it is not known."""
        return self._digest if self._written is None else self._written.intdigest()

    def append(self, values: npt.NDArray[Any]) -> None:
        """Write values behind the others; the file may be incomplete after an error."""
        data = np.ascontiguousarray(values, self.dtype).view(np.uint8).data
        fd = open_fd(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            pwrite_all(fd, data, self.n_written * self.dtype.itemsize, self.path)
        finally:
            close_fd(fd, self.path)
        if self._written is not None:
            self._written.update(data)
        elif len(values):
            self._digest = None
        self.n_written += len(values)

    def take(self, n: int) -> npt.NDArray[Any]:
        """Read the next ``n`` values; CorruptionError if the file ends early, or if these are the last and any is another."""
        width = self.dtype.itemsize
        fd = open_fd(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = pread_exactly(fd, n * width, self._n_read * width, self.path)
        finally:
            close_quietly(fd)
        self._n_read += n
        self._read.update(data)
        if self._n_read == self.n_written and self.digest not in (None, self._read.intdigest()):
            raise self.damage()
        return np.frombuffer(data, self.dtype)

    def damage(self) -> CorruptionError:
        """Make the error of values that are not those which were written."""
        return CorruptionError("what is read is not what was written", self.path)

    def drain(self, n: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the values that were not read yet, ``n`` at a time, and then remove the file."""
        while left := self.n_written - self._n_read:
            yield self.take(min(n, left))
        if self.n_written:
            self.remove()

    def remove(self) -> None:
        """Remove the file."""
        os.unlink(self.path)


class SpillFiles(list[SpillFile]):
    """A number of spill files in one directory; a context manager that removes them."""

    def __init__(self, directory: str, dtype: np.dtype[Any], n: int) -> None:
        stem = os.path.join(directory, f"spill-{uuid.uuid4().hex}")
        super().__init__(SpillFile(f"{stem}-{number}.tmp", dtype) for number in range(n))

    def close(self) -> None:
        """Remove the files; may be called again."""
        for file in self:
            with contextlib.suppress(OSError):  # most were never made, or are removed already
                file.remove()

    def __enter__(self) -> SpillFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
