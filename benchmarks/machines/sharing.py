"""Memory of ranks that share their caches of rows and of neighbour lists: R22 (``--scale``), 1 and 4 ranks (``--ranks``).

Each rank is a process that opens the dataset, caches ``--percent`` of the rows (20) and ``--lists-mib`` of neighbour lists (64),
and goes through batches on demand. Its memory is the proportional one at the end of its batches: ``Pss`` of
``/proc/self/smaps_rollup``, in which a page that n processes map counts 1/n. What it was after ``import torch``, beside as many
other ranks, is subtracted. The promise: all ranks together take 1.2 times the memory of one, and the buffers of each other rank,
which are what its budget counts beside the caches. A second figure compares with ranks that have caches of their own. A third
compares the seconds of one rank's batches with those from caches that are private.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.tools.harness import Report, answer, arguments, main, scratch
from benchmarks.tools.r22 import generate
from benchmarks.tools.ranks import line_of, start_ranks, tell

STEPS = ("imported", "done")
ROWS, LISTS = "cache of 'x'", "neighbor cache"


def proportional_bytes() -> int:
    """This process's proportional memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def meet(step: str) -> None:
    """Tell the parent that a step is reached, and wait until all ranks have reached it."""
    print(json.dumps(step), flush=True)
    sys.stdin.readline()


def rank_of(job: dict[str, Any]) -> dict[str, Any]:
    """Be one rank: report the memory after importing torch and after the batches, and what the budget counts."""
    import torch

    meet("imported")
    imported = proportional_bytes()
    meet("measured")
    import featstore

    with featstore.open(job["dataset"], memory=job["memory"], threads=1) as g:
        sharing = {"shared": job["ranks"]} if job["is_shared"] else {}
        g.cache_neighbors(job["lists"], progress=False, **sharing)
        g.cache("x", job["percent"] / 100, **sharing)
        sampler = featstore.NeighborSampler(g, [10, 5], seed=0)
        own = torch.from_numpy(job_seeds(g, job))
        begin = time.perf_counter()
        with featstore.Loader(g, sampler, own, batch_size=job["batch"], strategy="ondemand", features="x", labels=None) as loader:
            for batch in loader:
                assert len(batch.x)
            seconds = time.perf_counter() - begin
            meet("done")
            used = proportional_bytes()
            held, hits = dict(g.memory_report()), g.features["x"].stats()["cache"]["hits"]
            meet("measured")
    caches = {name: held.pop(name) for name in (ROWS, LISTS)}
    return {"bytes": used - imported, "caches": caches, "own": sum(held.values()), "hits": hits, "s": seconds}


def job_seeds(g: Any, job: dict[str, Any]) -> Any:
    """Seeds of a rank: nodes drawn by its number."""
    import numpy as np

    return np.random.default_rng(job["rank"]).choice(g.num_nodes, min(g.num_nodes, job["batch"] * job["batches"]), replace=False)


def together(job: dict[str, Any], n: int, *, is_shared: bool) -> list[dict[str, Any]]:
    """Run ``n`` ranks side by side; return what each reports."""
    jobs = [{**job, "ranks": n, "rank": rank, "is_shared": is_shared} for rank in range(n)]
    with start_ranks(__spec__.name, jobs, stdin=subprocess.PIPE) as ranks:
        for _ in range(2 * len(STEPS)):
            said = [line_of(each) for each in ranks]
            assert len(set(said)) == 1, said
            tell(ranks, "")
        found = [json.loads(line_of(each)) for each in ranks]
        assert not any(each.wait() for each in ranks)
        return found


def total(found: list[dict[str, Any]]) -> float:
    return float(sum(each["bytes"] for each in found))


def measured(args: argparse.Namespace, report: Report, dataset: Path) -> None:
    """All figures."""
    job: dict[str, Any] = {
        "dataset": os.fspath(dataset),
        "memory": "64MiB" if args.tiny else f"{args.budget}MiB",
        "lists": f"{args.lists_mib}MiB",
        "percent": args.percent,
        "batch": 100 if args.tiny else 1000,
        "batches": 4 if args.tiny else 20,
    }
    bound, shared, private, slow, gathers = [], [], [], [], []
    for _ in range(args.runs):
        (one,) = together(job, 1, is_shared=True)
        (alone,) = together(job, 1, is_shared=False)
        assert one["hits"] == alone["hits"]
        all_ranks = together(job, args.ranks, is_shared=True)
        for name, n_bytes in one["caches"].items():
            assert all(each["caches"][name] <= -(-n_bytes // args.ranks) + 4096 for each in all_ranks)
        shared.append(total(all_ranks))
        bound.append(1.2 * one["bytes"] + (args.ranks - 1) * one["own"])
        private.append(total(together(job, args.ranks, is_shared=False)))
        slow.append(one["s"])
        gathers.append(alone["s"])
    name = f"R{args.scale}, {args.ranks} ranks, {args.percent} % of the rows"
    more = {"of_one": one["bytes"], "own": one["own"], "caches": one["caches"]}
    target = None if args.tiny else "<= 1"
    reference = "1.2 x one rank's and the buffers of the others"
    report.figure(f"{name}: proportional memory", shared, "bytes", reference=reference, references=bound, target=target, **more)
    report.figure(
        f"{name}: proportional memory, to caches of their own", shared, "bytes", reference="their own", references=private
    )
    report.figure(f"{name}: seconds of batches of one", slow, "s", reference="private caches", references=gathers)


def run(args: argparse.Namespace, report: Report) -> None:
    """Make the dataset and measure."""
    if args.tiny:
        args.scale, args.lists_mib, args.ranks = 12, 1, 2
    with scratch(args, f"sharing-r{args.scale}") as folder:
        measured(args, report, generate(os.environ.get("FEATSTORE_R22", folder), args.scale).dataset())


if __name__ == "__main__":
    if not answer(rank_of):
        main(run, arguments(__doc__ or "", scale=22, ranks=4, percent=20, lists_mib=64, budget=2048))
