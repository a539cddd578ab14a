"""Domains: a range of ids with the features that a loader gathers, and their caches. Nodes are one domain, edges another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.cache.base import OnlinePolicy, Policy
from featstore.cache.sizes import Columns, divided, in_proportion, rows_within, whole_bytes
from featstore.cache.table import FeatureCache
from featstore.errors import BusyError, ClosedError
from featstore.estimate.batchsize import BatchSize
from featstore.gather.counters import ReadCounts
from featstore.gather.sources import gather_of
from featstore.graph.feature import FeatureStore
from featstore.pack.packgraph import Graph
from featstore.sampling.edgenumbers import edge_type_of
from featstore.topology.noderows import NodeRows, joined_rows
from featstore.topology.types import EdgeType, Types

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
        Which ids have a row, and the number of that row.
    parts : tuple of Domain
        Empty if all features have the same rows. Features of different types of nodes have different rows; each part then is
        the domain of features with the same rows, and has caches and plans of its own. ``rows`` are those of all parts, one
        behind the other.
    """

    graph: Graph
    n: int
    stores: Mapping[str, FeatureStore]
    reads: ReadCounts
    rows: NodeRows
    parts: tuple[Domain, ...] = ()

    @classmethod
    def of_nodes(cls, graph: Graph, names: Iterable[str]) -> Domain:
        """Make the domain of a graph's nodes, which are of one type, and the features of these names."""
        stores = {name: graph.features[name] for name in names}
        return cls(graph, graph.num_nodes, stores, ReadCounts(), NodeRows(graph.num_nodes))

    @classmethod
    def of_rows(cls, graph: Graph, stores: Mapping[str, FeatureStore], rows: Mapping[str, NodeRows]) -> Domain:
        """Make the domain of features of several types of nodes, whose ``rows`` are given by name."""
        reads, names = ReadCounts(), dict[NodeRows, list[str]]()
        for name in stores:
            names.setdefault(rows[name], []).append(name)
        parts = [cls(graph, of.n, {name: stores[name] for name in same}, reads, of) for of, same in names.items()]
        return cls._joined(graph, stores, reads, parts)

    @classmethod
    def _joined(cls, graph: Graph, stores: Mapping[str, FeatureStore], reads: ReadCounts, parts: Sequence[Domain]) -> Domain:
        if len(parts) == 1:
            return parts[0]
        rows = joined_rows([part.rows for part in parts]) if parts else NodeRows(graph.num_nodes)
        return cls(graph, rows.n, stores, reads, rows, tuple(parts))

    @classmethod
    def of_edges(cls, graph: Graph, names: Iterable[str], types: Types | None = None) -> Domain:
        """Make the domain of a graph's edges and the features of these names; of several ``types``, a part for each."""
        stores, reads = {name: graph.edge_features[name] for name in names}, ReadCounts()
        if types is None or not stores:
            n = graph.num_edges if stores else 0
            return cls(graph, n, stores, reads, NodeRows(n))
        same: dict[EdgeType, dict[str, FeatureStore]] = {}
        for name, store in stores.items():
            same.setdefault(edge_type_of(types, name), {})[name] = store
        parts = [cls(graph, kind.n_edges, each, reads, NodeRows(kind.n_edges)) for kind, each in same.items()]
        return cls._joined(graph, stores, reads, parts)

    def of(self, names: Iterable[str]) -> Domain:
        """Make the domain of the same ids with these features alone."""
        stores = {name: self.stores[name] for name in names}
        if not self.parts:
            return replace(self, stores=stores)
        parts = [part.of(name for name in part.stores if name in stores) for part in self.parts]
        return self._joined(self.graph, stores, self.reads, [part for part in parts if part.stores])

    @property
    def is_in_pages(self) -> bool:
        """Whether the rows of all features are in files that can be read page by page, of this machine or of a pack."""
        return all(hasattr(store.source, "stream") for store in self.stores.values())

    @property
    def each(self) -> tuple[Domain, ...]:
        """The parts, or the domain itself: domains of features that have the same rows."""
        return self.parts or (self,)

    @property
    def is_mixed(self) -> bool:
        """Whether features have different rows."""
        return bool(self.parts)

    def rows_of(self, name: str) -> NodeRows:
        """Get the rows of a feature."""
        return next((part.rows for part in self.parts if name in part.stores), self.rows)

    @property
    def row_bytes(self) -> dict[str, int]:
        """Bytes of each feature's row."""
        return {name: store.dtype.itemsize * math.prod(store.shape[1:]) for name, store in self.stores.items()}

    @property
    def n_bytes(self) -> int:
        """Bytes of all features."""
        return sum(part.n * sum(part.row_bytes.values()) for part in self.each)

    @property
    def width(self) -> int:
        """Bytes of a row of all features together; if they have different rows, of a mean row."""
        return -(-self.n_bytes // max(1, self.n)) if self.parts else sum(self.row_bytes.values())

    def accesses(self, batch: BatchSize) -> int:
        """Count the rows that a batch asks for, a row of several features once."""
        return sum(batch.rows_of.get(next(iter(part.stores), ""), batch.n_rows) for part in self.each)

    def asked(self, batch: BatchSize) -> dict[str, int]:
        """Count the rows of each feature that a batch asks for."""
        return {name: batch.rows_of.get(name, batch.n_rows) for name in self.stores}

    def asked_bytes(self, batch: BatchSize) -> int:
        """Count the bytes of all rows that a batch asks for."""
        widths = self.row_bytes
        return sum(n * widths[name] for name, n in self.asked(batch).items())

    def mean_width(self, batch: BatchSize) -> int:
        """Compute the bytes of a row that a batch asks for, of all features together; a mean, if they have different rows."""
        return -(-self.asked_bytes(batch) // n) if (n := self.accesses(batch)) else self.width

    def read(self, name: str, rows: npt.NDArray[np.int64], out: npt.NDArray[np.uint8]) -> None:
        """Read rows from the feature's own file, and count the reads."""
        self.reads.add(gather_of(self.stores[name].source)(rows, out))

    # -- sizes

    def sizes(self, size: int | float | str | None, policy: Policy | None, batch: BatchSize | None = None) -> dict[str, int]:
        """Compute the bytes of each feature's cache; ``size`` is bytes for all caches, or a share of the rows.

        They are divided as :meth:`divided` does. Empty if nothing is to be cached. ``policy`` manages the caches; None: they
        follow plans. Whether the caches fit in memory is not checked.

        Raises
        ------
        ValueError, BudgetError
            Not a size; no room for one row.
        """
        if size is None or not self.n or not self.stores:
            return {}
        return self.divided(size, policy, 1 << 62, batch)

    def divided(
        self, size: int | float | str, policy: Policy | None, room: int, batch: BatchSize | None = None
    ) -> dict[str, int]:
        """Divide ``size`` among the features' caches as :func:`~featstore.cache.sizes.divided` does.

        Of features with different rows, each gets the same share of its rows; or, if a ``batch`` is given, bytes in proportion
        to those that the batch asks for, so that a byte saves as many reads everywhere. One that has no room for a row gets no
        cache.
        """
        asked = None if batch is None else [part.asked_bytes(batch) for part in self.each]
        return divided(self.columns, size, policy, self.graph.budget, room, asked)

    @property
    def columns(self) -> list[Columns]:
        """The number of rows, and the bytes of each feature's row, of the parts."""
        return [(part.n, part.row_bytes) for part in self.each]

    def fitting(self, n_bytes: int, policy: Policy | None = None) -> int:
        """Count the rows that every feature's cache can have if all share ``n_bytes``; of parts, their sum."""
        if not self.parts:
            return rows_within(n_bytes, self.n, list(self.row_bytes.values()), policy) if self.stores else 0
        each = zip(self.parts, in_proportion(n_bytes, whole_bytes(self.columns, policy)), strict=True)
        return sum(part.fitting(of, policy) for part, of in each)

    def cut(self, rows: Mapping[str, int], n_bytes: int) -> dict[str, int]:
        """Cut caches of ``rows`` rows, by feature, that follow plans, to those that fit ``n_bytes``."""
        n_bytes_of, found = self.bytes_of(rows), dict[str, int]()
        wanted = [sum(n_bytes_of[name] for name in part.stores if name in rows) for part in self.each]
        if sum(wanted) <= n_bytes:
            return dict(rows)
        for part, of in zip(self.each, in_proportion(n_bytes, wanted), strict=True):
            most = part.fitting(of)
            found |= {name: min(rows[name], most) for name in part.stores if name in rows}
        return found

    def capacities(self, sizes: Mapping[str, int], policy: Policy | None = None) -> dict[str, int]:
        """Compute the rows of each feature's cache of these sizes: features with the same rows have as many."""
        found: dict[str, int] = {}
        for part in self.each:
            mine = {name: sizes[name] for name in part.stores if name in sizes}
            found |= dict.fromkeys(mine, part.capacity(mine, policy))
        return found

    def capacity(self, sizes: Mapping[str, int], policy: Policy | None = None) -> int:
        """Compute the number of rows that every cache of these sizes has room for; of parts, their sum."""
        if self.parts:
            mine = ({name: sizes[name] for name in part.stores if name in sizes} for part in self.parts)
            return sum(part.capacity(each, policy) for part, each in zip(self.parts, mine, strict=True))
        widths, n = self.row_bytes, self.n
        return min((FeatureCache.capacity_for(size, widths[name], n, policy) for name, size in sizes.items()), default=0)

    def bytes_of(self, rows: Mapping[str, int] | int) -> dict[str, int]:
        """Compute the bytes of each feature's cache of ``rows`` rows that follows plans."""
        found: dict[str, int] = {}
        for part in self.each:
            for name, width in part.row_bytes.items():
                n_rows = rows if isinstance(rows, int) else rows.get(name, 0)
                found[name] = FeatureCache.least_bytes(n_rows, width, part.n, None)
        return found

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
        return self.graph.cache_for_planner(self.stores[name], capacity, budget, on_loan=on_loan, policy=policy)

    def cache_of(self, name: str) -> FeatureCache:
        """Get the cache that a feature has in an epoch; ClosedError if another thread has closed the graph meanwhile."""
        cache = self.stores[name].cache
        if cache is None:
            raise ClosedError(f"{self.graph.path} was closed while an epoch ran")
        return cache

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
