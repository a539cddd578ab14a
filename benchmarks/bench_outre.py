"""Partitions and partition batches (OUTRE, VLDB 2024): speed, what parts cut, rows requested, and seconds of epochs.

Speed is taken on R22 beside FENNEL as plain loops over an adjacency in memory (``fennel_loops.c``, compiled here). Rows are those
of one epoch, [10, 10], of real graphs and of planted communities with shuffled ids. Real graphs are those
in the folder ``--graphs DIR`` (``graphs.py`` and ``.npz`` files). ``--only accuracy`` needs it. Epochs
(``outre_epochs.py``) are timed on the same graphs with rows of 2 KiB: ``--only preparation`` compares random batches with
partition batches at equal memory, ``--table 6`` has seconds by stage of a memory map, superbatches, and each mechanism added.
``--table 12`` (``outre_metrics.py``) chooses what is kept at random, by degree and by saved I/O, for two to ``--layers`` layers.
``--only split`` (``outre_split.py``) counts reads at the split of the memory that a loader chooses, beside nine others.
``--only labor`` (``outre_labor.py``) counts rows of layer-neighbour sampling. ``--only lists`` (``outre_lists.py``) times
sampling with the lists of macro-batches at hand. ``--only accuracy`` (``outre_accuracy.py``) trains, which takes about an hour of
processor time for three seeds. ``--only history`` (``outre_history.py``) does all of this with historical embeddings and without.
``$FEATSTORE_R22`` names a folder that ``r22.py`` filled. ``--nodes`` is the size of the planted graph.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from harness import Report, alternate, arguments, main, scratch
from papers.outre_accuracy import accuracy, make_dataset
from papers.outre_epochs import Work, make_work, preparation, shared_draws_streamed, table6
from papers.outre_history import accuracy_with_history, preparation_with_history, rows_with_history
from papers.outre_labor import SAMPLERS, shared_draws
from papers.outre_lists import lists_of_macros, make_lists
from papers.outre_metrics import table12
from papers.outre_split import split
from r22 import generate
from realgraphs import loading, wanted

import featstore
from featstore.partitioning.assign import judge

FANOUTS = [10, 10]
PLANTED = "planted communities"
GRAPHS = {"linux414-calls": 1000, "cnr-2000": 1000, "ego-twitter": 200}  # seeds a batch
EPOCH_BATCHES = {PLANTED: 200, "linux414-calls": 500, "cnr-2000": 200, "ego-twitter": 50}  # in epochs: large rows
SEEDS_A_PART = 500
METHODS: dict[str, dict[str, Any]] = {
    "fennel": {},
    "fennel, 10 passes": {"passes": 10},
    "fennel from ranges": {"start": "ranges"},
    "ldg": {"method": "ldg"},
    "ranges": {"method": "ranges"},
    "metis": {"method": "metis"},  # where it is installed
    "random": {"method": "random"},
}
PARTS = (100, 10_000)
GAMMA = 1.5

# Names of groups, of which --only takes those that contain its text.
TRAINED = {"accuracy": accuracy, "history, table 11": accuracy_with_history}
PREPARED = {"preparation": preparation, "history, preparation": preparation_with_history}  # of the planted graph alone
STAGES = {"table 6": table6, "table 12": table12, "split": split}

Int64s = npt.NDArray[np.int64]


class Loops:
    """fennel_loops.c, compiled here."""

    def __init__(self, folder: Path) -> None:
        library = folder / "fennel_loops.so"
        source = Path(__file__).parent / "papers" / "fennel_loops.c"
        command = [os.environ.get("CC", "cc"), "-O3", "-shared", "-fPIC", "-ffp-contract=off", "-o", library, source, "-lm"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        self._run = ctypes.CDLL(str(library)).fennel_loops

    def partition(self, indptr: Int64s, ids: npt.NDArray[np.int32], k: int, passes: int) -> npt.NDArray[np.int32]:
        """Return the parts that ``featstore.partition`` returns, too."""
        n = len(indptr) - 1
        part = np.full(n, -1, np.int32)
        scale = GAMMA * (len(ids) / 2) / n * (k / n) ** (GAMMA - 1)
        cap = max(-(-n // k), int(n * 1.1 / k))
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (indptr, ids, part)]
        for _ in range(passes):
            self._run(
                pointers[0],
                pointers[1],
                ctypes.c_int64(n),
                ctypes.c_int32(k),
                ctypes.c_double(scale),
                ctypes.c_int64(cap),
                pointers[2],
            )
        return part


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


def communities(n: int, seed: int = 0) -> tuple[Int64s, npt.NDArray[np.int32], Int64s]:
    """Communities of about 300 nodes with shuffled ids: four of five edges stay inside; half of the nodes are seeds."""
    rng = np.random.default_rng(seed)
    community = rng.permutation(np.arange(n) // 300)
    order = np.argsort(community, kind="stable")
    counts = np.bincount(community)
    starts = np.cumsum(counts) - counts
    degrees = np.minimum(3 + 4 * rng.pareto(1.6, n), n // 4).astype(np.int64)
    of = np.repeat(community, degrees)
    inside = order[starts[of] + (counts[of] * rng.random(len(of))).astype(np.int64)]
    ids = np.where(rng.random(len(of)) < 0.8, inside, rng.integers(0, n, len(of))).astype(np.int32)
    return np.concatenate([[0], np.cumsum(degrees)]), ids, np.sort(rng.choice(n, n // 2, replace=False))


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


def requested(g: featstore.OutOfCoreGraph, batches: Any) -> int:
    """Rows that the batches of one epoch ask for."""
    sampler, order = featstore.NeighborSampler(g, FANOUTS), batches.epoch(0)
    return sum(len(sampler.sample(order.seeds(k), 0, k).input_ids) for k in range(len(order)))


def rows(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Rows requested by partition batches; cut and balance of the parts (tables 3, 7 and 8 of the paper)."""
    for name, indptr, ids, seeds, batch_size, _ in graphs(args):
        path = folder / name.replace(" ", "-")
        if not path.exists():
            featstore.OutOfCoreGraph.create(path, indptr, ids, progress=False).close()
        k = max(2, len(seeds) // (50 if args.tiny else SEEDS_A_PART))
        with featstore.open(path, memory="2GiB") as g:
            g.cache_neighbors()
            plain = requested(g, featstore.RandomBatches(seeds, batch_size))
            for label, options in METHODS.items():
                if label == "metis" and find_spec("pymetis") is None:
                    continue
                parts = featstore.partition(g, k, train_idx=seeds, keep=False, progress=False, **options)
                quality = judge(g, parts, k, seeds, progress=False)
                macro = -(-2 * batch_size * k // len(seeds))  # two batches of seeds
                batches = featstore.PartitionBatches(g, torch.from_numpy(seeds), batch_size, parts, macro)
                report.figure(
                    f"{name}, rows requested, {FANOUTS}, {label}",
                    float(requested(g, batches)),
                    "rows",
                    reference="random batches",
                    ratio=requested(g, batches) / plain,
                    target="<= 0.75" if label == "fennel" and not args.tiny else None,
                    parts=k,
                    macro=batches.macro,
                    cut=round(quality.cut, 4),
                    balance=round(quality.balance, 3),
                    train_balance=round(quality.train_balance, 3),
                )


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
    """Seconds of epochs: of the planted graph for the preparation, of all graphs for the tables and splits."""
    planted, chosen = ([measure for group, measure in groups.items() if args.only in group] for groups in (PREPARED, STAGES))
    if not planted and not chosen:
        return  # graphs take long to load
    for name, indptr, ids, seeds, _, blocks in graphs(args):
        measures = chosen + (planted if name == PLANTED else [])
        if not measures:
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
        groups = {"speed": speed, "rows": rows, "labor": labor, "labor, streamed": streamed, "lists": lists}
        groups |= {"history, rows": history}
        for group, measure in groups.items():
            if args.only in group:
                measure(args, report, folder)
        trained(args, report, folder)
        epochs(args, report, folder)


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--plot", type=Path, help="of --only accuracy: rows saved against accuracy, as an image")
    own.add_argument("--table", type=int, choices=[6, 11, 12], help="only this table of the paper, as --only 'table 6' does")
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
        "layers": 4,
        "batches": 0,
    }
    options = arguments(__doc__ or "", rest, real_graphs="accuracy; history, table 11; all others of real graphs", **sizes)
    if mine.table is not None:
        options.only = f"table {mine.table}"
    main(run, argparse.Namespace(**vars(options), **vars(mine)))
