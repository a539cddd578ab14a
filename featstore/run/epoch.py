"""One epoch of a loader under way: its iterator, and the memory that its batches hold."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from featstore.config import Budget, Reservation
from featstore.run.batch import MiniBatch
from featstore.run.prefetch import FINALIZER_JOIN_S, Pipeline, Stopwatch
from featstore.run.strategy import EpochRun, Prepared
from featstore.sampling.batch import SampledBatch, Sampler

__all__ = ["Batches", "EpochIterator", "Held", "Item", "Progress", "most_rows", "sampled_bytes"]


class Held:
    """Bytes of a loader's memory, released after the last batch object that refers to them has died: see :class:`Batches`."""

    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation


class Batches:
    """What a loader's batches hold of its memory. Thread-safe.

    The loop lets go of batches in the thread that Ctrl-C interrupts, and an interrupt within a destructor is lost, with what was
    left of the destructor. So a death is only noted, which is one call of a compiled method, and released here when memory is
    asked for.
    """

    def __init__(self, share: Budget) -> None:
        self._share = share
        self._dead: SimpleQueue[weakref.ref[Held]] = SimpleQueue()
        self._living: dict[weakref.ref[Held], Reservation] = {}

    def hold(self, n_bytes: int) -> Held:
        """Reserve ``n_bytes``, or raise BudgetError."""
        self._release_dead()
        held = Held(self._share.reserve("batches", n_bytes))
        self._living[weakref.ref(held, self._dead.put)] = held.reservation
        return held

    def resize(self, held: Held, n_bytes: int) -> None:
        """Hold ``n_bytes`` from now on, or raise BudgetError."""
        self._release_dead()
        held.reservation.resize(n_bytes)

    def _release_dead(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._living.pop(self._dead.get_nowait()).release()


@dataclass(frozen=True)
class Item:
    """A batch between sampling and gathering, and the bytes of its sample."""

    prepared: Prepared
    n_bytes: int
    held: Held | None


@dataclass
class Progress:
    """The batch that an iterator delivers next."""

    epoch: int
    batch: int


class EpochIterator(Iterator[MiniBatch]):
    """Deliver batches ``progress.batch … stop - 1`` of an epoch.

    Owns its threads, and stops them when it is exhausted, closed, fails or is collected.

    Parameters
    ----------
    run : EpochRun
        Closed at the end.
    sample : callable (EpochRun, int) -> Item
    gather : callable (EpochRun, int, Item) -> MiniBatch
    progress : Progress
        Follows what is delivered.
    stop, depth : int
        See :class:`Pipeline`.
    watch : Stopwatch
    """

    def __init__(
        self,
        run: EpochRun,
        sample: Callable[[EpochRun, int], Item],
        gather: Callable[[EpochRun, int, Item], MiniBatch],
        progress: Progress,
        stop: int,
        depth: int,
        watch: Stopwatch,
    ) -> None:
        self._progress = progress
        self._over = False
        self._stop = stop
        self._pipeline: Pipeline[Item, MiniBatch] = Pipeline(
            partial(sample, run),
            partial(gather, run),
            start=progress.batch,
            stop=stop,
            threads=run.threads,
            depth=depth,
            watch=watch,
            spare=run.spare,
        )
        self._finalizer = weakref.finalize(self, _end, self._pipeline, run)
        try:
            self._pipeline.begin()
        except BaseException:
            self.close()
            raise

    @property
    def depth(self) -> int:
        """Batches made ahead now."""
        return self._pipeline.depth

    def __next__(self) -> MiniBatch:
        if self._over:
            raise StopIteration
        if self._pipeline.position >= self._stop:
            self._over = True
            self.close()
            raise StopIteration
        try:
            batch = self._pipeline.get()
            self._progress.batch = self._pipeline.position
        except BaseException:
            self._over = True
            self.close()
            raise
        return batch

    def close(self) -> None:
        """Stop the threads; may be called again."""
        self._finalizer()


def _end(pipeline: Pipeline[Any, Any], run: EpochRun) -> None:
    try:
        pipeline.close(FINALIZER_JOIN_S)
    except BaseException:  # Ctrl-C, while its threads come to their end; so they do
        pipeline.close(FINALIZER_JOIN_S)
        raise
    finally:
        run.close()


def sampled_bytes(sampled: SampledBatch) -> int:
    """Bytes of a sample's tensors."""
    tensors = [sampled.input_ids]
    for block in sampled.blocks:
        tensors += [block.src, block.dst, *([] if block.edge_pos is None else [block.edge_pos])]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def most_rows(sampler: Sampler, batch_size: int, num_nodes: int) -> int:
    """Most distinct nodes that a batch can have."""
    rows = batch_size
    for fanout in getattr(sampler, "fanouts", [-1]):
        rows = num_nodes if fanout < 0 else min(num_nodes, rows * (1 + fanout))
    return rows
