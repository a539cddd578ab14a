"""Epochs of the reference workload R22: on demand and in superbatches, against np.memmap, fio and each other.

Figures: seconds of an epoch within a memory control group of 1 GiB, both sides through the same sampler and the same batches
(target: at most half of np.memmap's); rows loaded and seconds of an epoch under every policy with a cache of 10 % of the rows;
data preparation of a superbatch epoch beside np.memmap, the on-demand policies and fio; an epoch with look-ahead whose loop
computes for as long as the loader prepares, beside the longer of the two; peak resident memory of the first batches without a
model. Each run is a process of its own and starts with a cold page cache.

np.memmap is read by ``--threads`` threads (tools.memmap), and by one beside it. It is cut after ``--seconds``, between batches,
and the second half of what ran stands for the rest: its page cache is full after the first batch. All others run whole epochs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tools.drive import fio_random_iops, have_fio
from benchmarks.tools.harness import (
    GROUP_BYTES,
    Report,
    alternate,
    answer,
    arguments,
    main,
    run_child,
    scratch,
    status,
    timed_epoch,
    whole_epoch,
)

MARGIN_BYTES = 64 << 20
SUPERBATCH_BYTES = 680 << 20  # budget in 1 GiB where run files are written: their dirty pages are the group's too


# -- what runs in a child ------------------------------------------------------------------------------------------------------


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Run one epoch, or its first batches, and say what it took."""
    import torch

    after_torch = status("VmRSS")
    import featstore
    from benchmarks.tools.memmap import MemmapRows
    from featstore.strategies.registry import find_strategy

    begin = time.perf_counter()
    with featstore.open(job["dataset"], memory=job["memory"]) as g:
        if job["neighbors"]:
            g.cache_neighbors(job["neighbors"])
        sampler = featstore.NeighborSampler(g, [10, 10, 10], seed=0)
        ours = job["side"] == "featstore"
        fields = {name: job[name] for name in ("cache", "policy", "length") if job.get(name) is not None}
        loader = featstore.Loader(
            g,
            sampler,
            g.node_data["seeds"][: job.get("seeds")],
            job["batch_size"],
            features=["x"] if ours else [],
            labels=None,
            strategy=find_strategy(job.get("strategy", "ondemand"))(**fields),
            prefetch=job["prefetch"],
        )
        rows = None if ours else MemmapRows(job["features"], job["threads"])

        def rows_of(batch: Any) -> torch.Tensor:
            found: torch.Tensor = batch.x if rows is None else rows[batch.input_ids]
            return found

        setup = time.perf_counter() - begin
        epoch = timed_epoch(
            loader,
            rows_of,
            most=job.get("batches", 0),
            limit_s=job.get("limit_s", 0),
            compute_s=job.get("compute_s", 0.0),
            note=lambda: {"stages": loader.stats()["seconds"]},
        )
        stats = loader.stats()
        loader.close()
        return epoch | {
            "setup_s": setup,
            "bytes_read": stats["bytes_read"],
            "reads": stats["reads"],
            "rows_loaded": stats["rows_loaded"],
            "missed": stats["hits"].get("base", 0),
            "filled": sum(store.stats()["cache"]["fill_rows"] for store in g.features.values() if store.cache is not None),
            "stages": stats["seconds"],
            "peak": g.budget.peak,
            "after_torch": after_torch,
            "peak_resident": status("VmHWM"),
        }


# -- figures -------------------------------------------------------------------------------------------------------------------


def run_memmap(args: argparse.Namespace, job: dict[str, Any], threads: int) -> dict[str, Any]:
    """Run an epoch over np.memmap in 1 GiB, cut after ``--seconds``."""
    return run_child(__spec__.name, {**job, "side": "memmap", "threads": threads, "limit_s": args.seconds}, GROUP_BYTES)


def check_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Check that both sides read the same rows, as far as both went."""
    n = min(ours["batches"], theirs["batches"])
    assert ours["marks"][n - 1]["checksum"] == theirs["marks"][n - 1]["checksum"], "the sides differ in what they read"


def epoch_s(result: dict[str, Any], n_batches: int) -> float:
    """Seconds of a whole epoch from the opening on, the filling of caches included."""
    return float(result["setup_s"] + whole_epoch([mark["seconds"] for mark in result["marks"]], n_batches))


def against_memmap(args: argparse.Namespace, report: Report, job: dict[str, Any]) -> None:
    """Seconds of an epoch on demand in 1 GiB, beside np.memmap read by many threads and by one."""
    many, one = f"{args.threads} threads", "1 thread"
    sides: dict[str, Callable[[], dict[str, Any]]] = {
        "featstore": lambda: run_child(
            __spec__.name, {**job, "side": "featstore", "policy": "sieve", "cache": "auto"}, GROUP_BYTES
        ),
        many: lambda: run_memmap(args, job, args.threads),
        one: lambda: run_memmap(args, job, 1),
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}

    def side(name: str) -> float:
        results[name].append(sides[name]())
        return epoch_s(results[name][-1], job["n_batches"])

    runs = alternate(args.runs, {name: (lambda name=name: side(name)) for name in sides})
    ours = results["featstore"]
    for threads, target in ((many, "<= 0.5"), (one, None)):
        theirs = results[threads]
        for pair in zip(ours, theirs, strict=True):
            check_same(*pair)
        report.figure(
            "R22, an epoch on demand in 1 GiB",
            runs["featstore"],
            "s",
            reference=f"np.memmap with MADV_RANDOM read by {threads}, same batches",
            references=runs[threads],
            target=target,
            batches=ours[0]["batches"],
            rows=ours[0]["rows"],
            reference_batches=[result["batches"] for result in theirs],
            stages=ours[-1]["stages"],
            reference_stages=theirs[-1]["stages"],
        )


def per_policy(args: argparse.Namespace, report: Report, job: dict[str, Any]) -> None:
    """Rows loaded, and seconds, of an epoch under every policy; a static cache's fill is counted."""
    from featstore import PlannedPolicy, available_policies, get_policy

    job = {**job, "side": "featstore", "memory": job["roomy"]}
    plain = run_child(__spec__.name, job)
    for policy in args.policies.split(",") if args.tiny else available_policies():  # a process each
        if isinstance(get_policy(policy), PlannedPolicy) or getattr(get_policy(policy), "needs_parts", False):
            continue
        result = run_child(__spec__.name, {**job, "policy": policy, "cache": 0.1})
        check_same(result, plain)
        report.figure(
            f"R22 on demand, {policy}, cache of 10 % of the rows",
            float(result["rows_loaded"] + result["filled"]),
            "rows loaded",
            reference="rows asked for",
            ratio=(result["rows_loaded"] + result["filled"]) / result["rows"],
            seconds=epoch_s(result, job["n_batches"]),
            seconds_without_cache=epoch_s(plain, job["n_batches"]),
            gather_s=result["stages"]["gather"],
            batches=result["batches"],
        )


def prepared_s(result: dict[str, Any], n_batches: int) -> float:
    """Seconds of an epoch's data preparation after sampling: gather, update, and in the serial schedule the switch."""
    stages = ("gather", "update", "load", "switch")
    costs = [sum(mark["stages"].get(stage, 0.0) for stage in stages) + mark["lookup_s"] for mark in result["marks"]]
    return float(whole_epoch(costs, n_batches))


def preparation(args: argparse.Namespace, report: Report, job: dict[str, Any]) -> None:
    """Data preparation of an epoch within 1 GiB: the serial schedule beside np.memmap, the on-demand policies, and fio.

    In the serial schedule nothing else reads while batches are gathered; on demand the whole adjacency is in memory, so that
    there too only the gather reads, within a larger budget. The feature cache is a tenth of the rows on every side.
    """
    n = job["n_batches"]
    ondemand, job = {**job, "memory": job["ondemand"]}, {**job, "memory": min(job["memory"], SUPERBATCH_BYTES)}
    fio_before = drive_iops(args, job)
    options = {"strategy": "ginex", "length": args.superbatch}
    ours = run_child(__spec__.name, {**job, "side": "featstore", "neighbors": 0, "cache": 0.1, **options}, GROUP_BYTES)
    fio_after = drive_iops(args, job)
    seconds = prepared_s(ours, n)
    stages = ours["stages"]
    more = {"batches": ours["batches"], "rows_loaded": ours["rows_loaded"], "stages": stages, "superbatch": args.superbatch}
    gather_s = stages["gather"] + stages["update"] + stages["load"]
    # The switch reads the rows that a superbatch begins with, which count as reads, but as nobody's misses.
    for name, count, in_s, target in (
        ("missed rows a second of the gather stage", ours["missed"], gather_s, ">= 0.9"),
        ("reads a second of the gather stage and the switch", ours["reads"], gather_s + stages["switch"], None),
    ):
        report.figure(
            name,
            count / in_s,
            "rows/s" if target else "reads/s",
            reference="random 4 KiB reads a second of fio at its best depth, mean of before and after",
            references=[(fio_before + fio_after) / 2] if fio_before is not None and fio_after is not None else None,
            target=target,
            pages_per_read=ours["bytes_read"] / 4096 / max(1, ours["reads"]),
            kernel_bytes=ours["kernel_bytes"],
            **more,
        )
    for policy in args.policies.split(","):
        theirs = run_child(__spec__.name, {**ondemand, "side": "featstore", "policy": policy, "cache": 0.1}, GROUP_BYTES)
        check_same(ours, theirs)
        reference_s = prepared_s(theirs, n) + theirs["stages"].get("cache", 0.0)
        report.figure(
            f"R22 in 1 GiB, data preparation in superbatches against {policy}",
            reference_s / seconds,
            "x",
            reference=f"a whole epoch on demand, {policy}, cache of 10 % of the rows, its fill counted",
            ratio=reference_s / seconds,
            target=">= 1.3",
            seconds=seconds,
            reference_seconds=reference_s,
            reference_rows_loaded=theirs["rows_loaded"] + theirs["filled"],
            **more,
        )
    for threads, target in ((args.threads, ">= 5"), (1, None)):
        theirs = run_memmap(args, ondemand, threads)
        check_same(ours, theirs)
        reference_s = prepared_s(theirs, n)
        report.figure(
            f"R22 in 1 GiB, data preparation in superbatches against np.memmap, {threads} thread{'s' * (threads > 1)}",
            reference_s / seconds,
            "x",
            reference="np.memmap with MADV_RANDOM, same batches",
            ratio=reference_s / seconds,
            target=target,
            seconds=seconds,
            reference_seconds=reference_s,
            reference_batches=theirs["batches"],
            **more,
        )


def drive_iops(args: argparse.Namespace, job: dict[str, Any]) -> float | None:
    """fio's random 4 KiB reads a second from the dataset's feature file, at its best depth; None without fio."""
    if not have_fio():
        return None
    files = [path for path in Path(job["dataset"]).iterdir() if path.is_file()]
    return fio_random_iops(max(files, key=lambda path: path.stat().st_size), 2_000 if args.tiny else 500_000)


def hidden(args: argparse.Namespace, report: Report, job: dict[str, Any]) -> None:
    """An epoch with look-ahead whose loop sleeps for as long as the loader works, against the longer of these two halves.

    The loader's half is the sum of all stages of the serial schedule over the same batches, in which nothing runs beside
    anything: sampling, planning, run files, gather, update. The loop's half is as long by its choice of sleep, so a schedule that
    hid nothing would take twice the reference, and none can take less than it.
    """
    job = {**job, "memory": job["roomy"], "seeds": max(1, job["seeds"] // 2), "side": "featstore", "cache": 0.1}
    length = max(1, args.superbatch // 4)
    values, references, halves, firsts, beside = [], [], [], [], []
    for _ in range(args.runs):
        alone = run_child(__spec__.name, {**job, "prefetch": 0, "strategy": "ginex", "length": length})
        work = {stage: alone["stages"].get(stage, 0.0) for stage in ("sample", "plan", "load", "gather", "update")}
        preparation_s = sum(work.values())
        compute_s = preparation_s / alone["batches"]
        found = run_child(__spec__.name, {**job, "strategy": "superbatch", "length": length, "compute_s": compute_s})
        check_same(found, alone)
        values.append(found["loop_s"])
        references.append(max(preparation_s, found["compute_s"]))
        firsts.append(found["marks"][0]["seconds"])
        # Stages of a loader's threads beside the loop: their sum may exceed the epoch. What is longer than alone says what waits.
        beside.append({stage: [round(seconds, 3), round(work.get(stage, 0.0), 3)] for stage, seconds in found["stages"].items()})
        halves.append({"preparation": preparation_s, "compute": found["compute_s"], "stages": work})
    report.figure(
        "R22, epoch with preparation beside the loop",
        values,
        "s",
        reference="the longer of the loader's stages one after the other and the loop's compute, which is set to the same",
        references=references,
        target="<= 1.1",
        halves=halves,
        stages_beside_and_alone=beside,
        first_batch_s=firsts,  # which nothing can hide
        batches=found["batches"],
        superbatch=length,
    )


def peak_memory(args: argparse.Namespace, report: Report, job: dict[str, Any]) -> None:
    """Most resident memory of the first batches beyond that after ``import torch``, against the budget and 64 MB."""
    values = []
    allowed = job["memory"] + MARGIN_BYTES
    for _ in range(args.runs):
        result = run_child(
            __spec__.name, {**job, "side": "featstore", "policy": "sieve", "cache": "auto", "batches": args.batches}
        )
        values.append(float(result["peak_resident"] - result["after_torch"]))
        assert result["peak"] <= job["memory"]
    report.figure(
        "peak resident memory",
        values,
        "bytes",
        reference="budget + 64 MB, beyond import torch",
        references=[float(allowed)] * len(values),
        target="<= 1.0",
        budget=job["memory"],
        batches=result["batches"],
    )


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    from benchmarks.tools import r22

    with scratch(args, "epoch") as folder:
        work = r22.scaled(folder, args.scale)
        job = {
            "dataset": os.fspath(work.dataset()),
            "features": os.fspath(work.feature_file()),
            "drop": [os.fspath(work.dataset()), os.fspath(work.feature_file())],
            "memory": args.memory << 20,
            "roomy": args.roomy << 20,
            "neighbors": 8 * work.num_nodes + 6 * work.n_edges,
            "batch_size": r22.batch_size(args.scale),
            "prefetch": 1,
            "ondemand": (args.memory + 48) << 20,
            "seeds": work.n_seeds,
            "n_batches": -(-work.n_seeds // r22.batch_size(args.scale)),
        }
        job["neighbors"] = min(job["neighbors"], job["memory"] // 2)
        figures = {
            "memmap": against_memmap,
            "policy": per_policy,
            "preparation": preparation,
            "hidden": hidden,
            "memory": peak_memory,
        }
        for name, figure in figures.items():
            if args.only in name:
                figure(args, report, job)


if __name__ == "__main__":
    if not answer(child):
        options = arguments(
            __doc__ or "",
            batches=5,
            scale=22,
            memory=720,
            roomy=1500,
            superbatch=50,
            seconds=40,
            threads=16,
        )
        options.policies = "frequency,sieve"  # the least rows loaded of the static ones and of the online ones
        if options.tiny:
            options.scale = 12
            options.memory = options.roomy = 64
            options.superbatch = 8
        main(run, options)
