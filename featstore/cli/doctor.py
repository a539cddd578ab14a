"""``featstore doctor``: what on this machine is in the way of reading at the drive's speed, and what to change."""

from __future__ import annotations

import argparse
import errno
import os
import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from featstore._core.io import Engine, direct_alignment, direct_mode
from featstore.budget import Budget
from featstore.cli.arguments import memory_size
from featstore.cli.output import one_line, print_result
from featstore.config import Options, available_memory, format_size, memory_limit, processor_quota
from featstore.storage.catalog import CATALOG_DIRECTORY
from featstore.storage.drive import measure_drive
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.pagedsums import MIN_ARENA_BYTES
from featstore.storage.reader import Reader
from featstore.storage.rundir import runs_directory
from featstore.storage.writer import is_drive_full

__all__ = ["DEFAULT_PATH", "PATH", "add_arguments", "examine", "run"]

PATH = "a dataset, or a directory where one is to be (default: here)"
DEFAULT_PATH = "."

SPARE_BYTES = 64 << 20  # by which a process may exceed its budget
BESIDE_BYTES = SPARE_BYTES + (448 << 20)  # that, and an interpreter with torch
LEAST_DESCRIPTORS = 1024
SLOW_IOPS = 5000  # of a disk with heads, or a volume across a network
LOOKED_AT = ("torch", "torch_geometric", "pyg-lib", "numpy", "lmdb", "xxhash")
IN_MEMORY = ("tmpfs", "ramfs")
LAYERS = ("overlay", "aufs", "squashfs")
FAR = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "fuse", "9p", "virtiofs")
RINGS = "io_uring_setup, io_uring_enter and io_uring_register"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Parameters
    ----------
    name : str
    status : {"ok", "note", "warning"}
        A note is no fault, and may explain a speed.
    text : str
        What was found.
    remedy : str
        What to change; empty if nothing.
    values : dict
        The figures, for programs.
    """

    name: str
    status: str
    text: str
    remedy: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory", type=memory_size, metavar="SIZE", help="the budget that is to be given (default: half of what is available)"
    )
    parser.add_argument("--no-rates", action="store_true", help="do not measure the drive, which writes 64 MiB for a second")


def run(options: argparse.Namespace) -> int:
    """Look at everything, and print what was found; FileNotFoundError if there is no such directory."""
    path = os.path.abspath(options.path)
    found = examine(path, options.memory, rates=not options.no_rates)
    n = sum(each.status == "warning" for each in found)
    result = {"path": path, "warnings": n, "findings": [asdict(each) for each in found]}
    print_result(options, result, _table(path, found))
    return 0


def examine(path: str, memory: int | str | None = None, *, rates: bool = True) -> list[Finding]:
    """Look at the kernel, the file system of a directory, the memory, the limits, the packages and, with ``rates``, the drive.

    Raises
    ------
    FileNotFoundError, NotADirectoryError, PermissionError
        ``path`` is no directory that can be read.
    """
    os.listdir(path)
    found = [_ring(), _direct(path), _memory(memory), _processors(), _descriptors(), _space(path), *_packages()]
    return [*found, _rates(path)] if rates else found


def _table(path: str, found: list[Finding]) -> str:
    lines = [path]
    for each in found:
        lines.append(f"  {each.status:<8} {each.name:<12} {each.text}")
        if each.remedy:
            lines.append(f"  {'':<8} {'':<12} → {each.remedy}")
    n = sum(each.status == "warning" for each in found)
    lines.append("nothing is in the way" if not n else f"{n} thing{'s are' if n > 1 else ' is'} in the way")
    return "\n".join(lines)


# -- the kernel ----------------------------------------------------------------------------------------------------------------


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _ring() -> Finding:
    """Make a ring, as readers do."""
    name, kernel, chosen = "io_uring", platform.release(), os.environ.get("FEATSTORE_BACKEND", "auto")
    if chosen in ("pread", "buffered"):
        return Finding(name, "warning", f"FEATSTORE_BACKEND={chosen} rules it out or slows it down", "unset FEATSTORE_BACKEND")
    try:
        Engine("io_uring", 8, MIN_ARENA_BYTES).close()
    except OSError as error:
        why, remedy = _refusal(error)
        text = f"refused ({error.strerror}): {why}; reads go through threads of pread"
        return Finding(name, "warning", text, remedy, {"errno": error.errno})
    return Finding(name, "ok", f"the kernel allows rings ({kernel})", values={"kernel": kernel})


def _refusal(error: OSError) -> tuple[str, str]:
    """Say why the kernel refuses rings, and what to change."""
    disabled = _text("/proc/sys/kernel/io_uring_disabled")
    if error.errno == errno.EPERM and disabled in ("1", "2"):
        group = " or add the user to the group of kernel.io_uring_group" * (disabled == "1")
        return f"kernel.io_uring_disabled is {disabled}", f"as root: sysctl -w kernel.io_uring_disabled=0{group}"
    if error.errno == errno.ENOMEM:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limit = "unlimited" if soft == resource.RLIM_INFINITY else format_size(soft)
        return f"memory that may be locked: {limit}", "ulimit -l unlimited; docker run --ulimit memlock=-1"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many files are open", "ulimit -n 65536"
    if "Seccomp:\t2" in _text("/proc/self/status"):
        return (
            "a seccomp filter is in force, as containers have one",
            f"docker run --security-opt seccomp=profile.json, with {RINGS} allowed, or seccomp=unconfined",
        )
    return f"kernel {platform.release()} has none", "a kernel of 5.6 or later, built with CONFIG_IO_URING"


# -- the file system -----------------------------------------------------------------------------------------------------------


def _file_system(path: str) -> tuple[str, str]:
    """Find the type of the file system that holds a path, and its mount point."""
    real, found = os.path.realpath(path), ("", "")
    for line in _text("/proc/self/mountinfo").splitlines():
        head, _, tail = line.partition(" - ")
        point = head.split(" ")[4].encode().decode("unicode_escape")
        inside = real == point or real.startswith(os.path.join(point, ""))
        if inside and len(point) >= len(found[1]):  # of two on one point the later one is seen
            found = tail.split(" ")[0], point
    return found


@contextmanager
def _some_file(path: str) -> Iterator[int]:
    """Open the largest file of a dataset, or of a directory that may not be written; else a new file, which is removed."""
    is_dataset = os.path.isdir(os.path.join(path, CATALOG_DIRECTORY))
    if not is_dataset and os.access(path, os.W_OK | os.X_OK, effective_ids=True):
        with tempfile.NamedTemporaryFile(prefix=".featstore-doctor-", dir=path) as file:
            file.write(bytes(4 * PAGE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            fd = os.open(file.name, os.O_RDONLY)
            try:
                yield fd
            finally:
                os.close(fd)
        return
    files = [each for each in os.scandir(path) if each.is_file(follow_symlinks=False)]
    if not files:
        raise PermissionError(errno.EACCES, "there is no file to read, and none may be made", path)
    fd = os.open(max(files, key=lambda each: each.stat().st_size).path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _direct(path: str) -> Finding:
    """Read a page of a file there past the page cache."""
    kind, point = _file_system(path)
    values: dict[str, Any] = {"file_system": kind, "mount_point": point}
    where = f"{kind or 'unknown'} at {point or '?'}"
    try:
        with _some_file(path) as fd:
            mode, alignment = direct_mode(fd), direct_alignment(fd)
    except OSError as error:
        return Finding("direct I/O", "warning", f"{where}: not tried: {one_line(error)}", _to_try(error), values)
    values |= {"mode": mode, "alignment": alignment}
    if alignment:
        mode += f", aligned to {alignment} bytes"
    if kind in IN_MEMORY:
        remedy = "keep datasets on a drive: their bytes here are memory that no budget counts"
        return Finding("direct I/O", "warning", f"{where} lies in memory ({mode})", remedy, values)
    if mode.startswith("direct"):
        status = "note" if kind.split(".")[0] in FAR else "ok"
        remedy = "across a network or from a host: a drive of this machine is faster" if status == "note" else ""
        return Finding("direct I/O", status, f"{where}: {mode}", remedy, values)
    if kind in LAYERS:
        remedy = "a container's own layers: mount a directory of a drive instead, docker run -v /mnt/ssd:/data"
    elif kind.split(".")[0] in FAR:
        remedy = "copy the dataset to a drive of this machine"
    else:
        remedy = "ext4, xfs and btrfs on an SSD have it; reads here pass through the page cache, and cost a copy and its memory"
    return Finding("direct I/O", "warning", f"{where}: {mode}", remedy, values)


def _to_try(error: OSError) -> str:
    """Say what lets the doctor read a page there."""
    if is_drive_full(error):
        return "free some space on the drive"
    if error.errno == errno.EIO:
        return "dmesg has what the drive reported"
    return "give a directory that may be written, or one with files that may be read"


def _space(path: str) -> Finding:
    total, _, free = shutil.disk_usage(path)
    values = {"free_bytes": free, "total_bytes": total}
    text = f"{format_size(free)} of {format_size(total)} are free"
    if free < total // 50:
        remedy = 'run files of superbatches and streamed packs need room: strategies take disk="…" and run_dir="…"'
        return Finding("disk", "warning", text, remedy, values)
    return Finding("disk", "ok", text, values=values)


def _rates(path: str) -> Finding:
    """Measure the drive as strategies do."""
    is_dataset = os.path.isdir(os.path.join(path, CATALOG_DIRECTORY))
    options = Options.resolve(min(1 << 28, max(1 << 25, available_memory() // 2)), "auto", "off")
    budget = Budget(options.memory)
    reader = Reader(options, budget, "the doctor's reader")
    try:
        speed = measure_drive(reader, runs_directory(path) if is_dataset else os.path.join(path, ".featstore-doctor.runs"))
    except OSError as error:
        return Finding("drive", "warning", f"not measured: {one_line(error)}", "give a directory that may be written")
    finally:
        reader.close()
    values = asdict(speed)
    rates = f"reads {speed.bandwidth / 1e9:.2f} GB/s, writes {speed.write_bandwidth / 1e9:.2f} GB/s"
    text = f"{rates}, {speed.iops:,.0f} random reads a second"
    if speed.iops < SLOW_IOPS:
        remedy = (
            'random reads are slow: strategy="streamed" and "packed" read in sequence; a local NVMe drive does 50,000 and more'
        )
        return Finding("drive", "warning", text, remedy, values)
    return Finding("drive", "ok", text, values=values)


# -- the process ---------------------------------------------------------------------------------------------------------------


def _memory(asked: int | str | None) -> Finding:
    """Compare a budget with what the machine, and a control group, leave."""
    total, available, limit = int(psutil.virtual_memory().total), available_memory(), memory_limit()
    budget = Options.resolve(asked).memory
    values = {"total_bytes": total, "available_bytes": available, "limit_bytes": limit, "memory": budget}
    of = f"{format_size(available)} of {format_size(total)} are available"
    group = "" if limit is None else f", and a control group allows {format_size(limit)}"
    text = f"{of}{group}; memory={format_size(budget)}{' by default' if asked is None else ''}"
    room = max(0, available - SPARE_BYTES)  # this process has its interpreter and torch already
    if limit is not None:
        room = min(room, max(0, limit - BESIDE_BYTES))
    if budget > room:
        whose = "the control group's limit" if limit is not None and limit - BESIDE_BYTES <= room else "what is available"
        values["suggested"] = room
        remedy = f"memory={format_size(room, down=True)!r} keeps within {whose}, beside an interpreter with torch"
        return Finding("memory", "warning", text, remedy, values)
    return Finding("memory", "ok", text, values=values)


def _processors() -> Finding:
    """Compare the processors that the process may use with a control group's share of them."""
    n = len(os.sched_getaffinity(0))
    quota = processor_quota()
    values = {"processors": n, "quota": quota}
    if quota is not None and quota < n:
        text = f"{n} processors, of which a control group grants {quota:g}"
        threads = max(1, int(quota))
        return Finding("processors", "note", text, f"FEATSTORE_THREADS={threads} and OMP_NUM_THREADS={threads}", values)
    return Finding("processors", "ok", f"{n} processors", values=values)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    values = {"soft": soft, "hard": hard}
    if 0 <= soft < LEAST_DESCRIPTORS:
        return Finding("open files", "warning", f"{soft} at most", f"ulimit -n {min(65536, hard) if hard > 0 else 65536}", values)
    return Finding("open files", "ok", "unlimited" if soft < 0 else f"{soft:,} at most", values=values)


def _packages() -> Iterator[Finding]:
    found = {}
    for name in ("featstore", *LOOKED_AT):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    yield Finding("packages", "ok", ", ".join(f"{name} {number}" for name, number in found.items()), values=found)
    yield _devices()


def _devices() -> Finding:
    """List the devices that torch finds, and the driver that the kernel has."""
    driver = _driver()
    values: dict[str, Any] = {"driver": driver}
    of = "" if driver is None else f"; the kernel has driver {driver}"
    if torch.cuda.is_available():
        values["devices"] = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
        return Finding("devices", "ok", f"CUDA {torch.version.cuda}: {', '.join(values['devices'])}{of}", values=values)
    if torch.version.cuda is None:
        return Finding("devices", "ok", f"torch is built for processors alone{of}", values=values)
    text = f"torch was built for CUDA {torch.version.cuda}, and finds no device{of}"
    remedy = "nvidia-smi shows whether a driver is there; docker run --gpus all"
    return Finding("devices", "note", text, remedy, values)


def _driver() -> str | None:
    """Find the version of NVIDIA's driver; None without one."""
    first, _, _ = _text("/proc/driver/nvidia/version").partition("\n")
    found = re.search(r"\d+(?:\.\d+)+", first)
    return None if found is None else found[0]
