"""Run files that have served, kept to be written over: drives write faster to blocks that a file has already."""

from __future__ import annotations

import os
import threading

from featstore.storage.rundir import DiskQuota, RunDirectory, remove_file

__all__ = ["FileReuse"]


class FileReuse:
    """Files that nobody reads any more, in a run directory of their own, made in ``parent`` with the first file. Thread-safe.

    They count in the quota of the run that goes on, and are deleted where it is short.
    """

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        self._parent = parent
        self._runs: RunDirectory | None = None
        self._files: dict[str, int] = {}
        self._n_kept = 0
        self._closed = False
        self._lock = threading.Lock()
        self._disk: DiskQuota | None = None

    @property
    def n_bytes(self) -> int:
        with self._lock:
            return sum(self._files.values())

    def use(self, disk: DiskQuota) -> None:
        """Count in ``disk``, of a run that begins, from now on."""
        self._disk = disk
        disk.reclaim = self.drop
        disk.take(self.n_bytes, os.fspath(self._parent))

    def keep(self, path: str, n_bytes: int) -> None:
        """Take over a closed file of ``n_bytes``, which the quota has counted so far."""
        with self._lock:
            try:
                if self._closed:
                    raise FileNotFoundError
                if self._runs is None:
                    self._runs = RunDirectory(self._parent)
                self._n_kept += 1
                spare = self._runs.file(f"spare-{self._n_kept}")
                os.rename(path, spare)
            except OSError:  # no place for it, no descriptor for a lock: nothing is lost but time
                if remove_file(path):
                    self._give(n_bytes)
            else:
                self._files[spare] = n_bytes

    def take(self, n_bytes: int, path: str) -> bool:
        """Name the file whose size is nearest to ``n_bytes`` ``path``, to be counted by the caller; False: there is none."""
        with self._lock:
            if not self._files:
                return False
            spare = min(self._files, key=lambda name: abs(self._files[name] - n_bytes))
            self._give(self._files.pop(spare))
            try:
                os.rename(spare, path)
            except FileNotFoundError:
                return False
        return True

    def drop(self) -> None:
        with self._lock:
            while self._files:
                spare, n_bytes = self._files.popitem()
                if remove_file(spare):
                    self._give(n_bytes)

    def _give(self, n_bytes: int) -> None:
        if self._disk is not None:
            self._disk.give(n_bytes)

    def close(self) -> None:
        """Delete files and directory, and whatever is to be kept from now on; may be called again."""
        self.drop()
        with self._lock:
            self._closed = True
            runs, self._runs = self._runs, None
        if runs is not None:
            runs.close()
