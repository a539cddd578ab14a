"""Directories of run files: owned by one process under a held lock, in no catalog, and swept when their owner is dead."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any

from featstore._core.descriptor import open_fd
from featstore.config import format_size, local_ranks, user_path
from featstore.errors import BusyError
from featstore.storage.calls import CANNOT_WRITE, NO_SPACE, check_length, close_quietly, remove_tree
from featstore.storage.lock import CANNOT_CHANGE, FileLock
from featstore.storage.writer import free_bytes

__all__ = [
    "DiskQuota",
    "RunDirectory",
    "cannot_hold_runs",
    "finalize_here",
    "free_share",
    "has_no_room",
    "remove_file",
    "runs_directory",
]

LOCK_NAME = "owner.lock"
MADE = ".made-by-featstore"  # marks a parent that was made for run directories, and is removed with the last of them
RUN_FILES = "run files"  # in messages


def free_share(directory: str, fraction: float) -> int:
    """Compute the bytes of run files that this process may write by default: its rank's part of a fraction of the free disk."""
    return int((free_bytes(directory) or 0) * fraction) // local_ranks()


def runs_directory(dataset: str, run_dir: str | os.PathLike[str] | None = None) -> str:
    """Choose the directory of a dataset's run files: ``run_dir``, or ``<dataset>.runs``.

    If ``run_dir`` is absent and ``<dataset>.runs`` cannot be written, it is the user's own directory in the temporary directory.
    """
    if run_dir is not None:
        return user_path(run_dir)
    beside = f"{dataset}.runs"
    if _may_write(beside if os.path.lexists(beside) else os.path.dirname(beside) or "."):
        return beside
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:  # no temporary directory: making the run directory raises the error
        return beside
    if temporary == "/tmp" and _may_write("/var/tmp"):  # /tmp is often in memory
        temporary = "/var/tmp"
    mine = os.path.join(temporary, f"featstore-{os.geteuid()}.runs")
    try:
        found = os.lstat(mine)
    except FileNotFoundError:
        return mine
    # Any user may have made an entry of this name there.
    return mine if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() else beside


def _may_write(directory: str) -> bool:
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=True)


def finalize_here(owner: object, function: Callable[..., object], *args: Any) -> weakref.finalize[..., Any]:
    """Call ``weakref.finalize`` so that ``function`` does nothing in a forked child: its resources belong to the parent."""
    return weakref.finalize(owner, _only_in, os.getpid(), function, args)


def _only_in(pid: int, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    if os.getpid() == pid:
        function(*args)


def remove_file(path: str) -> bool:
    """Delete a run file; return False if that fails: the file keeps its bytes until its directory is removed."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # it was removed with its directory
    except OSError:
        return False
    return True


# Errors of a place that has no room for run files, or can have none: its path is too long, or is a file's, or leads through one;
# or files of that length.
_NO_ROOM = CANNOT_CHANGE | NO_SPACE | {errno.EFBIG, errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTDIR}


def has_no_room(error: OSError) -> bool:
    """Tell whether an error means that a place has no room for run files, or can have none; a drive may fail otherwise."""
    return error.errno in _NO_ROOM


def cannot_hold_runs(error: OSError, directory: str) -> OSError:
    """Make the error of a directory that cannot have run files; it says which argument names another one."""
    assert error.errno is not None
    return OSError(error.errno, f"{error.strerror}: run files go here; run_dir= (--run-dir) names another directory", directory)


class DiskQuota:
    """A limit of the bytes that files may take at once; no limit if ``total`` is None. Thread-safe.

    ``what`` names the files in messages, and ``path`` is the user's path for them. If bytes are short, ``reclaim`` is called to
    delete files that are only kept for reuse.
    """

    def __init__(self, total: int | None, what: str = RUN_FILES, path: str | None = None) -> None:
        self.total = total
        self._what, self._path = what, path
        self._remedy = ": give a larger disk=, or a smaller length=" if what == RUN_FILES else ""
        self.reclaim: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._used = 0
        self._peak = 0

    @property
    def used(self) -> int:
        return self._used

    @property
    def peak(self) -> int:
        return self._peak

    def take(self, n_bytes: int, path: str) -> None:
        """Take bytes of the quota before they are written; OSError (ENOSPC), which names the file, if too few are left."""
        if self.reclaim is not None and self.total is not None and self._used + n_bytes > self.total:
            self.reclaim()
        with self._lock:
            if self.total is not None and self._used + n_bytes > self.total:
                raise OSError(
                    errno.ENOSPC,
                    f"{self._what} would take {format_size(self._used + n_bytes)} of a disk budget of {format_size(self.total)}"
                    f"{self._remedy}",
                    self._path or path,
                )
            self._used += n_bytes
            self._peak = max(self._peak, self._used)

    def give(self, n_bytes: int) -> None:
        """Give bytes back to the quota."""
        with self._lock:
            self._used -= n_bytes


def _sweep(parent: str) -> None:
    """Remove run directories of dead owners: directories whose lock can be taken."""
    with os.scandir(parent) as found:
        entries = list(found)
    for entry in entries:
        lock_path = os.path.join(entry.path, LOCK_NAME)
        if not entry.is_dir(follow_symlinks=False):
            continue
        try:
            uuid.UUID(hex=entry.name)
        except ValueError:
            continue  # not ours
        # Without a lock file the owner died, or is now, between mkdir and lock. rmdir fails if the lock file exists by then.
        if not os.path.exists(lock_path):
            with contextlib.suppress(OSError):
                os.rmdir(entry.path)
            continue
        with contextlib.suppress(BusyError, FileNotFoundError, PermissionError), FileLock(lock_path, exclusive=True):
            remove_tree(entry.path, quiet=True)


def _make_parent(path: str) -> None:
    try:
        os.makedirs(path)
    except FileExistsError:
        if os.path.isdir(path):
            return
        if os.path.lexists(path):
            raise
        raise FileNotFoundError(errno.ENOENT, "removed by another process with its last run directory", path) from None
    try:
        _mark(path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rmdir(path)
        raise


def _mark(parent: str) -> None:
    close_quietly(open_fd(os.path.join(parent, MADE), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))  # nothing is written


def _remove_parent(path: str) -> None:
    """Remove the parent of run directories, if it was made for them and has none left."""
    with contextlib.suppress(OSError):
        if os.listdir(path) == [MADE]:
            try:
                os.unlink(os.path.join(path, MADE))
                os.rmdir(path)
            except FileNotFoundError:  # another process removes it, and would find it marked again
                raise
            except BaseException:  # another process has just made a run directory; or Ctrl-C
                with contextlib.suppress(OSError):
                    _mark(path)
                raise


_INSIDE_BYTES = 1 + 32 + 1 + 64  # a run directory, and a file in it
_MOST_TRIES = 1000  # to make a directory whose parent other processes remove meanwhile


class RunDirectory:
    """A fresh directory ``parent/<uuid>`` for run files, removed when it is closed or collected.

    ``parent`` is made if absent, and then removed with the last run directory in it, of any process; a ``parent`` that existed
    stays. Run directories that dead processes left in it are removed when one is made or closed. A relative path is resolved
    against the current working directory. If ``parent`` may not be written, the OSError names ``run_dir=``.
    """

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        base, left = os.path.abspath(os.fspath(parent)), _MOST_TRIES
        check_length(base, "a directory of run files", "run_dir= (--run-dir) names another directory", inside=_INSIDE_BYTES)
        while True:  # until no other process sweeps the directory between mkdir and lock, or holds its lock to sweep it
            self.path = os.path.join(base, uuid.uuid4().hex)
            try:
                _make_parent(base)
                _sweep(base)
                os.mkdir(self.path, 0o700)  # only the owner may read the features
            except FileNotFoundError:
                left -= 1
                if not left:
                    raise  # no directory can be made there, as in /proc
                continue  # another process has removed the parent with its own run directory, the last one in it
            except BaseException as error:
                _remove_parent(base)
                if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
                    raise cannot_hold_runs(error, base) from None
                raise
            try:
                lock = FileLock(os.path.join(self.path, LOCK_NAME), exclusive=True)
                if lock.in_place:
                    break
                lock.release()
            except (FileNotFoundError, BusyError):
                pass
            except BaseException:
                _remove_tree(self.path, base, [])
                raise
        self._files: list[str] = []
        self._finalizer = weakref.finalize(self, _remove, self.path, base, lock, os.getpid(), self._files)

    def file(self, name: str) -> str:
        """Choose the path of a run file, which is removed with the directory."""
        path = os.path.join(self.path, name)
        self._files.append(path)
        return path

    def close(self) -> None:
        """Remove the directory and all in it; may be called again."""
        self._finalizer()


def _remove(path: str, parent: str, lock: FileLock, pid: int, files: list[str]) -> None:
    if os.getpid() == pid:  # a forked child's copy of the object owns nothing
        _remove_tree(path, parent, files)
    lock.release()


def _remove_tree(path: str, parent: str, files: list[str]) -> None:
    """Remove a run directory; its known ``files`` first, by name, as listing a directory needs a descriptor."""
    for file in (*files, os.path.join(path, LOCK_NAME)):
        with contextlib.suppress(OSError):
            os.unlink(file)
    try:
        os.rmdir(path)
    except OSError:
        remove_tree(path, quiet=True)
    with contextlib.suppress(OSError):
        _sweep(parent)  # what was left by others that were killed meanwhile, as by ranks that trained beside: none may come later
    _remove_parent(parent)
