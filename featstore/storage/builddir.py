"""A dataset is built in ``X.tmp-<uuid>/`` beside its final place ``X`` and renamed when it is whole.

The builder holds a flock on the build directory itself; one whose lock can be taken was left by a dead builder and is removed.
Replacing a dataset exchanges the two directories in one step where the kernel can (``renameat2``), so that ``X`` is never
absent.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import uuid
from types import TracebackType

from featstore.errors import BusyError
from featstore.storage.catalog import CATALOG_DIRECTORY
from featstore.storage.lock import READERS_LOCK, WRITER_LOCK, FileLock, lock_directory
from featstore.storage.writer import fsync_directory

__all__ = ["BuildDirectory", "restore_moved", "sweep_builds"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _renameat2(source: str, target: str, flags: int) -> bool:
    """Call renameat2(2); return False where the kernel, C library or file system lacks it."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        function = libc.renameat2
    except AttributeError:
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), ctypes.c_uint(flags)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code), source, None, target)


def sweep_builds(target: str) -> None:
    """Remove what dead builders of ``target`` left beside it, and put back a dataset that one had moved aside.

    Raises
    ------
    BusyError
        A living builder is at work on ``target``.
    """
    parent, name = os.path.split(target)
    pattern = re.compile(re.escape(name) + r"\.(tmp|old)-[0-9a-f]{32}")
    for entry in sorted(os.listdir(parent)):
        match = pattern.fullmatch(entry)
        if match is None:
            continue
        path = os.path.join(parent, entry)
        fd = lock_directory(path)
        if fd is None:
            if os.path.isdir(path):
                raise BusyError("another process or thread is building it", target)
            continue
        try:
            if match[1] == "old" and not os.path.lexists(target):
                os.rename(path, target)
                fsync_directory(parent)
            else:
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)


def restore_moved(target: str) -> bool:
    """Put back a dataset that a builder had moved aside when it died; return whether there was one.

    Only where the file system cannot exchange two directories does a builder move one aside.
    """
    parent, name = os.path.split(os.path.abspath(target))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not os.path.lexists(target) and any(entry.startswith(f"{name}.old-") for entry in os.listdir(parent)):
            sweep_builds(os.path.join(parent, name))
            return os.path.lexists(target)
    return False


class BuildDirectory:
    """The directory in which a dataset is built; a context manager. Leaving it without :meth:`commit` removes all of it.

    Parameters
    ----------
    target : path-like
        Where the dataset shall be; its parent exists.
    overwrite : bool
        Replace a dataset that is there. Readers that have it open go on reading the old one.
    marker, what : str
        A name that tells the kind of directory, and what messages call it: a dataset, or a pack.

    Attributes
    ----------
    path : str
        The build directory.

    Raises
    ------
    FileExistsError
        ``target`` exists and ``overwrite`` is False, or it is something else than a dataset or an empty directory.
    BusyError
        Another builder or writer is at work on ``target``.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        marker: str = CATALOG_DIRECTORY,
        what: str = "dataset",
    ) -> None:
        self.target = os.path.abspath(os.fspath(target))
        self.path = ""
        self._marker, self._what = marker, what
        self._parent = os.path.dirname(self.target)
        self._fd = -1
        self._writer: FileLock | None = None
        sweep_builds(self.target)
        self._replaces = self._check_target(overwrite)
        try:
            if self._replaces:
                self._writer = FileLock(os.path.join(self.target, WRITER_LOCK), exclusive=True)
            self._make()
            for name in (WRITER_LOCK, READERS_LOCK):
                os.close(os.open(os.path.join(self.path, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
        except BaseException:
            self._leave()
            raise

    def _check_target(self, overwrite: bool) -> bool:
        """Return whether a dataset is there that is to be replaced."""
        if not os.path.lexists(self.target):
            return False
        if os.path.isdir(self.target) and not os.path.islink(self.target):
            if not os.listdir(self.target):
                return False
            if os.path.exists(os.path.join(self.target, self._marker)):
                if overwrite:
                    return True
                raise FileExistsError(
                    errno.EEXIST, f"a {self._what} exists here; overwrite=True (--overwrite) replaces it", self.target
                )
        raise FileExistsError(errno.EEXIST, f"exists and is not a {self._what}, so it is not replaced", self.target)

    def _make(self) -> None:
        while True:
            path = f"{self.target}.tmp-{uuid.uuid4().hex}"
            os.mkdir(path)
            try:
                fd = lock_directory(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.rmdir(path)
                raise
            if fd is not None:
                self.path, self._fd = path, fd
                return
            # A sweeper took it for garbage between the two calls, and removes it.

    def commit(self) -> None:
        """Make the dataset appear at ``target``; its files and directories inside are durable already.

        Raises
        ------
        FileExistsError
            Another builder was faster.
        OSError
            ``target`` is as it was.
        """
        fsync_directory(self.path)
        if not self._replaces:
            self._appear()
            return
        if not _renameat2(self.path, self.target, _RENAME_EXCHANGE):
            self._replace_in_two_steps()
            return
        try:
            fsync_directory(self._parent)
        except BaseException:
            _renameat2(self.path, self.target, _RENAME_EXCHANGE)
            raise
        # What is at self.path now is the old dataset, which leaving removes.

    def _appear(self) -> None:
        # rename(2) replaces an empty directory, which NOREPLACE would refuse; it refuses one that is not empty.
        try:
            os.rename(self.path, self.target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(errno.EEXIST, "another process made a dataset here meanwhile", self.target) from None
            raise
        try:
            fsync_directory(self._parent)
        except BaseException:
            os.rename(self.target, self.path)
            raise
        self.path = ""

    def _replace_in_two_steps(self) -> None:
        """For file systems that cannot exchange; a crash between the two renames is mended by :func:`sweep_builds`."""
        aside = f"{self.target}.old-{uuid.uuid4().hex}"
        os.rename(self.target, aside)
        try:
            os.rename(self.path, self.target)
            try:
                fsync_directory(self._parent)
            except BaseException:
                os.rename(self.target, self.path)
                raise
        except BaseException:
            os.rename(aside, self.target)
            raise
        self.path = aside

    def _leave(self) -> None:
        if self.path:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = ""
        if self._writer is not None:
            self._writer.release()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __enter__(self) -> BuildDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave()
