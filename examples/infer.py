"""Train a GraphSAGE, compute every node's scores out of core, and train on a feature that is aggregated ahead.

    python examples/infer.py

Everything goes to a temporary folder. The accuracy that the scores give is printed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

import featstore
from featstore.cli.sage import GraphSAGE


def make_graph(path: Path, n: int = 5_000, n_classes: int = 10) -> featstore.OutOfCoreGraph:
    """Make communities whose members mostly point to each other, with noisy features."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, n_classes, n)
    members = [np.flatnonzero(y == c) for c in range(n_classes)]
    lists = [np.where(rng.random(8) < 0.2, rng.integers(0, n, 8), rng.choice(members[c], 8)) for c in y]
    x = rng.standard_normal((n_classes, 32))[y] + 3 * rng.standard_normal((n, 32))
    features, node_data = {"x": x.astype(np.float32)}, {"y": y, "train_idx": np.arange(0, n, 4)}
    indptr = np.arange(0, 8 * n + 1, 8)
    return featstore.OutOfCoreGraph.create(path, indptr, np.concatenate(lists), features, node_data, progress=False)


def train(g: featstore.OutOfCoreGraph, feature: str, n_layers: int) -> GraphSAGE:
    """Return a model that was trained for a few epochs."""
    torch.manual_seed(0)
    model = GraphSAGE(g.features[feature].shape[1], 64, 10, n_layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = featstore.NeighborSampler(g, [5] * n_layers, seed=0)
    with featstore.Loader(g, sampler, g.node_data["train_idx"], batch_size=250, features=feature, labels="y") as loader:
        for _ in range(5):
            for batch in loader:
                loss = torch.nn.functional.cross_entropy(model(batch.x, batch.blocks), batch.y)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
    return model.eval()


def main() -> None:
    """Run it."""
    with tempfile.TemporaryDirectory() as folder, make_graph(Path(folder) / "graph") as g:
        g.aggregate("x", "mean", progress=False)
        for feature, n_layers in (("x", 2), ("x_mean", 1)):
            model = train(g, feature, n_layers)
            scores = featstore.infer(g, model.inference_layers(), feature, f"scores of {feature}", progress=False)
            accuracy = (scores[:].argmax(1) == g.node_data["y"]).float().mean()
            print(f"{feature}, layers: {n_layers}: accuracy at all nodes {accuracy:.1%}")


if __name__ == "__main__":
    main()
