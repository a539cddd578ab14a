"""The directory of a dataset or pack, opened so that all of its files can be opened, even if it is replaced meanwhile.

Replacing a dataset exchanges its directory for another and removes the old one. A process that opens the files holds
``opening.lock`` shared meanwhile, and looks names up in the directory's descriptor, not along its path. A process that removes a
replaced directory holds that lock exclusively. So a directory that was locked while it was in its place stays whole until the
lock is released.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from typing import Final, TypeVar

from featstore._core.descriptor import open_fd
from featstore.errors import BusyError, FormatError
from featstore.storage.calls import NO_SPACE, close_quietly, naming, open_regular, remove_tree
from featstore.storage.format import resolve_inside
from featstore.storage.lock import OPENING_LOCK, FileLock
from featstore.storage.stripes import remove_stripes

__all__ = ["OPEN_PATIENCE_S", "OpenDirectory", "Root", "open_directory", "open_inside", "remove_replaced", "with_directory"]

OPEN_PATIENCE_S: Final = 30.0  # to wait for a removal, which takes seconds for terabytes or on a busy machine
_REMOVE_PATIENCE_S: Final = 2.0  # to wait for a process that opens files; the next builder removes a directory that stays
_POLL_S: Final = 0.001

Result = TypeVar("Result")


class OpenDirectory:
    """A directory opened by descriptor; a context manager. Made by :func:`open_directory`; errors name its ``path``."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._lock: FileLock | None = None

    def _try_lock(self) -> bool:
        """Keep the directory's files from being removed; return False if another process is removing them."""
        with contextlib.suppress(FileNotFoundError):  # on read-only media, or deleted: the directory is read without a lock
            try:
                self._lock = self.lock(OPENING_LOCK)
            except BusyError:
                return False
        return True

    @property
    def is_locked(self) -> bool:
        """Whether the files are kept from being removed: False if the directory, or its file system, has no locks."""
        return self._lock is not None and self._lock.is_held

    @property
    def in_place(self) -> bool:
        """Whether the path still leads to this directory."""
        try:
            held, named = os.fstat(self._fd), os.stat(self.path)
        except FileNotFoundError:
            return False
        return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)

    def lock(self, name: str, patience_s: float = 0.0) -> FileLock:
        """Take a shared lock on a file of the directory; raises as :class:`FileLock`."""
        return FileLock(os.path.join(self.path, name), exclusive=False, patience_s=patience_s, dir_fd=self._fd)

    def open_regular(self, name: str) -> tuple[int, int]:
        """Open a file of the directory as :func:`~featstore.storage.calls.open_regular`; FormatError for a name outside it."""
        return open_regular(resolve_inside(self.path, name, self._fd), dir_fd=self._fd, name_inside=name)

    def has(self, name: str) -> bool:
        """Check whether the directory has an entry of this name."""
        try:
            with naming(os.path.join(self.path, name)):
                os.lstat(name, dir_fd=self._fd)
        except FileNotFoundError:
            return False
        return True

    def close(self) -> None:
        """Close the directory and release its lock; may be called again. Files that were opened stay open."""
        lock, self._lock = self._lock, None
        fd, self._fd = self._fd, -1
        try:
            if lock is not None:
                lock.release()
        finally:
            if fd >= 0:
                close_quietly(fd)

    def __enter__(self) -> OpenDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Root = str | os.PathLike[str] | OpenDirectory


def open_inside(root: Root, name: str) -> tuple[int, int]:
    """Open a regular file of a directory for reading; return its descriptor, which the caller closes, and its size.

    FormatError if the name leads outside, or to anything but a regular file.
    """
    if isinstance(root, OpenDirectory):
        return root.open_regular(name)
    return open_regular(resolve_inside(root, name))


def _moved_aside(path: str) -> list[str] | None:
    """List the directories that a builder has moved aside to replace ``path``; None if ``path`` exists by now.

    One listing shows both names. Between the two renames that replace an exchange, one of the two always exists.
    """
    parent, name = os.path.split(path)
    entries = os.listdir(parent)
    if name in entries:
        return None
    pattern = re.compile(re.escape(name) + r"\.old-[0-9a-f]{32}")
    return [os.path.join(parent, entry) for entry in sorted(entries) if pattern.fullmatch(entry)]


def _open(path: str, what: str) -> OpenDirectory | None:
    """Open the directory at ``path``, or the one moved aside from there; None if the directory changed meanwhile."""
    try:
        return _open_there(path, what)
    except FileNotFoundError as error:
        try:
            aside = _moved_aside(os.path.realpath(path))
        except OSError:
            raise error from None
        if aside == []:
            raise
    for each in aside or ():
        with contextlib.suppress(FileNotFoundError):
            return _open_there(each, what)
    return None


def _open_there(path: str, what: str) -> OpenDirectory:
    try:
        return OpenDirectory(path, open_fd(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    except NotADirectoryError:
        if not os.path.lexists(path):
            raise  # a parent in the path is no directory
        raise FormatError(f"{path} is not a {what}: it is not a directory", path) from None


def open_directory(path: str | os.PathLike[str], what: str = "dataset") -> OpenDirectory:
    """Open the directory at ``path``, and keep its files from being removed until it is closed.

    ``what`` names the kind of directory in messages. Opening is retried, without limit, if the directory was replaced between
    two calls. BusyError if another process has been removing it for half a minute; FormatError if ``path`` is no directory.
    """
    name = os.path.abspath(os.fspath(path))
    deadline = time.monotonic() + OPEN_PATIENCE_S
    while True:
        directory = _open(name, what)
        if directory is None:
            continue
        try:
            is_whole = directory._try_lock()
            if directory.in_place:
                if is_whole:
                    return directory
                if time.monotonic() >= deadline:
                    raise BusyError("another process is removing it", directory.path)
                time.sleep(_POLL_S)
        except BaseException:
            directory.close()
            raise
        directory.close()


def with_directory(path: str | os.PathLike[str], use: Callable[[OpenDirectory], Result], what: str = "dataset") -> Result:
    """Call ``use`` with the open directory at ``path``; call it again if an unlocked directory was replaced meanwhile.

    Exceptions of ``use`` propagate otherwise. A ``use`` that raises must leave nothing open.
    """
    while True:
        with open_directory(path, what) as directory:
            try:
                return use(directory)
            except (OSError, ValueError):
                if directory.is_locked or directory.in_place:
                    raise


def remove_replaced(path: str, patience_s: float = _REMOVE_PATIENCE_S) -> bool:
    """Remove a replaced or abandoned directory; return whether it is gone.

    The directory stays if another process opens its files for longer than ``patience_s``, or if removing fails. The next
    builder removes it then.
    """
    name = os.path.join(path, OPENING_LOCK)
    for _ in range(2):  # a call that failed once (too many open files, a signal) need not fail again
        lock: FileLock | None = None
        try:
            lock = FileLock(name, exclusive=True, patience_s=patience_s)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except BusyError:
            return False
        except OSError as error:
            # A full drive may have no room for a lock file. Where there is none, no reader has locked it.
            if error.errno not in NO_SPACE or os.path.lexists(name):
                continue
        try:
            with contextlib.suppress(OSError):  # raised by a stripe
                remove_stripes(path)  # first: nothing but the links in it says where they are
                remove_tree(path, quiet=True)
        finally:
            with contextlib.suppress(OSError):
                if lock is not None:
                    lock.release()
        if not os.path.lexists(path):
            return True
    return False
