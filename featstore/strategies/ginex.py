"""``Ginex``: the schedule of the paper, in which neighbour and feature cache use the same memory, one after the other."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from featstore.strategies.base import Runner, Strategy
from featstore.strategies.options import CACHE, DISK, LENGTH, RUN_DIR, option
from featstore.strategies.registry import register_strategy
from featstore.strategies.setup import Setup
from featstore.strategies.superbatch import SuperbatchRunner, plan_ahead, run_planned

__all__ = ["Ginex"]


@register_strategy("ginex")
@dataclass(frozen=True)
class Ginex(Strategy):
    """Sample a superbatch when the one before has run, with a neighbour cache in the memory of the feature cache.

    The feature cache is then filled with the rows that are used first, and planned by Belady. It needs less memory than
    :class:`~featstore.Superbatch` (one cache or the other, half the plans), and the loop waits while a superbatch is sampled.

    Parameters
    ----------
    cache, length, disk, run_dir
        As of :class:`~featstore.Superbatch`.

    References
    ----------
    Park et al., Ginex, VLDB 2022, section 3.
    """

    cache: int | float | str | None = option("auto", CACHE, "memory of the caches: bytes (1GiB), a share (10%, 0.1) or auto")
    length: int | str = option("auto", LENGTH, "batches a superbatch")
    disk: int | str | None = option(None, DISK, "most bytes of run files, or a multiple of the features (1.5x)")
    run_dir: str | os.PathLike[str] | None = option(None, RUN_DIR, "where run files go")

    def run(self, setup: Setup) -> Runner:
        """See :class:`~featstore.Strategy`."""
        planning = plan_ahead(setup, "belady", self.length, self.disk, self.run_dir, overlap=False)
        return run_planned(replace(setup, planning=planning), SuperbatchRunner, self.cache)
