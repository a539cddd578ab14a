"""Offline samples (DiskGNN): batches of whole epochs sampled once, kept in a directory of their own, the *pack*.

Packed layouts are made from these samples: the rows of all batches are known before the first is trained on. A pack's files
consist of sections, each checked whenever it is read. The record ``pack`` is written last, so a directory without it is no pack.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.config import check_at_least, check_flag, parse_disk, refuse_path, user_path
from featstore.errors import BudgetError
from featstore.gather.buffers import BufferPool
from featstore.graph.snapshot import opening_committed
from featstore.pack.record import NODE_DATA, PACK_VERSION, RECORD, SAMPLES, TYPED_VERSION, OfflineSamples, write_record
from featstore.pack.sampledlists import lists_kept
from featstore.pack.typedarguments import check_typed_sampler, seeds_of_type, types_of
from featstore.pack.verify import verify_pack
from featstore.plan.samples import SampleWriter
from featstore.progress import Progress
from featstore.sampling.batch import SampledBatch
from featstore.sampling.batches import Batches, as_batches, refuse_repeats, run_length_of
from featstore.sampling.foreign import adjacency_of, checked_sampler, has_own_seeds, sampled_by
from featstore.sampling.macrolists import FRACTION, macro_lists
from featstore.sampling.partbatches import check_parts_of_ranks
from featstore.sampling.sampledbatches import Drawn
from featstore.storage.builddir import BuildDirectory
from featstore.storage.rundir import DiskQuota
from featstore.topology.types import NodeType, Types, edge_name

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["Pack", "batches_to_sample", "in_order", "sample_offline"]


class Pack(OfflineSamples):
    """Sampled batches on disk, in the order in which they were drawn: epoch by epoch. Thread-safe except for :meth:`close`.

    :func:`sample_offline` makes a pack; ``Pack(path)`` opens it again, wherever its directory was copied to.

    Attributes
    ----------
    path : str
    record : dict
        The options that the pack was made with: ``num_nodes``, ``epochs``, ``batches`` (of an epoch), ``batch_size``,
        ``drop_last``, ``seed``, ``fanouts`` (None if the sampler has no such attribute), ``together`` (consecutive similar
        batches), ``made_of``. Also ``node_data``, the files of node data that the pack carried when it was opened. Of a graph of
        several types also ``node_types``, ``edge_types``, ``seed_type`` and ``fanouts_of_types``.
    types : Types
        The types of the graph's nodes and edges.

    Raises
    ------
    FileNotFoundError, CorruptionError, FormatError, VersionError
        There is no pack at the path; the pack is damaged; the directory is not a pack; a newer release made the pack.
    """

    def verify(self, progress: bool = True) -> dict[str, Any]:
        """Check the whole pack as it is on disk now: every byte of its files, and the meaning of samples and plans.

        Parameters
        ----------
        progress : bool
            Show a progress bar, of bytes and the time left, on a terminal and in a notebook.

        Returns
        -------
        dict
            ``files`` and ``bytes`` checked, ``layouts`` (their number), ``node_data`` (names); ``unfinished_bytes`` of
            interrupted layouts, which are checked when they are finished; ``others``, files that do not belong to the pack.

        Raises
        ------
        CorruptionError, FormatError, VersionError, OSError
            A file is damaged, missing or of an unknown format; the message has path and offset.
        StaleError
            Another pack was made in this one's place meanwhile.

        Notes
        -----
        Reads every file once, samples and plans twice, in a batch's memory and 8 bytes a row of the host tier. The dataset is not
        needed, and packed rows are not compared with its rows: a loader compares the ids of both.
        """
        return verify_pack(self, progress)


def sample_offline(
    g: OutOfCoreGraph,
    sampler: Any,
    seeds: torch.Tensor | npt.NDArray[Any] | Sequence[int] | Batches | tuple[str, Any] | None = None,
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

    Batches are whole: the nodes that a :class:`~featstore.History` would prune depend on training, so packs take no history.

    Parameters
    ----------
    g : OutOfCoreGraph
    sampler : Sampler, callable, or iterable
        A sampler of the library, or another object with ``sample(seeds, epoch, index)``; a callable, which gets each batch's
        seeds; or an iterable with its own seeds (a PyG or DGL loader), which is iterated once an epoch. Each may return any form
        of ``(input_ids, blocks)``: see :mod:`featstore.sampling.foreign`.
    seeds : integer array or tensor, shape (n,), or boolean mask, shape (num_nodes,), or Batches
        Distinct nodes; or batches of seeds, such as :class:`~featstore.PartitionBatches`, in place of ``batch_size``,
        ``shuffle``, ``seed`` and ``drop_last``. None with an iterable only. In a graph of several types ``(type, ids)`` or
        ``(type, mask)``.
    batch_size : int
        Seeds a batch. None with an iterable, and with batches.
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
        Show a progress bar, on a terminal and in a notebook.

    Returns
    -------
    Pack
        The durable pack. About ``threads`` batches are held at a time; neighbour lists that are drawn from often lie in the
        memory left meanwhile, unless the graph has a cache of them. The next call removes the files of a killed one.

    Raises
    ------
    FileExistsError
        ``path`` exists.
    CommittedError
        The pack is complete and in place, but a later step failed: opening it, or making its name durable.
    OSError
        The disk, or ``disk``, is full (ENOSPC). No new file is left, and ``path`` is unchanged.
    PluginError, BudgetError
        The sampler returned no valid batch of this graph; there is no memory for one batch.
    NotImplementedError
        The graph has several types, and the sampler or the seeds do not take them.

    References
    ----------
    Liu et al., DiskGNN, SIGMOD 2025, section 3.
    """
    refuse_path(g)
    epochs, seed = check_at_least("epochs", epochs, 1), check_at_least("seed", seed, 0)
    shuffle, drop_last = check_flag("shuffle", shuffle), check_flag("drop_last", drop_last)
    if batch_size is not None:
        batch_size = check_at_least("batch_size", batch_size, 1)
    if threads is not None:
        threads = check_at_least("threads", threads, 1)
    budget = None if disk is None else parse_disk(disk, sum(store.nbytes for store in g.features.values()), "disk")
    target = f"{g.path}.pack" if path is None else os.path.abspath(user_path(path))
    order: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    kind, batcher = batches_to_sample(g, sampler, seeds, batch_size, **order)
    threads = g.options.threads if threads is None else threads
    with BuildDirectory(target, overwrite=overwrite, marker=RECORD, what="pack") as build:
        total = 0 if batcher is None else epochs * len(batcher)
        accounts = DiskQuota(budget, "the samples", target)
        with Progress("sample", total, progress, unit=" batches") as bar:
            n_batches, n_hops, file_id = _write_samples(
                os.path.join(build.path, SAMPLES), g, _epochs(g, sampler, batcher, epochs, threads), accounts, bar, epochs
            )
        record = {
            "format": PACK_VERSION if kind is None else TYPED_VERSION,
            "num_nodes": g.num_nodes,
            "epochs": epochs,
            "batches": n_batches,
            "batch_size": None if batcher is None else batcher.batch_size,
            "drop_last": bool(getattr(batcher, "drop_last", drop_last)),
            "fanouts": None if kind is not None else _fanouts(sampler, n_hops if n_batches else None),
            **_typed_entry(types_of(g), kind, sampler),
            "seed": int(getattr(batcher, "seed", seed)),
            "together": run_length_of(batcher),
            "samples": file_id,
            "made_of": adjacency_of(g),
            NODE_DATA: {},
        }
        write_record(os.path.join(build.path, RECORD), "pack", record, accounts)
        build.commit()
    with opening_committed(f"the pack at {target} is complete and in place, but opening it failed", target):
        return Pack(target)


def batches_to_sample(
    g: OutOfCoreGraph, sampler: Any, seeds: Any, batch_size: int | None, **order: Any
) -> tuple[NodeType | None, Batches | None]:
    """Check what is to be sampled for a pack: the type of the seeds, None without types, and the batches of seeds.

    The batches are None if the sampler has its own. ``order``: arguments ``shuffle``, ``seed`` and ``drop_last`` of batches.

    Raises
    ------
    ValueError, TypeError, IndexError, NotImplementedError
        As of :func:`sample_offline`.
    """
    types, kind, given = types_of(g), None, seeds
    if types is not None:
        check_typed_sampler(types, sampler)
        kind, given = seeds_of_type(types, seeds)
    if has_own_seeds(sampler):
        if seeds is not None or batch_size is not None:
            raise ValueError(f"{type(sampler).__name__} has seeds and batches of its own: leave out seeds and batch_size")
        return kind, None
    if given is None or (batch_size is None and isinstance(given, (torch.Tensor, np.ndarray, Sequence))):
        raise ValueError("seeds and batch_size are what a sampler samples batches for; only an iterable has its own")
    batcher = as_batches(given, batch_size, **order)
    batcher.check(g.num_nodes)
    check_parts_of_ranks(batcher, 1, None)
    refuse_repeats(batcher)
    return kind, batcher


def _typed_entry(types: Types | None, kind: NodeType | None, sampler: Any) -> dict[str, Any]:
    """Describe types, seeds and fan-outs for the record of a pack of a graph of several types; else empty."""
    if types is None or kind is None:
        return {}
    fanouts = {edge_name(key): list(each) for key, each in sampler.fanouts_of_types.items()}
    return {**types.entry(), "num_edges": types.num_edges, "seed_type": kind.name, "fanouts_of_types": fanouts}


def _fanouts(sampler: Any, n_hops: int | None) -> list[int] | None:
    """Get a sampler's fan-outs, one a hop; None unless its ``fanouts`` are integers as in the library's samplers."""
    fanouts = getattr(sampler, "fanouts", None)
    if not isinstance(fanouts, (list, tuple)) or not all(isinstance(n, (int, np.integer)) for n in fanouts):
        return None
    return [int(n) for n in fanouts] if n_hops in (None, len(fanouts)) else None


def _write_samples(
    path: str, g: OutOfCoreGraph, batches: Iterable[SampledBatch], disk: DiskQuota, bar: Progress, epochs: int
) -> tuple[int, int, str]:
    """Write all batches; return the number of batches of an epoch, of their hops, and the file's id."""
    counts = [0] * epochs
    with SampleWriter(path, g.num_nodes, disk) as writer:
        for batch in batches:
            writer.add(batch)
            counts[batch.epoch] += 1
            bar.add(1)
        if len(set(counts)) > 1:
            raise ValueError(f"the epochs have different numbers of batches: {counts}")
        file = writer.finish(durable=True)
        file.close()
        return counts[0], writer.n_hops, file.file_id


def _epochs(g: OutOfCoreGraph, sampler: Any, batcher: Batches | None, epochs: int, threads: int) -> Iterator[SampledBatch]:
    # Only a sampler with a method `sample` may be called by several threads.
    at_once = threads if hasattr(sampler, "sample") else 1
    if batcher is None:
        for epoch in range(epochs):
            for index, sample in enumerate(sampler):
                yield sampled_by(sampler, sample, g.num_nodes, epoch, index)
        return
    checked = checked_sampler(sampler, g.num_nodes, g)
    lists = macro_lists(g, checked, batcher)
    drawn = Drawn(checked, batcher, lists)
    try:
        if lists is not None:
            lists.use(min(lists.useful_bytes, int(g.budget.available * FRACTION)))
        with lists_kept(g, drawn, epochs, at_once):
            for epoch in range(epochs):
                with contextlib.closing(drawn.epoch(epoch).windowed(0)) as order:
                    yield from in_order(order.sample, len(order), at_once, g.pool)
    finally:
        drawn.close()


def in_order(one: Callable[[int], SampledBatch], n: int, threads: int, pool: BufferPool) -> Generator[SampledBatch, None, None]:
    """Yield ``one(0) … one(n - 1)``, made by ``threads`` threads; after a lack of memory, one at a time."""
    if threads > 1:
        with ThreadPoolExecutor(threads, thread_name_prefix="featstore-offline") as workers:
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
                    del sampled  # so that the next batch can take its memory
            finally:
                while pending:
                    pending.popleft().cancel()
    else:
        index = 0
    for rest in range(index, n):
        pool.trim()
        yield one(rest)
