"""Drives of a test's own, which can be filled, and whose power can be cut. They need root and loop devices.

The file system's user is killed, and it is then shut down (``EXT4_IOC_SHUTDOWN``, which is ``XFS_IOC_GOINGDOWN``), so that all
that was not flushed is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import random
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["CAN_BE_CUT", "KINDS", "Drive", "needs_mounts", "own_mounts", "run"]

SHUTDOWN = 0x8004587D
LOG_FLUSHED, LOG_LOST = 1, 2
NEW_NAMESPACE = 0x00020000
WRITE_AND_WAIT = 7  # of sync_file_range(2)


@dataclass(frozen=True)
class Kind:
    """A file system of so many bytes (of xfs mkfs's least): how it is made on a file, and mounted, and what follows."""

    mib: int
    make: str = ""
    mount: str = "loop"
    after: str = ""

    @property
    def name(self) -> str:
        return self.make.split()[0].removeprefix("mkfs.") if self.make else "tmpfs"


# For ext4: files that are renamed over others are not flushed unasked, and the log is written when it is asked for. xfs has no
# such options. Small as it is, ext4 has blocks of 1 KiB unless told; none are root's alone. Root has a quota on btrfs, too.
_UNFLUSHED, _BTRFS = "loop,noauto_da_alloc,commit=3000", "mkfs.btrfs -q -f --mixed -m single -d single"
KINDS = {
    "ext4": Kind(64, "mkfs.ext4 -q -F -m 0", _UNFLUSHED),
    "ext4 4k": Kind(64, "mkfs.ext4 -q -F -m 0 -b 4096", _UNFLUSHED),
    "xfs": Kind(300, "mkfs.xfs -q -f", "loop,nouuid"),
    "btrfs": Kind(128, _BTRFS),
    "quota": Kind(128, _BTRFS, after="btrfs quota enable {0} && btrfs subvolume create {0}/limited"),
    "tmpfs": Kind(48, mount="size=48M"),
}
CAN_BE_CUT = ("ext4", "xfs")


def run(*command: str | Path) -> None:
    """Run a command of the system, which must succeed."""
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)


def own_mounts() -> None:
    """Let this process have mounts of its own, which nobody else sees, and which end with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_NAMESPACE):
        raise OSError(ctypes.get_errno(), "unshare")
    run("mount", "--make-rprivate", "/")


class Drive:
    """A file system in memory, mounted at ``path`` while :meth:`mounted`. All of it is gone when the process ends."""

    def __init__(self, folder: Path, kind: str = "ext4") -> None:
        self._kind = KINDS[kind]
        own_mounts()
        images, self.path = folder / "images", folder / "drive"
        images.mkdir()
        self.path.mkdir()
        run("mount", "-t", "tmpfs", "tmpfs", images)
        self._image, self._kept = images / "now", images / "before"
        with open(self._image, "wb") as file:
            file.truncate(self._kind.mib << 20)
        if self._kind.make:
            run(*self._kind.make.split(), self._image)

    def keep(self) -> None:
        """Remember what the drive holds, unmounted."""
        run("cp", "--sparse=always", self._image, self._kept)

    def restore(self) -> None:
        run("cp", "--sparse=always", self._kept, self._image)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        kind = self._kind
        run("mount", "-t", kind.name, "-o", kind.mount, self._image if kind.make else "tmpfs", self.path)
        try:
            if kind.after:
                run("sh", "-c", kind.after.format(self.path))
            yield self.path / ("limited/data" if kind.after else "data")
        except BaseException:  # what holds a file open may be in its traceback
            run("umount", "--lazy", self.path)
            raise
        run("umount", self.path)

    def _quota_used(self, group: str) -> int:
        """Ask the file system for the bytes that count towards a quota."""
        shown = subprocess.run(["btrfs", "qgroup", "show", "--raw", self.path], check=True, capture_output=True, text=True)
        return next(int(line.split()[1]) for line in shown.stdout.splitlines() if line.startswith(group))

    @contextlib.contextmanager
    def filled(self, n_free: int) -> Iterator[None]:
        """Leave ``n_free`` bytes within the context: a file takes all others, or the quota ends there."""
        if self._kind.after:
            group = "0/256"  # of the first volume within it; whoever is beyond its own limit cannot change that
            self.flush()
            if self._quota_used(group) >= 1 << 63:  # files that are removed may be counted below zero
                run("btrfs", "quota", "rescan", "-w", self.path)
            n_used = self._quota_used(group)
            assert n_used < 1 << 63
            run("btrfs", "qgroup", "limit", str(n_used + n_free), group, self.path)
            try:
                yield
            finally:
                run("btrfs", "qgroup", "limit", "none", group, self.path)
            return
        ballast, n_bytes = self.path / "ballast", 0
        fd = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            while (more := _grown(fd, n_bytes)) > n_bytes:
                n_bytes = more
                self.flush()
            os.ftruncate(fd, n_bytes - n_free)
            self.flush()
            yield
        finally:
            os.close(fd)
            ballast.unlink()
            self.flush()

    def flush(self) -> None:
        """Write what it has to its file. What was removed on xfs and btrfs is free then, and they need fewer blocks."""
        fd = os.open(self.path, os.O_RDONLY)
        ctypes.CDLL(None, use_errno=True).syncfs(fd)
        os.close(fd)

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


def _grown(fd: int, n_bytes: int) -> int:
    """Make a file of so many bytes as large as it can be."""
    piece = 16 << 20
    while piece:
        try:
            os.posix_fallocate(fd, n_bytes, piece)
            n_bytes += piece
        except OSError as error:
            assert error.errno == errno.ENOSPC
            piece //= 2
            piece -= piece % 1024
    return n_bytes


@functools.cache
def can_mount(name: str = "ext4") -> bool:
    """Whether this process may make and mount a file system of its own."""
    kind = KINDS[name]
    script = "mount -t tmpfs tmpfs /mnt && mkdir /mnt/d && "
    if kind.make:
        script += f"truncate -s {kind.mib}M /mnt/i && {kind.make} /mnt/i && "
    script += f"mount -t {kind.name} -o {kind.mount} {'/mnt/i' if kind.make else 'tmpfs'} /mnt/d && "
    script += f"({kind.after.format('/mnt/d') or 'true'}) && umount /mnt/d"
    with contextlib.suppress(OSError):
        done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, check=False)
        return done.returncode == 0
    return False


def needs_mounts(*kinds: str) -> None:
    """Skip the test where there can be no drive of its own."""
    for kind in kinds or ("ext4",):
        if not can_mount(kind):
            pytest.skip(f"file systems of the test's own need root, loop devices, {KINDS[kind].name} and its mkfs")
