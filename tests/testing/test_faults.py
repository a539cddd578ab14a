"""The injector itself, against plain file calls: each fault fires where it should, and only there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.testing.faults import (
    OPERATIONS,
    Fault,
    deny_syscalls,
    fault_stacks,
    flipped,
    forked,
    random_flips,
    recorded,
    run_in_child,
    swapped,
    sweep,
    truncated,
)
from featstore.testing.limits import memory_group
from tests.support.programs import run_in_fork


class _SignalStack(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))

    @classmethod
    def now(cls) -> _SignalStack:
        """The stack on which this thread's handlers of signals run."""
        found = cls()
        assert not ctypes.CDLL(None).sigaltstack(None, ctypes.byref(found))
        return found


def find_stacks(path: str) -> None:
    """In the child: memory that handlers use is theirs, though what notes the stack of a failing write writes itself."""
    file = os.open(f"{path}/file", os.O_CREAT | os.O_WRONLY)
    before = _SignalStack.now()
    with fault_stacks() as last:
        stack = _SignalStack.now()
        ctypes.memset(stack.at, 0xA5, stack.size)
        with Fault(path, "write", "EFBIG") as fault, pytest.raises(OSError, match="File too large"):
            os.write(file, b"x")
        assert fault.fired == 1
        assert last()[0][1] == "find_stacks"
        left = ctypes.string_at(stack.at, stack.size)
        n_used = len(left.lstrip(b"\xa5"))
        assert 4096 < n_used < stack.size // 2, (n_used, stack.size)
    after = _SignalStack.now()
    assert (after.at, after.flags, after.size) == (before.at, before.flags, before.size)
    os.close(file)


@pytest.mark.usefixtures("_program_server")
def test_handlers_that_note_stacks_have_room(tmp_path: Path) -> None:
    run_in_fork(find_stacks, str(tmp_path))


def write_then_read(folder: Path) -> bytes:
    """One call of each operation on a file, or a directory."""
    name = folder / "file"
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder / "made")
    fd = os.open(folder / "new", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 8192)
        done = 0
        while done < 8192:
            done += os.pwrite(fd, b"a" * (8192 - done), done)
        os.fsync(fd)
        os.rename(folder / "new", name)
        with mmap.mmap(fd, 8192) as mapping:
            assert mapping[0] == 97
        body = b""
        while len(body) < 8192:
            body += os.pread(fd, 8192 - len(body), len(body))
        os.unlink(name)
        return body
    finally:
        os.close(fd)


# Not close: mapping a file closes a duplicate of its descriptor, and ignores what comes of it.
OF_WRITE_THEN_READ = [name for name in OPERATIONS if name not in ("alloc", "core_alloc", "close", "read_direct")]


def every_operation_fails_once(folder: str) -> None:
    outside = Path(folder + "-beside")
    outside.mkdir()
    for operation in OF_WRITE_THEN_READ:
        met = []
        for fault in sweep(folder, operation, "EIO"):
            with fault:
                write_then_read(outside)  # the neighbour, whose name begins alike, never counts
                try:
                    write_then_read(Path(folder))
                except OSError as error:
                    met.append(error.errno)
            assert fault.fired == len(met) - (fault.k - 1 if fault.fired else len(met))
        assert met == [errno.EIO], operation
    for fault in sweep(folder, OF_WRITE_THEN_READ, "ENOSPC"):
        with fault:
            if fault.k <= len(OF_WRITE_THEN_READ):
                with pytest.raises(OSError, match="No space"):
                    write_then_read(Path(folder))
            else:
                assert write_then_read(Path(folder)) == b"a" * 8192
    assert fault.calls == len(OF_WRITE_THEN_READ)


def short_transfers_and_interrupts(folder: str) -> None:
    with Fault(folder, ("read", "write"), "short", times=7) as fault:
        assert write_then_read(Path(folder)) == b"a" * 8192
    assert fault.fired == 7
    with Fault(folder, ("read", "write", "open", "truncate", "fsync"), "EINTR", times=9) as fault:
        assert write_then_read(Path(folder)) == b"a" * 8192  # Python itself tries again
    assert fault.fired == 9


def a_close_that_fails_closes(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY)
    with Fault(folder, "close", "EIO") as fault, pytest.raises(OSError, match="Input/output error"):
        os.close(fd)
    assert fault.fired == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def reads_end(folder: str) -> None:
    path = Path(folder) / "file"
    path.write_bytes(b"abc")
    fd = os.open(path, os.O_RDONLY)
    into = bytearray(3)
    calls = (lambda: len(os.read(fd, 3)), lambda: len(os.pread(fd, 3, 0)), lambda: os.preadv(fd, [into], 0))
    for call in calls:
        for action, expected in (("end", 0), ("short", 1)):
            with Fault(folder, "read", action) as fault:
                assert call() == expected
            assert fault.fired == 1
        os.lseek(fd, 0, os.SEEK_SET)
        assert call() == 3
        os.lseek(fd, 0, os.SEEK_SET)
    os.close(fd)


def kills(folder: str) -> None:
    met = []
    for fault in sweep(folder, OF_WRITE_THEN_READ, "kill"):
        with fault:
            met.append(forked(lambda: bool(write_then_read(Path(folder)))))
    assert met == [signal.SIGKILL] * len(OF_WRITE_THEN_READ) + [None]


def allocations(folder: str) -> None:
    with Fault(folder, "alloc", "ENOMEM", times=1 << 30) as fault:
        with pytest.raises(MemoryError):
            np.empty(1 << 20, np.uint8)
        small = [bytes(64) for _ in range(100)]
    assert fault.fired >= 1
    assert len(small) == 100
    assert np.empty(1 << 20, np.uint8).nbytes == 1 << 20


def unused_sweeps_are_errors(folder: str) -> None:
    unused = sweep(folder, "write", "EIO")
    with next(unused):
        pass
    with pytest.raises(AssertionError, match="no write happened"):
        next(unused)
    not_entered = sweep(folder, "write", "EIO")
    next(not_entered)
    with pytest.raises(AssertionError, match="did not enter"):
        next(not_entered)


def counts_are_exact_across_threads(folder: str) -> None:
    fd = os.open(folder + "/f", os.O_RDWR | os.O_CREAT)
    os.write(fd, bytes(100))
    failures = []

    def read() -> None:
        for _ in range(500):
            try:
                os.pread(fd, 10, 0)
            except OSError as error:
                failures.append(error.errno)

    threads = [threading.Thread(target=read) for _ in range(4)]
    with Fault(folder, "read", "EIO", k=100, times=50) as fault:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    os.close(fd)
    assert (fault.calls, fault.fired, failures) == (2000, 50, [errno.EIO] * 50)


@pytest.mark.parametrize(
    "campaign",
    [
        every_operation_fails_once,
        short_transfers_and_interrupts,
        a_close_that_fails_closes,
        reads_end,
        kills,
        allocations,
        unused_sweeps_are_errors,
        counts_are_exact_across_threads,
    ],
)
def test_injector(campaign, tmp_path: Path) -> None:
    run_in_child(campaign, str(tmp_path), faults=True)


def no_faults_without_the_library(folder: str) -> None:
    write_then_read(Path(folder))
    with pytest.raises(RuntimeError, match="faults=True"), Fault(folder, "read", "EIO"):
        pass


def test_control_without_the_library(tmp_path: Path) -> None:
    run_in_child(no_faults_without_the_library, str(tmp_path))


def fails(folder: str) -> None:
    raise ValueError("as it should")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def inject_in_a_fork(folder: str) -> None:
    """Nobody cleans up after a fork: it ends without what the interpreter does at its exit."""
    assert forked(lambda: run_in_child(every_operation_fails_once, folder, faults=True)) is None


def test_no_library_is_left(tmp_path: Path) -> None:
    for name in ("temporary", "files"):
        (tmp_path / name).mkdir()
    run_in_child(inject_in_a_fork, str(tmp_path / "files"), environment={"TMPDIR": str(tmp_path / "temporary")})
    assert os.listdir(tmp_path / "temporary") == []


@pytest.mark.usefixtures("_program_server")
@pytest.mark.parametrize("run", [run_in_child, run_in_fork])
def test_a_failing_child_is_reported(tmp_path: Path, run: Any) -> None:
    with pytest.raises(AssertionError, match=r"(?s)fails in the child: exit status 1.*as it should"):
        run(fails, str(tmp_path))
    with pytest.raises(AssertionError, match="SIGSEGV"):
        run(dies)


def a_fork_raises() -> None:
    with pytest.raises(AssertionError, match="the fork raised"):
        forked(lambda: 1 // 0)
    assert forked(lambda: 1) is None


@pytest.mark.usefixtures("_program_server")
def test_a_fork_that_raises_is_an_error() -> None:
    run_in_fork(a_fork_raises)


def leaves() -> None:
    raise SystemExit(0)


def waits() -> None:
    threading.Event().wait()


@pytest.mark.usefixtures("_program_server")
def test_a_forked_child_that_does_not_return_is_reported() -> None:
    with pytest.raises(AssertionError, match=r"(?s)exit status 1.*leaves ended the process"):
        run_in_fork(leaves)
    with pytest.raises(AssertionError, match=r"(?s)exit status 1.*in waits"):
        run_in_fork(waits, timeout_s=3)


def ring_is_denied(error: int) -> None:
    def setup() -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.syscall(425, 4, ctypes.create_string_buffer(120))
        return -ctypes.get_errno() if fd < 0 else (os.close(fd) or 1)

    before = setup()
    assert before not in (-error,), "already denied: this shows nothing"
    deny_syscalls(["io_uring_setup"], error)
    assert setup() == -error
    assert forked(lambda: None) is None  # everything else still works, and children inherit the filter


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.ENOMEM])
def test_seccomp_denies_the_ring(error: int) -> None:
    run_in_child(ring_is_denied, error)


def test_damage_is_undone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    body = bytes(range(256)) * 40
    path.write_bytes(body)
    with flipped(path, 300, 7):
        damaged = path.read_bytes()
    assert [(i, a ^ b) for i, (a, b) in enumerate(zip(body, damaged, strict=True)) if a != b] == [(300, 128)]
    for size in (0, 1, 4096, 20_000):
        with truncated(path, size):
            assert path.stat().st_size == size
        assert path.read_bytes() == body
    with swapped(path, 0, 5000, 100):
        assert path.read_bytes()[:100] == body[5000:5100]
    for offset, bit in random_flips(path, 20):
        assert path.read_bytes()[offset] == body[offset] ^ (1 << bit)
    assert path.read_bytes() == body
    with pytest.raises(ValueError, match="ends before"), flipped(path, len(body)):
        pass


def takes_memory(n_bytes: int) -> None:
    body = bytearray(n_bytes)
    body[::4096] = b"x" * len(body[::4096])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make control groups")
def test_memory_group_limits_a_child() -> None:
    with memory_group(400 << 20) as group:  # torch, which the package imports, takes about 200
        run_in_child(takes_memory, 1 << 20, prepare=group.enter)
        with pytest.raises(AssertionError, match="SIGKILL"):
            run_in_child(takes_memory, 500 << 20, prepare=group.enter)
        assert 300 << 20 <= group.peak_bytes <= 400 << 20


def record_each_call(folder: str) -> None:
    root = Path(folder)
    (root / "old").write_bytes(b"abc")
    with recorded(root) as calls:
        write_then_read(root)
        with open(root / "old", "r+b", buffering=0) as file:
            os.writev(file.fileno(), [b"d", b"ef"])
            file.truncate(2)
        os.symlink("old", root / "link")
        os.unlink(root / "link")
    (Path(folder + "-beside")).write_bytes(b"")  # neither this, nor what comes after the context
    found = [(each.kind, os.path.relpath(each.path, root)) for each in calls]
    assert found == [
        ("mkdir", "made"),
        ("create", "new"),
        ("resize", "new"),
        ("write", "new"),
        ("flush", "new"),
        ("rename", "new"),
        ("map", "file"),
        ("unlink", "file"),
        ("write", "old"),
        ("resize", "old"),
        ("symlink", "link"),
        ("unlink", "link"),
    ]
    assert (calls[3].offset, calls[3].size, calls[3].data) == (0, 8192, b"a" * 8192)
    assert (calls[8].offset, calls[8].data) == (0, b"def")
    assert calls[9].size == 2
    assert (calls[5].other, calls[10].other) == (str(root / "file"), "old")
    assert calls[1].inode == calls[3].inode == calls[4].inode


@pytest.mark.usefixtures("_program_server")
def test_calls_that_change_files_are_recorded(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    run_in_fork(record_each_call, str(tmp_path / "in"))
