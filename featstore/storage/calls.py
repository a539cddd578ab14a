"""System calls whose errors name the file: ``errno`` and ``filename`` are set whichever call it was."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

__all__ = ["close_fd", "close_quietly", "duplicate_fd", "flock_fd", "fsync_fd", "naming"]


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
    """Return another descriptor of an open file, the caller's to close."""
    with naming(path):
        return os.dup(fd)


def flock_fd(fd: int, how: int, path: str) -> None:
    """Lock or unlock a whole file.

    Raises
    ------
    BlockingIOError
        It is held, and ``how`` has ``LOCK_NB``.
    """
    with naming(path):
        fcntl.flock(fd, how)
