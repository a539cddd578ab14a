"""The length of a superbatch: as many batches as the disk and the planner's memory allow, and advice where more would help."""

from __future__ import annotations

import os
import shutil
from bisect import bisect_right
from dataclasses import dataclass

from featstore.cache.base import Policy
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.planned import PlannedPolicy
from featstore.config import format_size
from featstore.estimate.misses import ALL_MISSED, Misses
from featstore.pack.packgraph import Graph
from featstore.plan.planmemory import PLANNER_DIVISOR, planning_bytes

__all__ = [
    "SEVERAL",
    "Length",
    "Passes",
    "Planning",
    "at_least",
    "choose_size",
    "judge_length",
    "least_size",
    "longest_auto",
    "passes_over",
    "planner_bytes",
    "what_would_help",
]

MOST_AUTO_BATCHES = 200
ENOUGH_BATCHES = 50  # more of them are no reason to plan with next positions on disk
SEVERAL = 2  # times slower than it could be: worth a warning
FREE = 2  # of the disk that is free, one part of so many is used where the user says nothing
LEAST = 2  # superbatches of an epoch without look-ahead: one is made beside the other
CHEAP, MOST_CHEAP = 4, 8  # passes that read one part of so many of what is moved besides, and no more than so many, are cheap


@dataclass(frozen=True)
class Planning:
    """What a strategy that looks ahead goes by, its options resolved for a loader.

    Parameters
    ----------
    policy : Policy
        A planned one; for packs also a static one.
    superbatch : int or "auto"
        Batches a superbatch.
    disk : int or None
        Most bytes of run files at once.
    run_dir : str
        Where run directories are made.
    overlap : bool
        Sample and plan while earlier batches are gathered and trained on; otherwise one after the other.
    misses : Misses
        Of a batch's rows, those that the cache will lack, as far as is known: how much is packed of each.
    capacity : int, optional
        Rows of the cache, where its size was given.
    edge_policy : PlannedPolicy, optional
        Plans the caches of edge features, if there are any.
    edge_capacity : int
        Rows of each of those.
    """

    policy: Policy
    superbatch: int | str
    disk: int | None
    run_dir: str
    overlap: bool = True
    misses: Misses = ALL_MISSED
    capacity: int | None = None
    edge_policy: PlannedPolicy | None = None
    edge_capacity: int = 0

    @property
    def looks_ahead(self) -> bool:
        """Whether what is planned for a batch depends on later ones."""
        return not isinstance(self.policy, PlannedPolicy) or self.policy.looks_ahead


@dataclass(frozen=True)
class Passes:
    """What a pass over the features for every superbatch costs.

    Parameters
    ----------
    n_bytes : int
        Read by one of them.
    n_others : int
        Moved in an epoch besides: rows that are missed, to where they are packed and from there.
    n_gathered : int
        Put together in an epoch: every row of every batch, which is sampled besides.
    """

    n_bytes: int
    n_others: int
    n_gathered: int = 0

    @property
    def cheap(self) -> int:
        """How many are worth their cost: a superbatch is made while the one before it is gathered and trained on."""
        return max(1, min(MOST_CHEAP, (self.n_others + self.n_gathered) // (CHEAP * max(1, self.n_bytes))))

    def are_few(self, n: int) -> bool:
        """Whether so many passes read no more than all else moves."""
        return n * self.n_bytes <= max(self.n_bytes, self.n_others)

    def moved(self, n: int) -> int:
        """Return the bytes of an epoch of so many passes."""
        return n * self.n_bytes + self.n_others


@dataclass(frozen=True)
class Length:
    """How long superbatches are.

    Parameters
    ----------
    n_batches : int
        Of one.
    passes : int
        Over the features, an epoch, where superbatches are packed: one each at the least; their number where they are not.
    advice : str or None
        What to give more of, where an epoch moves several times what it could.
    impossible : str
        Why there can be no run; empty where there can.
    rows : int, optional
        That the caches of features would have beside; None: all for which batches leave memory.
    """

    n_batches: int
    passes: int
    advice: str | None = None
    impossible: str = ""
    rows: int | None = None


def judge_length(
    planning: Planning,
    graph: Graph,
    n_batches: int,
    n_accesses: int,
    stored: int,
    passes: Passes | None,
    size: int,
) -> Length:
    """Judge superbatches of ``size`` batches: their cost, and advice.

    Parameters
    ----------
    planning : Planning
    graph : OutOfCoreGraph
        Its budget and nodes are looked at.
    n_batches : int
        An epoch.
    n_accesses, stored : int
        Of one batch: rows, and bytes on disk.
    passes : Passes, optional
        What packing costs; None where nothing is packed.
    size : int
        Batches of a superbatch, once the memory was divided.
    """
    advice = None
    if planning.superbatch == "auto":
        advice = what_would_help(planning, graph, n_batches, n_accesses, stored, passes, size)
    return Length(size, -(-n_batches // max(1, size)), advice)


def passes_over(n_bytes: int, row_bytes: int, n_batches: int, n_accesses: int, miss_share: float) -> Passes:
    """Compute the cost of passes over features of ``n_bytes``, by the rows of a batch and the share that its cache lacks."""
    gathered = n_accesses * row_bytes
    return Passes(n_bytes, 2 * int(gathered * miss_share) * n_batches, gathered * n_batches)


def least_size(planning: Planning, n_batches: int) -> int:
    """Return the batches of the smallest superbatch that the user allows."""
    size = planning.superbatch
    return 1 if isinstance(size, str) else min(size, max(1, n_batches))


def planner_bytes(
    planning: Planning, n: int, n_batches: int, n_accesses: int, size: int, *, spilled: bool, capacity: int = 0
) -> int:
    """Count the bytes that planning superbatches of ``size`` batches holds, for a cache of ``capacity`` rows.

    ``n``, ``n_accesses``: nodes of the graph, and of one batch; or edges of both.
    """
    # Batches differ in size by a few percent, and a window is two superbatches.
    longest = n_accesses * 9 // 8
    in_sight = min(2 * size, max(size, n_batches)) if planning.overlap else size
    is_checked = isinstance(planning.policy, PlannedPolicy) and CheckedPolicy(planning.policy).is_checked  # that takes memory
    return planning_bytes(
        n,
        in_sight * longest,
        size * longest,
        longest,
        capacity=capacity,
        spilled=spilled,
        checked=is_checked,
        looks_ahead=planning.looks_ahead,
    )


def choose_size(
    planning: Planning, graph: Graph, n_batches: int, n_accesses: int, stored: int, passes: Passes | None = None
) -> int:
    """As many batches as disk and the planner's share of memory allow, by the rows and stored bytes of one sampled batch.

    Where every superbatch costs a pass over the features, and these passes read more than all else moves, the planner's share
    doubles, and doubles again: a pass less saves more than the rows that the cache loses. Where passes are cheap, the epoch has
    several superbatches although it fits one: nothing is packed beside the loop otherwise.
    """
    if not isinstance(planning.superbatch, str):
        return min(planning.superbatch, max(1, n_batches))
    most, total = min(longest_auto(planning, n_batches), _by_disk(planning, stored, n_batches, passes)), graph.budget.total

    def largest(limit: int, spilled: bool) -> int:
        def needed(size: int) -> int:
            return planner_bytes(planning, graph.num_nodes, n_batches, n_accesses, size, spilled=spilled)

        return max(1, bisect_right(range(1, most + 1), limit, key=needed))

    enough = min(most, ENOUGH_BATCHES) if passes is None else most
    size = 1
    for share in (PLANNER_DIVISOR, PLANNER_DIVISOR // 2, PLANNER_DIVISOR // 4):
        size = largest(total // share, False)
        if size < enough:
            size = max(size, min(enough, largest(total // share, True)))
        if passes is None or size == most or passes.are_few(-(-n_batches // size)):
            break
    return size if passes is None else min(size, _longest(planning, n_batches, passes))


def _longest(planning: Planning, n_batches: int, passes: Passes) -> int:
    """Return the most batches with which there are as many superbatches as is worth their passes."""
    return -(-n_batches // max(passes.cheap, 1 if planning.looks_ahead else LEAST))


def what_would_help(
    planning: Planning, graph: Graph, n_batches: int, n_accesses: int, stored: int, passes: Passes | None, size: int
) -> str | None:
    """Advise more memory or disk where an epoch in superbatches of ``size`` moves several times the minimum; else None.

    Without ``passes``, that is where the cache is planned for one batch at a time.
    """
    best = longest_auto(planning, n_batches)
    if passes is None:
        if size > 1 or best == 1:
            return None
        best = min(best, ENOUGH_BATCHES)
        more = f"disk='{at_least(best * (4 * stored + 1))}'"
        if _by_disk(planning, stored, n_batches, passes) > 1:
            capacity, total = planning.capacity or 0, graph.budget.total
            needed = planner_bytes(planning, graph.num_nodes, n_batches, n_accesses, best, spilled=True, capacity=capacity)
            more = f"memory='{at_least(max(PLANNER_DIVISOR * needed, (total + 2 * needed) * 9 // 8))}'"
        return (
            f"superbatches have 1 of {n_batches} batches: the cache is planned for one at a time, so an epoch may read more rows "
            f"than on demand; {more} would make them longer"
        )
    best = min(best, _longest(planning, n_batches, passes)) if not planning.looks_ahead else best
    n, fewest = (-(-n_batches // max(1, each)) for each in (size, best))
    if n <= passes.cheap or passes.moved(n) <= SEVERAL * passes.moved(fewest):
        return None
    if size < min(best, _by_disk(planning, stored, n_batches, passes)):
        needed = 2 * planner_bytes(planning, graph.num_nodes, n_batches, n_accesses, best, spilled=True)
        more = f"memory='{at_least(max(needed, graph.budget.total * 9 // 8))}'"
    else:
        more = f"disk='{at_least(best * (4 * stored + 1))}'"
    return (
        f"superbatches have {size} of {n_batches} batches, so an epoch reads the features {n} times, "
        f"{format_size(n * passes.n_bytes)}; {more} would make it {fewest}"
    )


def at_least(n_bytes: int) -> str:
    """Return a size as an option takes it, not less than ``n_bytes``."""
    unit, name = (1 << 20, "MiB") if n_bytes >= 16 << 20 else (1 << 10, "KiB")
    return f"{-(-n_bytes // unit)}{name}"


def longest_auto(planning: Planning, n_batches: int) -> int:
    """Return the most batches that the length "auto" takes."""
    # Rolling, the look-ahead makes more batches worth little; serial, the cache begins anew with each superbatch.
    is_rolling = planning.overlap and planning.looks_ahead
    return max(1, min(MOST_AUTO_BATCHES, n_batches) if is_rolling else n_batches)


def _by_disk(planning: Planning, stored: int, n_batches: int, passes: Passes | None) -> int:
    disk = planning.disk
    if disk is None:
        disk = shutil.disk_usage(os.path.dirname(planning.run_dir) or ".").free // FREE
    packed = 0 if passes is None else passes.n_others // 2
    if planning.overlap and n_batches * stored + packed // 2 < disk:  # a half of them is among what is stored
        return n_batches
    # Four superbatches lie on disk at once; in the serial schedule two, and a neighbour cache in a quarter of the disk.
    return max(1, disk // (4 * stored + 1) if planning.overlap else disk // 4 * 3 // (2 * stored + 1))
