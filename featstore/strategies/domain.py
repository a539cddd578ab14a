"""Domains: a range of ids with the features that a loader gathers, and their caches. Nodes are one domain, edges another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.cache.base import OnlinePolicy, Policy
from featstore.cache.sizes import cache_bytes
from featstore.cache.table import FeatureCache
from featstore.config import parse_size
from featstore.errors import BusyError
from featstore.gather.counters import ReadCounts
from featstore.graph.feature import FeatureStore
from featstore.pack.packgraph import Graph
from featstore.topology.noderows import NodeRows

__all__ = ["Domain"]


@dataclass(frozen=True)
class Domain:
    """One range of ids, and the features of these ids that a loader gathers.

    Parameters
    ----------
    graph : OutOfCoreGraph or PackedGraph
        The graph, whose lock is held while caches are made.
    n : int
        Number of ids, and of rows of each feature.
    stores : mapping of str to FeatureStore
        The features that are gathered, by name.
    reads : ReadCounts
        Counts the reads of these features.
    rows : NodeRows
        Which of the ids have a row, and which.
    own_rows : mapping of str to NodeRows
        Empty, unless features have different rows, being of different types of nodes; then the rows of each. Only strategies
        that treat each feature by itself take such a domain, which is mixed.
    """

    graph: Graph
    n: int
    stores: Mapping[str, FeatureStore]
    reads: ReadCounts
    rows: NodeRows
    own_rows: Mapping[str, NodeRows] = field(default_factory=dict)

    @classmethod
    def of_nodes(cls, graph: Graph, names: Iterable[str]) -> Domain:
        """Make the domain of a graph's nodes, which are of one type, and the features of these names."""
        stores = {name: graph.features[name] for name in names}
        return cls(graph, graph.num_nodes, stores, ReadCounts(), NodeRows(graph.num_nodes))

    @classmethod
    def of_rows(cls, graph: Graph, stores: Mapping[str, FeatureStore], rows: Mapping[str, NodeRows]) -> Domain:
        """Make the domain of features of several types of nodes, whose ``rows`` are given by name."""
        kinds = list(rows.values()) or [NodeRows(graph.num_nodes)]
        if all(each == kinds[0] for each in kinds):
            return cls(graph, kinds[0].n, stores, ReadCounts(), kinds[0])
        n = sum(each.n for each in kinds)
        return cls(graph, n, stores, ReadCounts(), NodeRows(n), rows)

    @classmethod
    def of_edges(cls, graph: Graph, names: Iterable[str]) -> Domain:
        """Make the domain of a graph's edges and the features of these names."""
        stores = {name: graph.edge_features[name] for name in names}
        n = graph.num_edges if stores else 0
        return cls(graph, n, stores, ReadCounts(), NodeRows(n))

    def of(self, names: Iterable[str]) -> Domain:
        """Make the domain of the same ids with these features alone."""
        return replace(self, stores={name: self.stores[name] for name in names})

    @property
    def is_mixed(self) -> bool:
        """Whether features have different rows."""
        return bool(self.own_rows)

    def rows_of(self, name: str) -> NodeRows:
        """Get the rows of a feature."""
        return self.own_rows.get(name, self.rows)

    @property
    def row_bytes(self) -> dict[str, int]:
        """Bytes of each feature's row."""
        return {name: store.dtype.itemsize * math.prod(store.shape[1:]) for name, store in self.stores.items()}

    @property
    def width(self) -> int:
        """Bytes of a row of all features together."""
        return sum(self.row_bytes.values())

    def read(self, name: str, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Read rows from the feature's own file, and count the reads."""
        self.reads.add(self.stores[name].source.gather(rows, out))

    # -- sizes

    def sizes(self, size: int | float | str | None, policy: Policy | None) -> dict[str, int]:
        """Compute the bytes of each feature's cache; ``size`` is bytes for all caches, or a share of the rows.

        All caches get the same rows. Empty if nothing is to be cached. ``policy`` manages the caches; None: they follow plans.
        Whether the caches fit in memory is not checked.

        Raises
        ------
        ValueError, BudgetError
            Not a size; no room for one row.
        """
        if size is None or not self.n or not self.stores:
            return {}
        return self.divided(size, policy, 1 << 62)

    def divided(self, size: int | float | str, policy: Policy | None, room: int) -> dict[str, int]:
        """Divide ``size`` among the features' caches as :func:`~featstore.cache.sizes.cache_bytes` does.

        Of features with different rows, each gets the same share of its rows.
        """
        widths, budget = self.row_bytes, self.graph.budget
        if not self.is_mixed:
            return cache_bytes(size, self.n, widths, policy, budget, room)
        whole = sum(self.own_rows[name].n * width for name, width in widths.items())
        given = size if isinstance(size, float) else parse_size(size)
        found: dict[str, int] = {}
        for name, width in widths.items():
            n = self.own_rows[name].n
            part = given if isinstance(given, float) else given * (n * width) // max(1, whole)
            if n and part >= (0 if isinstance(given, float) else FeatureCache.least_bytes(1, width, n, policy)):
                found |= cache_bytes(part, n, {name: width}, policy, budget, room)
        return found

    def capacity(self, sizes: Mapping[str, int], policy: Policy | None = None) -> int:
        """Compute the number of rows that every cache of these sizes has room for."""
        widths, n = self.row_bytes, self.n
        return min((FeatureCache.capacity_for(size, widths[name], n, policy) for name, size in sizes.items()), default=0)

    def bytes_of(self, rows: int) -> dict[str, int]:
        """Compute the bytes of each feature's cache of ``rows`` rows that follows plans."""
        return {name: FeatureCache.least_bytes(rows, width, self.n, None) for name, width in self.row_bytes.items()}

    # -- caches

    def is_claimed(self, name: str) -> bool:
        """Return whether a feature's cache follows the plans of a running epoch; others may read through it, not replace it."""
        cache = self.stores[name].cache
        return cache is not None and bool(cache.in_use)

    @property
    def claimed_bytes(self) -> int:
        """Bytes of the caches that follow the plans of a running epoch; others may replace them when it is over."""
        caches = (store.cache for store in self.stores.values())
        return sum(int(cache.nbytes) for cache in caches if cache is not None and cache.in_use)

    def check_free(self) -> None:
        """Raise BusyError if a feature's cache follows the plans of a running epoch."""
        for name in self.stores:
            if self.is_claimed(name):
                raise BusyError(
                    f"the cache of {name!r} follows the plans of a loader that is in the middle of an epoch: end or drop its "
                    "loop first, or open the graph again for this loader"
                )

    def make_cache(
        self, name: str, capacity: int, budget: Budget | None = None, *, on_loan: bool = False, policy: OnlinePolicy | None = None
    ) -> FeatureCache:
        """Give a feature an empty cache in place of its cache; see :meth:`~featstore.OutOfCoreGraph.cache_for_planner`."""
        self.graph.cache_for_planner(self.stores[name], capacity, budget, on_loan=on_loan, policy=policy)
        cache = self.stores[name].cache
        assert isinstance(cache, FeatureCache)
        return cache

    def clear_cache(self, name: str) -> None:
        """Empty a feature's cache, from which the next plan starts."""
        cache = self.stores[name].cache
        assert cache is not None
        cache.clear()

    def drop_caches(self) -> None:
        """Give back the features' caches and idle buffers of batches, before other caches are made.

        Caches that follow the plans of a running epoch stay. Does nothing if there are no features.
        """
        if not self.stores:
            return
        with self.graph.locked():
            for name, store in self.stores.items():
                if store.cache is not None and not self.is_claimed(name):
                    self.make_cache(name, 0)
        self.graph.pool.trim()
