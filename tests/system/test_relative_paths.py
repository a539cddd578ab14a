"""Relative paths mean what they meant when they were given, wherever the process goes meanwhile."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cli.main import main
from featstore.plan.trace import Trace
from tests.support.graphs import skewed_dataset
from tests.support.loaders import make_loader
from tests.support.sampled import covering

N, BATCH = 900, 25
STRATEGIES: dict[str, dict[str, Any]] = {
    "superbatch": {"strategy": "superbatch", "length": 3},
    "serial": {"strategy": "ginex", "length": 3},
    "streamed": {"strategy": "streamed", "length": 3},
    "streamed, its length chosen": {"strategy": "streamed"},
    "auto": {"strategy": "auto"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return skewed_dataset(tmp_path_factory.mktemp("made") / "g", N, 9)


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a dataset ``g``; beside it an empty one, ``elsewhere``."""
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(made, home / "g")
    monkeypatch.chdir(home)
    return home


def go(home: Path) -> None:
    os.chdir(home.parent / "elsewhere")


def run_epochs(loader: featstore.Loader, x: torch.Tensor, home: Path) -> None:
    """Run two epochs, and leave the directory in the first one's third batch."""
    for epoch in range(2):
        n = 0
        for batch in loader:
            assert torch.equal(batch.x, x[batch.input_ids])
            n += 1
            if (epoch, n) == (0, 3):
                go(home)
        assert n == len(loader) == 12


def rows(g: featstore.OutOfCoreGraph) -> torch.Tensor:
    x = g.features["x"][:]
    assert isinstance(x, torch.Tensor)
    return x


@pytest.mark.parametrize(("strategy", "run_dir"), covering(STRATEGIES, [None, "runs", Path("there/runs")]))
def test_run_files_stay_where_they_were_asked_for(home: Path, strategy: str, run_dir: str | Path | None) -> None:
    where = Path("g.runs" if run_dir is None else run_dir)
    where.parent.mkdir(exist_ok=True)
    with featstore.open("g", memory="64MB", threads=2) as g:
        x, sampler = rows(g), featstore.NeighborSampler(g, [4, 3], seed=1)
        options = {"cache": 0.1, **STRATEGIES[strategy], **({} if run_dir is None else {"run_dir": run_dir})}
        with make_loader(g, sampler, g.node_data["train_idx"], BATCH, **options) as loader:
            run_epochs(loader, x, home)
            if strategy != "auto":
                assert not os.path.isabs(where)
                next(batches := iter(loader))
                assert os.listdir(home / where)
                batches.close()  # type: ignore[attr-defined]
    assert not (home / where).exists()
    assert not os.listdir(home.parent / "elsewhere")


def test_a_loader_made_before_keeps_its_directory(home: Path) -> None:
    """The directory is that of the moment when the loader is made, not of its first epoch."""
    with featstore.open("g", memory="64MB") as g:
        sampler = featstore.NeighborSampler(g, [4, 3], seed=1)
        options: dict[str, Any] = {"strategy": "superbatch", "length": 3, "run_dir": "runs"}
        with make_loader(g, sampler, g.node_data["train_idx"], BATCH, **options) as loader:
            go(home)
            for _ in zip(range(2), loader, strict=False):
                assert os.listdir(home / "runs")
    assert not os.listdir(".")


def test_packs_of_relative_paths(home: Path) -> None:
    with featstore.open("g", memory="64MB") as g:
        x, sampler = rows(g), featstore.NeighborSampler(g, [4, 3], seed=1)
        featstore.sample_offline(g, sampler, g.node_data["train_idx"], BATCH, path="g.pack", progress=False).close()
        loader = featstore.Loader(g, strategy=featstore.Packed("g.pack", cache=0.1))
        with loader:
            run_epochs(loader, x, home)
    os.chdir(home)
    with featstore.PackedGraph("g.pack", memory="64MB") as there, featstore.Loader(there, strategy="packed") as loader:
        run_epochs(loader, x, home)
    assert not os.listdir(home.parent / "elsewhere")
    assert sorted(os.listdir(home)) == ["g", "g.pack"]


def test_a_tilde_is_the_home_directory_of_python(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    go(home)
    np.save(home / "x.npy", x := np.eye(4, dtype=np.float32))
    with featstore.create("~/m", "~/x.npy", node_data={"y": Path("~/x.npy")}, progress=False) as made:
        assert torch.equal(made["x"][:], torch.from_numpy(x))
    np.save(home / "edges.npy", np.array([[0, 1], [1, 2]]))
    for k in range(2):
        (home / f"drive{k}").mkdir()
    stripes, options = ["~/drive0", Path("~/drive1")], {"topology": "chunked", "chunk_bytes": 4096}
    from_edges = featstore.OutOfCoreGraph.from_edge_index
    from_edges("~/e", "~/edges.npy", 4, progress=False, stripes=stripes, **options).close()
    assert featstore.convert("~/e", "csc", progress=False)
    assert featstore.convert("~/e", "chunked", stripes=stripes, progress=False)
    with featstore.open("~/g", memory="64MB") as g:
        assert g.path == str(home / "g")
        x_of_g, sampler = rows(g), featstore.NeighborSampler(g, [4, 3], seed=1)
        seeds = g.node_data["train_idx"]
        featstore.sample_offline(g, sampler, seeds, BATCH, path="~/p", progress=False).close()
        with featstore.Loader(g, strategy=featstore.Packed("~/p", cache=0.1)) as loader:
            run_epochs(loader, x_of_g, home)
        assert featstore.EpochSampler(g, [4], run_dir="~/runs").run_dir == str(home / "runs")
        with featstore.Loader(g, sampler, seeds, BATCH, strategy=featstore.Superbatch(length=3, run_dir="~/runs")) as loader:
            next(batches := iter(loader))
            assert os.listdir(home / "runs")
            batches.close()  # type: ignore[attr-defined]
        Trace([torch.tensor([1, 2])], N).save("~/trace")
        trace = Trace.open("~/trace")
        assert len(trace) == 1
        trace.close()
    featstore.PackedGraph("~/p", memory="64MB").close()
    assert not os.listdir(".")


def test_a_tilde_is_the_home_directory_of_the_command_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the shell leaves it, behind an equals sign."""
    monkeypatch.setenv("HOME", str(home))
    go(home)
    np.save(home / "parts.npy", np.zeros(N, np.int64))
    np.save(home / "edges.npy", np.array([[0, 1], [1, 2]]))
    small = ["--batch-size=100", "--fanouts=3"]
    for line in (
        ["create", "~/c", "--edge-index=~/edges.npy", "--num-nodes", "900", "--node-data", "parts=~/parts.npy"],
        ["partition", "~/g", "--array=~/parts.npy"],
        ["plan", "~/g", "--simulate", *small, "--save-trace=~/trace"],
        ["plan", "~/g", "--simulate", "--trace=~/trace"],
        ["pack", "~/g", "~/p", *small],
        ["train", "~/p", "--epochs=1", "--hidden=4", "--save=~/model"],
        ["train", "~/g", "--strategy=packed", "--pack=~/p", "--epochs=1", "--hidden=4"],
        ["train", "~/g", *small, "--strategy=superbatch", "--run-dir=~/runs", "--epochs=1", "--hidden=4"],
        ["infer", "~/g", "--model=~/model", "--feature=x"],
        ["verify", "~/p"],
        ["info", "~/g"],
    ):
        assert main([*line, "--json"]) == 0, line
    assert not os.listdir(".")
    assert {"c", "p", "trace", "model"} <= set(os.listdir(home))
