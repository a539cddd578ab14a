"""Partitions and partition batches (OUTRE, VLDB 2024): speed, rows of shared draws and histories, seconds of epochs, accuracy.

Speed is taken on R22 beside FENNEL as plain loops over an adjacency in memory (``fennel_loops.c``, compiled here). Rows are those
of one epoch, [10, 10], of real graphs and of planted communities with shuffled ids. Real graphs are those
in the folder ``--graphs DIR`` (``graphs.py`` and ``.npz`` files). ``--only accuracy`` needs it. Epochs
(``outre_epochs``) are timed on the planted graph with rows of 2 KiB: ``--only preparation`` compares random batches with
partition batches at equal memory. ``--only labor`` (``outre_labor``) counts rows of layer-neighbour sampling. ``--only lists``
(``outre_lists``) times sampling with the lists of macro-batches at hand. ``--only accuracy`` (``outre_accuracy``) trains,
which takes about an hour of processor time for three seeds. ``--only history`` (``outre_history``) has rows and seconds with
historical embeddings and without. ``$FEATSTORE_R22`` names a folder that ``tools.r22`` filled. ``--nodes``: the size of the
planted graph. Helpers lie in ``figures``; the paper's own tables are drawn by ``python -m benchmarks.papers outre``.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import featstore
from benchmarks.papers.figures.outre_accuracy import accuracy, make_dataset
from benchmarks.papers.figures.outre_epochs import Work, make_work, preparation, shared_draws_streamed
from benchmarks.papers.figures.outre_graphs import PLANTED, Loops, communities
from benchmarks.papers.figures.outre_history import preparation_with_history, rows_with_history
from benchmarks.papers.figures.outre_labor import SAMPLERS, shared_draws
from benchmarks.papers.figures.outre_lists import lists_of_macros, make_lists
from benchmarks.tools.harness import Report, alternate, arguments, main, scratch
from benchmarks.tools.r22 import generate
from benchmarks.tools.realgraphs import loading, wanted

FANOUTS = [10, 10]
GRAPHS = {"linux414-calls": 1000, "cnr-2000": 1000, "ego-twitter": 200}  # seeds a batch
EPOCH_BATCHES = {PLANTED: 200, "linux414-calls": 500, "cnr-2000": 200, "ego-twitter": 50}  # in epochs: large rows
PARTS = (100, 10_000)

# Names of groups, of which --only takes those that contain its text.
TRAINED = {"accuracy": accuracy}
PREPARED = {"preparation": preparation, "history, preparation": preparation_with_history}  # of the planted graph alone

Int64s = npt.NDArray[np.int64]


def speed(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """FENNEL on R22: edges a second and pass, beside plain loops; how it grows with the parts."""
    work = generate(os.environ.get("FEATSTORE_R22", folder), scale=12 if args.tiny else 22)
    path, loops = folder / "r22-adjacency", Loops(folder)
    indptr, ids = np.ascontiguousarray(work.indptr), np.ascontiguousarray(work.indices)
    if not path.exists():
        featstore.OutOfCoreGraph.create(path, indptr, ids, progress=False).close()
    parts = tuple(10 if args.tiny else k for k in PARTS[:1]) + tuple(100 if args.tiny else k for k in PARTS[1:])
    seconds: dict[int, list[float]] = {}
    with featstore.open(path, memory="1GiB") as g:
        g.topology.degrees(0, 1)  # offsets are read
        for k in parts:
            found: dict[str, Any] = {}

            def ours(k: int = k, found: dict[str, Any] = found) -> None:
                found["ours"] = featstore.partition(g, k, passes=args.passes, keep=False, progress=False)

            def theirs(k: int = k, found: dict[str, Any] = found) -> None:
                found["theirs"] = loops.partition(indptr, ids, k, args.passes)

            results = alternate(args.runs, {"ours": ours, "theirs": theirs})
            assert np.array_equal(found["ours"].numpy(), found["theirs"])
            seconds[k] = results["ours"]
            rates = {side: [len(ids) * args.passes / s for s in results[side]] for side in results}
            report.figure(
                f"R22, FENNEL streamed, {k:,} parts, {args.passes} passes",
                rates["ours"],
                "edges/s a pass",
                reference="plain loops in memory",
                references=rates["theirs"],
                target=None if args.tiny else ">= 0.6",
            )
            if not args.tiny:
                report.figure(
                    f"R22, FENNEL streamed, {k:,} parts, edges a second", rates["ours"], "edges/s", target=">= 15000000"
                )
        few, many = parts
        report.figure(
            f"R22, FENNEL, {many:,} parts",
            seconds[many],
            "s",
            reference=f"{few:,} parts",
            references=seconds[few],
            target=None if args.tiny else "<= 2",
        )


Blocks = Iterator[npt.NDArray[np.float32]]


def graphs(args: argparse.Namespace) -> Iterator[tuple[str, Int64s, npt.NDArray[np.int32], Int64s, int, Blocks | None]]:
    """Yield name, adjacency, seeds, seeds a batch, and blocks of features, where it has some, of each graph."""
    n = 6_000 if args.tiny else args.nodes
    if args.graph in (None, PLANTED):
        yield PLANTED, *communities(n), 100 if args.tiny else 1000, None
    real = None if args.tiny else loading(args.graphs)
    if real is None:
        return
    for name, batch_size in GRAPHS.items():
        if args.graph not in (None, name) or not (args.graphs / f"{name}.npz").exists():
            continue
        indptr, ids, z = real.load(name)
        seeds = np.flatnonzero(z["train_mask"]) if "train_mask" in z else np.flatnonzero(np.diff(indptr) > 0)
        yield name, indptr, ids, seeds, batch_size, real.feature_blocks(z) if "x_shape" in z else None


def labor(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Rows of layer-neighbour sampling: of all graphs, and of R-MAT."""
    for name, indptr, ids, seeds, batch_size, _ in graphs(args):
        shared_draws(args, report, name, (indptr, ids), seeds, batch_size, folder / name.replace(" ", "-"))
    work = generate(os.environ.get("FEATSTORE_R22", folder), scale=12 if args.tiny else 22)
    arrays = np.ascontiguousarray(work.indptr), np.ascontiguousarray(work.indices)
    seeds = np.array(work.seeds[: 40_000 if not args.tiny else 1_000])
    # Importance needs all neighbours of a hop, which here are most of the graph.
    samplers = [label for label, options in SAMPLERS.items() if "importance_sampling" not in options]
    name = "R12" if args.tiny else "R22, 40 batches"
    shared_draws(args, report, name, arrays, seeds, 1000, folder / "r22-adjacency", samplers)


def streamed(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Seconds of LABOR on R-MAT, streamed."""
    rmat = generate(os.environ.get("FEATSTORE_R22", folder), scale=12 if args.tiny else 22)
    graph = rmat.dataset()
    size = 4 * rmat.dim * rmat.num_nodes
    batch_size = 20 if args.tiny else 1000
    name = "R12" if args.tiny else "R22"
    shared_draws_streamed(args, report, Work(name, graph, graph, size, batch_size, -(-rmat.n_seeds // batch_size)))


def history(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Rows requested with historical embeddings, of all graphs."""
    for name, indptr, ids, seeds, batch_size, _ in graphs(args):
        path = folder / name.replace(" ", "-")
        rows_with_history(args, report, name, (indptr, ids), seeds, batch_size, path, has_target=name != PLANTED)


def lists(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Seconds of sampling with the lists of macro-batches at hand, and without: of all graphs, and of R-MAT."""

    def measure(name: str, indptr: Int64s, ids: npt.NDArray[np.int32], seeds: Int64s, batch_size: int) -> None:
        path = folder / f"{name.replace(' ', '-')}-with-lists"
        seconds = make_lists(path, indptr, ids, seeds, max(2, 2 * len(seeds) // batch_size))
        report.figure(f"{name}, keeping lists in part order", seconds, "s", edges=len(ids))
        lists_of_macros(args, report, name, path, seeds, batch_size)
        shutil.rmtree(path)

    for name, indptr, ids, seeds, batch_size, _ in graphs(args):
        measure(name, indptr, ids, seeds, batch_size)
    scale = 12 if args.tiny else 20
    work = generate(folder, scale=scale)
    indptr, ids = np.ascontiguousarray(work.indptr), np.ascontiguousarray(work.indices)
    seeds = np.flatnonzero(np.diff(indptr) > 0)[: 1_000 if args.tiny else 200_000]
    measure(f"R{scale}", indptr, ids, seeds, 100 if args.tiny else 1000)


def trained(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Accuracy on linux414-calls, where it is there; the smallest run learns nothing, of a planted graph."""
    measures = [measure for group, measure in TRAINED.items() if args.only in group]
    if not measures:
        return
    name, z, blocks = "linux414-calls", None, None
    if args.tiny:
        name, n, rng = PLANTED, 6_000, np.random.default_rng(0)
        indptr, ids, seeds = communities(n)
        is_seed = np.isin(np.arange(n), seeds)
        z = {"y": rng.integers(0, 5, n), "train_mask": is_seed, "test_mask": ~is_seed, "x_shape": (n, 8)}
        blocks = iter([rng.standard_normal((n, 8)).astype(np.float32)])
    elif args.graphs is not None or args.only:
        real = wanted(args.graphs, name, f"--only {args.only!r}")
        indptr, ids, z = real.load(name)
        blocks = real.feature_blocks(z)
    if z is not None and blocks is not None:
        make_dataset(folder / "accuracy", indptr, ids, z, blocks)
        for measure in measures:
            measure(args, report, name, folder / "accuracy")


def epochs(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Seconds of epochs of the planted graph."""
    measures = [measure for group, measure in PREPARED.items() if args.only in group]
    for name, indptr, ids, seeds, _, blocks in graphs(args) if measures else ():
        if name != PLANTED:
            return
        batch_size = 20 if args.tiny else EPOCH_BATCHES[name]
        seeds = seeds[: 50 * batch_size] if args.tiny else seeds
        work: Work = make_work(folder / "epochs", name, indptr, ids, seeds, batch_size, blocks)
        for measure in measures:
            measure(args, report, work)
        shutil.rmtree(folder / "epochs")  # graphs one at a time: features are large


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    with scratch(args, "outre") as folder:
        groups = {"speed": speed, "labor": labor, "labor, streamed": streamed, "lists": lists}
        groups |= {"history, rows": history}
        for group, measure in groups.items():
            if args.only in group:
                measure(args, report, folder)
        trained(args, report, folder)
        epochs(args, report, folder)


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--plot", type=Path, help="of --only accuracy: rows saved against accuracy, as an image")
    own.add_argument("--graph", choices=[PLANTED, *GRAPHS], help="only this graph, where a group has several")
    mine, rest = own.parse_known_args()
    sizes = {
        "passes": 3,
        "threads": 16,
        "seconds": 40,
        "nodes": 300_000,
        "seeds": 3,
        "first_seed": 0,
        "hidden": 64,
        "batches": 0,
    }
    options = arguments(__doc__ or "", rest, real_graphs="accuracy; all others of real graphs", **sizes)
    main(run, argparse.Namespace(**vars(options), **vars(mine)))
