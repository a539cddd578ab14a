"""Rows requested a seed: what plain sets over the same batches say; and `featstore plan --redundancy` over them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featstore
from featstore.cli.main import main
from featstore.cli.plots import draw_redundancy
from featstore.errors import BudgetError, StaleError
from featstore.estimate.redundancy import Redundancy, redundancy
from featstore.storage.update import Update
from tests.support.planted import communities

N, COMMUNITIES, DEGREE = 2_000, 20, 8
FANOUTS = [4, 3]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Communities with shuffled ids, and two assignments that are kept; one has the name of another way of making batches."""
    path = tmp_path_factory.mktemp("of") / "g"
    rng = np.random.default_rng(0)
    community, indptr, indices = communities(rng, N, COMMUNITIES, DEGREE)
    node_data = {"y": community, "train_idx": rng.permutation(N)[:999]}
    x = np.zeros((N, 2), np.float32)
    with featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, node_data, progress=False) as g:
        featstore.partition(g, method=community, name="planted", progress=False)
        featstore.partition(g, 7, "random", name="random", progress=False)
    return path


@pytest.fixture(scope="module", autouse=True)
def _fonts(tmp_path_factory: pytest.TempPathFactory, data: Path) -> None:
    """matplotlib opens its fonts once, and keeps them open: before any test counts descriptors."""
    for ending in ("png", "svg"):
        with featstore.open(data) as g:
            found = redundancy(g, [1], 1, samplers_of(g))
        draw_redundancy(found, tmp_path_factory.mktemp("fonts") / f"first.{ending}", "fonts")


def samplers_of(g: featstore.OutOfCoreGraph, seed: int = 0) -> dict[str, Any]:
    return {"neighbor": featstore.NeighborSampler(g, FANOUTS, seed=seed), "labor": featstore.LaborSampler(g, FANOUTS, seed=seed)}


def alone(seeds: torch.Tensor) -> featstore.SampledBatch:
    """A sampler that samples no neighbours."""
    return featstore.SampledBatch(index=0, epoch=0, input_ids=seeds, n_seeds=len(seeds), blocks=())


def by_sets(g: featstore.OutOfCoreGraph, batches: Any, sampler: Any, positions: list[int]) -> tuple[int, int]:
    """Seeds and rows of some batches of epoch 0: the nodes that edges reach from the seeds, in plain Python sets."""
    order, n_seeds, n_rows = batches.epoch(0), 0, 0
    for index in positions:
        seeds = order.seeds(index).tolist()
        sampled = sampler.sample(torch.tensor(seeds), 0, index)
        ids = sampled.input_ids.tolist()
        reached = set(seeds)
        for block in sampled.blocks[::-1]:  # from the seeds outwards
            reached |= {ids[u] for u, v in zip(block.src.tolist(), block.dst.tolist(), strict=True) if ids[v] in reached}
        n_seeds, n_rows = n_seeds + len(set(seeds)), n_rows + len(reached)
    return n_seeds, n_rows


def middles(n: int, m: int) -> list[int]:
    """Spread ``m`` batches of ``n`` evenly: the place in the middle of each share, by exact arithmetic."""
    return [int(n / m * k + n / m / 2 + 1e-9) for k in range(m)]


@pytest.mark.parametrize(("batch_size", "n_batches", "macro"), [(50, 6, None), (64, None, 3), (999, 3, None), (2000, 1, 1)])
def test_every_number_is_that_of_sets(data: Path, batch_size: int, n_batches: int | None, macro: int | None) -> None:
    with featstore.open(data, memory="64MiB") as g:
        ids, parts = g.node_data["train_idx"], g.parts()
        found = redundancy(g, ids, batch_size, samplers_of(g, 3), macro=macro, seed=5, n_batches=n_batches)
        n = -(-len(ids) // batch_size)
        counted = min(n, n_batches or n)
        assert (found.n, found.n_seeds, found.n_batches, found.n_counted) == (N, 999, n, counted)
        n_ranges = max(1, 2 * 999 // batch_size)
        ranges = [v * n_ranges // N for v in range(N)]
        ways = {
            ("random", None): featstore.RandomBatches(ids, batch_size, seed=5),
            ("ranges", None): featstore.PartitionBatches(g, ids, batch_size, ranges, macro, seed=5),
            **{
                ("partition", name): featstore.PartitionBatches(g, ids, batch_size, kept, macro, seed=5)
                for name, kept in parts.items()
            },
        }
        assert [(way.batches, way.parts, way.sampler) for way in found.ways] == [(*k, s) for k in ways for s in samplers_of(g)]
        for way in found.ways:
            batches, sampler = ways[way.batches, way.parts], samplers_of(g, 3)[way.sampler]
            assert (way.n_seeds, way.n_rows) == by_sets(g, batches, sampler, middles(n, counted)), way
            assert way.macro == getattr(batches, "macro", None)
            assert way.ratio == way.n_rows / way.n_seeds
            if n_batches is None:
                assert found.epoch_rows(way) == way.n_rows
                assert way.n_seeds == 999
        assert "loader order" not in g.memory_report()
        assert "parts" not in g.memory_report()


@given(n=st.integers(1, 500), data=st.data())
def test_batches_are_spread_over_the_epoch(n: int, data: Any) -> None:
    from featstore.estimate.redundancy import _spread

    m = data.draw(st.integers(1, n))
    places = _spread(n, m)
    assert sorted(set(places)) == places
    assert len(places) == m
    assert all(place <= Fraction(n, m) * k + Fraction(n, 2 * m) < place + 1 for k, place in enumerate(places))
    assert {*places} <= {*range(n)}
    assert n != m or places == list(range(n))


def test_parts_that_know_the_communities_request_least(data: Path) -> None:
    with featstore.open(data, memory="64MiB") as g:
        found = redundancy(g, g.node_data["train_idx"], 50, samplers_of(g), macro=3, n_batches=None)
        ratio = {(way.label, way.sampler): found.against(way) for way in found.ways}
        assert ratio["random", "neighbor"] == 1
        assert ratio["parts planted", "neighbor"] < 0.75
        assert 0.95 < ratio["parts random", "neighbor"] < 1.05
        assert 0.95 < ratio["ranges", "neighbor"] < 1.05  # ids are shuffled
        for label in ("random", "ranges", "parts planted", "parts random"):
            assert ratio[label, "labor"] < ratio[label, "neighbor"]


def test_the_same_seed_gives_the_same_table(data: Path) -> None:
    def of(seed: int) -> Redundancy:
        with featstore.open(data, memory="64MiB") as g:
            return redundancy(g, g.node_data["train_idx"], 50, samplers_of(g, seed), seed=seed, n_batches=5)

    assert of(1) == of(1)
    assert of(1).table() == of(1).table() != of(2).table()


def test_one_assignment_alone_and_progress(data: Path) -> None:
    seen: list[tuple[int, int]] = []
    with featstore.open(data, memory="64MiB") as g:
        sampler: Any = {"mine": alone}
        found = redundancy(
            g, np.arange(N) < 100, 10, sampler, parts=["planted"], n_batches=4, on_batch=lambda *at: seen.append(at)
        )
    assert [way.label for way in found.ways] == ["random", "ranges", "parts planted"]
    assert {way.ratio for way in found.ways} == {1.0}  # a sampler without neighbours
    assert seen == [(k, 12) for k in range(1, 13)]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"seeds": []}, ValueError, "no seeds"),
        ({"seeds": [7, 7]}, ValueError, "must be distinct"),
        ({"seeds": [1, 1]}, ValueError, "look like a mask"),
        ({"seeds": [N]}, IndexError, "not a node"),
        ({"samplers": {}}, ValueError, "no samplers"),
        ({"parts": ["other"]}, ValueError, "keeps no parts 'other'; there is 'planted', 'random'"),
        ({"samplers": {"bad": lambda seeds: alone(seeds + N)}}, featstore.PluginError, "sampler '<lambda>': it returned node"),
    ],
)
def test_bad_input_is_named(data: Path, arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with featstore.open(data, memory="64MiB") as g:
        given: dict[str, Any] = {"seeds": [1, 2], "batch_size": 2, "samplers": samplers_of(g), **arguments}
        with pytest.raises(error, match=text):
            redundancy(g, **given)
        assert "loader order" not in g.memory_report()


def test_no_memory_is_named(data: Path) -> None:
    memory, tries = 40_000, 0
    while True:
        try:
            with featstore.open(data, memory=memory) as g:
                redundancy(g, g.node_data["train_idx"], 50, samplers_of(g))
                assert g.budget.peak <= memory
            break
        except BudgetError as error:
            assert error.needed > memory
            memory, tries = error.needed, tries + 1
    assert 1 <= tries <= 20


def test_stale_parts_and_none(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "g"
    shutil.copytree(data, path)
    with Update(path) as update:
        update.add([], extra={"parts/planted": {**update.catalog.extra["parts/planted"], "made_of": {}}})
        update.commit()
    with featstore.open(path, memory="64MiB") as g:
        found = redundancy(g, [1, 2, 3], 2, samplers_of(g))
        assert [way.parts for way in found.ways] == [None] * 4 + ["random"] * 2
        assert list(found.skipped) == ["planted"]
        assert "not counted: parts planted: made for another adjacency" in found.table()
        with pytest.raises(StaleError):
            redundancy(g, [1, 2, 3], 2, samplers_of(g), parts=["planted"])


SAMPLING = ["--batch-size", "50", "--fanouts", "4,3", "--seed", "5"]


def plan(capsys: pytest.CaptureFixture[str], path: object, *options: object) -> dict[str, Any]:
    assert main(["plan", str(path), "--redundancy", "--json", *map(str, options)]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with featstore.open(data, memory="64MiB") as g:
        ids = g.node_data["train_idx"]
        some = redundancy(g, ids, 50, samplers_of(g, 5), seed=5, n_batches=7)
        whole = redundancy(g, ids, 50, samplers_of(g, 5), seed=5, n_batches=None)
    found = plan(capsys, data, *SAMPLING, "--max-batches", 7, "--plot", tmp_path / "bars.svg")
    assert (found["counted"], found["batches"], found["fanouts"]) == (7, 20, [4, 3])
    assert found["ways"] == some.to_dict()["ways"]
    assert plan(capsys, data, *SAMPLING, "--all")["ways"] == whole.to_dict()["ways"]
    assert plan(capsys, data, *SAMPLING)["counted"] == 20  # no more than there are
    assert plan(capsys, data, *SAMPLING, "--batch-size", 10)["counted"] == 32
    text = (tmp_path / "bars.svg").read_text()
    assert "<svg" in text
    assert main(["plan", str(data), "--redundancy", *SAMPLING, "--max-batches", "7", "--plot", str(tmp_path / "b.png")]) == 0
    printed = capsys.readouterr().out
    assert some.table() in printed
    for part in ("999 seeds in 20 batches of 50", "7 of 20 batches, spread over an epoch", "--all counts", "drawn: ", "labor"):
        assert part in printed
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plan", str(data), "--redundancy", *SAMPLING, "--all"]) == 0
    printed = capsys.readouterr().out
    assert whole.table() in printed
    assert "--all counts" not in printed
    assert "about" not in printed
    assert not os.path.exists(f"{data}.runs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "lru"], "--policies does not go with --redundancy, which counts rows whatever the cache"),
        (["--sizes", "5%"], "--sizes does not go with --redundancy"),
        (["--feature", "x"], "--feature does not go with --redundancy"),
        (["--save-trace", "t"], "--save-trace does not go with --redundancy"),
        (["--trace", "t"], "--trace does not go with --redundancy"),
        (["--epochs", "2"], "--epochs does not go with --redundancy"),
        (["--measure"], "--measure does not go with --redundancy"),
        (["--sampler", "labor"], "--sampler does not go with --redundancy: both samplers are counted"),
        (["--sampler", "labor", "--batch-dependency", "4"], "--batch-dependency does not go with --redundancy"),
        (["--window", "4"], "--window does not go with --redundancy: both samplers are counted"),
        (["--target", "paper"], "--target: 'paper' names a type of nodes, and the graph has one type"),
        (["--device", "cpu"], "--device goes with --device-cache"),
        (["--all", "--max-batches", "3"], "--all and --max-batches: leave one out"),
        (["--labels", "z"], "labels: the dataset has no 'z'"),
        (["--plot", "nowhere/a.png"], "nowhere/a.png' is not there"),
    ],
)
def test_errors_of_the_command(data: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["plan", str(data), "--redundancy", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_all_is_for_redundancy_alone(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in ("--simulate", "--explain"):
        assert main(["plan", str(data), mode, "--all"]) == 2
        assert "--all goes with --redundancy" in capsys.readouterr().err


def test_a_bar_with_the_time_left(data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["plan", str(data), "--redundancy", *SAMPLING]) == 0
    shown = capsys.readouterr().err
    assert "sampling:" in shown
    assert "/160 [" in shown  # 20 batches of 4 ways with 2 samplers
    assert "<" in shown  # tqdm's time left
    assert main(["plan", str(data), "--redundancy", *SAMPLING, "--json"]) == 0
    assert capsys.readouterr().err == ""
