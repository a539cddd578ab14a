"""Aggregating ahead (pagraph, figures 11 and 12): the first layer's means made once, against sampling a hop more for them.

Two GraphSAGEs of two layers. One samples two hops of ``x``. The other takes ``x`` and ``x_mean``, the mean over all in-neighbours
(:meth:`g.aggregate`), so that its first layer needs no hop, and samples one (PaGraph, section 5.1: +PP of figure 11). Accuracy
is that of the test nodes, sampled as in training.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import featstore
from featstore.cli.sage import GraphSAGE
from featstore.cli.splits import split_seeds

FANOUT, LEARNING_RATE = 10, 0.003
HOP_MORE, MEANS = "two hops of x", "one hop of x and x_mean"
WAYS: dict[str, tuple[int, list[str]]] = {HOP_MORE: (2, ["x"]), MEANS: (1, ["x", "x_mean"])}

Int64s = npt.NDArray[np.int64]


class MeansAhead(torch.nn.Module):
    """A GraphSAGE whose first layer has its nodes' means already: rows are ``x`` and ``x_mean`` beside each other."""

    def __init__(self, n_in: int, n_hidden: int, n_classes: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(n_in, n_hidden)
        self.rest = GraphSAGE(n_hidden, n_hidden, n_classes, 1)

    def forward(self, x: torch.Tensor, blocks: Any) -> torch.Tensor:
        """Return the scores of a batch's seeds."""
        scores: torch.Tensor = self.rest(torch.relu(self.first(x)), blocks)
        return scores


def make_dataset(
    path: Path, indptr: Int64s, ids: npt.NDArray[np.int32], z: Any, blocks: Iterator[npt.NDArray[np.float32]]
) -> float:
    """Create the dataset with ``x_mean``; return the seconds that the means took."""
    data = {"y": z["y"].astype(np.int64)} | {name: z[name].astype(bool) for name in ("train_mask", "test_mask")}
    features = {"x": (tuple(int(n) for n in z["x_shape"]), np.float32, blocks)}
    featstore.OutOfCoreGraph.create(path, indptr, ids, features, data, progress=False).close()
    with featstore.open(path) as g:
        begin = time.perf_counter()
        g.aggregate("x", op="mean", hops=1, name="x_mean", progress=False)
        return time.perf_counter() - begin


def rows_of(batch: featstore.MiniBatch) -> torch.Tensor:
    """Return a batch's features beside each other."""
    return torch.cat(list(batch.features.values()), 1)


def one(path: Path, way: str, seed: int, args: argparse.Namespace, **options: Any) -> dict[str, Any]:
    """Train once; return the accuracy of the test nodes, and what an epoch of training requested and took.

    ``options`` go to the loader; ``device_cache`` is a share of the rows.
    """
    hops, names = WAYS[way]
    batch_size, n_epochs = (100, 1) if args.tiny else (1000, args.epochs)
    with featstore.open(path) as g:
        g.cache_neighbors()
        seeds, test = split_seeds(g, "train", "y"), split_seeds(g, "test", "y")
        assert seeds is not None
        assert test is not None
        sampler = featstore.NeighborSampler(g, [FANOUT] * hops, seed=seed)
        torch.manual_seed(seed)
        n_classes, width = int(g.node_data["y"].max()) + 1, g.features["x"].shape[1]
        means = MeansAhead(2 * width, args.hidden, n_classes)
        model: Any = means if way == MEANS else GraphSAGE(width, args.hidden, n_classes, hops)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        begin, wait_s = time.perf_counter(), 0.0
        options |= {"seed": seed, "strategy": featstore.OnDemand(cache=None)}
        with featstore.Loader(g, sampler, seeds, batch_size, names, **options) as loader:
            for _ in range(n_epochs):
                asked = time.perf_counter()
                for batch in loader:
                    wait_s += time.perf_counter() - asked
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(rows_of(batch), batch.blocks), batch.y).backward()
                    optimizer.step()
                    asked = time.perf_counter()
            stats = loader.stats()
        epoch_s = (time.perf_counter() - begin) / n_epochs
        model.eval()
        right = 0
        with featstore.Loader(g, sampler, test, batch_size, names, shuffle=False) as loader, torch.no_grad():
            for batch in loader:
                right += int((model(rows_of(batch), batch.blocks).argmax(1) == batch.y).sum())
        return {
            "accuracy": right / len(test),
            "rows": stats["rows"] / n_epochs,
            "bytes": stats["rows"] / n_epochs * 4 * width,
            "bytes_read": stats["bytes_read"] / n_epochs,
            "epoch_s": epoch_s,
            "wait_s": wait_s / n_epochs,
            "loading_s": sum(stats["seconds"].get(stage, 0.0) for stage in ("sample", "gather")) / n_epochs,
        }
