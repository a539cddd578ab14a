"""An aggregated feature, out of core: bytes and passes, seconds beside a product in memory, and additions by threads.

R22 (``--scale``) within ``--budget`` MiB (1024), in groups:

- ``passes``: one hop of the mean. Bytes by the kernel's count, against one reading of the features more than there are blocks.
  Seconds against the longer of two: its reads, at the rate at which the library reads the feature in sequence; its additions.
- ``product``: the sum, in float64, beside SciPy's product in memory, all of whose rows are compared bit for bit. The
  product needs 16 bytes a number of the features beside the adjacency.
- ``threads``: seconds of the additions, one thread against all.

``$FEATSTORE_R22`` names a folder that ``tools.r22`` filled.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_array

import featstore
from benchmarks.tools.drive import sequential_rate
from benchmarks.tools.harness import Report, alternate, arguments, bytes_read_by_kernel, drop_from_page_cache, main, scratch
from benchmarks.tools.r22 import Workload, generate
from featstore.graph.derive.aggregate import aggregate_in_hops
from featstore.graph.passes import PassCosts
from featstore.ranks import Meeting

STEP = 1 << 16  # rows that are compared, or made, at once


def one_hop(
    path: Path, args: argparse.Namespace, op: str, dtype: str | None = None, threads: int | None = None
) -> tuple[PassCosts, dict[str, Any]]:
    """Aggregate one hop, with nothing of the dataset in the page cache; return its costs and what it took."""
    with featstore.open(path, memory=f"{args.budget}MiB", threads=threads) as g:
        g.topology.degrees(0, 1)
        drop_from_page_cache(path)
        rate = sequential_rate(g)
        drop_from_page_cache(path)
        read, begin = bytes_read_by_kernel(), time.perf_counter()
        costs = aggregate_in_hops(g, g.fields, g.adjacency, "x", op, None, 1, "x_made", dtype, True, None, False, Meeting(0, 1))[
            0
        ]
        seconds, read = time.perf_counter() - begin, bytes_read_by_kernel() - read
        nbytes, n_threads = g.features["x"].nbytes, g.options.threads
        assert g.budget.peak <= g.budget.total
    more = {
        "blocks": costs.blocks,
        "threads": n_threads,
        "reads_s": round(costs.bytes_read / rate, 2),
        "sum_s": round(costs.sum_s, 2),
        "wait_s": round(costs.wait_s, 2),
        "lists_s": round(costs.lists_s, 2),
    }
    bound = max(costs.bytes_read / rate, costs.sum_s)
    return costs, {"seconds": seconds, "read": read, "most": (costs.blocks + 1) * nbytes, "bound": bound, "more": more}


def passes(work: Workload, path: Path, args: argparse.Namespace, report: Report) -> None:
    """One hop of the mean: bytes against the blocks, and seconds against the drive's rate and the additions."""
    runs = [one_hop(path, args, "mean")[1] for _ in range(args.runs)]
    name, more = f"R{work.scale}, aggregate, mean, {args.budget} MiB", runs[-1]["more"]
    report.figure(
        f"{name}, bytes read",
        [float(run["read"]) for run in runs],
        "B",
        reference="blocks + 1 times the features",
        references=[float(run["most"]) for run in runs],
        target=None if args.tiny else "<= 1",
        **more,
    )
    report.figure(
        name,
        [run["seconds"] for run in runs],
        "s",
        reference="the longer of its reads at the drive's rate and its additions alone",
        references=[run["bound"] for run in runs],
        **more,
    )


def in_memory(work: Workload) -> Callable[[], Any]:
    """Return SciPy's product in memory, of float64 rows that are made beforehand."""
    n = work.num_nodes
    x = np.empty((n, work.dim))
    for k, block in enumerate(work.feature_blocks(STEP)):
        x[k * STEP : k * STEP + len(block)] = block
    indptr, indices = np.array(work.indptr), np.array(work.indices)
    matrix = csr_array((np.ones(len(indices)), indices, indptr), shape=(n, n))
    return lambda: matrix @ x


def product(work: Workload, path: Path, args: argparse.Namespace, report: Report) -> None:
    """The sum in float64, made out of core and by a product in memory in turns, and the same rows."""
    multiply = in_memory(work)
    made: dict[str, Any] = {}

    def ours() -> float:
        made["more"] = (found := one_hop(path, args, "sum", "float64")[1])["more"]
        return float(found["seconds"])

    def theirs() -> None:
        made["product"] = None  # its memory first
        made["product"] = multiply()

    sides = alternate(args.runs, {"ours": ours, "theirs": theirs})
    with featstore.open(path, memory=f"{args.budget}MiB") as g:
        for low in range(0, g.num_nodes, STEP):
            found, expected = g.features["x_made"][low : low + STEP].numpy(), made["product"][low : low + STEP]
            assert found.tobytes() == expected.tobytes(), f"rows from {low} on differ"
    report.figure(
        f"R{work.scale}, aggregate, sum, float64, {args.budget} MiB",
        sides["ours"],
        "s",
        reference="SciPy's product in memory",
        references=sides["theirs"],
        **made["more"],
    )


def threads(work: Workload, path: Path, args: argparse.Namespace, report: Report) -> None:
    """The additions alone: one thread, and all."""

    def additions(n_threads: int | None) -> float:
        return one_hop(path, args, "mean", threads=n_threads)[0].sum_s

    sides = alternate(args.runs, {"all": lambda: additions(None), "one": lambda: additions(1)})
    name = f"R{work.scale}, additions, {len(os.sched_getaffinity(0))} threads"
    report.figure(name, sides["all"], "s", reference="one thread", references=sides["one"])


def run(args: argparse.Namespace, report: Report) -> None:
    """Make the dataset, and measure on it."""
    if args.tiny:
        args.runs, args.budget, args.scale = 1, 32, 12
    with scratch(args, "aggregate") as folder:
        work = generate(os.environ.get("FEATSTORE_R22", folder), args.scale)
        path = work.dataset()
        for group in (passes, product, threads):
            if args.only in group.__name__:
                group(work, path, args, report)


if __name__ == "__main__":
    main(run, arguments(__doc__ or "", budget=1024, scale=22))
