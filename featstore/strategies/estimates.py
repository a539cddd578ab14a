"""Estimates of all registered strategies, of other packages too, each made by the strategy itself; the choice of the least."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

from featstore.errors import BudgetError, PerformanceWarning, PluginError, warn
from featstore.estimate.choice import Choice
from featstore.estimate.cost import PLANNED, Estimate, Machine, Workload, cheapest, first_touch_s
from featstore.estimate.length import Length, at_least
from featstore.strategies.base import Strategy
from featstore.strategies.context import Context
from featstore.strategies.options import options_of
from featstore.strategies.registry import available_strategies, find_strategy

__all__ = ["Lengths", "choose", "estimate_all", "estimate_lengths", "estimate_of", "made_with"]

Lengths: TypeAlias = "dict[tuple[str, str], Length]"  # by strategy and policy


def made_with(cls: type[Strategy], options: Mapping[str, Any]) -> Strategy:
    """Make a strategy with those of ``options`` that it has."""
    return cls(**{name: each for name, each in options.items() if name in options_of(cls)})


def estimate_lengths(context: Context, options: Mapping[str, Any]) -> Lengths:
    """Estimate the length of superbatches for each strategy that estimates itself, under each of its policies.

    Strategies without superbatches are left out. The length of a strategy that lacks memory is marked impossible: the strategy
    cannot be taken. A strategy gets those of ``options`` that it has. With an ``edge_cache``, policies that plan no caches of
    edge features are left out.
    """
    found: Lengths = {}
    given = {name: each for name, each in options.items() if name != "edge_cache"}  # its memory is reserved already
    for name in available_strategies():
        with suppress(PluginError):  # the estimates report it
            cls = find_strategy(name)
            if "estimate" not in vars(cls) or cls.estimate_length is Strategy.estimate_length:
                continue
            for policy in cls.judged_with:
                if policy != PLANNED and options.get("edge_cache"):
                    continue
                try:
                    strategy = made_with(cls, given if policy == PLANNED else {**given, "policy": policy})
                    length = strategy.estimate_length(context)
                except BudgetError as error:
                    more = error.reason if error.needed is None else f"needs memory='{at_least(error.needed)}'"
                    length = Length(1, len(context.batches), impossible=more)
                except OSError:
                    raise  # of a read, as of the batch that is measured: no fault of the strategy's
                except Exception as error:  # of a plug-in, which the user did not ask for: the others are compared
                    more = f"strategy {name!r} ({cls.__module__}.{cls.__qualname__}) cannot be made, or estimates no length: "
                    more += f"{type(error).__name__}: {error}"
                    warn(f"{more}; it is left out", PerformanceWarning)
                    length = Length(1, len(context.batches), impossible=more)
                if length is not None:
                    found[name, policy] = length
    return found


def estimate_of(name: str, workload: Workload, machine: Machine) -> list[Estimate]:
    """Ask a strategy for its estimates, one a policy; none if its class has no ``estimate`` of its own.

    Raises
    ------
    PluginError
        The strategy raised, or returned no estimate of itself; the error names the strategy.
    """
    try:
        cls = find_strategy(name)
    except PluginError as error:  # the user did not ask for it: it is listed with the reason, and the others are compared
        return [Estimate(name, "none", 0.0, 0.0, 0, impossible=str(error))]
    if "estimate" not in vars(cls):  # the estimate of a base class does not hold for it
        return []
    who = f"strategy {name!r} ({cls.__module__}.{cls.__qualname__})"
    try:
        answer = cls.estimate(workload, machine)
    except Exception as error:
        raise PluginError(f"{who} cannot be estimated: {type(error).__name__}: {error}") from error
    listed = [] if answer is None else list(answer) if isinstance(answer, Sequence) else [answer]
    for found in listed:
        if not isinstance(found, Estimate) or found.strategy != name:
            raise PluginError(f"{who} estimates {found!r}, not an Estimate of {name!r}")
        if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (found.epoch_s, found.once_s, *found.parts.values())):
            raise PluginError(f"{who} estimates seconds that are none: {found!r}")
    return [found if found.parts else replace(found, parts={"epoch": found.epoch_s}) for found in listed]


def estimate_all(workload: Workload, machine: Machine, lengths: Lengths | None = None) -> list[Estimate]:
    """Estimate all registered strategies; estimates of strategies that cannot be taken have the reason in ``impossible``.

    A strategy whose estimate fails cannot be taken, and a warning names it. ``lengths`` has the lengths of superbatches, by
    strategy and policy; strategies without an entry get the workload's length.
    """
    found = list[Estimate]()
    for name in available_strategies():
        of_policies = [(policy, length) for (strategy, policy), length in (lengths or {}).items() if strategy == name]
        try:
            for policy, length in of_policies:
                estimates = estimate_of(name, _seen(workload, length, policy), machine)
                found += [replace(each, impossible=each.impossible or length.impossible) for each in estimates]
            if not of_policies:
                found += estimate_of(name, workload, machine)
        except PluginError as error:
            warn(f"{error}; it is left out", PerformanceWarning)
            found.append(Estimate(name, "none", 0.0, 0.0, 0, impossible=str(error)))
    buffers = first_touch_s(workload, machine)
    found = [each if each.hides_first_touch else replace(each, once_s=each.once_s + buffers) for each in found]
    if not (workload.device_rows and workload.has_pack):
        return found
    return [
        each if each.impossible or each.is_of_layout else replace(each, impossible="has no rows on the device") for each in found
    ]


def _seen(workload: Workload, length: Length, policy: str) -> Workload:
    """Adapt a workload to superbatches of this length; caches may have fewer rows beside their planning."""
    packings = max(1, length.passes // max(1, -(-workload.n_batches // max(1, length.n_batches))))
    workload = replace(workload, superbatch=length.n_batches, packings=packings, policy=policy)
    n, rows = workload.n_accesses - workload.n_device, workload.capacity if length.rows is None else length.rows
    if policy != PLANNED:
        return replace(workload, capacity=rows, loads=round(workload.misses.by_degree.of_epoch(rows) * n))
    loads = workload.loads
    if rows < workload.capacity:
        more = workload.misses.planned.of_epoch(rows) - workload.misses.planned.of_epoch(workload.capacity)
        loads = min(n, loads + round(more * n))
    # A plan sees no further than the next superbatch: in short superbatches it is no better than an online policy.
    most = n if workload.online_loads is None else max(loads, workload.online_loads)
    if length.n_batches < workload.n_batches:
        loads += round((most - loads) / max(1, length.n_batches))
    return replace(workload, loads=loads)


def choose(
    workload: Workload,
    machine: Machine,
    lengths: Lengths,
    *,
    has_history: bool = False,
    has_types: bool = False,
    is_mixed: bool = False,
) -> Choice:
    """Take the cheapest of the strategies that estimate themselves and are possible.

    Parameters
    ----------
    workload : Workload
    machine : Machine
    lengths : mapping of (str, str) to Length
        See :func:`estimate_lengths`. The choice gets the length of the strategy taken, or, if that has none, the length with
        most passes.
    has_history : bool
        True: strategies that run batches in another order cannot be taken.
    has_types : bool
        True: strategies that do not take graphs of several types cannot be taken.
    is_mixed : bool
        True: strategies that do not take features of different types cannot be taken.
    """
    estimates = estimate_all(workload, machine, lengths)
    for name, what, asked in (
        ("takes_history", "a history", has_history),
        ("takes_types", "several types", has_types),
        ("takes_mixed", "features of different types", is_mixed),
    ):
        if asked:
            estimates = [
                each
                if getattr(find_strategy(each.strategy), name)
                else replace(each, impossible=each.impossible or f"does not say that it takes {what}")
                for each in estimates
            ]
    taken, reason = cheapest(estimates, workload.epochs)
    length = lengths.get((taken.strategy, taken.policy)) or max(lengths.values(), key=lambda each: each.passes, default=None)
    if length is None:
        return Choice(workload, machine, estimates, taken, reason)
    workload = replace(workload, superbatch=length.n_batches)
    return Choice(workload, machine, estimates, taken, reason, passes=length.passes, advice=length.advice)
