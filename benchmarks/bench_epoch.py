"""Epochs of the reference workload R22: on demand and in superbatches, against np.memmap, fio and each other.

Figures: seconds of the first batches within a memory control group of 1 GiB, both sides through the same sampler and the same
batches (target: at most half of np.memmap's with MADV_RANDOM); rows loaded and seconds of an epoch under every policy with a
cache of 10 % of the rows; data preparation of a superbatch epoch beside np.memmap, the on-demand policies and fio; an epoch with
look-ahead beside its longer half; peak resident memory of an epoch without a model. Each run is a process of its own and starts
with a cold page cache.

``--seconds`` bounds a run: it is cut there, between batches, and its figures say how many batches they stand for. 0 runs whole
epochs.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from harness import (
    Report,
    alternate,
    arguments,
    bytes_read_by_kernel,
    drop_from_page_cache,
    fio_random_iops,
    have_fio,
    main,
    scratch,
    status,
)

GROUP_BYTES = 1 << 30
MARGIN_BYTES = 64 << 20
LEAST_BATCHES = 4  # of a run that is cut, so that its second half is steady
SUPERBATCH_BYTES = 680 << 20  # budget in 1 GiB where run files are written: their dirty pages are the group's too


# -- what runs in a child ------------------------------------------------------------------------------------------------------


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Run one epoch, or its first batches, and say what it took."""
    import numpy as np
    import torch

    after_torch = status("VmRSS")
    import featstore
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
        rows = np.load(job["features"], mmap_mode="r")
        rows._mmap.madvise(mmap.MADV_RANDOM)
        setup = time.perf_counter() - begin
        checksum = n_rows = n_batches = 0
        lookup_s, limit_s, marks = 0.0, job.get("limit_s", 0), []
        read_before = bytes_read_by_kernel()
        start = time.perf_counter()
        for batch in loader:
            at = time.perf_counter()
            x = batch.x if ours else torch.from_numpy(rows[batch.input_ids.numpy()])
            lookup_s += time.perf_counter() - at
            checksum ^= int(x[:: max(1, len(x) // 64)].view(torch.int32).sum())
            n_rows += len(x)
            n_batches += 1
            marks.append((time.perf_counter() - start, loader.stats()["seconds"], lookup_s))
            if n_batches == job["batches"] or (limit_s and len(marks) >= LEAST_BATCHES and time.perf_counter() - start > limit_s):
                break
            time.sleep(job.get("compute_s", 0.0))
        end = time.perf_counter()
        stats = loader.stats()
        loader.close()
        return {
            "seconds": end - begin,
            "setup_s": setup,
            "loop_s": end - start,
            "marks": marks,
            "drive": None if g.reader.drive is None else [g.reader.drive.iops, g.reader.drive.bandwidth],
            "lookup_s": lookup_s,
            "kernel_bytes": bytes_read_by_kernel() - read_before,
            "bytes_read": stats["bytes_read"],
            "reads": stats["reads"],
            "rows": n_rows,
            "batches": n_batches,
            "checksum": checksum,
            "rows_loaded": stats["rows_loaded"],
            "missed": stats["hits"].get("base", 0),
            "filled": sum(store.stats()["cache"]["fill_rows"] for store in g.features.values() if store.cache is not None),
            "stages": stats["seconds"],
            "peak": g.budget.peak,
            "after_torch": after_torch,
            "peak_resident": status("VmHWM"),
        }


def run_child(job: dict[str, Any], limit_bytes: int | None = None) -> dict[str, Any]:
    """Run a job in a process of its own, within a memory control group where a limit is given."""
    from featstore.testing.limits import memory_group

    for name in ("dataset", "features"):
        drop_from_page_cache(Path(job[name]))
    with nullcontext() if limit_bytes is None else memory_group(limit_bytes) as group:
        command = [sys.executable, __file__, "--child", json.dumps(job)]
        enter = None if group is None else group.enter
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
    return dict(json.loads(done.stdout.splitlines()[-1]))


# -- figures -------------------------------------------------------------------------------------------------------------------


def against_memmap(args: argparse.Namespace, report: Report, job: dict[str, Any]) -> None:
    """Seconds of the first batches in 1 GiB, from the opening on, the filling of the cache included."""
    results: dict[str, list[dict[str, Any]]] = {"featstore": [], "memmap": []}

    def side(name: str) -> float:
        more = {"policy": "sieve", "cache": "auto"} if name == "featstore" else {}
        result = run_child({**job, "side": name, "batches": args.batches, **more}, GROUP_BYTES)
        results[name].append(result)
        return float(result["seconds"])

    runs = alternate(args.runs, {name: (lambda name=name: side(name)) for name in results})
    assert len({result["checksum"] for both in results.values() for result in both}) == 1, "the sides differ in what they read"
    report.figure(
        "R22 on demand in 1 GiB",
        runs["featstore"],
        "s",
        reference="np.memmap with MADV_RANDOM, same batches",
        references=runs["memmap"],
        target="<= 0.5",
        batches=results["featstore"][0]["batches"],
        rows=results["featstore"][0]["rows"],
        stages=results["featstore"][-1]["stages"],
        reference_stages=results["memmap"][-1]["stages"],
    )


def per_policy(args: argparse.Namespace, report: Report, job: dict[str, Any]) -> None:
    """Rows loaded, and seconds, under every policy; a static cache's fill is counted."""
    from featstore import PlannedPolicy, available_policies, get_policy

    job = {**job, "limit_s": args.seconds}
    plain = run_child({**job, "side": "featstore", "batches": args.policy_batches, "memory": job["roomy"]})
    for policy in [name for name in available_policies() if not isinstance(get_policy(name), PlannedPolicy)]:
        more = {"policy": policy, "cache": 0.1, "batches": args.policy_batches, "memory": job["roomy"]}
        result = run_child({**job, "side": "featstore", **more})
        if result["batches"] == plain["batches"]:
            assert result["checksum"] == plain["checksum"], f"{policy}: other bytes"
        report.figure(
            f"R22 on demand, {policy}, cache of 10 % of the rows",
            float(result["rows_loaded"] + result["filled"]),
            "rows loaded",
            reference="rows asked for",
            ratio=(result["rows_loaded"] + result["filled"]) / result["rows"],
            seconds=steady(result, args.policy_batches, lambda mark: mark[0]) + result["setup_s"],
            seconds_without_cache=steady(plain, args.policy_batches, lambda mark: mark[0]) + plain["setup_s"],
            gather_s=result["stages"]["gather"],
            batches=result["batches"],
        )


def steady(result: dict[str, Any], n_batches: int, cost: Any) -> float:
    """Cost of an epoch of ``n_batches``: what it came to, or, of a run that was cut, its second half stretched to the rest.

    ``cost(mark)`` is the cost so far at a batch's end. By the second half caches are full, which only flatters the reference.
    """
    marks = result["marks"]
    if len(marks) >= n_batches:
        return float(cost(marks[-1]))
    middle, last = marks[len(marks) // 2 - 1], marks[-1]
    rate = (cost(last) - cost(middle)) / (len(marks) - len(marks) // 2)
    return float(cost(last) + rate * (n_batches - len(marks)))


def prepared_s(mark: Any) -> float:
    """Seconds of data preparation after sampling: gather, update, and in the serial schedule the switch with its reads."""
    return float(sum(mark[1].get(stage, 0.0) for stage in ("gather", "update", "load", "switch")) + mark[2])


def preparation(args: argparse.Namespace, report: Report, job: dict[str, Any]) -> None:
    """Data preparation of an epoch within 1 GiB: the serial schedule beside np.memmap, the on-demand policies, and fio.

    In the serial schedule nothing else reads while batches are gathered; on demand the whole adjacency is in memory, so that
    there too only the gather reads, within a larger budget. The feature cache is a tenth of the rows on every side.
    """
    n = job["n_batches"]
    ondemand, job = {**job, "memory": job["ondemand"]}, {**job, "memory": min(job["memory"], SUPERBATCH_BYTES)}
    fio_before = device_iops(args, job)
    options = {"strategy": "ginex", "length": args.superbatch}
    ours = run_child(
        {**job, "side": "featstore", "neighbors": 0, "cache": 0.1, "batches": 0, **options},
        GROUP_BYTES,
    )
    fio_after = device_iops(args, job)
    seconds = prepared_s(ours["marks"][-1])
    more = {
        "batches": ours["batches"],
        "rows_loaded": ours["rows_loaded"],
        "stages": ours["stages"],
        "superbatch": args.superbatch,
    }
    gather_s = ours["stages"]["gather"] + ours["stages"]["update"] + ours["stages"]["load"]
    missed = ours["missed"]
    report.figure(
        "device queue over the gather stage",
        missed / gather_s,
        "rows/s",
        reference="random 4 KiB reads a second of fio, depth 256, mean of before and after",
        references=[(fio_before + fio_after) / 2] if fio_before is not None and fio_after is not None else None,
        target=">= 0.9",
        pages_per_s=ours["bytes_read"] / 4096 / gather_s,
        kernel_bytes=ours["kernel_bytes"],
        **more,
    )
    for policy in args.policies.split(","):
        theirs = run_child(
            {**ondemand, "side": "featstore", "policy": policy, "cache": 0.1, "batches": n, "limit_s": args.seconds}, GROUP_BYTES
        )
        reference_s = steady(theirs, n, prepared_s) + theirs["stages"].get("cache", 0.0)
        report.figure(
            f"R22 in 1 GiB, data preparation in superbatches against {policy}",
            reference_s / seconds,
            "x",
            reference=f"on demand, {policy}, cache of 10 % of the rows, its fill counted",
            ratio=reference_s / seconds,
            target=">= 1.3",
            seconds=seconds,
            reference_seconds=reference_s,
            reference_batches=theirs["batches"],
            reference_rows_loaded=theirs["rows_loaded"] + theirs["filled"],
            **more,
        )
    theirs = run_child({**ondemand, "side": "memmap", "batches": n, "limit_s": args.seconds}, GROUP_BYTES)
    reference_s = steady(theirs, n, prepared_s)
    report.figure(
        "R22 in 1 GiB, data preparation in superbatches against np.memmap",
        reference_s / seconds,
        "x",
        reference="np.memmap with MADV_RANDOM, same batches",
        ratio=reference_s / seconds,
        target=">= 5",
        seconds=seconds,
        reference_seconds=reference_s,
        reference_batches=theirs["batches"],
        **more,
    )


def device_iops(args: argparse.Namespace, job: dict[str, Any]) -> float | None:
    """fio's random 4 KiB reads a second from the dataset's feature file, only read; None without fio."""
    if not have_fio():
        return None
    files = [path for path in Path(job["dataset"]).iterdir() if path.is_file()]
    return fio_random_iops(max(files, key=lambda path: path.stat().st_size), 2_000 if args.tiny else 500_000)


def hidden(args: argparse.Namespace, report: Report, job: dict[str, Any]) -> None:
    """An epoch with look-ahead, the loop idle for a set time each batch, against the longer of its two halves run alone.

    The halves are the stages of the serial schedule over the same batches, in which nothing runs beside anything: sampling and
    planning; run files, gather, update and the set time.
    """
    compute_s = args.compute_ms / 1000
    job = {**job, "memory": job["roomy"], "seeds": job["seeds"] // 2, "side": "featstore", "cache": 0.1}
    job = {**job, "batches": 0, "compute_s": compute_s}
    length = max(1, args.superbatch // 4)
    values, references, stages = [], [], []
    for _ in range(args.runs):
        alone = run_child({**job, "prefetch": 0, "strategy": "ginex", "length": length})
        found = run_child({**job, "strategy": "superbatch", "length": length})
        assert found["checksum"] == alone["checksum"]
        s = alone["stages"]
        inspection = s["sample"] + s["plan"]
        execution = s["load"] + s["gather"] + s["update"] + compute_s * alone["batches"]
        values.append(found["loop_s"])
        references.append(max(inspection, execution))
        stages.append({"inspection": inspection, "execution": execution})
    report.figure(
        "R22, epoch with inspection beside the loop",
        values,
        "s",
        reference="the longer of sampling + planning and run files + gather + update + compute, each alone",
        references=references,
        target="<= 1.1",
        halves=stages,
        compute_s=compute_s,
        batches=found["batches"],
        superbatch=length,
    )


def peak_memory(args: argparse.Namespace, report: Report, job: dict[str, Any]) -> None:
    """Most resident memory beyond that after ``import torch``, against the budget and 64 MB."""
    values = []
    allowed = job["memory"] + MARGIN_BYTES
    for _ in range(args.runs):
        result = run_child({**job, "side": "featstore", "policy": "sieve", "cache": "auto", "batches": args.batches})
        values.append(float(result["peak_resident"] - result["after_torch"]))
        assert result["peak"] <= job["memory"]
    report.figure(
        "peak resident memory of an epoch",
        values,
        "bytes",
        reference="budget + 64 MB, beyond import torch",
        references=[float(allowed)] * len(values),
        target="<= 1.0",
        budget=job["memory"],
    )


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    import r22

    with scratch(args, "epoch") as folder:
        work = r22.generate(folder, args.scale, seeds=max(1, round(200_000 * 2.0 ** (args.scale - 22))))
        job = {
            "dataset": os.fspath(work.dataset()),
            "features": os.fspath(work.feature_file()),
            "memory": args.memory << 20,
            "roomy": args.roomy << 20,
            "neighbors": 8 * work.num_nodes + 6 * work.n_edges,
            "batch_size": max(1, 1000 >> (22 - args.scale)),
            "prefetch": 1,
            "ondemand": (args.memory + 48) << 20,
            "seeds": work.n_seeds,
            "n_batches": -(-work.n_seeds // max(1, 1000 >> (22 - args.scale))),
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
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(json.loads(sys.argv[2]))))
    else:
        options = arguments(
            __doc__ or "",
            batches=5,
            policy_batches=200,
            scale=22,
            memory=720,
            roomy=1500,
            superbatch=50,
            compute_ms=300,
            seconds=40,
        )
        options.policies = "frequency,sieve"  # the least rows loaded of the static ones and of the online ones
        if options.tiny:
            options.scale, options.batches, options.policy_batches, options.runs = 12, 5, 5, 1
            options.memory = options.roomy = 64
            options.superbatch, options.compute_ms = 8, 1
        main(run, options)
