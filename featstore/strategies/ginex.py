"""``Ginex``: the schedule of the paper, in which the neighbour cache and the feature cache share one memory in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from featstore.strategies.registry import register_strategy
from featstore.strategies.superbatch import Superbatch

__all__ = ["Ginex"]


@register_strategy("ginex")
@dataclass(frozen=True)
class Ginex(Superbatch):
    """Sample a superbatch and plan the one before it while no batch runs, with a neighbour cache in the idle memory.

    The feature cache is then filled with the rows that are used first. Ginex needs less memory than
    :class:`~featstore.Superbatch` (one cache or the other, half the plans), but the loop waits while a superbatch is sampled.

    Parameters
    ----------
    cache, policy, disk, run_dir, edge_cache
        As of :class:`~featstore.Superbatch`. Each superbatch's edges are planned alone; their cache keeps its own memory.
    length : int or "auto"
        Batches a superbatch; ``"auto"`` takes as many as the disk and an eighth of the memory allow, a whole epoch at most.

    References
    ----------
    Park et al., Ginex, VLDB 2022, section 3; the schedule is its figure 9.
    """

    takes_history: ClassVar[bool] = True
    takes_types: ClassVar[bool] = True
    takes_mixed: ClassVar[bool] = True
    overlap: ClassVar[bool] = False
