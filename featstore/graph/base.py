"""The part that datasets and packs share: features and node data within one budget, opened and closed together."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

import torch

from featstore.budget import Budget, MemoryReport, Reservation
from featstore.cache.base import OnlinePolicy
from featstore.cache.table import FeatureCache
from featstore.config import Options, listed
from featstore.display import Display, ShownAsTables
from featstore.errors import BusyError, ClosedError
from featstore.gather.buffers import BufferPool
from featstore.gather.sources import RowSource
from featstore.graph.feature import FeatureStore
from featstore.graph.fields import Fields
from featstore.graph.showing import show_graph
from featstore.graph.typeviews import NodeView
from featstore.storage.reader import Reader
from featstore.topology.noderows import NodeRows, RowsOfTypes
from featstore.topology.part import Part
from featstore.topology.types import EdgeKey, Types

__all__ = ["StoredGraph"]

Self = TypeVar("Self", bound="StoredGraph")


class StoredGraph(ShownAsTables, ABC):
    """Stores of features and tensors of node data behind one budget, one reader and one pool; a context manager.

    Subclasses provide the node data (:meth:`_data_bytes`, :meth:`_read_data`), and close their own files
    (:meth:`_close_files`).
    """

    num_nodes: int
    budget: Budget
    reader: Reader
    pool: BufferPool
    own_part: Part | None = None  # of which this is a view, or a dataset of its own; None once it is closed
    features: Mapping[str, FeatureStore]
    edge_features: Mapping[str, FeatureStore]
    node_data: Mapping[str, torch.Tensor]

    def __init__(self, path: str, options: Options, whole: StoredGraph | None = None) -> None:
        self.path = path
        self.options = options
        self._whole = whole
        self._views: dict[tuple[str, int, int], StoredGraph] = {}  # the open ones
        self.budget = Budget(options.memory) if whole is None else whole.budget
        self.shows_progress = False  # of large reads at the first use
        self._closed = False
        self._closer: int | None = None  # the thread that closes it, or whose call was cut off
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._data: dict[str, tuple[torch.Tensor, Reservation]] = {} if whole is None else whole._data
        self.columns: dict[str, FeatureStore] = {}  # features of nodes as they are stored: several types may share one
        self.type_stores: dict[str, FeatureStore] = {}  # the features of each type, of a graph of several
        self.column_rows: dict[str, RowsOfTypes] = {}
        self.edge_stores: dict[str, FeatureStore] = {}
        self._leaves: dict[str, Callable[[BaseException], None]] = {}  # of stores that are attached
        self.reader = Reader(options, self.budget, path) if whole is None else whole.reader
        self.pool = BufferPool(self.budget, self.reader.trim, path) if whole is None else whole.pool

    def open_store(
        self,
        stores: dict[str, FeatureStore],
        name: str,
        source: RowSource,
        shape: Sequence[int],
        dtype: torch.dtype,
        reopen: Callable[[], Any] | None = None,
    ) -> None:
        """Open a store of ``source`` among ``stores``, one of the mappings of this graph."""
        of = self.own_part if stores is self.columns else None
        change = None if reopen is None or self.own_part is not None else partial(self._change_rows, name)
        if change is not None and stores is self.edge_stores:
            change = partial(self._change_edge_rows, name)
        threads = self.options.threads
        stores[name] = FeatureStore(name, source, shape, dtype, self.reader, self.pool, threads, reopen, of, change)

    def _change_rows(self, name: str, ids: Any, rows: Any, progress: bool) -> FeatureStore:
        """Change rows of a feature of nodes, given by its full name; a dataset that can be changed does it."""
        raise NotImplementedError(f"the rows of {name!r} cannot be changed in {self.path}")

    def _change_edge_rows(self, name: str, ids: Any, rows: Any, progress: bool) -> FeatureStore:
        """Change rows of a feature of edges, given by its full name."""
        raise NotImplementedError(f"the rows of {name!r} cannot be changed in {self.path}")

    def list_features(self) -> None:
        """Set ``features`` anew, from the stores that are open."""
        self.features = Fields.of("feature", self.columns if self.types.is_one else self.type_stores)

    def attach(self, store: FeatureStore, leave: Callable[[BaseException], None]) -> None:
        """Let a store whose rows no file of this graph has be one of its features, until either is closed.

        If an exception ends the graph's ``with`` block, ``leave`` is called with it, before the stores are closed.
        """
        with self.locked():
            self.check_new(store.name)
            self.columns[store.name] = store
            self._leaves[store.name] = leave
            self.list_features()

    def check_new(self, name: str) -> None:
        """Raise ValueError if a feature or a field of node data has this name."""
        if name in self.columns or name in self.node_data:
            raise ValueError(f"{self.path} has {name!r} already: take another name")

    def detach(self, store: FeatureStore) -> None:
        """Undo :meth:`attach`, and drop the store's cache, even if a loader's epoch uses it; the store is being closed."""
        if self._closed or self.columns.get(store.name) is not store:
            return
        with self.locked():
            if store.cache is not None:
                store.cache.release()
            self.drop_cache(store)
            del self.columns[store.name], self._leaves[store.name]
            self.list_features()

    @property
    @abstractmethod
    def types(self) -> Types:
        """The types of nodes and edges, each a range; of a graph without named types one of each."""

    @property
    def node_types(self) -> list[str]:
        """Names of the types of nodes, as in PyG; ``["_"]`` if nodes have no types."""
        return list(self.types.nodes)

    @property
    def edge_types(self) -> list[EdgeKey]:
        """Names of the types of edges, as in PyG: source, relation and destination; ``[("_", "_", "_")]`` without types."""
        return list(self.types.edges)

    def __getitem__(self, name: str) -> Any:
        """Get a feature by name, or in a graph of several types a type of nodes, as in PyG.

        Without types, ``g["x"]`` is ``g.features["x"]``. With types, ``g["paper"]`` is a :class:`NodeView`.

        Raises
        ------
        KeyError
            No feature or type has this name; the error lists the existing names.
        TypeError
            The index is not a name.
        """
        types = self.types
        if not types.is_one:
            if name not in types.nodes:
                found = next((key for key in types.edges if key[1] == name), None)
                hint = f"; an edge type is indexed by all of its name, g[{listed(found)}]" if found else ""
                raise KeyError(f"no node type {name!r}; there is {listed(types.nodes)}{hint}")
            features, node_data = cast(Fields, self.features).of_type(name), cast(Fields, self.node_data).of_type(name)
            return NodeView(name, types.nodes[name].n, features, node_data)
        if not isinstance(name, str):
            raise TypeError(f"a graph is indexed by the name of a feature, not by {name!r}; rows are those of a feature")
        if name in self.node_data:
            raise KeyError(f"{name!r} is node data, not a feature: node_data[{name!r}]")
        return self.features[name]

    __iter__ = None  # with __getitem__ alone, Python would iterate over g[0], g[1], …

    def column_of(self, name: str) -> str:
        """Name the column that holds a feature, given by its name in ``features``; KeyError if there is none."""
        found = str(self.features[name].name)
        if found in self.columns:
            return found
        kind, _, field = found.rpartition("/")
        return next(
            each
            for each, rows in self.column_rows.items()
            if each.rpartition("/")[2] == field and any(of.name == kind for of in rows.kinds)
        )

    def node_rows(self, name: str) -> NodeRows:
        """Get the rows that nodes have in a column."""
        return NodeRows(self.num_nodes) if self.types.is_one else self.column_rows[name]

    @abstractmethod
    def fingerprint(self) -> dict[str, str]:
        """Identify the stored data of each field, by key; anything made from a field is stale once the field's id differs."""

    # -- node data ---------------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _data_bytes(self, name: str) -> int:
        """Count the bytes of a field of node data in memory."""

    @abstractmethod
    def _read_data(self, name: str) -> torch.Tensor:
        """Read a field of node data."""

    def data_bytes(self, name: str) -> int:
        """Count the bytes that reading a field of node data will take; 0 if the field is in memory already."""
        with self.locked():
            return 0 if name in self._data else self._data_bytes(name)

    def load_data(self, name: str) -> torch.Tensor:
        """Read a field of node data, unless it is in memory already."""
        with self.locked():
            held = self._data.get(name)
            if held is None:
                with self.budget.reserve("node data", self._data_bytes(name)).kept() as reservation:
                    held = self._data[name] = self._read_data(name), reservation
            return held[0]

    def release_data(self, name: str) -> None:
        """Forget a field of node data that is in memory; its bytes count until the last tensor that was handed out is gone."""
        held = self._data.pop(name, None)
        if held is not None:
            self.budget.release_with(*held)  # loaders may go on with it as labels

    # -- caches ------------------------------------------------------------------------------------------------------------------

    def cache_for_planner(
        self,
        store: FeatureStore,
        capacity: int,
        budget: Budget | None = None,
        *,
        on_loan: bool = False,
        policy: OnlinePolicy | None = None,
    ) -> FeatureCache:
        """Give a feature an empty cache that follows batch plans, in place of any earlier one, and return it; loaders call this.

        ``budget`` counts the cache: a share of the graph's budget that the caller holds, by default the graph's own. With
        ``on_loan`` the budget may take the memory back. If ``policy`` is given, it chooses the cached rows instead of plans.
        """
        is_of_edges = self.edge_stores.get(store.name) is store
        holder = f"cache of {'edge feature ' * is_of_edges}{store.name!r}"
        budget = self.budget if budget is None else budget
        with self.locked():
            self.drop_cache(store)
            cache = FeatureCache(capacity, store.row_bytes, len(store), policy, budget=budget, name=holder)
            if on_loan:
                cache.lend()
            store.use_cache(cache)
            return cache

    def drop_cache(self, store: FeatureStore) -> None:
        """Remove a feature's cache and free its memory; BusyError while a loader's epoch uses the cache."""
        with self.locked():
            self._drop_cache(store)

    @staticmethod
    def _drop_cache(store: FeatureStore) -> None:
        old = store.cache
        if old is not None and old.in_use:
            raise BusyError(f"the cache of {store.name!r} follows the plans of a loader that is in the middle of an epoch")
        store.use_cache(None)
        if old is not None:
            old.close()

    def refuse_part(self, what: str) -> None:
        """Raise NotImplementedError, which names ``what``, if this is a part of a graph."""
        if self.own_part is not None:
            raise NotImplementedError(
                f"{what} is for a whole graph, and {self.path} has {self.own_part} here: take the dataset that it is a part of"
            )

    def refuse_types(self, what: str) -> None:
        """Raise NotImplementedError, which names ``what``, if the graph has several types or named ones."""
        if not self.types.is_one:
            raise NotImplementedError(
                f"{what} is for a graph of one type; {self.path} has the node types {listed(self.node_types)} and "
                f"the edge types {listed(self.edge_types)}. Make a dataset of the nodes and edges that "
                "it is for with OutOfCoreGraph.from_edge_index"
            )

    def is_attached(self, name: str) -> bool:
        """Return whether a feature was attached, and is in no file of this graph."""
        return name in self._leaves

    def check_in_file(self, name: str) -> None:
        """Check that the rows of a feature, by its name in the graph, can be passed over; ValueError if it was attached."""
        if self.is_attached(name):
            raise ValueError(f"the rows of {name!r} are in no file of {self.path}: what passes over all rows cannot use them")

    # -- life --------------------------------------------------------------------------------------------------------------------

    def memory_report(self) -> MemoryReport:
        """Report the bytes of the budget by holder, largest first, with their bytes on loan and the duration of the loans.

        Returns
        -------
        MemoryReport
            A mapping of holders to bytes, taken at one moment. ``holders`` maps each to
            :class:`~featstore.budget.HeldMemory`: ``bytes``, ``on_loan_bytes`` and ``on_loan_s``. ``used``, ``available``,
            ``on_loan``, ``peak`` and ``total`` are bytes of the whole budget. The report prints as a table.
        """
        return self.budget.report()

    def check_open(self) -> None:
        """Raise ClosedError after :meth:`close`, of a view also after that of the graph."""
        if self.closed:
            raise ClosedError(f"{self.path} is closed")

    def _title(self) -> str:
        return f"{type(self).__name__}({self.path!r}, num_nodes={self.num_nodes}{', closed' * self._closed})"

    def _display(self) -> Display:
        return show_graph(self, self._title())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other threads from making, dropping and claiming caches, and from closing; may be nested. Loaders use this."""
        if self._whole is not None:
            with self._whole.locked():
                self.check_open()
                yield
            return
        if self._pid != os.getpid():
            self._lock, self._pid = threading.RLock(), os.getpid()  # another thread of the parent may have held the lock
        with self._lock:
            self.check_open()
            yield

    @contextlib.contextmanager
    def or_closed(self) -> Iterator[None]:
        """Raise ClosedError instead of an IndexError or ValueError of the block if the graph was closed meanwhile."""
        try:
            yield
        except (IndexError, ValueError):
            self.check_open()
            raise

    @property
    def is_view(self) -> bool:
        """Whether this is a view of an open graph."""
        return self._whole is not None

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed or (self._whole is not None and self._whole.closed)

    @abstractmethod
    def _close_files(self) -> None:
        """Close the files that the subclass has opened; called when all reads are over."""

    def close(self) -> None:
        """Wait for reads under way, close the files and free the memory; may be called again, as after Ctrl-C within it.

        Tensors that were handed out stay valid. Any other use of the graph or its stores raises ClosedError. Views of it are
        closed, too; closing a view leaves the graph open.
        """
        try:
            with self.locked():
                for view in list(self._views.values()):
                    view.close()
                self._closer, self._closed = threading.get_ident(), True
                if self._whole is not None:
                    self._whole._forget(self)
        except ClosedError:
            if self._closer != threading.get_ident():
                return
        is_view, self.own_part = self._whole is not None, None
        with contextlib.ExitStack() as stack:  # runs all calls, from the last one up, even if one fails
            if not is_view:
                stack.callback(self.reader.close)
                stack.callback(self.pool.close)
                for _, reservation in self._data.values():
                    stack.callback(reservation.release)
                stack.callback(self._data.clear)
            stack.callback(self._close_files)
            for store in (*self.columns.values(), *self.edge_stores.values()):
                stack.callback(self._drop_cache, store)
                if store.cache is not None:
                    stack.callback(store.cache.release)
                stack.callback(store.close, keep_source=is_view)
            for store in self.type_stores.values():
                stack.callback(store.close)
        self._closer = None

    def place_of_view(self) -> tuple[int, str, int]:
        """Say which part of the whole graph this view is: its number, and name and generation of the parts."""
        views: dict[tuple[str, int, int], StoredGraph] = {} if self._whole is None else self._whole._views
        for (name, generation, number), view in list(views.items()):
            if view is self:
                return number, name, generation
        raise ClosedError(f"the view in {self.path} is closed")

    def _forget(self, view: StoredGraph) -> None:
        self._views = {key: each for key, each in self._views.items() if each is not view}

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is not None:
                for leave in self._leaves.values():
                    leave(error)
        finally:
            self.close()
