"""Offline samples (DiskGNN): batches of whole epochs sampled once, kept in a directory of their own, the *pack*.

What is known of all batches before the first is trained on is what packed layouts are made from. A pack's files are sections,
each checked whenever it is read; the record ``pack`` is written last, so a directory without it is no pack.
"""

from __future__ import annotations

import json
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.config import check_at_least, parse_disk
from featstore.errors import BudgetError, CommittedError, CorruptionError, FormatError, StaleError, VersionError
from featstore.gather.buffers import BufferPool
from featstore.graph.progress import Progress
from featstore.partition.batcher import RandomBatcher, check_seeds
from featstore.plan.samples import SampleFile, SampleWriter
from featstore.sampling.batch import SampledBatch, Sampler
from featstore.sampling.foreign import adjacency_of, as_sampled, checked_sampler, has_own_seeds
from featstore.storage.builddir import BuildDirectory
from featstore.storage.directory import OpenDirectory, with_directory
from featstore.storage.rundir import DiskBudget
from featstore.storage.sections import SectionFile, SectionWriter

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["Pack", "in_order", "read_record", "sample_offline", "write_record"]

PACK_VERSION = 1
RECORD, SAMPLES = "pack", "samples"
NODE_DATA = "node_data"  # what the record calls the files of node data that the pack carries


def write_record(path: str, kind: str, record: Mapping[str, Any], disk: DiskBudget | None = None) -> None:
    """Write a JSON object as a file of one section, durably."""
    with SectionWriter(path, kind, disk) as writer:
        writer.append(np.frombuffer(json.dumps(record).encode(), np.uint8))
        writer.finish(durable=True).close()


def read_record(path: str, kind: str, directory: OpenDirectory | None = None) -> dict[str, Any]:
    """Read what :func:`write_record` wrote; where ``directory`` is given, it is looked up there.

    Raises
    ------
    CorruptionError, FormatError
        Damaged, or no such file.
    VersionError
        Of a newer release.
    FileNotFoundError
    """
    file = SectionFile(path, kind, directory=directory)
    try:
        record: dict[str, Any] = json.loads(file[0].tobytes())
    except (ValueError, IndexError) as error:
        if isinstance(error, CorruptionError):
            raise
        raise CorruptionError(f"the record is not a JSON object: {error}", path) from None
    finally:
        file.close()
    if record.get("format") != PACK_VERSION:
        raise VersionError(f"{path}: pack format {record.get('format')}; this release reads {PACK_VERSION}")
    return record


class Pack:
    """Sampled batches on disk, in the order in which they were drawn: epoch by epoch. Thread-safe but for :meth:`close`.

    Made by :func:`sample_offline`; ``Pack(path)`` opens one again, wherever its directory was copied to.

    Parameters
    ----------
    path : path-like

    Attributes
    ----------
    path : str
    record : dict
        The options that it was made with: ``num_nodes``, ``epochs``, ``batches`` (of an epoch), ``batch_size``, ``drop_last``,
        ``seed``, ``fanouts`` (None if the sampler has no such attribute), ``made_of``. Also ``node_data``, the files of node data
        that it carried when it was opened.

    Raises
    ------
    FileNotFoundError
        No pack is there.
    CorruptionError, FormatError, VersionError
        The pack is damaged; the directory is not a pack; a newer release made it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.record, file = with_directory(self.path, self._open, "pack")
        self._finalizer = weakref.finalize(self, file.close)
        self.samples = SampleFile(file)
        if len(self.samples) != self.epochs * self.n_batches:
            raise CorruptionError(f"{len(self.samples)} batches instead of {self.epochs * self.n_batches}", file.path)

    def _open(self, directory: OpenDirectory) -> tuple[dict[str, Any], SectionFile]:
        if not directory.has(RECORD):
            raise FormatError(f"{self.path} is not a pack: it has no record; featstore.sample_offline makes packs")
        record = read_record(self.file(RECORD), "pack", directory)
        file = SectionFile(self.file(SAMPLES), "samples", directory=directory)
        if file.file_id != record["samples"]:
            file.close()
            raise CorruptionError("these are not the samples that the pack was made with", file.path)
        return record, file

    @property
    def n_hops(self) -> int:
        """Blocks of a batch."""
        return self.samples.n_hops

    def file(self, name: str) -> str:
        """Return the path of one of its files."""
        return os.path.join(self.path, name)

    @property
    def num_nodes(self) -> int:
        """Nodes of the graph that was sampled."""
        return int(self.record["num_nodes"])

    @property
    def epochs(self) -> int:
        """Epochs that were sampled."""
        return int(self.record["epochs"])

    @property
    def n_batches(self) -> int:
        """Batches of an epoch."""
        return int(self.record["batches"])

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Nodes of each batch, int64 [epochs * n_batches]."""
        return self.samples.lengths

    def __len__(self) -> int:
        """Batches of all epochs."""
        return len(self.samples)

    def ids(self, number: int) -> npt.NDArray[Any]:
        """Return the input ids of batch ``number``, int32 (int64 from 2³¹ nodes on)."""
        return self.samples.ids(number)

    def batch(self, number: int, pool: BufferPool) -> SampledBatch:
        """Return batch ``number`` as it was sampled; batch ``i`` of epoch ``e`` is number ``e * n_batches + i``."""
        return self.samples.batch(number, pool)

    def counts(self) -> npt.NDArray[np.int64]:
        """Count how many batches need each node, int64 [num_nodes]; streamed, a batch in memory at a time."""
        counts = np.zeros(self.num_nodes, np.int64)
        for number in range(len(self)):
            counts[self.ids(number)] += 1  # distinct within a batch
        return counts

    def check(self, g: OutOfCoreGraph) -> None:
        """Raise StaleError unless the pack was sampled from the graph that ``g`` is."""
        if self.record["made_of"] != adjacency_of(g):
            raise StaleError(
                f"{self.path} was sampled from another graph than {g.path}, or from an earlier one in its place; "
                "sample anew with overwrite=True (featstore pack --overwrite)"
            )

    def check_in_place(self) -> dict[str, Any]:
        """Return the record on disk now; raise StaleError where another pack was made in the place of this one since."""
        record = read_record(self.file(RECORD), RECORD)
        if record["samples"] != self.record["samples"]:
            raise StaleError(
                f"{self.path}: another pack was made here since this one was opened; open the new one with featstore.Pack(path)"
            )
        return record

    def verify(self, progress: bool = True) -> dict[str, Any]:
        """Check the whole pack as it is on disk now: every byte of its files, and what samples and plans say.

        Parameters
        ----------
        progress : bool
            Show a progress bar, of bytes and the time left, where stderr is a terminal.

        Returns
        -------
        dict
            ``files`` and ``bytes`` that were checked, ``layouts`` (how many), ``node_data`` (names); ``unfinished_bytes`` of
            interrupted layouts, which are checked when they are gone on with; ``others``, files that are none of the pack's.

        Raises
        ------
        CorruptionError
            What is damaged, with path and offset.
        FormatError, VersionError, OSError
            A file is missing, or none of ours.
        StaleError
            Another pack was made in the place of this one meanwhile.

        Notes
        -----
        Reads every file once, samples and plans twice, in a batch's memory and 8 bytes a row of the host tier. The dataset is not
        needed, and that rows are still the dataset's is not checked: a loader compares the ids of both.
        """
        from featstore.plan.verifypack import verify_pack  # which knows layouts, and they packs

        return verify_pack(self, progress)

    def close(self) -> None:
        """Close its files; may be called again."""
        self._finalizer()

    def __enter__(self) -> Pack:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Pack({self.path!r}, epochs={self.epochs}, batches={self.n_batches})"


def sample_offline(
    g: OutOfCoreGraph,
    sampler: Any,
    seeds: torch.Tensor | npt.NDArray[Any] | Sequence[int] | None = None,
    batch_size: int | None = None,
    epochs: int = 1,
    path: str | os.PathLike[str] | None = None,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    overwrite: bool = False,
    disk: int | str | None = None,
    threads: int | None = None,
    progress: bool = True,
) -> Pack:
    """Sample epochs of batches now, and keep them on disk (DiskGNN's offline sampling).

    Parameters
    ----------
    g : OutOfCoreGraph
    sampler : Sampler, callable, or iterable
        :class:`~featstore.NeighborSampler` or another object with its ``sample(seeds, epoch, index)``; a callable, which is given
        each batch's seeds; or an iterable with seeds of its own (a PyG or DGL loader), which is iterated once an epoch. Each may
        return any form of ``(input_ids, blocks)``: see :mod:`featstore.sampling.foreign`.
    seeds : integer array or tensor, shape (n,), or boolean mask, shape (num_nodes,)
        Distinct nodes. None with an iterable only.
    batch_size : int
        Seeds a batch. None with an iterable only.
    epochs : int
    path : path-like, optional
        The pack's directory; ``<dataset>.pack`` beside the dataset by default.
    shuffle, seed, drop_last
        As for :class:`~featstore.Loader`. A loader with the same options has the same batches.
    overwrite : bool
        Replace a pack at ``path``, when the new one is complete.
    disk : int or str, optional
        Most bytes that the samples may take, or a multiple of all features (``"0.5x"``); layouts have a ``disk`` of their own.
    threads : int, optional
        Batches sampled at once by a ``sample`` method. Callables and iterables make one batch at a time.
    progress : bool
        Show a progress bar where stderr is a terminal.

    Returns
    -------
    Pack

    Raises
    ------
    FileExistsError
        Something is at ``path``.
    CommittedError
        The pack is complete and in place, but a later step failed: opening it, or making its name durable.
    OSError
        The disk, or ``disk``, is full (ENOSPC). Nothing is left, and what was at ``path`` is as it was.
    PluginError
        The sampler returned what is no batch of this graph.
    BudgetError
        No memory for one batch.

    Notes
    -----
    Holds about ``threads`` batches. When this returns, the pack is durable. The next call removes what a killed one left.

    References
    ----------
    Liu et al., DiskGNN, SIGMOD 2025, section 3.
    """
    check_at_least("epochs", epochs, 1)
    check_at_least("seed", seed, 0)
    if batch_size is not None:
        check_at_least("batch_size", batch_size, 1)
    if threads is not None:
        check_at_least("threads", threads, 1)
    budget = None if disk is None else parse_disk(disk, sum(store.nbytes for store in g.features.values()))
    target = f"{g.path}.pack" if path is None else os.path.abspath(os.fspath(path))
    batcher = None
    if has_own_seeds(sampler):
        if seeds is not None or batch_size is not None:
            raise ValueError(f"{type(sampler).__name__} has seeds and batches of its own: leave out seeds and batch_size")
    elif seeds is not None and batch_size is not None:
        batcher = RandomBatcher(check_seeds(seeds, g.num_nodes), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
    else:
        raise ValueError("seeds and batch_size are what a sampler samples batches for; only an iterable has its own")
    threads = g.options.threads if threads is None else threads
    n_batches = 0
    with BuildDirectory(target, overwrite=overwrite, marker=RECORD, what="pack") as build:
        total = 0 if batcher is None else epochs * len(batcher)
        accounts = DiskBudget(budget, "the samples", target)
        with Progress("sample", total, progress, unit=" batches") as bar:
            n_batches, n_hops, file_id = _write_samples(
                os.path.join(build.path, SAMPLES), g, _epochs(g, sampler, batcher, epochs, threads), accounts, bar, epochs
            )
        record = {
            "format": PACK_VERSION,
            "num_nodes": g.num_nodes,
            "epochs": epochs,
            "batches": n_batches,
            "batch_size": None if batcher is None else batch_size,
            "drop_last": drop_last,
            "fanouts": _fanouts(sampler, n_hops if n_batches else None),
            "seed": seed,
            "samples": file_id,
            "made_of": adjacency_of(g),
            NODE_DATA: {},
        }
        write_record(os.path.join(build.path, RECORD), "pack", record, accounts)
        build.commit()
    try:
        return Pack(target)
    except OSError as error:
        raise CommittedError(f"the pack at {target} is complete and in place, but opening it failed", target, error) from error


def _fanouts(sampler: Any, n_hops: int | None) -> list[int] | None:
    """Return a sampler's fan-outs, where it says them in the library's way, one a hop."""
    fanouts = getattr(sampler, "fanouts", None)
    if not isinstance(fanouts, (list, tuple)) or not all(isinstance(n, (int, np.integer)) for n in fanouts):
        return None
    return [int(n) for n in fanouts] if n_hops in (None, len(fanouts)) else None


def _write_samples(
    path: str, g: OutOfCoreGraph, batches: Iterable[SampledBatch], disk: DiskBudget, bar: Progress, epochs: int
) -> tuple[int, int, str]:
    """Write all batches; return how many an epoch has, their hops, and the file's id."""
    counts = [0] * epochs
    with SampleWriter(path, g.num_nodes, disk) as writer:
        for batch in batches:
            writer.add(batch)
            counts[batch.epoch] += 1
            bar.add(1)
        if len(set(counts)) > 1:
            raise ValueError(f"the epochs have different numbers of batches: {counts}")
        return counts[0], writer.n_hops, _finish(writer)


def _finish(writer: SampleWriter) -> str:
    file = writer.finish(durable=True)
    file.close()
    return file.file_id


def _epochs(g: OutOfCoreGraph, sampler: Any, batcher: RandomBatcher | None, epochs: int, threads: int) -> Iterator[SampledBatch]:
    # Others than those with a method may not be asked for several batches at once.
    at_once = threads if hasattr(sampler, "sample") else 1
    checked = None if batcher is None else checked_sampler(sampler, g.num_nodes, g)
    for epoch in range(epochs):
        if batcher is None or checked is None:
            for index, sample in enumerate(sampler):
                yield as_sampled(sample, g.num_nodes, epoch, index)
            continue
        order = batcher.epoch(epoch)

        def one(index: int, epoch: int = epoch, order: Any = order, checked: Sampler = checked) -> SampledBatch:
            return checked.sample(order.seeds(index), epoch=epoch, index=index)

        yield from in_order(one, len(order), at_once, g.pool)


def in_order(one: Callable[[int], SampledBatch], n: int, threads: int, pool: BufferPool) -> Generator[SampledBatch, None, None]:
    """Yield ``one(0) … one(n - 1)``, ``threads`` at work at once; one at a time from when memory was short."""
    if threads > 1:
        with ThreadPoolExecutor(threads, thread_name_prefix="featstore-sample") as workers:
            pending: deque[Future[SampledBatch]] = deque()
            index = started = 0
            try:
                while index < n:
                    while started < min(n, index + threads + 1):
                        pending.append(workers.submit(partial(one, started)))
                        started += 1
                    try:
                        sampled = pending.popleft().result()
                    except BudgetError:
                        break
                    index += 1
                    yield sampled
                    del sampled  # or the next would have to fit beside it
            finally:
                while pending:
                    pending.popleft().cancel()
    else:
        index = 0
    for rest in range(index, n):
        pool.trim()
        yield one(rest)
