"""Cache sizing: how large a loader's feature caches are, and the counts of a sampled epoch that policies may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from featstore.cache.base import Policy, get_policy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.config import Budget, parse_size
from featstore.errors import BudgetError
from featstore.pack.layout import find_layouts
from featstore.pack.offline import Pack
from featstore.strategies.base import Runner
from featstore.strategies.counters import Stopwatch
from featstore.strategies.requests import Needs, foresee, guess, measure, too_small
from featstore.strategies.setup import Setup

__all__ = [
    "AccessCounts",
    "ask",
    "cache_bytes",
    "check_instances",
    "device_rows",
    "hold_share",
    "size_caches",
    "size_for_pack",
    "spare_bytes",
]


class AccessCounts:
    """How many batches of an epoch need each row, as an array that is made when a policy first looks at it: by sampling the
    epoch.

    A context manager: the budget counts the array until the block is left.

    References
    ----------
    Pre-sampling: Yang et al., GNNLab, EuroSys 2022; the ``frequency`` cache of DiskGNN, SIGMOD 2025.
    """

    def __init__(self, setup: Setup, watch: Stopwatch, epoch: int = 0) -> None:
        self._setup = setup
        self._watch = watch
        self._epoch = epoch
        self._counts: npt.NDArray[np.int64] | None = None
        self._held = setup.graph.budget.reserve("access counts", 0)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[np.int64]:
        if self._counts is None:
            n, order = self._setup.graph.num_nodes, self._setup.batches.epoch(self._epoch)
            self._held.resize(8 * n)
            counts = np.zeros(n, np.int64)
            with self._watch.time("presample"):
                for index in range(len(order)):
                    counts[order.sample(index).input_ids.numpy()] += 1
            self._counts = counts
        return self._counts

    def __enter__(self) -> AccessCounts:
        return self

    def __exit__(self, *_: object) -> None:
        self._counts = None
        self._held.release()


def spare_bytes(setup: Setup, budget: Budget, available: int, row_bytes: int, prefetch: int) -> tuple[int, int]:
    """Sample one batch, and return how many of ``available`` bytes a cache may take, and for how many batches made ahead.

    Where less than half would be left for the cache, fewer batches are made ahead.
    """
    order = setup.batches.epoch(0)
    if not len(order):
        return available, prefetch
    if setup.needs is not None:
        return setup.needs.left_for_cache(available, prefetch)
    setup.graph.pool.trim()  # or what is idle would not count
    before, offsets = budget.used, budget.report().get("indptr", 0)
    sampled = order.sample(0)
    offsets = budget.report().get("indptr", 0) - offsets  # read at first use, once for all
    available -= offsets
    sample_bytes = budget.used - before - offsets  # with the sampler's scratch, which every thread needs
    batch_bytes = len(sampled.input_ids) * row_bytes
    del sampled

    def need(ahead: int) -> int:
        # Batches differ in size by a few percent: an eighth more.
        return (batch_bytes * (1 + ahead) + sample_bytes * (1 + ahead + setup.threads)) * 9 // 8

    while prefetch > 1 and need(prefetch) > available // 2:
        prefetch -= 1
    return max(0, available - need(max(1, prefetch))), prefetch


def size_for_pack(setup: Setup, pack: Pack, n_device: int) -> int | float:
    """Return a feature cache's size, as a share of the rows or in bytes, for the layouts that a pack has, or for its first.

    Parameters
    ----------
    setup : Setup
    pack : Pack
    n_device : int
        Rows that stay on the device.
    """
    n, row_bytes = setup.graph.num_nodes, setup.row_bytes
    spare, _ = spare_bytes(setup, setup.graph.budget, setup.room, sum(row_bytes.values()), setup.prefetch)
    there = [
        each.capacity
        for each in find_layouts(pack)
        if sorted(each.features) == sorted(setup.features) and each.device_rows == n_device
    ]
    least = {rows: sum(FeatureCache.least_bytes(rows, each, n, None) for each in row_bytes.values()) for rows in {1, *there}}
    fitting = [rows for rows in there if rows == 0 or least[rows] <= spare]
    if fitting:
        rows = max(fitting)
        return rows / n if rows else 0
    return spare // 2 if spare // 2 >= least[1] else 0  # extents are read ahead, and packed, in the rest


def cache_bytes(
    size: int | float | str, num_nodes: int, row_bytes: Mapping[str, int], policy: Policy, budget: Budget, room: int
) -> dict[str, int]:
    """Return the bytes of each feature's cache for ``size`` bytes in all, or for a share of the rows: the same rows for each.

    Raises
    ------
    ValueError
        Not a size; a share outside 0 … 1.
    BudgetError
        More than the ``room`` that is left, or not room for one row; names the least that would do.
    """

    def least(rows: int) -> dict[str, int]:
        return {name: FeatureCache.least_bytes(rows, width, num_nodes, policy) for name, width in row_bytes.items()}

    if isinstance(size, float):
        if not 0 < size <= 1:
            raise ValueError(f"a cache as a share of the rows must lie in (0, 1], not {size}; bytes are an int or '1GiB'")
        rows = max(1, round(size * num_nodes))
        total = sum(least(rows).values())
    else:
        total = parse_size(size)
        if total == 0:
            return dict.fromkeys(row_bytes, 0)  # no cache, as in g.cache
        one, two = (sum(least(rows).values()) for rows in (1, 2))
        if total < one:
            raise BudgetError(f"a feature cache of one row takes {one} bytes, not {total}", one)
        rows = min(num_nodes, 1 + (total - one) // max(1, two - one))
        total = sum(least(rows).values())
    if total > room:
        needed = budget.total + total - room
        raise BudgetError(
            f"a feature cache of {rows} rows takes {total} bytes, and {room} of the {budget.name} budget are left; "
            f"at least {needed} bytes in all would do",
            needed,
        )
    return least(rows)


def device_rows(size: int | float | str, num_nodes: int, row_bytes: Mapping[str, int]) -> int:
    """Return how many rows of every feature a device's tier of ``size`` bytes in all, or of a share of the rows, has.

    Raises
    ------
    ValueError
        Not a size; a share outside 0 … 1.
    BudgetError
        Not room for one row, and not 0.
    """
    if isinstance(size, float):
        if not 0 < size <= 1:
            raise ValueError(f"device_cache as a share of the rows must lie in (0, 1], not {size}; bytes are an int or '1GiB'")
        return min(num_nodes, max(1, round(size * num_nodes)))
    n_bytes, width = parse_size(size), max(1, sum(row_bytes.values()))
    if 0 < n_bytes < width:
        raise BudgetError(f"a device cache of one row takes {width} bytes, not {n_bytes}", width)
    return min(num_nodes, n_bytes // width)


def ask(setup: Setup, runner: type[Runner], size: int | float | str | None, policy: Policy) -> Setup:
    """Return the setup with what all stages need at the least, asked for before any of them begins.

    Parameters
    ----------
    setup : Setup
    runner : type of Runner
    size : int, float, "auto" or None
        Of the feature caches.
    policy : Policy
        Of the caches.

    Raises
    ------
    BudgetError
        The memory does not suffice for two batches; names what does.
    """
    sizes: dict[str, int] = {}
    row_bytes, n, refused = setup.row_bytes, setup.graph.num_nodes, setup.refused
    if size is not None and size != "auto" and row_bytes and n:
        sizes = cache_bytes(size, n, row_bytes, policy, setup.graph.budget, 1 << 62)
    capacity = min((FeatureCache.capacity_for(sizes[name], row_bytes[name], n, policy) for name in sizes), default=0)
    try:
        batch = measure(setup) if refused is None else foresee(setup)
    except BudgetError as error:
        batch, refused = foresee(setup), error
    needs = Needs(
        setup,
        row_bytes,
        batch,
        runner.least_bytes(setup, batch),
        sum(sizes.values()),
        capacity,
        plans=runner.plans,
        is_measured=refused is None,
    )
    if refused is not None:
        more = setup.refused_bytes
        raise too_small(refused, needs.least() + more if batch.n_rows else guess(setup, sum(row_bytes.values()), more)) from None
    needs.check()
    return replace(setup, needs=needs)


def size_caches(setup: Setup, size: int | float | str, policy: Policy) -> tuple[dict[str, int], int]:
    """Return the bytes of each feature's cache, and the batches that are made ahead beside them.

    Parameters
    ----------
    setup : Setup
    size : int, float or "auto"
    policy : Policy

    Returns
    -------
    sizes : dict
        Empty where there is nothing to cache, and where ``"auto"`` leaves no room for one row.
    prefetch : int

    Raises
    ------
    BudgetError
        More than is left.
    """
    n, row_bytes, prefetch = setup.graph.num_nodes, setup.row_bytes, setup.prefetch
    if not row_bytes or not n:
        return {}, prefetch
    if size != "auto":
        return cache_bytes(size, n, row_bytes, policy, setup.limit, setup.room_with_loans), prefetch
    spare, prefetch = spare_bytes(setup, setup.graph.budget, setup.room, sum(row_bytes.values()), prefetch)
    if spare < sum(FeatureCache.least_bytes(1, width, n, policy) for width in row_bytes.values()):
        return {}, prefetch  # what is left may be nothing; the loader then goes without
    return cache_bytes(spare, n, row_bytes, policy, setup.limit, setup.room), prefetch


def check_instances(policy: str | Policy | type[Policy], n_features: int) -> None:
    """Raise ValueError where one policy instance would serve the caches of several features."""
    if isinstance(policy, Policy) and n_features > 1 and not isinstance(get_policy(policy), PlannedPolicy):
        raise ValueError("a policy instance serves one cache: give its name or class for several features")


def hold_share(setup: Setup, sizes: Mapping[str, int]) -> None:
    """Count caches in the loader's share of the budget, which ends with the loader."""
    if setup.share is not None:
        setup.share.reserve("feature cache", sum(sizes.values()))
