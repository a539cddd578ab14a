"""Sampled batches: what a strategy runs, drawn by a sampler when asked for, or found where they were kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from featstore.sampling.batch import SampledBatch, Sampler
from featstore.sampling.batches import Batches, EpochSeeds, together_of
from featstore.sampling.hops import HopSampler
from featstore.sampling.macrolists import MacroLists
from featstore.sampling.partitionbatches import PartitionEpoch

__all__ = ["DerivedBatches", "Drawn", "SampledBatches", "SampledEpoch", "lists_of"]


class SampledEpoch(Protocol):
    """The sampled batches of one epoch, by the position at which they run."""

    def __len__(self) -> int:
        """Batches."""
        ...

    def sample(self, position: int) -> SampledBatch:
        """Return the batch that runs as number ``position``; a pure function, thread-safe."""
        ...


class SampledBatches(Protocol):
    """The sampled batches of every epoch; thread-safe.

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
    """

    @property
    def batch_size(self) -> int: ...

    @property
    def fanouts(self) -> Sequence[int] | None: ...

    @property
    def most_rows(self) -> int | None: ...

    @property
    def together(self) -> int: ...

    def __len__(self) -> int:
        """Batches of an epoch."""
        ...

    def digest(self) -> str:
        """Return a text that differs for batches that differ, or run in another order."""
        ...

    def epoch(self, epoch: int) -> SampledEpoch:
        """Return the batches of ``epoch``."""
        ...

    def scratch_bytes(self, n_rows: int) -> int:
        """Return what a thread holds beside a batch of ``n_rows`` that it samples, as far as the budget counts it."""
        ...

    def trim(self) -> None:
        """Give back memory that sampling keeps between batches."""
        ...


def lists_of(batches: SampledBatches) -> MacroLists | None:
    """Return the dynamic neighbour cache that batches are sampled with, which has no memory until it is given some."""
    found: MacroLists | None = getattr(batches, "lists", None)
    return found


class DerivedBatches:
    """Batches made of others: what is not overridden is theirs.

    Parameters
    ----------
    batches : SampledBatches
    """

    def __init__(self, batches: SampledBatches) -> None:
        self._batches = batches

    @property
    def batch_size(self) -> int:
        """See :class:`SampledBatches`."""
        return self._batches.batch_size

    @property
    def fanouts(self) -> Sequence[int] | None:
        """See :class:`SampledBatches`."""
        return self._batches.fanouts

    @property
    def most_rows(self) -> int | None:
        """See :class:`SampledBatches`."""
        return self._batches.most_rows

    @property
    def together(self) -> int:
        """See :class:`SampledBatches`."""
        return together_of(self._batches)

    @property
    def lists(self) -> MacroLists | None:
        """See :func:`lists_of`."""
        return lists_of(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def digest(self) -> str:
        """See :class:`SampledBatches`."""
        return self._batches.digest()

    def epoch(self, epoch: int) -> SampledEpoch:
        """See :class:`SampledBatches`."""
        return self._batches.epoch(epoch)

    def scratch_bytes(self, n_rows: int) -> int:
        """See :class:`SampledBatches`."""
        return self._batches.scratch_bytes(n_rows)

    def trim(self) -> None:
        """See :class:`SampledBatches`."""
        self._batches.trim()


class Drawn:
    """Batches that a sampler draws when they are asked for.

    Parameters
    ----------
    sampler : Sampler
    batches : Batches
    lists : MacroLists, optional
        Lists of the macro-batches that are sampled; closed with this.
    """

    most_rows = None

    def __init__(self, sampler: Sampler, batches: Batches, lists: MacroLists | None = None) -> None:
        self.sampler, self.batches, self.lists = sampler, batches, lists

    @property
    def batch_size(self) -> int:
        """See :class:`SampledBatches`."""
        return self.batches.batch_size

    @property
    def fanouts(self) -> Sequence[int] | None:
        """See :class:`SampledBatches`."""
        fanouts: Any = getattr(self.sampler, "fanouts", None)
        return fanouts if isinstance(fanouts, (list, tuple)) else None

    @property
    def together(self) -> int:
        """See :class:`SampledBatches`."""
        return together_of(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def digest(self) -> str:
        """See :class:`SampledBatches`."""
        return self.batches.digest()

    def epoch(self, epoch: int) -> SampledEpoch:
        """See :class:`SampledBatches`."""
        order, lists = self.batches.epoch(epoch), self.lists
        if lists is None or not isinstance(order, PartitionEpoch) or not isinstance(self.sampler, HopSampler):
            return _DrawnEpoch(self.sampler, order, epoch)
        lists.begin()
        return _NearbyEpoch(self.sampler, order, epoch, lists)

    def scratch_bytes(self, n_rows: int) -> int:
        """See :class:`SampledBatches`: another library's sampler counts nothing."""
        counted: Callable[[int], int] | None = getattr(self.sampler, "scratch_bytes", None)
        return 0 if counted is None else counted(n_rows)

    def trim(self) -> None:
        """See :class:`SampledBatches`."""
        trim = getattr(self.sampler, "trim", None)
        if trim is not None:
            trim()

    def close(self) -> None:
        """Give back the memory of lists; may be called again."""
        if self.lists is not None:
            self.lists.close()


class _DrawnEpoch:
    def __init__(self, sampler: Sampler, seeds: EpochSeeds, epoch: int) -> None:
        self._sampler, self._seeds, self._epoch = sampler, seeds, epoch

    def __len__(self) -> int:
        return len(self._seeds)

    def sample(self, position: int) -> SampledBatch:
        return self._sampler.sample(self._seeds.seeds(position), epoch=self._epoch, index=position)


class _NearbyEpoch:
    """An epoch whose batches find the lists of their macro-batch in memory."""

    def __init__(self, sampler: HopSampler, order: PartitionEpoch, epoch: int, lists: MacroLists) -> None:
        self._sampler, self._order, self._epoch, self._lists = sampler, order, epoch, lists

    def __len__(self) -> int:
        return len(self._order)

    def sample(self, position: int) -> SampledBatch:
        with self._lists.of(self._epoch, self._order, position) as nearby:
            return self._sampler.sample(self._order.seeds(position), self._epoch, position, nearby)
