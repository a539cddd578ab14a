"""Streamed packs: the batches of on-demand loading, bit for bit, read from extents alone; nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.estimate.misses import UNKNOWN, MissCurves, Misses
from featstore.gather.sources import ExtentSource
from featstore.plan.cacheplans import CachePlanner
from featstore.plan.superbatchextents import SuperbatchExtents
from featstore.storage.pagestream import least_window
from featstore.storage.rundir import DiskQuota
from featstore.strategies import streamed as streamed_module
from featstore.strategies.streamed import WINDOWS
from tests.strategies.test_superbatch import batches, dataset, ondemand, same
from tests.support.directory_size import bytes_at_one_moment
from tests.support.loaders import make_loader
from tests.support.sampled import covering

__all__ = ["dataset", "ondemand"]  # fixtures


@pytest.mark.parametrize(("size", "cache"), covering([1, 7, 40, "auto"], [0, 0.1, 0.0004, 1.0]))
def test_the_same_batches(dataset: Path, ondemand: list[Any], size: int | str, cache: float) -> None:
    backend = "pread" if size == 7 else "auto"
    found, stats = batches(dataset, backend=backend, strategy="streamed", length=size, cache=cache)
    assert same(found, ondemand)
    assert not os.path.exists(f"{dataset}.runs")
    assert stats["hits"]["base"] == 0
    assert stats["hits"]["packed"] + stats["hits"]["host"] == stats["rows"]
    assert stats["rows_loaded"] == stats["hits"]["packed"]
    assert {"sample", "plan", "pack", "load", "read", "gather"} <= stats["seconds"].keys()


@pytest.mark.parametrize("strategy", ["streamed", "superbatch"])
@pytest.mark.parametrize("late", [False, True])
def test_rows_that_stay_are_planned_as_batches_are_sampled(
    dataset: Path, ondemand: list[Any], monkeypatch: pytest.MonkeyPatch, strategy: str, late: bool
) -> None:
    """Superbatches are planned as late as may be only if a device may get rows later."""
    planned = list[int]()
    plan = CachePlanner.plan

    def noting(self: CachePlanner, k: int, *args: Any, **options: Any) -> Any:
        planned.append(k)
        return plan(self, k, *args, **options)

    monkeypatch.setattr(CachePlanner, "plan", noting)
    device = {"device_cache": "auto"} if late else {}
    found, stats = batches(dataset, strategy=strategy, policy="degree", length=7, cache=0.1, **device)
    assert same(found, ondemand)
    assert planned == [0, 1, 2, 3] * 2 * late  # four superbatches, two epochs
    assert stats["hits"]["host"] > 0
    assert stats["seconds"]["plan"] > 0


def test_packing_in_several_passes_is_said(dataset: Path, ondemand: list[Any]) -> None:
    """The passes that ran are counted, not those that were hoped for; the memory that is named makes them fewer."""

    def run(memory: str) -> tuple[dict[str, Any], list[str]]:
        with featstore.open(dataset, memory=memory) as g, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
            options: dict[str, Any] = {"batch_size": 40, "seed": 3, "length": 6, "cache": 0.01}
            with make_loader(g, sampler, g.node_data["train_idx"], strategy="streamed", **options) as loader:
                for batch, expected in zip(loader, ondemand[:25], strict=True):
                    assert torch.equal(batch.x, expected[1][3])
                return loader.stats()["superbatch"], [str(each.message) for each in said]

    roomy, nothing = run("64MB")
    assert (roomy["passes"], nothing) == (5, [])
    runs = []
    with contextlib.suppress(featstore.BudgetError):  # down to the least that works
        for kilobytes in range(1600, 0, -100):
            runs.append(run(f"{kilobytes}KB"))
    tight, said = max(runs, key=lambda each: each[0]["passes"])
    assert tight["passes"] > 5, [each[0] for each in runs]
    assert len(said) == 1, "once a loader"
    assert "is packed in" in said[0]
    found = re.search(r"memory='(\w+)'", said[0])
    assert run(found[1])[0]["passes"] < tight["passes"]


@pytest.mark.filterwarnings("ignore::featstore.PerformanceWarning")
@pytest.mark.parametrize("disk", ["8KB", "5MB"])
def test_a_look_ahead_that_failed_is_said(dataset: Path, disk: str) -> None:
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        options: dict[str, Any] = {"batch_size": 40, "strategy": "streamed", "disk": disk, "cache": 0.1}
        with make_loader(g, sampler, g.node_data["train_idx"], **options) as loader:
            said = loader.stats()["superbatch"].get("not_looked", "")
            assert said.startswith("no disk: ") == (disk == "8KB")


@pytest.mark.filterwarnings("ignore::featstore.PerformanceWarning")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_look_ahead_on_a_full_drive_is_said(dataset: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code), "run-1")

    monkeypatch.setattr("featstore.strategies.lookahead.Profile", full)
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        options: dict[str, Any] = {"batch_size": 40, "strategy": "streamed", "cache": 0.1}
        with make_loader(g, sampler, g.node_data["train_idx"], **options) as loader:
            assert loader.stats()["superbatch"]["not_looked"] == f"no disk: {os.strerror(code)}"
            assert sum(1 for _ in loader) == len(loader)


def test_disk_budget(dataset: Path, tmp_path: Path) -> None:
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        make = lambda **options: make_loader(  # noqa: E731
            g, sampler, g.node_data["train_idx"], batch_size=40, strategy="streamed", run_dir=tmp_path / "runs", **options
        )
        with make(length=25, disk="120KB", cache=0.001) as loader:
            with pytest.raises(OSError, match="disk budget") as caught:
                list(loader)
            assert caught.value.errno == 28
        assert not os.path.exists(tmp_path / "runs")
        with make(disk="5MB", cache=0.1) as loader:  # auto keeps to it
            largest = 0
            for _ in loader:
                largest = max(largest, bytes_at_one_moment(tmp_path / "runs"))
            assert 0 < largest <= 5_000_000
        assert not os.path.exists(tmp_path / "runs")


def test_a_damaged_extent_is_the_loops_error(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the second superbatch are damaged once they are whole."""
    add, seen = SuperbatchExtents.add, list[int]()

    def damaged(self: Any, name: str, folder: str, record: Any, extents: Any) -> None:
        add(self, name, folder, record, extents)
        if record.name.startswith("extents-1-"):
            data = np.memmap(os.path.join(folder, record.name), np.uint8, "r+")
            data[4096:] ^= 1
            data.flush()

    monkeypatch.setattr(SuperbatchExtents, "add", damaged)
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        options: dict[str, Any] = {"batch_size": 40, "strategy": "streamed", "length": 5, "cache": 0.001}
        options["run_dir"] = tmp_path / "runs"
        with make_loader(g, sampler, g.node_data["train_idx"], prefetch=0, **options) as loader:
            with pytest.raises(featstore.CorruptionError, match="checksum") as caught:
                for batch in loader:
                    seen.append(batch.index)
            assert "extents-1-" in str(caught.value.filename)
        assert seen == [0, 1, 2, 3, 4]
        assert not os.path.exists(tmp_path / "runs")


def test_superbatches_are_as_long_as_what_will_be_missed_allows(dataset, ondemand, monkeypatch) -> None:
    """A few batches sampled ahead say how many rows the cache will lack; where they are wrong, the disk still bounds all."""
    sizes, peaks, accounts = [], [], []

    class Watched(DiskQuota):
        def __init__(self, total: int | None) -> None:
            super().__init__(total)
            accounts.append(self)

    monkeypatch.setattr("featstore.strategies.superbatchepoch.DiskQuota", Watched)
    real = streamed_module.look_ahead
    disk = 400_000
    shares = []

    def sparse(*arguments: Any, **more: Any) -> Any:
        return (
            real(*arguments, **more)[0],
            MissCurves(Misses((1,), (0.001,))),
            "",
        )  # far too few: what is missed then does not fit

    def full(*arguments: Any, **more: Any) -> Any:
        return real(*arguments, **more)[0], UNKNOWN, ""

    def noting(*arguments: Any, **more: Any) -> Any:
        found = real(*arguments, **more)
        shares.append(found[1].planned.shares[-1])
        return found

    for look_ahead in (full, noting, sparse):
        monkeypatch.setattr(streamed_module, "look_ahead", look_ahead)
        accounts.clear()
        with featstore.open(dataset, memory="64MB") as g:
            sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
            cache = 0.001 if look_ahead is sparse else 0.5
            options: dict[str, Any] = {"batch_size": 40, "seed": 3, "strategy": "streamed", "disk": disk, "cache": cache}
            options["policy"] = "belady"
            with make_loader(g, sampler, g.node_data["train_idx"], **options) as loader:
                sizes.append(loader._runner._planning.superbatch)
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    for batch, expected in zip(loader, ondemand, strict=False):
                        assert torch.equal(batch.input_ids, expected[1][0])
                        assert torch.equal(batch.x, expected[1][3])
                assert len([str(each.message) for each in said if "read at random; disk='" in str(each.message)]) == (
                    look_ahead is sparse
                ), "once a loader"
                assert (loader.stats()["superbatch"]["unpacked"] > 0) == (look_ahead is sparse)
                hits = loader.stats()["hits"]
                profile = loader._runner.profile
                assert profile is not None
                peaks.append(max(each.peak for each in accounts) + profile.n_bytes)
        assert (hits["base"] > 0) == (look_ahead is sparse)
    assert sizes[0] < sizes[1] < sizes[2]
    assert 0 < shares[0] < 1
    assert max(peaks) <= disk


@pytest.mark.parametrize(
    ("planned", "by_degree", "options", "policy"),
    [
        (0.9, 0.1, {}, "degree"),
        (0.1, 0.9, {}, "belady"),
        (0.9, 0.1, {"policy": "belady"}, "belady"),
        (0.1, 0.9, {"policy": "frequency"}, "frequency"),
        (0.9, 0.1, {"length": 5}, "belady"),
        (0.9, 0.1, {"cache": None}, "belady"),
    ],
)
def test_the_policy_by_default_is_that_which_moves_fewer_bytes(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, planned: float, by_degree: float, options: dict[str, Any], policy: str
) -> None:
    """Of rows that one misses and the other has, as a look ahead says; each in superbatches of the length that suits it."""
    real = streamed_module.look_ahead

    def told(*arguments: Any, **more: Any) -> Any:
        profile, _, why = real(*arguments, **more)
        curves = [Misses((400,), (share,)) for share in (planned, by_degree)]
        return profile, MissCurves(curves[0], curves[1] if more["by_degree"] else Misses()), why

    monkeypatch.setattr(streamed_module, "look_ahead", told)
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        strategy = featstore.Streamed(**{"cache": 400 / g.num_nodes, **options})
        with featstore.Loader(g, sampler, g.node_data["train_idx"], 40, strategy=strategy) as loader:
            assert loader.stats()["superbatch"]["policy"] == policy
            for batch in loader:
                assert torch.equal(batch.x, g.features["x"][batch.input_ids])


@pytest.mark.filterwarnings("ignore:strategy 'streamed'. a superbatch is packed in:featstore.PerformanceWarning")
def test_extents_are_read_ahead_into_what_is_reserved(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in an epoch after the memory was taken back, while others have it; then it is had again."""
    windows: list[int] = []
    begin = ExtentSource._begin

    def noted(source: ExtentSource, window_bytes: int, *args: Any) -> None:
        windows.append(window_bytes)
        begin(source, window_bytes, *args)

    monkeypatch.setattr(ExtentSource, "_begin", noted)
    with featstore.open(dataset, memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        options: dict[str, Any] = {"strategy": "streamed", "length": 5, "cache": 0.001, "features": ["x", "z"]}
        with make_loader(g, sampler, g.node_data["train_idx"], 40, **options) as loader:
            arenas = loader._runner._arenas  # type: ignore[attr-defined]

            def epoch() -> tuple[list[torch.Tensor], int]:
                found = []
                windows.clear()
                for batch in loader:
                    found.append(batch.x.clone())
                    held = g.memory_report()[WINDOWS]
                    assert sum(each.nbytes for each in arenas.windows.values()) <= held
                assert 0 < 2 * max(windows) <= held, "two features"
                return found, held

            want, whole = epoch()
            g.pool.trim()
            assert any(each.nbytes for each in arenas.windows.values())
            g.budget.reserve("others", g.budget.available + 1).release()
            assert WINDOWS not in g.memory_report()
            least = 2 * least_window()
            assert not any(each.nbytes for each in arenas.windows.values())
            with g.budget.reserve("others", g.budget.available + g.budget.on_loan) as others:
                others.resize(others.n_bytes - (whole - least) + 1)
                loader.set_epoch(0)
                found, held = epoch()
                assert held == least < whole
                assert all(torch.equal(one, other) for one, other in zip(want, found, strict=True))
            assert epoch()[1] == whole
