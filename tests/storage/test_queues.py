"""The queues of a dataset's reads: those beyond the first are for speed alone, and nothing fails because others have them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore._core.buffers import Borrowed
from featstore._core.io import Engine
from featstore.errors import BudgetError
from featstore.gather.buffers import BufferPool, size_class
from featstore.storage.reader import MAX_ENGINES, SCRATCH_STEP, Reader
from tests.conftest import _threads
from tests.load.test_overlap import until
from tests.support.graphs import make_graph
from tests.support.sampled import covering
from tests.support.written_rows import open_record, opened, write_rows

N, DIM = 20_000, 256
MEMORY = 8 << 20


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    indptr, indices = make_graph(N, 8.0)
    path = tmp_path_factory.mktemp("data") / "g"
    x = np.random.default_rng(0).standard_normal((N, DIM)).astype(np.float32)
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, progress=False).close()
    return path


@contextmanager
def borrowed(reader: Reader, n: int, over: threading.Event) -> Iterator[None]:
    """Let other threads have ``n`` queues until ``over`` is set, as reads that a busy machine takes long to end."""
    have = threading.Barrier(n + 1)

    def read() -> None:
        with reader.engine(1):
            have.wait()
            over.wait()

    threads = [threading.Thread(target=read) for _ in range(n)]
    for thread in threads:
        thread.start()
    have.wait()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_a_queue_without_room_for_its_scratch_is_waited_for(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    make = Reader._make

    def made(reader: Reader, *args: int) -> Engine:
        try:
            return make(reader, *args)
        except BudgetError:
            over.set()  # the other read ends only now
            raise

    rows = np.arange(0, N, 7)
    with featstore.open(dataset, memory=MEMORY) as g:
        store, reader = g.features["x"], g.reader
        expected = store[rows]
        out = torch.empty_like(expected)
        arena = reader.least_bytes(MEMORY) - 16 * SCRATCH_STEP - reader._tables_bytes(MEMORY)
        with borrowed(reader, 1, over), g.budget.reserve("others", g.budget.available - arena - 4096):  # no scratch beside it
            monkeypatch.setattr(Reader, "_make", made)
            store.take(rows, out=out)
        assert (out == expected).all()
        assert over.is_set()


def test_a_file_that_is_opened_has_the_scratch_of_idle_queues(tmp_path: Path) -> None:
    """Scratch is as large as the memory allowed, and gathers do with less: it is given back for a table of checksums."""
    rows = np.random.default_rng(0).integers(0, 256, (N, 64), np.uint8)
    record, out = write_rows(tmp_path, rows), np.empty((N // 4, 64), np.uint8)
    with opened(tmp_path, record, MEMORY) as (file, reader):
        file.gather(np.arange(0, N, 4)[::-1].copy(), out)
        scratch = reader.budget.report()["reader buffers"]
        with reader.budget.reserve("others", reader.budget.available - 2000):  # less than the table's page
            other = open_record(reader, tmp_path, record)
        assert reader.budget.report()["reader buffers"] < scratch
        with reader.budget.reserve("others", reader.budget.available):
            other.gather(np.arange(0, N, 4), out)
            assert (out == rows[::4]).all()
        other.close()


@pytest.mark.usefixtures("no_kept_lists")  # they would be given back before
def test_a_batch_waits_for_queues_that_others_read_with(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch needs one queue: what others have beyond it comes back before it is said not to fit."""
    over = threading.Event()
    borrow, make_do = BufferPool.borrow, Reader.make_do

    def wait(reader: Reader) -> None:
        over.set()  # the others' reads end only now
        make_do(reader)

    with featstore.open(dataset, memory=MEMORY) as g, ExitStack() as stack, g.budget.reserve("others", 0) as others:

        def short(pool: BufferPool, n_bytes: int) -> Borrowed:
            if n_bytes >= 1 << 20 and not others.n_bytes:
                others.resize(g.budget.available - size_class(n_bytes))
                stack.enter_context(borrowed(g.reader, 2, over))
            return borrow(pool, n_bytes)

        sampler = featstore.NeighborSampler(g, [5, 5], seed=0)
        options: dict[str, Any] = {"labels": None, "prefetch": 0, "threads": 1, "strategy": featstore.OnDemand(cache=None)}
        with featstore.Loader(g, sampler, np.arange(600), 600, **options) as loader:
            monkeypatch.setattr(BufferPool, "borrow", short)
            monkeypatch.setattr(Reader, "make_do", wait)
            assert [len(batch.seeds) for batch in loader] == [600]
        assert over.is_set()
        others.release()
        over.clear()
        with borrowed(g.reader, MAX_ENGINES, over):
            pass  # the epoch is over: there may be several again


BACKENDS = ["io_uring", "pread"]


def n_readers() -> int:
    """Threads of the compiled core that read, which name themselves."""
    return list(_threads().values()).count("fs-pread")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 2, 6])
def test_so_many_threads_read_at_once(dataset: Path, backend: str, n: int) -> None:
    """With io_uring as many queues, more than there are by default too; with pread one queue of so many threads."""
    n_queues = n if backend == "io_uring" else 1
    rows = np.arange(0, N, 7)
    with featstore.open(dataset, memory=4 * MEMORY, backend=backend) as g:
        reader, over, entered = g.reader, threading.Event(), threading.Event()
        expected = g.features["x"][rows]
        reader.bound(1, n)

        def one_more() -> None:
            with reader.engine(1):
                entered.set()

        late = threading.Thread(target=one_more)
        with borrowed(reader, n_queues, over):
            until(lambda: n_readers() == (n if backend == "pread" else 0))
            assert g.budget.report()["reader buffers"] == sum(held.n_bytes for held in reader._held.values())
            assert len(reader._held) == n_queues
            late.start()
            assert not entered.wait(0.05)
        late.join()
        assert entered.is_set()
        assert torch.equal(g.features["x"][rows], expected)
        reader.bound(2, 3)  # the least of both
        assert (reader._most_queues, reader._depth("pread")) == (
            (min(n, 3), min(n, 3)) if backend == "io_uring" else (1, min(n, 3))
        )
        reader.unbound(1)
        reader.unbound(2)
        reader.unbound(2)
        over.clear()
        with borrowed(reader, MAX_ENGINES, over):
            assert len(reader._held) == MAX_ENGINES
        reader.trim()
        assert torch.equal(g.features["x"][rows], expected)


@pytest.mark.usefixtures("no_kept_lists")
@pytest.mark.parametrize(("strategy", "backend"), covering(["ondemand", "superbatch", "streamed"], BACKENDS))
def test_a_loader_bounds_what_reads(dataset: Path, backend: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling, gathering, packing and filling caches together; the batches are the same."""
    reading, most, streams = [0], [0], set()
    lock = threading.Lock()
    engine, start = Reader.engine, threading.Thread.start

    @contextmanager
    def watched(reader: Reader, n_rows: int = 0) -> Iterator[Engine]:
        with engine(reader, n_rows) as made:
            with lock:
                reading[0] += 1
                most[0] = max(most[0], reading[0])
            try:
                yield made
            finally:
                with lock:
                    reading[0] -= 1

    def started(thread: threading.Thread) -> None:
        if thread.name.startswith("featstore-stream"):
            streams.add(thread.name)
        start(thread)

    monkeypatch.setattr(Reader, "engine", watched)
    monkeypatch.setattr(threading.Thread, "start", started)

    def epoch(g: featstore.OutOfCoreGraph, **options: Any) -> list[torch.Tensor]:
        sampler = featstore.NeighborSampler(g, [5, 5], seed=0)
        seeds = np.arange(0, N, 200)
        with featstore.Loader(g, sampler, seeds, 20, labels=None, strategy=strategy, prefetch=3, **options) as loader:
            return [batch.x.clone() for batch in loader]

    with featstore.open(dataset, memory=8 * MEMORY, backend=backend) as g:
        expected = epoch(g, threads=4)
        most[0] = 0
        streams.clear()
        found = epoch(g, threads={"sample": 4, "read": 1})
        assert most[0] == 1
        assert streams == ({"featstore-stream-0"} if strategy == "streamed" else set())
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert g.reader._n_bound is None


@pytest.mark.parametrize("how", ["close", "drop", "refused"])
def test_the_bound_ends_with_its_loader(dataset: Path, how: str) -> None:
    with featstore.open(dataset, memory=4 * MEMORY) as g:
        sampler = featstore.NeighborSampler(g, [5, 5], seed=0)
        options: dict[str, Any] = {"batch_size": 100, "labels": None, "threads": {"read": 2}}
        if how == "refused":
            with g.budget.reserve("others", g.budget.available - 4096), pytest.raises(featstore.BudgetError):
                featstore.Loader(g, sampler, np.arange(100), **options)
        else:
            loader = featstore.Loader(g, sampler, np.arange(100), **options)
            assert g.reader._n_bound == 2
            if how == "close":
                loader.close()
            del loader
            gc.collect()
        assert g.reader._n_bound is None
        with pytest.raises(ValueError, match=r"threads\['read'\] must be at least 1"):
            featstore.Loader(g, sampler, np.arange(100), **options | {"threads": {"read": 0}})
