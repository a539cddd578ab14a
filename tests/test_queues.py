"""The queues of a dataset's reads: those beyond the first are for speed alone, and nothing fails because others have them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import featstore
from featstore._core.buffers import Lease
from featstore._core.io import Engine
from featstore.errors import BudgetError
from featstore.gather.buffers import BufferPool, block_bytes
from featstore.storage.reader import MAX_ENGINES, SCRATCH_STEP, Reader
from tests.conftest import make_graph

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


def test_a_batch_waits_for_queues_that_others_read_with(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch needs one queue: what others have beyond it comes back before it is said not to fit."""
    over = threading.Event()
    lease, make_do = BufferPool.lease, Reader.make_do

    def wait(reader: Reader) -> None:
        over.set()  # the others' reads end only now
        make_do(reader)

    with featstore.open(dataset, memory=MEMORY) as g, ExitStack() as stack, g.budget.reserve("others", 0) as others:

        def short(pool: BufferPool, n_bytes: int) -> Lease:
            if n_bytes >= 1 << 20 and not others.n_bytes:
                others.resize(g.budget.available - block_bytes(n_bytes))
                stack.enter_context(borrowed(g.reader, 2, over))
            return lease(pool, n_bytes)

        sampler = featstore.NeighborSampler(g, [5, 5], seed=0)
        with featstore.Loader(g, sampler, np.arange(600), 600, labels=None, prefetch=0, threads=1) as loader:
            monkeypatch.setattr(BufferPool, "lease", short)
            monkeypatch.setattr(Reader, "make_do", wait)
            assert [len(batch.seeds) for batch in loader] == [600]
        assert over.is_set()
        others.release()
        over.clear()
        with borrowed(g.reader, MAX_ENGINES, over):
            pass  # the epoch is over: there may be several again
