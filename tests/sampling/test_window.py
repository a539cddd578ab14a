"""Windows of ``EpochSampler(window="auto")``: what they are cut by, and the advice where an epoch has many."""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.config import parse_size
from featstore.errors import BudgetError
from featstore.sampling.window import EpochWindow
from featstore.sampling.windowed import Cut
from tests.sampling.test_epochwide import batches_of, window_of
from tests.sampling.test_neighbor import same
from tests.support.graphs import skewed_dataset


@pytest.fixture
def on_the_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists get no memory, so batches are drawn in windows."""
    monkeypatch.setattr("featstore.strategies.lists.worth_keeping", lambda *_, **__: (0, "on the drive"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skewed_dataset(tmp_path_factory.mktemp("windows") / "g", 3000, 8)


def sampler_of(g: Any, **options: Any) -> featstore.EpochSampler:
    return featstore.EpochSampler(g, [10, 10], seed=1, **options)


@given(st.integers(1, 3000), st.integers(1, 500), st.integers(0, 1 << 24), st.integers(0, 1 << 24))
def test_what_is_named_makes_one_window_and_less_does_not(path: Path, n: int, n_seeds: int, held: int, disk: int) -> None:
    with featstore.open(path, memory="64MiB") as g:
        cut = Cut(sampler_of(g), n, n_seeds)
        found = cut.windows(held, disk)
        assert (found.size, found.n) == (cut.size(held, disk), -(-n // found.size))
        assert (found.n == 1) == (found.memory is None and found.disk is None)
        memory, enough = found.memory or held, found.disk or disk
        assert cut.size(memory, enough) == n
        if found.n > 1 and found.size > 1:  # one is taken while the next is drawn: both fit
            assert 2 * found.size * (cut.windows(1 << 30, 0).disk or 0) <= n * disk
        if found.memory is not None:
            assert found.memory > held
            assert cut.size(found.memory - 1, enough) < n
        if found.disk is not None:
            assert found.disk > disk
            assert cut.size(memory, found.disk - 1) < n


def loader(g: Any, sampler: Any, **options: Any) -> featstore.Loader:
    return featstore.Loader(g, sampler, np.arange(3000), 10, **options)


@pytest.mark.usefixtures("on_the_drive")
@pytest.mark.parametrize("strategy", ["ondemand", "superbatch"])
def test_many_windows_are_a_warning_that_says_what_makes_them_one(
    path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    draw = EpochWindow.draw
    monkeypatch.setattr(EpochWindow, "draw", lambda self: (drawn.append(self.stop - self.first), draw(self))[1])
    with featstore.open(path, memory="6MiB") as g:
        with pytest.warns(featstore.PerformanceWarning, match="window='auto': an epoch has") as caught:
            ours = loader(g, sampler_of(g), strategy=strategy)
        assert len(caught) == 1
        with ours, warnings.catch_warnings():
            warnings.simplefilter("error")  # once a loader
            for _ in range(2):
                assert len(list(ours)) == 300
            windows = ours.stats()["windows"]
    assert str(caught[0].message) == f"window='auto': {windows['advice']}"
    assert (windows["of"], windows["passes"]) == (300, -(-300 // windows["batches"]))
    assert windows["passes"] >= 4
    assert max(drawn) == windows["batches"]
    more = re.search(r"memory='(\w+)' would make it one", windows["advice"])
    drawn.clear()
    with featstore.open(path, memory=more[1]) as g, loader(g, sampler_of(g), strategy=strategy) as ours:
        assert len(list(ours)) == 300
        assert ours.stats()["windows"] == {"batches": 300, "of": 300, "passes": 1, "advice": None}
    assert set(drawn) == {300}
    assert parse_size(more[1]) > 6 << 20


@pytest.mark.usefixtures("on_the_drive")
def test_a_disk_that_makes_many_windows_is_named(path: Path) -> None:
    with featstore.open(path, memory="256MiB") as g:
        with pytest.warns(featstore.PerformanceWarning, match="window='auto'") as caught:
            loader(g, sampler_of(g, disk="100KB")).close()
        assert "memory=" not in str(caught[0].message)
        more = re.search(r"EpochSampler\(disk='(\w+)'\) would make it one", str(caught[0].message))
        with loader(g, sampler_of(g, disk=more[1])) as ours:
            assert ours.stats()["windows"]["passes"] == 1


def test_nothing_is_said_of_windows_that_the_user_chose(path: Path) -> None:
    with featstore.open(path, memory="6MiB") as g:
        for sampler in (sampler_of(g, window=3), featstore.NeighborSampler(g, [10, 10])):
            with loader(g, sampler) as ours:
                assert "windows" not in ours.stats()


@pytest.mark.parametrize(("lacks", "n_workers", "is_an_error"), [("_aim", 2, False), ("_aim", 1, True), ("_draw", 2, True)])
def test_batches_that_lack_memory_at_once_are_numbered_one_after_the_other(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str, n_workers: int, is_an_error: bool
) -> None:
    """Drawing is not repeated, since a part of it has been logged; nor is anything where one thread had all of the memory."""
    work = getattr(EpochWindow, lacks)

    def short(self: EpochWindow, *given: Any) -> None:
        if n_workers == 1 or threading.current_thread().name.startswith("featstore-draw"):
            raise BudgetError("others have it")
        work(self, *given)

    monkeypatch.setattr(EpochWindow, lacks, short)
    batches = batches_of(np.arange(100), 10)
    with featstore.open(path, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [3, 3], seed=2)
        with window_of(sampler, g, batches, tmp_path, n_workers=n_workers) as window:
            if is_an_error:
                with pytest.raises(BudgetError, match="others have it"):
                    window.draw()
            else:
                window.draw()
                for k, seeds in enumerate(batches):
                    assert same(window.sample(k), sampler.sample(torch.from_numpy(seeds), 0, k))
