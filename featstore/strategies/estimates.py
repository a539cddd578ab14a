"""Estimates that all registered strategies make of themselves, those of other packages among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from featstore.errors import PluginError
from featstore.plan.cost import Estimate, Machine, Workload, first_touch_s
from featstore.strategies.registry import available_strategies, find_strategy

__all__ = ["estimate_again", "estimate_all", "estimate_of"]


def estimate_of(name: str, workload: Workload, machine: Machine) -> list[Estimate]:
    """Return what a strategy estimates of itself, an estimate a policy; nothing where its class has no ``estimate`` of its own.

    Raises
    ------
    PluginError
        It raised, or its answer is no estimate of this strategy; names it.
    """
    try:
        cls = find_strategy(name)
    except PluginError as error:  # nobody asked for it: it is listed with the reason, and the others are compared
        return [Estimate(name, "none", 0.0, 0.0, 0, impossible=str(error))]
    if "estimate" not in vars(cls):  # its base class's says nothing of it
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


def estimate_all(workload: Workload, machine: Machine, seen_by: Callable[[str], Workload] | None = None) -> list[Estimate]:
    """Return the estimates of all registered strategies, also of those that cannot be taken, with the reason.

    ``seen_by``: returns what an epoch asks for under a strategy, by its name, where that is not the same for all.
    """
    found = [
        each
        for name in available_strategies()
        for each in estimate_of(name, workload if seen_by is None else seen_by(name), machine)
    ]
    buffers = first_touch_s(workload, machine)
    found = [each if each.hides_first_touch else replace(each, once_s=each.once_s + buffers) for each in found]
    if not (workload.device_rows and workload.has_pack):
        return found
    return [
        each if each.impossible or each.is_of_layout else replace(each, impossible="has no rows on the device") for each in found
    ]


def estimate_again(taken: Estimate, workload: Workload, machine: Machine) -> Estimate:
    """Return the estimate of the strategy and policy of another one for other counts; that other one where there is none."""
    found = estimate_of(taken.strategy, workload, machine)
    return next((each for each in found if each.policy == taken.policy), taken)
