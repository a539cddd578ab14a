"""Check of a strategy's epoch: each batch runs once, and each is the batch that was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from featstore.errors import PluginError
from featstore.sampling.batch import SampledBatch
from featstore.strategies.base import Batch

__all__ = ["batch_check"]


def batch_check(strategy: str, n_batches: int, epoch: int | None) -> Callable[[Any, int], None]:
    """Make the function ``check(batch, position)`` that checks every batch that a strategy returns in one epoch. Thread-safe.

    Parameters
    ----------
    strategy : str
        Name of the strategy, for messages.
    n_batches : int
        Batches of the epoch.
    epoch : int or None
        The epoch that every batch must be sampled for. None: the strategy has batches of its own, of any epoch.

    Raises
    ------
    PluginError
        From the check: the object is no batch, is of another epoch, or has run as another number.
    """
    position_of = np.full(n_batches, -1, np.int32)

    def fail(position: int, what: str) -> NoReturn:
        raise PluginError(f"strategy {strategy!r}: what it prepared to run as number {position} {what}")

    def check(batch: Any, position: int) -> None:
        if not isinstance(batch, Batch) or not isinstance(batch.sampled, SampledBatch):
            of = f" of a {type(batch.sampled).__name__}" if isinstance(batch, Batch) else ""
            fail(position, f"is a {type(batch).__name__}{of}, not a Batch of a SampledBatch")
        sampled = batch.sampled
        if not isinstance(batch.position, int) or batch.position != position:
            fail(position, f"has position {batch.position}")
        if epoch is not None and sampled.epoch != epoch:
            fail(position, f"is of epoch {sampled.epoch}, and epoch {epoch} runs")
        if not isinstance(sampled.index, int) or not 0 <= sampled.index < n_batches:
            fail(position, f"has index {sampled.index}, and an epoch has {n_batches} batches")
        before = int(position_of[sampled.index])
        if before not in (-1, position):  # the same position: memory was short, and the batch is asked for again
            fail(position, f"is batch {sampled.index}, which has run as number {before}")
        position_of[sampled.index] = position

    return check
