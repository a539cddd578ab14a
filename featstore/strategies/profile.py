"""Profiles: the first batches of an epoch, sampled ahead to judge the epoch by."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from featstore.pack.offline import Pack, in_order
from featstore.plan.samples import SampleFile, SampleWriter, sample_bytes
from featstore.plan.trace import Trace
from featstore.sampling.batch import SampledBatch
from featstore.sampling.sampledbatches import Memo
from featstore.storage.rundir import DiskQuota, RunDirectory, finalize_here
from featstore.strategies.context import Context

__all__ = ["DISK_DIVISOR", "LEAST_BATCHES", "Profile", "least_batches", "pack_trace", "profile_batches"]

LEAST_BATCHES, MOST_BATCHES = 8, 32
MACROS, MOST_ALIKE = 4, 128  # rows of batches that are alike; batches of long ones
EPOCH_DIVISOR = 8  # one batch of so many
DISK_DIVISOR = 8  # of the disk: the rest is the strategy's
TAIL_BYTES = 128  # of a file, beside its arrays and their entries in the index, at most


def least_batches(together: int = 1) -> int:
    """Return how many batches are looked at, at the least: eight, and four rows of ``together`` that are alike, up to 128."""
    return max(LEAST_BATCHES, min(MACROS * together, MOST_ALIKE))


def profile_batches(n_batches: int, together: int = 1) -> int:
    """Return how many batches of an epoch are looked at: an eighth, eight at least and 32 at most.

    Where ``together`` batches in a row are alike, more where four such rows are more, up to 128.
    """
    return min(n_batches, max(least_batches(together), min(MOST_BATCHES, n_batches // EPOCH_DIVISOR)))


class Profile(Memo):
    """The first batches of epoch 0, sampled to judge it by, in a run file: the epoch of these batches has them from there.

    Parameters
    ----------
    context : Context
    run_dir : str
    disk : int, optional
        Most bytes of all run files; an eighth of them is used at most.
    most : int, optional
        Batches; as many as :func:`profile_batches` says by default.

    Attributes
    ----------
    sample_s : float
        Seconds that sampling took.
    passes_s : float
        Of those, seconds of passes over neighbour lists, which a whole epoch takes too.
    n_sampled : int
        Batches that were sampled.
    n_bytes : int
        On disk until epoch 0 is over.

    Raises
    ------
    OSError
        The disk is full; ENOSPC also where not even one batch fits the eighth.
    BudgetError
        No memory for one batch.

    Notes
    -----
    A batch may be asked for again. Thread-safe but for :meth:`close`.
    """

    def __init__(self, context: Context, run_dir: str, disk: int | None, most: int | None = None) -> None:
        batches = context.batches
        self._pool, self._n_nodes = context.graph.pool, context.graph.num_nodes
        order = batches.epoch(0)
        self._runs = RunDirectory(run_dir)
        # Taken itself, not by way of the condition: Ctrl-C may leave Condition.__enter__ with the lock taken for good.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._n_reading = 0
        self._file: SampleFile | None = None
        accounts = DiskQuota(None if disk is None else disk // DISK_DIVISOR)
        try:
            begin = time.perf_counter()
            most = min(len(order), most or profile_batches(len(order), batches.together))
            with (
                contextlib.closing(order.in_turn(0, stop=most)) as turns,
                SampleWriter(self._runs.file("profile"), self._n_nodes, accounts) as writer,
            ):
                ordered, needed, count = in_order(turns.sample, most, context.threads, self._pool), TAIL_BYTES, 0
                for sampled in ordered:  # counted by hand: enumerate() would keep one while the next is made
                    needed += sample_bytes(sampled, self._n_nodes)
                    if count and accounts.total is not None and needed > accounts.total:
                        break  # each is asked for its own bytes: batches may differ in size
                    writer.add(sampled)
                    count += 1  # noqa: SIM113 - see above
                    del sampled  # or the next would have to fit beside it
                ordered.close()
                self._file = writer.finish_samples()
                self.passes_s = turns.passes_s
            batches.trim()  # what several threads sampled with
            self.sample_s = time.perf_counter() - begin
            self.passes_s = min(self.passes_s, self.sample_s)  # windows that were drawn ahead have waited beside others
        except BaseException:
            self._runs.close()
            raise
        self.n_bytes = accounts.used
        self._finalizer = finalize_here(self, _forget, self._file, self._runs)
        self.n_sampled = len(self._file)
        batches.remember(self)

    def trace(self) -> Trace:
        """Return the rows of its batches; until it is closed."""
        assert self._file is not None
        return Trace.reading(self._file.ids, self._file.lengths, self._n_nodes)

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
        """Remove the file, when nobody reads it: a later epoch has begun. Its batches would be sampled again."""
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


def pack_trace(pack: Pack) -> Trace:
    """Return the rows of a pack's first batches, as many as are looked at of an epoch."""
    n = profile_batches(pack.n_batches, pack.together)
    return Trace.reading(pack.ids, pack.lengths[:n], pack.num_nodes)
