"""Every default, measured as a newcomer meets it: no option but ``memory=``.

    python -m benchmarks.choices.defaults --graphs DIR                 # musae_github, linux414-calls and R22
    python -m benchmarks.choices.defaults --graphs DIR --only linux --runs 1 --json
    python -m benchmarks.choices.defaults --only R22 --runs 1 --epochs 2 --curve docs/plots/memory-R22.png  # by memory

Seconds an epoch, from the second epoch on, of the loader as it comes, of ``strategy="auto"`` and of ``featstore train``, in
memory that all rows fit into and in a quarter of the rows' bytes. Beside them stand every fixed strategy, of which the best is
the reference, and a memory map of the rows, read by 16 threads, sampled by the same loader. The reference of ``featstore train``
is the same command with the best fixed strategy, for both compute. ``store[ids]`` is asked for the same batches after
``g.cache()``, in the loop as the map is, which is its reference. Each side is a process of its own in a memory control group of
its ``memory=`` and what an interpreter takes, and sides take turns. A map that is warm has its rows in the page cache of that
group. ``$FEATSTORE_R22`` names a folder that ``tools.r22`` filled.

A batch of musae_github has the rows, of 16 KB, of most of the graph: two are larger than the feature, so that no memory holds
batches and not all rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tools import r22
from benchmarks.tools.harness import (
    BASE_BYTES,
    Report,
    alternate,
    answer,
    arguments,
    main,
    median_ratio,
    run_child,
    scratch,
    timed_epoch,
    whole_epoch,
)
from benchmarks.tools.memmap import N_THREADS, MemmapRows, copied
from benchmarks.tools.realgraphs import loading

MODEL_BYTES = 2 << 30  # of a model's activations and gradients, where one is trained
FITS, SHORT = "all rows fit", "a quarter of the rows"
MEMORY = {FITS: (2.0, 1 << 30), SHORT: (0.25, 256 << 20)}  # times the rows' bytes, and bytes
DEFAULT, AUTO, TRAIN, TRAIN_BEST, STORE, MEMMAP = (
    "default loader",
    'strategy="auto"',
    "featstore train",
    "featstore train, best",
    "store[ids]",
    "np.memmap",
)
FIXED = ("ondemand frequency", "ondemand degree", "ondemand sieve", "superbatch belady", "streamed belady")
FANOUTS, BATCH_SIZE = [10, 10], 1000  # of featstore train
BLOCK_ROWS = 1 << 14
CURVE = (1 / 8, 1 / 4, 1 / 2, 1.0, 1.5)  # memory, times the rows' bytes
CURVE_SIDES = (MEMMAP, "ondemand frequency", "superbatch belady", "streamed belady", DEFAULT)


@dataclass(frozen=True)
class Work:
    """A dataset with labels and training seeds, its rows beside it as an ``.npy`` file."""

    name: str
    dataset: Path
    features: Path
    batch_size: int

    @property
    def memories(self) -> dict[str, int]:
        """``memory=`` by name."""
        n_bytes = self.features.stat().st_size
        return {
            name: int(share * n_bytes) + more
            for name, (share, more) in MEMORY.items()
            if name == FITS or "musae" not in self.name
        }


def graphs(args: argparse.Namespace, folder: Path) -> Iterator[Work]:
    """Make the graphs that ``--only`` names, one after the other."""
    real = None if args.tiny else loading(args.graphs)
    for name in ("musae_github", "linux414-calls"):
        if real is not None and args.only in name:
            indptr, ids, z = real.load(name)
            shape = tuple(int(k) for k in z["x_shape"])
            n = len(indptr) - 1
            train = z["train_mask"].astype(bool) if "train_mask" in z else np.random.default_rng(0).random(n) < 0.6
            yield create(
                folder / name, name, (indptr, ids), shape, real.feature_blocks(z, BLOCK_ROWS), z["y"], np.flatnonzero(train)
            )
    name = "R12" if args.tiny else "R22"
    if args.only in name or args.tiny:
        rmat = r22.generate(os.environ.get("FEATSTORE_R22", folder), scale=12 if args.tiny else 22)
        y = np.random.default_rng(0).integers(0, 10, rmat.num_nodes)
        arrays = np.ascontiguousarray(rmat.indptr), np.ascontiguousarray(rmat.indices)
        shape, batch_size = (rmat.num_nodes, rmat.dim), 100 if args.tiny else BATCH_SIZE
        yield create(folder / name, name, arrays, shape, rmat.feature_blocks(), y, rmat.seeds, batch_size)


def create(
    folder: Path,
    name: str,
    adjacency: tuple[Any, Any],
    shape: tuple[int, ...],
    blocks: Iterator[npt.NDArray[np.float32]],
    y: npt.NDArray[Any],
    train_idx: npt.NDArray[Any],
    batch_size: int = BATCH_SIZE,
) -> Work:
    """Write the dataset and the file of its rows, unless they are there."""
    import featstore

    work = Work(name, folder / "graph", folder / "x.npy", batch_size)
    if not work.dataset.exists():
        folder.mkdir(parents=True, exist_ok=True)
        data = {"y": y.astype(np.int64), "train_idx": train_idx.astype(np.int64)}
        features = {"x": (shape, np.float32, copied(work.features, shape, blocks))}
        featstore.OutOfCoreGraph.create(work.dataset, *adjacency, features, data, progress=False).close()
    return work


# -- what runs in a child ------------------------------------------------------------------------------------------------------


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Run a side's epochs; return the seconds of each, or why the side is impossible."""
    if job["side"].startswith(TRAIN):
        return command(job)
    import featstore
    from featstore.strategies.registry import find_strategy

    try:
        with featstore.open(job["dataset"], memory=job["memory"]) as g:
            rows = {MEMMAP: lambda: MemmapRows(job["features"]), STORE: lambda: cached(g)}.get(job["side"], lambda: None)()
            options: dict[str, Any] = {} if rows is None else {"features": []}
            if job["side"] == AUTO:
                options["strategy"] = "auto"
            elif job["side"] in FIXED:
                strategy, policy = job["side"].split()
                options["strategy"] = find_strategy(strategy)(cache="auto", policy=policy)
            sampler = featstore.NeighborSampler(g, FANOUTS)
            with featstore.Loader(g, sampler, g.node_data["train_idx"], job["batch_size"], **options) as loader:
                epochs = []
                for _ in range(job["epochs"]):
                    epoch = timed_epoch(
                        loader,
                        lambda batch: batch.x if rows is None else rows[batch.input_ids],
                        limit_s=job["limit_s"] if rows is not None else 0,
                    )
                    epochs.append(whole_epoch([mark["seconds"] for mark in epoch["marks"]], len(loader)))
                stats = loader.stats()
        taken = stats["auto"]["taken"] if "auto" in stats else {}
        return {
            "epochs": epochs,
            "rows_loaded": stats["rows_loaded"],
            "taken": " ".join(str(taken[each]) for each in ("strategy", "policy") if each in taken),
        }
    except featstore.BudgetError as error:
        return {"impossible": str(error)}


def cached(g: Any) -> Any:
    """Return the rows of a graph with the cache that ``g.cache()`` makes."""
    g.cache()
    return g["x"]


def command(job: dict[str, Any]) -> dict[str, Any]:
    """Run ``featstore train`` as a user would, or with a fixed strategy."""
    line = [sys.executable, "-m", "featstore", "train", job["dataset"], "--memory", f"{job['memory']}B", "--json"]
    line += ["--epochs", str(job["epochs"])]
    if job["tiny"]:
        line += ["--batch-size", str(job["batch_size"]), "--hidden", "8"]
    if job["side"] == TRAIN_BEST:
        strategy, policy = job["best"].split()
        line += ["--strategy", strategy, "--policy", policy, "--cache", "auto"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"impossible": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}"}
    result = json.loads(done.stdout)
    return {
        "epochs": [each["seconds"] for each in result["epochs"]],
        "rows_loaded": result["stats"]["rows_loaded"],
        "compute_s": result["compute_s"],
    }


# -- figures -------------------------------------------------------------------------------------------------------------------


def steady(run: dict[str, Any]) -> float:
    """Seconds of an epoch from the second on."""
    return statistics.median(run["epochs"][1:] or run["epochs"])


class Sides:
    """The sides of one graph in one memory, run in turn; those that are impossible are left out after their first run."""

    def __init__(self, args: argparse.Namespace, work: Work, memory: int) -> None:
        self._args, self._work, self._memory = args, work, memory
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.impossible: dict[str, str] = {}

    def run(self, sides: list[str], best: str = "") -> dict[str, list[float]]:
        """Return the seconds of each side's runs."""

        def one(side: str) -> float:
            if side in self.impossible:
                return float("inf")
            files = {"dataset": os.fspath(self._work.dataset), "features": os.fspath(self._work.features)}
            job: dict[str, Any] = {**files, "drop": [*files.values()], "memory": self._memory}
            job |= {"side": side, "batch_size": self._work.batch_size, "epochs": self._args.epochs, "best": best}
            job |= {"limit_s": self._args.seconds, "tiny": self._args.tiny}
            model = MODEL_BYTES * side.startswith(TRAIN)
            result = run_child(__spec__.name, job, BASE_BYTES + self._memory + model)
            if "impossible" in result:
                self.impossible[side] = result["impossible"]
                return float("inf")
            self.runs.setdefault(side, []).append(result)
            print(f"{self._work.name}, {side}: {[round(each, 2) for each in result['epochs']]}", file=sys.stderr, flush=True)
            return steady(result)

        found = alternate(self._args.runs, {side: (lambda side=side: one(side)) for side in sides})
        return {side: seconds for side, seconds in found.items() if side not in self.impossible}


def compare(args: argparse.Namespace, report: Report, work: Work, name: str, memory: int) -> str:
    """Print the figures of one graph in one memory; return its line of the table."""
    sides = Sides(args, work, memory)
    those = FIXED[1::2] if args.tiny else FIXED
    seconds = sides.run([DEFAULT, AUTO, *those, STORE, MEMMAP])
    fixed = {side: statistics.median(seconds[side]) for side in those if side in seconds}
    if not fixed:
        raise SystemExit(f"{work.name}, {name}: no fixed strategy is possible: {sides.impossible}")
    best = min(fixed, key=lambda side: fixed[side])
    seconds |= sides.run([TRAIN, TRAIN_BEST], best)
    title = f"{work.name}, {name} ({memory / 2**20:.0f} MiB)"
    common = {"memory": memory, "best": best, "fixed": {side: round(each, 4) for side, each in fixed.items()}}
    common["impossible"] = dict(sides.impossible)
    ratios: dict[str, float] = {}
    best_fixed, of_map = f"the best fixed strategy, {best}", f"a memory map read by {N_THREADS} threads"
    shown = (
        (DEFAULT, DEFAULT, best, best_fixed, "<= 1.15"),
        (AUTO, AUTO, best, best_fixed, "<= 1.15"),
        (TRAIN, TRAIN, TRAIN_BEST, best_fixed, "<= 1.15"),
        (MEMMAP, of_map, DEFAULT, DEFAULT, ">= 0.8" if name == FITS else ">= 3"),
        (STORE, "store[ids] after g.cache()", MEMMAP, MEMMAP, "<= 1.25" if name == FITS else "<= 0.33"),
    )
    for side, epoch_of, other, reference, target in shown:
        if side in seconds and other in seconds:
            ratios[side] = median_ratio(seconds[side], seconds[other])
            report.figure(
                f"{title}, an epoch of {epoch_of}",
                seconds[side],
                "s",
                reference=reference,
                references=seconds[other],
                target=None if args.tiny else target,
                details=sides.runs[side],
                **common,
            )
    middles = {side: statistics.median(each) for side, each in seconds.items()}
    cells = [f"{middles[side]:.2f} ({ratios[side]:.2f})" if side in ratios else "impossible" for side, *_ in shown]
    cells.insert(3, f"{best} {fixed[best]:.2f}")
    return f"{title:<52}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def curve(args: argparse.Namespace, report: Report, work: Work) -> None:
    """Draw the seconds of an epoch of the default loader, of strategies and of the map against their memory."""
    from matplotlib.figure import Figure

    n_bytes = work.features.stat().st_size
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in CURVE_SIDES}
    for share in CURVE[:: 2 if args.tiny else 1]:
        sides = Sides(args, work, int(share * n_bytes) + (MEMORY[SHORT][1] if args.tiny else 0))
        seconds = sides.run(list(CURVE_SIDES))
        for side, runs in seconds.items():
            found[side].append((share, statistics.median(runs)))
            report.figure(
                f"{work.name}, in {share:.0%} of the rows' bytes, an epoch of {side}", runs, "s", details=sides.runs[side]
            )
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for side, points in found.items():
        label = {MEMMAP: f"np.memmap, {N_THREADS} threads", DEFAULT: "featstore, as it comes"}.get(side, side.replace(" ", ", "))
        axes.plot(*zip(*points, strict=True), marker="o", linewidth=3 if side == DEFAULT else 1.2, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(CURVE, [f"{share:.0%}\n{share * n_bytes / 1e6:,.0f} MB" for share in CURVE], minor=False)
    axes.set_xlabel(f"memory that each way gets, and its share of the features' {n_bytes / 1e9:.1f} GB")
    axes.set_ylabel("seconds of the second epoch")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(f"{work.name}: batches of {work.batch_size}, fan-outs {FANOUTS}")
    axes.grid(which="both", alpha=0.25)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(args.curve, dpi=110)


HEADS = ("default (/ best)", "auto (/ best)", "train (/ best)", "best fixed", "memory map (/ default)", "store[ids] (map / it)")
WIDTHS = (18, 18, 18, 28, 24, 23)


def run(args: argparse.Namespace, report: Report) -> None:
    """All graphs, in memory that rows fit into and in less."""
    report.silent = not args.json
    lines = ["seconds an epoch" + " " * 36 + "".join(f"{head:>{width}}" for head, width in zip(HEADS, WIDTHS, strict=True))]
    with scratch(args, "defaults") as folder:
        for work in graphs(args, folder):
            if args.curve:
                curve(args, report, work)
                continue
            for name, memory in list(work.memories.items())[1 if args.tiny else 0 :]:
                lines.append(compare(args, report, work, name, memory))
    if not args.curve:
        print("\n".join(lines), file=sys.stderr if args.json else sys.stdout, flush=True)


if __name__ == "__main__" and not answer(child):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--curve", type=Path, metavar="FILE", help="draw seconds against memory instead")
    own.add_argument("--json", action="store_true", help="figures as JSON lines, the table to stderr")
    mine, rest = own.parse_known_args()
    options = arguments(__doc__ or "", rest, real_graphs="musae_github, linux414-calls", epochs=3, seconds=40)
    main(run, argparse.Namespace(**vars(options), **vars(mine)))
