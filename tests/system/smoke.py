"""An installed package in a few seconds: create, index, train, verify, the command line; run on each wheel of a release.

It uses nothing but the package and what that depends on: no pytest, no file of the clone, no compiler.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import featstore

N, DIM, CLASSES = 2_000, 24, 4


def command(*arguments: str) -> str:
    """Run ``featstore …`` as installed, which must succeed; return what it printed."""
    program = Path(sys.executable).with_name("featstore")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Create a dataset whose classes can be learnt from the features; return features and classes."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, N)
    x = (np.eye(CLASSES, DIM)[y] + 0.3 * rng.standard_normal((N, DIM))).astype(np.float32)
    data = {"y": y, "train_idx": rng.permutation(N)[:1_000]}
    edges = rng.integers(0, N, (2, 10 * N))
    featstore.OutOfCoreGraph.from_edge_index(path, edges, N, {"x": x}, data, progress=False).close()
    return x, y


def index(g: featstore.OutOfCoreGraph, x: np.ndarray) -> None:
    """Compare rows with those that were stored."""
    ids = np.random.default_rng(1).integers(-N, N, 3_000)
    assert np.array_equal(g.features["x"][ids].numpy(), x[ids])
    assert np.array_equal(g.features["x"][5:99:7, 3].numpy(), x[5:99:7, 3])


def train(g: featstore.OutOfCoreGraph, strategy: object) -> list[float]:
    """Train a linear model on seeds' rows and their neighbours' means; return the losses."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2 * DIM, CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    sampler = featstore.NeighborSampler(g, fanouts=[5], seed=0)
    losses = []
    with featstore.Loader(
        g, sampler, g.node_data["train_idx"], batch_size=100, features=["x"], labels="y", strategy=strategy
    ) as loader:
        for _ in range(2):
            for batch in loader:
                (block,) = batch.blocks
                total = batch.x.new_zeros(block.n_dst, DIM).index_add_(0, block.dst, batch.x[block.src])
                degree = torch.bincount(block.dst, minlength=block.n_dst).clamp_(min=1)
                scores = model(torch.cat([batch.x[: block.n_dst], total / degree[:, None]], dim=1))
                loss = torch.nn.functional.cross_entropy(scores, batch.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return losses


def main() -> None:
    """Do all of it in a folder that is removed."""
    release = importlib.metadata.version("featstore")
    assert featstore.__version__ == release
    assert command("--version") == f"featstore {release}\n"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "graph")
        x, _ = make(path)
        with featstore.open(path, memory="64MiB") as g:
            index(g, x)
            losses = train(g, featstore.OnDemand(cache=0.1, policy="sieve"))
            assert losses[-1] < 0.5 * losses[0], losses
            assert train(g, featstore.Streamed(cache=0.1)) == losses
            reader = g.features["x"].stats()["backend"]
        command("verify", path)
        command("doctor", "--json", "--no-rates", path)
    print(f"featstore {release} works: {os.path.dirname(featstore.__file__)}, reads by {reader}")


if __name__ == "__main__":
    main()
