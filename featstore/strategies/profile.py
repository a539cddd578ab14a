"""Profiles: the first batches of an epoch, sampled ahead to estimate the epoch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt

from featstore.pack.offline import Pack, in_order
from featstore.plan.samples import SampleFile, SampleWriter, sample_bytes
from featstore.plan.trace import Trace, lengths_of
from featstore.sampling.batch import SampledBatch
from featstore.sampling.sampledbatches import Memo
from featstore.storage.rundir import DiskQuota, RunDirectory, finalize_here
from featstore.strategies.context import Context
from featstore.topology.noderows import NodeRows

__all__ = ["DISK_FRACTION", "LEAST_BATCHES", "Profile", "least_batches", "pack_trace", "profile_batches"]

LEAST_BATCHES, MOST_BATCHES = 8, 32
MACROS, MOST_ALIKE = 4, 128  # at least so many runs of similar batches are sampled, but at most so many batches for that
EPOCH_FRACTION = 1 / 8  # of an epoch's batches, that is sampled
DISK_FRACTION = 1 / 8  # of the disk, that a profile may take: the rest is the strategy's
TAIL_BYTES = 128  # most bytes of a file beside its arrays and their entries in the index


def least_batches(run_length: int = 1) -> int:
    """Compute the least number of batches to sample: eight, or four runs of ``run_length`` similar batches, up to 128."""
    return max(LEAST_BATCHES, min(MACROS * run_length, MOST_ALIKE))


def profile_batches(n_batches: int, run_length: int = 1) -> int:
    """Compute the number of batches of an epoch to sample: an eighth, eight at least and 32 at most.

    If ``run_length`` batches in a row are similar, four such runs are sampled if they are more, up to 128 batches.
    """
    return min(n_batches, max(least_batches(run_length), min(MOST_BATCHES, int(n_batches * EPOCH_FRACTION))))


class Profile(Memo):
    """The first batches of epoch 0, sampled into a run file to estimate the epoch. Epoch 0 then reads them from the file.

    Parameters
    ----------
    context : Context
    run_dir : str
    disk : int, optional
        Most bytes of all run files; a profile uses an eighth of them at most.
    most : int, optional
        Batches to sample, by default :func:`profile_batches`.

    Attributes
    ----------
    sample_s : float
        Seconds that sampling took.
    passes_s : float
        The part of ``sample_s`` of passes over neighbour lists, which a whole epoch takes, too.
    computing_s : float
        The part of ``sample_s`` that the threads would take if they waited for no reads.
    n_sampled : int
        Batches that were sampled.
    n_bytes : int
        Bytes on disk until epoch 0 is over.

    Raises
    ------
    OSError
        The disk is full; ENOSPC also if not even one batch fits the eighth.
    BudgetError
        No memory for one batch.

    Notes
    -----
    A batch may be asked for again. Thread-safe but for :meth:`close`.
    """

    def __init__(self, context: Context, run_dir: str, disk: int | None, most: int | None = None) -> None:
        batches = context.batches
        self._pool, self._n_nodes, self._rows = context.graph.pool, context.graph.num_nodes, context.nodes.rows
        order = batches.epoch(0)
        self._runs = RunDirectory(run_dir)
        # Code takes the lock itself, not the condition: Ctrl-C may leave Condition.__enter__ with the lock taken for good.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._n_reading = 0
        self._file: SampleFile | None = None
        accounts = DiskQuota(None if disk is None else int(disk * DISK_FRACTION))
        try:
            begin, computed = time.perf_counter(), time.process_time()
            most = min(len(order), most or profile_batches(len(order), batches.run_length))
            with (
                contextlib.closing(order.windowed(0, stop=most)) as windowed,
                SampleWriter(self._runs.file("profile"), self._n_nodes, accounts) as writer,
            ):
                ordered, needed, count = in_order(windowed.sample, most, context.threads, self._pool), TAIL_BYTES, 0
                for sampled in ordered:  # counted by hand: enumerate() would keep one while the next is made
                    needed += sample_bytes(sampled, self._n_nodes)
                    if count and accounts.total is not None and needed > accounts.total:
                        break  # each batch counts its own bytes: batches may differ in size
                    writer.add(sampled)
                    count += 1  # noqa: SIM113 - see above
                    del sampled  # else the next batch would have to fit beside it
                ordered.close()
                self._file = writer.finish_samples()
                self.passes_s = windowed.passes_s
            batches.trim()  # scratch memory of the threads that sampled
            self.sample_s = time.perf_counter() - begin
            self.computing_s = min(self.sample_s, (time.process_time() - computed) / max(1, context.threads))
            self.passes_s = min(self.passes_s, self.sample_s)  # waits of windows drawn at once add up to more than the clock's
        except BaseException:
            self._runs.close()
            raise
        self.n_bytes = accounts.used
        self._finalizer = finalize_here(self, _forget, self._file, self._runs)
        self.n_sampled = len(self._file)
        batches.remember(self)

    def trace(self) -> Trace:
        """Return the trace of the sampled batches; it can be read until the profile is closed."""
        assert self._file is not None
        file, rows = self._file, self._rows
        if not rows.kinds:
            return Trace.reading(file.ids, file.lengths, rows.n)

        def found(number: int) -> npt.NDArray[Any]:
            return rows.stored(file.ids(number))

        return Trace.reading(found, lengths_of(found, len(file)), rows.n)

    def batch(self, position: int) -> SampledBatch | None:
        """See :class:`Memo`."""
        if position >= self.n_sampled:
            return None
        with self._reading() as file:
            return None if file is None else file.batch(position, self._pool)

    @contextmanager
    def _reading(self) -> Iterator[SampleFile | None]:
        readers = 0
        try:
            with self._lock:
                self._n_reading += 1
                readers = 1
                file = self._file
            yield file
        finally:
            with self._lock:
                self._n_reading -= readers
                self._changed.notify_all()

    def forget(self) -> None:
        """Remove the file, unless it is being read, because a later epoch has begun. Its batches are sampled again if needed."""
        with self._lock:
            if self._file is not None and not self._n_reading:
                self._file = None
                self._finalizer()

    def close(self) -> None:
        """Remove the file; may be called again."""
        with self._lock:
            self._changed.wait_for(lambda: not self._n_reading)
            self._file = None
        self._finalizer()


def _forget(file: SampleFile, runs: RunDirectory) -> None:
    file.remove()
    runs.close()


def pack_trace(pack: Pack, rows: NodeRows | None = None) -> Trace:
    """Return the trace of a pack's first batches, as many as :func:`profile_batches` samples of an epoch.

    ``rows`` are those of a column, if nodes are of several types.
    """
    n, needs = profile_batches(pack.n_batches, pack.run_length), pack.of_rows(rows)
    lengths = pack.lengths[:n] if needs is pack else lengths_of(needs.ids, n)
    return Trace.reading(needs.ids, lengths, needs.n_rows)
