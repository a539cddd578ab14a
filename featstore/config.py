"""Options, sizes and the environment. This module imports no other module of the library."""

from __future__ import annotations

import errno
import math
import operator
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, cast, get_args

import psutil

__all__ = [
    "Options",
    "available_memory",
    "check_at_least",
    "check_flag",
    "check_integer",
    "check_place",
    "format_size",
    "is_folder",
    "listed",
    "local_ranks",
    "memory_limit",
    "no_attribute",
    "parse_cache_size",
    "parse_disk",
    "parse_memory",
    "parse_size",
    "processor_quota",
    "refuse_path",
    "user_path",
]

Backend = Literal["auto", "buffered", "io_uring", "pread"]
Verify = Literal["always", "open", "off"]

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_NUMBER = re.compile(r"\s*\d+(?:\.\d+)?\s*")
_LEAST_WITHOUT_UNIT = 4096  # bytes; a smaller number is no useful cache, but a share or a number with a forgotten unit
_MULTIPLE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*x\s*", re.IGNORECASE)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", re.IGNORECASE)


def check_integer(name: str, value: Any) -> int:
    """Check an integer of any kind, including NumPy's and tensors of no dimensions; TypeError for other values."""
    is_one = not isinstance(value, bool) and getattr(value, "ndim", 0) == 0 and "bool" not in str(getattr(value, "dtype", ""))
    try:
        if is_one:
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name} must be an integer, not {value!r}")


def check_at_least(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Check an integer as :func:`check_integer`; ValueError if it is less than ``least``, or more than ``most``."""
    number = check_integer(name, value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, not {number}")
    return number


def check_flag(name: str, value: object) -> bool:
    """Check a flag, which is True or False, also NumPy's; TypeError for other values."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def parse_size(size: int | str, name: str = "") -> int:
    """Parse an int or text such as ``"4GiB"``, ``"400MB"``, ``"1.5 G"`` (``G`` is 10⁹, ``GiB`` 2³⁰) into bytes.

    ``name`` is the argument's name in messages. ValueError for text that is no size, or a negative number; TypeError for a value
    that is neither an int nor text.
    """
    if not isinstance(size, str):
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            share = " or '50%'" if name == "memory" else ""
            raise TypeError(f"{name or 'a size'} is an int or a string like '4GiB'{share}, not {type(size).__name__}")
        number = operator.index(size)
        if number < 0:
            raise ValueError(f"{name or 'a size'} cannot be negative: {number}")
        return number
    match = _SIZE.fullmatch(size)
    n_bytes = float(match[1]) * _UNITS.get(match[2].upper(), math.nan) if match is not None else math.nan
    if not math.isfinite(n_bytes):
        of = f"{name}: " if name else ""
        raise ValueError(f"{of}not a size: {size!r:.80}; write a number of bytes or a number with KB, MB, GB, KiB, MiB, GiB …")
    return int(n_bytes)


def parse_memory(size: int | str, n_processes: int = 1) -> int:
    """Parse a size as :func:`parse_size`, or a share of the machine's memory such as ``"5%"``, into bytes.

    The machine's memory is its total memory, or the limit of a memory cgroup if that is less. ValueError for a share of 0 or
    above 100 %. A share is that of ``n_processes`` together, and divided by their number.
    """
    match = _PERCENT.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        try:
            return parse_size(size, "memory")
        except ValueError as error:
            raise ValueError(f"{error}; or a share of the machine's memory, such as '25%'") from None
    share = Fraction(match[1]) / 100
    if not 0 < share <= 1:
        raise ValueError(f"memory as a share of the machine's memory must lie above 0% and at most at 100%, not {size!r}")
    total, limit = int(psutil.virtual_memory().total), memory_limit()
    return int(share * (total if limit is None else min(total, limit)) / n_processes)


def parse_cache_size(size: Any, name: str = "", of: str = "the rows") -> int | float:
    """Parse the size of a cache: bytes as an int, a share as a float in (0, 1].

    A share is given as a float (``0.1``) or in percent (``"10%"``), bytes as for :func:`parse_size`; 0 means no cache. ``name``
    is the argument's name in messages, and ``of`` the noun of which a share is a part. ValueError for text that is no size, a
    share beyond 0 … 1, or a number below 4,096 without a unit; for the last, the error suggests the probable meaning.
    """
    percent = _PERCENT.fullmatch(size) if isinstance(size, str) else None
    if percent is not None or (isinstance(size, Real) and not isinstance(size, Integral)):
        share = float(percent[1]) / 100 if percent is not None else float(size)
        if share == 0:
            return 0
        if not 0 < share <= 1:
            what = f"{name} as a share" if name else "a share"
            raise ValueError(f"{what} of {of} must lie in (0, 1], not {size}; bytes are an int or '1GiB'")
        return share
    n_bytes = parse_size(size, name)
    has_unit = isinstance(size, str) and not _NUMBER.fullmatch(size)
    number = n_bytes if has_unit else float(size)
    if not has_unit and 0 < number < _LEAST_WITHOUT_UNIT:
        shown = f"{name}={size!r}" if name else repr(size)
        percents, bytes_ = f"'{100 * number if number <= 1 else number:g}%'", f"'{number:g}MiB'"
        meant = percents if number <= 1 else f"{percents} or {bytes_}" if number <= 100 else bytes_
        raise ValueError(
            f"{shown} has no unit and would be a cache of {n_bytes} bytes: probably {meant} is meant; write a share of {of} as "
            f"'10%' or as a float, bytes with a unit ('{n_bytes}B')"
        )
    return n_bytes


def parse_disk(size: int | str, features_bytes: int, name: str = "") -> int:
    """Parse a size as :func:`parse_size`, or a multiple of the features such as ``"1.5x"``, into bytes."""
    match = _MULTIPLE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        try:
            return parse_size(size, name)
        except ValueError as error:
            raise ValueError(f"{error}; or a multiple of the features, such as '1.5x'") from None
    return int(Fraction(match[1]) * features_bytes)


def format_size(n_bytes: int, *, down: bool = False) -> str:
    """Write ``n_bytes`` as text with a binary unit, such as ``'1.50 GiB'``; rounded down if ``down``, else to the nearest."""
    size, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    if unit == "B":
        return f"{int(size)} B"
    return f"{math.floor(100 * size) / 100 if down else size:.2f} {unit}"


def user_path(path: str | os.PathLike[str]) -> str:
    """Expand a path that a user gave: ``~`` or ``~name`` at its beginning is a home directory.

    FileNotFoundError for an empty path, such as that of a shell's variable that is not set: it is not the working directory.
    """
    text = os.fsdecode(path)
    if not text:
        raise FileNotFoundError(errno.ENOENT, "an empty path; '.' is the working directory")
    return os.path.expanduser(text)


def is_folder(path: str) -> bool:
    """Tell whether there is a folder at ``path``; OSError if that may not be known, as below a folder of another user."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a name with a NUL
        return False


def check_place(what: str, path: str | os.PathLike[str]) -> None:
    """Check, before any work, that a file can be written to ``path``: OSError if its folder is not there or not writable."""
    name = os.fspath(path)
    folder = os.path.dirname(name) or "."
    if is_folder(name):
        raise IsADirectoryError(errno.EISDIR, f"a directory in place of {what}", name)
    if not is_folder(folder):
        raise FileNotFoundError(errno.ENOENT, f"the folder of {what} {name!r} is not there", folder)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, f"{what} {name!r} cannot be written", folder)


def refuse_path(g: Any) -> None:
    """Raise TypeError, which says how to open it, if a path is given in place of an open graph."""
    if isinstance(g, (str, os.PathLike)):
        raise TypeError(f"g must be an open graph, not a path: featstore.open({os.fspath(g)!r})")


def listed(names: Iterable[object]) -> str:
    """Write names for a message: ``'a', 'b'``, or ``none``."""
    return ", ".join(map(repr, names)) or "none"


def no_attribute(found: object, name: str, advice: str = "") -> AttributeError:
    """Make the error of an attribute that is missing, with advice on what to use instead."""
    text = f"{type(found).__name__!r} object has no attribute {name!r}"
    return AttributeError(f"{text}; {advice}" if advice else text, name=name, obj=found)


def _cgroups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the directories of this process's cgroups with a controller, its own first, and whether they are of version 2.

    The process's own group may lack a directory: a container may see another group as the root.
    """
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base = _GROUPS
        elif controller in controllers.split(","):
            base = _GROUPS / controller
        else:
            continue
        own = base / group.lstrip("/")
        for directory in (own, *own.parents):
            yield directory, controllers == ""
            if directory == base:
                break


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield the limits of this process's memory cgroups (v1 or v2), and the bytes that each still allows."""
    for directory, is_v2 in _cgroups("memory"):
        names = ("memory.max", "memory.current") if is_v2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        try:
            limit, used = ((directory / name).read_text().strip() for name in names)
            # Page cache is charged to the group, too, but the kernel reclaims it under pressure.
            stat = dict(row.split() for row in (directory / "memory.stat").read_text().splitlines())
            usage = int(used)
        except (OSError, ValueError):
            continue
        if limit.isdigit() and int(limit) < 2**60:
            reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            yield int(limit), int(limit) - usage + reclaimable


def memory_limit() -> int | None:
    """Find the limit of this process's memory cgroups in bytes, the least of them; None without one."""
    return min((limit for limit, _ in _cgroup_limits()), default=None)


def available_memory() -> int:
    """Count the bytes of memory available now on the machine, or less under a memory cgroup."""
    machine = int(psutil.virtual_memory().available)
    return max(0, min([machine, *(left for _, left in _cgroup_limits())]))


def processor_quota() -> float | None:
    """Find the processors that this process's cgroups grant, the least of them; None without a limit."""
    found = []
    for directory, is_v2 in _cgroups("cpu"):
        names = ("cpu.max",) if is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        try:
            words = [word for name in names for word in (directory / name).read_text().split()]
        except OSError:
            continue
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():  # not "max", not -1
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def local_ranks() -> int:
    """Count the processes of this machine that train together, by variables of torchrun, accelerate or Lightning; else 1.

    Lightning's own launcher sets only the number on all machines, which is at least the number on this one.
    """
    name = "LOCAL_WORLD_SIZE"
    if name not in os.environ and "LOCAL_RANK" in os.environ:
        name = "WORLD_SIZE"
    text = os.environ.get(name, "1").strip()
    return max(1, int(text)) if text.isdecimal() else 1


@dataclass(frozen=True)
class Options:
    """The options with which a dataset is opened; passed on explicitly, never changed.

    ``FEATSTORE_BACKEND``, ``FEATSTORE_VERIFY`` and ``FEATSTORE_THREADS`` give defaults; :meth:`resolve` reads them once at
    ``open``.
    """

    memory: int
    backend: Backend = "auto"
    verify: Verify = "always"
    threads: int = 1
    queue_depth: int = 512

    @classmethod
    def resolve(
        cls,
        memory: int | str | None = None,
        backend: str = "auto",
        verify: str | None = None,
        threads: int | None = None,
    ) -> Options:
        """Check options that a user gave, and fill in defaults.

        The default memory is half of the available memory. This, and a share, is divided by the number of local ranks.
        """
        if backend == "auto":
            backend = os.environ.get("FEATSTORE_BACKEND", "auto")
        if verify is None:
            verify = os.environ.get("FEATSTORE_VERIFY", "always")
        if backend not in get_args(Backend):
            raise ValueError(f"backend must be 'auto', 'buffered', 'io_uring' or 'pread', not {backend!r}")
        if verify not in get_args(Verify):
            raise ValueError(f"verify must be 'always', 'open' or 'off', not {verify!r}")
        if threads is None:
            text = os.environ.get("FEATSTORE_THREADS", "0")
            if not text.strip().isdecimal():
                raise ValueError(f"FEATSTORE_THREADS must be a number of threads, not {text!r}")
            threads = int(text) or len(os.sched_getaffinity(0))
        threads = check_at_least("threads", threads, 1)
        n_bytes = available_memory() // 2 // local_ranks() if memory is None else parse_memory(memory, local_ranks())
        return cls(n_bytes, cast(Backend, backend), cast(Verify, verify), threads)
