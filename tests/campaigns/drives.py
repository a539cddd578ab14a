"""Drives of a test's own, whose power can be cut: ext4 or xfs on a file in memory. That needs root and loop devices.

The file system's user is killed, and it is then shut down (``EXT4_IOC_SHUTDOWN``, which is ``XFS_IOC_GOINGDOWN``), so that all
that was not flushed is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import random
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["KINDS", "Drive", "needs_mounts"]

SHUTDOWN = 0x8004587D
LOG_FLUSHED, LOG_LOST = 1, 2
NEW_NAMESPACE = 0x00020000
WRITE_AND_WAIT = 7  # of sync_file_range(2)
# Bytes of an image (of xfs mkfs's least), and how it is mounted. For ext4: files that are renamed over others are not flushed
# unasked, and the log is written when it is asked for. xfs has no such options.
KINDS = {"ext4": (64 << 20, "loop,noauto_da_alloc,commit=3000"), "xfs": (300 << 20, "loop,nouuid")}


class Drive:
    """ext4 or xfs on a file in memory, mounted at ``path`` while :meth:`mounted`. All of it is gone when the process ends."""

    def __init__(self, folder: Path, kind: str = "ext4") -> None:
        n_bytes, self._options = KINDS[kind]
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEW_NAMESPACE):
            raise OSError(ctypes.get_errno(), "unshare")
        self._run("mount", "--make-rprivate", "/")
        images, self.path = folder / "images", folder / "drive"
        images.mkdir()
        self.path.mkdir()
        self._run("mount", "-t", "tmpfs", "tmpfs", images)
        self._image, self._kept = images / "now", images / "before"
        with open(self._image, "wb") as file:
            file.truncate(n_bytes)
        self._run(f"mkfs.{kind}", "-q", "-F" if kind == "ext4" else "-f", self._image)

    @staticmethod
    def _run(*command: str | Path) -> None:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)

    def keep(self) -> None:
        """Remember what the drive holds, unmounted."""
        self._run("cp", "--sparse=always", self._image, self._kept)

    def restore(self) -> None:
        self._run("cp", "--sparse=always", self._kept, self._image)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        self._run("mount", "-o", self._options, self._image, self.path)
        try:
            yield self.path / "data"
        finally:
            self._run("umount", self.path)

    def cut(self, how: str, seed: int) -> None:
        """Cut the power."""
        if how == "some bytes":
            draws, libc = random.Random(seed), ctypes.CDLL(None, use_errno=True)
            for path in sorted(self.path.rglob("*")):
                if path.is_file() and draws.random() < 0.5:
                    fd = os.open(path, os.O_RDONLY)
                    assert libc.sync_file_range(fd, ctypes.c_long(0), ctypes.c_long(0), WRITE_AND_WAIT) == 0
                    os.close(fd)
        fd = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", LOG_LOST if how == "cut" else LOG_FLUSHED))
        os.close(fd)


@functools.cache
def can_mount(kind: str = "ext4") -> bool:
    """Whether this process may make and mount a file system of its own."""
    size, force = ("8M", "-F") if kind == "ext4" else ("300M", "-f")
    script = f"mount -t tmpfs tmpfs /mnt && truncate -s {size} /mnt/i && mkfs.{kind} -q {force} /mnt/i && mkdir /mnt/d"
    script += " && mount -o loop /mnt/i /mnt/d && umount /mnt/d"
    with contextlib.suppress(OSError):
        done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, check=False)
        return done.returncode == 0
    return False


def needs_mounts(kind: str = "ext4") -> None:
    """Skip the test where there can be no drive of its own."""
    if not can_mount(kind):
        pytest.skip(f"file systems of the test's own need root, loop devices, {kind} and mkfs.{kind}")
