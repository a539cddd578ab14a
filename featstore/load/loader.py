"""The loader, which delivers batches to a training loop: threads sample and gather them ahead, within the memory budget."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from featstore.budget import Living, Reservation
from featstore.cache.base import get_policy
from featstore.config import check_at_least, check_flag, format_size, refuse_path
from featstore.display import MOST_ROWS, Display, ShownAsTables, Table, described
from featstore.errors import BudgetError, ClosedError, PluginError
from featstore.gather.buffers import memory_errors
from featstore.gather.device import check_device
from featstore.graph.showing import cache_text
from featstore.load.arguments import check_edge_features, check_features, check_prefetch
from featstore.load.batchcheck import batch_check
from featstore.load.checkedstrategy import checked_batches, checked_epoch, checked_runner, checked_stats
from featstore.load.epoch import EpochIterator, RunningEpoch
from featstore.load.history import History, check_history
from featstore.load.minibatch import MiniBatch
from featstore.load.report import LoaderStats, draw_stats, show_counts
from featstore.load.savedsplit import HistorySplit
from featstore.load.seedlabels import SeedLabels
from featstore.load.stages import Stages
from featstore.load.threads import stage_threads
from featstore.load.trainingstate import TrainingState
from featstore.load.transfer import numbered
from featstore.load.typedarguments import check_typed, domain_of, edge_features_of, seed_type_of
from featstore.pack.packgraph import PackedGraph
from featstore.pack.typedarguments import seeds_of_type, types_of
from featstore.ranks import ChosenByFirst, check_ranks, process_group
from featstore.sampling.batch import Sampler
from featstore.sampling.batches import Batches, as_batches
from featstore.sampling.foreign import checked_sampler
from featstore.sampling.macrolists import macro_lists
from featstore.sampling.partbatches import check_part, check_parts_of_ranks
from featstore.sampling.sampledbatches import Drawn, SampledBatches
from featstore.sampling.shares import ShareOfBatches
from featstore.storage.rundir import finalize_here
from featstore.strategies.base import Strategy
from featstore.strategies.context import Context
from featstore.strategies.devicecache import DeviceCache, describe, with_tier
from featstore.strategies.domain import Domain
from featstore.strategies.memory import Memory
from featstore.strategies.registry import get_strategy
from featstore.strategies.windows import describe_windows

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from typing_extensions import TypeVar

    from featstore.graph.dataset import OutOfCoreGraph

    # Of a graph of several types Loader[HeteroMiniBatch](…) says so: overloads would repeat all of the signature.
    BatchT_co = TypeVar("BatchT_co", covariant=True, default=MiniBatch)
else:
    from typing import TypeVar

    BatchT_co = TypeVar("BatchT_co", covariant=True)

__all__ = ["Loader"]

BATCH_SIZE = 1000
MOST_AHEAD = 16  # batches, with prefetch="auto"
_NO_WORKERS = "A DataLoader over it takes num_workers=0: the loader has threads of its own (threads=, prefetch=)"


def _release(held: list[Reservation]) -> None:
    while held:
        held.pop().release()


class Loader(ShownAsTables, IterableDataset[BatchT_co]):
    """Iterate over mini-batches of a graph; each ``for`` loop is one epoch.

    Parameters
    ----------
    g : OutOfCoreGraph or PackedGraph
        A PackedGraph is a pack in place of its dataset, for ``strategy="packed"``; it has the labels that the pack carries.
    sampler : Sampler
        :class:`~featstore.NeighborSampler`, :class:`~featstore.LaborSampler`, or any object with their
        ``sample(seeds, epoch=, index=)``, thread-safe and a pure function of its arguments; or a callable that takes the seeds.
        The sampler may return any form of ``(input_ids, blocks)``, see :mod:`featstore.sampling.foreign`; each batch of a
        foreign sampler is checked. A sampler of another graph is refused, as far as its attributes ``graph`` and ``num_nodes``
        tell; a dataset that was opened twice is one graph.
    seeds : integer array or tensor, shape (n,), or boolean mask, shape (num_nodes,), or Batches
        Nodes of the losses; or an object that divides seeds into batches, such as :class:`~featstore.RandomBatches` or
        :class:`~featstore.PartitionBatches`, in place of ``batch_size``, ``shuffle``, ``seed`` and ``drop_last``. In a graph of
        several types ``(type, ids)`` or ``(type, mask)``; batches are then :class:`~featstore.HeteroMiniBatch`. A node may
        occur several times, as in a table of nodes and labels: each batch samples it once, and ``batch.seed_index`` says for
        each row of the labels which of ``batch.seeds`` it belongs to.
    batch_size : int, optional
        Seeds a batch; 1000 by default.
    features : str, sequence of str, or mapping of str to such
        Features to gather; the first is ``batch.x``. May be empty. In a graph of several types those of all types that have one
        of this name, or of the types that a mapping names.
    labels : str, sequence of str, None, array or tensor, shape (n_given, …), or mapping of str to such
        Node data for ``batch.labels``; the first is ``batch.y``. ``"auto"``: ``y`` if the graph has it, else none. Or rows
        beside the seeds, row ``i`` for the ``i``-th of them as they were given (of a mask, the ``i``-th true node): a table
        whose nodes occur with several labels. An array is ``batch.y``. They stay where they are, such as in a memory map, unless
        they are on a device. The memory budget counts neither them nor a batch's labels.
    edge_features : str, sequence of str, or mapping of (str, str, str) to such
        Edge features to gather into ``batch.edge_features``, by type as ``features``. The sampler must number edges
        (``edges=True``); so must the sampler of a pack.
    strategy : str, Strategy or class
        The strategy that supplies batches and plans their rows: :class:`~featstore.OnDemand`, :class:`~featstore.Superbatch`,
        :class:`~featstore.Ginex`, :class:`~featstore.Streamed`, :class:`~featstore.Packed`, :class:`~featstore.Auto`, or a
        registered one. A name, such as ``"superbatch"``, is that strategy with its default options. ``"auto"``, the default,
        takes the strategy that is estimated to need least time for ten epochs; it may write run files. A strategy that runs a
        pack has a sampler and seeds of its own. All others but Ginex keep neighbour lists in memory, on loan, if the graph
        keeps none, and if sampling would read more bytes of the lists than they take in memory.
    prefetch : int or "auto"
        Batches made ahead of the one that the loop holds; fewer if memory is short. 0: everything runs in the caller's thread.
        ``"auto"``: one more each time the loop waits while memory is free, 16 at most; one fewer when all were ready for long.
    threads : int or mapping of str to int, optional
        Threads by stage: ``{"sample": 2, "gather": 1, "read": 1}`` samples two batches at once, copies rows in one thread, and
        reads in one thread, so that cores are left for computing. An int is for sampling alone. By default the threads of the
        graph. ``"read"`` bounds the reads of the whole dataset while the loader lives. With io_uring it bounds the queues in
        use at once, each driven by one thread with many reads in flight; with pread it bounds the threads.
    shuffle : bool
        A new order of the seeds each epoch, a function of ``seed`` and the epoch.
    seed : int
    device : str or torch.device
        Device to which batches are delivered. For a device other than the CPU a thread of its own copies a batch, while the
        next one is gathered. RuntimeError if the device is not available.
    device_cache : int, str, float or DeviceCache, optional
        Rows that stay on ``device``, so that only other rows are copied to it. Its size is bytes for all features together
        (``"8GiB"``), a share of the rows (``"10%"`` or ``0.1``), or ``"auto"``, the device's memory that the first step leaves
        free; 0: none. The rows are those of highest degree, or of highest score under another static policy
        (:class:`~featstore.DeviceCache`); for a pack, those that its layout has chosen. Features of types that do not share
        their rows get the same share of them. The host cache serves the other accesses alone; a static host cache has the next
        best rows. With ``device="cpu"`` the budget counts the rows.
    drop_last : bool
        Leave out a last batch that is not full.
    history : History, optional
        Historical embeddings: nodes of the seeds' own hop with a recent embedding are not expanded. The loop must call
        ``batch.history.merge`` for each batch. A history needs a :class:`~featstore.NeighborSampler` or
        :class:`~featstore.LaborSampler` of two hops or more, and allows one epoch at a time.
    rank, world_size : int, optional
        This process and the number of those that train together; by default those of torch's process group, or of one process.
        In each step every rank has one batch, of up to ``batch_size`` seeds: rank ``r`` the batches ``r``, ``r + world_size``, …
        of those that one process would have, bit for bit. All ranks have as many. The last step's seeds are divided evenly. A
        pack's batches are divided as they are: each rank has as many consecutive ones.

    Raises
    ------
    OptionError
        The policy of ``device_cache`` is not static, or is given for a pack; an option of the strategy does not suit this
        loader.
    ValueError
        A value is out of range; the sampler is of another graph; a sampler or seeds are given to a strategy that has its own; the
        seeds of the last step are fewer than the ranks; the ranks cannot have as many of a pack's batches each.
    NotImplementedError
        The graph has several types, and the strategy, the sampler or an option does not take them.
    TypeError
        A value is of the wrong type.
    BusyError
        From the loop: another epoch with this history is running; or another epoch runs a pack without its dataset.
    BudgetError
        The cache exceeds the graph's budget. From the loop: a batch does not fit; ``needed`` is a budget that suffices. The
        loop still holds one batch while it asks for the next, so two must fit.
    PluginError
        From the loop: the sampler returned no batch of this graph, or the strategy returned another batch than the one asked
        for.

    Warns
    -----
    FeatstoreWarning
        ``drop_last`` leaves out the only batch.

    Notes
    -----
    Batches are bit-identical for any threads, prefetch, cache, strategy and budget. When the loop ends early, by an exception,
    Ctrl-C or the garbage collector, the threads stop and batches made ahead are freed. Every iterator is one epoch, which begins
    with its first batch: ``iter(loader)`` alone takes neither an epoch's number nor memory nor caches. Several epochs may run at
    once, each with its own threads; they share the caches.

    Plans change the features' caches. While an epoch of any strategy but ``"ondemand"`` runs, another such epoch of the graph on
    the same features, of any loader, reads on demand through these caches. If the epochs run in turn, each loader makes its
    caches anew in place of the other loader's. A loader must not be used across a fork: make it in the child.
    """

    def __init__(
        self,
        g: OutOfCoreGraph | PackedGraph,
        sampler: Sampler | None = None,
        seeds: torch.Tensor | npt.NDArray[Any] | Sequence[int] | Batches | tuple[str, Any] | None = None,
        batch_size: int | None = None,
        features: str | Sequence[str] | Mapping[str, Any] = ("x",),
        labels: str | Sequence[str] | torch.Tensor | npt.NDArray[Any] | Mapping[str, Any] | None = "auto",
        strategy: str | Strategy | type[Strategy] = "auto",
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        device_cache: int | float | str | DeviceCache | None = None,
        prefetch: int | str = 2,
        threads: int | Mapping[str, int] | None = None,
        edge_features: str | Sequence[str] | Mapping[Any, Any] = (),
        history: History | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        refuse_path(g)
        self._rank, self._world_size = check_ranks(rank, world_size, process_group())
        self._strategy = get_strategy(strategy)
        target = numbered(check_device(device))
        # The others wait for rank 0 no longer than it takes to fail, wherever it does.
        ranks = (self._rank, self._world_size) if self._strategy.chooses else (0, 1)
        with ChosenByFirst[Any](ranks, target) as first:
            self._g, self._sampler = cast(Any, g), sampler
            sampling, copying, reading = stage_threads(threads, g.options.threads)
            self._types, kind = types_of(g), None
            if self._types is None:
                nodes = Domain.of_nodes(g, check_features(g, features))
                edges = Domain.of_edges(g, check_edge_features(g, edge_features, sampler))
            else:
                check_typed(self._types, self._strategy, sampler, history)
                if seeds is not None:  # else those of a pack
                    kind, seeds = seeds_of_type(self._types, seeds)
                nodes = domain_of(g, self._types, features, self._strategy)
                edges = Domain.of_edges(g, edge_features_of(g, self._types, edge_features, sampler), self._types)
            context = partial(
                Context,
                g,
                threads=sampling,
                copy_threads=copying,
                nodes=nodes,
                edges=edges,
                device=target,
                prefetch=check_prefetch(prefetch, sampling),
                has_types=self._types is not None,
                first=first,
            )
            cache = None if device_cache is None else DeviceCache.of(device_cache)
            self._held: list[Reservation] = []
            self._finalizer = weakref.finalize(self, _release, self._held)
            self._iterators: Living[RunningEpoch] = Living()  # the epochs that have begun
            self._beginning = threading.RLock()
            self._adapts = prefetch == "auto"
            self._asked = None if self._adapts else cast(int, prefetch)
            self._closed = False
            self._pid = os.getpid()
            self._history: History | None = None
            options = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
            batches = self._batches_of(sampler, seeds, batch_size, history, target, **options)
            self._close_tier: Callable[[], object] = _nothing
            self._unbound_reads: Callable[[], object] = _nothing
            self._close_history = _nothing if self._history is None else finalize_here(self, self._history.detach)
            self._close_batches = finalize_here(self, batches.close)
            try:
                if reading is not None:
                    self._unbound_reads = finalize_here(self, g.reader.unbound, id(self))
                    g.reader.bound(id(self), reading)
                if self._types is not None and kind is None:
                    kind = seed_type_of(self._types, batches, self._strategy)
                self._kind = kind
                self._labels = labels if isinstance(labels, SeedLabels) else SeedLabels(g, labels, kind)
                self._labels.attach(batches)
                asked = context(batches, labels=self._labels.fields, has_history=history is not None)
                with memory_errors():
                    self._make_runner(asked, cache, history)
            except BaseException:
                self._release_all(failed=True)
                raise

    # Set-up.

    def _batches_of(
        self, sampler: Any, seeds: Any, batch_size: int | None, history: History | None, device: torch.device, **options: Any
    ) -> SampledBatches:
        """Return the strategy's own batches, or those that the sampler draws; attach the history last."""
        g = self._g
        if batch_size is not None:
            batch_size = check_at_least("batch_size", batch_size, 1)
        options["seed"] = check_at_least("seed", options["seed"], 0)
        options |= {name: check_flag(name, options[name]) for name in ("shuffle", "drop_last")}
        name = self._strategy.name
        found = checked_batches(self._strategy, self._strategy.batches(g, batch_size=batch_size, **options))
        if found is not None:
            if sampler is not None or seeds is not None:
                found.close()
                raise ValueError(f"strategy {name!r} runs the samples of a pack, and takes no sampler and no seeds")
            if history is not None:
                found.close()
                check_history(history, self._strategy, None)
            try:
                return found if self._world_size == 1 else found.share(self._rank, self._world_size)
            except BaseException:
                found.close()
                raise
        if isinstance(g, PackedGraph):
            raise ValueError(f"a PackedGraph has no sampler and no seeds: strategy {name!r} needs its dataset")
        if sampler is None or seeds is None:
            raise ValueError(f"strategy {name!r} needs a sampler and seeds; np.arange(g.num_nodes) are all nodes")
        batches = as_batches(seeds, batch_size, BATCH_SIZE, **options)
        batches.check(g.num_nodes)
        checked = checked_sampler(sampler, g.num_nodes, g)
        check_parts_of_ranks(batches, self._world_size, checked.fanouts)
        check_part(g, batches, checked, self._rank, self._world_size)
        share = batches if self._world_size == 1 else ShareOfBatches(batches, self._rank, self._world_size)
        if history is None:
            return Drawn(checked, share, macro_lists(g, checked, batches))
        check_history(history, self._strategy, checked, device)
        lists = macro_lists(g, checked, batches)
        try:
            history.attach(g)
        except BaseException:
            if lists is not None:
                lists.close()
            raise
        self._history = history
        return Drawn(checked, share, lists, history.times)

    def _make_runner(self, context: Context, cache: DeviceCache | None, history: History | None) -> None:
        """Divide the memory in order: the loader's own tables, the rows on the device, the strategy's runner."""
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
        except BudgetError as error:  # batches and the strategy's memory, which is not known yet, come on top
            error = Memory(context, caches=self._order_bytes(context)).too_small(error)
            raise BudgetError(error.reason, (error.needed or 0) * 3 // 2) from None
        self._runner = checked_runner(self._strategy, self._strategy.run(context))
        given = self._close_batches
        self._close_batches = finalize_here(self, self._runner.context.batches.close)  # maybe the strategy's view of them
        given.detach()
        if divide is not None:  # in case the strategy has not called it, as it sizes no caches
            divide(self._runner.context, self._runner.memory, None, get_policy("frequency"))
        self._windows = describe_windows(self._runner.context, self._runner.memory)
        self._state = TrainingState(self._g, self._runner.context.batches)
        self._stages = Stages(self._runner.context, self._runner.memory, self._labels, self._history, self._types, self._kind)

    def _reserve_order(self, context: Context) -> None:
        """Reserve the seeds, the order of an epoch, the labels and the history, before a cache takes the rest."""
        g = self._g
        self._labels.check_lengths()
        self._held.append(g.budget.reserve("loader order", context.batches.nbytes))
        if self._history is not None and not self._history.is_open:
            self._history.make(g, context.device)

    def _order_bytes(self, context: Context) -> int:
        """Compute the bytes of the seeds, the order of an epoch, the labels and the history."""
        history: int = 0 if self._history is None else self._history.needed_bytes(self._g, context.device)
        labels: int = sum(map(self._g.data_bytes, context.labels))
        return context.batches.nbytes + labels + history

    def _display(self) -> Display:
        if not hasattr(self, "_stages"):
            return Display("<Loader, not made>")  # its constructor raised
        is_here = os.getpid() == self._pid  # else other threads of the parent may have held the locks of the counts
        state = ", closed" if self._closed else "" if is_here else ", of the parent process"
        n, size = len(self), self._runner.context.batches.batch_size
        title = f"Loader({self._g.path!r}, {n:,} batch{'es' * (n != 1)} of {size}{state})"
        is_used = is_here and not self._closed and not self._g.closed
        return Display(title, [Table(("", ""), [*self._show_options(), *(self._show_use() if is_used else [])])])

    def _show_options(self) -> list[tuple[str, str]]:
        """List what the loader was made with."""
        context = self._runner.context
        given = {
            "sampler": self._sampler,  # a pack has samples
            "features": list(context.features),
            "edge features": list(context.edges.stores) or None,
            "labels": list(self._labels),
            "strategy": self._strategy,
            "history": self._history,
            "device": str(context.device),
            "rank": None if self._world_size == 1 else f"{self._rank} of {self._world_size}",
        }
        return [(name, described(value)) for name, value in given.items() if value is not None]

    def _show_use(self) -> list[tuple[str, str]]:
        """List what the loader has done, and the memory that it does it in."""
        budget, stores = self._g.budget, self._runner.context.nodes.stores
        rows = [*show_counts(self.stats()), ("memory", f"{format_size(budget.used)} of {format_size(budget.total)} held")]
        return rows + [(f"cache of {name!r}", cache_text(store.cache)) for name, store in islice(stores.items(), MOST_ROWS)]

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Loader cannot be pickled or copied: its threads, caches and run files are its process's own. The graph, its "
            "stores and samplers travel to workers; a loader is made where it is used, and its state_dict() says where it stands"
            f". {_NO_WORKERS}"
        )

    # Iteration.

    @property
    def dataset(self) -> Loader[BatchT_co]:
        """The loader itself: frameworks look here for an ``IterableDataset``, whose batches they leave as they are."""
        return self

    @property
    def sampler(self) -> Sampler | None:
        """The sampler that was given; None if the batches are those of a pack."""
        return self._sampler

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return len(self._runner.context.batches)

    def __iter__(self) -> Iterator[BatchT_co]:
        """Return an iterator over the next epoch, or over the rest of the epoch that :meth:`load_state_dict` restored.

        The epoch begins with the first ``next()``: only then the iterator takes the epoch's number, memory and threads, and the
        features' caches.
        """
        self._check_open()
        return cast("Iterator[BatchT_co]", EpochIterator(self._begin_epoch))

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the loader is closed; it was of {self._g.path}")
        if os.getpid() != self._pid:
            advice = "make one in this process" if get_worker_info() is None else _NO_WORKERS
            raise ClosedError(f"the loader belongs to the parent process: {advice}")

    def _begin_epoch(self) -> RunningEpoch:
        """Begin the next epoch; after an error it is still the next one."""
        self._check_open()  # before the lock, which another thread may have held at a fork
        with self._beginning:  # two iterators that begin at once get different epochs
            self._check_open()
            if self._history is not None:
                self._history.check_idle()
            position = replace(self._state.next)
            try:
                run = self._runner.prepare(position.epoch, position.batch)
            except StopIteration as error:  # would end the loop without an error
                raise PluginError(f"strategy {self._strategy.name!r}: prepare raised {error!r}") from error
            run = checked_epoch(self._strategy, run, self._runner.context, self._types, position.batch)
            try:
                depth = self._runner.prefetch
                most = MOST_AHEAD if self._adapts and depth > 1 else depth  # not where memory was short from the start
                n_numbers = self._runner.context.batches.n_numbers
                check = batch_check(self._strategy.name, n_numbers, None if self._sampler is None else position.epoch)
                running = RunningEpoch(run, self._stages, position, len(self), depth, self, most, check)
            except BaseException:
                run.close()
                raise
            self._state.begun(position)
            self._iterators.add(running)
            return running

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``for`` loop run ``epoch``, from its first batch; by default epochs count up from 0."""
        self._state.go_on(check_at_least("epoch", epoch, 0), 0)

    def state_dict(self, ahead: int = 0) -> dict[str, Any]:
        """Return the position of training: the epoch and the batch after the last one delivered, of all ranks together.

        ``ahead`` is the number of batches that were delivered, but that the training has not used yet, such as those that a
        framework takes ahead of its loop: they do not count, and are delivered again.

        The state is the same on all ranks. A loader with the same seeds and options takes it by :meth:`load_state_dict`; its
        next ``for`` loop runs the rest of the epoch. The number of ranks may then be another one, except with a pack, with
        :class:`~featstore.PartBatches`, and with a strategy that runs batches in another order.

        Batches that were only made ahead do not count, nor does an iterator whose first batch was not asked for. With several
        running iterators, the position is that of the last one begun.
        """
        return self._state.to_dict(check_at_least("ahead", ahead, 0))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position that :meth:`state_dict` returned. The sampler is not in the state: give the same one.

        Raises
        ------
        ValueError
            The state is of another graph, or of a loader with other batches: other seeds, ``batch_size``, ``shuffle``, ``seed``
            or ``drop_last``; it needs as many ranks as before, or ends within a step of fewer seeds than there are ranks.
        """
        self._state.restore(state)

    def stats(self) -> LoaderStats:
        """Return the loader's counts and seconds since it was made.

        Returns
        -------
        dict
            It prints as tables, with advice on what to change first, and pickles as a plain dictionary.

            ``batches``; ``rows`` asked for, ``rows_loaded`` from storage, ``hits`` (rows by tier; ``base`` are the loaded ones),
            ``hits_lost`` (rows planned as hits of the host cache, but loaded, because the budget had taken their memory back),
            ``epochs_beside`` (epochs read on demand, because the caches followed another epoch's plans), ``lists`` (how many
            neighbour lists are in memory, or why none), ``bytes_requested``, ``bytes_read`` and ``reads`` of the features, by
            this loader alone; ``prefetch``, the batches now made ahead (fewer than asked for, once memory was short); ``seconds``
            by stage; ``hidden``, the share of the seconds of loading that the loop did not wait for.

            If superbatches are planned, ``superbatch``: its ``batches``, the number ``of`` batches in an epoch, and, if
            streamed, the ``passes`` over the features in an epoch. With rows on the device ``device_cache``: ``rows`` of all
            columns together and ``bytes`` of all, or ``why`` there are none. With :class:`~featstore.Auto` ``auto``: ``taken``,
            ``reason``, and the ``estimates`` of all strategies. With a pack ``layout``: its ``name``, and whether it was ``made``
            for this loader; ``layouts``, a list of these, if types of nodes do not share their rows. With edge features
            ``edge_features``: the reads of these alone, by the same names, and the stage ``edges``. With
            ``EpochSampler(window="auto")``, or batches that ``"auto"`` draws at once, ``windows``: ``batches`` of one, ``of`` an
            epoch, ``passes`` over lists a hop, and ``advice``. With a history ``history``: ``nodes`` and ``bytes`` of its table,
            rows ``pulled`` and ``pushed``, and, if the loader chose the nodes, the ``split`` of the memory.

        Notes
        -----
        Stages: ``sample``; ``gather`` (reading rows and copying hits); ``update`` (copying rows into the cache); ``labels``;
        ``transfer`` (copies to the device and assembly there, in a thread that only loaders for a device, or with a
        ``device_cache``, have); ``wait`` (the loop waited for a batch); ``cache`` (making the cache); ``presample`` (sampling for
        counts); ``auto`` (choosing a strategy); ``split`` (choosing a history's nodes).

        On demand, the seconds of ``sample`` are added over threads. A superbatch is sampled by several threads at once, and its
        seconds are those of the clock. ``plan`` is making its changesets, ``pack`` copying rows into extents, ``load`` reading
        samples and changesets back. ``read`` is the part of ``gather`` that waits for extents. Stages run beside each other and
        beside the loop, so their seconds may add up to more than the clock's.
        """
        depths = [epoch.depth for epoch in self._iterators]
        context = self._runner.context
        of_edges = {"edge_features": context.edges.reads.total()} if context.edges.stores else {}
        return LoaderStats(
            {
                **of_edges,
                **({} if self._history is None else {"history": self._history.stats()}),
                **({} if context.lists is None else {"lists": context.lists}),
                **context.counts.total(),
                **context.nodes.reads.total(),
                "prefetch": min(depths, default=self._runner.prefetch),
                "seconds": context.timer.seconds(),
                "hidden": self._stages.overlap.hidden,
                **describe(context.on_device),
                **self._windows,
                **checked_stats(self._strategy, self._runner),
            },
            self._asked,
        )

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the statistics: seconds by stage, and rows by the tier that served them.

        Parameters
        ----------
        path : path-like, optional
            Picture to write; its ending says the format, such as ``.png`` or ``.svg``.

        Returns
        -------
        matplotlib.figure.Figure
            A notebook shows it. pyplot does not know it, so it needs no closing.

        Raises
        ------
        MissingExtraError
            matplotlib, the extra ``plot``, is not installed.
        ValueError, OSError
            matplotlib lacks the format, or the picture cannot be written.
        """
        return draw_stats(self.stats(), repr(self._strategy), path)

    # The end.

    def close(self) -> None:
        """Stop all iterators; they raise ClosedError from now on. The cache stays with the graph. May be called again."""
        self._close(failed=False)

    def _close(self, failed: bool) -> None:
        self._closed = True
        if os.getpid() != self._pid:
            return  # threads and run files belong to the parent process, which still uses them
        with self._beginning:  # an epoch that is beginning is closed, too
            running = list(self._iterators)
        for epoch in running:
            epoch.close()
        self._release_all(failed)

    def _release_all(self, failed: bool) -> None:
        with ExitStack() as stack:  # calls all of them, the last first, even if one raises
            stack.callback(self._finalizer)
            stack.callback(self._unbound_reads)
            if hasattr(self, "_labels"):
                stack.callback(self._labels.forget)
            if failed and not hasattr(self, "_stages") and self._history is not None:
                stack.callback(self._history.forget)
            stack.callback(self._close_history)
            stack.callback(self._close_batches)
            stack.callback(self._close_tier)
            if hasattr(self, "_runner"):
                stack.callback(self._runner.memory.close)
                stack.callback(self._runner.close, failed)

    def __enter__(self) -> Loader[BatchT_co]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close(failed=kind is not None)


def _nothing() -> None:
    pass
