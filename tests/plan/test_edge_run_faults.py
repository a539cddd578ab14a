"""Run files of edges that cannot be written or read, and loops that are interrupted: the error is named, nothing is left."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.errors import CorruptionError
from featstore.plan import cacheplans
from featstore.plan.edgeplans import EdgePlanner
from featstore.testing.faults import sweep
from tests.support.graphs import make_graph
from tests.support.library_threads import library_threads
from tests.support.programs import run_in_fork

pytestmark = pytest.mark.usefixtures("_program_server")

N, BATCHES = 1500, 8
FILES = ["edges-*", "plan-edges-*", "next-edges-*"]


def make(path: Path) -> None:
    indptr, indices = make_graph(N, 8.0)
    rng = np.random.default_rng(0)
    x = {"x": rng.standard_normal((N, 16)).astype(np.float32)}
    w = {"w": rng.standard_normal((len(indices), 24)).astype(np.float32)}
    featstore.OutOfCoreGraph.create(path, indptr, indices, x, edge_features=w, progress=False).close()


def make_loader(g: featstore.OutOfCoreGraph, runs: Path, overlap: bool = True) -> featstore.Loader:
    """Superbatches of three batches, planned with the files that a tight budget spills to."""
    sampler = featstore.NeighborSampler(g, [4, 3], seed=1, edges=True)
    strategy = featstore.Superbatch(cache=0.1, edge_cache=0.1, length=3, run_dir=str(runs))
    if not overlap:
        strategy = featstore.Ginex(cache=0.1, edge_cache=0.1, length=3, run_dir=str(runs))
    seeds = np.random.default_rng(3).permutation(N)[: 40 * BATCHES]
    return featstore.Loader(g, sampler, seeds, 40, labels=None, edge_features=["w"], strategy=strategy, seed=3)


def rows(batch: featstore.MiniBatch) -> list[torch.Tensor]:
    return [batch.input_ids.clone(), batch.x.clone(), *(each.clone() for each in batch.edge_features["w"])]


def check(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for mine, its in zip(found, expected[: len(found)], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


def held(g: featstore.OutOfCoreGraph) -> dict[str, int]:
    return {name: n for name, n in g.budget.report().items() if n and ("plan" in name or "edges" in name or "run" in name)}


def run_files_fail(folder: str, step: int) -> None:
    """Calls on run files fail: the loop's OSError, nothing left, the next epoch right; in the child."""
    path, runs = Path(folder) / "g", Path(folder) / "runs"
    make(path)
    cacheplans.CachePlanner._must_spill = lambda *_: True  # type: ignore[method-assign]
    met: set[str] = set()
    with featstore.open(path, memory="64MB") as g:
        for overlap in (True, False):
            with make_loader(g, runs, overlap) as loader:
                expected = [rows(batch) for batch in loader]
                assert len(expected) == BATCHES
                before = held(g)
                for operation, name in (("write", "ENOSPC"), ("write", "EIO"), ("open", "EMFILE"), ("read", "EIO")):
                    for fault in sweep(runs, operation, name, step=1 if operation == "open" else step):
                        loader.set_epoch(0)
                        found: list[list[torch.Tensor]] = []
                        with fault:
                            try:
                                for batch in loader:
                                    found.append(rows(batch))
                            except OSError as error:
                                assert error.errno == getattr(errno, name)
                                assert str(runs) in str(error.filename)
                                assert fault.fired
                                met.update(each for each in FILES if Path(str(error.filename)).match(each))
                            else:
                                assert not fault.fired or len(found) == BATCHES
                        check(found, expected)
                        assert not runs.exists()
                        assert held(g) == before
                        assert not library_threads()
                    for fault in sweep(runs, operation, "short", step=step) if operation in ("read", "write") else ():
                        loader.set_epoch(0)
                        with fault:  # what came short goes on where it stopped
                            found = [rows(batch) for batch in loader]
                        assert len(found) == BATCHES
                        check(found, expected)
    assert met == set(FILES), f"no fault met {set(FILES) - met}"


def test_run_files_that_fail(tmp_path: Path) -> None:
    run_in_fork(run_files_fail, str(tmp_path), 151)


@pytest.mark.stress
def test_run_files_that_fail_anywhere(tmp_path: Path) -> None:
    run_in_fork(run_files_fail, str(tmp_path), 1, timeout_s=3000)


def names_fail(folder: str, step: int) -> None:
    """Run files that get no name, or cannot be deleted: no descriptor stays, and no bytes on the drive; in the child."""
    path, runs = Path(folder) / "g", Path(folder) / "runs"
    make(path)
    cacheplans.CachePlanner._must_spill = lambda *_: True  # type: ignore[method-assign]

    def opened() -> list[str]:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return [target for target in (os.readlink(link) for link in links if os.path.lexists(link)) if str(runs) in target]

    with featstore.open(path, memory="64MB") as g:
        for overlap in (True, False):
            with make_loader(g, runs, overlap) as loader:
                expected, before, met = [rows(batch) for batch in loader], held(g), set[str]()
                for operation, name in (("rename", "ENOSPC"), ("unlink", "EIO")):
                    for fault in sweep(runs, operation, name, step=step if operation == "unlink" else 1):
                        loader.set_epoch(0)
                        found: list[list[torch.Tensor]] = []
                        with fault:
                            try:
                                for batch in loader:
                                    found.append(rows(batch))
                            except OSError as error:
                                assert (operation, error.errno) == ("rename", errno.ENOSPC)
                                met.update(each for each in FILES if Path(str(error.filename)).match(f"{each}.tmp"))
                            else:
                                assert len(found) == BATCHES  # what cannot be deleted holds nothing up
                        check(found, expected)
                        assert opened() == []
                        assert not runs.exists() or os.listdir(runs) == [".made-by-featstore"]
                        assert held(g) == before
                        assert not library_threads()
                assert met == set(FILES), met


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.stress)])
def test_run_files_that_cannot_be_named_or_deleted(tmp_path: Path, step: int) -> None:
    run_in_fork(names_fail, str(tmp_path), step)


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[featstore.OutOfCoreGraph]:
    make(tmp_path / "g")
    with featstore.open(tmp_path / "g", memory="64MB") as g:
        yield g


def flip(path: Path) -> None:
    data = np.fromfile(path, np.uint8)
    with path.open("r+b") as file:
        file.write((data ^ 0x55).tobytes())


@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, path.stat().st_size // 2)], ids=["flipped", "cut"])
@pytest.mark.parametrize("name", ["edges-*", "plan-edges-*"])
def test_damaged_files_reach_the_loop(
    graph: featstore.OutOfCoreGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: Any
) -> None:
    runs, of, damaged, lock = tmp_path / "runs", EdgePlanner.of, list[Path](), threading.Lock()
    with make_loader(graph, runs) as loader:
        expected = [rows(batch) for batch in loader]
    before = held(graph)

    def of_damaged(self: EdgePlanner, superbatch: Any, number: int) -> Any:
        with lock:  # two threads ask at once, and damage that is done twice may be undone
            for path in [] if damaged else list(runs.rglob(name)):
                if path.suffix != ".tmp":  # one that is written is renamed
                    with suppress(FileNotFoundError):  # the other thread deletes those that were read
                        damage(path)
                        damaged.append(path)
        return of(self, superbatch, number)

    monkeypatch.setattr(EdgePlanner, "of", of_damaged)
    with make_loader(graph, runs) as loader:
        with pytest.raises(CorruptionError) as caught:
            list(loader)
        assert Path(str(caught.value.path)) in damaged
        assert not runs.exists()
        loader.set_epoch(0)
        check([rows(batch) for batch in loader], expected)
    assert held(graph) == before
    assert not library_threads()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("call", [1, 4, 7])
def test_ctrl_c_while_edges_are_planned(
    graph: featstore.OutOfCoreGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool, call: int
) -> None:
    runs, write_plan, n = tmp_path / "runs", cacheplans.write_plan, 0
    with make_loader(graph, runs, overlap) as loader:
        expected = [rows(batch) for batch in loader]
    before = held(graph)

    def interrupted(append: Any, *args: Any) -> Any:
        nonlocal n
        n += "plan-edges-" in append.__self__.path
        if n == call:
            os.kill(os.getpid(), signal.SIGINT)
        return write_plan(append, *args)

    monkeypatch.setattr(cacheplans, "write_plan", interrupted)
    with make_loader(graph, runs, overlap) as loader:
        with pytest.raises(KeyboardInterrupt):
            for _ in loader:
                pass
        loader.set_epoch(0)
        found = [rows(batch) for batch in loader]
        assert len(found) == BATCHES
        check(found, expected)
    assert not runs.exists()
    assert held(graph) == before
    assert not library_threads()
