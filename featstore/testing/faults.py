"""Fault injection: failing system calls, killed processes, refused system calls, damaged files.

A preloaded library (``faultlib.c``, compiled on demand) fails the k-th call of an operation on files below one directory.
:func:`sweep` walks k until a run meets no fault. ``LD_PRELOAD`` works only from a process's start, so the sweep runs in a
child made by :func:`run_in_child`::

    def campaign(folder):                    # in the child
        for fault in sweep(folder, "write", "ENOSPC"):
            with fault:
                attempt(folder)              # must raise OSError, or succeed where fault.fired stays 0
            check(folder)

    def test_campaign(tmp_path):
        run_in_child(campaign, str(tmp_path), faults=True)

:func:`recorded` lists what changes files instead, call by call, with each flush: what a power cut may undo.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import functools
import importlib.util
import inspect
import json
import os
import platform
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

__all__ = [
    "OPERATIONS",
    "Fault",
    "Record",
    "deny_syscalls",
    "fault_library",
    "fault_stacks",
    "flipped",
    "forked",
    "random_flips",
    "recorded",
    "run_in_child",
    "swapped",
    "sweep",
    "truncated",
]

#: Kinds of calls that can fail, in the order of the enumeration in faultlib.c. ``"alloc"``: malloc and its kin and
#: anonymous mmap, from 32 KiB up. ``"core_alloc"``: of any size, if the compiled core asks for it. ``"read_direct"``: reads past
#: the page cache.
OPERATIONS = (
    *("open", "read", "write", "fsync", "rename", "truncate", "mmap", "unlink", "alloc", "close", "flock", "mkdir"),
    *("read_direct", "core_alloc"),
)
# In the order of the enumeration in faultlib.c.
_RECORDS = ("write", "resize", "flush", "create", "mkdir", "rename", "exchange", "unlink", "symlink", "link", "map")
_ACTIONS = {"short": -1, "kill": -2, "end": -3, "interrupt": -4}
_LOADED = "FEATSTORE_FAULT_LIBRARY"


# -- the preloaded library -----------------------------------------------------------------------------------------------------


@functools.cache
def _compiled() -> bytes:
    """Compile the library with ``cc``, once in a process."""
    source = Path(__file__).with_name("faultlib.c")
    compiler = os.environ.get("CC", "cc")
    with tempfile.TemporaryDirectory(prefix="featstore-faults-") as folder:
        target = Path(folder) / "faultlib.so"
        subprocess.run(
            [compiler, "-O1", "-g", "-Wall", "-shared", "-fPIC", "-o", target, source, "-pthread"],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return target.read_bytes()


@contextlib.contextmanager
def fault_library() -> Iterator[str]:
    """Yield the path of the library, which children of this process can load meanwhile.

    The library is in memory, so no file is left, however this process ends.
    """
    with open(os.memfd_create("featstore-faults", os.MFD_CLOEXEC), "wb") as file:
        file.write(_compiled())
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


@functools.cache
def _library() -> ctypes.CDLL:
    path = os.environ.get(_LOADED)
    if path is None:
        raise RuntimeError("faults can be injected only in a child made by run_in_child(..., faults=True)")
    library = ctypes.CDLL(path)  # already loaded: this finds the instance that interposes
    library.featstore_fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_long, ctypes.c_long, ctypes.c_int]
    library.featstore_fault_record.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.featstore_fault_fired_path.restype = ctypes.c_char_p
    for count in (library.featstore_fault_calls, library.featstore_fault_fired, library.featstore_fault_fired_ns):
        count.restype = ctypes.c_long
    return library


class Fault:
    """One fault, armed while the context lasts.

    Parameters
    ----------
    directory : path-like
        Only calls on files in or below this directory, and on the directory itself, count.
    operations : str or sequence of str
        The :data:`OPERATIONS` that count.
    action : str
        An errno's name such as ``"EIO"``, ``"short"`` (half of the bytes requested), ``"end"`` (0 bytes, as at a file's end),
        ``"kill"`` (SIGKILL before the call), or ``"interrupt"`` (SIGINT, as by Ctrl-C, before the call, which is made).
    k, times : int
        The first call that fails, counted from 1, and the number of failing calls in a row.

    Notes
    -----
    ``calls`` and ``fired``, also after the context, are the numbers of calls that counted and that failed. A test in which no
    fault fired shows nothing. One fault at a time in a process; forks inherit the fault and count with their parent.
    """

    def __init__(
        self, directory: str | os.PathLike[str], operations: str | Iterable[str], action: str, k: int = 1, times: int = 1
    ) -> None:
        self.directory = os.path.realpath(directory)
        names = (operations,) if isinstance(operations, str) else tuple(operations)
        self._mask = sum(1 << OPERATIONS.index(name) for name in set(names))
        self._action = _ACTIONS.get(action) or int(getattr(errno, action))
        self.k = k
        self.times = times
        self._counts: tuple[int, int] | None = None

    @property
    def calls(self) -> int:
        """Calls that counted."""
        return self._counts[0] if self._counts else int(_library().featstore_fault_calls())

    @property
    def fired(self) -> int:
        """Calls that failed."""
        return self._counts[1] if self._counts else int(_library().featstore_fault_fired())

    @property
    def fired_path(self) -> str:
        """The file or directory of the last call that failed, of this fault or an earlier one."""
        return os.fsdecode(_library().featstore_fault_fired_path())

    @property
    def fired_s(self) -> float:
        """Time of the last fault, in seconds of ``time.monotonic()``; if this one did not fire, of an earlier one."""
        return float(_library().featstore_fault_fired_ns()) / 1e9

    def __enter__(self) -> Fault:
        self._counts = None
        if _library().featstore_fault_arm(os.fsencode(self.directory), self._mask, self.k, self.times, self._action):
            raise ValueError("the directory's name is too long, or k or times is below 1")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        library = _library()
        library.featstore_fault_disarm()
        self._counts = int(library.featstore_fault_calls()), int(library.featstore_fault_fired())


def sweep(
    directory: str | os.PathLike[str],
    operations: str | Iterable[str],
    action: str,
    *,
    times: int = 1,
    step: int = 1,
    limit: int = 10_000,
) -> Iterator[Fault]:
    """Yield faults at call 1, 1 + step, …, until one does not fire; each must be entered by the loop's body.

    AssertionError: not even the first fault fired (the operation never happened, so the sweep shows nothing), or no fault was
    entered, or ``limit`` calls were not enough.
    """
    for k in range(1, limit, step):
        fault = Fault(directory, operations, action, k, times)
        yield fault
        if fault._counts is None:
            raise AssertionError("the loop's body did not enter the fault")
        if not fault.fired:
            if k == 1:
                raise AssertionError(f"no {operations} happened below {directory}")
            return
    raise AssertionError(f"faults still fire after {limit} calls")


@contextlib.contextmanager
def fault_stacks() -> Iterator[Callable[[], list[tuple[str, str]]]]:
    """Note where calls fail, while the context lasts; yield what returns the stack of the last one, and forgets it.

    A stack is pairs of a file and a function, the innermost first: of Python's frames alone, and none of a thread that runs no
    Python. One context at a time in a process; it takes SIGUSR2.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.register(signal.SIGUSR2, file, all_threads=False)
        _library().featstore_fault_signal(int(signal.SIGUSR2))

        def last() -> list[tuple[str, str]]:
            file.seek(0)
            stacks = file.read().decode()
            file.seek(0)
            file.truncate()
            return re.findall(r'^  File "(.*)", line \d+ in (.*)$', stacks.rpartition("Stack")[2], re.MULTILINE)

        try:
            yield last
        finally:
            _library().featstore_fault_signal(0)
            faulthandler.unregister(signal.SIGUSR2)


@dataclass(frozen=True)
class Record:
    """A call that changed or flushed something.

    Attributes
    ----------
    kind : str
        ``"write"``, ``"resize"`` (truncate, allocate), ``"flush"`` (of a file or directory), ``"create"``, ``"mkdir"``,
        ``"rename"``, ``"exchange"``, ``"unlink"`` (of a directory too), ``"symlink"``, ``"link"``, or ``"map"`` (shared and
        writable: what is written through it is not seen).
    inode : int
        Number of the file's inode; 0 for "rename", "exchange" and "unlink".
    path, other : str
        The absolute path; the new one of "rename", the other one of "exchange", the target of "symlink", the old name of "link".
    offset, size : int
        Of "write", in bytes; ``size`` of "resize" and "flush" is the file's afterwards, and -1 of a directory.
    data : bytes
        Of "write".
    """

    kind: str
    inode: int
    path: str
    other: str
    offset: int
    size: int
    data: bytes = field(repr=False)


@contextlib.contextmanager
def recorded(directory: str | os.PathLike[str]) -> Iterator[list[Record]]:
    """Record calls that change files in or below ``directory``, while the context lasts; the list is filled at its end.

    Calls of all threads are listed in the order in which they ended; each waits until the one before is recorded. No fault can
    be armed meanwhile.
    """
    found: list[Record] = []
    with tempfile.TemporaryFile() as file:
        if _library().featstore_fault_record(os.fsencode(os.path.realpath(directory)), file.fileno()):
            raise ValueError("the directory's name is too long")
        try:
            yield found
        finally:
            _library().featstore_fault_record(b"/", -1)
        file.seek(0)
        head = struct.Struct("4IQ2q")
        while part := file.read(head.size):
            kind, n_path, n_other, _, inode, offset, size = head.unpack(part)
            path, other = (os.fsdecode(file.read(n)) for n in (n_path, n_other))
            is_write = _RECORDS[kind] == "write"
            data = file.read(size) if is_write else b""
            if is_write and len(data) < size:
                raise OSError(errno.ENOSPC, "the record of calls is cut off")
            found.append(Record(_RECORDS[kind], inode, path, other, offset, size, data))


# -- children ------------------------------------------------------------------------------------------------------------------


def run_in_child(
    function: Callable[..., None],
    *arguments: Any,
    faults: bool = False,
    environment: dict[str, str] | None = None,
    timeout_s: float = 500,
    prepare: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Call ``function(*arguments)`` in a fresh interpreter and raise AssertionError, with its output, unless it returns.

    Parameters
    ----------
    function : callable
        Defined at the top level of a file; ``arguments`` must be JSON values.
    faults : bool
        Preload the fault library.
    environment : dict of str, optional
        Variables on top of this process's.
    timeout_s : float
        Seconds until the child is killed, with its stacks on stderr.
    prepare : callable, optional
        Runs in the child before it starts (entering a control group, setting a limit); async-signal-safe things only.

    Notes
    -----
    The child's torch has one thread (a thread pool would not survive the forks that campaigns make), warnings are errors, and a
    memory-checking ``LD_PRELOAD`` of this process stays first.
    """
    __tracebackhide__ = True
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(environment or {})}
    command = [sys.executable, "-W", "error", "-m", "featstore.testing.faults"]
    command += [inspect.getfile(function), function.__qualname__, json.dumps(arguments), str(timeout_s)]
    with fault_library() if faults else contextlib.nullcontext() as library:
        if library is not None:
            env |= {"LD_PRELOAD": f"{env.get('LD_PRELOAD', '')} {library}".strip(), _LOADED: library}
        done = subprocess.run(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s + 30,
            preexec_fn=prepare,
        )
    if done.returncode:
        how = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit status {done.returncode}"
        raise AssertionError(f"{function.__qualname__} in the child: {how}\n{done.stdout}{done.stderr}")
    return done


def forked(function: Callable[[], object]) -> int | None:
    """Run ``function()`` in a fork of this process; return None if it returned, otherwise the signal that killed it.

    AssertionError: the function raised (the stack is on stderr).
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    assert os.WEXITSTATUS(status) == 0, "the fork raised"
    return None


def _load(path: str) -> ModuleType:
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _main(path: str, name: str, arguments: str, timeout_s: str) -> None:
    faulthandler.dump_traceback_later(float(timeout_s), exit=True)
    if os.environ.get(_LOADED):
        _library()
    function: Any = _load(path)
    for part in name.split("."):
        function = getattr(function, part)
    function(*json.loads(arguments))


# -- refused system calls ------------------------------------------------------------------------------------------------------

_NUMBERS = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}  # the same on every architecture
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def deny_syscalls(names: Iterable[str], error: int = errno.EPERM) -> None:
    """Let the kernel refuse system calls with ``error`` from now on, in this thread and all that it starts, for good.

    ``names``: ``io_uring_setup``, ``io_uring_enter``, ``io_uring_register``. A container's runtime fails them with EPERM, a
    kernel built without them with ENOSYS. See seccomp(2); linux/filter.h.
    """
    load, jump_equal, give = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | error
    numbers = [_NUMBERS[name] for name in names]
    # Another architecture's numbers (32-bit calls) pass: nothing here makes any.
    code = [(load, 0, 0, 4), (jump_equal, 0, len(numbers) + 1, _ARCHITECTURES[platform.machine()]), (load, 0, 0, 0)]
    code += [(jump_equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    code += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))  # struct sock_filter
    program = ctypes.create_string_buffer(struct.pack("HP", len(code), ctypes.addressof(filters)))  # struct sock_fprog
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    for arguments in ((no_new_privileges, 1, 0, 0, 0), (set_seccomp, mode_filter, program, 0, 0)):
        if libc.prctl(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), "prctl")


# -- damaged files -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def flipped(path: str | os.PathLike[str], offset: int, bit: int = 0) -> Iterator[None]:
    """Flip one bit (0 … 7) of the byte at ``offset`` while the context lasts."""
    _xor(path, offset, 1 << bit)
    try:
        yield
    finally:
        _xor(path, offset, 1 << bit)


def _xor(path: str | os.PathLike[str], offset: int, mask: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)
        if not byte:
            raise ValueError(f"{os.fspath(path)} ends before byte {offset}")
        file.seek(offset)
        file.write(bytes([byte[0] ^ mask]))


def random_flips(path: str | os.PathLike[str], n: int, seed: int = 0) -> Iterator[tuple[int, int]]:
    """Flip ``n`` random bits of a file, one at a time: yield (offset, bit) while it is flipped, then flip it back."""
    size = os.path.getsize(path)
    rng = random.Random(seed)
    for _ in range(n):
        offset, bit = rng.randrange(size), rng.randrange(8)
        with flipped(path, offset, bit):
            yield offset, bit


@contextlib.contextmanager
def truncated(path: str | os.PathLike[str], size: int) -> Iterator[None]:
    """Cut a file to ``size`` bytes (or lengthen it with zeros) while the context lasts."""
    body = Path(path).read_bytes()
    os.truncate(path, size)
    try:
        yield
    finally:
        with open(path, "r+b") as file:
            file.write(body)
            file.truncate()


@contextlib.contextmanager
def swapped(path: str | os.PathLike[str], first: int, second: int, n_bytes: int) -> Iterator[None]:
    """Exchange two stretches of ``n_bytes`` of a file while the context lasts."""

    def swap() -> None:
        with open(path, "r+b", buffering=0) as file:
            parts = []
            for offset in (first, second):
                file.seek(offset)
                parts.append(file.read(n_bytes))
            for offset, part in zip((second, first), parts, strict=True):
                file.seek(offset)
                file.write(part)

    swap()
    try:
        yield
    finally:
        swap()


if __name__ == "__main__":
    # Tests must import the very module that runs here.
    from featstore.testing import faults

    faults._main(*sys.argv[1:])
