"""Training with features of edges from the command line: what the model computes, its losses, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from featstore.cli.main import main
from featstore.cli.model import load_model
from featstore.cli.sage import SageLayer
from featstore.sampling.batch import Block

pytestmark = pytest.mark.usefixtures("one_thread")

N, E = 400, 4000
OPTIONS = ["--fanouts", "6,4", "--batch-size", "60", "--hidden", "8", "--epochs", "2", "--lr", "0.02", "--memory", "64MiB"]


@pytest.fixture(scope="module")
def told_by_edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset whose classes only the edges into a node tell: rows of nodes are noise."""
    rng = np.random.default_rng(5)
    y, edges, order = rng.integers(0, 2, N), rng.integers(0, N, (2, E)), rng.permutation(N)
    w = (2 * y[edges[1]][:, None] - 1 + rng.standard_normal((E, 2))).astype(np.float32)
    path = tmp_path_factory.mktemp("edges") / "g"
    featstore.OutOfCoreGraph.from_edge_index(
        path,
        edges,
        N,
        features={"x": rng.standard_normal((N, 4)).astype(np.float32)},
        node_data={"y": y, "train_idx": order[:300], "val_idx": order[300:]},
        edge_features={"w": w, "kind": rng.integers(0, 5, E).astype(np.uint8)},
        progress=False,
    ).close()
    return path


def train(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main(["train", str(path), *OPTIONS, *more, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("n_in", "n_out"), [(3, 5), (5, 3)])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_layer_against_plain_loops(n_in: int, n_out: int, weighted: bool) -> None:
    torch.manual_seed(1)
    src, dst = torch.tensor([2, 3, 0, 3, 1]), torch.tensor([0, 0, 1, 1, 1])
    weight = torch.rand(5, dtype=torch.float64) + 0.5 if weighted else None
    block = Block(src, dst, 4, 3, None, weight)  # the last destination has no edges
    h, e = torch.randn(4, n_in, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    layer = SageLayer(n_in, n_out, 2).double()
    both = torch.cat([layer.of_neighbors.weight, layer.of_edges.weight], 1)
    expected = layer.of_self(h[:3]).clone()
    for v in range(2):
        mine = (dst == v).nonzero().flatten()
        share = torch.ones(len(mine), dtype=torch.float64) if weight is None else weight[mine]
        messages = torch.stack([both @ torch.cat([h[src[k]], e[k]]) for k in mine.tolist()])
        expected[v] += (messages * share[:, None]).sum(0) / share.sum()
    torch.testing.assert_close(layer(h, block, e), expected)
    with pytest.raises(ValueError, match="weights for rows of edges"):
        layer(h, block)


def test_edges_tell_the_classes(told_by_edges: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--epochs", "12"]
    without = train(told_by_edges, capsys, *more)["epochs"][-1]["val_accuracy"]
    result = train(told_by_edges, capsys, *more, "--edge-features", "w")
    assert result["epochs"][-1]["val_accuracy"] > 0.85 > 0.7 > without
    assert result["stats"]["edge_features"]["rows_loaded"] > 0


FANOUTS, OTHERS = OPTIONS[:2], OPTIONS[2:]
ONLINE = ["--edge-cache", "20%", "--edge-policy", "lru"]
AHEAD = ["--strategy", "superbatch", "--cache", "10%", "--length", "2", "--edge-cache", "20%"]


@pytest.mark.parametrize(
    ("sampler", "strategies"),
    [
        (FANOUTS, [ONLINE, AHEAD, ["--strategy", "auto", "--cache", "10%", "--edge-cache", "20%"]]),
        ([*FANOUTS, "--sampler", "labor", "--batch-dependency", "3"], [AHEAD]),
        ([*FANOUTS, "--sampler", "epoch"], [AHEAD]),
        (["--sampler", "layer", "--layer-sizes", "90,90"], [AHEAD]),
        ([*FANOUTS, "--sampler", "shadow", "--layers", "3"], [AHEAD]),
    ],
    ids=["neighbor", "labor", "epoch", "layer", "shadow"],
)
def test_the_same_losses_with_caches_of_edges(told_by_edges, capsys, sampler, strategies) -> None:
    losses = []
    for strategy in [[], *strategies]:
        command = ["train", str(told_by_edges), *OTHERS, *sampler, "--edge-features", "w", "kind", *strategy]
        assert main([*command, "--json"]) == 0, capsys.readouterr().err
        losses.append(json.loads(capsys.readouterr().out)["losses"])
    assert len(losses[0]) == 10
    assert all(each == losses[0] for each in losses)


def test_packed(told_by_edges: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack, sampled = str(tmp_path / "pack"), ["--fanouts", "6,4", "--batch-size", "60"]
    assert main(["pack", str(told_by_edges), pack, *sampled, "--epochs", "2", "--edges", "--cache", "10%"]) == 0
    capsys.readouterr()
    options = ["--edge-features", "w"]
    cached = ["--edge-cache", "50%", "--edge-policy", "lru"]
    packed = train(told_by_edges, capsys, *options, "--strategy", "packed", "--pack", pack, "--cache", "10%", *cached)
    assert packed["losses"] == train(told_by_edges, capsys, *options)["losses"]
    assert main(["train", pack, "--hidden", "8", *options]) == 2
    assert "rows of edges stay in its dataset" in capsys.readouterr().err
    assert main(["pack", str(told_by_edges), pack, "--add-layout", "--edges"]) == 2
    assert "--edges goes with new samples" in capsys.readouterr().err
    plain = str(tmp_path / "plain")
    assert main(["pack", str(told_by_edges), plain, *sampled, "--cache", "10%"]) == 0
    capsys.readouterr()
    assert main(["train", str(told_by_edges), *OPTIONS, *options, "--strategy", "packed", "--pack", plain]) == 2
    assert "edges" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--edge-features", "w", "weight"], "edge features: the dataset has no 'weight'; it has 'kind', 'w'"),
        (["--edge-cache", "10%"], "--edge-cache goes with --edge-features"),
        (
            ["--edge-features", "w", "--edge-cache", "10%", "--edge-policy", "lru", "--strategy", "auto"],
            "--edge-policy: goes with --strategy ondemand or packed, not auto",
        ),
    ],
)
def test_what_is_refused(told_by_edges: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    assert main(["train", str(told_by_edges), *OPTIONS, *more]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_saved_model(told_by_edges: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(tmp_path / "model")
    train(told_by_edges, capsys, "--edge-features", "kind", "w", "--save", saved)
    model, sizes = load_model(saved)
    assert (sizes.edge_features, sizes.n_edge, model.n_edge) == (("kind", "w"), 3, 3)
    assert main(["infer", str(told_by_edges), "--model", saved, "--out", "scores"]) == 2
    assert "trained with --edge-features" in capsys.readouterr().err
