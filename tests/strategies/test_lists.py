"""Neighbour lists that a loader without options keeps in memory: all, some or none, on loan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import featstore
from featstore.config import format_size
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.sampling.window import EpochWindow
from featstore.storage.drive import DriveSpeed
from featstore.strategies import auto
from featstore.strategies.lists import Lists
from featstore.strategies.memory import Memory
from featstore.topology.base import huge_bytes

N = 20_000


class Loaded(NamedTuple):
    """The batches of an epoch, the input nodes of its last batches once more, from a state, and the loader's statistics."""

    batches: list[tuple[torch.Tensor, ...]]
    again: list[torch.Tensor]
    stats: dict[str, Any]


def load(g: featstore.OutOfCoreGraph, sampler: Any = None, **options: Any) -> featstore.Loader:
    return featstore.Loader(g, sampler or featstore.NeighborSampler(g, [4, 3]), np.arange(600), 50, **options)


@pytest.mark.parametrize("strategy", ["auto", "ondemand", "superbatch", "streamed"])
def test_sampling_reads_nothing_without_an_option(small: SimpleNamespace, strategy: str) -> None:
    with featstore.open(small.path, memory="64MiB", threads=1) as g:
        sampler = featstore.NeighborSampler(g, [4, 3])
        g.cache_neighbors("16KiB")
        with load(g, sampler, strategy=strategy) as loader:
            assert loader.stats()["lists"] == "as the graph has them"
            expected = [batch.x.clone() for batch in loader]
        assert (read := sampler.stats()["edge_rows_read"]) > 0
        g.cache_neighbors()
        with load(g, sampler, strategy=strategy) as loader:
            assert loader.stats()["lists"] == "all in memory"
        g.cache_neighbors(0)
        with load(g, sampler, strategy=strategy) as loader:
            cache = g.neighbor_cache
            assert isinstance(cache, NeighborCache)
            assert cache.whole
            assert loader.stats()["lists"] == "all in memory"
            assert g.budget.report().holders["neighbor cache"].on_loan_bytes == g.memory_report()["neighbor cache"]
            first = sampler.stats()["edge_rows_read"]  # a batch was sampled to be measured
            assert all(torch.equal(batch.x, x) for batch, x in zip(loader, expected, strict=True))
            assert sampler.stats()["edge_rows_read"] == first < 2 * read
        with load(g, strategy=strategy):
            assert g.neighbor_cache is cache  # another loader's


def test_ginex_has_lists_of_its_own(small: SimpleNamespace) -> None:
    with featstore.open(small.path, memory="64MiB") as g, load(g, strategy="ginex"):
        assert g.neighbor_cache is None


@pytest.mark.parametrize("cached", [False, True])
def test_lists_that_are_kept_by_hand_stay(small: SimpleNamespace, cached: bool) -> None:
    with featstore.open(small.path, memory="64MiB", threads=1) as g:
        g.cache_neighbors("16KiB")
        mine = g.neighbor_cache
        if cached:
            g.cache("x", 0.1)
        with load(g):
            assert g.neighbor_cache is mine
        g.cache_neighbors(0)
        with load(g):  # also beside a cache of rows that was made by hand
            assert g.neighbor_cache is not None
            assert g.neighbor_cache.whole


def test_numbers_of_edges_are_kept_for_samplers_that_want_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 500, (2, 4000))
    x = rng.random((500, 4), np.float32)
    with featstore.OutOfCoreGraph.from_edge_index(tmp_path / "g", edges, 500, {"x": x}, progress=False, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [3], edges=True)
        with featstore.Loader(g, sampler, np.arange(300), 50):
            assert g.neighbor_cache is not None
            assert g.neighbor_cache.edge_ids is not None


def test_memory_that_others_need_is_given_back(small: SimpleNamespace) -> None:
    """Not while a batch is being sampled with it: its arrays would stay."""
    with featstore.open(small.path, memory="64MiB", threads=1) as g:
        with load(g, features=()):
            pass
        with featstore.NeighborSampler(g, [2]).scratch(1) as scratch:
            assert scratch.cache is not None
            with pytest.raises(featstore.BudgetError), g.budget.reserve("others", g.budget.available + 4096):
                pass
            assert g.neighbor_cache is scratch.cache
        with g.budget.reserve("others", g.budget.available + 4096):
            assert g.neighbor_cache is None
            assert "neighbor cache" not in g.memory_report()
        with load(g, features=()):
            assert g.neighbor_cache is not None


@pytest.mark.parametrize(
    ("room", "kept"),
    [(8 / 7 + 0.02, "whole"), (8 / 7 - 0.02, "some"), (0.4, "some"), (0.2, "none")],
)
@pytest.mark.parametrize("sampler", [featstore.NeighborSampler, featstore.EpochSampler])
def test_how_many_lists_are_kept(
    wide: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, room: float, kept: str, sampler: Any
) -> None:
    """All in seven eighths of what caches may take; else those that fit there, if they are an eighth of all."""
    # Where single reads are dear, as they are measured on a busy machine, an epoch is drawn in passes, and keeps no lists.
    monkeypatch.setattr("featstore.strategies.auto.drive_speed", lambda *_: DriveSpeed(1e7, 1e9, 1e9))
    monkeypatch.setattr("featstore.strategies.auto.WORTH_WAITING", 1.0)
    with featstore.open(wide.path, memory="64MiB", threads=1) as g:
        whole = NeighborCache.whole_bytes(g.topology)
        table = huge_bytes(8 * N)
        assert 1 / 15 < table / whole < 1 / 13
        n_bytes = int(room * whole)
        monkeypatch.setattr(Memory, "left_for_caches", lambda *_: (n_bytes, 1))
        with load(g, sampler(g, [4, 3]), strategy=featstore.Auto(cache=None)) as loader:
            cache, said = g.neighbor_cache, loader.stats()["lists"]
        text = f"{format_size(int(7 / 8 * n_bytes))} of {format_size(whole)} in memory"
        assert said == ("all in memory" if kept == "whole" else text) or (cache is None and said.startswith("on the drive"))
        if kept == "none" or (kept == "some" and sampler is featstore.EpochSampler):  # which reads lists in sequence
            assert cache is None
        else:
            assert cache is not None
            assert cache.whole == (kept == "whole")
            assert cache.nbytes <= int(7 / 8 * n_bytes)
            assert cache.n_cached > N // 10


def test_a_few_lists_that_do_not_fit_cost_little(wide: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Just below the memory in which all fit, nearly all that are asked for are there; beside a loader that keeps none."""
    read = []
    # Where single reads are dear, as they are measured at times, an epoch is drawn in passes, which read no lists one by one.
    monkeypatch.setattr("featstore.strategies.auto.drive_speed", lambda *_: DriveSpeed(1e7, 1e9, 1e9))
    monkeypatch.setattr("featstore.strategies.auto.WORTH_WAITING", 1.0)
    for room in (8 / 7 + 0.02, 8 / 7 - 0.02, 0.3):
        with featstore.open(wide.path, memory="64MiB", threads=1) as g:
            n_bytes = int(room * NeighborCache.whole_bytes(g.topology))
            monkeypatch.setattr(Memory, "left_for_caches", lambda *_: (n_bytes, 1))
            sampler = featstore.NeighborSampler(g, [4, 3])
            with load(g, sampler, strategy=featstore.Auto(cache=None)) as loader:
                before = sampler.stats()["edge_rows_read"]
                for _ in loader:
                    pass
                read.append(sampler.stats()["edge_rows_read"] - before)
    assert read[0] == 0 <= read[1] < read[2] / 100


def test_lists_are_left_on_disk_where_little_is_sampled(wide: SimpleNamespace) -> None:
    with featstore.open(wide.path, memory="64MiB", threads=1) as g:
        for epochs, kept in ((1, False), (10_000, True)):
            sampler = featstore.NeighborSampler(g, [2])
            with featstore.Loader(g, sampler, np.arange(4), 4, strategy=featstore.Auto(epochs=epochs)):
                assert (g.neighbor_cache is not None) == kept


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_lists_are_given_up_where_rows_use_their_memory_better(
    wide: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """An epoch is estimated with all lists, with some and with none: by what reading the others takes, and what rows save."""
    path, x = tmp_path / "graph", np.zeros((N, 1024), np.uint8)
    featstore.OutOfCoreGraph.create(path, wide.indptr, wide.indices, {"x": x}, progress=False).close()
    tried, asked, choose = list[int](), list[int](), auto._Trial.choose

    def costs(lists: Lists, n_bytes: int, *_: Any) -> float:
        asked.append(n_bytes)
        return seconds * (lists.held - n_bytes) / lists.whole

    def trying(trial: auto._Trial, n_bytes: int, context: Any) -> Any:
        tried.append(n_bytes)
        return choose(trial, n_bytes, context)

    monkeypatch.setattr(Lists, "more_read_s", costs)
    monkeypatch.setattr(auto._Trial, "choose", trying)
    # Rows cost seconds: by what the machine measures just then, they are at times as cheap as drawing, and all choices are one.
    monkeypatch.setattr("featstore.strategies.auto.drive_speed", lambda *_: DriveSpeed(1000.0, 1e7, 1e7))
    with featstore.open(path, memory="12MiB", threads=1) as g:
        whole = NeighborCache.whole_bytes(g.topology)
        sampler = featstore.NeighborSampler(g, [4, 3])
        with load(g, sampler) as loader:
            said = loader.stats()["lists"]
            assert len([batch.x.shape for batch in loader]) == 12
        assert (said == "all in memory") == bool(seconds)
        assert "of 2.11 MiB" in said or "rows and plans use the memory better" in said or seconds
        quarters = [size for size in dict.fromkeys(asked) if size]
        assert whole // 4 < quarters[2] < quarters[1] < quarters[0] < whole
        # What takes longer than the best so far by reading lists alone is not estimated. The last is drawn at once.
        assert tried == [whole, *([] if seconds else [0, *quarters]), 0]


@pytest.fixture(scope="module")
def deep(wide: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wide graph with rows of 256 bytes, which do not fit beside its lists."""
    path = tmp_path_factory.mktemp("deep") / "graph"
    x = np.random.default_rng(0).integers(0, 256, (N, 256), np.uint8)
    featstore.OutOfCoreGraph.create(path, wide.indptr, wide.indices, {"x": x}, progress=False).close()
    return path


SLOW = DriveSpeed(100.0, 1e9, 1e9)  # where reading lists one by one takes long, and a pass over them no time


def drawn(path: Path, sampler: Callable[..., Any] = featstore.NeighborSampler, **options: Any) -> Loaded:
    with featstore.open(path, memory="4MiB", threads=2) as g, load(g, sampler(g, [4, 3]), **options) as loader:
        found = [(batch.input_ids.clone(), batch.x.clone(), *(block.src.clone() for block in batch.blocks)) for batch in loader]
        state = loader.state_dict()
        stats = loader.stats()
        loader.load_state_dict({**state, "epoch": 0, "batch": 7})
        again = [batch.input_ids.clone() for batch in loader]
    assert "epoch samples" not in g.memory_report()
    return Loaded(found, again, stats)


@pytest.mark.filterwarnings("ignore::featstore.PerformanceWarning")
@pytest.mark.parametrize("sampler", [featstore.NeighborSampler, featstore.LaborSampler])
def test_batches_are_drawn_at_once_where_lists_have_no_room(deep: Path, monkeypatch: pytest.MonkeyPatch, sampler: Any) -> None:
    """In passes over the lists, not by a read of each list; the batches are the same, also where an epoch is resumed."""
    monkeypatch.setattr("featstore.strategies.auto.drive_speed", lambda *_: SLOW)
    monkeypatch.setattr("featstore.strategies.auto.AT_ONCE", 0.0)  # of seconds that were measured, which other load makes long
    at_once, alone = drawn(deep, sampler), drawn(deep, sampler, strategy=featstore.OnDemand(cache=None))
    assert "read in sequence" in at_once.stats["lists"]
    assert at_once.stats["windows"]["passes"] == 1
    assert "windows" not in alone.stats
    for one, other in zip(at_once.batches, alone.batches, strict=True):
        assert all(torch.equal(each, same) for each, same in zip(one, other, strict=True))
    assert len(at_once.again) == len(alone.again) == 5
    assert all(torch.equal(one, other) for one, other in zip(at_once.again, alone.again, strict=True))
    assert all(torch.equal(one, other[0]) for one, other in zip(at_once.again, at_once.batches[7:], strict=True))


@pytest.mark.parametrize("strategy", ["auto", "ondemand", "superbatch", "streamed"])
@pytest.mark.parametrize("draws", ["neighbor", "labor"])
def test_an_epoch_is_not_drawn_at_once_from_lists_in_memory(
    small: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, strategy: str, draws: str
) -> None:
    """Passes would read nothing, and compute twice as much; a window that the user set stays."""
    windows = []
    draw = EpochWindow.draw
    monkeypatch.setattr(EpochWindow, "draw", lambda self: (windows.append(self), draw(self))[1])
    with featstore.open(small.path, memory="64MiB", threads=2) as g:
        found = []
        for options in ({}, {}, {"window": 1000}):
            sampler = featstore.EpochSampler(g, [4, 3], seed=1, draws=draws, **options)
            with load(g, sampler, strategy=strategy) as loader:
                assert g.neighbor_cache.whole  # which the first loader made
                assert loader.sampler is sampler
                found.append([(batch.input_ids.clone(), batch.blocks[0].src.clone()) for batch in loader])
            assert bool(windows) == bool(options)
    for one, *others in zip(*found, strict=True):
        for other in others:
            assert all(torch.equal(each, same) for each, same in zip(one, other, strict=True))


def test_rows_get_the_memory_of_windows_that_are_not_drawn(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lists, "more_read_s", lambda lists, n_bytes, *_: 1000.0 * (lists.held - n_bytes))  # none is given up
    rows = set()
    for sampler in (featstore.NeighborSampler, featstore.EpochSampler):
        with featstore.open(deep, memory="7MiB", threads=1) as g, load(g, sampler(g, [4, 3], seed=1)) as loader:
            stats = loader.stats()
            assert stats["lists"] == "all in memory"
            rows.add(stats["auto"]["capacity"])
    assert len(rows) == 1
    assert 0 < rows.pop() < N


def by_importance(g: featstore.OutOfCoreGraph, fanouts: list[int]) -> Any:
    return featstore.LaborSampler(g, fanouts, importance_sampling=1)


@pytest.mark.parametrize(
    ("sampler", "strategy"),
    [
        (by_importance, featstore.Auto()),  # needs all lists of a hop at once
        (featstore.NeighborSampler, featstore.Auto(disk="8MiB")),  # of which windows of batches might take too much
        (featstore.NeighborSampler, featstore.Streamed()),
    ],
)
@pytest.mark.filterwarnings("ignore::featstore.PerformanceWarning")
def test_batches_are_drawn_alone_otherwise(
    deep: Path, monkeypatch: pytest.MonkeyPatch, sampler: Any, strategy: featstore.Strategy
) -> None:
    monkeypatch.setattr("featstore.strategies.auto.drive_speed", lambda *_: SLOW)
    assert "windows" not in drawn(deep, sampler, strategy=strategy).stats


@pytest.mark.filterwarnings("ignore::featstore.PerformanceWarning")
def test_drawing_at_once_must_save_a_part_of_the_epoch(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first batch comes only when all are drawn."""
    monkeypatch.setattr("featstore.strategies.auto.drive_speed", lambda *_: SLOW)
    monkeypatch.setattr("featstore.strategies.auto.AT_ONCE", 1e9)
    assert "windows" not in drawn(deep).stats
