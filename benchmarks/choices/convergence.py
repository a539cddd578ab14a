"""Accuracy at convergence, and what it took: random batches, batches of few parts, and the frozen samples of a pack.

    python -m benchmarks.choices.convergence                                    # a planted graph, partition batches
    python -m benchmarks.choices.convergence --graphs DIR --graph linux414-calls --frozen

A GraphSAGE trains until the accuracy of the validation nodes has not risen for ``--patience`` epochs, ``--epochs`` at most, once
a seed. It then has the weights of the best of its epochs, and the test nodes are counted with these. Rows are those of the first
epoch: requested, and loaded by Belady's policy with a tenth of the rows in memory. ``epochs to accuracy`` are those until the
validation nodes come within half a point of the best epoch of random batches, ``rows to it`` the rows that these load, beside
random batches (OUTRE's figure 4, DiskGNN's figure 8, in rows in place of this machine's seconds, which stand beside it). With
``--frozen`` the samples of one epoch, kept by ``featstore.sample_offline``, are trained on again and again (DiskGNN's tables 5
and 6). Evaluation always samples anew, as random batches do, so that only training differs.

The planted graph has communities of about 300 nodes with shuffled ids, each of one class. ego-twitter has neither features nor
labels: its features are random numbers, and a node's class is the greatest of their means over two hops.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import featstore
from benchmarks.tools import communities
from benchmarks.tools.harness import Report, arguments, main, scratch
from benchmarks.tools.realgraphs import wanted
from featstore.cli.sage import GraphSAGE
from featstore.cli.splits import split_seeds
from featstore.cli.training import evaluate
from featstore.plan.trace import Trace

PLANTED = "planted communities"
GRAPHS = {PLANTED: 200, "ego-twitter": 200, "linux414-calls": 1000}  # seeds a batch
CLASSES, NOISE = 8, 4.0
LEARNING_RATE = 0.003
WITHIN = 0.005  # of the accuracy of random batches
CACHED = 10  # one row of so many, where rows loaded are counted
REFERENCE = "random batches"

Int64s = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Way:
    """Way to make batches: parts of so many batches of seeds, a macro-batch of so many (0: by default); or frozen samples."""

    part: float = 0.0
    macro: float = 0.0
    frozen: bool = False


HALF = float("inf")  # of all parts
WAYS = {
    REFERENCE: Way(),
    "default macro": Way(0.025),  # one batch, of forty parts
    "parts of 1/2 batch, half of them": Way(0.5, HALF),
    "parts of 1/2 batch, macro of 1": Way(0.5, 1),
    "parts of 1/2 batch, macro of 2": Way(0.5, 2),
    "parts of 1/2 batch, macro of 8": Way(0.5, 8),
    "parts of 1/2 batch, macro of 32": Way(0.5, 32),
    "parts of 1/5 batch, macro of 1": Way(0.2, 1),
    "parts of 1/10 batch, macro of 1": Way(0.1, 1),
    "parts of 1/20 batch, macro of 1": Way(0.05, 1),  # twenty of them, as OUTRE has
    "parts of 1/20 batch, macro of 4": Way(0.05, 4),
}
FROZEN = {"frozen samples": Way(frozen=True)}


# -- graphs --------------------------------------------------------------------------------------------------------------------


def splits(rng: np.random.Generator, n: int) -> Arrays:
    """Return a train, a validation and a test mask: 60, 20 and 20 % of the nodes."""
    which = rng.permutation(np.arange(n) % 5)
    return {"train_mask": which < 3, "val_mask": which == 3, "test_mask": which == 4}


def planted(n: int) -> tuple[Int64s, Int64s, npt.NDArray[np.float32], Arrays]:
    """Communities of about 300 nodes: four of five neighbours are of a node's own; noisy features tell the community's class."""
    rng = np.random.default_rng(0)
    community, indptr, ids = communities.draw(rng, n)
    y = rng.integers(0, CLASSES, community.max() + 1)[community]
    x = rng.standard_normal((n, 64)).astype(np.float32)
    x[np.arange(n), y] += 2 / NOISE
    return indptr, ids, x, {"y": y, **splits(rng, n)}


def smoothed(indptr: Int64s, ids: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float32], Arrays]:
    """Random features of a graph that has none; a node's class is the greatest of their means over two hops."""
    rng, n = np.random.default_rng(0), len(indptr) - 1
    x = rng.standard_normal((n, CLASSES)).astype(np.float32)
    mean, degrees = torch.from_numpy(x), np.diff(indptr)
    of = torch.from_numpy(np.repeat(np.arange(n), degrees))
    for _ in range(2):
        total = torch.zeros_like(mean).index_add_(0, of, mean[torch.from_numpy(ids.astype(np.int64))])
        mean = total / torch.from_numpy(np.maximum(degrees, 1))[:, None]
        mean = mean / mean.std()
    return x, {"y": mean.argmax(1).numpy(), **splits(rng, n)}


def principal(blocks: Iterator[npt.NDArray[np.float32]], dim: int) -> npt.NDArray[np.float32]:
    """Return the ``dim`` directions along which features differ most, float32 [columns, dim]."""
    n, total, product = 0, np.float32(0), np.float32(0)
    for block in blocks:
        n, total, product = n + len(block), total + block.sum(0), product + block.T @ block
    mean = total / n
    return np.linalg.eigh(product / n - np.outer(mean, mean))[1][:, -dim:].astype(np.float32)


def make(args: argparse.Namespace, name: str, path: Path) -> None:
    """Create a labelled graph, unless it is there."""
    if path.exists():
        return
    if name == PLANTED:
        indptr, ids, x, data = planted(6_000 if args.tiny else args.nodes)
        features: Any = x
    else:
        real = wanted(args.graphs, name, f"--graph {name}")
        indptr, ids, z = real.load(name)
        if "x_shape" in z:
            n, n_columns = (int(k) for k in z["x_shape"])
            dim, blocks = n_columns, real.feature_blocks(z)
            if args.dim:
                dim, columns = args.dim, principal(real.feature_blocks(z), args.dim)
                blocks = (block @ columns for block in blocks)
            features = ((n, dim), np.float32, blocks)
            data = {"y": z["y"].astype(np.int64)} | {
                f"{each}_mask": z[f"{each}_mask"].astype(bool) for each in ("train", "val", "test")
            }
        else:
            features, data = smoothed(indptr, ids)
    featstore.OutOfCoreGraph.create(path, indptr, ids, {"x": features}, data, progress=False).close()


# -- training ------------------------------------------------------------------------------------------------------------------


def some(seeds: torch.Tensor | None, most: int) -> torch.Tensor:
    """Return ``most`` of the seeds, always the same."""
    assert seeds is not None
    return seeds[torch.from_numpy(np.random.default_rng(0).permutation(len(seeds))[:most])].sort().values


def make_batches(g: Any, way: Way, seeds: torch.Tensor, batch_size: int, seed: int) -> Any:
    """Return the batches of a way; parts are kept in the dataset, once."""
    if not way.part:
        return featstore.RandomBatches(seeds, batch_size, seed=seed)
    n_parts = max(2, round(len(seeds) / (way.part * batch_size)))
    name = f"parts-{n_parts}"
    if name not in g.parts():
        featstore.partition(g, n_parts, train_idx=seeds, passes=10, name=name, progress=False)
    macro: Any = None
    if way.macro:
        macro = -(-n_parts // 2) if way.macro == HALF else max(1, round(way.macro / way.part))
    return featstore.PartitionBatches(g, seeds, batch_size, name, macro, seed=seed)


def train(args: argparse.Namespace, dataset: Path, way: Way, batch_size: int, seed: int) -> dict[str, Any]:
    """Train to convergence; return the accuracies of the validation nodes by epoch, that of the test nodes, rows and seconds."""
    fanouts = [int(each) for each in args.fanouts.split(",")]
    pack = dataset.parent / f"{dataset.name}.pack"
    with featstore.open(dataset) as g:
        g.cache_neighbors()
        seeds = some(split_seeds(g, "train", "y"), args.train_nodes)
        val, test = (some(split_seeds(g, split, "y"), args.test_nodes) for split in ("val", "test"))
        batches = make_batches(g, way, seeds, batch_size, seed)
        sampler = featstore.NeighborSampler(g, fanouts, seed=seed)
        given: dict[str, Any] = {"sampler": sampler, "seeds": batches}
        if way.frozen:
            featstore.sample_offline(g, sampler, batches, path=pack, progress=False).close()
            given = {"strategy": featstore.Packed(pack, cache=1.0)}
        else:
            g.cache("x", 1.0)
        torch.manual_seed(seed)
        model = GraphSAGE(g.features["x"].shape[1], args.hidden, int(g.node_data["y"].max()) + 1, len(fanouts))
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        curve: list[float] = []
        seconds: list[float] = []
        trace: list[npt.NDArray[Any]] = []
        best: dict[str, Any] = {}
        with featstore.Loader(g, **given, labels="y") as loader:
            while len(curve) < args.epochs and len(curve) - 1 - (np.argmax(curve) if curve else 0) < args.patience:
                begin = time.perf_counter()
                for batch in loader:
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(batch.x.float(), batch.blocks), batch.y).backward()
                    optimizer.step()
                    if not curve:
                        trace.append(batch.input_ids.numpy().astype(np.int32))
                seconds.append(time.perf_counter() - begin)
                with featstore.Loader(g, sampler, val, 1000, labels="y", shuffle=False, strategy="ondemand") as held_out:
                    curve.append(evaluate(model, held_out))
                if curve[-1] == max(curve):
                    best = copy.deepcopy(model.state_dict())
        model.load_state_dict(best)
        with featstore.Loader(g, sampler, test, 1000, labels="y", shuffle=False, strategy="ondemand") as held_out:
            accuracy = evaluate(model, held_out)
        n = g.num_nodes
    if way.frozen:
        shutil.rmtree(pack)
    loaded = featstore.simulate(Trace([np.unique(ids) for ids in trace], n), max(1, n // CACHED), "belady")
    return {
        "accuracy": accuracy,
        "validation": [round(each, 4) for each in curve],
        "seconds": [round(each, 2) for each in seconds],
        "rows": sum(map(len, trace)),
        "rows_loaded": int(loaded.sum()),
        "parts": len(getattr(batches, "part_numbers", ())),
        "macro": getattr(batches, "macro", None),
    }


def epochs_to(run: dict[str, Any], target: float) -> int | None:
    """Return after how many epochs the validation nodes reach an accuracy; None where they never do."""
    return next((epoch for epoch, each in enumerate(run["validation"], 1) if each >= target), None)


# -- figures -------------------------------------------------------------------------------------------------------------------

HEADS = ("rows", "loaded", "test %", "points", "best", "epochs to it", "s to it", "rows to it")
WIDTHS = (7, 8, 8, 8, 6, 14, 10, 12)


def compare(args: argparse.Namespace, report: Report, graph: str, dataset: Path) -> Iterator[str]:
    """Train every way once a seed; yield the table's lines."""
    ways = {
        name: way
        for name, way in {**WAYS, **(FROZEN if args.frozen else {})}.items()
        if any(each in name for each in args.only.split(","))
    }
    ways = {REFERENCE: WAYS[REFERENCE], **ways}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for seed in range(args.first_seed, args.first_seed + (1 if args.tiny else args.seeds)):
        for name, way in ways.items():
            found[name].append(train(args, dataset, way, 50 if args.tiny else args.batch_size or GRAPHS[graph], seed))
            print(f"seed {seed}, {graph}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    yield f"{graph:<48}" + "".join(f"{head:>{width}}" for head, width in zip(HEADS, WIDTHS, strict=True))
    for name, runs in found.items():
        theirs = found[REFERENCE]
        targets = [max(each["validation"]) - WITHIN for each in theirs]
        reached = [epochs_to(run, target) for run, target in zip(runs, targets, strict=True)]
        less = [100 * (a["accuracy"] - b["accuracy"]) for a, b in zip(runs, theirs, strict=True)]
        rows, loaded = (
            statistics.mean(a[what] / b[what] for a, b in zip(runs, theirs, strict=True)) for what in ("rows", "rows_loaded")
        )
        best = statistics.mean(int(np.argmax(run["validation"])) + 1 for run in runs)
        all_reach = None not in reached
        to_it = statistics.mean(each or 0 for each in reached)
        seconds = statistics.mean(sum(run["seconds"][: each or 0]) for run, each in zip(runs, reached, strict=True))
        theirs_to_it = [epochs_to(run, target) or 1 for run, target in zip(theirs, targets, strict=True)]
        rows_to_it = statistics.mean(
            (n or 0) * a["rows_loaded"] / (m * b["rows_loaded"])
            for n, m, a, b in zip(reached, theirs_to_it, runs, theirs, strict=True)
        )
        report.figure(
            f"{graph}, accuracy at convergence of {len(runs)} seeds, {name}",
            [each["accuracy"] for each in runs],
            "share of the test nodes",
            reference=None if name == REFERENCE else f"{REFERENCE}, in points of accuracy",
            ratio=None if name == REFERENCE else statistics.mean(less),
            target=f">= {-100 * WITHIN}" if not args.tiny and name == "default macro" else None,
            rows_ratio=round(rows, 4),
            loaded_ratio=round(loaded, 4),
            epochs_to_accuracy=reached,
            seconds_to_accuracy=round(seconds, 2) if all_reach else None,
            rows_to_accuracy=round(rows_to_it, 4) if all_reach else None,
            less=[round(each, 2) for each in less],
            trained=runs,
        )
        cells = [f"{rows:.3f}", f"{loaded:.3f}", f"{100 * statistics.mean(r['accuracy'] for r in runs):.2f}"]
        cells += ["" if name == REFERENCE else f"{statistics.mean(less):+.2f}", f"{best:.1f}"]
        cells += [f"{to_it:.1f}", f"{seconds:.1f}", f"{rows_to_it:.3f}"] if all_reach else ["never", "", ""]
        macro = "" if runs[0]["macro"] is None else f" ({runs[0]['macro']} of {runs[0]['parts']})"
        yield f"{name + macro:<48}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def run(args: argparse.Namespace, report: Report) -> None:
    """All graphs that were asked for."""
    report.silent = not args.json
    with scratch(args, "convergence") as folder:
        for graph in args.graph or [PLANTED]:
            make(args, graph, folder / graph.replace(" ", "-"))
            lines = list(compare(args, report, graph, folder / graph.replace(" ", "-")))
            print("\n".join(lines), file=sys.stderr if args.json else sys.stdout, flush=True)


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--graph", choices=[*GRAPHS], action="append", help="may be repeated; others than the planted need --graphs")
    own.add_argument("--fanouts", default="10,10")
    own.add_argument("--frozen", action="store_true", help="also train on one epoch's samples, kept in a pack, again and again")
    own.add_argument("--json", action="store_true", help="figures as JSON lines, the table to stderr")
    mine, rest = own.parse_known_args()
    sizes = {
        "nodes": 100_000,
        "train_nodes": 1_000_000_000,
        "test_nodes": 20_000,
        "batch_size": 0,
        "dim": 0,
        "seeds": 3,
        "first_seed": 0,
        "epochs": 30,
        "patience": 5,
        "hidden": 64,
    }
    options = argparse.Namespace(**vars(arguments(__doc__ or "", rest, **sizes)), **vars(mine))
    if options.tiny:
        options.epochs = min(options.epochs, 2)
    main(run, options)
