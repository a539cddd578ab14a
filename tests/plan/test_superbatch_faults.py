"""Epochs that are killed, and run files that cannot be written: the dataset stays whole, leftovers go, the next run is right."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.plan.samples import SampleWriter
from featstore.testing.faults import sweep
from tests.support.graphs import make_graph
from tests.support.library_threads import library_threads
from tests.support.loaders import make_loader
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

N = 3000
EPOCH = 15  # batches


def make(path: Path) -> None:
    indptr, indices = make_graph(N, 8.0)
    rng = np.random.default_rng(0)
    data = {"train_idx": rng.permutation(N)[: 40 * EPOCH]}
    x = {"x": rng.standard_normal((N, 64)).astype(np.float32)}
    featstore.OutOfCoreGraph.create(path, indptr, indices, x, data, progress=False).close()


def epoch(path: Path, **options: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    with featstore.open(path, memory="64MB", threads=2) as g:
        options = {"strategy": "superbatch", "length": 4, "cache": 0.1} | options
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        with make_loader(g, sampler, g.node_data["train_idx"], 40, labels=None, seed=3, **options) as loader:
            return [(batch.input_ids.clone(), batch.x.clone()) for batch in loader]


def same(a: list[tuple[torch.Tensor, ...]], b: list[tuple[torch.Tensor, ...]]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for i, j in zip(a, b, strict=True) for x, y in zip(i, j, strict=True))


def run_files_fail(folder: str, step: int) -> None:
    """Calls on run files fail (a full disk): the loop's OSError, nothing left, the next epoch right; in the child."""
    path = Path(folder) / "g"
    make(path)
    expected = epoch(path, strategy="ondemand", length=None, cache=None)
    runs = Path(folder) / "runs"
    with featstore.open(path, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        seeds = g.node_data["train_idx"]
        for strategy in ("superbatch", "ginex"):
            options: dict[str, Any] = {"length": 4, "cache": 0.1, "strategy": strategy, "run_dir": runs, "seed": 3}
            g.cache_neighbors(0)
            with make_loader(g, sampler, seeds, 40, labels=None, **options) as loader:
                kept = g.neighbor_cache
                assert (kept is None) == (strategy == "ginex"), "Ginex has lists while it samples alone"
                for operation, name in (("write", "ENOSPC"), ("write", "EIO"), ("open", "EMFILE"), ("rename", "ENOSPC")):
                    for fault in sweep(runs, operation, name, step=step):
                        loader.set_epoch(0)
                        found: list[tuple[torch.Tensor, torch.Tensor]] = []
                        with fault:
                            try:
                                for batch in loader:
                                    found.append((batch.input_ids.clone(), batch.x.clone()))
                            except OSError as error:
                                assert error.errno == getattr(errno, name)
                                assert str(runs) in str(error.filename)
                                assert fault.fired
                            else:
                                assert not fault.fired or len(found) == EPOCH, f"{name} at {operation} {fault.k} went unnoticed"
                        assert same(found, expected[: len(found)])
                        assert not runs.exists()
                        assert g.neighbor_cache is kept
                        assert not library_threads()
                loader.set_epoch(0)
                assert same([(batch.input_ids, batch.x) for batch in loader], expected)


def test_run_files_that_cannot_be_written(tmp_path: Path) -> None:
    run_in_fork(run_files_fail, str(tmp_path), 47)


@pytest.mark.stress
def test_run_files_that_cannot_be_written_anywhere(tmp_path: Path) -> None:
    run_in_fork(run_files_fail, str(tmp_path), 1, timeout_s=3000)


def test_an_error_ends_waiting_for_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lacks memory waits until samples being made are written; they never are, once the disk is full."""
    make(tmp_path / "g")
    add, reached, over = SampleWriter.add, threading.Event(), threading.Event()

    def wait_for_pause() -> None:
        while not (inspector._is_paused or over.is_set()):
            time.sleep(0.001)

    def add_eight(self: SampleWriter, batch: Any) -> None:
        if batch.index >= 8:
            reached.set()
            wait_for_pause()
            raise OSError(errno.ENOSPC, "full")
        add(self, batch)

    class Short:
        """Memory for the tenth batch is short once somebody waits; then it waits for them."""

        def __init__(self, sampler: featstore.NeighborSampler) -> None:
            self._sampler = sampler

        def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> Any:
            if index == 10:
                wait_for_pause()
                raise featstore.BudgetError("short", 1)
            return self._sampler.sample(seeds, epoch=epoch, index=index)

    monkeypatch.setattr(SampleWriter, "add", add_eight)
    with featstore.open(tmp_path / "g", memory="64MB", threads=2) as g:
        options: dict[str, Any] = {"strategy": "superbatch", "length": 4, "labels": None, "prefetch": 0}
        with make_loader(g, Short(featstore.NeighborSampler(g, [4, 3])), g.node_data["train_idx"], 40, **options) as loader:
            iterator = iter(loader)
            iterator.begin()  # type: ignore[attr-defined]
            inspector = next(iter(loader._iterators))._run._inspector  # type: ignore[attr-defined]
            next(iterator)
            assert reached.wait(60)
            waiting = threading.Thread(target=inspector.pause, daemon=True)
            waiting.start()
            waiting.join(60)
            assert not waiting.is_alive()
            over.set()  # the pause may have been too short to be seen
            with pytest.raises(OSError, match="full"):
                list(iterator)
