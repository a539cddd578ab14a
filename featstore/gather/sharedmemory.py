"""Arrays that processes of one machine share: one copy in shared memory, made by the first of them and read-only for all.

The arrays lie in a file in ``/dev/shm``, whose name is a digest of the job and of all that decides what they hold. A process that
joins locks the file (:class:`FileLock`) while it makes the arrays, or only looks at them. As long as it uses them, it holds a
*slot*: the lock of one byte of the file. Both locks end with the process. Once there is a holder for each rank, the file loses
its name. The last holder to leave removes the name of a file that fewer ranks came to hold. Names that killed processes left are
removed by the next process that joins any file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import mmap
import os
import re
import stat
import struct
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from featstore._core.descriptor import close, open_fd
from featstore.config import format_size
from featstore.errors import BusyError
from featstore.ranks import local_job
from featstore.storage.calls import close_quietly, naming, pwrite_all
from featstore.storage.lock import FileLock
from featstore.storage.rundir import finalize_here

__all__ = ["PATIENCE_S", "Allocate", "SharedArrays", "shared_arrays"]

Allocate: TypeAlias = Callable[[str, int, npt.DTypeLike], npt.NDArray[Any]]

DIRECTORY = "/dev/shm"
PATIENCE_S = 1800.0  # as long as ranks wait for each other in torch's process groups
_LEAVING_S = 1.0
_FORMAT = 1
_NAME = re.compile("[0-9a-f]{32}")
_PAGE_BYTES = mmap.ALLOCATIONGRANULARITY
_FLOCK = "hhqqi0q"  # struct flock: type, whence, start, length, process


class SharedArrays:
    """Arrays in shared memory, read-only, which this process holds until :meth:`close`, or until the object dies.

    A forked child has the arrays, too; :meth:`close` in the child frees only its own view.

    Attributes
    ----------
    arrays : dict of str to array
    nbytes : int
        Of all arrays.
    """

    def __init__(self, arrays: dict[str, npt.NDArray[Any]], fd: int, slot: int, path: str) -> None:
        self.arrays = arrays
        self.nbytes = sum(array.nbytes for array in arrays.values())
        self._leave = finalize_here(self, _leave, fd, slot, path)

    def close(self) -> None:
        """Give up the arrays; may be called again. Memory is freed when no process has a view of it."""
        self.arrays = {}
        self._leave()


def shared_arrays(what: str, recipe: Mapping[str, Any], ranks: int, make: Callable[[Allocate], None]) -> SharedArrays:
    """Get arrays that ``ranks`` processes of this job share; the first process makes them, and the others wait for it.

    Parameters
    ----------
    what : str
        Name of the arrays in messages.
    recipe : mapping
        All that decides what the arrays hold, as JSON. Processes with other recipes have arrays of their own.
    ranks : int
        Processes that will hold the arrays.
    make : callable
        Makes the arrays: allocates each by ``allocate(name, n, dtype)``, zeroed, and writes to it. Called in one process at a
        time; in the next one if the process dies or the call raises.

    Raises
    ------
    OSError
        ENOSPC: the file system of shared memory is too small; the message says what is free.
    BusyError
        Another process is still making the arrays after ``PATIENCE_S``.
    """
    _sweep()
    name = xxhash.xxh3_128_hexdigest(json.dumps([_FORMAT, local_job(), ranks, recipe], sort_keys=True).encode())
    path = os.path.join(DIRECTORY, _prefix() + name)
    while True:
        try:
            lock = FileLock(path, exclusive=True, patience_s=PATIENCE_S, mode=0o600)
        except BusyError:
            raise BusyError(f"{what}: another rank was still making it after {PATIENCE_S:g} s", path) from None
        with lock:
            found = _join(what, path, ranks, make) if lock.in_place else None
        if found is not None:
            return found


def _join(what: str, path: str, ranks: int, make: Callable[[Allocate], None]) -> SharedArrays | None:
    """Hold the file's arrays, and make them if nobody has; None if the file has gone. The file is locked."""
    fd = open_fd(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "another user made this file", path)
        slot = next((slot for slot in range(ranks) if _take(fd, slot, path)), None)
        if slot is None:  # its last holder was killed before it removed the name
            os.unlink(path)
            close(fd)
            return None
        layout = _read_layout(fd)
        if layout is None:
            try:
                layout = _make(what, fd, path, make)
            except BaseException:
                os.unlink(path)  # frees the memory
                raise
        if all(each == slot or _is_held(fd, each, 1) for each in range(ranks)):
            os.unlink(path)
        # One mapping, whose pages are mapped now and not in the first gathers.
        whole = mmap.mmap(fd, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        arrays = {
            name: np.frombuffer(whole, dtype, n, offset) if n else np.empty(0, dtype)
            for name, (offset, n, dtype) in layout.items()
        }
        return SharedArrays(arrays, fd, slot, path)
    except BaseException:
        status = os.fstat(fd)
        if status.st_nlink and status.st_uid == os.geteuid() and not _is_held(fd, 0, 0):
            os.unlink(path)  # nobody else would
        close_quietly(fd)
        raise


def _make(what: str, fd: int, path: str, make: Callable[[Allocate], None]) -> dict[str, tuple[int, int, str]]:
    """Make the arrays in an empty file; return the offset, length and dtype of each."""
    layout, end = dict[str, tuple[int, int, str]](), _PAGE_BYTES
    os.ftruncate(fd, 0)  # of a maker that was killed
    _reserve(what, fd, path, 0, end)

    def allocate(name: str, n: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        nonlocal end
        dtype, offset = np.dtype(dtype), end
        layout[name] = offset, n, dtype.str
        if not n:
            return np.empty(0, dtype)
        n_bytes = _whole_pages(n * dtype.itemsize)
        _reserve(what, fd, path, offset, n_bytes)
        end = offset + n_bytes
        return np.frombuffer(mmap.mmap(fd, n_bytes, offset=offset), dtype, n)

    make(allocate)
    header = json.dumps(layout).encode()
    assert len(header) < _PAGE_BYTES
    pwrite_all(fd, header, 0, path)  # what marks the arrays as complete comes last
    return layout


def _read_layout(fd: int) -> dict[str, tuple[int, int, str]] | None:
    """Read where the arrays lie; None if they are not complete."""
    header = os.pread(fd, _PAGE_BYTES, 0).rstrip(b"\0")
    return {name: (offset, n, dtype) for name, (offset, n, dtype) in json.loads(header).items()} if header else None


def _reserve(what: str, fd: int, path: str, offset: int, n_bytes: int) -> None:
    """Allocate pages, so that writing to them cannot fail; OSError with what is free if there are too few."""
    try:
        with naming(path):
            os.posix_fallocate(fd, offset, n_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        status, directory = os.statvfs(DIRECTORY), DIRECTORY
        free, total = (format_size(blocks * status.f_frsize) for blocks in (status.f_bavail, status.f_blocks))
        raise OSError(
            error.errno,
            f"{what} needs {format_size(n_bytes)} more, and {free} of the {total} of shared memory in {directory} are free; make "
            "the cache smaller, or shared memory larger (docker run --shm-size=…; mount -o remount,size=…)",
            path,
        ) from None


def _leave(fd: int, slot: int, path: str) -> None:
    """Give up a slot, and remove a file that nobody holds now."""
    is_named = os.fstat(fd).st_nlink > 0
    _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, slot, 1)  # a mapping and forked children have the descriptor, too
    close(fd)
    if is_named:
        _remove_unheld(path, _LEAVING_S)


def _sweep() -> None:
    """Remove this user's files that nobody holds: their processes were killed."""
    for name in os.listdir(DIRECTORY):
        path = os.path.join(DIRECTORY, name)
        with contextlib.suppress(FileNotFoundError):
            if _NAME.fullmatch(name.removeprefix(_prefix())) and _is_own_file(path):
                _remove_unheld(path, 0)


def _is_own_file(path: str) -> bool:
    status = os.lstat(path)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _remove_unheld(path: str, patience_s: float) -> None:
    try:
        lock = FileLock(path, exclusive=True, patience_s=patience_s, mode=0o600)
    except BusyError:
        return  # a process is joining, and removes it when it leaves
    with lock:
        if not lock.in_place:
            return
        fd = open_fd(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if not _is_held(fd, 0, 0):
                os.unlink(path)
        finally:
            close_quietly(fd)


# Slots are locks of open file descriptions: unlike those of processes they exclude handles of one process, and outlive the
# closing of other descriptors of the file.


def _lock(fd: int, command: int, kind: int, first: int, n: int) -> int:
    """Lock, unlock or ask for ``n`` bytes, all from ``first`` on if 0; return the kind of lock that the kernel answers with."""
    answer = fcntl.fcntl(fd, command, struct.pack(_FLOCK, kind, os.SEEK_SET, first, n, 0))
    return int(struct.unpack(_FLOCK, answer)[0])


def _take(fd: int, slot: int, path: str) -> bool:
    try:
        with naming(path):
            _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, slot, 1)
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: it is taken
        return False
    return True


def _is_held(fd: int, first: int, n: int) -> bool:
    """Whether a holder other than ``fd`` has one of ``n`` slots."""
    return _lock(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, first, n) != fcntl.F_UNLCK


def _prefix() -> str:
    return f"featstore-{os.geteuid()}-"


def _whole_pages(n_bytes: int) -> int:
    return math.ceil(n_bytes / _PAGE_BYTES) * _PAGE_BYTES
