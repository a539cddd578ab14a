"""``strategy="auto"``: record an epoch's accesses, measure the machine, take the strategy that is estimated to be cheapest."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from featstore.cache.base import get_policy
from featstore.cache.table import FeatureCache
from featstore.config import Budget
from featstore.errors import BudgetError
from featstore.graph.device import device_speed
from featstore.pack.layout import LayoutOptions, find_layouts, layout_bytes
from featstore.pack.makelayout import layout_sizes
from featstore.pack.nodedata import carried_bytes
from featstore.pack.sharing import count_planned, count_static, shared_there
from featstore.plan.choice import Choice, choose, copy_bandwidth, observe
from featstore.plan.cost import ONLINE, PLANNED, STATIC, Machine, OnDisk, Workload
from featstore.strategies.packed import packed_superbatch
from featstore.strategies.profile import LEAST_BATCHES, Profile, pack_trace
from featstore.strategies.setup import Planning, Setup
from featstore.strategies.sizing import cache_bytes, spare_bytes
from featstore.strategies.superbatch import ahead_bytes, choose_size

__all__ = ["Decision", "decide", "look_ahead", "rows_in_memory"]


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


@dataclass(frozen=True)
class Decision:
    """What was decided for a loader.

    Parameters
    ----------
    strategy : str
    policy : str or None
        None: no cache.
    record : dict
        What ``loader.stats()["auto"]`` says: estimates, what was taken, and why.
    profile : Profile, optional
        Batches that were sampled to find out; the run uses them.
    miss_share : float
        Of a batch's rows, those that a planned cache will lack, with a margin.
    choice : Choice, optional
        All that was estimated; None where nothing could be.
    """

    strategy: str
    policy: str | None
    record: dict[str, Any]
    profile: Profile | None = None
    miss_share: float = 1.0
    choice: Choice | None = None


def decide(setup: Setup, planning: Planning, *, row_bytes: Mapping[str, int], capacity: int, epochs: int) -> Decision:
    """Choose strategy and policy for a loader.

    Notes
    -----
    Looks at an eighth of the batches of epoch 0, eight at least and 32 at most: samples them, for the run to use, and simulates
    their cache. Where the memory or the disk does not suffice for that, rows are read on demand.
    """
    graph, pack, width = setup.graph, setup.pack, sum(row_bytes.values())
    if not len(setup.batcher) or not setup.features:
        return _default(setup, planning, capacity, "nothing is to be gathered")
    profile = None
    try:
        if pack is None:
            profile = Profile(setup, planning.run_dir, planning.disk)
            trace, sample_s = profile.trace(), profile.sample_s
        else:
            trace = pack_trace(pack)
            begin = time.perf_counter()
            for number in range(len(trace)):
                pack.batch(number, graph.pool)
            sample_s = time.perf_counter() - begin
        left = None if planning.disk is None or profile is None else planning.disk - profile.n_bytes
        speed = device_speed(graph, planning.run_dir, left)
        layouts: dict[str, int] = {}
        counted: dict[str, OnDisk] = {}
        if pack is not None:
            layouts, counted = _packs(setup, planning, capacity, list(row_bytes.values()), speed.gap_bytes)
        with graph.policy_inputs(width) as inputs:
            workload = observe(
                trace,
                row_bytes=width,
                capacity=capacity,
                budget=graph.budget,
                n_batches=len(setup.batcher),
                sample_s=sample_s,
                epochs=epochs,
                disk_bytes=planning.disk,
                has_pack=pack is not None,
                pack_epochs=1 if pack is None else pack.epochs,
                layouts=layouts,
                device_rows=setup.device_rows or 0,
                device_on_host=setup.device.type == "cpu",
                online=ONLINE,
                ahead_bytes=ahead_bytes(setup, graph.budget.total // 16),
                out_degree=inputs.context.out_degree if capacity else None,
            )
        stored = 0 if profile is None else profile.n_bytes // len(profile)
        workload = replace(workload, superbatch=_streamed_size(setup, planning, workload, stored), on_disk=counted)
        choice = choose(workload, Machine(speed, copy_bandwidth(width, graph.options.threads, graph.budget)))
    except BaseException as error:
        if profile is not None:
            profile.close()
        if isinstance(error, BudgetError):
            return _default(setup, planning, capacity, f"no memory to estimate: {error.message}")
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and planning.disk is not None:
            return _default(setup, planning, capacity, f"no disk to estimate: {error.strerror}")
        raise
    policy = None if choice.taken.policy == "none" else choice.taken.policy
    return Decision(choice.taken.strategy, policy, choice.to_dict(), profile, workload.miss_share, choice)


def _default(setup: Setup, planning: Planning, capacity: int, reason: str) -> Decision:
    """What needs least: rows read on demand; packed ones where the layout is there, or where the device is to have some."""
    strategy, policy = "ondemand", STATIC if capacity else None
    if setup.pack is not None:
        found = [name for name, folder in _there(setup, planning, capacity).items() if _fits(folder, planning.disk)]
        if found or setup.device_rows:
            strategy, policy = "packed", (found or [STATIC])[0]
    taken = {"strategy": strategy, "policy": policy or "none"}
    return Decision(strategy, policy, {"taken": taken, "reason": reason, "estimates": []})


def _fits(folder: str, disk: int | None) -> bool:
    return disk is None or layout_bytes(folder) <= disk


def _layout(setup: Setup, planning: Planning, policy: str, capacity: int) -> LayoutOptions:
    """Return the options of the layout that strategy ``"packed"`` would run."""
    assert setup.pack is not None
    superbatch = packed_superbatch(planning, setup.pack) if policy == PLANNED else 0
    return LayoutOptions(setup.features, policy, capacity, superbatch, setup.device_rows or 0)


def _there(setup: Setup, planning: Planning, capacity: int) -> dict[str, str]:
    """Return the folders of the layouts that a pack has for a loader's features and tiers, by policy."""
    assert setup.pack is not None
    names = {each.name for each in find_layouts(setup.pack)}
    wanted = {policy: _layout(setup, planning, policy, capacity).name for policy in (STATIC, PLANNED)}
    return {policy: setup.pack.file(name) for policy, name in wanted.items() if name in names}


def _packs(
    setup: Setup, planning: Planning, capacity: int, widths: Sequence[int], gap_bytes: int
) -> tuple[dict[str, int], dict[str, OnDisk]]:
    """Return the bytes of the layouts that the pack has for these features and tiers, and what was counted of layouts."""
    pack, budget, n_device = setup.pack, setup.graph.budget, setup.device_rows or 0
    assert pack is not None
    layouts, counted = {}, {}
    there = _there(setup, planning, capacity)
    # A little is left for what is known only when a layout is made.
    disk = None if planning.disk is None else planning.disk - planning.disk // 64 - carried_bytes(pack, setup.graph, setup.labels)
    at_most = (sum(widths) + 20) * (int(pack.lengths.sum()) + capacity + n_device) + 4 * 4096 * len(pack)
    for policy in (STATIC, PLANNED):
        if policy in there:
            layouts[policy] = layout_bytes(there[policy])
            shared = shared_there(there[policy], pack, widths, gap_bytes, layouts[policy])
            if shared is not None:
                counted[policy] = shared
        elif disk is not None and at_most > disk:
            sizes = layout_sizes(_layout(setup, planning, policy, capacity), widths, budget)
            try:
                if policy == PLANNED:
                    counted[policy] = count_planned(pack, sizes, budget)
                else:
                    with budget.reserve("cost model", 8 * pack.num_nodes):
                        counted[policy] = count_static(pack, sizes, pack.counts(), widths, gap_bytes, budget, disk)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                counted[policy] = OnDisk(at_most, 0, 0, fails=str(error.strerror))
    return layouts, counted


def _streamed_size(setup: Setup, planning: Planning, w: Workload, stored: int) -> int:
    """Return how many batches a superbatch would have whose samples take ``stored`` bytes each."""
    n_accesses = w.n_accesses // max(1, w.n_batches)
    plan = 12 * n_accesses
    packed = int(n_accesses * w.row_bytes * w.miss_share) // 2
    return choose_size(planning, setup.graph, len(setup.batcher), n_accesses, stored + plan + packed)


def look_ahead(setup: Setup, planning: Planning, capacity: int) -> tuple[Profile | None, float]:
    """Sample a few batches for the run to use, and return them and the share of their rows that a cache will lack, with a margin.

    Where the memory or the disk does not suffice: none, and all of them.
    """
    if not len(setup.batcher) or not setup.features or not capacity:
        return None, 1.0
    profile = None
    try:
        profile = Profile(setup, planning.run_dir, planning.disk, LEAST_BATCHES)
        trace, n_batches = profile.trace(), len(setup.batcher)
        return profile, observe(trace, row_bytes=1, capacity=capacity, budget=setup.graph.budget, n_batches=n_batches).miss_share
    except BaseException as error:
        if profile is not None:
            profile.close()
        if isinstance(error, BudgetError) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
            return None, 1.0
        raise
