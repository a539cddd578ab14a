"""The iterators of a loader: a running epoch, and the iterator that begins an epoch with its first batch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

from featstore.errors import ClosedError
from featstore.gather.buffers import memory_errors
from featstore.load.minibatch import MiniBatch
from featstore.load.pipeline import FINALIZER_JOIN_S, Pipeline
from featstore.load.stages import Stages
from featstore.load.trainingstate import Position
from featstore.storage.rundir import finalize_here
from featstore.strategies.base import Batch, EpochRun

__all__ = ["EpochIterator", "RunningEpoch"]


class RunningEpoch(Iterator[MiniBatch]):
    """Deliver batches ``position.batch … stop - 1`` of an epoch.

    The iterator owns its threads. It stops them when it is exhausted, is closed, fails or is collected.

    Parameters
    ----------
    run : EpochRun
        Closed at the end.
    stages : Stages
    position : Position
        Updated with each batch that is delivered.
    stop, depth, most : int
        See :class:`Pipeline`.
    owner : object
        The loader, kept alive until the threads have ended: closing it closes the objects that the stages use.
    check : callable (batch, position), optional
        Checks every batch that ``run`` returns.
    """

    def __init__(
        self,
        run: EpochRun,
        stages: Stages,
        position: Position,
        stop: int,
        depth: int,
        owner: object,
        most: int = 0,
        check: Callable[[Any, int], None] | None = None,
    ) -> None:
        self._run, self._pid = run, os.getpid()
        self._position = position
        self._over = False
        self._stop = stop
        self._stages = stages
        self._has_delivered = False
        first, second, third = stages.of(run, check)
        self._pipeline: Pipeline[Batch, Any, MiniBatch] = Pipeline(
            first,
            second,
            third,
            start=position.batch,
            stop=stop,
            threads=run.threads,
            depth=depth,
            timer=stages.timer,
            release=partial(stages.release, run),
            releasing=stages.releasing,
            may_begin=run.may_begin,
            overlap=stages.overlap,
            most=most,
            may_grow=stages.may_grow,
        )
        self._finalizer = finalize_here(self, _end, self._pipeline, run, stages, owner)
        try:
            stages.begin(run, position.epoch)
            self._pipeline.begin()
        except BaseException:
            self.close()
            raise

    @property
    def depth(self) -> int:
        """Number of batches made ahead now."""
        return self._pipeline.depth

    def __next__(self) -> MiniBatch:
        if self._over:
            raise StopIteration
        try:
            batch = self._next()
        except BaseException:
            self._over = True
            self.close()
            raise
        if batch is None:
            self._over = True
            self.close()
            raise StopIteration
        return batch

    def _next(self) -> MiniBatch | None:
        """Return the next batch; None after the last."""
        self._stages.check_step()
        if self._has_delivered:
            self._stages.step_done()
        if self._pipeline.position >= self._stop:
            return None
        batch = self._pipeline.get()
        self._has_delivered = True
        self._stages.receive(batch)
        self._position.batch = self._pipeline.position
        return batch

    def close(self) -> None:
        """Stop the threads, and wait until they have ended; may be called again."""
        try:
            if self._finalizer.alive and self._pid == os.getpid():
                self._run.stop()  # a finaliser does not wait as long
                self._pipeline.close()
        finally:
            self._finalizer()


class EpochIterator(Iterator[MiniBatch]):
    """Begin an epoch with the first ``next()``, and deliver its batches.

    Before that the iterator holds nothing but its loader, and the loader does not know the iterator.

    Parameters
    ----------
    begin : callable () -> RunningEpoch
        Begins the loader's next epoch. If it raises, no epoch has begun, and the next ``next()`` calls it again.
    """

    def __init__(self, begin: Callable[[], RunningEpoch]) -> None:
        self._begin: Callable[[], RunningEpoch] | None = begin
        self._running: RunningEpoch | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("an iterator over an epoch cannot be pickled or copied: see Loader.state_dict")

    def begin(self) -> RunningEpoch:
        """Return the running epoch; begin it, unless it has begun.

        Raises
        ------
        ClosedError
            The iterator was closed before its epoch had begun.
        """
        if self._running is None:
            if self._begin is None:
                raise ClosedError("this iterator was closed")
            self._running = self._begin()
            self._begin = None
        return self._running

    def __next__(self) -> MiniBatch:
        with memory_errors():
            return next(self.begin())

    def close(self) -> None:
        """Stop the epoch's threads; may be called again. An epoch that has not begun never begins."""
        self._begin = None
        if self._running is not None:
            self._running.close()


def _end(pipeline: Pipeline[Any, Any, Any], run: EpochRun, stages: Stages, owner: object) -> None:
    # The collector may run in a thread of the epoch, whose end others then wait for.
    is_joined = not threading.current_thread().name.startswith("featstore-")
    try:
        run.stop()  # else a thread would wait for a superbatch that is made only after batches that never run now
        if is_joined:
            pipeline.close(FINALIZER_JOIN_S)
    except BaseException:  # Ctrl-C, while the threads end: wait for them again
        pipeline.close(FINALIZER_JOIN_S)
        raise
    finally:
        if is_joined and pipeline.has_ended:
            _over(pipeline, run, stages, owner)
        else:  # caches stay claimed until no thread reads rows for them
            rest = threading.Thread(target=_over, args=(pipeline, run, stages, owner), name="featstore-end", daemon=True)
            try:
                rest.start()
            except RuntimeError:  # there are too many threads, or the interpreter ends
                stages.over(run)
                run.close()
                raise


def _over(pipeline: Pipeline[Any, Any, Any], run: EpochRun, stages: Stages, owner: object) -> None:
    pipeline.close()
    stages.over(run)
    run.close()
