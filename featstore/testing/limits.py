"""A memory control group around a child process: the limits of a small machine on a large one."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

__all__ = ["MemoryGroup", "memory_group"]


class MemoryGroup:
    """A control group of this kernel (version 1 or 2) that holds its processes, page cache included, to ``limit_bytes``.

    The kernel drops file pages at the limit, and then kills a process that allocates more. Made by :func:`memory_group`.
    """

    def __init__(self, limit_bytes: int) -> None:
        base = Path("/sys/fs/cgroup")
        self._v2 = (base / "cgroup.controllers").exists()
        self._folder = (base if self._v2 else base / "memory") / f"featstore-{uuid.uuid4().hex[:12]}"
        self._folder.mkdir()
        try:
            self.limit(limit_bytes)
            if self._v2:
                (self._folder / "memory.swap.max").write_text("0")
        except OSError:
            self._folder.rmdir()
            raise

    def limit(self, limit_bytes: int) -> None:
        """Hold the processes to another limit from now on; OSError if they have more that cannot be dropped."""
        (self._folder / ("memory.max" if self._v2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))

    def enter(self) -> None:
        """Move the calling process into the group; for ``prepare=`` of ``run_in_child`` and ``preexec_fn=`` of ``subprocess``."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def anonymous_bytes(self) -> int:
        """Bytes that the group holds now which are of no file."""
        name = "anon " if self._v2 else "rss "
        lines = (self._folder / "memory.stat").read_text().splitlines()
        return next(int(line.removeprefix(name)) for line in lines if line.startswith(name))

    @property
    def peak_bytes(self) -> int:
        """Most bytes that the group held at once, page cache included (needs Linux 5.19 under version 2)."""
        return int((self._folder / ("memory.peak" if self._v2 else "memory.max_usage_in_bytes")).read_text())

    def remove(self) -> None:
        self._folder.rmdir()


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Make a memory control group for the context's duration.

    OSError: control groups cannot be made here (PermissionError without root, FileNotFoundError where none are mounted).
    """
    group = MemoryGroup(limit_bytes)
    try:
        yield group
    finally:
        group.remove()
