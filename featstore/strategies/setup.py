"""What a loader hands to its strategy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from featstore.cache.base import Policy
from featstore.pack.offline import Pack
from featstore.strategies.counters import ReadCounts, Stopwatch
from featstore.strategies.requests import Needs, Sampling

__all__ = ["Planning", "Setup"]


@dataclass(frozen=True)
class Planning:
    """What a strategy that looks ahead may use.

    Parameters
    ----------
    policy : Policy
        A planned one; for packs also a static one.
    superbatch : int or "auto"
        Batches a superbatch.
    disk : int or None
        Most bytes of run files at once.
    run_dir : str
        Where run directories are made.
    overlap : bool
        Sample and plan while earlier batches are gathered and trained on; otherwise one after the other.
    miss_share : float
        Of a batch's rows, those that the cache will lack, as far as is known: how much is packed of each.
    """

    policy: Policy
    superbatch: int | str
    disk: int | None
    run_dir: str
    overlap: bool = True
    miss_share: float = 1.0


@dataclass(frozen=True)
class Setup(Sampling):
    """What a strategy may use.

    Parameters
    ----------
    graph, sampler, batcher, threads
        See :class:`~featstore.strategies.requests.Sampling`.
    features : tuple of str
    watch : Stopwatch
        Measures the stages.
    reads : ReadCounts
        Gets what is read of features outside :meth:`EpochRun.gather`.
    planning : Planning, optional
        For strategies that look ahead.
    pack : Pack, optional
        For those that run offline samples; there are then no sampler and no seeds, and ``batcher`` orders batch numbers.
    device : torch.device
        Where batches are delivered.
    device_rows : int, optional
        Rows of the device's tier; None: as many as a layout that is there has.
    labels : str, optional
        Node data that the loader delivers.
    prefetch : int
        Batches made ahead of the one that the loop holds, while memory suffices.
    needs : Needs, optional
        What all stages need at the least: what a strategy takes beyond its part must not be another's.
    """

    features: tuple[str, ...]
    watch: Stopwatch
    reads: ReadCounts
    planning: Planning | None = None
    pack: Pack | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    device_rows: int | None = None
    labels: str | None = None
    prefetch: int = 0
    needs: Needs | None = None
