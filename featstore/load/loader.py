"""The loader: batches for a training loop, sampled and gathered ahead by threads, within the memory budget."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy.typing as npt
import torch

from featstore.budget import Living, Reservation
from featstore.cache.base import get_policy
from featstore.config import check_at_least, check_flag
from featstore.errors import BudgetError, ClosedError
from featstore.gather.buffers import memory_errors
from featstore.gather.device import check_device
from featstore.load.arguments import check_edge_features, check_features, check_labels, check_prefetch, check_ranks
from featstore.load.batchcheck import batch_check
from featstore.load.epoch import EpochIterator, Position, RunningEpoch
from featstore.load.history import History, check_history
from featstore.load.minibatch import MiniBatch
from featstore.load.stages import Stages
from featstore.load.threads import stage_threads
from featstore.load.transfer import numbered
from featstore.pack.packgraph import PackedGraph
from featstore.sampling.batch import Sampler
from featstore.sampling.batches import Batches, as_batches
from featstore.sampling.foreign import check_same_graph, checked_sampler, graph_id
from featstore.sampling.macrolists import macro_lists
from featstore.sampling.sampledbatches import Drawn, SampledBatches
from featstore.storage.rundir import finalize_here
from featstore.strategies.base import Strategy
from featstore.strategies.context import Context
from featstore.strategies.devicecache import DeviceCache, describe, with_tier
from featstore.strategies.domain import Domain
from featstore.strategies.memory import Memory
from featstore.strategies.registry import get_strategy
from featstore.strategies.savedsplit import HistorySplit
from featstore.strategies.windows import describe_windows

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["Loader"]

BATCH_SIZE = 1000
MOST_AHEAD = 16  # batches, with prefetch="auto"


def _release(held: list[Reservation]) -> None:
    while held:
        held.pop().release()


class Loader:
    """Iterate over mini-batches of a graph, an epoch a ``for`` loop.

    Parameters
    ----------
    g : OutOfCoreGraph or PackedGraph
        The latter, a pack in place of its dataset, for ``strategy="packed"``; the labels are those that it carries.
    sampler : Sampler
        :class:`~featstore.NeighborSampler`, :class:`~featstore.LaborSampler`, or anything with their
        ``sample(seeds, epoch=, index=)``, thread-safe and a pure function of its arguments, or a callable that is given the
        seeds. It may return any form of ``(input_ids, blocks)``, see :mod:`featstore.sampling.foreign`; each batch of another's
        sampler is checked. A sampler of another graph is refused, as far as its attributes ``graph`` and ``num_nodes`` tell; a
        dataset that was opened twice is one graph.
    seeds : integer array or tensor, shape (n,), or boolean mask, shape (num_nodes,), or Batches
        Distinct nodes that losses are taken over; or which seeds form which batch: :class:`~featstore.RandomBatches`,
        :class:`~featstore.PartitionBatches`, or an object like them, in place of ``batch_size``, ``shuffle``, ``seed`` and
        ``drop_last``.
    batch_size : int, optional
        Seeds a batch; 1000 by default.
    features : str or sequence of str
        Features to gather; the first is ``batch.x``. May be empty.
    labels : str, sequence of str, or None
        Node data for ``batch.labels``; the first is ``batch.y``. ``"auto"``: ``y`` where the graph has it, else none.
    edge_features : str or sequence of str
        Edge features to gather into ``batch.edge_features``. The sampler must number edges (``edges=True``); so must the one
        that a pack was sampled with.
    strategy : str, Strategy or class
        How batches come about, and where their rows are found: :class:`~featstore.OnDemand`, :class:`~featstore.Superbatch`,
        :class:`~featstore.Ginex`, :class:`~featstore.Streamed`, :class:`~featstore.Packed`, :class:`~featstore.Auto`, or one that
        was registered. A name, such as ``"superbatch"``, is that strategy with its defaults. ``"auto"``, the default: what is
        estimated to take least time for ten epochs; it may write run files. A strategy that runs a pack brings sampler and seeds
        itself.
    prefetch : int or "auto"
        Batches made ahead of the one that the loop holds; less where memory is short. 0: everything runs in the caller's thread.
        ``"auto"``: one more each time the loop waits, while memory is free, 16 at most; one fewer when all were there for long.
    threads : int or mapping of str to int, optional
        By stage: ``{"sample": 2, "gather": 1, "read": 1}`` samples two batches at once, copies rows in one thread, and reads in
        one thread, so that cores are left to computing. An int is for sampling alone. By default the threads of the graph.
        ``"read"`` bounds the reads of the whole dataset while the loader lives: with io_uring queues at once, each of one thread
        with many reads in flight; with pread the threads themselves.
    shuffle : bool
        A new order of the seeds each epoch, a function of ``seed`` and the epoch.
    seed : int
    device : str or torch.device
        Where batches are delivered: to others than the CPU by a thread of its own, while the next batch is gathered. RuntimeError
        where it is not available.
    device_cache : int, str, float or DeviceCache, optional
        Rows that stay on ``device``, so that the others alone cross to it: bytes for all features together (``"8GiB"``), a share
        of the rows (``"10%"`` or ``0.1``), or ``"auto"``, what the first step leaves of the device's memory; 0: none. Those of
        highest degree, or of another static policy's score (:class:`~featstore.DeviceCache`); a pack's layout has chosen them.
        The host's cache sees the other accesses alone; a static one has the next rows. With ``device="cpu"`` they are counted in
        the budget.
    drop_last : bool
        Leave out a last batch that is not full.
    history : History, optional
        Historical embeddings: nodes of the seeds' own hop that have a recent one are not expanded. The loop must call
        ``batch.history.merge`` for each batch. It goes with :class:`~featstore.NeighborSampler` and
        :class:`~featstore.LaborSampler` of two hops or more, and runs one epoch at a time.

    Raises
    ------
    OptionError
        A policy of ``device_cache`` that is not static, or a pack's; an option of the strategy that does not go with this
        loader.
    ValueError
        A value is out of range; the sampler is of another graph; a sampler or seeds where the strategy brings its own.
    TypeError
        A value is of the wrong type.
    BusyError
        From the loop: another epoch with this history is running; or another one runs a pack without its dataset.
    BudgetError
        The cache is beyond the graph's budget. A batch that does not fit raises it from the loop; ``needed`` is the least budget
        that does. The loop still holds one batch while it asks for the next, so two must fit.
    PluginError
        From the loop: the sampler returned what is no batch of this graph, or the strategy another batch than it was asked for.

    Warns
    -----
    RanksWarning
        The process is one of several that train together, each of which gets all batches.
    FeatstoreWarning
        ``drop_last`` leaves out the only batch.

    Notes
    -----
    Batches are the same, bit for bit, whatever the threads, the prefetch, the cache, the strategy and the budget. Leaving the
    loop early, an exception, Ctrl-C or the garbage collector stops the threads and frees what was made ahead. Every iterator is
    one epoch, which begins with its first batch: ``iter(loader)`` alone takes neither an epoch's number nor memory nor caches.
    Several epochs may run at once, each with its own threads; they share the cache. But plans change the features'
    cache: while an epoch of any strategy but ``"ondemand"`` runs, another such epoch on the same features, of this loader or of
    another one of the graph, reads on demand through that cache. In turn each makes its cache anew where the other's is. Not for
    use across a fork: make the loader in the child.
    """

    def __init__(
        self,
        g: OutOfCoreGraph | PackedGraph,
        sampler: Sampler | None = None,
        seeds: torch.Tensor | npt.NDArray[Any] | Sequence[int] | Batches | None = None,
        batch_size: int | None = None,
        features: str | Sequence[str] = ("x",),
        labels: str | Sequence[str] | None = "auto",
        strategy: str | Strategy | type[Strategy] = "auto",
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        device_cache: int | float | str | DeviceCache | None = None,
        prefetch: int | str = 2,
        threads: int | Mapping[str, int] | None = None,
        edge_features: str | Sequence[str] = (),
        history: History | None = None,
    ) -> None:
        check_ranks()
        self._strategy = get_strategy(strategy)
        self._g, self._sampler = cast(Any, g), sampler
        sampling, copying, reading = stage_threads(threads, g.options.threads)
        target = numbered(check_device(device))
        context = partial(
            Context,
            g,
            threads=sampling,
            copy_threads=copying,
            nodes=Domain.of_nodes(g, check_features(g, features)),
            edges=Domain.of_edges(g, check_edge_features(g, edge_features, sampler)),
            labels=check_labels(g, labels),
            device=target,
            prefetch=check_prefetch(prefetch, sampling),
        )
        cache = None if device_cache is None else DeviceCache.of(device_cache)
        self._held: list[Reservation] = []
        self._finalizer = weakref.finalize(self, _release, self._held)
        self._iterators: Living[RunningEpoch] = Living()  # of epochs that have begun
        self._beginning = threading.RLock()
        self._adapts = prefetch == "auto"
        self._next_epoch = self._next_start = 0
        self._position = Position(0, 0)
        self._closed = False
        self._pid = os.getpid()
        self._history: History | None = None
        batches = self._batches_of(sampler, seeds, batch_size, history, target, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self._close_tier: Callable[[], object] = _nothing
        self._unbound_reads: Callable[[], object] = _nothing
        self._close_history = _nothing if self._history is None else weakref.finalize(self, self._history.detach)
        self._close_batches = weakref.finalize(self, batches.close)
        try:
            if reading is not None:
                self._unbound_reads = finalize_here(self, g.reader.unbound, id(self))
                g.reader.bound(id(self), reading)
            with memory_errors():
                self._make_runner(context(batches, has_history=history is not None), cache, history)
        except BaseException:
            self._release_all(failed=True)
            raise

    # Set-up.

    def _batches_of(
        self, sampler: Any, seeds: Any, batch_size: int | None, history: History | None, device: torch.device, **options: Any
    ) -> SampledBatches:
        """Return the batches that the strategy brings, or those that the sampler draws; the last thing is to take the history."""
        g = self._g
        if batch_size is not None:
            batch_size = check_at_least("batch_size", batch_size, 1)
        options["seed"] = check_at_least("seed", options["seed"], 0)
        options |= {name: check_flag(name, options[name]) for name in ("shuffle", "drop_last")}
        name = self._strategy.name
        found = self._strategy.batches(g, batch_size=batch_size, **options)
        if found is not None:
            if sampler is not None or seeds is not None:
                found.close()
                raise ValueError(f"strategy {name!r} runs the samples of a pack, and takes no sampler and no seeds")
            if history is not None:
                found.close()
                check_history(history, self._strategy, None)
            return found
        if isinstance(g, PackedGraph):
            raise ValueError(f"a PackedGraph has no sampler and no seeds: strategy {name!r} needs its dataset")
        if sampler is None or seeds is None:
            raise ValueError(f"strategy {name!r} needs a sampler and seeds")
        batches = as_batches(seeds, batch_size, BATCH_SIZE, **options)
        batches.check(g.num_nodes)
        checked = checked_sampler(sampler, g.num_nodes, g)
        if history is None:
            return Drawn(checked, batches, macro_lists(g, checked, batches))
        check_history(history, self._strategy, checked, device)
        lists = macro_lists(g, checked, batches)
        try:
            history.attach(g)
        except BaseException:
            if lists is not None:
                lists.close()
            raise
        self._history = history
        return Drawn(checked, batches, lists, history.times)

    def _make_runner(self, context: Context, cache: DeviceCache | None, history: History | None) -> None:
        """Divide the memory: first what the loader itself holds, then rows on the device, then what the strategy makes."""
        divide = None
        if history is not None and history.is_open:
            divide = HistorySplit(history, cast(Drawn, context.batches)).divide
        context = replace(context, divide=divide)
        try:
            self._reserve_order(context)
            if cache is not None:
                context = with_tier(context, cache)
                if context.on_device is not None:
                    self._close_tier = finalize_here(self, context.on_device.close)
        except BudgetError as error:  # batches come on top, and what the strategy holds, which is not known yet
            error = Memory(context, caches=self._order_bytes(context)).too_small(error)
            raise BudgetError(error.reason, (error.needed or 0) * 3 // 2) from None
        self._runner = self._strategy.run(context)
        if divide is not None:  # by a strategy that sizes no caches
            divide(self._runner.context, self._runner.memory, None, get_policy("frequency"))
        self._windows = describe_windows(self._runner.context, self._runner.memory)
        self._stages = Stages(self._runner.context, self._runner.memory, self._history)

    def _reserve_order(self, context: Context) -> None:
        """Count the seeds, the order of an epoch, the labels and the history, before a cache takes the rest."""
        g = self._g
        for name in context.labels:
            if (n := len(g.node_data[name])) != g.num_nodes:
                raise ValueError(f"labels: {name!r} has {n} entries for {g.num_nodes} nodes")
        self._held.append(g.budget.reserve("loader order", context.batches.nbytes))
        if self._history is not None and not self._history.is_open:
            self._history.make(g, context.device)

    def _order_bytes(self, context: Context) -> int:
        """Add up the bytes that the loader needs in all."""
        history: int = 0 if self._history is None else self._history.needed_bytes(self._g, context.device)
        labels: int = sum(map(self._g.data_bytes, context.labels))
        return context.batches.nbytes + labels + history

    def __repr__(self) -> str:
        if not hasattr(self, "_stages"):
            return "<Loader, not made>"  # its constructor raised
        context, state = self._runner.context, ", closed" if self._closed else ""
        options = {
            "features": list(context.features),
            **({"edge_features": list(context.edges.stores)} if context.edges.stores else {}),
            "labels": list(context.labels),
            "strategy": self._strategy,
            "device": str(context.device),
        }
        what = [repr(self._g.path), *([] if self._sampler is None else [repr(self._sampler)])]  # a pack has samples
        what.append(f"{len(self):,} batches of {context.batches.batch_size}")
        what += [f"{name}={value!r}" for name, value in options.items()]
        return f"Loader({', '.join(what)}{state})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Loader cannot be pickled or copied: its threads, caches and run files are its process's own. The graph, its "
            "stores and samplers travel to workers; a loader is made where it is used, and its state_dict() says where it stands"
        )

    # Iteration.

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._runner.context.batches)

    def __iter__(self) -> Iterator[MiniBatch]:
        """Return an iterator over the next epoch (or the rest of the one that :meth:`load_state_dict` restored).

        The epoch begins with the first ``next()``: only then the iterator takes the epoch's number, memory, threads and the
        features' caches.
        """
        self._check_open()
        return EpochIterator(self._begin_epoch)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the loader is closed; it was of {self._g.path}")
        if os.getpid() != self._pid:
            raise ClosedError("the loader belongs to the parent process: make one in this process")

    def _begin_epoch(self) -> RunningEpoch:
        """Begin the next epoch; BusyError and the like leave it the next one."""
        self._check_open()  # before the lock, which another thread may have held at a fork
        with self._beginning:  # of two iterators that begin at once each has an epoch of its own
            self._check_open()
            if self._history is not None:
                self._history.check_idle()
            epoch, start = self._next_epoch, self._next_start
            run = self._runner.prepare(epoch, start)
            position = Position(epoch, start)
            try:
                depth = self._runner.prefetch
                most = MOST_AHEAD if self._adapts and depth > 1 else depth  # not where memory was short from the start
                check = batch_check(self._strategy.name, len(self), None if self._sampler is None else epoch)
                running = RunningEpoch(run, self._stages, position, len(self), depth, self, most, check)
            except BaseException:
                run.close()
                raise
            self._next_epoch, self._next_start = epoch + 1, 0
            self._position = position
            self._iterators.add(running)
            return running

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``for`` loop run ``epoch``, from its first batch; without it epochs count up from 0."""
        epoch = check_at_least("epoch", epoch, 0)
        self._next_epoch, self._next_start = epoch, 0
        self._position = Position(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands: the batch after the last one that was delivered.

        A loader with the same seeds and options goes on there after :meth:`load_state_dict`; its next ``for`` loop runs the
        rest of the epoch. Batches that were only made ahead do not count, nor does an iterator whose first batch was not asked
        for. Of several iterators at once the last one begun is meant.
        """
        epoch, batch = self._position.epoch, self._position.batch
        if batch >= len(self) > 0:
            epoch, batch = epoch + 1, 0
        batches = self._runner.context.batches.digest()
        return {"version": 1, "epoch": epoch, "batch": batch, "batches": batches, "graph": graph_id(self._g)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` stood.

        Raises
        ------
        ValueError
            The state is of a loader with other batches: other seeds, ``batch_size``, ``shuffle``, ``seed`` or ``drop_last``. The
            sampler is not in the state: give the same one. Or the state is of another graph.
        """
        if state.get("version") != 1:
            raise ValueError(f"not a loader's state: {sorted(state)}")
        if state["batches"] != self._runner.context.batches.digest():
            raise ValueError(
                "the state is of a loader with other seeds, batch_size, shuffle, seed or drop_last, or whose batches of a pack "
                "ran in another order (policy, length)"
            )
        check_same_graph(state, graph_id(self._g))
        self._next_epoch, self._next_start = int(state["epoch"]), int(state["batch"])
        self._position = Position(self._next_epoch, self._next_start)

    def stats(self) -> dict[str, Any]:
        """Report the loader's counts and seconds since it was made.

        Returns
        -------
        dict
            ``batches``; ``rows`` asked for, ``rows_loaded`` from storage, ``hits`` (rows by tier, ``base`` are the loaded ones),
            ``hits_lost`` (rows planned as hits of the host cache and loaded, as others had taken their memory back),
            ``epochs_beside`` (epochs read on demand, as another one's plans had the cache),
            ``bytes_requested``, ``bytes_read``, ``reads`` of the features, by this loader alone; ``prefetch``, the batches now
            made ahead (fewer than asked for, once memory was short); ``seconds`` by stage; ``hidden``, the share of loading's
            seconds that the loop did not wait for. Where superbatches are planned, ``superbatch``: its ``batches``, ``of`` how
            many an epoch has, and the ``passes`` over the features of an epoch where they are streamed. With rows on the device
            ``device_cache``: ``rows`` of each feature and ``bytes`` of all, or ``why`` there are none. With
            :class:`~featstore.Auto` also ``auto``: ``taken``, ``reason``, the ``estimates`` of all strategies; with a pack
            ``layout``: its ``name``, and whether it was ``made`` now.
            With edge features ``edge_features``: what was read of them alone, by the same names, and the stage ``edges``.
            With ``EpochSampler(window="auto")`` ``windows``: ``batches`` of one, ``of`` an epoch, ``passes`` over lists a hop,
            and ``advice``. With a history ``history``: ``nodes`` and ``bytes`` of its table, rows ``pulled`` and ``pushed``, and
            the ``split`` of the memory that chose the nodes.

        Notes
        -----
        Stages: ``sample``; ``gather``, reading rows and copying hits; ``update``, bringing rows into the cache; ``labels``;
        ``transfer``: copies to the device and assembly there, in a thread that only loaders for a device, or with a
        ``device_cache``, have; ``wait`` (the loop waited for a batch); ``cache`` (making the cache); ``presample`` (sampling for
        counts); ``auto`` (choosing a strategy); ``split`` (choosing a history's nodes).
        On demand ``sample`` is added over threads. A superbatch is sampled by several threads at once, and its seconds are those
        of the clock; ``plan`` is its changesets, ``pack`` copying rows into extents, ``load`` reading samples and changesets
        back; ``read`` is the part of ``gather`` that waits for extents. Stages run beside each other and beside the loop, so
        their seconds may add up to more than the clock's.
        """
        depths = [epoch.depth for epoch in self._iterators]
        context = self._runner.context
        of_edges = {"edge_features": context.edges.reads.total()} if context.edges.stores else {}
        return {
            **of_edges,
            **({} if self._history is None else {"history": self._history.stats()}),
            **context.counts.total(),
            **context.nodes.reads.total(),
            "prefetch": min(depths, default=self._runner.prefetch),
            "seconds": context.watch.seconds(),
            "hidden": self._stages.overlap.hidden,
            **describe(context.on_device),
            **self._windows,
            **self._runner.stats(),
        }

    # The end.

    def close(self) -> None:
        """Stop all iterators; they raise ClosedError from now on. The cache stays with the graph. May be called again."""
        self._close(failed=False)

    def _close(self, failed: bool) -> None:
        self._closed = True
        if os.getpid() != self._pid:
            return  # threads and run files are the parent's, who goes on with them
        with self._beginning:  # an epoch that is beginning is closed, too
            running = list(self._iterators)
        for epoch in running:
            epoch.close()
        self._release_all(failed)

    def _release_all(self, failed: bool) -> None:
        with ExitStack() as stack:  # all of it, the last first, whichever raises
            stack.callback(self._finalizer)
            stack.callback(self._unbound_reads)
            if failed and not hasattr(self, "_stages") and self._history is not None:
                stack.callback(self._history.forget)
            stack.callback(self._close_history)
            stack.callback(self._close_batches)
            stack.callback(self._close_tier)
            if hasattr(self, "_runner"):
                stack.callback(self._runner.memory.close)
                stack.callback(self._runner.close, failed)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close(failed=kind is not None)


def _nothing() -> None:
    pass
