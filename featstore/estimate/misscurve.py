"""Miss curves: the rows that each policy loads, against the size of the cache, for one recorded trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.cache.base import OnlinePolicy, Policy, PolicyContext, StaticPolicy, available_policies, get_policy
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.select import check_scores, top_rows
from featstore.cache.table import FeatureCache
from featstore.config import format_size, parse_size
from featstore.errors import FeatstoreError, PluginError
from featstore.plan.planmemory import planning_bytes
from featstore.plan.simulate import row_counts, simulate
from featstore.plan.trace import Trace

__all__ = ["DEFAULT_SIZES", "Curve", "MissCurve", "Step", "miss_curve", "parse_sizes"]

DEFAULT_SIZES = "1%,2%,5%,10%,20%,50%"

Int64s = npt.NDArray[np.int64]
Degrees = Callable[[], npt.NDArray[Any]]


@dataclass(frozen=True)
class Step:
    """Progress of a miss curve: ``done`` of ``total`` simulations, the one that begins now, and the seconds left if known."""

    done: int
    total: int
    policy: str
    capacity: int
    left_s: float | None


@dataclass
class Curve:
    """Rows that one policy loads over the whole trace, for each size, and the seconds of the simulations."""

    policy: str
    kind: str
    rows_loaded: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class MissCurve:
    """Rows loaded against cache size.

    The field has ``n`` rows. The trace's batches request ``n_accesses`` rows, ``n_distinct`` different ones, which is the fewest
    that can be loaded. ``sizes`` of the cache ascend. ``curves`` are ordered best first, by the largest size, then by the next
    smaller ones. ``skipped``: policies that cannot be simulated here, and the reason.
    """

    n: int
    n_batches: int
    n_accesses: int
    n_distinct: int
    sizes: list[int]
    curves: list[Curve]
    skipped: dict[str, str]

    def cache_bytes(self, row_bytes: int) -> list[int]:
        """Count the bytes of memory that a cache of each size takes, tables included: the most of all policies."""
        policies = [None, *(get_policy(curve.policy) for curve in self.curves)]  # None: a cache that follows a planner
        return [max(FeatureCache.least_bytes(rows, row_bytes, self.n, policy) for policy in policies) for rows in self.sizes]

    def to_dict(self, row_bytes: int) -> dict[str, Any]:
        return {
            "rows": self.n,
            "row_bytes": row_bytes,
            "batches": self.n_batches,
            "rows_asked_for": self.n_accesses,
            "distinct_rows": self.n_distinct,
            "sizes": [
                {"rows": rows, "share": rows / self.n, "bytes": n_bytes}
                for rows, n_bytes in zip(self.sizes, self.cache_bytes(row_bytes), strict=True)
            ],
            "policies": {
                curve.policy: {"kind": curve.kind, "rows_loaded": curve.rows_loaded, "seconds": round(curve.seconds, 3)}
                for curve in self.curves
            },
            "skipped": self.skipped,
        }

    def table(self, row_bytes: int) -> str:
        """Format the curves as text: a column a size, a row a policy, best first, with the share of the rows requested."""
        asked = max(1, self.n_accesses)
        heads = [
            [f"{100 * rows / self.n:.3g} %" for rows in self.sizes],
            [f"{rows:,}" for rows in self.sizes],
            [format_size(n_bytes) for n_bytes in self.cache_bytes(row_bytes)],
        ]
        body = [[f"{loads:,} {loads / asked:4.0%}" for loads in curve.rows_loaded] for curve in self.curves]
        names = ["cache", "  rows", "  memory", *(curve.policy for curve in self.curves), "each row once"]
        first = max(map(len, names)) + 2
        widths = [max(len(cells[i]) for cells in heads + body) + 2 for i in range(len(self.sizes))]

        def line(name: str, cells: Sequence[str]) -> str:
            return name.ljust(first) + "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))

        lines = [
            f"{self.n_batches:,} batches ask for {self.n_accesses:,} rows, {self.n_distinct:,} of them distinct "
            f"({self.n_distinct / self.n:.0%} of {self.n:,})",
            "",
            *(line(name, cells) for name, cells in zip(names, heads, strict=False)),
            "",
            "rows loaded, and their share of the rows asked for",
            *(line(curve.policy, cells) for curve, cells in zip(self.curves, body, strict=True)),
            line("each row once", [f"{self.n_distinct:,} {self.n_distinct / asked:4.0%}"] * len(self.sizes)),
        ]
        lines += [f"not simulated: {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def parse_sizes(text: str, n: int, row_bytes: int) -> list[int]:
    """Parse a list of cache sizes such as ``"1%,0.05,20000,1GiB"`` into rows, ascending; ValueError names the wrong part.

    Parts are shares of the rows (``5%`` or ``0.05``), rows (a whole number), or the memory that the cache may take (with a
    unit).
    """
    rows = []
    for part in (part.strip() for part in text.split(",")):
        try:
            if part.endswith("%") or ("." in part and part.replace(".", "", 1).isdigit()):
                share = float(part.removesuffix("%")) / (100 if part.endswith("%") else 1)
                if not 0 < share <= 1:
                    raise ValueError(f"a share of the rows lies above 0 and is at most 100 %, not {part}")
                rows.append(max(1, round(share * n)))
            elif part.isdigit():
                if not 1 <= int(part) <= n:
                    raise ValueError(f"a cache of {part} rows is out of range: sizes are from 1 to {n} rows")
                rows.append(int(part))
            else:
                rows.append(FeatureCache.capacity_for(parse_size(part), row_bytes, n, None))
        except (ValueError, MemoryError) as error:
            raise ValueError(f"sizes: {part!r}: {error}; write shares (5%), rows (20000) or memory (1GiB)") from None
    return sorted(set(rows))


def miss_curve(
    trace: Trace,
    sizes: Iterable[int],
    policies: Sequence[str] | None = None,
    *,
    in_degree: Degrees | None = None,
    out_degree: Degrees | None = None,
    seed: int = 0,
    budget: Budget | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> MissCurve:
    """Count the rows that policies load over a trace, for several sizes of the cache.

    Parameters
    ----------
    trace : Trace
        In memory or on disk.
    sizes : iterable of int
        Rows of the cache, each from 1 to ``trace.n``.
    policies : sequence of str, optional
        Registered names; by default all, except policies that need parts.
    in_degree, out_degree, seed
        Degrees, for policies that score by them, as callables; seed of randomised policies.
    budget : Budget, optional
        Pays for the tables of each simulation.
    on_step : callable, optional
        Called before each simulation with a :class:`Step`.

    Raises
    ------
    ValueError
        The trace has no rows, or a size or a policy does not exist. A policy in ``policies`` that cannot be simulated raises its
        own error; one of the default policies is listed in ``skipped``.

    Notes
    -----
    Each number is ``simulate(trace, size, policy).sum()``, but some need no replay: one count of the trace gives all sizes of a
    static policy, and an online policy that never evicts loads each row once. Memory: 16 bytes a row, and that of one simulation.

    Examples
    --------
    >>> curve = miss_curve(Trace([[0, 1], [2, 0], [0, 1]]), [1, 2], ["belady", "lru"])
    >>> {c.policy: c.rows_loaded for c in curve.curves}
    {'belady': [4, 3], 'lru': [5, 4]}
    """
    capacities = sorted(set(sizes))
    if not trace.n_accesses:
        raise ValueError("the trace asks for no rows")
    if not capacities:
        raise ValueError("no sizes: give at least one number of rows")
    for rows in capacities:
        if not 1 <= rows <= trace.n:
            raise ValueError(f"a cache of {rows} rows is out of range: sizes are from 1 to {trace.n} rows")
    skipped: dict[str, str] = {}
    curves: list[tuple[Curve, Policy]] = []
    for name in available_policies() if policies is None else dict.fromkeys(policies):
        try:
            policy = get_policy(name)
            if policies is None and isinstance(policy, StaticPolicy) and policy.needs_parts:
                continue  # scores neighbour lists by parts; a trace has neither
            curves.append((Curve(name, _kind(policy)), policy))
        except PluginError as error:
            if policies is not None:
                raise
            skipped[name] = str(error)
    with _reserved(budget, 16 * trace.n):
        counts = row_counts(trace)
        saved = np.maximum(counts - 1, 0)  # loads saved by a row that is kept from its first use on
        n_distinct = int(np.count_nonzero(counts))
        context = PolicyContext(trace.n, 1, in_degree, out_degree, lambda: counts, seed=seed)

        def run(task: _Task) -> list[int]:
            if isinstance(task.policy, StaticPolicy):
                scores = check_scores(task.policy, task.policy.scores(context), trace.n)
                return [trace.n_accesses - int(saved[top_rows(scores, rows)].sum()) for rows in task.capacities]
            return [
                int(simulate(trace, rows, task.curve.policy, in_degree=in_degree, out_degree=out_degree, seed=seed).sum())
                for rows in task.capacities
            ]

        tasks = [_Task(curve, policy, capacities) for curve, policy in curves if isinstance(policy, StaticPolicy)]
        # Sizes outside, policies inside: after the first size the seconds of each policy are known.
        for rows in capacities:
            for curve, policy in curves:
                if isinstance(policy, OnlinePolicy) and rows >= n_distinct:
                    continue  # it fills free slots first, so it never evicts
                if not isinstance(policy, StaticPolicy):
                    tasks.append(_Task(curve, policy, [rows]))
        last_s: dict[str, float] = {}
        for done, task in enumerate(tasks):
            name = task.curve.policy
            if name in skipped:
                continue
            if on_step is not None:
                on_step(Step(done, len(tasks), name, task.capacities[-1], _left_s(tasks[done:], last_s)))
            begin = time.perf_counter()
            try:
                with _reserved(budget, task.held_bytes(trace)):
                    task.curve.rows_loaded += run(task)
            except (PluginError, ValueError) as error:
                # Errors that are not the policy's, such as a damaged file or a closed dataset, end the whole curve.
                if policies is not None or (isinstance(error, FeatstoreError) and not isinstance(error, PluginError)):
                    raise
                skipped[name] = str(error)
            last_s[name] = time.perf_counter() - begin
            task.curve.seconds += last_s[name]
    kept = [curve for curve, _ in curves if curve.policy not in skipped]
    for curve in kept:
        curve.rows_loaded += [n_distinct] * (len(capacities) - len(curve.rows_loaded))
    kept.sort(key=lambda curve: curve.rows_loaded[::-1])
    return MissCurve(trace.n, len(trace), trace.n_accesses, n_distinct, capacities, kept, skipped)


def _kind(policy: Policy) -> str:
    for kind, base in (("static", StaticPolicy), ("online", OnlinePolicy), ("planned", PlannedPolicy)):
        if isinstance(policy, base):
            return kind
    raise PluginError(f"policy {policy.name!r} is of no known kind")


@dataclass
class _Task:
    """One simulation: of all sizes at once for a static policy, of one size for others."""

    curve: Curve
    policy: Policy
    capacities: list[int]

    def held_bytes(self, trace: Trace) -> int:
        rows = self.capacities[-1]
        if isinstance(self.policy, StaticPolicy):
            return (1 + self.policy.score_bytes) * trace.n + 16 * rows
        if isinstance(self.policy, OnlinePolicy):
            return FeatureCache.least_bytes(rows, 1, trace.n, self.policy)
        assert isinstance(self.policy, PlannedPolicy)
        checked = CheckedPolicy(self.policy).is_checked
        return planning_bytes(trace.n, trace.n_accesses, longest=trace.longest, checked=checked)


def _left_s(tasks: list[_Task], last_s: Mapping[str, float]) -> float | None:
    """Estimate the seconds of the tasks: a policy's last seconds, or the mean of the known ones; None if none is known."""
    replayed = [task.curve.policy for task in tasks if not isinstance(task.policy, StaticPolicy)]
    known = [last_s[name] for name in dict.fromkeys(replayed) if name in last_s]
    if not known:
        return 0.0 if not replayed else None
    mean = sum(known) / len(known)
    return sum(last_s.get(name, mean) for name in replayed)


def _reserved(budget: Budget | None, n_bytes: int) -> AbstractContextManager[Any]:
    return nullcontext() if budget is None else budget.reserve("simulation", n_bytes)
