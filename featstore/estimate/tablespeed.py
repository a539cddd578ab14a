"""Seconds of making a pack's tables: timed on a small trace with the code that makes them, kept in a catalog for a day."""

from __future__ import annotations

import platform
import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.cache.base import PolicyContext
from featstore.cache.belady import Belady
from featstore.cache.checkedplans import CheckedPolicy
from featstore.pack.tiers import write_static
from featstore.plan.planfile import write_plan
from featstore.plan.planmemory import planning_bytes
from featstore.plan.trace import Trace
from featstore.storage.keptrates import kept_or_measured

__all__ = ["KEY", "TableSpeed", "table_speed"]

KEY = "tables/speed"
METHOD = 1  # version of the measurement; rates of another version are measured again
LEAST_NODES, MOST_BITS = 1 << 6, 22  # larger tables are no slower to access
SPREAD = 2654435761
MOST_ROWS, BATCH_FRACTION = 1 << 16, 1 / 8  # rows of a batch: at most so many, and at most this fraction of the nodes
N_BATCHES = 3  # of each kind
LEAST_S = 1e-12  # a rate is more than 0
NODE_BYTES, BATCH_BYTES = 16, 128  # per node: its tiers, its count; per row of a batch: drawn rows, and making a table


@dataclass(frozen=True)
class TableSpeed:
    """Measured seconds per row of a batch of making a pack's tables, without writing them to the drive.

    ``static_table_s``: if rows in memory stay, to count rows and look each one up. ``planned_table_s``: if Belady's policy
    changes them, to find slots after the misses are known. ``missed_table_s``: in addition for a missed row, which is sorted into
    the order of extents.
    """

    static_table_s: float
    planned_table_s: float
    missed_table_s: float


def table_speed(dataset: str, n_nodes: int, budget: Budget, *, again: bool = False) -> TableSpeed:
    """Get the seconds of making tables: from the dataset's catalog, or measured now and kept there.

    ``again``: measure in any case. Seconds are processor time, so other processes do not disturb them. Seconds that are older
    than a day, or of another machine, number of nodes or method, are not used. A dataset that may not be written, or is being
    written, keeps nothing.
    """
    where = {"machine": platform.node(), "nodes": n_nodes, "method": METHOD}
    return kept_or_measured(dataset, KEY, where, TableSpeed, lambda: _measure(n_nodes, budget), again)


def _nowhere(array: npt.NDArray[Any]) -> None:
    """Write nothing: writes to the drive are measured elsewhere."""


def _rows(n: int) -> int:
    return min(MOST_ROWS, int(n * BATCH_FRACTION))


def _needed(n: int) -> int:
    size = _rows(n)
    n_accesses = 2 * N_BATCHES * size
    return NODE_BYTES * n + BATCH_BYTES * size + planning_bytes(n, n_accesses, longest=size, capacity=2 * size)


def _measure(n_nodes: int, budget: Budget) -> TableSpeed:
    n = 1 << min(max(n_nodes, LEAST_NODES).bit_length() - 1, MOST_BITS)
    while n > LEAST_NODES and _needed(n) > budget.available // 4:
        n //= 2
    with budget.reserve("measuring tables", _needed(n)):
        # Distinct rows all over the tables: multiplying by an odd number permutes the numbers below a power of two.
        drawn = np.random.default_rng(0).permutation(2 * _rows(n)) * SPREAD % n
        batches = drawn.astype(np.int32).reshape(2, -1)
        none, all_rows = np.full(n, -1, np.int32), np.arange(n, dtype=np.int32)
        static = _time_static(batches[0], all_rows)
        return TableSpeed(static, _time_planned(batches, n), max(LEAST_S, _time_static(batches[0], none) - static))


def _time_static(ids: npt.NDArray[np.int32], tier_of_row: npt.NDArray[np.int32]) -> float:
    """Measure the seconds per row of writing static tables."""
    counts, each = np.zeros(len(tier_of_row), np.int64), list[float]()
    for _ in range(N_BATCHES):
        begin = time.thread_time()
        counts[ids.astype(np.intp, copy=False)] += 1
        write_static(_nowhere, ids, tier_of_row)
        each.append(time.thread_time() - begin)
    return max(LEAST_S, statistics.median(each) / len(ids))  # the first one touches memory


def _time_planned(batches: npt.NDArray[np.int32], n: int) -> float:
    """Measure the seconds per row of writing planned tables, for two alternating batches in a cache with room for both.

    All misses are known with the first plan, so only the time after it counts.
    """
    lengths = np.full(N_BATCHES * len(batches), batches.shape[1])
    trace = Trace.reading(lambda number: batches[number % len(batches)], lengths, n)
    policy, each = CheckedPolicy(Belady()), list[float]()
    policy.start(batches.size, PolicyContext(n, 1))
    with closing(policy.plan(trace.horizon())) as plans:
        for _ in batches:
            next(plans)  # these miss all
        begin = time.thread_time()
        for number, planned in enumerate(plans, len(batches)):
            write_plan(_nowhere, planned, trace[number])
            each.append(time.thread_time() - begin)
            begin = time.thread_time()
    return max(LEAST_S, statistics.median(each) / len(batches[0]))
