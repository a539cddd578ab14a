"""PyG's models trained from disk: losses of batches in memory, also looking ahead and of packs; accuracy beside PyG's own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import featstore
from tests.support.planted import CLASSES, make_planted
from tests.support.pyg import Data, GATConv, GCNConv, HopSampler, NodeLoader, SAGEConv, data_of, trim_to_layer
from tests.support.sampled import one_in
from tests.system.test_real_graph import DATA as BESIDE_THE_CHECKOUT

from featstore.adapters.pyg import NeighborLoader, Sampler, stores  # isort: skip  # after PyG, which tests.support.pyg imports quietly

DATA = Path(os.environ.get("FEATSTORE_GRAPHS", BESIDE_THE_CHECKOUT))
FANOUTS = [5, 5]
BATCH = 50
EPOCHS = 2
CONVS = [SAGEConv, GATConv, GCNConv]


class Net(torch.nn.Module):
    """Two layers, each over the nodes and edges that it needs."""

    def __init__(self, conv: Any, *widths: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([conv(widths[0], widths[1]), conv(widths[1], widths[2])])

    def forward(self, batch: Any) -> torch.Tensor:
        x, edge_index = batch.x, batch.edge_index
        for i, layer in enumerate(self.layers):
            x, edge_index, _ = trim_to_layer(i, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index)
            x = layer(x.relu() if i else x, edge_index)
        return x[: batch.batch_size]


def trained(conv: Any, epochs: Iterable[Iterable[Any]], widths: tuple[int, ...], seed: int = 0) -> tuple[list[float], Net]:
    """Train on epochs of batches; return the loss of every batch, and the model."""
    torch.manual_seed(seed)
    model = Net(conv, *widths)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for epoch in epochs:
        for batch in epoch:
            loss = torch.nn.functional.cross_entropy(model(batch), batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model


@torch.no_grad()
def accuracy(model: Net, batches: Iterable[Any]) -> float:
    return torch.cat([model(batch).argmax(1) == batch.y[: batch.batch_size] for batch in batches]).double().mean().item()


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The dataset."""
    return make_planted(tmp_path_factory.mktemp("planted") / "g")


def widths_of(planted: SimpleNamespace) -> tuple[int, ...]:
    return planted.x.shape[1], 32, CLASSES


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("conv", one_in(3, CONVS))
def test_losses_are_those_of_tensors_in_memory(planted: SimpleNamespace, tmp_path: Path, conv: Any) -> None:
    x, y = torch.from_numpy(planted.x), torch.from_numpy(planted.y)
    options: dict[str, Any] = {"input_nodes": planted.train_idx, "batch_size": BATCH, "shuffle": True, "seed": 2}

    def from_memory(batch: Any) -> Any:
        batch.x, batch.y = x[batch.n_id], y[batch.n_id]  # PyG's labels: one a node
        return batch

    with featstore.open(planted.path, memory="64MiB") as g:
        plain = {"features": [], "labels": None, "prefetch": 0, "transform": from_memory}
        with NeighborLoader(g, FANOUTS, **options, **plain) as loader:
            want, _ = trained(conv, (loader for _ in range(EPOCHS)), widths_of(planted))
        assert len(want) == EPOCHS * 10
        for strategy in ("ondemand", featstore.Superbatch(cache=0.1, length=4)):
            with NeighborLoader(g, FANOUTS, **options, strategy=strategy) as loader:
                losses, _ = trained(conv, (loader for _ in range(EPOCHS)), widths_of(planted))
            assert losses == want, strategy
        sampler = featstore.NeighborSampler(g, FANOUTS, seed=2, redraw=False)
        pack = tmp_path / "pack"
        featstore.sample_offline(g, sampler, planted.train_idx, BATCH, EPOCHS, path=pack, seed=2, progress=False).close()
        with NeighborLoader(g, strategy=featstore.Packed(pack, cache=0.1)) as loader:
            losses, _ = trained(conv, (loader for _ in range(EPOCHS)), widths_of(planted))
        assert losses == want


@pytest.mark.parametrize("conv", one_in(3, CONVS))
def test_accuracy_is_that_of_pyg_in_memory(planted: SimpleNamespace, conv: Any) -> None:
    """Means of three seeds; the other side samples with an implementation of its own."""
    with featstore.open(planted.path, memory="64MiB") as g:
        indptr, indices = g.topology.indptr.copy(), stores(g)[1][None, "csc"][0].numpy()
        data = data_of(indptr, indices)
        data.x, data.y = torch.from_numpy(planted.x), torch.from_numpy(planted.y)
        train_idx, test_idx = torch.from_numpy(planted.train_idx), torch.from_numpy(planted.test_idx)
        ours, theirs = [], []
        for seed in range(3):
            test = NodeLoader(data, HopSampler(indptr, indices, [-1, -1]), test_idx, batch_size=250)
            common: dict[str, Any] = {"batch_size": BATCH, "shuffle": True}
            with NeighborLoader(g, FANOUTS, train_idx, strategy="superbatch", seed=seed, **common) as loader:
                ours.append(accuracy(trained(conv, [loader] * 3, widths_of(planted), seed)[1], test))
            its = NodeLoader(data, HopSampler(indptr, indices, FANOUTS), train_idx, **common)
            theirs.append(accuracy(trained(conv, [its] * 3, widths_of(planted), seed)[1], test))
    assert np.mean(ours) > 0.75  # by guessing 0.2, without edges 0.49
    assert abs(np.mean(ours) - np.mean(theirs)) < 0.02


@pytest.mark.stress
@pytest.mark.skipif(not (DATA / "linux414-calls.npz").is_file(), reason=f"no linux414-calls in {DATA} ($FEATSTORE_GRAPHS)")
@pytest.mark.parametrize("conv", CONVS)
def test_accuracy_on_a_real_graph(conv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """linux414-calls in 400 MB, beside PyG over a Data in memory: means of three seeds, within half a point."""
    monkeypatch.syspath_prepend(os.fspath(Path(__file__).resolve().parents[2] / "examples"))
    import real_graph

    path = tmp_path / "linux"
    real_graph.build(DATA, "linux414-calls", path)
    with featstore.open(path) as whole, featstore.open(path, memory="400MB") as g:
        data = Data(x=whole.features["x"][:], y=whole.node_data["y"], edge_index=torch.stack(stores(whole)[1].coo()[:2]))
        widths = data.x.shape[1], 64, int(data.y.max()) + 1
        train_idx, test_idx = whole.node_data["train_idx"], whole.node_data["test_idx"]
        sampler = Sampler(featstore.NeighborSampler(whole, [10, 10], redraw=False))
        ours, theirs = [], []
        for seed in range(3):
            with NeighborLoader(g, [10, 10], train_idx, batch_size=1000, shuffle=True, seed=seed, strategy="streamed") as loader:
                _, mine = trained(conv, [loader], widths, seed)
            _, its = trained(conv, [NodeLoader(data, sampler, train_idx, batch_size=1000, shuffle=True)], widths, seed)
            torch.manual_seed(seed)
            ours.append(accuracy(mine, NodeLoader(data, sampler, test_idx, batch_size=1000)))
            theirs.append(accuracy(its, NodeLoader(data, sampler, test_idx, batch_size=1000)))
        assert g.budget.peak <= 400_000_000
    print(f"{conv.__name__}: {np.mean(ours):.4f}, PyG in memory {np.mean(theirs):.4f}")
    assert abs(np.mean(ours) - np.mean(theirs)) <= 0.005
