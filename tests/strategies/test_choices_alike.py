"""Loaders, ``strategy="auto"`` and ``featstore plan --explain`` judge superbatches alike: many nodes, little memory."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import featstore
from featstore.cli.main import main
from featstore.estimate.copies import CopySpeed
from featstore.storage.drive import DriveSpeed
from tests.strategies.test_auto import steer
from tests.support.graphs import make_graph

N, BATCH = 400_000, 100
MEMORY = "14MiB"  # features are 51 MB; 16 bytes a node would be 6.4 MB


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sparse") / "g"
    rng = np.random.default_rng(0)
    indptr, indices = make_graph(N, 3.0)
    x = rng.standard_normal((N, 32)).astype(np.float32)
    data = {"train_idx": rng.permutation(N)[:2400], "y": np.zeros(N, np.int64)}
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, data, progress=False).close()
    return path


def loader(g: featstore.OutOfCoreGraph, strategy: featstore.Strategy) -> featstore.Loader:
    sampler = featstore.NeighborSampler(g, [5, 5], seed=1)
    return featstore.Loader(g, sampler, g.node_data["train_idx"], batch_size=BATCH, labels=None, strategy=strategy, seed=0)


def explained(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    arguments = ["plan", str(path), "--explain", "--fanouts", "5,5", "--batch-size", str(BATCH), "--seeds", "train_idx"]
    assert main([*arguments, "--memory", MEMORY, "--sizes", "1%", "--json", *more]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["choices"][0]
    return found


@pytest.mark.parametrize("disk", [None, "200KB"])
def test_what_is_judged_is_what_runs(
    sparse: Path, disk: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steer(monkeypatch, "streamed")
    with featstore.open(sparse, memory=MEMORY) as g, warnings.catch_warnings():
        warnings.simplefilter("error" if disk is None else "ignore", featstore.PerformanceWarning)
        with loader(g, featstore.Auto(cache=0.01, disk=disk)) as auto:
            n_batches = sum(1 for _ in auto)
            judged, ran = auto.stats()["auto"], auto.stats()["superbatch"]
        with loader(g, featstore.Streamed(cache=0.01, policy="belady", disk=disk)) as plain:
            direct = plain.stats()["superbatch"]
        assert n_batches == 24
        assert g.budget.peak <= g.budget.total
    assert judged["taken"]["strategy"] == "streamed"
    assert judged["superbatch"]["batches"] == ran["batches"]
    # A superbatch whose rows the disk had no room for is read row by row.
    assert judged["superbatch"]["passes"] == ran["passes"] + ran["unpacked"]
    assert abs(direct["batches"] - ran["batches"]) <= 1
    said = explained(sparse, capsys, *(() if disk is None else ("--disk", disk)))["superbatch"]
    assert abs(said["batches"] - ran["batches"]) <= 2, "a trace does not tell how many edges lie on disk"
    for advice in (judged["superbatch"]["advice"], said["advice"]):
        assert (advice is None) == (disk is None), advice
    if disk is None:  # a field many times larger than what a window accesses does not shorten superbatches
        assert ran["passes"] == direct["passes"] == said["passes"] == 1
    else:
        assert ran["passes"] > 2
        assert said["passes"] >= 2
        assert "disk=" in said["advice"]


def test_the_same_strategy_is_taken(sparse: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In little memory, nothing steered: the loader decides, within its budget, as the command says."""
    # Rates at which one strategy is best by far. As they are here, two differ by a hundredth, and each side times its sampling.
    for module in ("strategies.auto", "cli.plan"):
        monkeypatch.setattr(f"featstore.{module}.drive_speed", lambda *_, **__: DriveSpeed(1e4, 1e7, 1e7))
        monkeypatch.setattr(f"featstore.{module}.copy_speed", lambda *_, **__: CopySpeed(8e9, 8e9, 8e9))
    with featstore.open(sparse, memory=MEMORY) as g:
        with loader(g, featstore.Auto(cache=0.01)) as auto:
            found = auto.stats()["auto"]
            assert found["estimates"], found["reason"]
            assert sum(1 for _ in auto) == 24
        assert g.budget.peak <= g.budget.total
    said = explained(sparse, capsys)
    assert (said["taken"]["strategy"], said["taken"]["policy"]) == (found["taken"]["strategy"], found["taken"]["policy"])
