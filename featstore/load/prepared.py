"""The check of what a strategy prepares for an epoch: each batch once, and no other in its place."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from featstore.errors import PluginError
from featstore.sampling.batch import SampledBatch
from featstore.strategies.base import Batch

__all__ = ["PreparedCheck"]


class PreparedCheck:
    """Checks every batch of one epoch as it is taken from its strategy. Thread-safe.

    Parameters
    ----------
    strategy : str
        Its name, for messages.
    n_batches : int
        Of the epoch.
    epoch : int or None
        Which every batch is sampled for; None where the strategy brings its own, which may be of any epoch.
    """

    def __init__(self, strategy: str, n_batches: int, epoch: int | None) -> None:
        self._strategy, self._epoch = strategy, epoch
        self._position_of = np.full(n_batches, -1, np.int32)

    def __call__(self, prepared: Any, position: int) -> None:
        """Raise PluginError unless a batch is one that may run as number ``position``: none of another epoch, none that ran."""
        if not isinstance(prepared, Batch) or not isinstance(prepared.sampled, SampledBatch):
            of = f" of a {type(prepared.sampled).__name__}" if isinstance(prepared, Batch) else ""
            self._fail(position, f"is a {type(prepared).__name__}{of}, not a Batch of a SampledBatch")
        sampled, n = prepared.sampled, len(self._position_of)
        if prepared.position != position:
            self._fail(position, f"has position {prepared.position}")
        if self._epoch is not None and sampled.epoch != self._epoch:
            self._fail(position, f"is of epoch {sampled.epoch}, and epoch {self._epoch} runs")
        if not 0 <= sampled.index < n:
            self._fail(position, f"has index {sampled.index}, and an epoch has {n} batches")
        before = int(self._position_of[sampled.index])
        if before not in (-1, position):  # where memory was short, it is asked for again
            self._fail(position, f"is batch {sampled.index}, which has run as number {before}")
        self._position_of[sampled.index] = position

    def _fail(self, position: int, what: str) -> NoReturn:
        raise PluginError(f"strategy {self._strategy!r}: what it prepared to run as number {position} {what}")
