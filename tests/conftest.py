"""Fixtures of all tests: time-outs that show every stack, the leak check, a small dataset, Hypothesis profiles."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# Threads of torch that have nothing to do sleep. By default they spin, and so do those of every child and of every other worker:
# where workers are as many as cores that took a third of the seconds of CPU of an epoch. It is read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from hypothesis import HealthCheck, settings

from tests.support.graphs import make_graph
from tests.support.programs import require_asking, start_server

# A loaded machine is no reason to fail, hence no deadlines; nor is a draw that nobody has seen before, so that a commit passes
# every time or never, and fifty of the same draws do: HYPOTHESIS_EXPLORE=1 draws many others. The stress profile looks further.
_QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "tests",
    deadline=None,
    max_examples=500 if os.environ.get("HYPOTHESIS_EXPLORE") else 50,
    derandomize=not os.environ.get("HYPOTHESIS_EXPLORE"),
    print_blob=True,
    suppress_health_check=_QUIET,
)
settings.register_profile("stress", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=_QUIET)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the Hypothesis profile by the marker expression: `make stress` runs with ``-m stress``."""
    settings.load_profile("stress" if config.getoption("-m") == "stress" else "tests")
    # Started in the background of a script, this process ignores Ctrl-C, and all that it starts would.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """Three workers for two processors: a test waits for a part of its time, for the drive, for children and for time-outs."""
    return max(2, 3 * len(os.sched_getaffinity(0)) // 2)


TESTS = Path(__file__).parent
LONGEST = ("system", "campaigns", "memory", "distributed")  # rooms whose tests take longest


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each of several workers begin to import elsewhere, if all tests are collected.

    In a fresh clone the assertions of a module are rewritten by the worker that comes to it first, and read by the others, which
    would all rewrite the same module at a time.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or [Path(each).resolve() for each in session.config.args] != [TESTS]:
        return
    paths = sorted(TESTS.rglob("test_*.py"))
    first = int(worker["workerid"].removeprefix("gw")) * len(paths) // worker["workercount"]
    for path in paths[first:] + paths[:first]:
        with contextlib.suppress(Exception):  # it is told when the module is collected
            importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest: one of them at the end would have the other workers wait."""

    def rank(item: pytest.Item) -> int:
        room = item.path.parent.name
        return LONGEST.index(room) if room in LONGEST else len(LONGEST)

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over torch and the tests themselves, which take most of the time of a full one."""
    gc.collect()
    gc.freeze()


# -- leaks ---------------------------------------------------------------------------------------------------------------------


def _descriptors() -> dict[int, str]:
    """Open descriptors of this process and what each refers to, without those that the interpreter and pytest own."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own
        if target.startswith(("/dev/", "/proc/")):
            continue
        found[int(name)] = target
    return found


def _threads(known: Set[str] = frozenset()) -> dict[str, str]:
    """Threads that are not ``known``: those of Python, and native ones that the library named, by thread id."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    found = {}
    for task in set(os.listdir("/proc/self/task")) - known:
        try:
            name = names.get(task) or Path(f"/proc/self/task/{task}/comm").read_text().strip()
        except OSError:
            continue  # it ended meanwhile
        if task in names or (name.startswith(("fs-", "featstore")) and name != "fs-copy"):  # those stay, for the process's loops
            found[task] = name
    return found


class Snapshot:
    """Descriptors and threads at one moment."""

    def __init__(self) -> None:
        self.descriptors = _descriptors()
        self.tasks = set(os.listdir("/proc/self/task"))  # those that have not named themselves yet, too

    def leaked(self, patience_s: float = 30.0) -> list[str]:
        """Name what is there now and was not then; things on their way out get ``patience_s`` seconds."""
        deadline = time.monotonic() + patience_s
        while True:
            new = [f"fd {fd}: {what}" for fd, what in _descriptors().items() if self.descriptors.get(fd) != what]
            new += [f"thread {task}: {name}" for task, name in _threads(self.tasks).items()]
            if not new or time.monotonic() > deadline:
                return new
            gc.collect()
            time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[Snapshot]:
    """Fail a test that leaves a descriptor or a thread behind, unless it is marked ``shares_resources``."""
    require_asking("_program_server" in request.fixturenames)
    snapshot = Snapshot()
    yield snapshot
    if request.node.get_closest_marker("shares_resources") is None:
        leaked = snapshot.leaked()
        assert not leaked, f"left behind: {'; '.join(leaked)}"


@pytest.fixture(scope="module", autouse=True)
def _frozen_imports() -> None:
    """Let collections of garbage pass over what the tests before this file's imported, such as torch's compiler."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread, so that losses are the same bits each time; undo what ``--seed`` sets."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(n_threads)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Let torch take deterministic algorithms alone."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"))]
)
def device(request: pytest.FixtureRequest) -> str:
    """A device that batches are delivered on: the CPU, and CUDA where there is one."""
    return str(request.param)


# What goes through nodes, edges or rows piece by piece, and how many make a piece: more than the graphs of most tests have.
PIECES = (
    "featstore.adapters.pyg.stores._NODES_AT_ONCE",
    "featstore.cache.belady.PIECE_SLOTS",
    "featstore.cache.rowmap.PIECE_ROWS",
    "featstore.cache.select.CHUNK_ROWS",
    "featstore.topology.chunks._PIECE",
    "featstore.topology.edgeids._STEP",
    "featstore.creation.inputedges._CHECK_BYTES",
    "featstore.graph.adjacency.PIECE_NODES",
    "featstore.partitioning.export._PIECE_NODES",
    "featstore.graph.neighbors.neighborcache._CHUNK_NODES",
    "featstore.graph.neighbors.neighborcache._READ_EDGES",
    "featstore.graph.partadjacency.PIECE_NODES",
    "featstore.topology.part._PIECE_NODES",
    "featstore.topology.partarrays._PIECE",
    "featstore.topology.base._PIECE",
    "featstore.graph.verify._BLOCK_EDGES",
    "featstore.graph.verify._BLOCK_NODES",
    "featstore.partitioning.assign._PIECE",
    "featstore.partitioning.base._PIECE_NODES",
    "featstore.partitioning.fennel._PIECE",
    "featstore.partitioning.ranges._PIECE",
    "featstore.estimate.rowsample.PIECE_ROWS",
    "featstore.sampling.listaccess._PIECE",
    "featstore.storage.update._BLOCK_ROWS",
    "featstore.strategies.switch.BLOCK_ITEMS",
)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a piece be 61, so that a test's graph takes many: what is wrong from the second on shows on no other."""
    for name in PIECES:
        module, _, constant = name.rpartition(".")
        if module in sys.modules:
            monkeypatch.setattr(sys.modules[module], constant, 61)


@pytest.fixture
def no_kept_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no loader keep neighbour lists by itself: for tests about reads of lists, or about other memory."""
    for module in ("lists", "auto"):
        monkeypatch.setattr(f"featstore.strategies.{module}.may_keep_lists", lambda context: False)


# -- data ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A small dataset on disk, built once, with the arrays it was made of: ``path, indptr, indices, x, h, y, train_idx``.

    1,000 nodes, about 8,000 edges; ``x`` float32 [1000, 25] (100 B rows), ``h`` float16 [1000, 300]; ``y`` int64; open it with
    ``featstore.open(small.path)``, and do not change it.
    """
    import featstore

    n = 1000
    rng = np.random.default_rng(7)
    indptr, indices = make_graph(n, 8.0)
    x = rng.standard_normal((n, 25), dtype=np.float32)
    h = rng.standard_normal((n, 300)).astype(np.float16)
    y = rng.integers(0, 5, n)
    train_idx = np.sort(rng.choice(n, 300, replace=False))
    path = tmp_path_factory.mktemp("small") / "graph"
    featstore.OutOfCoreGraph.create(
        path, indptr, indices, features={"x": x, "h": h}, node_data={"y": y, "train_idx": train_idx}, progress=False
    ).close()
    return SimpleNamespace(path=path, indptr=indptr, indices=indices, x=x, h=h, y=y, train_idx=train_idx, num_nodes=n)


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """20,000 nodes with 2.4 MB of lists, and rows of a byte: ``path, indptr, indices``."""
    import featstore

    n = 20_000
    indptr, indices = make_graph(n, 30.0)
    path = tmp_path_factory.mktemp("wide") / "graph"
    x = np.arange(n, dtype=np.uint8).reshape(n, 1)
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, progress=False).close()
    return SimpleNamespace(path=path, indptr=indptr, indices=indices)


@pytest.fixture
def g(small: SimpleNamespace) -> Iterator[Any]:
    """The small dataset, open."""
    import featstore

    with featstore.open(small.path, memory="64MiB") as graph:
        yield graph


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of shared memory for a test alone, which must leave it empty; the test is a job that others can join."""
    folder = Path(tempfile.mkdtemp(prefix="test-", dir="/dev/shm"))
    monkeypatch.setattr("featstore.gather.sharedmemory.DIRECTORY", str(folder))
    monkeypatch.setenv("MASTER_PORT", "1")
    yield folder
    left = os.listdir(folder)
    shutil.rmtree(folder)
    assert not left


@pytest.fixture(scope="session", autouse=True)
def _small_drive() -> Iterator[None]:
    """Measure drives on a scratch file of 1 MiB in place of 64 MiB: choosing loaders measure, and few tests look."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("featstore.storage.drive.SCRATCH_BYTES", 1 << 20)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_drive() -> Iterator[None]:
    """Let what tests write reach the drive when the kernel pleases: none cuts the power, and which files are synced is recorded.

    Children have the real call.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: os.fstat(fd) and None)  # of a descriptor that is not open it is an error
        yield


@pytest.fixture(scope="session")
def _program_server() -> None:
    """Start what programs and campaigns are forked from before a test that runs one: it outlives the test."""
    start_server()


@pytest.fixture(scope="session", autouse=True)
def _torch_threads() -> None:
    """Start torch's own pool before the first test, so that its threads count for none."""
    torch.ones(1 << 18).add_(1).sum()
