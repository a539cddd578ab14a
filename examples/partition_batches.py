"""Train GraphSAGE in random batches, and in batches from parts of the graph: python examples/partition_batches.py

The graph is made here: communities whose members have ids all over, so that seeds of one community share neighbours. Both
trainings see every seed once an epoch. Batches from parts request fewer rows and mix seeds less, which can cost accuracy.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from train_sage import SAGE

import featstore

CLASSES, DEGREE, MEMBERS = 5, 10, 100  # of a community


def make_graph(path: Path, n: int) -> None:
    """Communities of 100 nodes of all classes; nine of ten edges stay inside, and six in a class. Features tell it weakly."""
    rng = np.random.default_rng(0)
    node_at = rng.permutation(n)  # places are by community, then by class
    place = np.empty(n, np.int64)
    place[node_at] = np.arange(n)
    y = place // (MEMBERS // CLASSES) % CLASSES
    of = np.repeat(place, DEGREE)
    draw = rng.random(len(of))
    width = np.where(draw < 0.6, MEMBERS // CLASSES, np.where(draw < 0.9, MEMBERS, n))
    first = of // width * width
    indices = node_at[first + (np.minimum(width, n - first) * rng.random(len(of))).astype(np.int64)]
    x = (np.eye(CLASSES, 64)[y] + rng.standard_normal((n, 64))).astype(np.float32)
    order = rng.permutation(n)
    data = {"y": y, "train_idx": order[: n // 2], "test_idx": order[n // 2 : n // 2 + n // 10]}
    indptr = np.arange(0, DEGREE * n + 1, DEGREE)
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, data, progress=False).close()


def train(g: featstore.OutOfCoreGraph, batches: featstore.Batches, batch_size: int, epochs: int) -> tuple[float, int, float]:
    """Train a new model; return its test accuracy, the rows that training requested, and its seconds."""
    torch.manual_seed(0)
    sampler = featstore.NeighborSampler(g, [10, 10], seed=0)
    strategy = featstore.Superbatch(cache=0.1)
    model = SAGE(g.features["x"].shape[1], 64, CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    start = time.perf_counter()
    with featstore.Loader(g, sampler, batches, labels="y", strategy=strategy) as loader:  # batches in place of ids
        for _ in range(epochs):
            for batch in loader:
                optimizer.zero_grad()
                cross_entropy(model(batch.x, batch.blocks), batch.y).backward()
                optimizer.step()
        rows = loader.stats()["rows"]
    seconds = time.perf_counter() - start
    model.eval()
    test = g.node_data["test_idx"]
    with torch.no_grad(), featstore.Loader(g, sampler, test, batch_size, labels="y", shuffle=False) as loader:
        right = sum(int((model(batch.x, batch.blocks).argmax(1) == batch.y).sum()) for batch in loader)
    return right / len(test), rows, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare random batches with batches from parts.")
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--parts", type=int, help="(default: one for a hundred nodes)")
    parser.add_argument("--macro", type=int, default=8, help="parts that are mixed; more mix better and save less (default: 8)")
    parser.add_argument("--memory", default="64MiB", help="all that featstore may hold")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_graph(Path(folder) / "graph", options.nodes)
        with featstore.open(Path(folder) / "graph", memory=options.memory) as g:
            seeds = g.node_data["train_idx"]
            n_parts = options.parts or max(1, options.nodes // MEMBERS)
            featstore.partition(g, n_parts, train_idx=seeds, passes=10)  # once: the dataset keeps the parts
            ways: dict[str, featstore.Batches] = {
                "random": featstore.RandomBatches(seeds, options.batch_size),
                "partition": featstore.PartitionBatches(g, seeds, options.batch_size, macro=options.macro),
            }
            for name, batches in ways.items():
                accuracy, rows, seconds = train(g, batches, options.batch_size, options.epochs)
                a_seed = rows / (options.epochs * len(seeds))
                print(f"{name:9}  {a_seed:6.1f} rows a seed, test accuracy {accuracy:.4f}, {seconds:.1f} s")


if __name__ == "__main__":
    main()
