"""Counts of the batches of an epoch that need each row, made by sampling the epoch, for policies that score rows by them."""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt

from featstore.strategies.context import Context

__all__ = ["AccessCounts"]


class AccessCounts:
    """The number of batches of epoch 0 that need each row, an int64 array of one count a node.

    The array is made by sampling the epoch, when a policy first reads it. Used as a context manager: the budget counts the
    array until the block is left.

    References
    ----------
    Pre-sampling: Yang et al., GNNLab, EuroSys 2022; the ``frequency`` cache of DiskGNN, SIGMOD 2025.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._counts: npt.NDArray[np.int64] | None = None
        self._held = context.graph.budget.reserve("access counts", 0)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[np.int64]:
        if self._counts is None:
            n, order = self._context.graph.num_nodes, self._context.batches.epoch(0)
            self._held.resize(8 * n)
            counts = np.zeros(n, np.int64)
            with self._context.timer.time("presample"), contextlib.closing(order.windowed(0)) as batches:
                for index in range(len(order)):
                    counts[batches.sample(index).input_ids.numpy()] += 1
            self._counts = counts
        return self._counts

    def __enter__(self) -> AccessCounts:
        return self

    def __exit__(self, *_: object) -> None:
        self._counts = None
        self._held.release()
