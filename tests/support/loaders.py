"""Loaders from flat options: one dictionary for the loader's and its strategy's, by their own names.

For tests that run over several strategies, or that choose options one by one; others make their ``featstore.Loader``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import featstore
from featstore.cache.planned import PlannedPolicy
from featstore.strategies.options import option, policy_of
from featstore.strategies.registry import find_strategy
from featstore.strategies.superbatch import plan_ahead, run_planned

CANDIDATES = [  # of "auto": every strategy that estimates itself, with every policy
    *(("ondemand", policy) for policy in ("frequency", "degree", "sieve")),
    ("superbatch", "belady"),
    ("streamed", "belady"),
    *(("packed", policy) for policy in ("frequency", "belady")),
]
ESTIMATED = tuple(dict.fromkeys(strategy for strategy, _ in CANDIDATES))
OPTIONS = ("policy", "cache", "length", "disk", "run_dir", "pack", "epochs")


@dataclass(frozen=True)
class Serial(featstore.Ginex):
    """Ginex's schedule under another planned policy than Belady's."""

    policy: Any = option("belady", policy_of(PlannedPolicy), "which rows stay in memory")

    def run(self, context: featstore.Context) -> featstore.Runner:
        planning = plan_ahead(context, self.policy, self.length, self.disk, self.run_dir, overlap=False)
        return run_planned(self, context, planning)


def strategy_of(options: dict[str, Any]) -> featstore.Strategy:
    """Take the options of a strategy out of ``options``, and return it; options that are None are not given."""
    name = options.pop("strategy", "ondemand")
    if isinstance(name, featstore.Strategy):
        return name
    given = {option: options.pop(option) for option in OPTIONS if option in options}
    given = {option: value for option, value in given.items() if value is not None}
    if name in ("ondemand", "packed"):  # caches are what a test is about, where it has some
        given.setdefault("cache", "auto" if name == "ondemand" and "policy" in given else None)
    if name == "ginex" and "policy" in given:
        return Serial(**given)
    return find_strategy(name)(**given)


def make_loader(*args: Any, **options: Any) -> featstore.Loader:
    """Make a loader; ``strategy`` is a name, or an instance that has its options."""
    return featstore.Loader(*args, strategy=strategy_of(options), **options)


def row_policies() -> list[str]:
    """Return the policies that choose rows of any dataset, without parts."""
    return [name for name in featstore.available_policies() if not getattr(featstore.get_policy(name), "needs_parts", False)]


def flat(options: dict[str, Any] | None) -> dict[str, Any]:
    """Return loader options with the strategy that flat ones describe."""
    rest = dict(options or {})
    return {"strategy": strategy_of(rest), **rest}
