"""System calls whose errors name the file: ``errno`` and ``filename`` are set whichever call it was."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from typing import Final

from featstore._core.descriptor import Descriptor, close, dup_fd, open_fd
from featstore.errors import CorruptionError, FormatError

__all__ = [
    "CANNOT_WRITE",
    "NO_SPACE",
    "check_length",
    "close_fd",
    "close_quietly",
    "duplicate_fd",
    "flock_fd",
    "fsync_fd",
    "naming",
    "open_input",
    "open_regular",
    "pread_exactly",
    "pread_into",
    "pwrite_all",
    "remove_tree",
]

CANNOT_WRITE: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})  # errors of a place where nothing may be written
NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})  # errors of a drive that is full, or of a quota or disk budget that is

MOST_NAME_BYTES: Final = 255  # of most file systems
MOST_PATH_BYTES: Final = 4095  # of a system call


def check_length(path: str, what: str, remedy: str, suffix: int = 0, inside: int = 0) -> None:
    """Check that a path that is to be made is short enough; OSError (ENAMETOOLONG) says what it may have.

    Parameters
    ----------
    path : str
        An absolute path; its parents need not exist.
    what, remedy : str
        What is to be made there, and what to do instead, in the message.
    suffix, inside : int
        Bytes that are added to its name while it is made, and those of the longest path below it.
    """
    names = [os.fsencode(name) for name in path.split("/")]
    try:
        most = os.pathconf(os.path.dirname(path), "PC_NAME_MAX")
    except OSError:  # it is not there yet, or is too long itself
        most = MOST_NAME_BYTES
    limits = [(len(names[-1]), most - suffix, "its name"), (max(map(len, names)), most, "one of the names")]
    limits += [(len(os.fsencode(path)), MOST_PATH_BYTES - suffix - inside, "the path")]
    for n_bytes, limit, of in limits:
        if n_bytes > limit:
            text = f"too long for {what}: {of} has {n_bytes} bytes, and may have {limit}: {remedy}"
            raise OSError(errno.ENAMETOOLONG, text, path)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Add the file's name to an OSError of the block, whose calls know only a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, path) from None


def fsync_fd(fd: int, path: str) -> None:
    """Make a file's bytes, or a directory's names, durable. A failed flush is never tried again: see :mod:`.writer`."""
    with naming(path):
        os.fsync(fd)


def close_fd(fd: int, path: str) -> None:
    """Close a descriptor that was written through; raise OSError if a delayed write failed.

    The descriptor is closed even if this raises. A :class:`Descriptor` may be closed again, which does nothing; another number
    must not, as it may be another file's by then.
    """
    with naming(path):
        close(fd)


def close_quietly(fd: int) -> None:
    """Close a descriptor without raising: after reads only, or while another error propagates.

    An error of close(2) reports delayed writes, and says nothing about bytes that were read.
    """
    with contextlib.suppress(OSError):
        close(fd)


def duplicate_fd(fd: int, path: str) -> Descriptor:
    with naming(path):
        return dup_fd(fd)


def flock_fd(fd: int, how: int, path: str) -> None:
    """Lock or unlock a whole file; BlockingIOError if another holds the lock and ``how`` has ``LOCK_NB``."""
    with naming(path):
        fcntl.flock(fd, how)


def open_input(path: str | os.PathLike[str]) -> tuple[Descriptor, int]:
    """Open a file of the user's, where links lead elsewhere with reason; all else is as :func:`open_regular` has it."""
    return open_regular(path, follows=True)


def open_regular(
    path: str | os.PathLike[str], *, dir_fd: int | None = None, name_inside: str | None = None, follows: bool = False
) -> tuple[Descriptor, int]:
    """Open a regular file for reading, without waiting for a FIFO's writer; return descriptor and size.

    A link is not followed, unless ``follows``.

    If ``name_inside`` is given, it is opened in the directory ``dir_fd``, and errors name ``path``. FormatError for a directory,
    symbolic link, FIFO, socket or device.
    """
    name = os.fspath(path)
    target = name if name_inside is None else name_inside
    try:
        # Opening a device can act on it, so look first; the open descriptor is checked again.
        _check_regular(os.stat(target, dir_fd=dir_fd, follow_symlinks=follows).st_mode, name)
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows else os.O_NOFOLLOW)
        fd = open_fd(target, flags, dir_fd=dir_fd)
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
            # With O_NONBLOCK some kernels end reads of io_uring with EAGAIN: of a device that cannot say that it would wait.
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
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
    """Fill ``out`` with the bytes at ``offset``, going on after short reads; CorruptionError if the file ends before ``needed``.

    Without ``needed`` all of ``out`` is needed. After a short read, reading goes on from a whole multiple of ``unit`` bytes, as
    direct I/O requires.
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


def remove_tree(path: str, *, quiet: bool = False) -> None:
    """Remove a directory with all that is in it, never following a link. What cannot be removed stays; all else goes.

    Raises the first OSError once the others are removed, unless ``quiet``. Ctrl-C within ``shutil.rmtree`` may leave a descriptor
    open; or it is lost, because one is then closed twice, and the second error takes its place.
    """
    failures = list[OSError]()
    _remove_tree(path, path, None, failures)
    if failures and not quiet:
        raise failures[0]


def _remove_tree(name: str, path: str, dir_fd: int | None, failures: list[OSError]) -> None:
    try:
        fd = open_fd(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        for entry in list(os.scandir(fd)):
            inside = os.path.join(path, entry.name)
            try:
                if entry.is_dir(follow_symlinks=False):
                    _remove_tree(entry.name, inside, fd, failures)
                else:
                    os.unlink(entry.name, dir_fd=fd)
            except FileNotFoundError:  # another process was faster
                pass
            except OSError as error:
                failures.append(OSError(error.errno, error.strerror, inside))
        close_quietly(fd)
        os.rmdir(name, dir_fd=dir_fd)
    except OSError as error:
        failures.append(OSError(error.errno, error.strerror, path))
