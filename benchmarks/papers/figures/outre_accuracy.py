"""Accuracy of partition_batches: the same model trained in random batches, in partition batches, with LABOR, and with a history.

Each way is trained for two epochs, once a seed, which gives weights, order and draws. Accuracy is that of the
test nodes after the last epoch, always sampled as :class:`~featstore.NeighborSampler` does, so that only training differs. What
the ways save is the rows that training requested.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import featstore
from benchmarks.tools.harness import Report
from featstore.cli.sage import GraphSAGE
from featstore.cli.splits import split_seeds
from featstore.cli.training import evaluate

FANOUTS = [10, 10]
BATCH_SIZE, EPOCHS = 1000, 2
LEARNING_RATE = 0.003
REFERENCE = "random batches"
WITHIN = 0.005  # of the reference's accuracy
PARTS = {"of 500 seeds": (500, 3), "of 50 seeds": (50, 10)}  # name of kept parts: seeds a part, passes
LARGE, SMALL = PARTS
# share: of the parts that a macro-batch has, None the default; labor: the sampler's options; history: its options after dim
WAYS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "parts of 500 seeds, macro of 2 batches": {"parts": LARGE, "share": 4 / 794},
    "parts of 500 seeds, macro of 32 batches": {"parts": LARGE, "share": 64 / 794},
    "parts of 500 seeds, macro of 64 batches": {"parts": LARGE, "share": 128 / 794},
    "parts of 500 seeds, macro of 128 batches": {"parts": LARGE, "share": 256 / 794},
    "parts of 50 seeds, macro of 2 batches": {"parts": SMALL, "share": 4 / 794},
    "parts of 50 seeds, macro of 16 batches": {"parts": SMALL, "share": 32 / 794},
    "default macro": {"parts": LARGE, "share": None},
    "LABOR": {"labor": {}},
    "LABOR, dependency 64": {"labor": {"batch_dependency": 64}},
    "LABOR, dependency 256": {"labor": {"batch_dependency": 256}},
    "default macro, LABOR": {"parts": LARGE, "share": None, "labor": {}},
    "parts of 500 seeds, macro of 64 batches, LABOR": {"parts": LARGE, "share": 128 / 794, "labor": {}},
}

Int64s = npt.NDArray[np.int64]


def make_dataset(
    path: Path, indptr: Int64s, ids: npt.NDArray[np.int32], z: Any, blocks: Iterator[npt.NDArray[np.float32]]
) -> None:
    """Create the dataset with its parts, unless it is there."""
    if not path.exists():
        data = {"y": z["y"].astype(np.int64)} | {name: z[name].astype(bool) for name in ("train_mask", "test_mask")}
        features = {"x": (tuple(int(n) for n in z["x_shape"]), np.float32, blocks)}
        featstore.OutOfCoreGraph.create(path, indptr, ids, features, data, progress=False).close()
    with featstore.open(path) as g:
        seeds = split_seeds(g, "train", "y")
        assert seeds is not None
        for name, (n_seeds, passes) in PARTS.items():
            kept = name.replace(" ", "-")
            if kept not in g.parts():
                featstore.partition(g, len(seeds) // n_seeds, train_idx=seeds, passes=passes, name=kept, progress=False)


def one(job: dict[str, Any]) -> dict[str, Any]:
    """Train once; return the accuracy of the test nodes and the rows that training requested."""
    way, seed = job["way"], job["seed"]
    with featstore.open(job["dataset"]) as g:
        g.cache_neighbors()
        g.cache("x", 1.0)
        seeds, test = split_seeds(g, "train", "y"), split_seeds(g, "test", "y")
        assert seeds is not None
        assert test is not None
        plain = featstore.NeighborSampler(g, FANOUTS, seed=seed)
        sampler = featstore.LaborSampler(g, FANOUTS, seed=seed, **way["labor"]) if "labor" in way else plain
        batches: Any = featstore.RandomBatches(seeds, BATCH_SIZE, seed=seed)
        if "parts" in way:
            kept = g.parts()[way["parts"].replace(" ", "-")]
            macro = None if way["share"] is None else max(1, round(way["share"] * kept.n_parts))
            batches = featstore.PartitionBatches(g, seeds, BATCH_SIZE, kept, macro, seed=seed)
        torch.manual_seed(seed)
        n_classes = int(g.node_data["y"].max()) + 1
        model = GraphSAGE(g.features["x"].shape[1], job["hidden"], n_classes, len(FANOUTS))
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        history = featstore.History(job["hidden"], *way["history"]) if "history" in way else None
        with featstore.Loader(g, sampler, batches, labels="y", history=history) as loader:
            for _ in range(EPOCHS):
                for batch in loader:
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(batch.x, batch.blocks, batch.history), batch.y).backward()
                    optimizer.step()
            rows = loader.stats()["rows"]
        with featstore.Loader(g, plain, test, BATCH_SIZE, labels="y", shuffle=False) as loader:
            return {"accuracy": evaluate(model, loader), "rows": rows, "macro": getattr(batches, "macro", None)}


def train_ways(args: argparse.Namespace, ways: dict[str, dict[str, Any]], dataset: Path) -> dict[str, list[dict[str, Any]]]:
    """Train every way once a seed; return what :func:`one` returns of each."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    n_seeds = 1 if args.tiny else args.seeds
    for seed in range(args.first_seed, args.first_seed + n_seeds):  # a run that is stopped has whole seeds
        for name, way in ways.items():
            job = {"dataset": dataset, "way": way, "seed": seed, "hidden": args.hidden}
            found[name].append(one(job))
            print(f"seed {seed}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return found


def accuracy(args: argparse.Namespace, report: Report, graph: str, dataset: Path) -> None:
    """Train every way once a seed; print accuracy and rows beside those of random batches, and plot one against the other."""
    found, points = train_ways(args, WAYS, dataset), {}
    for name, runs in found.items():
        theirs = found[REFERENCE]
        less = [a["accuracy"] - b["accuracy"] for a, b in zip(runs, theirs, strict=True)]
        rows = statistics.mean(a["rows"] / b["rows"] for a, b in zip(runs, theirs, strict=True))
        points[name] = (1 - rows, 100 * statistics.mean(less))
        report.figure(
            f"{graph}, accuracy of {len(runs)} seeds, {name}",
            [each["accuracy"] for each in runs],
            "share of the test nodes",
            reference=None if name == REFERENCE else f"{REFERENCE}, in points of accuracy",
            ratio=None if name == REFERENCE else points[name][1],
            target=f">= {-100 * WITHIN}" if not args.tiny and ("default" in name or name.startswith("LABOR")) else None,
            rows=[each["rows"] for each in runs],
            rows_ratio=round(rows, 4),
            macro=runs[0]["macro"],
            less=[round(100 * each, 2) for each in less],
        )
    if args.plot is not None:
        _plot(points, args.plot)


def _plot(points: dict[str, tuple[float, float]], path: Path) -> None:
    """Plot points of accuracy against the share of the rows that is saved."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, (saved, points_less) in points.items():
        axes.plot(100 * saved, points_less, "s" if "LABOR" in name else "o")
        axes.annotate(name, (100 * saved, points_less), fontsize=7, xytext=(4, 4), textcoords="offset points")
    axes.axhline(-100 * WITHIN, linestyle=":", color="grey")
    axes.set(xlabel="rows saved, % of those of random batches", ylabel="accuracy, points against random batches")
    figure.savefig(path, dpi=120)
    plt.close(figure)
