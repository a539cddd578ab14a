"""What a loader is asked for, checked before anything is made of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from featstore.cache.base import Policy, StaticPolicy, get_policy
from featstore.cache.planned import PlannedPolicy
from featstore.config import Budget, check_at_least, parse_disk, parse_size
from featstore.errors import BudgetError
from featstore.plan.offline import Pack
from featstore.run.strategies import STRATEGIES
from featstore.run.strategy import Planning

__all__ = ["BATCH_SIZE", "LABELS", "check_names", "check_pack", "check_policy", "check_strategy", "parse_planning", "parse_share"]


class _Unasked(str):
    """A default, which is not the same text given."""


LABELS = _Unasked("y")
BATCH_SIZE = 1000


def check_names(what: str, names: Sequence[str], there: Mapping[str, Any]) -> tuple[str, ...]:
    """Return names, distinct and all of them ``there``; else ValueError."""
    for name in names:
        if name not in there:
            hint = "; pass labels=None for batches without" if what == "labels" else ""
            raise ValueError(f"{what}: the graph has no {name!r}; it has {sorted(there)}{hint}")
    if len(set(names)) < len(names):
        raise ValueError(f"{what}: a name occurs twice in {list(names)}")
    return tuple(names)


def check_strategy(strategy: str, *, sampler: object, seeds: object, pack: object, device_cache: object) -> None:
    """Raise ValueError where a strategy, or ``"auto"``, is given what it cannot take, or not what it needs."""
    is_auto = strategy == "auto"
    if strategy not in STRATEGIES and not is_auto:
        raise ValueError(f"strategy must be one of {sorted([*STRATEGIES, 'auto'])}, not {strategy!r}")
    if strategy == "packed" or (is_auto and pack is not None):
        if sampler is not None or seeds is not None or pack is None:
            raise ValueError("strategy 'packed' runs the samples of pack=, and takes no sampler and no seeds")
    elif sampler is None or seeds is None or pack is not None:
        raise ValueError(f"strategy {strategy!r} needs a sampler and seeds; pack= goes with strategy='packed'")
    if device_cache is not None and strategy != "packed" and not (is_auto and pack is not None):
        raise ValueError(f"device_cache= goes with strategy='packed', or 'auto' with pack=, not {strategy!r}")


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


def parse_planning(
    graph: Any,
    row_bytes: int,
    strategy: str,
    policy: str | Policy | type[Policy] | None,
    *,
    superbatch: int | str,
    overlap: bool,
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
    if superbatch != "auto":
        if isinstance(superbatch, str):
            raise ValueError(f"superbatch must be a number of batches or 'auto', not {superbatch!r}")
        check_at_least("superbatch", superbatch, 1)
        if isinstance(chosen, StaticPolicy) and not is_auto:
            raise ValueError(
                f"superbatch={superbatch} goes with a planned policy: with policy {chosen.name!r} the rows in memory never change"
            )
    n_bytes = None if disk is None else parse_disk(disk, graph.num_nodes * row_bytes)
    where = os.path.abspath(f"{graph.path}.runs" if run_dir is None else os.fsdecode(run_dir))  # whatever directory comes next
    if not isinstance(overlap, bool):
        raise TypeError(f"overlap must be True or False, not {overlap!r}")
    return Planning(chosen, superbatch, n_bytes, where, overlap)
