"""Reuse of old run files, which are kept to be overwritten: drives write faster to blocks that a file already has."""

from __future__ import annotations

import os
import threading

from featstore.storage.rundir import DiskQuota, RunDirectory, remove_file

__all__ = ["FileReuse"]


class FileReuse:
    """Old run files in a run directory of their own, made in ``parent`` with the first file. Thread-safe.

    The files count in the quota of the current run, and are deleted if the quota is short.
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
        """Count the files in ``disk``, the quota of a run that begins, from now on."""
        self._disk = disk
        disk.reclaim = self.drop
        disk.take(self.n_bytes, os.fspath(self._parent))

    def keep(self, path: str, n_bytes: int) -> None:
        """Take over a closed file of ``n_bytes``, which the quota counts already."""
        with self._lock:
            try:
                if self._closed:
                    raise FileNotFoundError
                if self._runs is None:
                    self._runs = RunDirectory(self._parent)
                self._n_kept += 1
                kept = self._runs.file(f"spare-{self._n_kept}")
                os.rename(path, kept)
            except OSError:  # no space, or no descriptor for a lock: not keeping the file costs only time
                if remove_file(path):
                    self._give(n_bytes)
            else:
                self._files[kept] = n_bytes

    def take(self, n_bytes: int, path: str) -> bool:
        """Rename the file whose size is nearest to ``n_bytes`` to ``path``; return False if there is none.

        The caller counts the file's bytes from then on.
        """
        with self._lock:
            if not self._files:
                return False
            kept = min(self._files, key=lambda name: abs(self._files[name] - n_bytes))
            self._give(self._files.pop(kept))
            try:
                os.rename(kept, path)
            except FileNotFoundError:
                return False
        return True

    def drop(self) -> None:
        with self._lock:
            while self._files:
                kept, n_bytes = self._files.popitem()
                if remove_file(kept):
                    self._give(n_bytes)

    def _give(self, n_bytes: int) -> None:
        if self._disk is not None:
            self._disk.give(n_bytes)

    def close(self) -> None:
        """Delete the files and their directory; later calls of :meth:`keep` delete their file. May be called again."""
        self.drop()
        with self._lock:
            self._closed = True
            runs, self._runs = self._runs, None
        if runs is not None:
            runs.close()
