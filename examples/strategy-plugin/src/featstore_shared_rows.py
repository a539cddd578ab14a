"""``SharedRows``: read on demand, the batches of a window in the order that shares most rows from each batch to the next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
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

    def run(self, setup: featstore.Setup) -> featstore.Runner:
        """See :class:`featstore.Strategy`."""
        ids = setup.graph.budget.reserve(IDS, 0)
        try:
            reordered = Reordered(setup.batches, self.length, ids)
            return ReorderedRunner(super().run(replace(setup, batches=reordered)), ids)
        except BaseException:
            ids.release()
            raise


class ReorderedRunner(featstore.Runner):
    """The runner of batches on demand, and the memory of a window's ids."""

    def __init__(self, ondemand: featstore.Runner, ids: Any) -> None:
        super().__init__(ondemand.setup, ondemand.memory)
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


class Reordered(featstore.DerivedBatches):
    """Batches in another order: windows one after the other, each from its first batch on to what shares most rows.

    Parameters
    ----------
    batches : SampledBatches
    length : int
        Batches a window.
    ids : Reservation
        Memory of the ids of one window; grows where batches are larger than was thought.
    """

    def __init__(self, batches: featstore.SampledBatches, length: int, ids: Any) -> None:
        super().__init__(batches)
        self._length, self._ids = length, ids
        self._lock = threading.Lock()  # of all epochs: the memory is that of one window

    def digest(self) -> str:
        """Return a text that tells this order from others: a state of one does not fit the other."""
        return f"{super().digest()} by shared rows of {self._length}"

    def epoch(self, epoch: int) -> featstore.SampledEpoch:
        """Return the batches of ``epoch``."""
        return ReorderedEpoch(super().epoch(epoch), self)

    def order(self, sampled: featstore.SampledEpoch, first: int) -> list[int]:
        """Return the positions of the window that begins with ``first``, in the order in which they run."""
        with self._lock:
            ids: list[npt.NDArray[np.int64]] = []
            for position in range(first, min(first + self._length, len(sampled))):
                ids.append(np.sort(sampled.sample(position).input_ids.numpy()))  # sort copies; the sample itself is let go of
                self._ids.resize(max(self._ids.n_bytes, sum(each.nbytes for each in ids)))
            return [first + k for k in by_shared_rows(ids)]


class ReorderedEpoch:
    """One epoch; a window is ordered when the first of its batches is asked for, a pure function of its samples."""

    def __init__(self, sampled: featstore.SampledEpoch, batches: Reordered) -> None:
        self._sampled, self._batches, self._length = sampled, batches, batches._length
        self._orders: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sampled)

    def sample(self, position: int) -> featstore.SampledBatch:
        """Return the batch that runs as number ``position``; sampled again, since a window's samples may not fit the memory."""
        first = position - position % self._length
        with self._lock:
            if first not in self._orders:
                self._orders[first] = self._batches.order(self._sampled, first)
            index = self._orders[first][position - first]
        return self._sampled.sample(index)


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
