"""The loader: batches for a training loop, sampled and gathered ahead by threads, within the memory budget."""

from __future__ import annotations

import hashlib
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy.typing as npt
import torch

from featstore.cache.base import Policy, get_policy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.config import Budget, Living, Reservation, check_at_least, parse_cache_size
from featstore.errors import BudgetError, ClosedError
from featstore.gather.device import check_device
from featstore.partition.batcher import RandomBatcher, check_seeds
from featstore.plan.offline import Pack
from featstore.plan.packgraph import PackedGraph
from featstore.run.actual import Epochs
from featstore.run.auto import Decision, decide, look_ahead, rows_in_memory
from featstore.run.batch import MiniBatch
from featstore.run.epoch import EpochIterator, Progress, RunningEpoch, most_rows
from featstore.run.needs import Needs, foresee, guess, is_tight, measure, too_small
from featstore.run.options import (
    BATCH_SIZE,
    LABELS,
    check_flag,
    check_names,
    check_pack,
    check_strategy,
    parse_planning,
    parse_share,
)
from featstore.run.owncaches import make_room, row_bytes
from featstore.run.packed import Packed
from featstore.run.precache import AccessCounts, cache_bytes, device_rows, size_for_pack, spare_bytes
from featstore.run.prefetch import ReadCounts, Stopwatch
from featstore.run.profile import FrozenSampler, Profile
from featstore.run.stages import Stages
from featstore.run.strategies import SAMPLING, STRATEGIES
from featstore.run.strategy import Planning, Setup
from featstore.sampling.batch import Sampler
from featstore.sampling.foreign import checked_sampler

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["Loader"]


def _release(held: list[Reservation]) -> None:
    while held:
        held.pop().release()


class Loader:
    """Iterate over mini-batches of a graph, an epoch a ``for`` loop.

    Parameters
    ----------
    g : OutOfCoreGraph or PackedGraph
        The latter, a pack in place of its dataset, for ``strategy="packed"``; ``pack`` is then the default, and the
        labels are those that it carries.
    sampler : Sampler
        :class:`~featstore.NeighborSampler`, or anything with its ``sample(seeds, epoch=, index=)``, thread-safe and a pure
        function of its arguments, or a callable that is given the seeds. It may return any form of ``(input_ids, blocks)``, see
        :mod:`featstore.sampling.foreign`; each batch of another's sampler is checked. A sampler of another graph is refused, as
        far as its attributes ``graph`` and ``num_nodes`` tell; a dataset that was opened twice is one graph.
    seeds : integer array or tensor, shape (n,), or boolean mask, shape (num_nodes,)
        Distinct nodes that losses are taken over.
    batch_size : int, optional
        Seeds a batch; 1000 by default.
    features : str or sequence of str
        Features to gather; the first is ``batch.x``. May be empty.
    labels : str or None
        Node data that gives ``batch.y``.
    strategy : str
        ``"ondemand"``: sample a batch when its turn comes, and read the rows that the host cache lacks. ``"superbatch"``: sample
        many batches ahead to disk, plan the cache over them, then gather (Ginex, VLDB 2022, with look-ahead). ``"streamed"``: the
        same, and copy what the cache will lack into extents that are read sequentially. ``"packed"``: run ``pack``'s samples,
        from extents that are made once (DiskGNN, SIGMOD 2025, with ``policy="frequency"``; Belady-packed by default). ``"auto"``:
        whichever of them, and which policy, is estimated to take least for ``epochs``; ``stats()["auto"]`` says which, and why.
    policy : str, Policy or class, optional
        Policy of the feature cache; ``"degree"`` where only ``feature_cache`` is given. ``"frequency"`` samples the first epoch
        once to count. ``"superbatch"`` takes a planned policy, by default ``"belady"``. ``"auto"`` chooses the policy itself.
    memory : int or str, optional
        Most bytes that batches in flight, those handed out, and the cache that this loader makes may take: a share of the graph's
        budget. By default what the graph has left. The size of a sample is known once it is drawn: one a thread may lie beyond
        the share until it is counted or dropped, never beyond the graph's budget.
    feature_cache : int, str, float or "auto", optional
        Make a host cache for the features, as ``g.cache`` does: bytes (``"1GiB"``; 0: none), or a share of the rows (``"10%"`` or
        ``0.1``), the same rows for all features; ``"auto"`` (the default where ``policy`` is given): what batches leave of the
        memory. A number below 4,096 without a unit is refused.
    superbatch : int or "auto", optional
        Batches a superbatch. The default, ``"auto"``, takes as many as the disk and an eighth of the memory allow, 200 at most.
        Static policies, which plan nothing, have none.
    overlap : bool, optional
        For ``"superbatch"``. True, the default: sample and plan the next superbatches beside the loop, the cache surviving from
        one to the next. False is the paper's serial schedule: each superbatch is sampled and planned when the one before has run,
        with a neighbour cache in the memory of the feature cache, which is then filled with the rows that are used first. It
        needs less memory (one cache or the other, half the plans), and the loop waits meanwhile.
    disk : int or str, optional
        Most bytes of run files at once (about four superbatches' samples and plans, two's extents), or a multiple of the features
        that are loaded (``"1.5x"``); a quarter of the free disk if absent. For ``"packed"``: most bytes of the layout that is
        made, or run, with the labels that are brought beside it, whatever else the pack holds; no bound if absent.
    pack : Pack or path-like, optional
        For ``"packed"``: what :func:`~featstore.sample_offline` made; ``sampler``, ``seeds`` and ``batch_size`` are its own. The
        layout for these ``features``, ``policy``, ``feature_cache`` and ``superbatch`` is made in its directory, within ``disk``,
        where it has none; with a static policy, segments of batches share rows where ``disk`` is too small for an extent a batch.
        Without ``feature_cache`` the one it has is taken; ``"auto"`` takes the largest host tier of its layouts that fits, or,
        where it has none, half of the memory that batches leave. Epoch ``e`` runs the pack's epoch ``e`` modulo how many it has.
        With ``shuffle`` batches run in a new order each epoch, with a planned policy those of a superbatch together.
    epochs : int, optional
        How many epochs are to come, for ``"auto"``; 1 by default. What is done once is spread over them.
    run_dir : path-like, optional
        Where run files go, in a directory of their own that is removed afterwards, and after a crash by the next run;
        ``<dataset>.runs`` beside the dataset by default. A relative path counts from the working directory in which the loader is
        made.
    prefetch : int or "auto"
        Batches made ahead of the one that the loop holds; less where memory is short. 0: everything runs in the caller's thread.
    threads : int, optional
        Batches sampled at once; by default the threads of the graph.
    shuffle : bool
        A new order of the seeds each epoch, a function of ``seed`` and the epoch.
    seed : int
    device : str or torch.device
        Where batches are delivered: to others than the CPU by a thread of its own, while the next batch is gathered. RuntimeError
        where it is not available.
    device_cache : int, str or float, optional
        For ``"packed"``, and ``"auto"`` with a pack: the rows that most batches need, or that a static ``policy`` scores highest,
        stay on ``device``, and the others alone cross to it: bytes for all features together (``"8GiB"``), or a share of the
        rows (``"10%"`` or ``0.1``). The host's cache has the next ones. With ``device="cpu"`` they are counted in the budget.
    drop_last : bool
        Leave out a last batch that is not full.

    Raises
    ------
    ValueError
        An option was given that the strategy does not take (``featstore.run.options.TAKEN_BY``), or a value out of range;
        the sampler is of another graph.
    TypeError
        A value is of the wrong type.
    BusyError
        Another loader is in the middle of an epoch of plans for these features.
    BudgetError
        The cache or ``memory`` is beyond the graph's budget. A batch that does not fit raises it from the loop; ``needed`` is the
        least budget that does. The loop still holds one batch while it asks for the next, so two must fit.
    PluginError
        From the loop: the sampler returned what is no batch of this graph.

    Notes
    -----
    Batches are the same, bit for bit, whatever the threads, the prefetch, the cache, the strategy and the budget. Leaving the
    loop early, an exception, Ctrl-C or the garbage collector stops the threads and frees what was made ahead. Every iterator is
    one epoch, which begins with its first batch: ``iter(loader)`` alone takes neither an epoch's number nor memory nor caches.
    Several epochs may run at once, each with its own threads; they share the cache. But plans have the features' cache to
    themselves: while an epoch of any strategy but ``"ondemand"`` runs, another such epoch on the same features, of this loader
    or of another one of the graph, raises BusyError; in turn they run, and each makes its cache anew where the other's is. Not
    for use across a fork: make the loader in the child.
    """

    def __init__(
        self,
        g: OutOfCoreGraph | PackedGraph,
        sampler: Sampler | None = None,
        seeds: torch.Tensor | npt.NDArray[Any] | Sequence[int] | None = None,
        batch_size: int | None = None,
        features: str | Sequence[str] = ("x",),
        labels: str | None = LABELS,
        strategy: str = "ondemand",
        policy: str | Policy | type[Policy] | None = None,
        memory: int | str | None = None,
        feature_cache: int | float | str | None = None,
        superbatch: int | str | None = None,
        overlap: bool | None = None,
        disk: int | str | None = None,
        pack: Pack | str | os.PathLike[str] | None = None,
        epochs: int | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        prefetch: int | str = 2,
        threads: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        device: torch.device | str = "cpu",
        device_cache: int | float | str | None = None,
        drop_last: bool = False,
    ) -> None:
        if isinstance(g, PackedGraph):
            pack, labels = g.path if pack is None else pack, None if labels is LABELS and "y" not in g.node_data else labels
        given: dict[str, object] = {"policy": policy, "superbatch": superbatch, "overlap": overlap, "disk": disk}
        given |= {"run_dir": run_dir, "pack": pack, "device_cache": device_cache, "epochs": epochs}
        check_strategy(strategy, sampler=sampler, seeds=seeds, is_packed_graph=isinstance(g, PackedGraph), given=given)
        is_auto = strategy == "auto"
        epochs = 1 if epochs is None else epochs
        check_at_least("epochs", epochs, 1)
        check_flag("shuffle", shuffle)
        check_flag("drop_last", drop_last)
        if feature_cache is not None and feature_cache != "auto":
            feature_cache = parse_cache_size(feature_cache, "feature_cache")
        if device_cache is not None:
            device_cache = parse_cache_size(device_cache, "device_cache")
        if threads is None:
            threads = g.options.threads
        check_at_least("threads", threads, 1)
        if prefetch == "auto":
            prefetch = max(2, threads)
        if isinstance(prefetch, str):
            raise ValueError(f"prefetch must be a number of batches or 'auto', not {prefetch!r}")
        check_at_least("prefetch", prefetch, 0)
        if batch_size is not None:
            check_at_least("batch_size", batch_size, 1)
        check_at_least("seed", seed, 0)
        self._g = cast(Any, g)
        self._features = check_names("features", [features] if isinstance(features, str) else features, g.features)
        self._labels = None if labels is None else check_names("labels", [labels], g.node_data)[0]
        self._device = check_device(device)
        self._threads = threads
        self._prefetch = prefetch
        self._row_bytes = {name: row_bytes(g.features[name]) for name in self._features}
        opened = pack is not None and not isinstance(pack, Pack)
        self._pack = pack = Pack(pack) if pack is not None and not isinstance(pack, Pack) else pack
        self._close_pack = weakref.finalize(self, pack.close) if opened and pack is not None else None
        if pack is None:
            checked, batch_size = check_seeds(cast(Any, seeds), g.num_nodes), BATCH_SIZE if batch_size is None else batch_size
        else:
            check_pack(pack, batch_size, drop_last)
            checked, batch_size = torch.arange(pack.n_batches), 1  # the order of the batches
        batcher = RandomBatcher(checked, batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
        self._batcher = batcher
        self._share = parse_share(memory, g.budget)
        order_bytes = 8 * len(checked) + batcher.order_bytes
        self._held: list[Reservation] = []
        refused: BudgetError | None = None
        more = 0
        try:
            if self._labels is not None and len(g.node_data[self._labels]) != g.num_nodes:  # before a cache takes the rest
                raise ValueError(f"labels: {labels!r} has {len(g.node_data[self._labels])} entries for {g.num_nodes} nodes")
            self._held.append(g.budget.reserve("loader order", order_bytes))
        except BudgetError as error:
            refused, more = error, order_bytes + (0 if self._labels is None else g.data_bytes(self._labels))
        self._finalizer = weakref.finalize(self, _release, self._held)
        self._watch = Stopwatch()
        self._reads = ReadCounts()
        self._next_epoch = 0
        self._next_start = 0
        self._progress = Progress(0, 0)
        self._iterators: Living[RunningEpoch] = Living()  # of epochs that have begun
        self._beginning = threading.RLock()
        self._closed = False
        self._pid = os.getpid()
        self._is_auto_size = feature_cache == "auto" or (is_auto and feature_cache is None)
        self._auto: dict[str, Any] | None = None
        self._epochs: Epochs | None = None
        self._profile: Profile | None = None
        self._frozen: FrozenSampler | None = None
        planning_for = partial(
            parse_planning,
            g,
            sum(self._row_bytes.values()),
            superbatch=superbatch,
            overlap=overlap,
            disk=disk,
            run_dir=run_dir,
            is_auto=is_auto,
        )
        try:
            sampler = None if sampler is None else checked_sampler(sampler, g.num_nodes, g)
            n_device = None if device_cache is None else device_rows(device_cache, g.num_nodes, self._row_bytes)
            setup = Setup(
                g,
                sampler,
                batcher,
                self._features,
                threads,
                self._watch,
                self._reads,
                pack=pack,
                device=self._device,
                device_rows=n_device,
                labels=self._labels,
                prefetch=prefetch,
            )
            if refused is not None and (sampler is None or is_auto):
                raise too_small(refused, guess(g, sampler, batch_size, sum(self._row_bytes.values()), more)) from None
            if strategy != "ondemand" or feature_cache is not None or policy is not None:
                make_room(g, self._features)  # the caches of this loader come in the place of those that are there
            if is_auto:
                feature_cache = "auto" if feature_cache is None else feature_cache
                if pack is not None and feature_cache == "auto":
                    feature_cache = self._of_pack(setup, pack)
                ahead = planning_for("superbatch" if pack is None else "packed", None)
                decision = self._decide(setup, cast(Planning, ahead), feature_cache, epochs)
                strategy, policy, self._auto, self._profile = (
                    decision.strategy,
                    decision.policy,
                    decision.record,
                    decision.profile,
                )
                miss_share = decision.miss_share
                feature_cache = None if policy is None else feature_cache
                if decision.choice is not None:
                    self._epochs = Epochs(decision.choice, len(self._features), len(batcher))
            planning = planning_for(strategy, policy)
            most = 0 if sampler is None else most_rows(sampler, batch_size, g.num_nodes)
            if (
                refused is not None
                or strategy in ("superbatch", "streamed")
                or (
                    strategy == "ondemand"
                    and not is_auto
                    and (feature_cache is not None or policy is not None or is_tight(g, most, sum(self._row_bytes.values())))
                )
            ):
                asked = replace(setup, planning=planning)
                if pack is not None:
                    asked = replace(asked, sampler=FrozenSampler(pack, g.pool), pack=None)
                elif self._profile is not None:
                    asked = replace(asked, sampler=self._profile)
                setup = replace(setup, needs=self._needs(asked, strategy, feature_cache, policy, refused, more))
            if not is_auto and strategy == "streamed" and cast(Planning, planning).superbatch == "auto":
                self._profile, miss_share = look_ahead(setup, cast(Planning, planning), self._capacity(setup, feature_cache))
            if self._profile is not None:
                sampler = self._profile
                if planning is not None:
                    left = None if planning.disk is None else planning.disk - self._profile.n_bytes
                    planning = replace(planning, disk=left, miss_share=miss_share)
            if pack is not None and strategy != "packed":
                sampler = self._frozen = FrozenSampler(pack, g.pool)
                setup = replace(setup, pack=None)
            setup = replace(setup, sampler=sampler, planning=planning)
        except BaseException:
            self._release_all()
            raise
        self._setup = setup
        try:
            most = most_rows(setup.sampler, batch_size, g.num_nodes) if pack is None else int(pack.lengths.max(initial=0))
            self._stages = Stages(setup, self._row_bytes, self._share, most, self._frozen)
            self._strategy = STRATEGIES[strategy](setup)  # takes its memory before the cache does
            if planning is not None:
                policy = planning.policy
            if isinstance(self._strategy, Packed) and feature_cache is None:
                self._strategy.use_existing()
            elif feature_cache is not None or policy is not None:
                self._make_cache(feature_cache, policy)
        except BaseException:
            self._release_all()
            raise

    # Set-up.

    def _needs(
        self,
        setup: Setup,
        strategy: str,
        size: int | float | str | None,
        policy: str | Policy | type[Policy] | None,
        refused: BudgetError | None,
        more: int,
    ) -> Needs:
        """Ask for what all stages need at the least, before any of them begins; ``refused``: not even ``more`` bytes before."""
        sizes: dict[str, int] = {}
        chosen = get_policy("degree" if policy is None else policy) if setup.planning is None else setup.planning.policy
        n = self._g.num_nodes
        if size is not None and size != "auto" and self._features and n:
            sizes = cache_bytes(size, n, self._row_bytes, chosen, self._g.budget, 1 << 62)
        capacity = min((FeatureCache.capacity_for(sizes[name], self._row_bytes[name], n, chosen) for name in sizes), default=0)
        try:
            batch = measure(setup) if refused is None else foresee(setup)
        except BudgetError as error:
            batch, refused = foresee(setup), error
        made = SAMPLING[strategy]
        needs = Needs(
            setup,
            self._row_bytes,
            batch,
            made.least_bytes(setup, batch),
            sum(sizes.values()),
            capacity,
            plans=made.plans,
            is_measured=refused is None,
        )
        if refused is not None:
            guessed = guess(self._g, setup.sampler, setup.batcher.batch_size, sum(self._row_bytes.values()), more)
            raise too_small(refused, needs.least() + more if batch.n_rows else guessed) from None
        needs.check()
        return needs

    @property
    def _limit(self) -> Budget:
        """What this loader's batches and cache are held to: its share, or the graph's budget."""
        return self._g.budget if self._share is None else self._share

    @property
    def _room(self) -> int:
        """Bytes that are left to this loader."""
        whole: Budget = self._g.budget
        return min(whole.available, self._limit.available)

    @property
    def _room_with_loans(self) -> int:
        """Bytes that this loader may have, what others give back included."""
        whole: Budget = self._g.budget
        return min(whole.available + whole.on_loan, self._limit.available)

    def _capacity(self, setup: Setup, feature_cache: int | float | str | None) -> int:
        """Return the rows of a cache of that size."""
        return rows_in_memory(setup, feature_cache, self._row_bytes, self._limit, self._room, self._prefetch)

    def _of_pack(self, setup: Setup, pack: Pack) -> int | float:
        """Return the size of the cache for ``"auto"`` with a pack, where none is given."""
        frozen = replace(setup, sampler=FrozenSampler(pack, self._g.pool))
        return size_for_pack(frozen, self._row_bytes, self._room, self._prefetch)

    def _decide(self, setup: Setup, planning: Planning, feature_cache: int | float | str, epochs: int) -> Decision:
        """Choose strategy and policy for ``"auto"``."""
        with self._watch.time("auto"):
            try:
                capacity = self._capacity(setup, feature_cache)
            except BudgetError as error:
                if feature_cache == "auto":  # in the middle of the first batch: the error names what was asked for just then
                    self._needs(setup, "ondemand", None, None, error, 0)
                raise
            return decide(setup, planning, row_bytes=self._row_bytes, capacity=capacity, epochs=epochs)

    def _make_cache(self, size: int | float | str | None, policy: str | Policy | type[Policy] | None) -> None:
        """Make the host cache of every feature; policies that ask for counts get those of the first epoch."""
        on_loan = size is None or size == "auto"
        room = self._room if on_loan else self._room_with_loans
        if policy is None:
            policy = "degree"
        is_packed = isinstance(self._strategy, Packed)
        chosen = get_policy("belady" if is_packed else policy)  # packs: caches that follow plans, in any case
        is_planned = isinstance(chosen, PlannedPolicy)  # one plan for all features, which have the same rows in their caches
        if isinstance(policy, Policy) and len(self._features) > 1 and not is_planned:
            raise ValueError("a policy instance serves one cache: give its name or class for several features")
        n = self._g.num_nodes
        if not self._features or not n:
            return
        if is_packed and size == "auto":
            size = self._of_pack(self._setup, cast(Pack, self._pack))
        elif size is None or size == "auto":
            spare, self._prefetch = spare_bytes(self._setup, self._g.budget, room, sum(self._row_bytes.values()), self._prefetch)
            # What is left may be nothing; the loader then goes without.
            if spare < sum(FeatureCache.least_bytes(1, width, n, chosen) for width in self._row_bytes.values()):
                return
            size = spare
        sizes = cache_bytes(size, n, self._row_bytes, chosen, self._limit, room)
        with self._watch.time("cache"), AccessCounts(self._setup, self._watch) as counts:
            self._strategy.make_caches(sizes, policy, counts, on_loan=on_loan or self._is_auto_size)
        if self._share is not None:
            self._held.append(self._share.reserve("feature cache", sum(sizes.values())))

    # Iteration.

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._batcher)

    def __iter__(self) -> Iterator[MiniBatch]:
        """Return an iterator over the next epoch (or the rest of the one that :meth:`load_state_dict` restored).

        The epoch begins with the first ``next()``: only then the iterator takes the epoch's number, memory, threads and the
        features' caches.
        """
        self._check_open()
        return EpochIterator(self._begin_epoch)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the loader is closed")
        if os.getpid() != self._pid:
            raise ClosedError("the loader belongs to the parent process: make one in this process")

    def _begin_epoch(self) -> RunningEpoch:
        """Begin the next epoch; BusyError and the like leave it the next one."""
        self._check_open()  # before the lock, which another thread may have held at a fork
        with self._beginning:  # of two iterators that begin at once each has an epoch of its own
            self._check_open()
            epoch, start = self._next_epoch, self._next_start
            run = self._strategy.prepare(epoch, start)
            progress = Progress(epoch, start)
            on_end = None if self._epochs is None else self._epochs.begin(self.stats)
            try:
                running = RunningEpoch(run, self._stages, progress, len(self), self._prefetch, self, on_end)
            except BaseException:
                run.close()
                raise
            self._next_epoch, self._next_start = epoch + 1, 0
            self._progress = progress
            self._iterators.add(running)
            return running

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``for`` loop run ``epoch``, from its first batch; without it epochs count up from 0."""
        check_at_least("epoch", epoch, 0)
        self._next_epoch, self._next_start = epoch, 0
        self._progress = Progress(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return where training stands: the batch after the last one that was delivered.

        A loader with the same seeds and options goes on there after :meth:`load_state_dict`; its next ``for`` loop runs the
        rest of the epoch. Batches that were only made ahead do not count, nor does an iterator whose first batch was not asked
        for. Of several iterators at once the last one begun is meant.
        """
        epoch, batch = self._progress.epoch, self._progress.batch
        if batch >= len(self) > 0:
            epoch, batch = epoch + 1, 0
        return {"version": 1, "epoch": epoch, "batch": batch, "batches": self._digest()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` stood.

        Raises
        ------
        ValueError
            The state is of a loader with other seeds or options, which would give other batches.
        """
        if state.get("version") != 1:
            raise ValueError(f"not a loader's state: {sorted(state)}")
        if state["batches"] != self._digest():
            raise ValueError(
                "the state is of a loader with other seeds, batch_size, shuffle, seed or drop_last, or whose batches of a pack "
                "ran in another order (policy, superbatch)"
            )
        self._next_epoch, self._next_start = int(state["epoch"]), int(state["batch"])
        self._progress = Progress(self._next_epoch, self._next_start)

    def _digest(self) -> str:
        options = self._batcher
        pack = "" if self._pack is None else self._pack.record["samples"]
        text = f"{pack}{options.batch_size} {options.shuffle} {options.seed} {options.drop_last} {len(options.seeds)} "
        if options.shuffle and isinstance(self._strategy, Packed) and self._strategy.group > 1:
            text += f"in groups of {self._strategy.group} "  # which are shuffled, and not their batches
        return hashlib.blake2b(text.encode() + options.seeds.numpy().tobytes(), digest_size=16).hexdigest()

    def stats(self) -> dict[str, Any]:
        """Return what the loader has done since it was made.

        Returns
        -------
        dict
            ``batches``; ``rows`` asked for, ``rows_loaded`` from storage, ``hits`` (rows by tier, ``base`` are the loaded ones),
            ``bytes_requested``, ``bytes_read``, ``reads`` of the features, by this loader alone; ``prefetch``, the batches now
            made ahead (fewer than asked for, once memory was short); ``seconds`` by stage. With ``strategy="auto"`` also
            ``auto``: ``taken``, ``reason``, the ``estimates`` of all strategies, and ``actual``, the last whole epoch
            (:class:`featstore.run.actual.Actual`).

        Notes
        -----
        Stages: ``sample``; ``gather``, reading rows and copying hits; ``update``, bringing rows into the cache; ``labels``;
        ``transfer``, handing over: copies to the device and assembly there, in a thread that only loaders for a device, or with a
        ``device_cache``, have; ``wait`` (the loop waited for a batch); ``cache`` (making the cache); ``presample`` (sampling for
        counts); ``auto`` (choosing a strategy).
        On demand ``sample`` is added over threads. A superbatch is sampled by several threads at once, and its seconds are those
        of the clock; ``plan`` is its changesets, ``pack`` copying rows into extents, ``load`` reading samples and changesets
        back; ``read`` is the part of ``gather`` that waits for extents. Stages run beside each other and beside the loop, so
        their seconds may add up to more than the clock's.
        """
        depths = [epoch.depth for epoch in self._iterators]
        actual = None if self._epochs is None or self._epochs.last is None else self._epochs.last.to_dict()
        return {
            **self._stages.counts(),
            "prefetch": min(depths, default=self._prefetch),
            "seconds": self._watch.seconds(),
            **({} if self._auto is None else {"auto": self._auto if actual is None else {**self._auto, "actual": actual}}),
        }

    @property
    def made_layout(self) -> str | None:
        """The name of the pack's layout that was made for this loader; None where it was there, or made by others meanwhile."""
        return self._strategy.made_layout if isinstance(self._strategy, Packed) else None

    # The end.

    def close(self) -> None:
        """Stop all iterators; they raise ClosedError from now on. The cache stays with the graph. May be called again.

        After whole epochs under ``strategy="auto"`` the last is kept in the dataset's catalog beside its estimate, where the
        dataset can be written; where it took 1.5 times what the drive's kept rates come to, or a part of that, the next
        ``"auto"`` measures the drive again.
        """
        self._closed = True
        if os.getpid() != self._pid:
            return  # threads and run files are the parent's, who goes on with them
        with self._beginning:  # an epoch that is beginning is closed, too
            running = list(self._iterators)
        for epoch in running:
            epoch.close()
        self._release_all()
        if self._epochs is not None:
            self._epochs.keep(self._g)

    def _release_all(self) -> None:
        with ExitStack() as stack:  # all of it, the last first, whichever raises
            stack.callback(self._finalizer)
            if self._close_pack is not None:
                stack.callback(self._close_pack)
            if self._profile is not None:
                stack.callback(self._profile.close)
            if hasattr(self, "_strategy"):
                stack.callback(self._strategy.close)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and self._epochs is not None:
            self._epochs.drop()  # the error is what matters
        self.close()
