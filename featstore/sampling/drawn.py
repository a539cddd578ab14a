"""Sampled batches: what a strategy runs, drawn by a sampler when asked for, or found where they were kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from featstore.budget import Reservation
from featstore.sampling.batch import SampledBatch, Sampler
from featstore.sampling.batches import Batches, EpochSeeds, together_of
from featstore.sampling.historical import HistoryEpoch, PushTimes
from featstore.sampling.hops import HopSampler
from featstore.sampling.partitionbatches import PartitionEpoch

if TYPE_CHECKING:
    from featstore.sampling.macrolists import MacroLists

__all__ = [
    "DerivedBatches",
    "DerivedEpoch",
    "Drawn",
    "DrawsInTurn",
    "InTurn",
    "SampledBatches",
    "SampledEpoch",
    "ahead_bytes",
    "in_turn",
    "keep_ahead",
    "lists_of",
    "windows_of",
]

T = TypeVar("T")


class SampledEpoch(Protocol):
    """The sampled batches of one epoch, by the position at which they run."""

    def __len__(self) -> int:
        """Batches."""
        ...

    def sample(self, position: int) -> SampledBatch:
        """Return the batch that runs as number ``position``; a pure function, thread-safe."""
        ...


class InTurn(SampledEpoch, Protocol):
    """An epoch's batches for whoever takes them about in order, from one on; see :func:`in_turn`."""

    @property
    def passes_s(self) -> float:
        """Seconds that passes over neighbour lists have taken so far, each for many batches."""
        ...

    def stop(self) -> None:
        """Send away, with ClosedError, whoever waits for a batch; waits for nobody."""
        ...

    def close(self) -> None:
        """Let go of what was sampled ahead; may be called again."""
        ...


@runtime_checkable
class DrawsInTurn(Protocol):
    """A sampler that draws many batches at once, for whoever takes them about in order."""

    def in_turn(
        self,
        seeds: Callable[[int], Any],
        epoch: int,
        start: int,
        stop: int,
        memory: Reservation | None = None,
        coming: Any = None,
    ) -> InTurn:
        """Return the batches ``start … stop - 1`` of an epoch; ``seeds(index)`` returns a batch's seeds."""
        ...

    def coming(self, seeds_of: Callable[[int], Callable[[int], Any]]) -> Any:
        """Return what draws ahead of the next epoch; its ``keep(n_bytes)`` holds no more than that."""
        ...

    def memory_bytes(self, n_batches: int, n_seeds: int) -> tuple[int, int]:
        """Return the least and the most useful bytes to draw an epoch with, by its batches and their seeds."""
        ...


def in_turn(order: SampledEpoch, start: int, memory: Reservation | None = None, *, stop: int | None = None) -> InTurn:
    """Return the epoch for whoever takes its batches from ``start`` on about in order, so that many can be sampled at once.

    Parameters
    ----------
    order : SampledEpoch
        Where it has a method of this name, that is asked; otherwise batches are sampled one by one.
    start : int
    memory : Reservation, optional
        What sampling ahead may hold, see :func:`ahead_bytes`.
    stop : int, optional
        Batches from here on will not be taken.
    """
    found = getattr(order, "in_turn", None)
    epoch: InTurn = _OneByOne(order) if found is None else found(start, memory, len(order) if stop is None else stop)
    return epoch


class _OneByOne:
    passes_s = 0.0

    def __init__(self, order: SampledEpoch) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def sample(self, position: int) -> SampledBatch:
        return self._order.sample(position)

    def stop(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""


class DerivedEpoch:
    """An epoch of which some batches come from elsewhere: :meth:`found` says which.

    Parameters
    ----------
    order : SampledEpoch
    """

    def __init__(self, order: SampledEpoch) -> None:
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def found(self, position: int) -> SampledBatch | None:
        """Return a batch that need not be sampled."""
        return None

    def sample(self, position: int) -> SampledBatch:
        """See :class:`SampledEpoch`."""
        found = None if self.decides else self.found(position)
        return self._order.sample(position) if found is None else found

    @property
    def decides(self) -> bool:
        """Whether batches in turn depend on those before them: then none that was found elsewhere is one of them."""
        return getattr(self._order, "decides", False)

    def in_turn(self, start: int, memory: Reservation | None, stop: int) -> InTurn:
        """See :func:`in_turn`."""
        order = in_turn(self._order, start, memory, stop=stop)
        return order if self.decides else _DerivedInTurn(self, order)


class _DerivedInTurn:
    def __init__(self, epoch: DerivedEpoch, order: InTurn) -> None:
        self._epoch, self._order = epoch, order

    def __len__(self) -> int:
        return len(self._order)

    def sample(self, position: int) -> SampledBatch:
        found = self._epoch.found(position)
        return self._order.sample(position) if found is None else found

    @property
    def passes_s(self) -> float:
        return self._order.passes_s

    def stop(self) -> None:
        self._order.stop()

    def close(self) -> None:
        self._order.close()


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

    def trim(self) -> None:
        """Give back memory that sampling keeps between batches."""
        ...


def keep_ahead(batches: SampledBatches, n_bytes: int) -> None:
    """Let what is sampled ahead of the next epoch hold no more than that; nothing of it is lost but time."""
    keep: Any = getattr(batches, "keep_ahead", None)
    if keep is not None:
        keep(n_bytes)


def ahead_bytes(batches: SampledBatches) -> tuple[int, int]:
    """Return the least and the most useful bytes of sampling many batches at once; zeros where they are sampled one by one."""
    found = getattr(batches, "ahead_bytes", None)
    least, useful = (0, 0) if found is None else found()
    return int(least), int(useful)


def windows_of(batches: SampledBatches, n_bytes: int, batch: tuple[int, int]) -> Any:
    """Return the :class:`~featstore.sampling.turns.Windows` in which a sampler draws an epoch in so many bytes of memory.

    None where it draws batch by batch, or the user said how many at once. ``batch``: nodes and edges of one.
    """
    found: Any = getattr(batches, "windows", None)
    return None if found is None else found(n_bytes, batch)


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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._batches!r})"

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

    def ahead_bytes(self) -> tuple[int, int]:
        """See :func:`ahead_bytes`."""
        return ahead_bytes(self._batches)

    def windows(self, n_bytes: int, batch: tuple[int, int]) -> Any:
        """See :func:`windows_of`."""
        return windows_of(self._batches, n_bytes, batch)

    def keep_ahead(self, n_bytes: int) -> None:
        """See :func:`keep_ahead`."""
        keep_ahead(self._batches, n_bytes)

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
    times : PushTimes, optional
        When historical embeddings were pushed; the sampler is then one that :class:`HistoryEpoch` takes.
    """

    most_rows = None

    def __init__(
        self, sampler: Sampler, batches: Batches, lists: MacroLists | None = None, times: PushTimes | None = None
    ) -> None:
        self.sampler, self.batches, self.lists, self.times = sampler, batches, lists, times
        self._turns = sampler if isinstance(sampler, DrawsInTurn) else None
        self._coming = None if self._turns is None else self._turns.coming(lambda epoch: batches.epoch(epoch).seeds)

    def __repr__(self) -> str:
        return f"Drawn({self.sampler!r}, {self.batches!r})"

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
        found = self.whole(epoch)
        if self.times is None or not isinstance(self.sampler, HopSampler):
            return found
        return HistoryEpoch(found, self.sampler, self.times)

    def whole(self, epoch: int) -> _DrawnEpoch | _NearbyEpoch:
        """Return the batches of ``epoch`` as they are without a history."""
        order, lists = self.batches.epoch(epoch), self.lists
        if lists is None or not isinstance(order, PartitionEpoch) or not isinstance(self.sampler, HopSampler):
            return _DrawnEpoch(self.sampler, order, epoch, self._turns, self._coming)
        lists.begin()
        return _NearbyEpoch(self.sampler, order, epoch, lists)

    def ahead_bytes(self) -> tuple[int, int]:
        """See :func:`ahead_bytes`."""
        return (0, 0) if self._turns is None else self._turns.memory_bytes(len(self.batches), self.batches.batch_size)

    def windows(self, n_bytes: int, batch: tuple[int, int]) -> Any:
        """See :func:`windows_of`."""
        windows: Any = getattr(self._turns, "windows", None)
        return None if windows is None else windows(len(self.batches), self.batches.batch_size, n_bytes, batch)

    def keep_ahead(self, n_bytes: int) -> None:
        """See :func:`keep_ahead`."""
        if self._coming is not None:
            self._coming.keep(n_bytes)

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
    def __init__(self, sampler: Sampler, seeds: EpochSeeds, epoch: int, turns: DrawsInTurn | None, coming: Any) -> None:
        self._sampler, self._seeds, self._epoch = sampler, seeds, epoch
        self._turns, self._coming = turns, coming

    def __len__(self) -> int:
        return len(self._seeds)

    def sample(self, position: int) -> SampledBatch:
        return self._sampler.sample(self._seeds.seeds(position), epoch=self._epoch, index=position)

    def draw(self, position: int, how: Callable[..., T]) -> T:
        """Return ``how(seeds, epoch, index)`` of a batch."""
        return how(self._seeds.seeds(position), self._epoch, position)

    def in_turn(self, start: int, memory: Reservation | None, stop: int) -> InTurn:
        """See :func:`in_turn`: a sampler may draw many batches at once."""
        if self._turns is None:
            return _OneByOne(self)
        # Memory that is only there for this epoch is gone when the next one begins.
        coming = self._coming if memory is not None and stop == len(self) else None
        return self._turns.in_turn(self._seeds.seeds, self._epoch, start, stop, memory, coming)


class _NearbyEpoch:
    """An epoch whose batches find the lists of their macro-batch in memory."""

    def __init__(self, sampler: HopSampler, order: PartitionEpoch, epoch: int, lists: MacroLists) -> None:
        self._sampler, self._order, self._epoch, self._lists = sampler, order, epoch, lists

    def __len__(self) -> int:
        return len(self._order)

    def sample(self, position: int) -> SampledBatch:
        return self.draw(position, self._sampler.sample)

    def draw(self, position: int, how: Callable[..., T]) -> T:
        """Return ``how(seeds, epoch, index, lists=…)`` of a batch."""
        with self._lists.of(self._epoch, self._order, position) as nearby:
            return how(self._order.seeds(position), self._epoch, position, lists=nearby)
