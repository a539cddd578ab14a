"""What a row costs as graphs grow: R22, R24, R26 with rows of 256 B, in memory of the same share of their features.

Figures: seconds of a million rows of each stage of a streamed epoch (sampling, planning, packing, gathering), of each scale
beside those of the smallest (target: at most 1.5 times); seconds to open a dataset, to read its offsets, and to cache neighbour
lists, beside those that the drive needs for the same bytes. Seeds grow with the nodes, so that a pass over the features serves as
many rows. Each run is a process of its own and starts with a cold page cache; the scales take turns. R26 takes 26 GB of disk.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from harness import (
    Report,
    alternate,
    answer,
    arguments,
    bytes_read_by_kernel,
    direct_rate,
    fio_scan_bandwidth,
    have_fio,
    main,
    run_child,
    scratch,
    timed_epoch,
)

DIM = 64
STAGES = ("sample", "plan", "pack", "gather")
SHARE = 2  # the memory is the features' bytes by this
NEIGHBORS = 8  # of the memory, the neighbour cache takes one in so many
CACHE = 0.1
FANOUTS = [10, 10, 10]


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Open a dataset, cache neighbour lists, and run an epoch where one is asked for; say what each took."""
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
        g.cache_neighbors(job["memory"] // NEIGHBORS)
        note("neighbour lists")
        if job["epoch"]:
            sampler = featstore.NeighborSampler(g, FANOUTS, seed=0)
            strategy = featstore.Streamed(cache=CACHE)
            seeds = g.node_data["seeds"]
            with featstore.Loader(g, sampler, seeds, job["batch_size"], features="x", labels=None, strategy=strategy) as loader:
                found["epoch"] = timed_epoch(loader, lambda batch: batch.x)
                found["stats"] = loader.stats()
    return found


def stages_of(result: dict[str, Any]) -> dict[str, float]:
    """Seconds of a million rows of an epoch, by stage and in all."""
    millions = result["epoch"]["rows"] / 1e6
    seconds = {stage: result["stats"]["seconds"].get(stage, 0.0) for stage in STAGES}
    return {stage: taken / millions for stage, taken in {**seconds, "epoch": result["epoch"]["loop_s"]}.items()}


def epochs(args: argparse.Namespace, report: Report, jobs: dict[int, dict[str, Any]]) -> None:
    """Seconds of a million rows by stage, each scale beside the smallest."""
    results: dict[int, list[dict[str, Any]]] = {scale: [] for scale in jobs}

    def side(scale: int) -> None:
        results[scale].append(run_child(__file__, {**jobs[scale], "epoch": True}))

    alternate(args.runs, {str(scale): (lambda scale=scale: side(scale)) for scale in jobs})
    least = min(jobs)
    for scale, found in results.items():
        stats = found[-1]["stats"]
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
                superbatch=stats.get("superbatch"),
                memory=jobs[scale]["memory"],
            )


def opening(args: argparse.Namespace, report: Report, jobs: dict[int, dict[str, Any]]) -> None:
    """Seconds to open, to read offsets and to cache neighbour lists, beside the drive's for the same bytes."""
    for scale, job in jobs.items():
        file = max(Path(job["dataset"]).glob("edge.indices.*.rows"))
        found: list[dict[str, Any]] = []
        rates: dict[str, list[float]] = {"fio": [], "direct reads": []}
        for _ in range(args.runs):
            rates["direct reads"].append(direct_rate(file))
            if have_fio():
                rates["fio"].append(fio_scan_bandwidth(file))
            found.append(run_child(__file__, {**job, "epoch": False}))
        for name, target in (("open", None), ("offsets", "<= 1.5"), ("neighbour lists", "<= 1.5")):
            for whose, reached in rates.items():
                report.figure(
                    f"R{scale}, {name}",
                    [result[name]["seconds"] for result in found],
                    "s",
                    reference=f"the same bytes in sequence at the rate of {whose}",
                    references=[max(1, result[name]["bytes"]) / rate for result, rate in zip(found, reached, strict=True)]
                    if reached
                    else None,
                    target=target,
                    kernel_bytes=found[-1][name]["bytes"],
                    read_bytes_per_s=reached,
                )


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    import r22

    scales = [int(scale) for scale in args.scales.split(",")]
    with scratch(args, "growth") as folder:
        jobs = {}
        for scale in scales:
            seeds = max(1, round(args.batches * args.batch_size * 2.0 ** (scale - min(scales))))
            work = r22.generate(folder, scale, seeds=seeds, dim=DIM)
            dataset = work.dataset()
            jobs[scale] = {
                "dataset": os.fspath(dataset),
                "features": os.fspath(dataset),  # no memory map of them is needed
                "memory": max(args.least_mib << 20, work.num_nodes * DIM * 4 // SHARE),
                "batch_size": args.batch_size,
            }
        for name, figure in {"open": opening, "epoch": epochs}.items():
            if args.only in name:
                figure(args, report, jobs)


if __name__ == "__main__":
    if not answer(child):
        own = argparse.ArgumentParser(add_help=False)
        own.add_argument("--scales", default="22,24,26")
        mine, rest = own.parse_known_args()
        options = argparse.Namespace(
            **vars(arguments(__doc__ or "", rest, batches=16, batch_size=1000, least_mib=64)), **vars(mine)
        )
        if options.tiny:
            options.scales, options.runs, options.batches, options.batch_size = "12,13", 1, 4, 32
        main(run, options)
