"""Planning with Belady: accesses a second, rows loaded beside every other policy, time per access as a trace grows.

``--only simulate`` times ``featstore.simulate`` as a user calls it, with the ids of each batch in arrays, which it checks.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import featstore
from benchmarks.tools.harness import Report, alternate, arguments, main, reset_peak, scratch, status
from benchmarks.tools.r22 import Workload, generate
from featstore.cache.base import PolicyContext
from featstore.cache.belady import Belady
from featstore.cache.planned import Horizon, NextAccess
from featstore.plan.planfile import write_bytes, write_plan
from featstore.plan.trace import Trace, record
from featstore.storage.sections import SectionWriter

BATCH_SIZE = 1000
FANOUTS = [10, 10, 10]
SHARES = (0.05, 0.1, 0.2)


def plan_seconds(horizon: Horizon, capacity: int, folder: Path) -> float:
    """CPU seconds of the process to plan a horizon and write its changesets to a run file, as a superbatch's are."""
    policy = Belady()
    policy.start(capacity, PolicyContext(horizon.n, 1))
    start = time.process_time()
    longest = int(np.diff(horizon.offsets).max())
    with SectionWriter(folder / "plan", "plan", direct=write_bytes(longest)) as writer:
        for planned in policy.plan(horizon):
            write_plan(writer.append, planned)
        file = writer.finish()
    seconds = time.process_time() - start
    file.remove()
    return seconds


def csr_seconds(horizon: Horizon) -> float:
    """CPU seconds to build the CSR form of the next accesses alone, as the paper does first."""
    start = time.process_time()
    NextAccess(horizon)
    return time.process_time() - start


def speed(args: argparse.Namespace, report: Report, trace: Trace, _: Workload, folder: Path) -> None:
    """Planner on the reference workload, a cache of a tenth of the rows, ids from memory and from a file, changesets written."""
    trace.save(folder / "trace")
    on_disk = Trace.open(folder / "trace")

    system: dict[str, list[float]] = {"memory": [], "disk": []}

    def rate(side: str, horizon: Horizon) -> float:
        before = getrusage(RUSAGE_SELF).ru_stime
        seconds = plan_seconds(horizon, trace.n // 10, folder)
        system[side].append(round((getrusage(RUSAGE_SELF).ru_stime - before) / seconds, 3))
        return trace.n_accesses / seconds

    sides = {
        "memory": lambda: rate("memory", trace.horizon()),
        "disk": lambda: rate("disk", on_disk.horizon()),
        "csr": lambda: trace.n_accesses / csr_seconds(trace.horizon()),
    }
    # The first round touches memory that the machine may have to get from its host.
    results = alternate(args.runs, sides, warm_up=1)
    on_disk.close()
    (folder / "trace").unlink()
    size = {"accesses": trace.n_accesses, "batches": len(trace)}
    promise = None if args.tiny else ">= 60e6"
    for side, name in (("memory", "planning, changesets written"), ("disk", "planning from a trace file, changesets written")):
        # Beside the planner's own work: fresh memory, the copy to and from the page cache. It varies with the machine's memory.
        share = system[side][-args.runs :]
        report.figure(name, results[side], "accesses/s", target=promise, **size, share_in_kernel=share)
    report.figure(
        "planning, changesets written",
        results["memory"],
        "accesses/s",
        reference="building the CSR form of the next accesses alone",
        references=results["csr"],
        **size,
    )


def loads(args: argparse.Namespace, report: Report, trace: Trace, work: Workload, _: Path) -> None:
    """Rows loaded under every policy, fills counted."""
    out_degree = np.bincount(work.indices, minlength=trace.n)
    in_degree = np.diff(work.indptr)
    for share in SHARES:
        capacity = int(share * trace.n)
        loaded = partial(featstore.simulate, trace, capacity, in_degree=lambda: in_degree, out_degree=lambda: out_degree)
        best = int(loaded("belady").sum())
        for policy in featstore.available_policies():
            if policy == "belady" or getattr(featstore.get_policy(policy), "needs_parts", False):
                continue
            rows = int(loaded(policy).sum())
            target = "<= 0.8" if (policy, share) == ("frequency", 0.1) and not args.tiny else "<= 1.0"
            report.figure(
                f"rows loaded by belady, cache of {share:.0%}",
                float(best),
                "rows",
                reference=f"{policy}: {rows} rows, fill counted",
                ratio=best / rows,
                target=target,
            )


def simulate(args: argparse.Namespace, report: Report, trace: Trace, _: Workload, __: Path) -> None:
    """``featstore.simulate`` of arrays, checks included, a cache of a tenth of the rows."""
    capacity = trace.n // 10
    expected = featstore.simulate(trace, capacity, "belady")
    arrays = {dtype.__name__: [np.array(ids, dtype) for ids in trace] for dtype in (np.int32, np.int64)}

    def rate(batches: list[npt.NDArray[Any]]) -> float:
        start = time.perf_counter()
        loaded = featstore.simulate(batches, capacity, "belady", n=trace.n)
        seconds = time.perf_counter() - start
        assert np.array_equal(loaded, expected)
        return trace.n_accesses / seconds

    results = alternate(args.runs, {dtype: partial(rate, batches) for dtype, batches in arrays.items()}, warm_up=1)
    for dtype, rates in results.items():
        report.figure(
            f"featstore.simulate, belady, arrays of {dtype}",
            rates,
            "accesses/s",
            target=None if args.tiny else ">= 30e6",
            accesses=trace.n_accesses,
            batches=len(trace),
        )


def growth(args: argparse.Namespace, report: Report, _: Trace, __: Workload, folder: Path) -> None:
    """The same rows and capacity, thirty times the batches; and the process's own growth meanwhile."""
    n, size = (4096, 500) if args.tiny else (4_194_304, 158_000)
    rng = np.random.default_rng(0)

    def batch() -> npt.NDArray[np.int32]:
        drawn = np.unique((n * rng.random(2 * size) ** 4).astype(np.int32))
        return rng.permutation(drawn)[:size]

    many = 190 if args.tiny else args.many_batches
    batches = [batch() for _ in range(many)]
    grown: list[float] = []

    def per_access(count: int) -> float:
        offsets = np.cumsum([0] + [len(ids) for ids in batches[:count]]).astype(np.int64)
        reset_peak()
        before = status("VmRSS")
        seconds = plan_seconds(Horizon(n, offsets, batches.__getitem__, count), n // 10, folder)
        if count == many:
            grown.append((status("VmHWM") - before) / int(offsets[-1]))
        return seconds / int(offsets[-1])

    few = many // 30
    results = alternate(args.runs, {"many": partial(per_access, many), "few": partial(per_access, few)}, warm_up=1)
    report.figure(
        f"planning {many} batches, seconds per access",
        results["many"],
        "s",
        reference=f"{few} batches",
        references=results["few"],
        target="<= 1.5",
        accesses=sum(map(len, batches)),
    )
    report.figure(
        f"planning {many} batches, growth of peak resident memory per access, tables of {n} rows included",
        grown,
        "B",
        target=None if args.tiny else "<= 16",
    )


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    with scratch(args, "planner") as folder:
        work = generate(folder, 14, seeds=2000) if args.tiny else generate(folder, 22)
        path = folder / "dataset"
        if not path.exists():
            featstore.OutOfCoreGraph.create(path, work.indptr, work.indices, progress=False).close()
        with featstore.open(path, memory="2GiB") as g:
            g.cache_neighbors()
            sampler = featstore.NeighborSampler(g, FANOUTS)
            trace = record(sampler, torch.from_numpy(np.array(work.seeds)).split(BATCH_SIZE), g.num_nodes)
        for group in (speed, loads, simulate, growth):
            if args.only in group.__name__:
                group(args, report, trace, work, folder)


if __name__ == "__main__":
    main(run, arguments(__doc__ or "", many_batches=1890))
