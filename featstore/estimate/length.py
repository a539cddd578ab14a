"""The length of a superbatch: as many batches as disk and planner's memory allow, and advice if more of either would help."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from featstore.cache.base import Policy
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.planned import PlannedPolicy
from featstore.config import format_size
from featstore.estimate.misses import ALL_MISSED, Misses
from featstore.plan.planmemory import PLANNER_FRACTION, planning_bytes
from featstore.plan.superbatches import AT_ONCE
from featstore.storage.rundir import free_share

__all__ = [
    "SEVERAL",
    "Length",
    "PackingPasses",
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
ENOUGH_BATCHES = 50  # longer superbatches are no reason to plan with next positions on disk
SEVERAL = 2  # an epoch that moves more than this many times the minimum is worth a warning
FREE_FRACTION = 1 / 2  # of the free disk, used if the user sets no limit
LEAST = 2  # superbatches of an epoch without look-ahead, if one can be made while the other runs
CHEAP, MOST_CHEAP = 4, 8  # passes are cheap if they read at most 1/CHEAP of the other bytes moved, and are at most MOST_CHEAP


@dataclass(frozen=True)
class Planning:
    """Inputs for choosing superbatches: a strategy's options, resolved for a loader.

    Parameters
    ----------
    policies : tuple of Policy
        One for the features with the same rows, all of one kind: planned; for packs also static.
    superbatch : int or "auto"
        Batches a superbatch.
    disk : int or None
        Most bytes of run files at once.
    run_dir : str
        Directory in which run directories are made.
    n : int
        Rows of the features that are planned for; if features have different rows, those of all together.
    memory : int
        Bytes of the budget.
    overlap : bool
        Sample and plan while earlier batches are gathered and trained on; otherwise one after the other.
    misses : Misses
        Share of a batch's rows that the cache will lack, as far as is known; these rows are packed.
    capacity : int, optional
        Rows of the cache, if its size was given; of all caches whose features have different rows.
    edge_policies : tuple of Policy
        Planned policies of the caches of edge features, one a type of edges, if there are any.
    edge_rows : mapping of str to int
        Rows of the cache of each edge feature; empty if there is none.
    """

    policies: tuple[Policy, ...]
    superbatch: int | str
    disk: int | None
    run_dir: str
    n: int
    memory: int
    overlap: bool = True
    misses: Misses = ALL_MISSED
    capacity: int | None = None
    edge_policies: tuple[Policy, ...] = ()
    edge_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def policy(self) -> Policy:
        """The first of ``policies``, for what depends on their kind alone."""
        return self.policies[0]

    @property
    def looks_ahead(self) -> bool:
        """Whether the plan of a batch depends on later batches."""
        return not isinstance(self.policy, PlannedPolicy) or self.policy.looks_ahead


@dataclass(frozen=True)
class PackingPasses:
    """Cost of one pass over the features for every superbatch.

    Parameters
    ----------
    n_bytes : int
        Bytes read by one pass.
    n_others : int
        Other bytes moved in an epoch: missed rows, written to extents and read from them.
    n_gathered : int
        Bytes gathered in an epoch: every row of every batch.
    n_extents : int, optional
        Bytes of an epoch's extents, as the disk is provided for. None: half of ``n_others``.
    is_drawn : bool
        The sampler draws an epoch's batches at once, before the first one.
    """

    n_bytes: int
    n_others: int
    n_gathered: int = 0
    n_extents: int | None = None
    is_drawn: bool = False

    @property
    def cheap(self) -> int:
        """Number of passes that cost little, since a superbatch is made while the previous one is gathered and trained on."""
        return max(1, min(MOST_CHEAP, (self.n_others + self.n_gathered) // (CHEAP * max(1, self.n_bytes))))

    @property
    def least(self) -> int:
        """Number of superbatches of an epoch without look-ahead: two, if one is gathered about as long as the next is packed.

        Of batches that are drawn before, only packing is left to be done meanwhile: two, if the second pass reads no more than
        is moved otherwise.
        """
        if self.is_drawn:
            return LEAST if self.n_bytes <= self.n_others else 1
        return LEAST if LEAST * self.n_bytes <= self.n_gathered + self.n_others // 2 else 1

    def are_few(self, n: int) -> bool:
        """Tell whether ``n`` passes read no more than all other bytes moved; one pass always counts as few."""
        return n * self.n_bytes <= max(self.n_bytes, self.n_others)

    def moved(self, n: int) -> int:
        """Compute the bytes that an epoch with ``n`` passes moves."""
        return n * self.n_bytes + self.n_others


@dataclass(frozen=True)
class Length:
    """Length of superbatches.

    Parameters
    ----------
    n_batches : int
        Batches of a superbatch.
    passes : int
        Number of superbatches of an epoch: if they are packed, the passes over the features, one for each at the least.
    advice : str or None
        Advice to give more memory or disk, if an epoch moves over twice the minimum.
    impossible : str
        Reason that there can be no run; empty if there can.
    rows : int, optional
        Rows that the caches of features would have besides; None: as many as the memory left by batches can hold.
    """

    n_batches: int
    passes: int
    advice: str | None = None
    impossible: str = ""
    rows: int | None = None


def judge_length(
    planning: Planning, n_batches: int, n_accesses: int, stored: int, passes: PackingPasses | None, size: int
) -> Length:
    """Judge superbatches of ``size`` batches: their cost, and advice.

    Parameters
    ----------
    planning : Planning
    n_batches : int
        Batches of an epoch.
    n_accesses, stored : int
        Rows of one batch, and its bytes on disk.
    passes : PackingPasses, optional
        Cost of packing; None if nothing is packed.
    size : int
        Batches of a superbatch, after the memory was divided.
    """
    advice = None
    if planning.superbatch == "auto":
        advice = what_would_help(planning, n_batches, n_accesses, stored, passes, size)
    return Length(size, -(-n_batches // max(1, size)), advice)


def passes_over(
    n_bytes: int, n_batches: int, gathered: int, misses: Misses, capacity: int, *, is_drawn: bool = False
) -> PackingPasses:
    """Compute the cost of passes over features of ``n_bytes``: a batch has ``gathered`` bytes, the caches ``capacity`` rows."""
    packed, most = (int(gathered * share) * n_batches for share in (misses.of_epoch(capacity), misses.share(capacity)))
    return PackingPasses(n_bytes, 2 * packed, gathered * n_batches, most, is_drawn)


def least_size(planning: Planning, n_batches: int) -> int:
    """Compute the batches of the smallest superbatch that the user allows."""
    size = planning.superbatch
    return 1 if isinstance(size, str) else min(size, max(1, n_batches))


def planner_bytes(
    planning: Planning, n: int, n_batches: int, n_accesses: int, size: int, *, spilled: bool, capacity: int = 0
) -> int:
    """Count the bytes that planning superbatches of ``size`` batches holds, for a cache of ``capacity`` rows.

    ``n`` and ``n_accesses`` are the rows of the features and of one batch, or the edges of the graph and of one batch.
    """
    # Batches differ in size by a few percent, and a window is two superbatches.
    longest = n_accesses * 9 // 8
    in_sight = min(2 * size, max(size, n_batches)) if planning.overlap else size
    is_checked = isinstance(planning.policy, PlannedPolicy) and CheckedPolicy(planning.policy).is_checked  # checks take memory
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


def choose_size(planning: Planning, n_batches: int, n_accesses: int, stored: int, passes: PackingPasses | None = None) -> int:
    """Choose as many batches as disk and the planner's share of memory allow, by rows and stored bytes of one sampled batch.

    If every superbatch costs a pass over the features, and the passes read more than all other bytes moved, the planner's share
    doubles, up to twice: saving a pass outweighs the cache's loss of rows. If passes are cheap, the epoch has several
    superbatches even if one would hold it, so that packing overlaps with the loop.
    """
    if not isinstance(planning.superbatch, str):
        return min(planning.superbatch, max(1, n_batches))
    most, total = min(longest_auto(planning, n_batches), _by_disk(planning, stored, n_batches, passes)), planning.memory

    def largest(limit: int, spilled: bool) -> int:
        def needed(size: int) -> int:
            return planner_bytes(planning, planning.n, n_batches, n_accesses, size, spilled=spilled)

        return max(1, bisect_right(range(1, most + 1), limit, key=needed))

    enough = min(most, ENOUGH_BATCHES) if passes is None else most
    size = 1
    for fraction in (PLANNER_FRACTION, 2 * PLANNER_FRACTION, 4 * PLANNER_FRACTION):
        size = largest(int(total * fraction), False)
        if size < enough:
            size = max(size, min(enough, largest(int(total * fraction), True)))
        if passes is None or size == most or passes.are_few(-(-n_batches // size)):
            break
    return size if passes is None else min(size, _longest(planning, n_batches, passes))


def _longest(planning: Planning, n_batches: int, passes: PackingPasses) -> int:
    """Compute the most batches of a superbatch that still give the epoch as many superbatches as passes are cheap."""
    return -(-n_batches // max(passes.cheap, 1 if planning.looks_ahead else passes.least))


def what_would_help(
    planning: Planning, n_batches: int, n_accesses: int, stored: int, passes: PackingPasses | None, size: int
) -> str | None:
    """Advise more memory or disk if an epoch in superbatches of ``size`` moves over twice the minimum; otherwise None.

    Without ``passes``, advise if the cache is planned for one batch at a time.
    """
    best = longest_auto(planning, n_batches)
    if passes is None:
        if size > 1 or best == 1:
            return None
        best = min(best, ENOUGH_BATCHES)
        more = f"disk='{at_least(_disk_for(planning, stored, n_batches, passes, best))}'"
        if _by_disk(planning, stored, n_batches, passes) > 1:
            capacity, total = planning.capacity or 0, planning.memory
            needed = planner_bytes(planning, planning.n, n_batches, n_accesses, best, spilled=True, capacity=capacity)
            more = f"memory='{at_least(max(int(needed / PLANNER_FRACTION), (total + 2 * needed) * 9 // 8))}'"
        return (
            f"superbatches have 1 of {n_batches} batches: the cache is planned for one at a time, so an epoch may read more rows "
            f"than on demand; {more} would make them longer"
        )
    best = min(best, _longest(planning, n_batches, passes)) if not planning.looks_ahead else best
    n, fewest = (-(-n_batches // max(1, each)) for each in (size, best))
    if n <= passes.cheap or passes.moved(n) <= SEVERAL * passes.moved(fewest):
        return None
    if size < min(best, _by_disk(planning, stored, n_batches, passes)):
        needed = 2 * planner_bytes(planning, planning.n, n_batches, n_accesses, best, spilled=True)
        more = f"memory='{at_least(max(needed, planning.memory * 9 // 8))}'"
    else:
        more = f"disk='{at_least(_disk_for(planning, stored, n_batches, passes, best))}'"
    return (
        f"superbatches have {size} of {n_batches} batches, so an epoch reads the features {n} times, "
        f"{format_size(n * passes.n_bytes)}; {more} would make it {fewest}"
    )


def at_least(n_bytes: int) -> str:
    """Format a size of at least ``n_bytes`` as the text of an option."""
    unit, name = (1 << 20, "MiB") if n_bytes >= 16 << 20 else (1 << 10, "KiB")
    return f"{-(-n_bytes // unit)}{name}"


def longest_auto(planning: Planning, n_batches: int) -> int:
    """Compute the most batches of a superbatch with ``superbatch="auto"``."""
    # With look-ahead longer superbatches gain little; in the serial schedule the cache begins anew with each superbatch.
    is_rolling = planning.overlap and planning.looks_ahead
    return max(1, min(MOST_AUTO_BATCHES, n_batches) if is_rolling else n_batches)


def _by_disk(planning: Planning, stored: int, n_batches: int, passes: PackingPasses | None) -> int:
    """Compute the batches of a superbatch if an epoch has as few superbatches as the disk has room for."""
    disk = planning.disk
    if disk is None:
        disk = free_share(planning.run_dir, FREE_FRACTION)
    needed = partial(_disk_for, planning, stored, n_batches, passes)
    most = max(1, bisect_right(range(1, n_batches + 1), disk, key=needed))
    return max(1, -(-n_batches // max(1, -(-n_batches // most))))  # as few, but all about as long


def _disk_for(planning: Planning, stored: int, n_batches: int, passes: PackingPasses | None, size: int) -> int:
    """Compute the bytes on disk of superbatches of ``size`` batches: samples and plans of four at once, and extents of two.

    In the serial schedule they are two, without extents, and a quarter of the disk is for a neighbour cache.
    """
    if not planning.overlap:
        return -(-2 * size * stored * 4 // 3)
    sampled, packed = min(AT_ONCE * size, n_batches), min(2 * size, n_batches)
    extents = 0
    if passes is not None:
        extents = passes.n_others // 2 if passes.n_extents is None else passes.n_extents
    # `stored` has a half of a batch's extents.
    return sampled * stored + extents * (2 * packed - sampled) // (2 * max(1, n_batches))
