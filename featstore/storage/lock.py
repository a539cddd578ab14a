"""Locks of a dataset: flock on files inside it, so that the lock of a dead process ends with the process.

A committing writer holds ``writer.lock`` exclusively. Every open dataset holds ``readers.lock`` shared. A sweep of files that
the catalog no longer names holds it exclusively, so that a snapshot's files stay as long as another handle reads it. A process
that opens the files of a dataset holds ``opening.lock`` shared meanwhile. A process that removes a replaced directory holds it
exclusively: an open file survives its removal, a name does not.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from typing import Final

from featstore._core.descriptor import open_fd
from featstore.errors import BusyError
from featstore.storage.calls import CANNOT_WRITE, close_quietly, flock_fd

__all__ = ["CANNOT_CHANGE", "OPENING_LOCK", "READERS_LOCK", "WRITER_LOCK", "FileLock", "lock_directory"]

WRITER_LOCK = "writer.lock"
READERS_LOCK = "readers.lock"
OPENING_LOCK = "opening.lock"

# Errors of a file system without locks, such as some network file systems.
_WITHOUT_LOCKS: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
CANNOT_CHANGE: Final = CANNOT_WRITE | _WITHOUT_LOCKS  # errors of a place where nothing can be changed under an exclusive lock


class FileLock:
    """A held flock on one file; a context manager. The lock belongs to the process that took it: a forked child only closes it.

    Parameters
    ----------
    path : path-like
        The lock file; created if the lock is exclusive and the file is absent.
    exclusive : bool
        Exclusive, or shared with other shared holders; a file system without locks grants every shared lock.
    patience_s : float
        Seconds to retry while another process, or another handle of this one, holds the lock; then BusyError.
    dir_fd : int, optional
        Descriptor of the directory in which the file is looked up, in place of the path's directory.
    mode : int
        Permissions of a file that is created.
    """

    _fd = -1  # also if Ctrl-C ends __init__

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        exclusive: bool,
        patience_s: float = 0.0,
        dir_fd: int | None = None,
        mode: int = 0o666,
    ) -> None:
        self.path = os.fspath(path)
        self.exclusive = exclusive
        self._pid = os.getpid()
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        # A shared lock needs no write permission: datasets on read-only media can be read.
        flags |= os.O_RDWR | os.O_CREAT if exclusive else os.O_RDONLY
        if dir_fd is None:
            fd = open_fd(self.path, flags, mode)
        else:
            try:
                fd = open_fd(os.path.basename(self.path), flags, mode, dir_fd=dir_fd)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.path) from None
        deadline = time.monotonic() + patience_s
        try:
            while not self._try(fd):
                if time.monotonic() >= deadline:
                    raise BusyError("held by another process or handle", self.path)
                time.sleep(0.01)
        except OSError as error:
            close_quietly(fd)
            if exclusive or isinstance(error, BusyError) or error.errno not in _WITHOUT_LOCKS:
                raise
            return
        except BaseException:
            close_quietly(fd)
            raise
        self._fd = fd

    def _try(self, fd: int) -> bool:
        try:
            flock_fd(fd, (fcntl.LOCK_EX if self.exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB, self.path)
        except BlockingIOError:
            return False
        return True

    @property
    def is_held(self) -> bool:
        """Whether the lock is held: False after :meth:`release`, and if the file system has no locks."""
        return self._fd >= 0

    @property
    def in_place(self) -> bool:
        """Whether the locked file is the one at ``path``: the directory may have been replaced during the wait for the lock."""
        try:
            held, named = os.fstat(self._fd), os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)

    @contextlib.contextmanager
    def alone(self) -> Iterator[bool]:
        """Hold a shared lock exclusively during the block, if nobody else holds it; gives whether that is so.

        flock gives a shared lock up to try, and takes it again afterwards. So the caller holds another lock, which all hold that
        take this one exclusively.
        """
        if self._fd < 0 or os.getpid() != self._pid:
            yield False
            return
        try:
            try:
                flock_fd(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, self.path)
                is_alone = True
            except OSError:  # held, or a network file system that gives it only to those who can write
                is_alone = False
            yield is_alone
        finally:
            if self._fd >= 0:  # else it was released meanwhile
                flock_fd(self._fd, fcntl.LOCK_SH, self.path)

    def release(self) -> None:
        """Release the lock; may be called again. OSError if unlocking an exclusive lock fails: a forked child may hold it."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if os.getpid() == self._pid:
                # Unlock rather than only close: a forked child may still hold a duplicate of the descriptor.
                flock_fd(fd, fcntl.LOCK_UN, self.path)
        except OSError:
            if self.exclusive:
                raise
        finally:
            close_quietly(fd)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def lock_directory(path: str | os.PathLike[str]) -> int | None:
    """Take an exclusive flock on a directory itself; return the descriptor, which the caller closes.

    None if the directory is gone or another process or handle holds the lock.
    """
    name = os.fspath(path)
    try:
        fd = open_fd(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        flock_fd(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, name)
        # Between the open and the lock a sweeper may have removed the directory, and a builder may have made one of its name.
        held, named = os.fstat(fd), os.stat(name, follow_symlinks=False)
        if (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        close_quietly(fd)
        raise
    close_quietly(fd)
    return None
