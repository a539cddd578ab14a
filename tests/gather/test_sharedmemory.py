"""Arrays that processes share: one copy, made once, whoever is killed and whenever; nothing is left in shared memory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from featstore.errors import BusyError
from featstore.gather import sharedmemory
from featstore.gather.sharedmemory import Allocate, SharedArrays, shared_arrays
from featstore.testing.faults import forked
from tests.support.programs import run_in_fork
from tests.support.refusing import refuses

pytestmark = pytest.mark.usefixtures("_program_server")

_FORKS = multiprocessing.get_context("forkserver")
N = 100_000


@pytest.fixture
def memory(shared_memory: Path) -> Path:
    return shared_memory


def squares(allocate: Allocate) -> None:
    allocate("squares", N, np.int64)[:] = np.arange(N) ** 2
    allocate("none", 0, np.float32)
    allocate("bytes", 3, np.uint8)[:] = 7


def shared(ranks: int = 2, recipe: Any = None, make: Callable[[Allocate], None] = squares) -> SharedArrays:
    return shared_arrays("squares", {"recipe": recipe}, ranks, make)


def are_squares(found: SharedArrays) -> bool:
    arrays = found.arrays
    assert not any(array.flags.writeable for array in arrays.values() if len(array))
    assert [str(array.dtype) for array in arrays.values()] == ["int64", "float32", "uint8"]
    return np.array_equal(arrays["squares"], np.arange(N) ** 2) and arrays["bytes"].tolist() == [7, 7, 7]


def _join_job(folder: str) -> None:
    sharedmemory.DIRECTORY = folder
    os.environ["MASTER_PORT"] = "1"


def _rank(folder: str, ranks: int, link: Any) -> None:
    """Make or join the arrays, and report each step; go on when told so."""
    _join_job(folder)

    def make(allocate: Allocate) -> None:
        link.send("makes")
        squares(allocate)
        link.recv()

    found = shared(ranks, make=make)
    link.send(are_squares(found))
    link.recv()
    found.close()


class Rank:
    """A process that joins; a context manager that kills it."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.link, there = _FORKS.Pipe()
        self.process = _FORKS.Process(target=_rank, args=(str(folder), ranks, there))
        self.process.start()
        there.close()

    def next(self) -> Any:
        assert self.link.poll(60)
        return self.link.recv()

    def go_on(self) -> None:
        self.link.send(None)

    def end(self) -> None:
        self.go_on()
        self.process.join(60)
        assert self.process.exitcode == 0

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.link.close()


@contextlib.contextmanager
def started(folder: Path, n: int, ranks: int) -> Iterator[list[Rank]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Rank(folder, ranks)) for _ in range(n)]


def makers(ranks: list[Rank]) -> list[Rank]:
    """Let all ranks hold the arrays; return the ones that made them."""
    found, waiting = [], {rank.link: rank for rank in ranks}
    while waiting:
        for link in multiprocessing.connection.wait(list(waiting), 60):
            said = waiting[link].next()  # type: ignore[index]
            if said == "makes":
                found.append(waiting[link])  # type: ignore[index]
                waiting[link].go_on()  # type: ignore[index]
            else:
                assert said is True
                del waiting[link]  # type: ignore[arg-type]
    return found


def files_of(rank: Rank, folder: Path) -> set[str]:
    """The inodes of what a process maps from the directory."""
    lines = Path(f"/proc/{rank.process.pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if str(folder) in line}


@pytest.mark.parametrize("n", [1, 2, 4])
def test_one_copy_and_no_name_once_all_hold_it(memory: Path, n: int) -> None:
    with started(memory, n, n) as ranks:
        assert len(makers(ranks)) == 1
        assert not os.listdir(memory)
        of_each = [files_of(rank, memory) for rank in ranks]
        assert len(of_each[0]) == 1
        assert all(each == of_each[0] for each in of_each)
        for rank in ranks:
            rank.end()


def test_a_killed_maker_and_a_killed_holder(memory: Path) -> None:
    """The next rank makes what the killed one had begun; ranks go on without one that is dead, and leave nothing."""
    with started(memory, 1, 3) as (first,):
        assert first.next() == "makes"
        with started(memory, 2, 3) as others:
            first.kill()
            (maker,) = makers(others)
            assert len(os.listdir(memory)) == 1  # one more rank is to come
            maker.kill()
            (left,) = (rank for rank in others if rank is not maker)
            with started(memory, 2, 3) as late:
                assert not makers(late)
                assert not os.listdir(memory)
                for rank in (left, *late):
                    rank.end()


def test_all_holders_are_killed(memory: Path) -> None:
    """The next process that shares anything removes what they left."""
    with started(memory, 2, 3) as ranks:
        makers(ranks)
        for rank in ranks:
            rank.kill()
    (left,) = os.listdir(memory)
    (memory / "not-ours").touch()
    with contextlib.closing(shared(2, "other")) as found:
        assert are_squares(found)
        assert left not in os.listdir(memory)
    (memory / "not-ours").unlink()


CALLS = [(os, "open"), (os, "ftruncate"), (os, "posix_fallocate"), (os, "pwrite"), (os, "unlink"), (os, "close")]
CALLS += [(fcntl, "flock"), (fcntl, "fcntl"), (mmap, "mmap")]


def _killed_at(k: int) -> None:
    """Hold the arrays as the only rank, and then as one of two; die at the ``k``-th call of the system."""
    left = k

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return counted

    for module, name in CALLS:
        setattr(module, name, counting(getattr(module, name)))
    for ranks in (1, 2):
        found = shared(ranks)
        assert are_squares(found)
        found.close()


def _killed_at_any_call(folder: str) -> None:
    _join_job(folder)
    k, was_left = 0, set[int]()
    while True:
        k += 1
        killed_by = forked(lambda: _killed_at(k))
        assert killed_by in (None, signal.SIGKILL)
        was_left.add(len(os.listdir(folder)))
        with contextlib.closing(shared(2)) as found:
            assert are_squares(found)
            assert len(os.listdir(folder)) == 1
        assert not os.listdir(folder)
        if killed_by is None:
            break
    assert k > 30
    assert was_left == {0, 1}


def test_killed_at_any_call(memory: Path) -> None:
    """Whatever a process that was killed left, the next one has the arrays, and leaves nothing."""
    run_in_fork(_killed_at_any_call, str(memory))


def test_a_waiting_rank_gives_up(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharedmemory, "PATIENCE_S", 0.05)
    with started(memory, 1, 2) as (first,):
        assert first.next() == "makes"
        refuses(BusyError, "squares: another rank was still making it after 0.05 s", shared)
        first.go_on()
        assert first.next() is True
        with contextlib.closing(shared()) as found:
            assert are_squares(found)
        first.end()


def test_a_maker_that_fails(memory: Path) -> None:
    """Its error is its own; the next rank tries for itself."""

    def fails(allocate: Allocate) -> None:
        squares(allocate)
        raise KeyError("no such rows")

    refuses(KeyError, "no such rows", lambda: shared(make=fails))
    assert not os.listdir(memory)
    with contextlib.closing(shared()) as found:
        assert are_squares(found)


def test_waiting_for_a_maker_that_fails(memory: Path) -> None:
    """Whoever waited for its lock finds that the file has gone, and begins anew."""
    begun, goes_on = threading.Event(), threading.Event()

    def fails(allocate: Allocate) -> None:
        begun.set()
        assert goes_on.wait(60)
        raise KeyError("no such rows")

    def n_open() -> int:
        found = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own
                found += os.readlink(f"/proc/self/fd/{name}").startswith(str(memory))
        return found

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(shared, make=fails)
        assert begun.wait(60)
        second = pool.submit(shared)
        deadline = time.monotonic() + 60
        while n_open() < 3 and time.monotonic() < deadline:  # the maker's two, and that of whoever waits
            time.sleep(0.001)
        goes_on.set()
        refuses(KeyError, "no such rows", first.result)
        with contextlib.closing(second.result()) as found:
            assert are_squares(found)


def test_shared_memory_that_is_too_small(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before a page is touched, with what is free; what was allocated is freed."""
    status = os.statvfs(memory)
    too_many = status.f_blocks * status.f_frsize + 1

    def large(allocate: Allocate) -> None:
        squares(allocate)
        allocate("large", too_many, np.uint8)[:] = 1

    with pytest.raises(OSError, match=r"squares needs .* more, and .* are free; make the cache smaller") as caught:
        shared(make=large)
    assert caught.value.errno == errno.ENOSPC
    assert not os.listdir(memory)
    other = OSError(errno.EIO, "broken")
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(other))
    with pytest.raises(OSError, match="broken") as caught:
        shared()
    assert caught.value.filename.startswith(str(memory))


def test_who_shares(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of one job with one recipe, as many as they say: others have their own."""
    made: list[SharedArrays] = [shared(2), shared(3), shared(2, "other")]
    monkeypatch.setenv("MASTER_PORT", "2")
    made.append(shared(2))
    assert len(os.listdir(memory)) == 4
    assert all(os.stat(memory / name).st_mode & 0o777 == 0o600 for name in os.listdir(memory))
    made.append(shared(2))  # the second of its two
    assert len(os.listdir(memory)) == 3
    with contextlib.closing(shared(1)), contextlib.closing(shared(1)):
        assert len(os.listdir(memory)) == 3
    for found in made:
        assert are_squares(found)
        found.close()
        found.close()
        assert not found.arrays
    with contextlib.closing(shared(1)) as found:
        assert found.nbytes == 8 * N + 3


def test_more_holders_than_ranks(memory: Path) -> None:
    """A file all of whose slots are taken has lost its last holder before the name could go: it is replaced."""
    first = shared(2)
    (name,) = os.listdir(memory)
    fd = os.open(memory / name, os.O_RDWR)
    assert sharedmemory._take(fd, 1, name)
    assert not sharedmemory._take(fd, 0, name)
    with contextlib.closing(shared(2)) as other:
        assert are_squares(other)
        assert os.listdir(memory) == [name]
        assert os.stat(memory / name).st_ino != os.fstat(fd).st_ino
    os.close(fd)
    first.close()


def test_arrays_outlive_closing_and_forks(memory: Path) -> None:
    """A view keeps its bytes; a child that ends, or closes, takes nothing from its parent."""
    found = shared()
    view = found.arrays["squares"][-3:]
    child = os.fork()
    if not child:
        found.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert are_squares(found)
    assert len(os.listdir(memory)) == 1
    with contextlib.closing(shared()) as other:
        assert not os.listdir(memory)
        assert are_squares(other)
        found.close()
    assert view.tolist() == [each**2 for each in range(N - 3, N)]


def test_files_of_other_users(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = shared()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    monkeypatch.setattr(sharedmemory, "_prefix", lambda: f"featstore-{uid}-")
    refuses(PermissionError, "another user made this file", shared)
    assert len(os.listdir(memory)) == 1
    monkeypatch.undo()
    found.close()


def test_names_and_files_of_others_stay(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only files of a name as this module gives them are swept; a copy that cannot be mapped is removed at once."""
    prefix = sharedmemory._prefix()
    (memory / f"{prefix}mine").write_bytes(b"1")
    (memory / f"{prefix}{'0' * 32}").mkdir()
    with contextlib.closing(shared()) as found:
        assert are_squares(found)
    there = sorted([f"{prefix}mine", f"{prefix}{'0' * 32}"])
    assert sorted(os.listdir(memory)) == there
    real = sharedmemory.mmap.mmap

    def cannot(fd: int, n_bytes: int, **options: Any) -> Any:
        if options.get("prot") == sharedmemory.mmap.PROT_READ:
            raise OSError(errno.ENOMEM, "no memory")
        return real(fd, n_bytes, **options)

    monkeypatch.setattr(sharedmemory.mmap, "mmap", cannot)
    refuses(OSError, "no memory", shared)
    assert sorted(os.listdir(memory)) == there
    (memory / there[0]).rmdir()
    (memory / there[1]).unlink()


def test_an_interpreter_that_ends(memory: Path) -> None:
    """Copies that were never closed are given up at exit."""
    script = f"""
from featstore.gather import sharedmemory
sharedmemory.DIRECTORY = {str(memory)!r}
found = sharedmemory.shared_arrays("it", {{}}, 2, lambda allocate: allocate("a", 5, "i8").fill(1))
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert not os.listdir(memory)
