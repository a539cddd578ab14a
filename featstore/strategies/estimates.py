"""Estimates that strategies of other packages make of themselves, beside the candidates of the cost model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from featstore.errors import PluginError
from featstore.plan.cost import CANDIDATES, Estimate, Machine, Workload
from featstore.strategies.registry import available_strategies, find_strategy

__all__ = ["estimate_again", "estimate_of", "plugin_estimates"]


def estimate_of(name: str, workload: Workload, machine: Machine) -> Estimate | None:
    """Return what a strategy estimates of itself; None where it estimates nothing, as the library's own do.

    Raises
    ------
    PluginError
        It raised, or its answer is no estimate of this strategy; names it.
    """
    try:
        cls = find_strategy(name)
    except PluginError as error:  # nobody asked for it: it is listed with the reason, and the others are compared
        return Estimate(name, "none", 0.0, 0.0, 0, impossible=str(error))
    who = f"strategy {name!r} ({cls.__module__}.{cls.__qualname__})"
    try:
        found = cls.estimate(workload, machine)
    except Exception as error:
        raise PluginError(f"{who} cannot be estimated: {type(error).__name__}: {error}") from error
    if found is None:
        return None
    if not isinstance(found, Estimate) or found.strategy != name:
        raise PluginError(f"{who} estimates {found!r}, not an Estimate of {name!r}")
    if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (found.epoch_s, found.once_s, *found.parts.values())):
        raise PluginError(f"{who} estimates seconds that are none: {found!r}")
    return found if found.parts else replace(found, parts={"epoch": found.epoch_s})


def plugin_estimates(workload: Workload, machine: Machine, seen_by: Callable[[str], Workload] | None = None) -> list[Estimate]:
    """Return the estimates of all registered strategies that estimate themselves, those of installed packages among them.

    ``seen_by``: returns what an epoch asks for under a strategy, by its name, where that is not the same for all.
    """
    found = (estimate_of(name, workload if seen_by is None else seen_by(name), machine) for name in available_strategies())
    return [each for each in found if each is not None]


def estimate_again(taken: Estimate, policy: str, workload: Workload, machine: Machine) -> Estimate:
    """Return the estimate of the strategy of another one for other counts; that other one where it estimates nothing of them."""
    candidate = CANDIDATES.get((taken.strategy, policy))
    if candidate is not None:
        return candidate(workload, machine)
    return estimate_of(taken.strategy, workload, machine) or taken
