"""``strategy="auto"``: record an epoch's accesses, measure the machine, take the strategy that is estimated to be cheapest."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from featstore.cache.base import get_policy
from featstore.cache.table import FeatureCache
from featstore.config import Budget
from featstore.errors import BudgetError
from featstore.graph.device import device_speed
from featstore.plan.auto import MOST_BATCHES, choose, copy_bandwidth, observe
from featstore.plan.cost import Machine
from featstore.plan.trace import Trace, TraceWriter
from featstore.run.precache import cache_bytes, spare_bytes
from featstore.run.strategy import Setup
from featstore.storage.rundir import DiskBudget, RunDirectory

__all__ = ["decide", "rows_in_memory"]


def rows_in_memory(
    setup: Setup, size: int | float | str | None, row_bytes: dict[str, int], budget: Budget, room: int, prefetch: int
) -> int:
    """Return how many rows of each feature a loader's cache of ``size`` would hold."""
    n = setup.graph.num_nodes
    if not row_bytes or not n:
        return 0
    if size is None or size == "auto":
        spare, _ = spare_bytes(setup, setup.graph.budget, room, sum(row_bytes.values()), prefetch)
        if spare < sum(FeatureCache.least_bytes(1, width, n, None) for width in row_bytes.values()):
            return 0
        size = spare
    sizes = cache_bytes(size, n, row_bytes, get_policy("belady"), budget, room)
    return min(FeatureCache.capacity_for(n_bytes, row_bytes[name], n, None) for name, n_bytes in sizes.items())


def decide(
    setup: Setup,
    *,
    row_bytes: int,
    capacity: int,
    superbatch: int | None,
    disk: int | None,
    run_dir: str,
    epochs: int,
) -> tuple[str, str | None, dict[str, Any]]:
    """Choose strategy and policy for a loader.

    Returns
    -------
    strategy : str
    policy : str or None
        None: no cache.
    record : dict
        What ``loader.stats()["auto"]`` says: estimates, what was taken, and why.

    Notes
    -----
    Samples the first 200 batches at most of epoch 0, into a run file, and simulates them. Where the budget does not suffice for
    that, rows are read on demand.
    """
    graph = setup.graph
    n_batches = len(setup.batcher)
    if not n_batches or not setup.features:
        return _default(setup, capacity, "nothing is to be gathered")
    with ExitStack() as stack:
        runs = RunDirectory(run_dir)
        stack.callback(runs.close)
        try:
            trace, sample_s = _record(setup, runs.file("trace"), DiskBudget(disk), disk)
            stack.callback(trace.close)
            workload = observe(
                trace,
                row_bytes=row_bytes,
                capacity=capacity,
                budget=graph.budget,
                n_batches=n_batches,
                sample_s=sample_s / setup.threads,
                superbatch=superbatch,
                epochs=epochs,
                disk_bytes=disk,
                has_pack=setup.pack is not None,
                pack_epochs=1 if setup.pack is None else setup.pack.epochs,
            )
            machine = Machine(device_speed(graph, run_dir, disk), copy_bandwidth(row_bytes, graph.options.threads, graph.budget))
        except BudgetError as error:
            return _default(setup, capacity, f"no memory to estimate: {error.message}")
    choice = choose(workload, machine)
    return choice.taken.strategy, None if choice.taken.policy == "none" else choice.taken.policy, choice.to_dict()


def _default(setup: Setup, capacity: int, reason: str) -> tuple[str, str | None, dict[str, Any]]:
    strategy = "ondemand" if setup.pack is None else "packed"
    policy = "frequency" if capacity else None
    taken = {"strategy": strategy, "policy": policy or "none"}
    return strategy, policy, {"taken": taken, "reason": reason, "estimates": []}


def _record(setup: Setup, path: str, accounts: DiskBudget, disk: int | None) -> tuple[Trace, float]:
    """Write the rows of the first batches to a trace file; return it, and the seconds that sampling took."""
    n, pack = setup.graph.num_nodes, setup.pack
    order = setup.batcher.epoch(0)
    most = min(len(order), MOST_BATCHES)
    sample_s = 0.0
    with TraceWriter(path, n, accounts) as writer:
        index = 0
        while index < most:
            start = time.perf_counter()
            if pack is not None:
                ids = pack.ids(index)
            else:
                ids = setup.sampler.sample(order.seeds(index), epoch=0, index=index).input_ids.numpy()
            sample_s += time.perf_counter() - start
            if index == 0 and disk is not None:
                most = max(1, min(most, disk // 2 // max(1, 8 * len(ids))))  # a trace is no more than half of the disk
            writer.append(ids)
            index += 1
        writer.finish().close()
    return Trace.open(path), 0.0 if pack is not None else sample_s
