"""Caches of an open dataset's features, filled once by score or row by row by an online policy; inputs of policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from featstore.budget import Budget
from featstore.cache.base import Policy, StaticPolicy, get_policy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.rowmap import RowMap
from featstore.cache.sharedrows import SharedCache, check_shareable
from featstore.cache.sizes import divided, rows_within
from featstore.cache.table import FeatureCache
from featstore.config import check_at_least, parse_cache_size
from featstore.errors import BudgetError
from featstore.gather.arrays import as_array
from featstore.gather.sources import gather_of
from featstore.graph.adjacency import PIECE_NODES, Adjacency
from featstore.graph.base import StoredGraph
from featstore.graph.feature import FeatureStore
from featstore.graph.partitions import Partitions
from featstore.graph.policyinputs import Given, PolicyInputs
from featstore.graph.savedparts import KeptParts
from featstore.graph.snapshot import Snapshot
from featstore.progress import Progress
from featstore.ranks import sharing_ranks
from featstore.topology.crossedges import count_cross_edges, counts_dtype
from featstore.topology.noderows import NodeRows
from featstore.topology.part import OUTSIDE
from featstore.topology.partarrays import check_parts

__all__ = ["GivenParts", "RowCaches"]

FILL_SHOWN_AFTER_S = 2.0  # before a progress bar of filling a cache is shown; loaders fill caches, too

GivenParts: TypeAlias = "Given | str | KeptParts"


class RowCaches:
    """Caches of a graph's features that follow no plans; :meth:`StoredGraph.cache_for_planner` makes caches that follow plans."""

    def __init__(self, graph: StoredGraph, snapshot: Snapshot, adjacency: Adjacency, partitions: Partitions) -> None:
        self._graph, self._snapshot, self._adjacency, self._partitions = graph, snapshot, adjacency, partitions

    def cache(
        self,
        name: str | None,
        budget: int | float | str,
        policy: str | Policy | type[Policy],
        *,
        counts: Given,
        parts: GivenParts,
        seed: int,
        shared: bool | int = False,
    ) -> None:
        """See :meth:`featstore.OutOfCoreGraph.cache`."""
        graph, ranks = self._graph, sharing_ranks(shared)
        names = list(graph.columns) if name is None else [graph.column_of(name)]  # raises for an unknown name first
        chosen, is_auto = get_policy(policy), isinstance(budget, str) and budget == "auto"
        if isinstance(policy, Policy) and len(names) > 1:
            raise ValueError("a policy instance serves one cache: give its name or class for several features")
        if ranks:
            if graph.own_part is not None:
                raise NotImplementedError(f"rows of {graph.own_part} are not shared: each rank has a part of its own")
            check_shareable(policy, chosen)
            if is_auto:
                raise ValueError("the ranks of a shared cache must agree on its size: state budget= in bytes or as a share")
        size, seed = 0 if is_auto else parse_cache_size(budget, "budget"), check_at_least("seed", seed, 0)
        sizes: dict[str, int] | dict[str, int | float] = dict.fromkeys(names, size)
        if names and (is_auto or (size and len(names) > 1)):
            for each in names:  # drop existing caches, as their memory is divided, too
                self.make(each, 0, chosen)
            graph.pool.trim()  # frees memory first, as the available memory decides the number of rows
            n_bytes = graph.budget.available // 8 * 7 if is_auto else size
            same: dict[NodeRows, dict[str, int]] = {}
            for each in names:
                same.setdefault(graph.node_rows(each), {})[each] = graph.columns[each].row_bytes
            groups = [(of.n, widths) for of, widths in same.items()]
            if not is_auto or any(rows_within(int(n_bytes), n, list(widths.values()), chosen) for n, widths in groups):
                sizes = divided(groups, n_bytes, chosen, graph.budget, graph.budget.available * max(1, ranks))
        for each, of_each in sizes.items():
            self.make(each, of_each, get_policy(policy), counts=counts, parts=parts, seed=seed, on_loan=is_auto, ranks=ranks)

    def make(
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
        ranks: int = 0,
    ) -> None:
        """Make a cache of one feature as :meth:`cache` does; loaders call this.

        With ``on_loan`` the budget may take the cache's memory back; if the budget lacks memory, the cache gets fewer rows, or
        none. A static policy chooses only rows that have no slot in ``without``. ``ranks`` is the number of processes that share
        the cache, 0 if it is this one's own.
        """
        graph = self._graph
        store = graph.columns[name]
        if isinstance(chosen, PlannedPolicy):
            raise ValueError(f"policy {chosen.name!r} plans ahead: use it through a Loader with strategy='superbatch'")
        with graph.locked():
            graph.drop_cache(store)
        # Not under the lock: a provider of counts samples an epoch, on threads that open the topology.
        left = size
        while left > 0:
            try:
                options: dict[str, Any] = {"counts": counts, "parts": parts, "seed": seed}
                self._fill(store, left, chosen, **options, without=without, on_loan=on_loan, ranks=ranks)
                break
            except BudgetError as error:
                if not on_loan:
                    raise
                left -= max(size // 8, (error.needed or 0) - graph.budget.total)

    def _fill(
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
        ranks: int,
    ) -> None:
        graph, name = self._graph, store.name
        file = store.source
        n = len(store)
        with self.policy_inputs(file.row_bytes, counts, parts, seed, graph.budget, rows=graph.node_rows(name)) as inputs:
            if isinstance(size, float):
                size = FeatureCache.least_bytes(max(1, round(size * n)), file.row_bytes, n, chosen)
            capacity = FeatureCache.capacity_for(size, file.row_bytes, n, chosen)
            holder = f"cache of {name!r}"
            with Progress(holder, capacity * file.row_bytes, graph.shows_progress, delay_s=FILL_SHOWN_AFTER_S) as bar:

                def read(rows: npt.NDArray[np.int64], *where: Any) -> None:
                    gather_of(file)(rows, *where)
                    bar.add(rows.size * file.row_bytes)

                size_of: tuple[int, int, int] = capacity, file.row_bytes, n
                if ranks and capacity:
                    assert isinstance(chosen, StaticPolicy)
                    recipe = {"rows": file.fingerprint, **self.recipe(chosen, counts, parts, seed)}
                    cache: FeatureCache = SharedCache(
                        *size_of, chosen, inputs.context, graph.budget, read, name=holder, recipe=recipe, ranks=ranks
                    )
                else:
                    cache = FeatureCache(*size_of, chosen, inputs.context, graph.budget, name=holder)
                try:
                    if not ranks:
                        cache.fill(read, by_score=on_loan, without=without)
                    if on_loan:
                        cache.lend()
                    with graph.locked():
                        graph.drop_cache(store)  # another thread, or a loader, may have set a cache meanwhile
                        store.use_cache(cache)
                except BaseException:
                    cache.close()
                    raise

    def recipe(self, chosen: StaticPolicy, counts: Given, parts: GivenParts, seed: int) -> dict[str, Any]:
        """Describe all that a static policy's choice follows from, as JSON; what a callable would return is left out."""
        if isinstance(parts, str) or (parts is None and chosen.needs_parts):
            parts = self._partitions.find(parts)
        return {
            "policy": f"{type(chosen).__module__}.{type(chosen).__qualname__}",
            "adjacency": self._snapshot.catalog.adjacency(),
            "counts": _digest(counts),
            "parts": [parts.name, parts.generation] if isinstance(parts, KeptParts) else _digest(parts),
            "seed": seed,
        }

    def policy_inputs(
        self,
        row_bytes: int,
        counts: Given = None,
        parts: GivenParts = None,
        seed: int = 0,
        budget: Budget | None = None,
        note: Callable[[int], None] = lambda n_bytes: None,
        rows: NodeRows | None = None,
    ) -> PolicyInputs:
        """Make the inputs of a policy for this graph: a context manager, whose arrays the budget counts; caches call this.

        ``note`` gets the bytes of degrees as they are read. ``rows`` are those that the policy scores; by default there is one
        for each node, by its id.
        """

        graph, adjacency = self._graph, self._adjacency

        of = NodeRows(graph.num_nodes) if rows is None else rows

        def out_degree() -> npt.NDArray[np.int64]:
            found = np.zeros(of.n, np.int64)
            for first, n, row in of.spans:
                if n:
                    adjacency.read_out_degrees(first, found[row : row + n])
                    note(8 * n)
            return found

        def in_degree() -> npt.NDArray[np.int64]:
            if not of.kinds:
                found = adjacency.list_degrees(0, graph.num_nodes)
                note(found.nbytes)
                return found
            found = np.zeros(of.n, np.int64)
            for kind, (_, n, row) in zip(of.kinds, of.spans, strict=True):
                for each in self._snapshot.types.edges_into(kind.name):
                    for at in range(0, n, PIECE_NODES):
                        lists = each.first_list + at, each.first_list + min(n, at + PIECE_NODES)
                        found[row + at : row + min(n, at + PIECE_NODES)] += adjacency.list_degrees(*lists)
                note(8 * n)
            return found

        budget = graph.budget if budget is None else budget
        kept = self._partitions.find(parts) if isinstance(parts, str) else parts if isinstance(parts, KeptParts) else None
        given: Given = parts if kept is None else kept.load  # type: ignore[assignment]

        def cross_out_degree() -> torch.Tensor:
            if given is None or kept is not None:
                return (self._partitions.find() if kept is None else kept).cross_out_degree()
            return self._count_cross_edges(given, budget)

        def is_there() -> npt.NDArray[np.bool_]:
            part = graph.own_part
            return np.ones(of.n, bool) if part is None else part.hop_of != OUTSIDE

        there = None if graph.own_part is None else is_there
        return PolicyInputs(of, row_bytes, budget, in_degree, out_degree, counts, given, seed, cross_out_degree, there)

    def _count_cross_edges(self, given: Any, budget: Budget) -> torch.Tensor:
        """Count each node's out-edges into other parts, for parts that the dataset does not keep."""
        n, topology, holder = self._graph.num_nodes, self._adjacency.topology, "policy inputs"
        width = counts_dtype(topology.num_edges).itemsize
        with budget.reserve(holder, (4 + width) * n):
            parts = check_parts(given() if callable(given) else given, n)
            counts = torch.from_numpy(count_cross_edges(topology, parts, budget, holder))
        budget.reserve(holder, width * n, owner=counts)
        return counts


def _digest(given: Given) -> str | None:
    if given is None or callable(given):
        return given and "made by a callable"
    array = np.ascontiguousarray(as_array("an array", given))
    return f"{array.dtype} {array.shape} {xxhash.xxh3_64_hexdigest(array.data)}"
