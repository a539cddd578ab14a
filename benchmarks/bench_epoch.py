"""Epochs of the reference workload R22 on demand: against np.memmap in the same memory, per policy, and their peak memory.

Figures: seconds of the first batches within a memory control group of 1 GiB, both sides through the same sampler and the same
batches (target: at most half of np.memmap's with MADV_RANDOM); rows loaded and seconds of an epoch under every policy with a
cache of 10 % of the rows; peak resident memory of an epoch without a model. Each run is a process of its own and starts with a
cold page cache.
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

from harness import Report, alternate, arguments, drop_from_page_cache, main, scratch

GROUP_BYTES = 1 << 30
MARGIN_BYTES = 64 << 20


# -- what runs in a child ------------------------------------------------------------------------------------------------------


def status(field: str) -> int:
    """A figure of /proc/self/status in bytes: ``VmRSS`` is resident memory now, ``VmHWM`` the most so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status holds no {field}")


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Run one epoch, or its first batches, and say what it took."""
    import numpy as np
    import torch

    after_torch = status("VmRSS")
    import featstore

    begin = time.perf_counter()
    with featstore.open(job["dataset"], memory=job["memory"]) as g:
        g.cache_neighbors(job["neighbors"])
        sampler = featstore.NeighborSampler(g, [10, 10, 10], seed=0)
        ours = job["side"] == "featstore"
        loader = featstore.Loader(
            g,
            sampler,
            g.node_data["seeds"],
            job["batch_size"],
            features=["x"] if ours else [],
            labels=None,
            policy=job.get("policy"),
            feature_cache=job.get("cache"),
            prefetch=job["prefetch"],
        )
        rows = np.load(job["features"], mmap_mode="r")
        rows._mmap.madvise(mmap.MADV_RANDOM)
        setup = time.perf_counter() - begin
        checksum = n_rows = n_batches = 0
        for batch in loader:
            x = batch.x if ours else torch.from_numpy(rows[batch.input_ids.numpy()])
            checksum ^= int(x[:: max(1, len(x) // 64)].view(torch.int32).sum())
            n_rows += len(x)
            n_batches += 1
            if n_batches == job["batches"]:
                break
        stats = loader.stats()
        loader.close()
        seconds = time.perf_counter() - begin
        return {
            "seconds": seconds,
            "setup_s": setup,
            "rows": n_rows,
            "batches": n_batches,
            "checksum": checksum,
            "rows_loaded": stats["rows_loaded"],
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

    plain = run_child({**job, "side": "featstore", "batches": args.policy_batches, "memory": job["roomy"]})
    for policy in [name for name in available_policies() if not isinstance(get_policy(name), PlannedPolicy)]:
        more = {"policy": policy, "cache": 0.1, "batches": args.policy_batches, "memory": job["roomy"]}
        result = run_child({**job, "side": "featstore", **more})
        assert result["checksum"] == plain["checksum"], f"{policy}: other bytes"
        report.figure(
            f"R22 on demand, {policy}, cache of 10 % of the rows",
            float(result["rows_loaded"] + result["filled"]),
            "rows loaded",
            reference="rows asked for",
            ratio=(result["rows_loaded"] + result["filled"]) / result["rows"],
            seconds=result["seconds"],
            seconds_without_cache=plain["seconds"],
            gather_s=result["stages"]["gather"],
            batches=result["batches"],
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
        }
        job["neighbors"] = min(job["neighbors"], job["memory"] // 2)
        for name, figure in (("memmap", against_memmap), ("policy", per_policy), ("memory", peak_memory)):
            if args.only in name:
                figure(args, report, job)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(json.loads(sys.argv[2]))))
    else:
        options = arguments(__doc__ or "", batches=5, policy_batches=200, scale=22, memory=720, roomy=1500)
        if options.tiny:
            options.scale, options.batches, options.policy_batches, options.memory, options.roomy, options.runs = (
                12,
                5,
                5,
                64,
                64,
                1,
            )
        main(run, options)
