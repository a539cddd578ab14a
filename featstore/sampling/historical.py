"""Batches with historical embeddings: a node with a recent enough embedding pulls it, other nodes are expanded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from featstore.errors import ClosedError
from featstore.sampling.batch import HistoryRows, SampledBatch
from featstore.sampling.hops import HopSampler
from featstore.sampling.scratch import EMPTY, Int64s
from featstore.topology.partlists import NearbyLists

__all__ = ["DECISIONS", "PrunedBatches", "PushTimes", "SeedsOf", "slots_of", "unpushed"]

Bools = npt.NDArray[np.bool_]
# ``seeds_of(position)`` lends a batch's number and seeds, and the neighbour lists in memory for it.
SeedsOf = Callable[[int], AbstractContextManager[tuple[int, torch.Tensor, NearbyLists | None]]]

DECISIONS = "history decisions"  # holder
NEVER = -1


class PushTimes:
    """The training step of each candidate's last push, as committed by training.

    Epochs plan ahead on copies, so batches that are never trained on change nothing. An embedding is used for ``staleness``
    steps after its push; 0: never. ``nodes`` are the candidates, ascending; the i-th has slot i. ``pushed`` has the number of the
    step, from 0, of each candidate's last push; -1: never. ``step`` counts steps so far.
    """

    NODE_BYTES = 24  # of a candidate: its id, its last push, and its last push in the epoch that plans ahead

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness
        self.nodes = self.pushed = EMPTY
        self.step = 0


def slots_of(nodes: Int64s, ids: Int64s) -> Int64s:
    """Find the positions of ``ids`` in the ascending ``nodes``; -1 for an id that is not there."""
    if not len(nodes):
        return np.full(len(ids), -1)
    slots = np.minimum(np.searchsorted(nodes, ids), len(nodes) - 1)
    return np.where(nodes[slots] == ids, slots, -1)


class PrunedBatches:
    """The batches of an epoch from ``start`` on, pruned; each is one training step, ``start`` the next one. Thread-safe.

    Each node of ``sampler`` draws for itself, anew in every hop, in two hops at least. A batch's pulls depend on earlier pushes.
    Pulls and pushes concern only the nodes of a batch's first hop, whose draws can be repeated. So a pass draws the first hop of
    every batch, in order, up to the batch requested. It keeps one bit a node until the batch was trained on. The batches
    themselves can be sampled in any order, by any thread, and repeatedly.
    """

    passes_s = 0.0

    def __init__(self, seeds_of: SeedsOf, sampler: HopSampler, times: PushTimes, epoch: int, start: int) -> None:
        self._seeds_of, self._sampler, self._times, self._epoch = seeds_of, sampler, times, epoch
        self._nodes, self._pushed = times.nodes, times.pushed.copy()
        self._first_step = times.step - start  # of batch 0
        self._start = self._next = start
        self._bits: dict[int, npt.NDArray[np.uint8]] = {}
        self._lock = threading.RLock()
        self._held = sampler.graph.budget.reserve(DECISIONS, 0, owner=self)

    def sample(self, position: int) -> SampledBatch:
        """Sample batch number ``position``; ClosedError if it was trained on already, or lies before ``start``."""
        step = self._first_step + position
        if not len(self._nodes):  # no embedding is kept
            return self._pruned(position, step, _none)
        bits = self._decided(position)
        return self._pruned(position, step, lambda ids: np.unpackbits(bits, count=len(ids)).view(np.bool_))

    def _pruned(self, position: int, step: int, is_pulled: Callable[[Int64s], Bools]) -> SampledBatch:
        return _pruned(self._seeds_of, self._sampler, self._epoch, position, self._nodes, step, is_pulled)

    def _decided(self, position: int) -> npt.NDArray[np.uint8]:
        """Decide which sources of a batch's last block are pulled; return them as bits."""
        with self._lock:
            while self._next <= position:
                self._decide(self._next)
                self._next += 1
            found = self._bits.get(position)
        if found is None:
            raise ClosedError(f"batch {position} of this epoch was trained on already: what it pulled is not kept")
        return found

    def _decide(self, position: int) -> None:
        """Decide on the pulls of one batch; may be interrupted anywhere, and called again."""
        with self._seeds_of(position) as (number, seeds, lists):
            ids, n_seeds = self._sampler.sources(seeds, self._epoch, number, lists), len(seeds)
        step = self._first_step + position
        slots = slots_of(self._nodes, ids)
        is_candidate = slots >= 0
        pushed = self._pushed[slots[is_candidate]]
        # `pushed < step`: an interrupted call may have recorded pushes of this very step.
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

    def stop(self) -> None:
        """Do nothing: no thread waits."""

    def close(self) -> None:
        """Drop all decisions; may be called again."""
        with self._lock:
            self._bits.clear()
            self._pushed = EMPTY
        self._held.release()


def unpushed(seeds_of: SeedsOf, sampler: HopSampler, times: PushTimes, epoch: int, position: int) -> SampledBatch:
    """Sample a batch as if nothing was pushed yet, which gives the largest batch."""
    return _pruned(seeds_of, sampler, epoch, position, times.nodes, 0, _none)


def _none(ids: Int64s) -> Bools:
    return np.zeros(len(ids), bool)


def _pruned(
    seeds_of: SeedsOf,
    sampler: HopSampler,
    epoch: int,
    position: int,
    nodes: Int64s,
    step: int,
    is_pulled: Callable[[Int64s], Bools],
) -> SampledBatch:
    """Sample a batch without expanding its pulled sources; record the positions and slots of pulled and pushed rows."""
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

    with seeds_of(position) as (number, seeds, lists):
        sampled = sampler.sample(seeds, epoch, number, lists, prune)
    return replace(sampled, history=HistoryRows(step, *rows))
