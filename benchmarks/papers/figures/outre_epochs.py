"""Epochs of partition_batches: what partition batches and sampling by layers change in seconds, within equal memory.

Each run is a process of its own, within a memory control group, and starts with a cold page cache. Its loop computes nothing, so
all of its seconds are data preparation: sampling and gathering, as OUTRE divides an epoch. Transfer and compute, which are the
device's, are left out. Parts are made with the dataset, once. So is the choice of what to keep, whose seconds stand apart.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tools.harness import Report, alternate, answer, run_child, timed_epoch, whole_epoch

BASE_BYTES = 400 << 20  # of the interpreter and torch, in the control group
FANOUTS = [10, 10]
DIM = 512  # float32: rows of 2 KiB, as linux414-calls has them
BLOCK_ROWS = 1 << 14
LEAST_MEMORY = 32 << 20  # beside a quarter of the features
STAGES = ("sample", "plan", "load", "pack", "gather", "update")
MECHANISMS: dict[str, dict[str, Any]] = {  # each is added to those before it
    "superbatch": {"strategy": "superbatch"},
    "+ partition batches": {"parts": True},
    "+ LABOR": {"labor": True},
    "+ history": {"history": (128, 0.2, 15)},
    "+ split": {"history": (128, "auto", 15)},
}
MEMMAP = "np.memmap"
MACRO = 4  # parts: two batches of seeds

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Work:
    """A dataset, its features beside it as an .npy file, and how it is trained on."""

    name: str
    dataset: Path
    features: Path
    features_bytes: int
    batch_size: int
    n_batches: int
    n_parts: int = 0  # that are kept
    partition_s: float = 0.0

    def job(self, **more: Any) -> dict[str, Any]:
        """Make the job of a child."""
        return {
            "dataset": os.fspath(self.dataset),
            "features": os.fspath(self.features),
            "drop": [os.fspath(self.dataset), os.fspath(self.features)],
            "memory": self.features_bytes // 4 + LEAST_MEMORY,
            "batch_size": self.batch_size,
            **more,
        }


def make_work(
    folder: Path,
    name: str,
    indptr: Int64s,
    ids: npt.NDArray[np.int32],
    seeds: Int64s,
    batch_size: int,
    blocks: Iterator[npt.NDArray[np.float32]] | None = None,
) -> Work:
    """Create the dataset, with features of its own or random ones, and keep parts of half a batch of seeds each."""
    import featstore
    from benchmarks.tools.memmap import copied

    n, folder = len(indptr) - 1, folder / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    sizes = (min(BLOCK_ROWS, n - first) for first in range(0, n, BLOCK_ROWS))
    blocks = (rng.standard_normal((rows, DIM), dtype=np.float32) for rows in sizes) if blocks is None else blocks
    data = {"seeds": seeds}
    features = {"x": ((n, DIM), np.float32, copied(folder / "x.npy", (n, DIM), blocks))}
    path, k = folder / "graph", max(2, 2 * len(seeds) // batch_size)
    with featstore.OutOfCoreGraph.create(path, indptr, ids, features, data, progress=False, overwrite=True) as g:
        begin = time.perf_counter()
        featstore.partition(g, k, train_idx=seeds, progress=False)
        partition_s = time.perf_counter() - begin
    n_batches = -(-len(seeds) // batch_size)
    return Work(name, path, folder / "x.npy", 4 * DIM * n, batch_size, n_batches, k, partition_s)


# -- what runs in a child ------------------------------------------------------------------------------------------------------


def make_sampler(g: Any, job: dict[str, Any]) -> Any:
    """Return the sampler that a job names: neighbours or LABOR, batch by batch or an epoch at a time."""
    import featstore

    is_labor, fanouts = job.get("labor", False), job.get("fanouts", FANOUTS)
    if job.get("epoch", False):
        return featstore.EpochSampler(g, fanouts, draws="labor" if is_labor else "neighbor")
    return (featstore.LaborSampler if is_labor else featstore.NeighborSampler)(g, fanouts)


def kept_parts(g: Any, name: str | bool) -> Any:
    """Return the kept parts of a name; None, those that are kept without one, where it is True."""
    return None if name is True else g.parts()[name]


def make_history(job: dict[str, Any]) -> Any:
    """Return the history that a job names by dim, nodes (or the file of their ids) and staleness; None where it has none.

    With ``narrow`` its rows are of half precision, and gradients of pulled rows are lost.
    """
    import torch

    import featstore

    if "history" not in job:
        return None
    dim, nodes, staleness = job["history"]
    more = {"dtype": torch.float16, "gradients": False} if job.get("narrow", False) else {}
    return featstore.History(dim, np.load(nodes) if str(nodes).endswith(".npy") else nodes, staleness, **more)


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Run an epoch, or its first batches, and say what it took."""
    import torch

    import featstore
    from benchmarks.tools.memmap import MemmapRows

    with featstore.open(job["dataset"], memory=job["memory"]) as g:
        begin = time.perf_counter()
        g.cache_neighbors(job["memory"] // 8)
        seeds, batch_size = g.node_data["seeds"], job["batch_size"]
        sampler = make_sampler(g, job)
        batches = (
            featstore.PartitionBatches(g, seeds, batch_size, kept_parts(g, job["parts"]), job.get("macro", MACRO))
            if job.get("parts")
            else featstore.RandomBatches(seeds, batch_size)
        )
        rows = MemmapRows(job["features"], job["threads"]) if job["strategy"] == MEMMAP else None
        strategy: Any = "ondemand"
        if rows is None:
            cache = {"cache": job["cache"]} if "cache" in job else {}
            if job["strategy"] == "ondemand":
                strategy = featstore.OnDemand(cache="auto", policy=job["policy"])
            else:
                strategy = {"superbatch": featstore.Superbatch, "streamed": featstore.Streamed}[job["strategy"]](
                    disk="8x", **cache
                )
        history = make_history(job)
        features = ["x"] * (rows is None)
        loader = featstore.Loader(g, sampler, batches, features=features, labels=None, history=history, strategy=strategy)
        setup_s = time.perf_counter() - begin

        def rows_of(batch: Any) -> torch.Tensor:
            if batch.history is not None:  # as a model that has computed zeros
                batch.history.merge(torch.zeros(batch.history.n_sources - len(batch.history.rows.pull), job["history"][0]))
            found: torch.Tensor = batch.x if rows is None else rows[batch.input_ids]
            return found

        with loader:
            epoch = timed_epoch(loader, rows_of, most=job.get("most", 0), limit_s=job.get("limit_s", 0))
            stats = loader.stats()
        n_batches = len(loader)
        split_s = stats["seconds"].get("split", 0.0)
        split = stats.get("history", {}).get("split", {})
        seconds = setup_s - split_s + whole_epoch([mark["seconds"] for mark in epoch["marks"]], n_batches)
        part = epoch["batches"] / n_batches  # of an epoch that was cut
        stages = {stage: stats["seconds"].get(stage, 0.0) / part for stage in STAGES}
        stages["gather"] += whole_epoch([mark["lookup_s"] for mark in epoch["marks"]], n_batches)
        return {
            "seconds": seconds,
            "setup_s": setup_s - split_s,
            "split_s": split_s,
            "split": {name: split[name] for name in ("alpha", "beta", "bytes", "nodes", "why") if name in split},
            "stages": stages,
            "batches": epoch["batches"],
            "rows": round(epoch["rows"] / part),
            "rows_loaded": round((stats["rows_loaded"] if rows is None else epoch["rows"]) / part),
            "kernel_bytes": round(epoch["kernel_bytes"] / part),
            "checksums": [mark["checksum"] for mark in epoch["marks"]],
            "memory": job["memory"],
            "peak": g.budget.peak,
        }


# -- figures -------------------------------------------------------------------------------------------------------------------


def run_sides(
    args: argparse.Namespace, work: Work, sides: dict[str, dict[str, Any]]
) -> tuple[dict[str, list[float]], dict[str, list[dict[str, Any]]]]:
    """Run the sides in turn, each in as much memory; return their seconds, and all that their children said.

    At the smallest size they run in this process: it takes less than to start another.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}

    def side(name: str) -> float:
        job = work.job(most=args.batches, **sides[name])
        limit = BASE_BYTES + job["memory"]
        results[name].append(child(job) if args.tiny else run_child(__spec__.name, job, limit))
        return float(results[name][-1]["seconds"])

    turns: dict[str, Callable[[], float]] = {name: (lambda name=name: side(name)) for name in sides}
    return alternate(args.runs, turns), results


def more_of(result: dict[str, Any]) -> dict[str, Any]:
    """Make a figure's line of one side."""
    said = {name: each for name, each in result.items() if name not in ("checksums", "seconds")}
    return {
        **said,
        "stages": {stage: round(seconds, 3) for stage, seconds in result["stages"].items()},
    }


def preparation(args: argparse.Namespace, report: Report, work: Work) -> None:
    """Seconds of an epoch in random batches against partition batches, at equal memory; parts are made before."""
    for strategy, target in (("superbatch", ">= 1.4"), ("streamed", ">= 1.2")):
        sides = {"random": {"strategy": strategy}, "partition": {"strategy": strategy, "parts": True}}
        seconds, results = run_sides(args, work, sides)
        ours, theirs = results["partition"][-1], results["random"][-1]
        report.figure(
            f"{work.name}, rows of {4 * DIM} bytes, {strategy}: data preparation in random batches",
            seconds["random"],
            "s",
            reference="in partition batches, at equal memory",
            references=seconds["partition"],
            target=None if args.tiny else target,
            parts=work.n_parts,
            partition_s=round(work.partition_s, 3),
            reference_rows=ours["rows"],
            reference_rows_loaded=ours["rows_loaded"],
            reference_stages={stage: round(each, 3) for stage, each in ours["stages"].items()},
            **more_of(theirs),
        )


def shared_draws_streamed(args: argparse.Namespace, report: Report, work: Work) -> None:
    """Seconds of a streamed epoch of random batches with a tenth of the rows cached: LABOR beside neighbour sampling.

    Of LABOR a node's whole list is read, of neighbour sampling what is drawn: both also with the lists of an epoch read in order.
    """
    both = {"neighbour sampling": False, "LABOR": True}
    sides = {name: {"strategy": "streamed", "cache": 0.1, "labor": labor} for name, labor in both.items()}
    sides |= {f"{name}, an epoch at a time": {**side, "epoch": True} for name, side in sides.items()}
    seconds, results = run_sides(args, work, sides)
    reference, *_ = sides
    for name in sides:
        report.figure(
            f"{work.name}, streamed, a tenth of the rows cached, {name}: data preparation",
            seconds[name],
            "s",
            reference=None if name == reference else reference,
            references=None if name == reference else seconds[reference],
            **more_of(results[name][-1]),
        )


def table6(args: argparse.Namespace, work: Work, row: Callable[..., None]) -> None:
    """Seconds of an epoch by stage: np.memmap, superbatch, and each mechanism added to those before it (table 6 of OUTRE).

    ``row`` is a setting's. Stages run beside each other, so that they do not add up to the epoch.
    """
    sides: dict[str, dict[str, Any]] = {MEMMAP: {"strategy": MEMMAP, "threads": args.threads, "limit_s": args.seconds}}
    options: dict[str, Any] = {}
    for name, more in MECHANISMS.items():
        options |= more
        sides[name] = dict(options)
    seconds, results = run_sides(args, work, sides)
    for ours, theirs in zip(results["superbatch"], results[MEMMAP], strict=True):
        n = min(ours["batches"], theirs["batches"])
        assert ours["checksums"][n - 1] == theirs["checksums"][n - 1], "the sides differ in what they read"
    names = list(sides)
    for name, before in zip(names, [None, *names[:-1]], strict=True):
        for stage in STAGES:
            row(work.name, name, stage, [each["stages"][stage] for each in results[name]], "s")
        more_said = {**more_of(results[name][-1]), "parts": work.n_parts, "partition_s": round(work.partition_s, 3)}
        more_said |= {} if before is None else {"references": seconds[before]}
        row(work.name, name, "epoch", seconds[name], "s", before, **more_said)
        for count in ("rows", "rows_loaded"):
            row(work.name, name, count.replace("_", " "), float(results[name][-1][count]), "rows")


if __name__ == "__main__":
    answer(child)
