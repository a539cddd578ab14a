"""Facts and limits of a dataset's place: its file system, direct I/O by a read, free space; and shared memory."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from featstore._core.descriptor import close, open_fd
from featstore._core.io import direct_alignment, direct_mode
from featstore.config import format_size
from featstore.diagnosis import kernel
from featstore.diagnosis.findings import FAILING, Finding, brief
from featstore.gather import sharedmemory
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.rundir import runs_directory
from featstore.storage.writer import is_drive_full

__all__ = ["Mount", "direct_io", "file_system", "mount_of", "shared_memory", "space"]

IN_MEMORY = ("tmpfs", "ramfs")
LAYERS = ("overlay", "aufs")
COMPRESSED = ("squashfs", "erofs")
FAR = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "fuse", "9p", "virtiofs")
TO_A_DRIVE = "mount a directory of a drive instead: docker run -v /mnt/ssd:/data"
SMALL_SHARED_BYTES = 64 << 20  # Docker's default


@dataclass(frozen=True)
class Mount:
    """A mounted file system; ``beneath`` are the types of the file systems that an overlay lies on, as far as they are seen."""

    kind: str
    point: str
    is_read_only: bool = False
    beneath: tuple[str, ...] = ()

    def __str__(self) -> str:
        over = f" over {' and '.join(self.beneath)}" if self.beneath else ""
        return f"{self.kind}{over}"

    @property
    def is_far(self) -> bool:
        return self.kind.split(".")[0] in FAR

    @property
    def is_of_container(self) -> bool:
        return self.kind in LAYERS + COMPRESSED


def mount_of(path: str) -> Mount:
    """Find the mount that holds a path."""
    found = _innermost(path)
    if found is None:
        return Mount("unknown file system", "?")
    point, kind, flags, options = found
    below = [option[9:].split(":") for option in options.split(",") if option.startswith("lowerdir=")]
    lower = [_innermost(_unescaped(folder)) for folder in below[0] if os.path.isdir(_unescaped(folder))] if below else []
    beneath = tuple(sorted({each[1] for each in lower if each is not None}))
    return Mount(kind, point, "ro" in flags.split(",") or "ro" in options.split(","), beneath)


def _innermost(path: str) -> tuple[str, str, str, str] | None:
    """Find the mount point that holds a path, with its type, flags and options."""
    real, found = os.path.realpath(path), None
    for line in kernel.text_of("/proc/self/mountinfo").splitlines():
        head, _, tail = line.partition(" - ")
        point, flags = head.split(" ")[4:6]
        point = _unescaped(point)
        inside = real == point or real.startswith(os.path.join(point, ""))
        if inside and (found is None or len(point) >= len(found[0])):  # of two on one point the later one is seen
            kind, _, options = tail.split(" ", 2)
            found = point, kind, flags, options
    return found


def _unescaped(text: str) -> str:
    """Undo how the kernel writes blanks in its lists."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


def file_system(path: str, is_there: bool) -> Finding:
    """Say which file system holds a path, and whether that is a place for datasets; ``is_there``: the path is one, or a pack."""
    mount = mount_of(path)
    text = f"{mount} at {mount.point}{', read-only' * mount.is_read_only}"
    values: dict[str, Any] = {"file_system": mount.kind, "mount_point": mount.point, "beneath": list(mount.beneath)}
    values["read_only"] = mount.is_read_only
    if mount.kind in IN_MEMORY:
        cause = (
            f"{mount.kind} lies in memory: a dataset's bytes there are memory, which no budget counts and a control group does"
        )
        return Finding("file system", "warning", text, cause, "keep datasets on a drive", values)
    if mount.is_read_only and not is_there:
        cause = "the file system is mounted read-only: no dataset can be made here"
        return Finding("file system", "warning", text, cause, "give a directory that may be written", values)
    if mount.is_of_container:
        cause = "these are a container's layers: the image's files are read through them, and others go with the container"
        return Finding("file system", "note", text, cause, TO_A_DRIVE, values)
    if mount.is_far:
        cause = "it lies across a network, or on the host of this machine"
        return Finding("file system", "note", text, cause, "copy the dataset to a drive of this machine, which is faster", values)
    if mount.is_read_only:
        cause = f"the file system is mounted read-only, so files of runs go to {runs_directory(path)}"
        return Finding("file system", "note", text, cause, 'run_dir="…" names a directory on a fast drive for them', values)
    return Finding("file system", "ok", text, values=values)


@contextmanager
def _some_file(path: str, is_there: bool) -> Iterator[int]:
    """Open the largest file of a dataset or a pack, or of a directory that may not be written; else a new, temporary file."""
    if not is_there and os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        with tempfile.TemporaryFile(dir=path) as file:  # without a name, so that a killed process leaves nothing
            file.write(bytes(4 * PAGE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            yield file.fileno()
        return
    files = [each.path for each in os.scandir(path) if each.is_file(follow_symlinks=False)]
    if not files and is_there:  # a pack may have its files in folders alone
        files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    if not files:
        raise PermissionError(errno.EACCES, "there is no file to read, and none may be made", path)
    fd = open_fd(max(files, key=os.path.getsize), os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        close(fd)


def direct_io(path: str, is_there: bool) -> Finding:
    """Read a page of a file there past the page cache."""
    mount = mount_of(path)
    values: dict[str, Any] = {}
    try:
        with _some_file(path, is_there) as fd:
            mode, alignment = direct_mode(fd), direct_alignment(fd)
    except OSError as error:
        is_damage = error.errno == errno.EIO
        status, text = ("error", "a page cannot be read") if is_damage else ("warning", "not tried")
        return Finding("direct I/O", status, text, brief(error), _to_try(error), values)  # type: ignore[arg-type]
    values |= {"mode": mode, "alignment": alignment}
    if os.environ.get("FEATSTORE_BACKEND") == "buffered":
        cause = "the variable FEATSTORE_BACKEND is 'buffered'"
        text = "not used: reads go through the page cache, at the cost of a copy and its memory"
        return Finding("direct I/O", "warning", text, cause, "unset FEATSTORE_BACKEND", values)
    if mode.startswith("direct"):
        mode += f", aligned to {alignment} bytes" if alignment else ""
        return Finding("direct I/O", "ok", mode, values=values)
    text = "reads go through the page cache, at the cost of a copy and its memory"
    cause = f"{mode.removeprefix('buffered: ')}: {mount} at {mount.point}"
    if mount.kind in IN_MEMORY:
        return Finding("direct I/O", "note", text, cause, "keep datasets on a drive", values)
    if mount.is_of_container:
        remedy = f"the image's files are not for datasets; {TO_A_DRIVE}"
    elif mount.is_far:
        remedy = "copy the dataset to a drive of this machine"
    elif "alignment" in mode:
        remedy = "a drive with blocks of 4096 bytes or fewer: lsblk -o NAME,LOG-SEC shows them"
    else:
        remedy = "a directory of ext4, xfs or btrfs on an SSD"
    return Finding("direct I/O", "warning", text, cause, remedy, values)


def _to_try(error: OSError) -> str:
    """Say what lets the doctor read a page there."""
    if is_drive_full(error):
        return "free some space on the drive"
    if error.errno == errno.EIO:
        return FAILING
    return "give a directory that may be written, or one with files that may be read"


def space(path: str, is_there: bool) -> Finding:
    """Look for room where files of runs go."""
    place = os.path.dirname(runs_directory(path)) if is_there else path
    total, _, free = shutil.disk_usage(place)
    values = {"free_bytes": free, "total_bytes": total, "path": place}
    text = f"{format_size(free)} of {format_size(total)} are free{'' if place == path else f' at {place}'}"
    if free < total // 50:
        cause = "the drive is nearly full, and run files of superbatches and streamed packs need room"
        remedy = 'strategies take run_dir="…" for another drive, and disk="…" for less'
        return Finding("disk", "warning", text, cause, remedy, values)
    return Finding("disk", "ok", text, values=values)


def shared_memory() -> Finding:
    """Look at the size of shared memory, which caches that ranks share lie in, and batches of torch's worker processes."""
    where = sharedmemory.DIRECTORY
    try:
        total, _, free = shutil.disk_usage(where)
    except OSError as error:
        cause, remedy = brief(error), f"mount a tmpfs at {where}: docker run --shm-size=32g or --ipc=host"
        return Finding("shared memory", "note", "there is none: ranks of this machine cannot share a cache", cause, remedy)
    values = {"free_bytes": free, "total_bytes": total}
    text = f"{format_size(free)} of {format_size(total)} are free at {where}"
    if free <= SMALL_SHARED_BYTES:
        cause = "caches that ranks share lie there, and batches of torch's worker processes; Docker's default is 64 MiB"
        return Finding("shared memory", "note", text, cause, "docker run --shm-size=32g or --ipc=host", values)
    return Finding("shared memory", "ok", text, values=values)
