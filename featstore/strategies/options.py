"""What a loader is asked for, checked before anything is made of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from featstore.cache.base import Policy, StaticPolicy, get_policy
from featstore.cache.planned import PlannedPolicy
from featstore.config import Budget, check_at_least, parse_disk, parse_size
from featstore.errors import BudgetError
from featstore.pack.offline import Pack
from featstore.strategies.registry import STRATEGIES
from featstore.strategies.setup import Planning

__all__ = [
    "BATCH_SIZE",
    "LABELS",
    "TAKEN_BY",
    "check_flag",
    "check_names",
    "check_options",
    "check_pack",
    "check_policy",
    "check_strategy",
    "check_superbatch",
    "parse_planning",
    "parse_share",
]


class _Unasked(str):
    """A default, which is not the same text given."""


LABELS = _Unasked("y")
BATCH_SIZE = 1000

# The strategies that take an option; options that are not listed are taken by every strategy. None means: not given.
TAKEN_BY: Mapping[str, tuple[str, ...]] = {
    "policy": ("ondemand", "superbatch", "streamed", "packed"),
    "superbatch": ("superbatch", "streamed", "packed", "auto"),
    "overlap": ("superbatch",),
    "disk": ("superbatch", "streamed", "packed", "auto"),
    "run_dir": ("superbatch", "streamed", "auto"),
    "pack": ("packed", "auto"),
    "device_cache": ("packed", "auto"),
    "epochs": ("auto",),
}


def check_names(what: str, names: Sequence[str], there: Mapping[str, Any]) -> tuple[str, ...]:
    """Return names, distinct and all of them ``there``; else ValueError."""
    for name in names:
        if name not in there:
            hint = "; pass labels=None for batches without" if what == "labels" else ""
            raise ValueError(f"{what}: the graph has no {name!r}; it has {sorted(there)}{hint}")
    if len(set(names)) < len(names):
        raise ValueError(f"{what}: a name occurs twice in {list(names)}")
    return tuple(names)


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, not {value!r}")


def check_options(strategy: str, given: Mapping[str, object]) -> None:
    """Raise ValueError where an option was given that the strategy would ignore.

    Parameters
    ----------
    strategy : str
    given : mapping of str to object
        Values of options that :data:`TAKEN_BY` lists; None: not given.
    """
    for name, value in given.items():
        if value is not None and strategy not in TAKEN_BY[name]:
            *others, last = [repr(each) for each in TAKEN_BY[name]]
            those = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(f"{name}= goes with strategy={those}, not {strategy!r}")


def check_strategy(strategy: str, *, sampler: object, seeds: object, is_packed_graph: bool, given: Mapping[str, object]) -> None:
    """Raise ValueError where a strategy, or ``"auto"``, is given what it does not take, or not what it needs.

    ``given`` is as for :func:`check_options`, with the pack of a PackedGraph.
    """
    if strategy not in STRATEGIES and strategy != "auto":
        raise ValueError(f"strategy must be one of {sorted([*STRATEGIES, 'auto'])}, not {strategy!r}")
    if is_packed_graph and strategy != "packed":
        raise ValueError(f"a PackedGraph goes with strategy='packed', not {strategy!r}: the others need its dataset")
    check_options(strategy, given)
    if strategy == "packed" or given["pack"] is not None:
        if sampler is not None or seeds is not None or given["pack"] is None:
            raise ValueError("strategy 'packed' runs the samples of pack=, and takes no sampler and no seeds")
    elif sampler is None or seeds is None:
        raise ValueError(f"strategy {strategy!r} needs a sampler and seeds{', or pack=' * (strategy == 'auto')}")
    elif given["device_cache"] is not None:
        raise ValueError("device_cache= goes with pack=: rows stay on the device for the batches of a pack")


def check_pack(pack: Pack, batch_size: int | None, drop_last: bool) -> None:
    """Raise ValueError where a loader is asked for other batches than those of its pack."""
    made = pack.record["batch_size"]
    if batch_size not in (None, made):
        what = "those of the sampler that it was made with" if made is None else f"of {made} seeds"
        raise ValueError(f"batch_size={batch_size}: the batches of {pack.path} are {what}; leave batch_size out")
    if drop_last and not pack.record["drop_last"]:
        raise ValueError(f"drop_last=True: {pack.path} has its last batches; make it with sample_offline(..., drop_last=True)")


def parse_share(memory: int | str | None, budget: Budget) -> Budget | None:
    """Return a loader's share of a graph's budget, none where ``memory`` is None.

    Raises
    ------
    BudgetError
        It is more than the budget.
    """
    if memory is None:
        return None
    share = parse_size(memory)
    if share > budget.total:
        raise BudgetError(
            f"memory={memory!r} is more than the graph's budget of {budget.total} bytes; open it with memory={share}", share
        )
    return Budget(share, "loader")


def check_policy(strategy: str, policy: str | Policy | type[Policy] | None) -> Policy:
    """Return the policy of a strategy that looks ahead, which must be one that it can follow; else ValueError."""
    chosen = get_policy("belady" if policy is None else policy)
    if not isinstance(chosen, PlannedPolicy) and (strategy != "packed" or not isinstance(chosen, StaticPolicy)):
        raise ValueError(
            f"strategy {strategy!r} needs a planned policy such as 'belady'{' or a static one' * (strategy == 'packed')}, "
            f"not {chosen.name!r}"
        )
    return chosen


def check_superbatch(superbatch: int | str | None, policy: Policy) -> None:
    """Raise ValueError where superbatches are asked for of a policy that plans nothing."""
    if superbatch is not None and isinstance(policy, StaticPolicy):
        raise ValueError(f"superbatch= goes with a planned policy: with policy {policy.name!r} the rows in memory never change")


def parse_planning(
    graph: Any,
    row_bytes: int,
    strategy: str,
    policy: str | Policy | type[Policy] | None,
    *,
    superbatch: int | str | None,
    overlap: bool | None,
    disk: int | str | None,
    run_dir: str | os.PathLike[str] | None,
    is_auto: bool = False,
) -> Planning | None:
    """Check the options of strategies that look ahead; None for the others.

    Parameters
    ----------
    graph : OutOfCoreGraph or PackedGraph
    row_bytes : int
        Of all the loader's features: ``disk`` may be a multiple of what they take.
    strategy, policy, superbatch, overlap, disk, run_dir
        As of :class:`~featstore.Loader`.
    is_auto : bool
        Strategy and policy were not asked for, but decided on; options are for whatever strategy they fit.

    Raises
    ------
    ValueError, TypeError
    """
    if strategy == "ondemand":
        chosen = None if policy is None else get_policy(policy)
        if isinstance(chosen, PlannedPolicy):
            raise ValueError(f"policy {chosen.name!r} plans ahead: use it with strategy='superbatch'")
        return None
    chosen = check_policy(strategy, policy)
    if not is_auto:
        check_superbatch(superbatch, chosen)
    superbatch = "auto" if superbatch is None else superbatch
    if superbatch != "auto":
        if isinstance(superbatch, str):
            raise ValueError(f"superbatch must be a number of batches or 'auto', not {superbatch!r}")
        check_at_least("superbatch", superbatch, 1)
    n_bytes = None if disk is None else parse_disk(disk, graph.num_nodes * row_bytes)
    where = f"{graph.path}.runs" if run_dir is None else os.fsdecode(run_dir)
    if not where:
        raise ValueError("run_dir= is empty: name a directory, or leave it out")
    overlap = True if overlap is None else overlap
    check_flag("overlap", overlap)
    where = os.path.abspath(where)  # whatever the working directory is later
    return Planning(chosen, superbatch, n_bytes, where, bool(overlap))
