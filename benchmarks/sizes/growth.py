"""The cost of a row as graphs grow: R22, R24, R26 with rows of 256 B, in memory of the same share of their features.

Figures: seconds of a million rows of each stage of a streamed epoch (sampling, planning, packing, gathering), of each scale
beside those of the smallest (target: at most 1.5 times); seconds to read the offsets of a dataset, and to cache neighbour lists,
beside those that the drive needs for one read of what these are made of; reads of neighbour lists in a second of sampling, beside
fio's random reads of the same mean size at the reader's depth, which says how much of sampling is the drive's. Seeds grow with
the nodes, so that a pass over the features serves as many rows, and so does the disk for run files. ``--only tight``: the default
``Streamed()`` in little memory, 60 batches of R26 in 4 and in 8 GiB and 24 batches of R24 with rows of 128 B in 640 MiB: seconds,
passes, bytes read. Each run is a process of its own and starts with a cold page cache; the scales take turns. R26 takes 26 GB of
disk.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tools.drive import direct_rate, fio_random_iops, fio_scan_bandwidth, have_fio
from benchmarks.tools.harness import (
    PAGE_BYTES,
    Report,
    alternate,
    answer,
    arguments,
    bytes_read_by_kernel,
    main,
    run_child,
    scratch,
    timed_epoch,
)
from benchmarks.tools.r22 import Workload, generate

DIM = 64
STAGES = ("sample", "plan", "pack", "gather")
MEMORY_FRACTION = 1 / 2  # of the features' bytes
NEIGHBORS = 8  # of the memory, the neighbour cache takes one in so many
STREAMED = {"cache": 0.1, "disk": "1x"}  # the disk in proportion to the features: what is free would decide the lengths otherwise
FANOUTS = [10, 10, 10]
READER_DEPTH = 512  # reads in flight by default
RANDOM_READS = 50_000  # of fio
TIGHT = ((26, DIM, 60, 4 << 30), (26, DIM, 60, 8 << 30), (24, 32, 24, 640 << 20))  # scale, floats a row, batches, memory


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Open a dataset, cache neighbour lists where it is asked for, and so run an epoch; say what each took."""
    import featstore

    found: dict[str, Any] = {}
    opened = featstore.OutOfCoreGraph.open  # which imports torch: no part of what opening costs
    at, n_bytes = time.perf_counter(), bytes_read_by_kernel()

    def note(name: str) -> None:
        nonlocal at, n_bytes
        now, count = time.perf_counter(), bytes_read_by_kernel()
        found[name] = {"seconds": now - at, "bytes": count - n_bytes}
        at, n_bytes = time.perf_counter(), count

    with opened(job["dataset"], memory=job["memory"]) as g:
        note("open")
        assert g.topology.num_nodes == g.num_nodes
        note("offsets")
        if job.get("lists", True):
            g.cache_neighbors(job["memory"] // NEIGHBORS)
            note("neighbour lists")
        (out_degrees,) = Path(job["dataset"]).glob("edge.out_degree.*.rows")
        found["least"] = {"offsets": 8 * (g.num_nodes + 1), "neighbour lists": g.topology.nbytes + out_degrees.stat().st_size}
        if job["epoch"]:
            sampler = featstore.NeighborSampler(g, FANOUTS, seed=0)
            strategy = featstore.Streamed(**job["strategy"])
            seeds = g.node_data["seeds"][: job.get("seeds")]
            note("before")
            lists = g.topology.indices.stats  # type: ignore[attr-defined]  # in CSC form
            n_reads, read_bytes = lists.reads, lists.bytes_read
            with featstore.Loader(g, sampler, seeds, job["batch_size"], features="x", labels=None, strategy=strategy) as loader:
                found["epoch"] = timed_epoch(loader, lambda batch: batch.x)
                found["stats"] = loader.stats()
            found["list reads"] = {"reads": lists.reads - n_reads, "bytes": lists.bytes_read - read_bytes}
            note("whole epoch")
    return found


def stages_of(result: dict[str, Any]) -> dict[str, float]:
    """Seconds of a million rows of an epoch, by stage and in all."""
    millions = result["epoch"]["rows"] / 1e6
    seconds = {stage: result["stats"]["seconds"].get(stage, 0.0) for stage in STAGES}
    return {stage: taken / millions for stage, taken in {**seconds, "epoch": result["epoch"]["loop_s"]}.items()}


def epochs(args: argparse.Namespace, report: Report, jobs: dict[int, dict[str, Any]]) -> None:
    """Seconds of a million rows by stage, each scale beside the smallest."""
    results: dict[int, list[dict[str, Any]]] = {scale: [] for scale in jobs}
    random_reads: dict[int, list[float]] = {scale: [] for scale in jobs}

    def side(scale: int) -> None:
        results[scale].append(run_child(__spec__.name, {**jobs[scale], "epoch": True}))
        reads = results[scale][-1]["list reads"]
        if have_fio() and reads["reads"]:
            mean = max(1, round(reads["bytes"] / reads["reads"] / PAGE_BYTES)) * PAGE_BYTES
            file = max(Path(jobs[scale]["dataset"]).glob("edge.indices.*.rows"))
            random_reads[scale].append(fio_random_iops(file, RANDOM_READS, (READER_DEPTH,), mean))

    alternate(args.runs, {str(scale): (lambda scale=scale: side(scale)) for scale in jobs})
    least = min(jobs)
    for scale, found in results.items():
        stats, reads = found[-1]["stats"], found[-1]["list reads"]
        report.figure(
            f"R{scale}, streamed, reads of neighbour lists in a second of sampling",
            [result["list reads"]["reads"] / max(1e-9, result["stats"]["seconds"]["sample"]) for result in found],
            "reads/s",
            reference=f"fio, random reads of the same mean size, {READER_DEPTH} in flight",
            references=random_reads[scale] or None,
            **reads,
        )
        for stage in (*STAGES, "epoch"):
            report.figure(
                f"R{scale}, streamed, {stage}",
                [stages_of(result)[stage] for result in found],
                "s per million rows",
                reference=None if scale == least else f"R{least}, rows of the same width, the same share of memory",
                references=None if scale == least else [stages_of(result)[stage] for result in results[least]],
                target=None if scale == least else "<= 1.5",
                rows=found[-1]["epoch"]["rows"],
                batches=found[-1]["epoch"]["batches"],
                superbatch=stats["superbatch"],
                passes=stats["superbatch"]["passes"],
                memory=jobs[scale]["memory"],
            )


def opening(args: argparse.Namespace, report: Report, jobs: dict[int, dict[str, Any]]) -> None:
    """Seconds to read offsets and to cache neighbour lists, beside the drive's for the least bytes of them; those to open."""
    for scale, job in jobs.items():
        file = max(Path(job["dataset"]).glob("edge.indices.*.rows"))
        found: list[dict[str, Any]] = []
        rates: dict[str, list[float]] = {"fio": [], "direct reads": []}
        for _ in range(args.runs):
            rates["direct reads"].append(direct_rate(file))
            if have_fio():
                rates["fio"].append(fio_scan_bandwidth(file))
            found.append(run_child(__spec__.name, {**job, "epoch": False}))
        opened = [result["open"]["seconds"] for result in found]
        report.figure(f"R{scale}, open", opened, "s", kernel_bytes=found[-1]["open"]["bytes"])
        for name, what in (("offsets", "8 (n + 1) bytes"), ("neighbour lists", "all lists and out-degrees")):
            for whose, reached in rates.items():
                least = found[-1]["least"][name]
                report.figure(
                    f"R{scale}, {name}",
                    [result[name]["seconds"] for result in found],
                    "s",
                    reference=f"{what}, read once in sequence at the rate of {whose}",
                    references=[least / rate for rate in reached] or None,
                    target="<= 1.5",
                    kernel_bytes=found[-1][name]["bytes"],
                    least_bytes=least,
                    read_bytes_per_s=reached,
                )


def tight(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """The default ``Streamed()`` where memory is little: seconds, passes over the features, bytes read by theirs."""
    cases = ((13, DIM, 4, 64 << 20), (12, 32, 4, 64 << 20)) if args.tiny else TIGHT
    jobs: dict[str, dict[str, Any]] = {}
    for scale, dim, batches, memory in cases:
        dataset = rows_of_width(args, folder, scale, dim)
        jobs[f"R{scale}, rows of {4 * dim} B, {batches} batches in {memory >> 20} MiB"] = {
            "dataset": os.fspath(dataset),
            "drop": [os.fspath(dataset)],
            "features_bytes": 4 * dim << scale,
            "memory": memory,
            "batch_size": args.batch_size,
            "seeds": batches * args.batch_size,
            "strategy": {},
            "lists": False,
            "epoch": True,
        }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    alternate(args.runs, {name: (lambda name=name: results[name].append(run_child(__spec__.name, jobs[name]))) for name in jobs})
    for name, found in results.items():
        stats, n_bytes = found[-1]["stats"], jobs[name]["features_bytes"]
        more = {"stages": stats["seconds"], "superbatch": stats["superbatch"], "rows": found[-1]["epoch"]["rows"]}
        report.figure(f"{name}, streamed, an epoch", [each["whole epoch"]["seconds"] for each in found], "s", **more)
        passes = [float(each["stats"]["superbatch"]["passes"]) for each in found]
        is_small = jobs[name]["memory"] < 1 << 30
        report.figure(f"{name}, streamed, passes over the features", passes, "passes", target="<= 2" if is_small else None)
        report.figure(
            f"{name}, streamed, bytes read by the kernel's count",
            [float(each["whole epoch"]["bytes"]) for each in found],
            "B",
            reference="the features' bytes",
            references=[float(n_bytes)] * len(found),
        )


def work_of(args: argparse.Namespace, folder: Path, scale: int) -> Workload:
    """Make a workload, or load it: as many more seeds as it has more nodes than the smallest scale."""
    least = min(int(each) for each in args.scales.split(","))
    return generate(folder, scale, seeds=max(1, round(args.batches * args.batch_size * 2.0 ** (scale - least))), dim=DIM)


def rows_of_width(args: argparse.Namespace, folder: Path, scale: int, dim: int) -> Path:
    """Return the dataset of a workload with rows of so many floats, which lies beside that of the workload's own width."""
    import featstore

    work = work_of(args, folder, scale)
    if dim == DIM:
        return work.dataset()
    path, narrow = folder / f"R{scale}-{dim}", replace(work, dim=dim)
    if not path.exists():
        features = {"x": ((work.num_nodes, dim), np.dtype(np.float32), narrow.feature_blocks())}
        data = {"seeds": work.seeds}
        featstore.OutOfCoreGraph.create(path, work.indptr, work.indices, features, data, progress=False).close()
    return path


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    with scratch(args, "growth") as folder:
        figures = {name: figure for name, figure in {"open": opening, "epoch": epochs}.items() if args.only in name}
        jobs = {}
        for scale in [int(scale) for scale in args.scales.split(",")] if figures else []:
            work = work_of(args, folder, scale)
            dataset = work.dataset()
            jobs[scale] = {
                "dataset": os.fspath(dataset),
                "drop": [os.fspath(dataset)],
                "memory": max(args.least_mib << 20, int(work.num_nodes * DIM * 4 * MEMORY_FRACTION)),
                "batch_size": args.batch_size,
                "strategy": STREAMED,
            }
        for figure in figures.values():
            figure(args, report, jobs)
        if args.only in "tight":
            tight(args, report, folder)


if __name__ == "__main__":
    if not answer(child):
        own = argparse.ArgumentParser(add_help=False)
        own.add_argument("--scales", default="22,24,26")
        mine, rest = own.parse_known_args()
        options = argparse.Namespace(
            **vars(arguments(__doc__ or "", rest, batches=16, batch_size=1000, least_mib=64)), **vars(mine)
        )
        if options.tiny:
            options.scales, options.batches, options.batch_size = "12,13", 4, 32
        main(run, options)
