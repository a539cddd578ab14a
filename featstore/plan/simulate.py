"""Simulation of a cache: replay a trace under a policy and count the rows that it would load, without data."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.cache.base import OnlinePolicy, Policy, PolicyContext, StaticPolicy, get_policy
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.select import check_scores, top_rows
from featstore.cache.table import FeatureCache
from featstore.config import check_at_least
from featstore.errors import PluginError
from featstore.plan.trace import Trace

__all__ = ["row_counts", "simulate"]

Int64s = npt.NDArray[np.int64]


def simulate(
    trace: Trace | Sequence[Any] | str | os.PathLike[str],
    capacity: int,
    policy: str | Policy | type[Policy] = "belady",
    *,
    n: int | None = None,
    in_degree: Callable[[], npt.NDArray[Any]] | None = None,
    out_degree: Callable[[], npt.NDArray[Any]] | None = None,
    seed: int = 0,
) -> Int64s:
    """Count the rows that a cache would load, batch by batch.

    Parameters
    ----------
    trace : Trace, sequence of integer arrays, or path of a trace file
        The distinct rows of each batch.
    capacity : int
        Rows that the cache holds.
    policy : str, Policy or class
        Any registered policy.
    n : int, optional
        Rows of the field, if ``trace`` is a sequence.
    in_degree, out_degree : callable, optional
        Degrees, for policies that score by them.
    seed : int
        Seed of randomised policies.

    Returns
    -------
    int64 array, shape (n_batches,)
        Rows loaded in each batch.

    Raises
    ------
    ValueError, TypeError
        The capacity is negative or no integer, or the policy needs an array that is not given.
    PluginError
        The policy raised, or broke its contract.

    Notes
    -----
    Every policy starts with an empty cache. A static policy's rows are loaded, and counted, when a batch first asks for them.
    ``frequency`` counts the trace itself.

    Examples
    --------
    >>> simulate([[0, 1], [2, 0], [0, 1]], 1).tolist()
    [2, 1, 1]
    """
    if isinstance(trace, (str, os.PathLike)):
        opened = Trace.open(trace)
        try:
            return simulate(opened, capacity, policy, in_degree=in_degree, out_degree=out_degree, seed=seed)
        finally:
            opened.close()
    if not isinstance(trace, Trace):
        trace = Trace(trace, n)
    capacity, seed = check_at_least("capacity", capacity, 0), check_at_least("seed", seed, 0)
    chosen = get_policy(policy)
    context = PolicyContext(
        trace.n, 1, in_degree_of=in_degree, out_degree_of=out_degree, counts_of=lambda: row_counts(trace), seed=seed
    )
    capacity = min(capacity, trace.n)
    if capacity == 0:
        return trace.lengths
    if isinstance(chosen, StaticPolicy):
        return _static(trace, capacity, chosen, context)
    if isinstance(chosen, PlannedPolicy):
        return _planned(trace, capacity, chosen, context)
    if isinstance(chosen, OnlinePolicy):
        return _online(trace, capacity, chosen, context)
    raise PluginError(f"policy {chosen.name!r} is of no known kind")


def row_counts(trace: Trace) -> Int64s:
    """Count the batches that ask for each row, int64 [n]."""
    counts = np.zeros(trace.n, np.int64)
    for ids in trace:
        counts[ids.astype(np.intp, copy=False)] += 1
    return counts


def _static(trace: Trace, capacity: int, policy: StaticPolicy, context: PolicyContext) -> Int64s:
    waiting = np.zeros(trace.n, bool)  # chosen, but not loaded yet
    waiting[top_rows(check_scores(policy, policy.scores(context), trace.n), capacity)] = True
    chosen = waiting.copy()
    loads = np.empty(len(trace), np.int64)
    for batch, ids in enumerate(trace):
        loads[batch] = np.count_nonzero(~chosen.take(ids) | waiting.take(ids))
        waiting.put(ids, False)
    return loads


def _planned(trace: Trace, capacity: int, policy: PlannedPolicy, context: PolicyContext) -> Int64s:
    checked = CheckedPolicy(policy)
    checked.start(capacity, context)
    announced: list[int] = []
    horizon = replace(trace.horizon(), announce=lambda _, missed: announced.append(len(missed)))
    loads = np.empty(len(trace), np.int64)
    with closing(checked.plan(horizon)) as batches:
        for number, batch in enumerate(batches):
            if not checked.is_checked and len(announced) == len(trace):
                return np.array(announced, np.int64)  # known before any slot
            loads[number] = np.count_nonzero(batch.slots < 0)
    return loads


def _online(trace: Trace, capacity: int, policy: OnlinePolicy, context: PolicyContext) -> Int64s:
    cache = FeatureCache(capacity, 1, trace.n, policy, context)
    loads = np.empty(len(trace), np.int64)
    try:
        for batch, ids in enumerate(trace):
            plan = cache.plan(ids.astype(np.int64, copy=False))
            missed = plan.parts[-1] if plan.parts and plan.parts[-1].tier.name == "BASE" else None
            rows = np.empty(0, np.int64) if missed is None else np.asarray(missed.addresses, np.int64)
            loads[batch] = len(rows)
            changes = cache.admit(rows)
            if changes is not None:
                cache.apply(changes, np.empty((len(rows), 1), np.uint8))
    finally:
        cache.close()
    return loads
