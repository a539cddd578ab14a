"""``SharedRows``: read on demand, the batches of a window in the order that shares most rows from each batch to the next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import featstore
from featstore import options

IDS = "window ids"  # in the memory report


@dataclass(frozen=True)
class SharedRows(featstore.OnDemand):
    """Sample a window of batches ahead for their ids alone, and run next the batch that shares most rows with the one before.

    A batch keeps its ``index``; an epoch has the batches that any strategy gives it, each once.

    Parameters
    ----------
    cache, policy
        As of :class:`featstore.OnDemand`; an online policy, since a static one gains nothing by the order.
    length : int
        Batches a window.
    """

    cache: int | float | str | None = options.option(
        "auto", options.CACHE, "rows in memory: bytes (1GiB), a share (10%, 0.1) or auto"
    )
    policy: Any = options.option("lru", options.policy_of(featstore.OnlinePolicy), "which rows stay in memory")
    length: int = options.option(8, options.number_of("batches"), "batches that are ordered together")

    def run(self, context: featstore.Context) -> featstore.Runner:
        """See :class:`featstore.Strategy`."""
        ids = context.graph.budget.reserve(IDS, 0)
        try:
            order = partial(SharedRowsOrder, length=self.length, ids=ids, lock=threading.Lock())
            batches = context.batches.reordered(order, f"by shared rows of {self.length}")
            return ReorderedRunner(super().run(replace(context, batches=batches)), ids)
        except BaseException:
            ids.release()
            raise


class ReorderedRunner(featstore.Runner):
    """The runner of batches on demand, and the memory of a window's ids."""

    def __init__(self, ondemand: featstore.Runner, ids: Any) -> None:
        super().__init__(ondemand.context, ondemand.memory)
        self.prefetch, self._ondemand = ondemand.prefetch, ondemand
        self._release = weakref.finalize(self, ids.release)

    def prepare(self, epoch: int, start: int) -> featstore.EpochRun:
        """See :class:`featstore.Runner`."""
        return self._ondemand.prepare(epoch, start)

    def stats(self) -> dict[str, Any]:
        """See :class:`featstore.Runner`."""
        return self._ondemand.stats()

    def close(self, failed: bool = False) -> None:
        """See :class:`featstore.Runner`."""
        self._ondemand.close(failed)
        self._release()


class SharedRowsOrder:
    """Order of an epoch: windows one after the other, each from its first batch on to what shares most rows.

    Parameters
    ----------
    sampled : EpochBatches
    length : int
        Batches a window.
    ids : Reservation
        Memory of the ids of one window; grows where batches are larger than was thought.
    lock : Lock
        Of all epochs: the memory is that of one window.
    """

    def __init__(self, sampled: featstore.EpochBatches, length: int, ids: Any, lock: threading.Lock) -> None:
        self._sampled, self._length, self._ids, self._lock = sampled, length, ids, lock
        self._orders: dict[int, list[int]] = {}

    def __call__(self, position: int) -> int:
        """Return the number of the batch that runs at ``position``: a pure function of its window's samples."""
        first = position - position % self._length
        with self._lock:
            if first not in self._orders:
                self._orders[first] = self._order(first)
            return self._orders[first][position - first]

    def _order(self, first: int) -> list[int]:
        """Order the window that begins with ``first``; its batches are sampled again to be delivered, to save memory."""
        ids: list[npt.NDArray[np.int64]] = []
        for position in range(first, min(first + self._length, len(self._sampled))):
            ids.append(np.sort(self._sampled.sample(position).input_ids.numpy()))  # sort copies; the sample itself is let go of
            self._ids.resize(max(self._ids.n_bytes, sum(each.nbytes for each in ids)))
        return [first + k for k in by_shared_rows(ids)]


def by_shared_rows(ids: Sequence[npt.NDArray[np.int64]]) -> list[int]:
    """Return an order of batches: the first one, then each time the one that shares most rows with the one before.

    Parameters
    ----------
    ids : sequence of int64 array
        The distinct rows of each batch. Of batches that share as many, the first one is taken.
    """
    left = list(range(len(ids)))
    order = left[:1]
    left = left[1:]
    while left:
        last = ids[order[-1]]
        order.append(max(left, key=lambda k: len(np.intersect1d(last, ids[k], assume_unique=True))))
        left.remove(order[-1])
    return order
