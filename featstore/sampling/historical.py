"""Batches with historical embeddings: which nodes of a batch are expanded, and which have an embedding that is recent enough."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Reservation
from featstore.errors import ClosedError
from featstore.sampling.batch import HistoryRows, SampledBatch
from featstore.sampling.hops import HopSampler
from featstore.sampling.scratch import EMPTY, Int64s

__all__ = ["DECISIONS", "HistoryEpoch", "HistoryTurns", "PushTimes", "slots_of"]

T = TypeVar("T")
Bools = npt.NDArray[np.bool_]

DECISIONS = "history decisions"  # holder
NEVER = -1


class PushTimes:
    """The steps of training in which candidates were pushed last: what training has committed.

    Epochs plan ahead on copies, so that batches that are never trained on change nothing.

    Parameters
    ----------
    staleness : int
        Steps for which an embedding is used after it was pushed; 0: never.

    Attributes
    ----------
    nodes : int64 array, shape (n,)
        The candidates, ascending: the i-th has slot i.
    pushed : int64 array, shape (n,)
        Steps before the one in which each was pushed last; -1: never.
    step : int
        Steps so far.
    """

    NODE_BYTES = 24  # of a candidate: its id, its last push, and that of the epoch that plans ahead

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness
        self.nodes = self.pushed = EMPTY
        self.step = 0


def slots_of(nodes: Int64s, ids: Int64s) -> Int64s:
    """Return the positions of ``ids`` in ``nodes``, which ascend; -1 where one is not there."""
    if not len(nodes):
        return np.full(len(ids), -1)
    slots = np.minimum(np.searchsorted(nodes, ids), len(nodes) - 1)
    return np.where(nodes[slots] == ids, slots, -1)


class WholeEpoch(Protocol):
    """An epoch of batches that know nothing of a history."""

    def __len__(self) -> int:
        """Batches."""
        ...

    def draw(self, position: int, how: Callable[..., T]) -> T:
        """Return ``how(seeds, epoch, index)`` of a batch, perhaps with ``lists=``."""
        ...


class HistoryEpoch:
    """The batches of an epoch, pruned where they are taken in turn.

    Parameters
    ----------
    order : WholeEpoch
    sampler : HopSampler
        Each node draws for itself, anew in every hop, in two hops at least.
    times : PushTimes
    """

    decides = True  # what a batch holds depends on those before it: see DerivedEpoch

    def __init__(self, order: WholeEpoch, sampler: HopSampler, times: PushTimes) -> None:
        self._order, self._sampler, self._times = order, sampler, times

    def __len__(self) -> int:
        return len(self._order)

    def sample(self, position: int) -> SampledBatch:
        """Return the batch as it is if nothing was pushed yet: the largest that it can be."""
        return _pruned(self._order, self._sampler, position, self._times.nodes, 0, lambda ids: np.zeros(len(ids), bool))

    def in_turn(self, start: int, memory: Reservation | None, stop: int) -> HistoryTurns:
        """See :func:`~featstore.sampling.drawn.in_turn`: the next step of training is that of batch ``start``."""
        return HistoryTurns(self._order, self._sampler, self._times, start)


class HistoryTurns:
    """The batches of an epoch from ``start`` on, of which each is one step of training. Thread-safe.

    Notes
    -----
    What is pulled in a batch depends on what is pushed in those before it, and this on their seeds' own hops alone, whose draws
    can be made again. So a pass draws that hop of every batch, in order, no further than is asked for, and keeps a bit a node
    until the batch was trained on. Batches themselves are sampled in any order, by any thread, again where that is asked for.
    """

    passes_s = 0.0

    def __init__(self, order: WholeEpoch, sampler: HopSampler, times: PushTimes, start: int) -> None:
        self._order, self._sampler, self._times = order, sampler, times
        self._nodes, self._pushed = times.nodes, times.pushed.copy()
        self._first_step = times.step - start  # of batch 0
        self._start = self._next = start
        self._bits: dict[int, npt.NDArray[np.uint8]] = {}
        self._lock = threading.RLock()
        self._held = sampler.graph.budget.reserve(DECISIONS, 0, owner=self)

    def __len__(self) -> int:
        return len(self._order)

    def sample(self, position: int) -> SampledBatch:
        """Return the batch that runs as number ``position``.

        Raises
        ------
        ClosedError
            The batch was trained on already, or is before the first one.
        BudgetError, CorruptionError, OSError
            See :meth:`HopSampler.sample`.
        """
        step = self._first_step + position
        if not len(self._nodes):  # no embedding is kept
            return _pruned(self._order, self._sampler, position, self._nodes, step, lambda ids: np.zeros(len(ids), bool))
        bits = self._decided(position)

        def is_pulled(ids: Int64s) -> Bools:
            return np.unpackbits(bits, count=len(ids)).view(np.bool_)

        return _pruned(self._order, self._sampler, position, self._nodes, step, is_pulled)

    def _decided(self, position: int) -> npt.NDArray[np.uint8]:
        """Return which sources of a batch's last block are pulled, as bits."""
        with self._lock:
            while self._next <= position:
                self._decide(self._next)
                self._next += 1
            found = self._bits.get(position)
        if found is None:
            raise ClosedError(f"batch {position} of this epoch was trained on already: what it pulled is not kept")
        return found

    def _decide(self, position: int) -> None:
        """Decide on one batch; may be interrupted anywhere, and called again."""
        ids, n_seeds = self._order.draw(position, self._sources)
        step = self._first_step + position
        slots = slots_of(self._nodes, ids)
        is_candidate = slots >= 0
        pushed = self._pushed[slots[is_candidate]]
        # Not what was pushed in this very step, by a call that was interrupted.
        is_recent = (pushed != NEVER) & (pushed < step) & (step - pushed <= self._times.staleness)
        pulled = np.zeros(len(ids), bool)
        pulled[is_candidate] = is_recent
        pulled[:n_seeds] = False
        bits = np.packbits(pulled)
        for done in [each for each in self._bits if self._first_step + each < self._times.step]:
            del self._bits[done]
        self._held.resize(sum(each.nbytes for each in self._bits.values()) + bits.nbytes)
        self._bits[position] = bits
        self._pushed[slots[is_candidate & ~pulled]] = step

    def _sources(self, seeds: torch.Tensor, *where: Any, **more: Any) -> tuple[Int64s, int]:
        return self._sampler.sources(seeds, *where, **more), len(seeds)

    def stop(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Let go of what was decided; may be called again."""
        with self._lock:
            self._bits.clear()
            self._pushed = EMPTY
        self._held.release()


def _pruned(
    order: WholeEpoch, sampler: HopSampler, position: int, nodes: Int64s, step: int, is_pulled: Callable[[Int64s], Bools]
) -> SampledBatch:
    """Sample a batch without expanding the sources that are pulled, and say where what it pulls and pushes lies."""
    pool = sampler.graph.pool
    rows: list[torch.Tensor] = []

    def prune(ids: Int64s) -> Bools:
        pulled, slots = is_pulled(ids), slots_of(nodes, ids)
        rows.clear()
        for where in (np.flatnonzero(pulled), np.flatnonzero((slots >= 0) & ~pulled)):
            for values in (where, slots[where]):
                kept = pool.tensor((len(where),), torch.int64)
                kept.numpy()[:] = values
                rows.append(kept)
        return pulled

    sampled = order.draw(position, partial(sampler.sample, prune=prune))
    return replace(sampled, history=HistoryRows(step, *rows))
