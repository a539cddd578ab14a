"""Build directories: a dataset is built in ``X.tmp-<uuid>/`` beside its final place ``X``, and renamed when it is whole.

The builder holds a flock on the build directory itself. A build directory whose lock can be taken was left by a dead builder and
is removed. Replacing a dataset exchanges the two directories in one step where the kernel can (``renameat2``), so that ``X`` is
never absent. Elsewhere the old dataset is ``X.old-<uuid>`` between two renames; readers find it there. The old directory is
locked from before the exchange, so that no sweeper removes it as garbage before the exchange is durable.

A build that can be resumed has the digest of its inputs in place of the uuid, and a state in the file ``state.tmp``. A builder
of the same inputs goes on with it. Without a state, a directory of this name is garbage: it may be the dataset that was replaced.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import uuid
from collections.abc import Callable
from types import TracebackType

from featstore._core.descriptor import open_fd
from featstore.config import check_flag, user_path
from featstore.errors import BusyError, CommittedError
from featstore.storage.calls import check_length, close_quietly, flock_fd
from featstore.storage.catalog import CATALOG_DIRECTORY
from featstore.storage.directory import remove_replaced
from featstore.storage.lock import OPENING_LOCK, READERS_LOCK, WRITER_LOCK, FileLock, lock_directory
from featstore.storage.update import writer_lock
from featstore.storage.writer import fsync_directory, is_drive_full

__all__ = ["BUILD_STATE", "SUFFIX_BYTES", "BuildDirectory", "restore_moved", "sweep_builds"]

# In a build directory: the record from which a later builder resumes; see Update for what is left of it.
BUILD_STATE = "state.tmp"
SUFFIX_BYTES = len(".tmp-") + 32  # of the names of a build, and of what it replaces

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_INSIDE_BYTES = 256  # a file in the directory
_RESERVED_FDS = 6  # descriptors that removing a directory takes


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


def sweep_builds(target: str, spared: str = "") -> None:
    """Remove build directories that dead builders of ``target`` left, and put back a dataset that a dead builder had moved aside.

    BusyError if a living builder is at work on ``target``. The build at ``spared`` stays if it has a state to resume from.
    """
    parent, name = os.path.split(target)
    pattern = re.compile(re.escape(name) + r"\.(tmp|old)-[0-9a-f]{32}")
    for entry in sorted(os.listdir(parent)):
        match = pattern.fullmatch(entry)
        if match is None:
            continue
        path = os.path.join(parent, entry)
        if path == spared and os.path.lexists(os.path.join(path, BUILD_STATE)):
            continue
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
                remove_replaced(path, 0.0)
        finally:
            close_quietly(fd)


def restore_moved(target: str) -> bool:
    """Put back a dataset that a builder had moved aside when it died; return whether there was one.

    A builder moves a dataset aside only where the file system cannot exchange two directories.
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
        Final path of the dataset; its parent exists. FileExistsError if the path exists and may not be replaced. BusyError
        if another builder or writer is at work.
    overwrite : bool
        Replace an existing dataset. Readers that have it open go on reading the old one.
    marker : str
        Name of an entry that every directory of this kind has: a ``target`` without it is not replaced.
    what : str
        The kind of directory in messages: a dataset, or a pack.
    resume : str
        Digest of the inputs, 32 hexadecimal digits, of a build that can be resumed. The directory then has the files of a killed
        builder of the same inputs, if that has recorded a state there. Ctrl-C, a lack of memory and a full drive leave them, too.
    has_locks : bool
        Make the files that readers and writers of a dataset lock. Folders of other programs' files have none.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        marker: str = CATALOG_DIRECTORY,
        what: str = "dataset",
        resume: str = "",
        has_locks: bool = True,
    ) -> None:
        self.target = os.path.abspath(user_path(target))
        self.path = ""
        self._marker, self._what = marker, what
        self._parent = os.path.dirname(self.target)
        self._fds: list[tuple[int, str]] = []  # directories that are locked
        self._reserved_fds: list[int] = []  # closed before the directory is removed, which too many open files would prevent
        self._writer: FileLock | None = None
        self._is_committed = False
        kept = f"{self.target}.tmp-{resume}" if resume else ""
        check_length(self.target, f"a {what}", "give a shorter one", SUFFIX_BYTES, _INSIDE_BYTES)
        sweep_builds(self.target, kept)
        self._replaces = self._check_target(check_flag("overwrite", overwrite))
        try:
            if self._replaces:
                self._writer = writer_lock(self.target)
                self._forget_state()
            for _ in range(_RESERVED_FDS):
                self._reserved_fds.append(open_fd(self._parent, os.O_PATH | os.O_CLOEXEC))
            self._make(kept)
            for name in (WRITER_LOCK, READERS_LOCK, OPENING_LOCK) if has_locks else ():
                path = os.path.join(self.path, name)
                close_quietly(open_fd(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))  # nothing is written
        except BaseException:
            with contextlib.suppress(OSError):
                self._leave()
            raise

    def _check_target(self, overwrite: bool) -> bool:
        """Check that ``target`` may be built; return whether a dataset there is to be replaced."""
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
        found = "is a symbolic link" if os.path.islink(self.target) else f"exists and is not a {self._what}"
        raise FileExistsError(errno.EEXIST, f"{found}, so it is not replaced", self.target)

    def _make(self, kept: str) -> None:
        while True:
            path, is_left = kept, False
            if not kept or (os.path.lexists(kept) and not os.path.lexists(os.path.join(kept, BUILD_STATE))):
                path = f"{self.target}.tmp-{uuid.uuid4().hex}"  # what is in its place could not be removed
            try:
                os.mkdir(path)
            except FileExistsError:
                is_left = True
            try:
                fd = lock_directory(path)
            except BaseException:
                if not is_left:
                    with contextlib.suppress(OSError):
                        os.rmdir(path)
                raise
            if fd is None and is_left:
                raise BusyError("another process or thread is building it", self.target)
            if fd is not None:
                self.path = path
                self._fds.append((fd, path))
                return
            # A sweeper locked the directory as garbage between the two calls, and removes it.

    def commit(self) -> None:
        """Make the dataset appear at ``target``; its files and inner directories are durable already.

        FileExistsError if another builder was faster. CommittedError if the dataset is in place, may not outlast a power cut,
        and could not be taken back. After other OSErrors ``target`` is as it was.
        """
        fsync_directory(self.path)
        if not self._replaces:
            self._appear()
        else:
            fd = lock_directory(self.target)
            if fd is None:
                raise BusyError("another process or handle has locked the directory", self.target)
            self._fds.append((fd, self.target))
            if not self._exchange():
                self._replace_in_two_steps()
            else:
                self._confirm(lambda: _renameat2(self.path, self.target, _RENAME_EXCHANGE))
                # self.path is now the old dataset, which leaving removes.
        self._is_committed = True
        with contextlib.suppress(OSError):  # the next builder or writer removes it
            self._forget_state()

    def _exchange(self) -> bool:
        """Exchange the directory and ``target``; return False where that is not possible in one step."""
        try:
            return _renameat2(self.path, self.target, _RENAME_EXCHANGE)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        text = "a directory of another quota, or of the lower layer of an overlay, cannot be replaced: remove it first"
        raise OSError(errno.EXDEV, f"{os.strerror(errno.EXDEV)}: {text}, or give another path", self.target)

    def _forget_state(self) -> None:
        """Remove the state of a build that is complete: with it, the dataset would be resumed as a build once it is replaced."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.target, BUILD_STATE))

    def _confirm(self, undo: Callable[[], object]) -> None:
        """Make the names beside the target durable; if that fails, ``undo`` reverts the rename."""
        try:
            fsync_directory(self._parent)
        except BaseException as error:
            try:
                undo()
            except OSError:
                self.path = ""  # a power cut may leave either directory, so both stay
                if not isinstance(error, OSError):
                    raise error from None
                raise CommittedError(
                    f"the {self._what} at {self.target} is the new one, but a power cut may undo that, as flushing failed",
                    self.target,
                    error,
                ) from error
            raise

    def _appear(self) -> None:
        # rename(2) replaces an empty directory, which NOREPLACE would refuse; it refuses one that is not empty.
        try:
            os.rename(self.path, self.target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise FileExistsError(errno.EEXIST, "another process made a dataset here meanwhile", self.target) from None
            raise
        self._confirm(lambda: os.rename(self.target, self.path))
        self.path = ""

    def _replace_in_two_steps(self) -> None:
        """Replace the dataset by two renames, on file systems that cannot exchange directories.

        :func:`sweep_builds` repairs a crash between the renames. Readers that find no target open the dataset that was moved
        aside, see :mod:`.directory`.
        """
        aside = f"{self.target}.old-{uuid.uuid4().hex}"
        try:
            os.rename(self.target, aside)
            os.rename(self.path, self.target)
            self._confirm(lambda: os.rename(self.target, self.path))
        except CommittedError:
            raise
        except BaseException:
            if os.path.lexists(aside):
                os.rename(aside, self.target)
            raise
        self.path = aside

    def _leave(self, *, keeps: bool = False) -> None:
        """Remove the build directory or the replaced dataset, and release every lock, even if one release fails.

        ``keeps``: a build with a state stays.
        """
        path, self.path = self.path, ""
        if keeps and path and os.path.lexists(os.path.join(path, BUILD_STATE)):
            path = ""
        fds, self._fds = self._fds, []
        while self._reserved_fds:
            close_quietly(self._reserved_fds.pop())
        with contextlib.ExitStack() as stack:
            if self._writer is not None:
                stack.callback(self._writer.release)
            for fd, name in fds:
                stack.callback(close_quietly, fd)
                # A forked child may hold a duplicate of the descriptor.
                stack.callback(flock_fd, fd, fcntl.LOCK_UN, name)
            if path:
                remove_replaced(path)

    def __enter__(self) -> BuildDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        is_ended = isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError))  # from outside, as by a kill
        is_ended |= isinstance(error, OSError) and is_drive_full(error)
        try:
            self._leave(keeps=is_ended and not self._is_committed)
        except OSError as failure:
            if kind is None and self._is_committed:
                what = f"the {self._what} is complete and in place at {self.target}, but its builder's locks were not released"
                raise CommittedError(what, self.target, failure) from failure
            if kind is None:
                raise
        if isinstance(error, CommittedError) and error.path != self.target:
            # A file was in its place in the build directory, which is gone. The original error, raised again, would be in a cycle
            # of references with this one, which keeps all that the frames of both hold.
            found = error.error
            raise OSError(found.errno, found.strerror, found.filename) from None
