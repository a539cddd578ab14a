"""Sampled batches: what a strategy runs, drawn by a sampler when asked for, or there already."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial

import torch

from featstore.budget import Reservation
from featstore.sampling.batch import CheckedSampler, SampledBatch
from featstore.sampling.batches import UNKNOWN_TOGETHER, Batches, together_of
from featstore.sampling.epochwide import EpochSampler
from featstore.sampling.historical import HistoryTurns, PushTimes, SeedsOf, unpushed
from featstore.sampling.hops import HopSampler
from featstore.sampling.macrolists import MacroLists
from featstore.sampling.partitionbatches import PartitionEpoch
from featstore.sampling.windowed import Turns, Windows
from featstore.topology.partlists import NearbyLists

__all__ = ["Drawn", "EpochBatches", "Memo", "SampledBatches"]


class Memo(ABC):
    """Batches of epoch 0 that were sampled already, such as to judge the epoch by; see :meth:`SampledBatches.remember`."""

    @abstractmethod
    def batch(self, position: int) -> SampledBatch | None:
        """Return the batch that runs as number ``position``, if it is there. Thread-safe."""

    def trim(self) -> None:
        """Give memory back: batches can be sampled again."""

    def forget(self) -> None:
        """Note that a later epoch begins."""


class EpochBatches:
    """The sampled batches of one epoch, by the position at which they run. Thread-safe.

    Parameters
    ----------
    n : int
        Batches.
    sample : callable
        ``sample(position)`` returns a batch, a pure function.
    turns : callable, optional
        ``turns(start, memory, stop)`` returns what samples the batches ``start … stop - 1`` for whoever takes them about in
        order; by default they are sampled one by one. ``memory``: what it may hold, if that is bounded.
    """

    def __init__(
        self,
        n: int,
        sample: Callable[[int], SampledBatch],
        turns: Callable[[int, Reservation | None, int], Turns | HistoryTurns] | None = None,
    ) -> None:
        self._n, self._sample, self._turns = n, sample, turns
        self._ahead: Turns | HistoryTurns | None = None
        self._memos: tuple[Memo, ...] = ()

    def __len__(self) -> int:
        return self._n

    def sample(self, position: int) -> SampledBatch:
        """Return the batch that runs as number ``position``.

        Raises
        ------
        ClosedError, BudgetError, OSError, CorruptionError
            As the sampler's ``sample``.
        """
        for memo in self._memos:
            found = memo.batch(position)
            if found is not None:
                return found
        return self._sample(position)

    def in_turn(self, start: int, memory: Reservation | None = None, *, stop: int | None = None) -> EpochBatches:
        """Return the epoch for whoever takes its batches from ``start`` on about in order, so that many can be sampled at once.

        Parameters
        ----------
        start : int
        memory : Reservation, optional
            What sampling ahead may hold, see :meth:`SampledBatches.ahead_bytes`.
        stop : int, optional
            Batches from here on will not be taken.
        """
        if self._turns is None:
            return self
        found = copy(self)
        found._ahead = self._turns(start, memory, self._n if stop is None else stop)
        found._sample = found._ahead.sample
        return found

    def remembering(self, memos: tuple[Memo, ...]) -> EpochBatches:
        """Return the epoch with batches that are there already."""
        found = copy(self)
        found._memos = memos
        return found

    @property
    def passes_s(self) -> float:
        """Seconds that passes over neighbour lists have taken so far, each for many batches."""
        return 0.0 if self._ahead is None else self._ahead.passes_s

    def stop(self) -> None:
        """Send away, with ClosedError, whoever waits for a batch; waits for nobody."""
        if self._ahead is not None:
            self._ahead.stop()

    def close(self) -> None:
        """Let go of what was sampled ahead; may be called again."""
        if self._ahead is not None:
            self._ahead.close()


class SampledBatches(ABC):
    """The sampled batches of every epoch; thread-safe. What is not overridden is so little as stands here.

    Attributes
    ----------
    batch_size : int
        Most seeds that a batch has.
    fanouts : sequence of int or None
        Neighbours a hop, where they are known.
    most_rows : int or None
        Nodes of the largest batch, where all of them are known.
    together : int
        Consecutive batches that are alike; see :class:`~featstore.Batches`.
    nbytes : int
        Memory of the seeds, and of one epoch's order.
    lists : MacroLists or None
        The dynamic neighbour cache that batches are sampled with, which has no memory until it is given some.
    """

    batch_size: int
    fanouts: Sequence[int] | None = None
    most_rows: int | None = None
    together = UNKNOWN_TOGETHER
    nbytes = 0
    lists: MacroLists | None = None
    _memos: tuple[Memo, ...] = ()

    @abstractmethod
    def __len__(self) -> int:
        """Batches of an epoch."""

    @abstractmethod
    def digest(self) -> str:
        """Return a text that differs for batches that differ, or run in another order."""

    @abstractmethod
    def sampled(self, epoch: int) -> EpochBatches:
        """Return the batches of ``epoch``, each of which is sampled when it is asked for."""

    def epoch(self, epoch: int) -> EpochBatches:
        """Return the batches of ``epoch``, those that are there already among them."""
        memos = self._memos
        if not epoch:
            return self.sampled(epoch).remembering(memos)
        for memo in memos:
            memo.forget()
        return self.sampled(epoch)

    def remember(self, memo: Memo) -> None:
        """Let epoch 0 have batches that were sampled already, before those that were remembered earlier."""
        self._memos = (memo, *self._memos)

    def reordered(self, order: Callable[[EpochBatches], Callable[[int], int]], name: str) -> SampledBatches:
        """Return these batches in another order; each keeps its ``index``.

        Parameters
        ----------
        order : callable
            Given an epoch, returns what says which of its batches runs at a position: a pure function, thread-safe.
        name : str
            Tells this order from others: a loader's state of one does not fit the other.
        """
        return _Reordered(self, order, name)

    def ahead_bytes(self) -> tuple[int, int]:
        """Return the least and the most useful bytes of sampling many batches at once; zeros where they come one by one."""
        return 0, 0

    def keep_ahead(self, n_bytes: int) -> None:
        """Let what is sampled ahead of the next epoch hold no more than that; nothing of it is lost but time."""

    def windows(self, n_bytes: int, batch: tuple[int, int]) -> Windows | None:
        """Return the windows in which a sampler draws an epoch in so many bytes of memory.

        None where it draws batch by batch, or the user said how many at once. ``batch``: nodes and edges of one.
        """
        return None

    def trim(self) -> None:
        """Give back memory that sampling keeps between batches."""
        for memo in self._memos:
            memo.trim()

    def close(self) -> None:
        """Give back what is held for as long as a loader lives; may be called again."""


class _Reordered(SampledBatches):
    """See :meth:`SampledBatches.reordered`; batches are sampled one by one."""

    def __init__(self, batches: SampledBatches, order: Callable[[EpochBatches], Callable[[int], int]], name: str) -> None:
        self._batches, self._order, self._name = batches, order, name
        self.batch_size, self.fanouts, self.most_rows = batches.batch_size, batches.fanouts, batches.most_rows
        self.together, self.nbytes, self.lists = batches.together, batches.nbytes, batches.lists

    def __repr__(self) -> str:
        return f"{self._batches!r} {self._name}"

    def __len__(self) -> int:
        return len(self._batches)

    def digest(self) -> str:
        return f"{self._batches.digest()} {self._name}"

    def sampled(self, epoch: int) -> EpochBatches:
        found = self._batches.epoch(epoch)
        number = self._order(found)
        return EpochBatches(len(found), lambda position: found.sample(number(position)))

    def trim(self) -> None:
        super().trim()
        self._batches.trim()


class Drawn(SampledBatches):
    """Batches that a sampler draws when they are asked for.

    Parameters
    ----------
    sampler : CheckedSampler
    batches : Batches
    lists : MacroLists, optional
        Lists of the macro-batches that are sampled, by a :class:`HopSampler`; closed with this.
    times : PushTimes, optional
        When historical embeddings were pushed; the sampler is then one that :class:`HistoryTurns` takes.
    """

    def __init__(
        self, sampler: CheckedSampler, batches: Batches, lists: MacroLists | None = None, times: PushTimes | None = None
    ) -> None:
        self.sampler, self.batches, self.lists, self.times = sampler, batches, lists, times
        self.batch_size, self.fanouts = batches.batch_size, sampler.fanouts
        self.together, self.nbytes = together_of(batches), getattr(batches, "nbytes", 0)
        self._hops = sampler if isinstance(sampler, HopSampler) else None
        self._many = sampler if isinstance(sampler, EpochSampler) else None
        self._coming = None if self._many is None else self._many.coming(lambda epoch: batches.epoch(epoch).seeds)

    def __repr__(self) -> str:
        return f"Drawn({self.sampler!r}, {self.batches!r})"

    def __len__(self) -> int:
        return len(self.batches)

    def digest(self) -> str:
        """See :class:`SampledBatches`."""
        return self.batches.digest()

    def sampled(self, epoch: int) -> EpochBatches:
        """See :class:`SampledBatches`."""
        times, hops = self.times, self._hops
        if times is None or hops is None:
            return self.whole(epoch)
        seeds_of, n = self.seeds_of(epoch), len(self)
        return EpochBatches(
            n,
            partial(unpushed, seeds_of, hops, times, epoch),
            lambda start, memory, stop: HistoryTurns(seeds_of, hops, times, epoch, start),
        )

    def whole(self, epoch: int) -> EpochBatches:
        """Return the batches of ``epoch`` as they are without a history."""
        if self._many is not None:
            return self._many_at_once(self._many, epoch)
        seeds_of, sampler, hops = self.seeds_of(epoch), self.sampler, self._hops

        def sample(position: int) -> SampledBatch:
            with seeds_of(position) as (seeds, lists):
                if lists is None or hops is None:
                    return sampler.sample(seeds, epoch=epoch, index=position)
                return hops.sample(seeds, epoch, position, lists)

        return EpochBatches(len(self), sample)

    def _many_at_once(self, sampler: EpochSampler, epoch: int) -> EpochBatches:
        order, n = self.batches.epoch(epoch), len(self)

        def turns(start: int, memory: Reservation | None, stop: int) -> Turns:
            # Memory that is only there for this epoch is gone when the next one begins.
            coming = self._coming if memory is not None and stop == n else None
            return sampler.in_turn(order.seeds, epoch, start, stop, memory, coming)

        return EpochBatches(n, lambda position: sampler.sample(order.seeds(position), epoch, position), turns)

    def seeds_of(self, epoch: int) -> SeedsOf:
        """Make the lender of the seeds of each batch of ``epoch``, and of the neighbour lists at hand for it."""
        order, lists = self.batches.epoch(epoch), self.lists
        if lists is None or not isinstance(order, PartitionEpoch):
            return lambda position: nullcontext((order.seeds(position), None))
        lists.begin()

        @contextmanager
        def lend(position: int) -> Iterator[tuple[torch.Tensor, NearbyLists | None]]:
            with lists.of(epoch, order, position) as nearby:
                yield order.seeds(position), nearby

        return lend

    def remember(self, memo: Memo) -> None:
        """See :class:`SampledBatches`: with a history batches depend on those before them, and none is there already."""
        if self.times is None:
            super().remember(memo)

    def ahead_bytes(self) -> tuple[int, int]:
        """See :class:`SampledBatches`."""
        return (0, 0) if self._many is None else self._many.memory_bytes(len(self), self.batch_size)

    def keep_ahead(self, n_bytes: int) -> None:
        """See :class:`SampledBatches`."""
        if self._coming is not None:
            self._coming.keep(n_bytes)

    def windows(self, n_bytes: int, batch: tuple[int, int]) -> Windows | None:
        """See :class:`SampledBatches`."""
        return None if self._many is None else self._many.windows(len(self), self.batch_size, n_bytes, batch)

    def trim(self) -> None:
        """See :class:`SampledBatches`."""
        super().trim()
        self.sampler.trim()

    def close(self) -> None:
        """Give back the memory of lists; may be called again."""
        if self.lists is not None:
            self.lists.close()
