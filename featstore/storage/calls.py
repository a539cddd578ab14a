"""System calls whose errors name the file: ``errno`` and ``filename`` are set whichever call it was."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from typing import Final

from featstore.errors import CorruptionError, FormatError

__all__ = [
    "CANNOT_WRITE",
    "close_fd",
    "close_quietly",
    "duplicate_fd",
    "flock_fd",
    "fsync_fd",
    "naming",
    "open_regular",
    "pread_exactly",
    "pread_into",
    "pwrite_all",
]

CANNOT_WRITE: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})  # errors of a place where nothing may be written


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Give an OSError of the calls inside, which know a descriptor only, the file's name."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, path) from None


def fsync_fd(fd: int, path: str) -> None:
    """Make a file's bytes, or a directory's names, durable. A failed one is never tried again: see :mod:`.writer`."""
    with naming(path):
        os.fsync(fd)


def close_fd(fd: int, path: str) -> None:
    """Close a descriptor that was written through, which may report a write that failed.

    It is closed even where this raises: the number may be another file's by then.
    """
    with naming(path):
        os.close(fd)


def close_quietly(fd: int) -> None:
    """Close a descriptor that was only read through, or on the way out of an error, which is the one to be raised.

    An error of close(2) is of writes that were held back; it says nothing of what was read.
    """
    with contextlib.suppress(OSError):
        os.close(fd)


def duplicate_fd(fd: int, path: str) -> int:
    with naming(path):
        return os.dup(fd)


def flock_fd(fd: int, how: int, path: str) -> None:
    """Lock or unlock a whole file; BlockingIOError where it is held and ``how`` has ``LOCK_NB``."""
    with naming(path):
        fcntl.flock(fd, how)


def open_regular(path: str | os.PathLike[str], *, dir_fd: int | None = None, name_inside: str | None = None) -> tuple[int, int]:
    """Open a regular file for reading, never following a link nor waiting for a FIFO's writer; return descriptor and size.

    ``name_inside`` is opened in the directory ``dir_fd``, if given; ``path`` is then what errors call it. FormatError for a
    directory, symbolic link, FIFO, socket or device.
    """
    name = os.fspath(path)
    target = name if name_inside is None else name_inside
    try:
        # Opening a device can act on it, so look first; the open descriptor is checked again.
        _check_regular(os.lstat(target, dir_fd=dir_fd).st_mode, name)
        fd = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FormatError(f"{name}: a symbolic link in place of a file", name) from None
        if error.filename == name:
            raise
        raise OSError(error.errno, error.strerror, name) from None
    try:
        with naming(name):
            status = os.fstat(fd)
        _check_regular(status.st_mode, name)
    except BaseException:
        close_quietly(fd)
        raise
    return fd, status.st_size


def _check_regular(mode: int, name: str) -> None:
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    raise FormatError(f"{name}: {kinds.get(stat.S_IFMT(mode), 'a device')} in place of a file", name)


def pread_exactly(fd: int, n_bytes: int, offset: int, path: str) -> bytearray:
    """Read ``n_bytes`` at ``offset``; raises as :func:`pread_into`."""
    data = bytearray(n_bytes)
    pread_into(fd, memoryview(data), offset, path)
    return data


def pread_into(fd: int, out: memoryview, offset: int, path: str, needed: int | None = None, unit: int = 1) -> None:
    """Fill ``out`` with what lies at ``offset``, going on after short reads; CorruptionError where the file ends before.

    The file may end after ``needed`` bytes, although more are asked for. After a short read it goes on from a whole multiple of
    ``unit`` bytes, as direct I/O wants it.
    """
    needed = len(out) if needed is None else needed
    done = 0
    while done < needed:
        at = done // unit * unit
        try:
            count = os.preadv(fd, [out[at : at + (1 << 30)]], offset + at)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
        if at + count <= done:
            raise CorruptionError(f"the file ends {needed - done} bytes early", path, offset + done)
        done = at + count


def pwrite_all(fd: int, data: bytes | memoryview, offset: int, path: str) -> None:
    """Write all of ``data`` at ``offset``, going on at the exact byte after a short write."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        try:
            count = os.pwrite(fd, view[done : done + (1 << 30)], offset + done)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
        done += count
