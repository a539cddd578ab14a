"""``strategy="auto"`` and ``featstore plan --explain``."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.budget import Budget
from featstore.cli.main import main
from featstore.cli.plots import draw_estimates
from featstore.errors import CorruptionError
from featstore.estimate.cost import TIE, Estimate, Machine
from featstore.storage import drive as drive_module
from featstore.storage.drive import DriveSpeed
from featstore.strategies import estimates as estimates_module
from featstore.strategies.profile import Profile, profile_batches
from tests.estimate.test_cost import SKETCH, N, chosen, workload
from tests.support.graphs import skewed_dataset
from tests.support.loaders import ESTIMATED as STRATEGIES
from tests.support.loaders import make_loader


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skewed_dataset(tmp_path_factory.mktemp("auto") / "g", 3000, 40, narrow=3)


def test_explain_measures_when_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = skewed_dataset(tmp_path / "g", 3000, 40)  # of which no rates are kept yet
    arguments = ["plan", str(data), "--explain", "--fanouts", "4,3", "--batch-size", "100", "--sizes", "10%", "--json"]
    speeds = iter(DriveSpeed(1000.0 * k, 1e9, 1e9, 7.0, 7.0) for k in range(1, 9))
    monkeypatch.setattr(drive_module, "measure_drive", lambda *_: next(speeds))
    for more, expected in (([], 1000), ([], 1000), (["--measure"], 2000), ([], 2000)):
        assert main([*arguments, *more]) == 0
        assert json.loads(capsys.readouterr().out)["choices"][0]["drive"]["iops"] == expected
    assert main(["plan", str(data), "--simulate", "--measure"]) == 2
    assert "--explain" in capsys.readouterr().err


def loader(g: featstore.OutOfCoreGraph, strategy: str, **options: Any) -> featstore.Loader:
    sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
    return make_loader(g, sampler, g.node_data["train_idx"], batch_size=100, features=["x", "z"], strategy=strategy, **options)


def test_auto_takes_the_least_and_says_why(data: Path) -> None:
    with featstore.open(data, memory="64MiB") as g, loader(g, "auto", cache=0.2) as auto:
        found = auto.stats()["auto"]
        possible = [each for each in found["estimates"] if not each["impossible"]]
        assert found["taken"]["total_s"] <= (1 + TIE) * min(each["total_s"] for each in possible)
        assert found["reason"]
        assert found["capacity"] == 600
        assert {each["strategy"] for each in found["estimates"]} == set(STRATEGIES)


def steer(monkeypatch: pytest.MonkeyPatch, strategy: str, policy: str | None = None) -> None:
    def steered(estimates: list[Estimate], epochs: int) -> tuple[Estimate, str]:
        found = (each for each in estimates if each.strategy == strategy and policy in (None, each.policy))
        return next(found), "steered"

    monkeypatch.setattr(estimates_module, "cheapest", steered)


@pytest.mark.parametrize(("n_batches", "expected"), [(0, 0), (5, 5), (40, 8), (200, 25), (10_000, 32)])
def test_the_profile_is_bounded_by_the_epoch(n_batches: int, expected: int) -> None:
    assert profile_batches(n_batches) == expected


@pytest.mark.parametrize("strategy", ["ondemand", "streamed"])
def test_batches_sampled_to_choose_are_used_by_the_run(data: Path, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steer(monkeypatch, strategy, "degree" if strategy == "ondemand" else None)
    sampled: list[tuple[int, int]] = []

    class Counting:
        fanouts = (4, 3)

        def __init__(self, g: Any) -> None:
            self._real = featstore.NeighborSampler(g, [4, 3], seed=1)

        def sample(self, seeds: Any, epoch: int = 0, index: int = 0) -> Any:
            sampled.append((epoch, index))
            return self._real.sample(seeds, epoch=epoch, index=index)

    with featstore.open(data, memory="64MiB") as g:
        options: dict[str, Any] = {"batch_size": 50, "features": ["x"], "cache": 0.1, "disk": "64MiB"}
        with make_loader(g, Counting(g), g.node_data["train_idx"], strategy="auto", **options) as ours:
            ahead = sorted(sampled)
            assert ahead == [(0, index) for index in range(8)]  # of twenty
            for _ in range(2):
                assert sum(1 for _ in ours) == 20
            assert sorted(sampled) == [(epoch, index) for epoch in range(2) for index in range(20)]  # each once
            profile = ours._runner._decision.profile
            assert not (Path(profile._runs.path) / "profile").exists()  # gone with the epoch that it belonged to
    assert not (data.parent / "g.runs").exists()


def test_a_small_disk_bounds_the_profile(data: Path) -> None:
    with featstore.open(data, memory="64MiB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        context = loader(g, "ondemand")._runner.context
        whole = Profile(context, f"{g.path}.runs", None)
        assert whole.n_sampled == 8
        part = Profile(context, f"{g.path}.runs", whole.n_bytes * 4)
        assert 1 <= part.n_sampled < 8
        assert part.n_bytes <= whole.n_bytes * 4 // 8
        order = context.batches.sampled(0)
        for index in range(10):
            expected = order.sample(index)
            there = [profile.batch(index) for profile in (whole, part)]
            assert [found is not None for found in there] == [index < profile.n_sampled for profile in (whole, part)]
            for found in (*filter(None, there), context.batches.epoch(0).sample(index)):
                assert (found.index, found.epoch) == (expected.index, expected.epoch)
                assert torch.equal(found.input_ids, expected.input_ids)
                assert all(torch.equal(a.src, b.src) for a, b in zip(found.blocks, expected.blocks, strict=True))
        assert context.batches.fanouts == sampler.fanouts
        for profile in (whole, part):
            profile.close()
            profile.close()
        with pytest.raises(OSError, match="disk budget"):
            Profile(context, f"{g.path}.runs", 1000)
        with pytest.warns(featstore.PerformanceWarning, match=r"no disk.*give disk='\d+KiB'"):
            auto = loader(g, "auto", cache=0.1, disk=1000)
        with auto:
            assert "no disk" in auto.stats()["auto"]["reason"]
    assert not (data.parent / "g.runs").exists()


@pytest.fixture
def read_only(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing can be made beside the dataset; returns the temporary directory."""
    access, makedirs, temporary = os.access, os.makedirs, tmp_path / "elsewhere" / "tmp"

    def refuse(path: str, *more: Any, **options: Any) -> None:
        if os.path.dirname(path) == str(data.parent):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        makedirs(path, *more, **options)

    temporary.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, *more, **options: path != str(data.parent) and access(path, *more, **options))
    monkeypatch.setattr(os, "makedirs", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return temporary


@pytest.mark.parametrize("strategy", ["superbatch", "streamed", "auto"])
def test_run_files_go_to_the_temporary_directory_where_none_can_be_made_beside_the_dataset(
    data: Path, read_only: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    mkdir = os.mkdir

    def note(path: Any, mode: int = 0o777, **options: Any) -> None:
        made.append(Path(path))
        mkdir(path, mode, **options)
        if made[-1].parent.parent == read_only:
            assert made[-1].stat().st_mode & 0o77 == 0  # of a directory that others may read

    monkeypatch.setattr(os, "mkdir", note)
    with featstore.open(data, memory="64MiB") as g:
        with loader(g, strategy, cache=0.1) as ours, loader(g, "ondemand") as theirs:
            assert sum(torch.equal(a.features["x"], b.features["x"]) for a, b in zip(ours, theirs, strict=True)) == 10
    assert {path.parent.name for path in made if path.parent.parent == read_only} == {f"featstore-{os.geteuid()}.runs"}
    assert os.listdir(read_only) == []


@pytest.mark.parametrize("why", ["another's", "a link", "none"])
def test_where_no_run_files_can_be_made_auto_reads_on_demand_and_others_say_so(
    data: Path, read_only: Path, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise FileNotFoundError(errno.ENOENT, "no usable temporary directory")

    mine = read_only / f"featstore-{os.geteuid()}.runs"
    if why == "another's":
        mine.mkdir()
        euid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: euid + 1)
        mine.rename(read_only / f"featstore-{euid + 1}.runs")
    elif why == "a link":
        (tmp_path / "target").mkdir()
        mine.symlink_to(tmp_path / "target")
    else:
        monkeypatch.setattr(tempfile, "gettempdir", missing)
    with featstore.open(data, memory="64MiB") as g:
        with pytest.raises(PermissionError, match=r"run files go here; run_dir= \(--run-dir\) names another") as caught:
            list(loader(g, "superbatch", cache=0.1))
        assert caught.value.filename == f"{data}.runs"
        with pytest.warns(featstore.PerformanceWarning, match=r"'auto': no disk to estimate: .*: give run_dir=, a directory"):
            auto = loader(g, "auto", cache=0.1)
        with auto:
            assert auto.stats()["auto"]["taken"]["strategy"] == "ondemand"
            assert sum(1 for _ in auto) == 10
        with loader(g, "superbatch", cache=0.1, run_dir=tmp_path / "elsewhere" / "runs") as ours:
            assert sum(1 for _ in ours) == 10
        with pytest.raises(PermissionError, match="run_dir="):  # where it was asked for
            loader(g, "auto", cache=0.1, run_dir=data.parent / "runs")
    assert all(path.is_symlink() or not list(path.iterdir()) for path in read_only.iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.ENOLCK, errno.ENAMETOOLONG])
def test_where_no_run_files_have_room_auto_reads_on_demand(data: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code), f"{data}.runs/run-1")

    monkeypatch.setattr("featstore.strategies.auto.Profile", full)
    with featstore.open(data, memory="64MiB") as g:
        with pytest.warns(featstore.PerformanceWarning, match=r"'auto': no disk to estimate: .*: give run_dir=, a directory"):
            auto = loader(g, "auto", cache=0.1)
        with auto:
            taken = auto.stats()["auto"]["taken"]
            assert (taken["strategy"], taken["policy"]) == ("ondemand", "degree"), "which samples nothing to begin"
            assert sum(1 for _ in auto) == 10


@pytest.mark.parametrize(
    ("code", "of"), [(errno.EIO, "g.runs/run-1"), (errno.EIO, "g/x"), (errno.EACCES, "g/x"), (errno.ENOTDIR, "p/x"), (0, "")]
)
def test_what_cannot_be_read_while_auto_estimates_is_no_lack_of_disk(
    data: Path, code: int, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(data.parent / of)
    failure = OSError(code, os.strerror(code), path) if code else CorruptionError("damaged", path)

    def fail(*_: object) -> None:
        raise failure

    for what in ("featstore.strategies.auto.Profile", "featstore.Superbatch.estimate_length"):
        with monkeypatch.context() as patch, featstore.open(data, memory="64MiB") as g:
            patch.setattr(what, fail)
            with pytest.raises(OSError, match=re.escape(path)) as caught:
                loader(g, "auto", cache=0.1)
        assert caught.value is failure


def test_where_there_is_no_memory_to_estimate_rows_are_read_on_demand(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(*_: object, budget: Budget, **__: object) -> None:
        budget.reserve("simulation", budget.total)  # however little it takes: it is not there

    monkeypatch.setattr("featstore.strategies.auto.observe", observe)
    with featstore.open(data, memory="2MiB") as g:
        with pytest.warns(featstore.PerformanceWarning, match=r"no memory.*give memory='\d+KiB'"):
            auto = loader(g, "auto", cache=0.01, prefetch=0, threads=1)
        with auto:
            found = auto.stats()["auto"]
            assert found["taken"]["strategy"] == "ondemand"
            assert "no memory" in found["reason"]
            assert sum(1 for _ in auto) == 10


@pytest.mark.parametrize("bad", [{"policy": "lru"}, {"length": 3}, {"epochs": 0}])
def test_what_auto_does_not_take(bad: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"policy|length|epochs"):
        featstore.Auto(**bad)


@pytest.mark.shares_resources  # matplotlib keeps its fonts open
def test_explain_prints_a_table(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(data), "--explain", "--fanouts", "4,3", "--batch-size", "100", "--sizes", "10%,50%", "--epochs", "3"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text.count("taken:") == 2
    for strategy in STRATEGIES:
        assert text.count(strategy) >= 2
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [choice["capacity"] for choice in result["choices"]] == [300, 1500]
    assert all(choice["epochs"] == 3 for choice in result["choices"])
    assert main([*arguments, "--plot", str(data.parent / "estimates.png")]) == 0
    assert "drawn: " in capsys.readouterr().out
    assert (data.parent / "estimates.png").read_bytes().startswith(b"\x89PNG")
    assert main([*arguments, "--plot", str(data.parent / "no" / "estimates.png")]) == 2
    assert "is not there" in capsys.readouterr().err
    assert main([*arguments, "--policies", "lru"]) == 2
    assert "--simulate" in capsys.readouterr().err


def test_a_picture_shows_every_estimate(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both panels have a line a candidate, of the values in the table, and what cannot be taken is dashed."""
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: drawn.append(figure))
    choices = [
        chosen(workload(epochs=3, capacity=rows, loads=loads), Machine(SKETCH, 8e9))
        for rows, loads in ((N // 2, 2_000_000), (N // 50, 9_000_000))
    ]
    draw_estimates(choices, "unused.png", "title")
    seconds, moved = drawn[0].axes
    lines = {str(line.get_label()).split(":")[0]: line for line in seconds.get_lines()}
    for i, each in enumerate(choices[0].estimates):
        line = lines[f"{each.strategy} ({each.policy})"]
        by_size = [choices[1].estimates[i], choices[0].estimates[i]]
        assert line.get_xdata() == pytest.approx([2, 50])
        assert line.get_ydata() == pytest.approx([at.total_s(3) for at in by_size])
        assert moved.get_lines()[i].get_ydata() == pytest.approx([at.moved_bytes for at in by_size])
        assert (line.get_linestyle() == "--") == bool(each.impossible)
    assert lines["taken by strategy=auto"].get_ydata() == pytest.approx([choice.taken.total_s(3) for choice in choices[::-1]])


def test_training_prints_estimate_and_actual(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--strategy", "auto", "--cache", "0.1", "--epochs", "1", "--hidden", "8", "--batch-size", "200"]
    assert main(["train", str(data), *options]) == 0
    text = capsys.readouterr().out
    assert "taken: " in text
    assert "estimate" in text
    assert "actual" in text


def test_rows_by_degree_are_judged_and_streamed(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken where it is estimated to be cheapest, with the misses that were counted of it; not beside planned caches of edges."""
    with featstore.open(data, memory="64MiB") as g:
        with loader(g, "ondemand") as plain:
            expected = [batch.features["x"].clone() for batch in plain]
        steer(monkeypatch, "streamed", "degree")
        with loader(g, "auto", cache=0.2) as auto:
            found = auto.stats()["auto"]
            assert [each["policy"] for each in found["estimates"] if each["strategy"] == "streamed"] == ["belady", "degree"]
            assert all(torch.equal(batch.features["x"], x) for batch, x in zip(auto, expected, strict=True))
            stats = auto.stats()
            assert stats["superbatch"]["passes"] == 2
            assert stats["hits"]["base"] == 0
            estimated = found["taken"]["rows_loaded"]
            assert stats["rows_loaded"] / 2 == pytest.approx(estimated, rel=0.05)  # of two features; a pass fills the caches


@pytest.mark.parametrize("sampler", [featstore.NeighborSampler, partial(featstore.EpochSampler, window=1000)])
def test_rows_in_memory_are_those_beside_what_is_sampled_ahead(
    tmp_path: Path, sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch that is drawn at once takes its memory before the cache does."""
    steer(monkeypatch, "ondemand", "degree")
    data = skewed_dataset(tmp_path / "g", 60_000, 40)
    with featstore.open(data, memory="12MiB", threads=1) as g:
        options: dict[str, Any] = {"batch_size": 200, "features": ["x"], "strategy": "auto"}
        with make_loader(g, sampler(g, [4, 3], seed=1), np.arange(0, 60_000, 3), **options) as auto:
            cache = g.features["x"].cache
            assert cache is not None
            assert 1000 < cache.capacity < 60_000
            assert auto.stats()["auto"]["capacity"] == pytest.approx(cache.capacity, rel=0.1)
