"""Two ranks on one drive (machines.ranks): rows a second of each, and of both, where reading is what bounds them.

Each rank is a process with one share of the batches of the same loader, without caches of rows: nearly every row is read from
the drive. Neighbour lists are in memory. A single process with all batches, and fio's random reads of as many bytes, where it is
installed, say what the drive can do. All begin at once: a rank's rate is that until the first of them is done.
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

import numpy as np

import featstore
from benchmarks.tools.drive import fio_random_iops, have_fio
from benchmarks.tools.harness import PAGE_BYTES, Report, answer, bytes_read_by_kernel
from benchmarks.tools.ranks import line_of, start_ranks, tell

RANKS = 2
FANOUTS = [10, 10]
BEGIN_S = 0.2  # until all begin
STEP_S = 0.05  # between two notes of how many rows a rank has


def rank_of(job: dict[str, Any]) -> dict[str, Any]:
    """Be one rank: return how many rows it had at which time after all began, and the bytes that it read."""
    import torch

    torch.set_num_threads(1)
    with featstore.open(job["dataset"], memory=job["memory"], threads=1) as g:
        g.cache_neighbors(progress=False)
        sampler = featstore.NeighborSampler(g, FANOUTS, seed=0)
        seeds = g.node_data["seeds"][: job["batch"] * job["batches"] * RANKS]
        share = {"rank": job["rank"], "world_size": job["world_size"]}
        strategy = featstore.OnDemand(cache=None)
        marks, n_rows, checksum = [(0.0, 0)], 0, 0
        with featstore.Loader(g, sampler, seeds, job["batch"], labels=None, strategy=strategy, **share) as loader:
            print("ready", flush=True)
            begin = float(sys.stdin.readline())
            before = bytes_read_by_kernel()
            time.sleep(max(0.0, begin - time.monotonic()))
            for batch in loader:
                n_rows += len(batch.x)
                checksum ^= int(batch.x[::64].view(torch.int32).sum())
                now = time.monotonic()
                if now - begin - marks[-1][0] >= STEP_S:
                    marks.append((now - begin, n_rows))
            marks.append((time.monotonic() - begin, n_rows))
            stats = loader.stats()
    return {"marks": marks, "bytes": bytes_read_by_kernel() - before, "waited": stats["seconds"]["wait"]}


def together(job: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    """Run ranks side by side, begun at once; return what each found."""
    jobs = [{**job, "rank": rank, "world_size": world_size} for rank in range(world_size)]
    with start_ranks(__spec__.name, jobs, stdin=subprocess.PIPE) as ranks:
        for each in ranks:
            assert line_of(each) == "ready\n"
        tell(ranks, str(time.monotonic() + BEGIN_S))
        found = [line_of(each) for each in ranks]
        assert not any(each.wait() for each in ranks), "a rank has failed; its error is above"
        return [json.loads(each) for each in found]


def rates(found: list[dict[str, Any]]) -> list[float]:
    """Rows a second of each rank until the first of them is done."""
    end = min(each["marks"][-1][0] for each in found)
    return [float(np.interp(end, *zip(*each["marks"], strict=True))) / end for each in found]


def drive(args: argparse.Namespace, report: Report, name: str, dataset: Path) -> None:
    """Print the rates of both ranks beside one process's, and the slower beside the faster."""
    job: dict[str, Any] = {
        "dataset": os.fspath(dataset),
        "memory": "64MiB" if args.tiny else "1GiB",
        "batch": 50 if args.tiny else 500,
        "batches": 4 if args.tiny else 40,
    }
    alone, both, slower, faster, iops, read, blocks = [], [], [], [], [], [], []
    with featstore.open(dataset, memory="64MiB") as g:
        path, row_bytes = Path(g.features["x"].source.path), g.features["x"].source.row_bytes
    for _ in range(args.runs):
        (one,) = together(job, 1)
        alone += rates([one])
        found = together(job, RANKS)
        slow, fast = sorted(rates(found))
        both.append(slow + fast)
        slower.append(slow)
        faster.append(fast)
        read.append(sum(each["bytes"] for each in found))
        blocks.append(read[-1] / PAGE_BYTES / max(each["marks"][-1][0] for each in found))
        if have_fio():
            iops.append(fio_random_iops(path, max(1, read[-1] // PAGE_BYTES)))
    more = {"row_bytes": row_bytes, "bytes": read}
    label = f"{name}, {RANKS} ranks, no rows in memory"
    target = None if args.tiny else ">= 0.95"
    report.figure(
        f"{label}: rows a second of both", both, "rows/s", reference="one process", references=alone, target=target, **more
    )
    report.figure(
        f"{label}: rows a second of the slower",
        slower,
        "rows/s",
        reference="the faster",
        references=faster,
        target=None if args.tiny else ">= 0.8",
    )
    if iops and not args.tiny:
        report.figure(
            f"{label}: blocks of 4 KiB that both read a second",
            blocks,
            "blocks/s",
            reference="random reads of 4 KiB a second, by fio, of the same file",
            references=iops,
        )


if __name__ == "__main__":
    answer(rank_of)
