"""A dataset, and what is kept of it in memory: offsets of the adjacency, rows of features, neighbour lists."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import DEAR, Budget, Loan
from featstore.cache.base import Policy, StaticPolicy, get_policy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.rowmap import RowMap
from featstore.cache.sizes import cache_bytes, rows_within
from featstore.cache.table import FeatureCache
from featstore.config import Options, check_at_least, check_flag, parse_cache_size
from featstore.errors import BudgetError, FormatError
from featstore.graph.aggregate import MadeFeatures
from featstore.graph.crossedges import count_cross_edges, counts_dtype
from featstore.graph.feature import FeatureStore
from featstore.graph.listscores import WriteScores, scores_by_degrees
from featstore.graph.neighborcache import NeighborCache
from featstore.graph.opentopology import held_bytes, load_topology, stored_size
from featstore.graph.partarrays import check_parts
from featstore.graph.partlists import PartLists
from featstore.graph.partorder import PartOrder
from featstore.graph.policyinputs import Given, PolicyInputs
from featstore.graph.progress import Progress
from featstore.graph.savedcache import is_still_saved, load_neighbor_cache, save_neighbor_cache, saved_bytes
from featstore.graph.savedparts import Blocks, KeptParts, file_of_parts, kept_parts, read_parts, save_parts
from featstore.graph.snapshot import Snapshot
from featstore.graph.topology import Topology
from featstore.storage.rowfile import RowFile

__all__ = ["NEIGHBOR_POLICY", "Kept"]

NEIGHBOR_POLICY = "in_out_ratio"
PIECE_NODES, MOST_DEGREE = 1 << 18, (1 << 16) - 1
SHOWN_AFTER_S = 0.5  # a bar over what takes less would only flicker
FILL_SHOWN_AFTER_S = 2.0  # of a cache, which loaders fill, too

GivenParts: TypeAlias = "Given | str | KeptParts"


def _static(policy: str | Policy | type[Policy]) -> StaticPolicy:
    chosen = get_policy(policy)
    if not isinstance(chosen, StaticPolicy):
        raise ValueError(f"neighbour lists are cached once, by score: policy {chosen.name!r} is not a static one")
    return chosen


class Kept(MadeFeatures):
    """An opened dataset's topology and caches. Subclasses open its snapshot, and close it after these."""

    num_edges: int
    _shows = False  # progress of what is read when it is first asked for

    def __init__(self, path: str, options: Options) -> None:
        super().__init__(path, options)
        self.neighbor_cache: NeighborCache | None = None
        self._lists_loan: Loan | None = None
        self._topology: Topology | None = None

    # -- the adjacency -----------------------------------------------------------------------------------------------------------

    @property
    def snapshot(self) -> Snapshot:
        """The commit that is open."""
        return self._snapshot

    @property
    def topology(self) -> Topology:
        """The adjacency.

        In CSC form the first use reads the offsets, 8 bytes a node, which the budget counts from then on. Of chunks it reads the
        directory, and the budget counts a cache of pages besides.
        """
        with self.locked():
            if self._topology is None:
                with Progress("offsets", 8 * (self.num_nodes + 1), self._shows, delay_s=SHOWN_AFTER_S) as bar:
                    self._topology = load_topology(self._snapshot, self.budget, bar.add)
            return self._topology

    def topology_bytes(self) -> int:
        """Bound what the adjacency will hold once it is asked for: nothing where it was already."""
        with self.locked():
            return 0 if self._topology is not None else held_bytes(self._snapshot, self.budget.total)

    def choosing_bytes(self) -> int:
        """Count what choosing neighbour lists takes beside their cache, :meth:`NeighborCache.scratch_bytes`; opens nothing."""
        n_bytes, in_memory = stored_size(self._snapshot)
        return NeighborCache.scratch_bytes(self.num_nodes, n_bytes, in_memory=in_memory)

    # -- rows of features --------------------------------------------------------------------------------------------------------

    def cache(
        self,
        name: str | None = None,
        budget: int | float | str = "auto",
        policy: str | Policy | type[Policy] = "degree",
        *,
        counts: Given = None,
        parts: GivenParts = None,
        seed: int = 0,
    ) -> None:
        """Keep rows of a feature in memory; replaces an earlier cache of it.

        Parameters
        ----------
        name : str, optional
            The feature; by default all features of nodes, each with as many rows.
        budget : int, float or str
            Memory of the cache within the graph's budget, its row map of 4 bytes a node included: bytes, or text such as
            ``"1GiB"``. A share (``"10%"`` or ``0.1``) means the bytes that this share of the rows takes. Never more than all rows
            take; 0: no cache. By default ``"auto"``: seven eighths of what the budget has left, and rows are given back where
            others need the memory.
        policy : str, Policy or class
            A registered name (``featstore.available_policies()``), an instance for this cache alone, or a class.
        counts : integer array, shape (num_nodes,), or callable that returns it, optional
            Accesses of each row in a profiled run, for ``policy="frequency"``; called if the policy asks.
        parts : integer array, shape (num_nodes,), callable that returns it, str or KeptParts, optional
            The partition of each node, for policies that ask for it; or parts that the dataset keeps, by their name.
        seed : int
            Of randomised policies.

        Raises
        ------
        BudgetError
            The graph's budget has less left, or ``budget`` is too small for one row. The message names the least that works.
        BusyError
            The feature's cache follows the plans of a loader that is in the middle of an epoch.
        PluginError
            The policy failed.
        KeyError, ValueError, TypeError
            No such feature; no such policy, or an array of the wrong shape; a number of bytes below 4,096 without a unit.
        CorruptionError, OSError
            Filling a static cache failed.

        Notes
        -----
        A static policy's rows are read now, in one ascending pass; where that takes longer than two seconds a bar shows how far
        it is (:meth:`open`: ``progress``). On an error the feature has no cache.
        """
        names = list(self.features) if name is None else [name]
        widths = {each: self.features[each].row_bytes for each in names}  # a name that is none is said first
        chosen, is_auto = get_policy(policy), isinstance(budget, str) and budget == "auto"
        if isinstance(policy, Policy) and len(names) > 1:
            raise ValueError("a policy instance serves one cache: give its name or class for several features")
        size, seed = 0 if is_auto else parse_cache_size(budget, "budget"), check_at_least("seed", seed, 0)
        sizes: dict[str, int] | dict[str, int | float] = dict.fromkeys(names, size)
        if is_auto or (size and len(names) > 1):
            for each in names:  # what these hold is divided, too
                self.make_cache(each, 0, chosen)
            self.pool.trim()  # as many rows are chosen as the memory that is left holds
            n_bytes = self.budget.available // 8 * 7 if is_auto else size
            if not is_auto or rows_within(int(n_bytes), self.num_nodes, list(widths.values()), chosen):
                sizes = cache_bytes(n_bytes, self.num_nodes, widths, chosen, self.budget, self.budget.available)
        for each, of_each in sizes.items():
            self.make_cache(each, of_each, get_policy(policy), counts=counts, parts=parts, seed=seed, on_loan=is_auto)

    def make_cache(
        self,
        name: str,
        size: int | float,
        chosen: Policy,
        *,
        counts: Given = None,
        parts: GivenParts = None,
        seed: int = 0,
        on_loan: bool = False,
        without: RowMap | None = None,
    ) -> None:
        """Make a cache as :meth:`cache` does; loaders call this.

        ``on_loan``: the budget may take its memory back, and where choosing the rows takes memory, too, it has fewer, or none.
        ``without``: a static policy's rows are those without a slot there.
        """
        store = self.features[name]
        if isinstance(chosen, PlannedPolicy):
            raise ValueError(f"policy {chosen.name!r} plans ahead: use it through a Loader with strategy='superbatch'")
        with self.locked():
            self._drop_cache(store)
        # Not under the lock: a provider of counts samples an epoch, on threads that ask for the topology.
        left = size
        while left > 0:
            try:
                self._fill_cache(store, left, chosen, counts=counts, parts=parts, seed=seed, without=without, on_loan=on_loan)
                break
            except BudgetError as error:
                if not on_loan:
                    raise
                left -= max(size // 8, (error.needed or 0) - self.budget.total)

    def _fill_cache(
        self,
        store: FeatureStore,
        size: int | float,
        chosen: Policy,
        *,
        counts: Given,
        parts: GivenParts,
        seed: int,
        without: RowMap | None,
        on_loan: bool,
    ) -> None:
        name = store.name
        file = self._snapshot.file_of(self._snapshot.catalog.by_role("feature")[name])
        with self.policy_inputs(file.row_bytes, counts, parts, seed, self.budget) as inputs:
            if isinstance(size, float):
                size = FeatureCache.least_bytes(max(1, round(size * self.num_nodes)), file.row_bytes, self.num_nodes, chosen)
            capacity = FeatureCache.capacity_for(size, file.row_bytes, self.num_nodes, chosen)
            cache = FeatureCache(
                capacity, file.row_bytes, self.num_nodes, chosen, inputs.context, self.budget, name=f"cache of {name!r}"
            )
            try:
                n_bytes = min(capacity, self.num_nodes) * file.row_bytes
                with Progress(f"cache of {name!r}", n_bytes, self._shows, delay_s=FILL_SHOWN_AFTER_S) as bar:

                    def read(rows: npt.NDArray[np.int64], *where: Any) -> None:
                        file.gather(rows, *where)
                        bar.add(rows.size * file.row_bytes)

                    cache.fill(read, by_score=on_loan, without=without)
                if on_loan:
                    cache.lend()
                with self.locked():
                    self._drop_cache(store)  # another thread's, or a loader's, who came meanwhile
                    store.use_cache(cache)
            except BaseException:
                cache.close()
                raise

    def policy_inputs(
        self,
        row_bytes: int,
        counts: Given = None,
        parts: GivenParts = None,
        seed: int = 0,
        budget: Budget | None = None,
        note: Callable[[int], None] = lambda n_bytes: None,
    ) -> PolicyInputs:
        """Make what a policy may know of this graph: a context manager, whose arrays the budget counts; caches call this.

        ``note`` is told of the bytes of degrees.
        """

        def out_degree() -> npt.NDArray[np.int64]:
            rows = np.empty((self.num_nodes, 8), np.uint8)
            if self.num_nodes:
                self._out_degrees().read(0, self.num_nodes, rows)
                note(rows.nbytes)
            return rows.reshape(-1).view(np.int64)

        def in_degree() -> npt.NDArray[np.int64]:
            degrees = self.topology.degrees()
            note(degrees.nbytes)
            return degrees

        budget = self.budget if budget is None else budget
        kept = self.find_parts(parts) if isinstance(parts, str) else parts if isinstance(parts, KeptParts) else None
        given: Given = parts if kept is None else kept.load  # type: ignore[assignment]

        def cross_out_degree() -> torch.Tensor:
            if given is None or kept is not None:
                return (self.find_parts() if kept is None else kept).cross_out_degree()
            return self._count_cross_edges(given, budget)

        return PolicyInputs(self.num_nodes, row_bytes, budget, in_degree, out_degree, counts, given, seed, cross_out_degree)

    def _count_cross_edges(self, given: Any, budget: Budget) -> torch.Tensor:
        """Count edges between parts that the dataset does not keep."""
        n, holder = self.num_nodes, "policy inputs"
        width = counts_dtype(self.num_edges).itemsize
        with budget.reserve(holder, (4 + width) * n):
            parts = check_parts(given() if callable(given) else given, n)
            counts = torch.from_numpy(count_cross_edges(self.topology, parts, budget, holder))
        budget.reserve(holder, width * n, owner=counts)
        return counts

    def _out_degrees(self) -> RowFile:
        file, width = self._snapshot.topology_file("out_degree", self.num_nodes)
        if width != 8:
            raise FormatError(f"{file.path}: out-degrees of {width} bytes", file.path)
        return file

    def short_degrees(self) -> npt.NDArray[np.uint16]:
        """Read the out-degrees, uint16 [n], in pieces; ``MOST_DEGREE`` stands for all that are higher."""
        file, found = self._out_degrees(), np.empty(self.num_nodes, np.uint16)
        for first in range(0, self.num_nodes, PIECE_NODES):
            rows = file.read(first, min(PIECE_NODES, self.num_nodes - first))
            found[first : first + len(rows)] = np.minimum(rows.reshape(-1).view(np.int64), MOST_DEGREE)
        return found

    # -- neighbour lists ---------------------------------------------------------------------------------------------------------

    def cache_neighbors(
        self,
        budget: int | float | str | None = None,
        policy: str | Policy | type[Policy] = NEIGHBOR_POLICY,
        *,
        counts: Given = None,
        parts: GivenParts = None,
        seed: int = 0,
        edges: bool = False,
        save: bool = False,
        progress: bool = True,
    ) -> None:
        """Keep neighbour lists in memory, for samplers; replaces an earlier cache of them.

        Parameters
        ----------
        budget : int, float or str, optional
            Memory of the cache within the graph's budget: bytes or text, or a share of the whole budget (``"10%"`` or ``0.1``).
            By default all that is left; 0: no cache. If the whole adjacency fits, sampling reads nothing from disk.
        policy : str, Policy or class
            A static policy, which scores the nodes whose lists stay. ``"cross_partition"`` keeps those that batches of other
            parts ask for; ``"saved_io"`` those with most edges drawn, by ``counts``, for their bytes.
        counts : integer array, shape (num_nodes,), or callable, optional
            Edges that an epoch draws from each node's list, or what returns them once the policy asks;
            :func:`featstore.plan.savedio.edges_drawn` counts them.
        parts, seed
            As for :meth:`cache`. For ``"cross_partition"`` ``parts`` are those that were kept last by default.
        edges : bool
            Also keep the numbers of the lists' edges, for samplers with ``edges=True``: 4 bytes an edge (8 from 2³¹ edges on), of
            the same ``budget``, so fewer lists may fit. Only datasets whose lists were sorted by ``create`` store such numbers;
            for others this changes nothing.
        save : bool
            Also store the cache in the dataset, unless it holds the whole adjacency. A later call with the same budget, policy,
            seed and ``edges`` (and no ``counts``, no ``parts`` but kept ones) loads it instead of making it anew.
        progress : bool
            Show a progress bar, on a terminal and in a notebook.

        Raises
        ------
        BudgetError
            Not even the cache's table of 8 bytes a node fits. The message names the least that works.
        ValueError, PluginError, CorruptionError, OSError
            No such or no static policy, or nothing to recognise a saved cache by; the policy needs parts, and none are kept; the
            policy failed; a list holds what is no node, or a number is no edge's; reading or saving failed.
        StaleError
            The parts were made for another adjacency than the dataset has now.
        BusyError
            It cannot be saved: somebody is writing the dataset, or has replaced it. The cache is in use all the same.
        CommittedError
            It is saved, but making that durable failed: a power cut may undo it. The cache is in use all the same.

        Notes
        -----
        Reads the adjacency once, sequentially, and with ``edges`` the numbers of all edges. On an error there is no cache, unless
        only saving failed.
        """
        edges, save = check_flag("edges", edges), check_flag("save", save)
        seed = check_at_least("seed", seed, 0)
        chosen = _static(policy)
        is_kept = parts is None or isinstance(parts, (str, KeptParts))
        usual = isinstance(policy, str) and counts is None and (is_kept if chosen.needs_parts else parts is None)
        if save and (not usual or budget is None):
            raise ValueError(
                "a cache is saved for a policy's name and a stated budget, without counts=, and with no parts= but kept ones"
            )
        size = None if budget is None else parse_cache_size(budget, "budget", "the memory")
        self._check_open()
        if chosen.needs_parts and is_kept and not isinstance(parts, KeptParts):
            parts = self.find_parts(parts)  # type: ignore[arg-type]
        self._drop_neighbor_cache()
        topology = self.topology
        self.pool.trim()  # as many lists are chosen as the memory that is left holds
        n_bytes = self.budget.available if size is None else int(size * self.budget.total) if isinstance(size, float) else size
        if n_bytes == 0:
            return
        recipe: dict[str, Any] = {"policy": chosen.name, "bytes": n_bytes, "seed": seed}
        if chosen.needs_parts and isinstance(parts, KeptParts):
            recipe["parts"] = [parts.name, parts.generation]
        all_bytes = topology.num_edges * NeighborCache.entry_bytes(topology, edges)
        with Progress("neighbour lists", all_bytes, progress, delay_s=SHOWN_AFTER_S) as bar:
            found = self._stored_neighbors(n_bytes, self.budget, recipe if usual else None, bar.add, edges=edges)
        if found is not None:
            self.neighbor_cache = found
            if save and not found.whole and not is_still_saved(self.path, self._snapshot.catalog):
                self._snapshot.committed(save_neighbor_cache(self.path, self._snapshot.catalog, found, recipe))
            return
        scoring = 24 * self.num_nodes  # bytes of two degrees and a score a node
        total = scoring + NeighborCache.work_bytes(topology, edges)
        with Progress("neighbour lists", total, progress, delay_s=SHOWN_AFTER_S) as bar:
            with (
                self._or_closed(),
                self.policy_inputs(topology.id_bytes, counts, parts, seed, self.budget, bar.add) as inputs,
            ):
                scores: npt.NDArray[Any] | WriteScores
                if chosen.goes_by_degrees:
                    scores = scores_by_degrees(chosen, topology, self._out_degrees(), bar.add)
                else:
                    scores = inputs.scores(chosen, of_lists=True)
                    bar.reach(scoring)
                if budget is None:
                    n_bytes = self.budget.available
                self.neighbor_cache = NeighborCache.build(topology, self.budget, scores, n_bytes, note=bar.add, edges=edges)
                bar.reach(total)
        if save:
            self._snapshot.committed(save_neighbor_cache(self.path, self._snapshot.catalog, self.neighbor_cache, recipe))

    def lend_neighbors(self) -> None:
        """Let the budget take the neighbour cache back, whole, from now on, when no batch is being sampled with it."""
        cache = self.neighbor_cache
        self._end_lists_loan()  # of a cache that was given back
        if cache is not None and cache.reservation is not None:
            self._lists_loan = self.budget.lend(self._lent_lists, self._give_lists_back, cost=DEAR, of=cache.reservation)

    def _lent_lists(self) -> int:
        cache = self.neighbor_cache
        return 0 if cache is None or cache.reservation is None else cache.reservation.n_bytes

    def _give_lists_back(self, n_bytes: int) -> int:
        cache, self.neighbor_cache = self.neighbor_cache, None
        if cache is None:
            return 0
        if sys.getrefcount(cache) > 2:  # a batch is being sampled with it, whose sampler would keep its arrays
            self.neighbor_cache = cache
            return 0
        freed = 0 if cache.reservation is None else cache.reservation.n_bytes
        cache.close()
        return freed

    def _stored_neighbors(
        self,
        n_bytes: int,
        budget: Budget,
        recipe: Mapping[str, Any] | None,
        note: Callable[[int], None] = lambda n_bytes: None,
        *,
        edges: bool,
    ) -> NeighborCache | None:
        """Load what needs no choice: the whole adjacency, where it fits ``n_bytes``, or the saved cache of ``recipe``."""
        topology = self.topology
        if NeighborCache.whole_bytes(topology, edges) <= n_bytes:
            return NeighborCache.build(topology, budget, None, n_bytes, note=note, edges=edges)
        if recipe is None:
            return None
        return load_neighbor_cache(self._snapshot.catalog, self._snapshot.files, topology, budget, recipe, edges)

    def make_neighbor_cache(self, budget: Budget, scratch: Budget, least: int) -> tuple[NeighborCache, bool]:
        """Make a neighbour cache that fills ``budget``, a share of the graph's that the caller holds; loaders call this.

        ``scratch`` counts what choosing the nodes takes meanwhile. From ``least`` bytes on a saved cache will do, though there
        is memory for a larger one. Returns the cache, and whether it was loaded as it is stored in the dataset: the whole
        adjacency, or a cache that :meth:`cache_neighbors` saved with its default policy. Raises as :meth:`cache_neighbors`.
        """
        chosen = _static(NEIGHBOR_POLICY)
        self._check_open()
        n_bytes = budget.available
        saved = saved_bytes(self._snapshot.catalog)
        size = saved if least <= saved <= n_bytes else n_bytes
        found = self._stored_neighbors(n_bytes, budget, {"policy": chosen.name, "bytes": size, "seed": 0}, edges=False)
        if found is not None:
            return found, True
        with self._or_closed():
            scores = scores_by_degrees(chosen, self.topology, self._out_degrees())
            return NeighborCache.build(self.topology, budget, scores, n_bytes, scratch), False

    # -- parts -------------------------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, KeptParts]:
        """Return the partitions that the dataset keeps, by name, the latest last; :func:`featstore.partition` makes them.

        Those that others have kept since this dataset was opened are not among them.
        """
        with self.locked():
            return kept_parts(self._snapshot.catalog, self._read_parts)

    def find_parts(self, name: str | None = None) -> KeptParts:
        """Return the parts kept under ``name``, by default the latest; ValueError, which lists the names, without such."""
        kept = self.parts()
        if not kept:
            raise ValueError(
                f"{self.path} keeps no parts: make some with featstore.partition or featstore partition, or give an array"
            )
        if name is None:
            return list(kept.values())[-1]
        if name not in kept:
            raise ValueError(f"{self.path} keeps no parts {name!r}; there is {', '.join(map(repr, kept))}")
        return kept[name]

    def keep_parts(
        self,
        name: str,
        parts: npt.NDArray[np.int32],
        train_nodes: npt.NDArray[np.int64] | None,
        recipe: Mapping[str, Any],
        progress: bool = False,
        keep_lists: bool = False,
    ) -> None:
        """Keep parts in the dataset under a name, in one commit; :func:`featstore.partition` calls this, and checks them.

        Reads the adjacency once, to count edges between parts; with ``keep_lists`` once more for each window in which lists are
        put in part order.
        """
        arrays: dict[str, npt.NDArray[Any] | Blocks] = {"parts": parts}
        if train_nodes is not None:
            arrays["train_nodes"] = train_nodes
        topology, budget, holder, n_parts = self.topology, self.budget, "partitioning", int(recipe["n_parts"])
        held = budget.reserve(holder, counts_dtype(self.num_edges).itemsize * self.num_nodes)
        with self._or_closed(), held, Progress("edges between parts", topology.nbytes, progress) as bar:
            arrays["cross_out_degree"] = count_cross_edges(topology, parts, budget, holder, bar.add)
            if keep_lists:
                held.resize(held.n_bytes + PartOrder.nbytes(topology, n_parts))
                order = PartOrder(topology, parts, n_parts, budget, holder)
                arrays |= {"part_nodes": order.nodes, "part_offsets": order.offsets}
                arrays["part_indices"] = Blocks(topology.id_dtype, order.blocks(bar.add))
            with self.locked():
                save_parts(self._snapshot, name, arrays, recipe, self._snapshot.adopt)

    def part_lists(self, kept: KeptParts) -> PartLists:
        """Open the adjacency in part order, as it is kept with some parts (``has_lists``); loaders call this."""
        topology = self.topology
        with self.locked():
            nodes, ids = (file_of_parts(self._snapshot, kept, role) for role in ("part_nodes", "part_indices"))
            return PartLists(topology, nodes, ids, read_parts(self._snapshot, self.budget, kept, "part_offsets"))

    def _read_parts(self, kept: KeptParts, role: str) -> torch.Tensor:
        with self.locked():
            return read_parts(self._snapshot, self.budget, kept, role)

    def _drop_neighbor_cache(self) -> None:
        old, self.neighbor_cache = self.neighbor_cache, None
        self._end_lists_loan()
        if old is not None:
            old.close()

    def _end_lists_loan(self) -> None:
        loan, self._lists_loan = self._lists_loan, None
        if loan is not None:
            loan.end()

    def _close_files(self) -> None:
        self._drop_neighbor_cache()
        if self._topology is not None:
            self._topology.close()
