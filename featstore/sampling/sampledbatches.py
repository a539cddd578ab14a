"""Sampled batches, which a strategy runs: drawn by a sampler on demand, or read from a pack."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from functools import partial
from weakref import WeakValueDictionary

import torch

from featstore.budget import Reservation
from featstore.sampling.batch import CheckedSampler, SampledBatch
from featstore.sampling.batches import UNKNOWN_RUN, Batches, EpochSeeds, run_length_of, underlying
from featstore.sampling.epochwide import EpochSampler, draws_at_once
from featstore.sampling.historical import PrunedBatches, PushTimes, SeedsOf, unpushed
from featstore.sampling.hops import HopSampler
from featstore.sampling.macrolists import MacroLists
from featstore.sampling.partitionbatches import PartitionEpoch
from featstore.sampling.shares import ShareOfBatches
from featstore.sampling.window import Seeds
from featstore.sampling.windowed import WindowedBatches, Windows
from featstore.topology.partlists import NearbyLists

__all__ = ["Drawn", "EpochBatches", "Memo", "SampledBatches"]


class Memo(ABC):
    """Batches of epoch 0 that were sampled already, for example to measure them; see :meth:`SampledBatches.remember`."""

    @abstractmethod
    def batch(self, position: int) -> SampledBatch | None:
        """Get the batch that runs as number ``position``; None if the memo lacks it. Thread-safe."""

    def trim(self) -> None:
        """Give memory back; its batches can be sampled again."""

    def forget(self) -> None:
        """Drop the batches, since a later epoch begins."""


class EpochBatches:
    """The sampled batches of one epoch, by the position at which they run. Thread-safe.

    Parameters
    ----------
    n : int
        Batches.
    sample : callable
        ``sample(position)`` returns a batch; a pure function.
    windowed : callable, optional
        ``windowed(start, memory, stop)`` makes an object that samples the batches ``start … stop - 1`` for a caller that takes
        them roughly in order. By default batches are sampled one by one. ``memory``: reservation for sampling ahead, if bounded.
    """

    def __init__(
        self,
        n: int,
        sample: Callable[[int], SampledBatch],
        windowed: Callable[[int, Reservation | None, int], WindowedBatches | PrunedBatches] | None = None,
    ) -> None:
        self._n, self._sample, self._windowed = n, sample, windowed
        self._ahead: WindowedBatches | PrunedBatches | None = None
        self._memos: tuple[Memo, ...] = ()

    def __len__(self) -> int:
        return self._n

    def sample(self, position: int) -> SampledBatch:
        """Get the batch that runs as number ``position``.

        Raises
        ------
        ClosedError, BudgetError, OSError, CorruptionError
            The errors of the sampler's ``sample``.
        """
        for memo in self._memos:
            found = memo.batch(position)
            if found is not None:
                return found
        return self._sample(position)

    def windowed(self, start: int, memory: Reservation | None = None, *, stop: int | None = None) -> EpochBatches:
        """Make a copy of the epoch that samples many batches at once, for a caller that takes them from ``start`` in order.

        Parameters
        ----------
        start : int
        memory : Reservation, optional
            Memory for sampling ahead, see :meth:`SampledBatches.ahead_bytes`.
        stop : int, optional
            Batches from here on will not be taken.
        """
        if self._windowed is None:
            return self
        found = copy(self)
        found._ahead = self._windowed(start, memory, self._n if stop is None else stop)
        found._sample = found._ahead.sample
        return found

    def remembering(self, memos: tuple[Memo, ...]) -> EpochBatches:
        """Make a copy of the epoch that takes batches from ``memos`` first."""
        found = copy(self)
        found._memos = memos
        return found

    @property
    def passes_s(self) -> float:
        """Seconds of passes over neighbour lists so far; each pass serves many batches."""
        return 0.0 if self._ahead is None else self._ahead.passes_s

    def stop(self) -> None:
        """Raise ClosedError in all threads that wait for a batch; does not wait for them."""
        if self._ahead is not None:
            self._ahead.stop()

    def close(self) -> None:
        """Drop everything sampled ahead; may be called again."""
        if self._ahead is not None:
            self._ahead.close()


class SampledBatches(ABC):
    """The sampled batches of every epoch; thread-safe. The methods' defaults suit batches that come one by one.

    Attributes
    ----------
    batch_size : int
        Maximum seeds of a batch.
    fanouts : sequence of int or None
        Neighbours a hop, if known.
    most_rows : int or None
        Nodes of the largest batch, if all batches are known.
    run_length : int
        Consecutive similar batches; see :class:`~featstore.Batches`.
    nbytes : int
        Memory of the seeds, and of two epochs' orders.
    disjoint : bool
        Whether batches have a subgraph for each seed.
    world_size : int
        Number of ranks, each with the same number of batches; 1 if these are all batches.
    lists : MacroLists or None
        The dynamic neighbour cache of the sampler. It is empty until ``MacroLists.use``.
    """

    batch_size: int
    fanouts: Sequence[int] | None = None
    most_rows: int | None = None
    disjoint = False
    world_size = 1
    run_length = UNKNOWN_RUN
    nbytes = 0
    lists: MacroLists | None = None
    _memos: tuple[Memo, ...] = ()

    @property
    def weights_bytes(self) -> int:
        """Memory to read the weights of the longest list, of a sampler whose weights are on the drive now; else 0."""
        return 0

    @abstractmethod
    def __len__(self) -> int:
        """Batches of an epoch."""

    @property
    def n_numbers(self) -> int:
        """Batches of an epoch of all ranks together, by which a batch's ``index`` is bounded."""
        return len(self) * self.world_size

    def share(self, rank: int, world_size: int) -> SampledBatches:
        """Return the batches of one rank, in place of these; ValueError: they are not divided."""
        raise ValueError(f"{self!r}: these batches are not divided among {world_size} ranks; say rank=0, world_size=1")

    def resume(self, epoch: int, n_done: int) -> int:
        """Let ``epoch`` go on after its first ``n_done`` batches, those of all ranks; return which comes next here."""
        return n_done // self.world_size

    def n_done(self, epoch: int, position: int) -> int:
        """Count the batches of all ranks that are done where ``position`` comes next here."""
        return position * self.world_size

    @abstractmethod
    def digest(self) -> str:
        """Compute a text that differs for different batches, and for another order of the same batches."""

    @abstractmethod
    def sampled(self, epoch: int) -> EpochBatches:
        """Get the batches of ``epoch``; each is sampled on request."""

    def epoch(self, epoch: int) -> EpochBatches:
        """Get the batches of ``epoch``; remembered batches of epoch 0 are not sampled again."""
        memos = self._memos
        if not epoch:
            return self.sampled(epoch).remembering(memos)
        for memo in memos:
            memo.forget()
        return self.sampled(epoch)

    def remember(self, memo: Memo) -> None:
        """Let epoch 0 take already sampled batches from ``memo``, before memos that were given earlier."""
        self._memos = (memo, *self._memos)

    def reordered(self, order: Callable[[EpochBatches], Callable[[int], int]], name: str) -> SampledBatches:
        """Make a view of these batches in another order; each keeps its ``index``.

        Parameters
        ----------
        order : callable
            ``order(epoch)`` returns a function from a position to the number of the batch that runs there; it is pure and
            thread-safe.
        name : str
            Name of the order in :meth:`digest`: a loader's state in one order does not fit another.
        """
        return _Reordered(self, order, name)

    def ahead_bytes(self) -> tuple[int, int]:
        """Return the least and the most useful memory, in bytes, for sampling many batches at once; zeros for one by one."""
        return 0, 0

    def keep_ahead(self, n_bytes: int) -> None:
        """Drop batches sampled ahead for the next epoch if they hold more than ``n_bytes``; they can be sampled again."""

    def windows(self, n_bytes: int, batch: tuple[int, int]) -> Windows | None:
        """Compute the windows in which a sampler draws an epoch within ``n_bytes`` of memory.

        None if the sampler draws batch by batch, or the user set the window. ``batch``: nodes and edges of one batch.
        """
        return None

    def trim(self) -> None:
        """Give back memory that sampling keeps between batches."""
        for memo in self._memos:
            memo.trim()

    def close(self) -> None:
        """Give back what is held for as long as a loader lives; of a view, what its batches hold. May be called again."""


class _Reordered(SampledBatches):
    """See :meth:`SampledBatches.reordered`; batches are sampled one by one."""

    def __init__(self, batches: SampledBatches, order: Callable[[EpochBatches], Callable[[int], int]], name: str) -> None:
        self._batches, self._order, self._name = batches, order, name
        self.world_size = batches.world_size
        self.batch_size, self.fanouts, self.most_rows = batches.batch_size, batches.fanouts, batches.most_rows
        self.disjoint = batches.disjoint
        self.run_length, self.nbytes, self.lists = batches.run_length, batches.nbytes, batches.lists

    @property
    def weights_bytes(self) -> int:
        return self._batches.weights_bytes

    def __repr__(self) -> str:
        return f"{self._batches!r} {self._name}"

    def __len__(self) -> int:
        return len(self._batches)

    def digest(self) -> str:
        share = f" {self.world_size}" if self.world_size > 1 else ""  # the order is one of the rank's own batches
        return f"{self._batches.digest()} {self._name}{share}"

    def resume(self, epoch: int, n_done: int) -> int:
        return self._batches.resume(epoch, n_done)

    def sampled(self, epoch: int) -> EpochBatches:
        found = self._batches.epoch(epoch)
        number = self._order(found)
        return EpochBatches(len(found), lambda position: found.sample(number(position)))

    def trim(self) -> None:
        super().trim()
        self._batches.trim()

    def close(self) -> None:
        self._batches.close()


class _Orders:
    """The seeds of epochs' batches: one object an epoch, for all who ask while one of them holds it."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._held: WeakValueDictionary[int, EpochSeeds] = WeakValueDictionary()

    def __call__(self, epoch: int) -> EpochSeeds:
        found = self._held.get(epoch)
        if found is None:
            found = self._batches.epoch(epoch)
            with suppress(TypeError):  # an object of a user's may refuse
                self._held[epoch] = found
        return found

    def forget(self) -> None:
        """Make epochs anew from now on."""
        self._held = WeakValueDictionary()


class Drawn(SampledBatches):
    """Batches that a sampler draws on request.

    Parameters
    ----------
    sampler : CheckedSampler
    batches : Batches
    lists : MacroLists, optional
        Lists of the current macro-batches, for a :class:`HopSampler`; closed with this object.
    times : PushTimes, optional
        Steps in which historical embeddings were pushed; the sampler is then one that :class:`PrunedBatches` takes.
    """

    def __init__(
        self, sampler: CheckedSampler, batches: Batches, lists: MacroLists | None = None, times: PushTimes | None = None
    ) -> None:
        self.batches, self.lists, self.times = batches, lists, times
        self._share = batches if isinstance(batches, ShareOfBatches) else None
        self.world_size = 1 if self._share is None else self._share.world_size
        self.batch_size, self.fanouts, self.disjoint = batches.batch_size, sampler.fanouts, sampler.disjoint
        self.run_length, self.nbytes = run_length_of(batches), getattr(batches, "nbytes", 0)
        self.order = _Orders(batches)
        self.number: Callable[[int], int] = operator.index if self._share is None else self._share.number
        self._given = sampler
        self._draw_with(sampler)

    def _draw_with(self, sampler: CheckedSampler) -> None:
        order, number = self.order, self.number
        self.sampler = sampler
        self._hops = sampler if isinstance(sampler, HopSampler) else None
        self._many = sampler if isinstance(sampler, EpochSampler) else None
        self._coming = None if self._many is None else self._many.coming(lambda epoch: Seeds(order(epoch).seeds, number))

    def at_once(self, run_dir: str | None) -> Drawn | None:
        """Make these batches drawn many at once, in passes over the lists; None if they are, or if each is to be drawn alone.

        ``run_dir``: directory for run files of samples that do not fit the memory. None: only an :class:`EpochSampler` that was
        given draws many at once, with its own options.
        """
        if self.times is not None or self.lists is not None or self._many is not None:
            return None
        if isinstance(self._given, EpochSampler):
            return self._with(self._given)
        if run_dir is None or not draws_at_once(self.sampler):
            return None
        return self._with(EpochSampler.of(self.sampler, run_dir))

    def alone(self) -> Drawn:
        """Make these batches drawn one by one, unless the user set the window in which they are drawn."""
        return self if self._many is None or self._many.window != "auto" else self._with(self._many.hops)

    def _with(self, sampler: CheckedSampler) -> Drawn:
        found = copy(self)
        found._draw_with(sampler)
        return found

    @property
    def weights_bytes(self) -> int:
        return 0 if self._hops is None else self._hops.weights_bytes

    def __repr__(self) -> str:
        return f"Drawn({self.sampler!r}, {self.batches!r})"

    def __len__(self) -> int:
        return len(self.batches)

    def resume(self, epoch: int, n_done: int) -> int:
        """See :class:`SampledBatches`; ValueError as of the share."""
        if self._share is not None and self._share.resume(epoch, n_done):
            for memo in self._memos:
                memo.forget()
            self._memos = ()
            self.order.forget()
            self.keep_ahead(-1)
        return super().resume(epoch, n_done)

    def n_done(self, epoch: int, position: int) -> int:
        """See :class:`SampledBatches`."""
        return super().n_done(epoch, position) if self._share is None else self._share.n_done(epoch, position)

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
            lambda start, memory, stop: PrunedBatches(seeds_of, hops, times, epoch, start),
        )

    def whole(self, epoch: int) -> EpochBatches:
        """Get the batches of ``epoch`` as they are without a history."""
        if self._many is not None:
            return self._many_at_once(self._many, epoch)
        seeds_of, sampler, hops = self.seeds_of(epoch), self.sampler, self._hops

        def sample(position: int) -> SampledBatch:
            with seeds_of(position) as (number, seeds, lists):
                if lists is None or hops is None:
                    return sampler.sample(seeds, epoch=epoch, index=number)
                return hops.sample(seeds, epoch, number, lists)

        return EpochBatches(len(self), sample)

    def _many_at_once(self, sampler: EpochSampler, epoch: int) -> EpochBatches:
        seeds, n = Seeds(self.order(epoch).seeds, self.number), len(self)

        def windowed(start: int, memory: Reservation | None, stop: int) -> WindowedBatches:
            # Without given memory the windows reserve it for this epoch alone, so none can be drawn for the next one.
            coming = self._coming if memory is not None and stop == n else None
            return sampler.windowed(seeds, epoch, start, stop, memory, coming)

        return EpochBatches(n, lambda position: sampler.sample(seeds(position), epoch, self.number(position)), windowed)

    def seeds_of(self, epoch: int) -> SeedsOf:
        """Make the function that lends each batch's number and seeds in ``epoch``, and the neighbour lists in memory for it."""
        order, lists, number_of = self.order(epoch), self.lists, self.number
        parts = underlying(order)

        def plain(position: int) -> AbstractContextManager[tuple[int, torch.Tensor, None]]:
            number = number_of(position)
            return nullcontext((number, order.seeds(number), None))

        if lists is None or not isinstance(parts, PartitionEpoch):
            return plain
        lists.begin()

        @contextmanager
        def lend(position: int) -> Iterator[tuple[int, torch.Tensor, NearbyLists | None]]:
            number = number_of(position)
            with lists.of(epoch, parts, min(number, len(parts) - 1)) as nearby:  # of the last step's seeds most are there
                yield number, order.seeds(number), nearby

        return lend

    def remember(self, memo: Memo) -> None:
        """See :class:`SampledBatches`; with a history nothing is remembered, since batches depend on earlier ones."""
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
        """Drop the window drawn ahead, and give back the memory of lists; may be called again."""
        self.keep_ahead(-1)
        if self.lists is not None:
            self.lists.close()
