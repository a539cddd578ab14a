"""An opened commit of a dataset: stores of its fields, and its adjacency, caches and partitions, each an object of its own."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, overload

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.config import Options, check_integer, listed, user_path
from featstore.creation.source import torch_dtype
from featstore.errors import BudgetError, BusyError, CorruptionError, FormatError
from featstore.gather.buffers import empty_tensor
from featstore.gather.partrows import PartRows
from featstore.gather.sources import RowSource, SourceRange
from featstore.graph.adjacency import SHOWN_AFTER_S, Adjacency
from featstore.graph.base import StoredGraph
from featstore.graph.fields import Fields
from featstore.graph.neighborlists import NeighborLists
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.graph.partadjacency import PartAdjacency, load_part
from featstore.graph.partitions import Partitions
from featstore.graph.passes import StoredRows
from featstore.graph.policyinputs import Given, PolicyInputs
from featstore.graph.reopen import reduced
from featstore.graph.rowcaches import GivenParts, RowCaches
from featstore.graph.savedparts import KeptParts
from featstore.graph.selfreliant import SelfReliantParts
from featstore.graph.snapshot import Snapshot, check_memory, fingerprint_of, open_files, opening_committed
from featstore.graph.typeviews import EdgeView
from featstore.progress import Progress
from featstore.storage.catalog import Catalog, FieldRecord
from featstore.topology.base import Topology
from featstore.topology.edgelists import EdgeLists
from featstore.topology.noderows import NodeRows, RowsOfTypes
from featstore.topology.part import HOLDER, MOST_HOPS, Part, reach, reach_bytes
from featstore.topology.types import ONE_EDGE, ONE_NODE, EdgeKey, NodeType, Types, edge_name, qualified

__all__ = ["OpenDataset", "View"]


@dataclass(frozen=True)
class View:
    """A part of an open dataset: the dataset, the part, and how often each node is in the part's lists."""

    whole: OpenDataset
    part: Part
    out_degree: npt.NDArray[Any]


class OpenDataset(StoredGraph):
    """An opened dataset as other parts of the library use it; users see the subclass :class:`~featstore.OutOfCoreGraph`.

    Attributes
    ----------
    adjacency : Adjacency
    partitions : Partitions
    row_caches : RowCaches
    neighbor_lists : NeighborLists
    snapshot : Snapshot
        The open commit, and fields and entries that this handle has added since.
    own_part : Part or None
        The part that it is of a larger graph: a view of an open dataset, or a dataset of its own. Either has the nodes' ids, and
        their number, of the whole graph.
    """

    def __init__(
        self, path: str | os.PathLike[str], options: Options | None = None, view: View | None = None, **others: object
    ) -> None:
        if options is None or others:
            raise TypeError("a dataset is opened with featstore.open(path, memory=…)")
        if view is not None:
            self._open_view(view)
            return
        path = os.path.abspath(user_path(path))
        with open_files(path) as opened:  # before a thread or a ring is made for the dataset
            check_memory(path, opened.catalog.files.values(), options)
            super().__init__(path, options)
            try:
                self.snapshot = Snapshot(self.path, opened, self.reader)
                try:
                    self.own_part = load_part(self.snapshot, self.budget)
                    self._open_fields()
                except BaseException:
                    with contextlib.suppress(OSError):
                        self.snapshot.close()
                    raise
            except BaseException:
                self.pool.close()
                self.reader.close()
                raise
        self._compose(Adjacency(self, self.snapshot))

    def _open_view(self, view: View) -> None:
        """Open a part of an open dataset over its files, its reader and its budget, with caches of its own."""
        super().__init__(view.whole.path, view.whole.options, view.whole)
        self.own_part, self.snapshot = view.part, view.whole.snapshot
        self.shows_progress = view.whole.shows_progress
        self._open_fields()
        self._compose(PartAdjacency(self, self.snapshot, view.whole.adjacency, view.part, view.out_degree))

    def _compose(self, adjacency: Adjacency) -> None:
        self.adjacency = adjacency
        self.partitions = Partitions(self, self.snapshot, self.adjacency)
        self.row_caches = RowCaches(self, self.snapshot, self.adjacency, self.partitions)
        self.neighbor_lists = NeighborLists(self, self.snapshot, self.adjacency, self.partitions, self.row_caches)

    def _open_fields(self) -> None:
        catalog, types = self.catalog, self.snapshot.types
        self.num_nodes = catalog.num_nodes
        self.num_edges = catalog.num_edges
        of_types: list[tuple[NodeType, FieldRecord]] = []
        for kind in types.nodes.values():
            n = kind.n if self.own_part is None or self.own_part.row_of is None else self.own_part.n_nodes
            for name, record in catalog.by_role("feature", f"node/{kind.name}").items():
                if record.n_rows != n:
                    raise FormatError(f"{self.path}: feature {name!r} has {record.n_rows} rows for {n} nodes", self.path)
                if types.is_one:
                    self._open_feature_file(name, record)
                else:
                    of_types.append((kind, record))
        self._open_columns(of_types)
        self._list_features()
        for of in types.edges.values():
            for name, record in catalog.by_role("feature", f"edge/{edge_name(of.key)}").items():
                if record.n_rows != of.n_edges:
                    raise FormatError(f"{self.path}: {name!r} has {record.n_rows} rows for {of.n_edges} edges", self.path)
                self._open_edge_feature(of.key, record)
        self._list_edge_features()
        self._list_data()

    def _open_edge_feature(self, of: EdgeKey, record: FieldRecord) -> None:
        full = qualified(edge_name(of), record.name)
        file, reopen = self.snapshot.rows_of(record), partial(reduced, self, full, "edge_features")
        self._open_store(self._edge_stores, full, file, record.shape, torch_dtype(record.dtype), reopen)

    def _list_edge_features(self) -> None:
        self.edge_features = Fields.of("edge feature", self._edge_stores)

    def _list_data(self) -> None:
        data: dict[str, FieldRecord] = {}
        for kind in self.types.nodes:
            data |= {qualified(kind, name): each for name, each in self.catalog.by_role("data", f"node/{kind}").items()}
        self._data_records = data
        self.node_data = Fields("node data", list(data), self._load_data, lambda name: (data[name].dtype, data[name].shape))

    def _open_columns(self, fields: list[tuple[NodeType, FieldRecord]]) -> None:
        """Open features of types, of which some may share a file."""
        of_files: dict[str, list[tuple[NodeType, FieldRecord]]] = {}
        for kind, record in fields:
            of_files.setdefault(" ".join(part.file for part in record.parts), []).append((kind, record))
        for of_file in of_files.values():
            self._open_column(of_file)

    def _open_column(self, fields: list[tuple[NodeType, FieldRecord]]) -> None:
        """Open a file of features that some types of nodes share, and a store of the rows of each."""
        record = fields[0][1]
        file = self.snapshot.rows_of(record)
        name = qualified(",".join(kind.name for kind, _ in fields), record.name)
        parts = tuple((kind, each.parts[0].at or 0) for kind, each in fields)
        self._column_rows[name] = RowsOfTypes(file.n_rows, parts)
        dtype, width = torch_dtype(record.dtype), record.shape[1:]
        self._open_store(self._stores, name, file, (file.n_rows, *width), dtype, partial(reduced, self, name))
        for kind, first in parts:
            own = qualified(kind.name, record.name)
            if len(parts) == 1 and kind.n == file.n_rows:  # else the file has rows of a type that has another one since
                self._type_stores[own] = self._stores[name]
                continue
            rows = SourceRange(file, first, kind.n)
            self._open_store(self._type_stores, own, rows, (kind.n, *width), dtype, partial(reduced, self, own))

    def _open_feature_file(self, name: str, record: FieldRecord) -> None:
        reopen, source = partial(reduced, self, name), cast(RowSource, self.snapshot.rows_of(record))
        if self.own_part is not None and self.own_part.row_of is not None:
            source = PartRows(self.snapshot.file_of(record), self.own_part.row_of)  # rows of a part are never changed
        shape = (self.num_nodes, *record.shape[1:])
        self._open_store(self._stores, name, source, shape, torch_dtype(record.dtype), reopen)

    def _close_files(self) -> None:
        with contextlib.ExitStack() as stack:  # runs all calls, from the last one up, even if one fails
            if self._whole is None:
                stack.callback(self.snapshot.close)
            stack.callback(self.adjacency.close)
            stack.callback(self.neighbor_lists.drop)

    # -- node data ---------------------------------------------------------------------------------------------------------------

    def _data_bytes(self, name: str) -> int:
        record = self._data_records[name]
        return record.n_rows * record.row_bytes

    def data_shape(self, name: str) -> torch.Size:
        """Get the shape of ``node_data[name]`` without reading it; KeyError if there is no such field."""
        if name not in self.node_data:
            return torch.Size(self.node_data[name].shape)  # raises the KeyError that lists the existing names
        return torch.Size(self._data_records[name].shape)

    def _read_data(self, name: str) -> torch.Tensor:
        record = self._data_records[name]
        tensor = empty_tensor(record.shape, torch_dtype(record.dtype))
        if len(tensor):
            rows = tensor.reshape(len(tensor), -1).view(torch.uint8).numpy()
            self.snapshot.rows_of(record).read(0, len(rows), rows)
        return tensor

    @property
    def types(self) -> Types:
        """See :attr:`StoredGraph.types`."""
        return self.snapshot.types

    @overload
    def __getitem__(self, name: str) -> Any: ...
    @overload
    def __getitem__(self, name: EdgeKey) -> EdgeView: ...

    def __getitem__(self, name: str | EdgeKey) -> Any:
        """Get a feature or a type by name, as in PyG.

        Without types, ``g["x"]`` is ``g.features["x"]``. With types, ``g["paper"]`` is a :class:`NodeView`, and
        ``g["author", "writes", "paper"]`` an :class:`EdgeView`. ``g.features`` always means features.

        Raises
        ------
        KeyError
            No feature or type has this name; the error lists the existing names.
        TypeError
            The index is not a name.
        """
        if self.types.is_one or isinstance(name, str):
            return super().__getitem__(cast(str, name))
        if not isinstance(name, tuple):
            raise TypeError(f"a graph of several types is indexed by the name of a type, not by {name!r}")
        edges = self.types.edges
        if name not in edges:
            raise KeyError(f"no edge type {name!r}; there is {listed(edges)}")
        return EdgeView(name, edges[name].n_edges, cast(Fields, self.edge_features).of_type(edge_name(name)))

    def find_part(self, i: Any, name: str | None = None) -> tuple[int, KeptParts]:
        """Find a self-reliant part that is kept, by default one of those kept last; raises as :meth:`OutOfCoreGraph.part`."""
        self.check_open()
        self.refuse_part("part()")
        self.refuse_types("part()")
        kept = self.partitions.self_reliant(name)
        number = check_integer("i, the number of a part,", i)
        if not 0 <= number < kept.n_parts:
            raise IndexError(f"part {number} is not in [0, {kept.n_parts}), the parts {kept.name!r}")
        return number, kept

    def train_nodes_of(self, number: int, kept: KeptParts, parts: SelfReliantParts | None = None) -> npt.NDArray[np.int64]:
        """Read the training nodes of a part; ValueError if it has none, or cannot be taken alone."""
        parts = kept.self_reliant() if parts is None else parts
        train = parts.part(number).numpy()
        if not len(train):
            raise ValueError(f"part {number} of {kept.name!r} has no training nodes: make fewer parts")
        if parts.hops > MOST_HOPS:
            raise ValueError(f"parts {kept.name!r} have hops={parts.hops}; those of at most {MOST_HOPS} hops can be taken alone")
        return train

    def check_room_for_part(self, holder: str, kept: KeptParts, n_bytes: int) -> None:
        """Raise BudgetError unless ``n_bytes`` fit beside the adjacency and the training nodes; ``needed`` is enough for all."""
        n_bytes += 8 * (kept.n_train + 2 * kept.n_parts + 1)
        try:
            self.budget.reserve(holder, self.adjacency.bytes_to_come() + n_bytes).release()
        except BudgetError as error:
            others, needed = self.budget.used - self.reader.held_bytes + n_bytes, error.needed or 0
            # What the reader and the adjacency hold grows with the budget.
            while (more := others + self.reader.least_bytes(needed) + self.adjacency.bytes_to_come(needed)) > needed:
                needed = more
            raise BudgetError(error.reason, needed) from None

    def reach_part(self, number: int, kept: KeptParts, progress: bool) -> View:
        """Find the nodes of a part, and their degrees in it."""
        self.check_room_for_part(HOLDER, kept, reach_bytes(self.num_nodes, self.num_edges, counts=True))
        parts = kept.self_reliant()
        train = self.train_nodes_of(number, kept, parts)
        n_nodes = int(parts.n_nodes[number])
        with self.or_closed(), Progress("part", self.num_edges, progress, unit=" edges", delay_s=SHOWN_AFTER_S) as bar:
            hop_of, out_degree = reach(self.topology, train, parts.hops, self.budget, bar.add, counts=True)
            bar.reach(self.num_edges)
        part = Part(kept.name, number, parts.hops, hop_of)
        if part.n_nodes != n_nodes:
            raise CorruptionError(f"{part} has {part.n_nodes} nodes, and {n_nodes} by what is kept: partition again", self.path)
        assert out_degree is not None
        return View(self, part, out_degree)

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

    # -- its parts ---------------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, str]:
        """Identify the file of each field by its id, by key; anything made from a field is stale once the field's id differs.

        The id of the adjacency is that of the files that first held it, so :func:`featstore.convert` does not change it.
        """
        return fingerprint_of(self.catalog)

    @property
    def topology(self) -> Topology:
        """The adjacency.

        In CSC form the first use reads the offsets, 8 bytes a node, which the budget counts from then on. In chunked form it
        reads the directory of chunks, and the budget also counts a cache of pages.
        """
        return self.adjacency.topology

    @property
    def neighbor_cache(self) -> NeighborCache | None:
        """Neighbour lists in memory, see :meth:`~featstore.OutOfCoreGraph.cache_neighbors`; None without any."""
        return self.neighbor_lists.cache

    @neighbor_cache.setter
    def neighbor_cache(self, cache: NeighborCache | None) -> None:
        self.neighbor_lists.cache = cache

    def topology_bytes(self) -> int:
        """Bound the bytes that the adjacency will hold after its first use; 0 if it is open already."""
        return self.adjacency.bytes_to_come()

    def short_degrees(self) -> npt.NDArray[np.uint16]:
        """See :meth:`Adjacency.short_degrees`."""
        return self.adjacency.short_degrees()

    def policy_inputs(
        self,
        row_bytes: int,
        counts: Given = None,
        parts: GivenParts = None,
        seed: int = 0,
        budget: Budget | None = None,
        rows: NodeRows | None = None,
    ) -> PolicyInputs:
        """See :meth:`RowCaches.policy_inputs`."""
        return self.row_caches.policy_inputs(row_bytes, counts, parts, seed, budget, rows=rows)

    # -- features made of others -------------------------------------------------------------------------------------------------

    @property
    def catalog(self) -> Catalog:
        """The catalog of the open commit, with fields and entries that this handle has added since."""
        return self.snapshot.catalog

    def edge_lists(self, key: EdgeKey = ONE_EDGE) -> EdgeLists:
        """Get the neighbour lists of a type of edges; those of a graph of one type by default."""
        return EdgeLists(self.topology, self.types.edges[key])

    def rows_of(self, name: str, of: str = ONE_NODE) -> StoredRows:
        """Get the stored rows of a feature of a type of nodes, by its name there, in the form that passes over them need."""
        record = self.catalog.fields[f"node/{of}/{name}"]
        file, width = self.snapshot.rows_of(record), math.prod(record.shape[1:])
        return StoredRows(file, torch_dtype(record.dtype), width, record.parts[0].at or 0)

    def check_in_file(self, name: str) -> None:
        """Check that the rows of a feature, by its name in the graph, can be passed over; ValueError if it was attached."""
        if name in self._leaves:
            raise ValueError(f"the rows of {name!r} are in no file of {self.path}: what passes over all rows cannot use them")

    def check_replaceable(self, name: str, of: str = ONE_NODE) -> None:
        """Check that a feature may be replaced, or made; BusyError while a loader uses its cache."""
        full = qualified(of, name)
        with self.locked():
            if full in self._leaves:
                raise ValueError(f"{full!r} is a feature that was attached to {self.path}: close it, or take another name")
            stores = [self._stores[self.column_of(full)]] if full in self.features else []
            stores += [view._stores[name] for view in self._views.values() if name in view._stores]
            if any(store.cache is not None and store.cache.in_use for store in stores):
                raise BusyError(f"the cache of {full!r} follows the plans of a loader that is in the middle of an epoch")

    def _with_views(self) -> list[OpenDataset]:
        """List this graph and its open views, which share its files."""
        return [self, *(view for view in self._views.values() if isinstance(view, OpenDataset))]

    def adopt_feature(self, catalog: Catalog, name: str, of: str = ONE_NODE) -> None:
        """Open a feature that was just committed; BusyError if a loader has begun to use the replaced feature."""
        key, full = f"node/{of}/{name}", qualified(of, name)
        with self.locked():
            with opening_committed(f"the feature {full!r} is in {self.path}, but opening it failed", self.path):
                self.snapshot.adopt(catalog, key, catalog.names_of(catalog.fields[key]))
            record = self.catalog.fields[key]
            if self.types.is_one:
                graphs = self._with_views()
                for store in [each._stores[name] for each in graphs if name in each._stores]:
                    self.drop_cache(store)
                for each in graphs:
                    each._open_feature_file(name, record)
                    each._list_features()
            else:
                self._open_feature_of_type(self.types.nodes[of], record)
                self._list_features()

    def adopt_rows(self, catalog: Catalog, keys: Sequence[str], name: str, of: str) -> None:
        """Open a feature whose rows were just changed; ``keys`` are those of all fields in its file."""
        if self.types.is_one:
            self.adopt_feature(catalog, name, of)
            return
        with self.locked():
            full = qualified(of, name)
            with opening_committed(f"the new rows of {full!r} are in {self.path}, but opening them failed", self.path):
                for key in keys:
                    self.snapshot.adopt(catalog, key, catalog.names_of(catalog.fields[key]))
            column = self.column_of(full)
            self.drop_cache(self._stores[column])
            del self._stores[column]
            kinds = self._column_rows.pop(column).kinds
            # Another handle may have replaced or removed rows of some types: they stay in the old file here, beside the new one.
            self._open_columns([(kind, self.catalog.fields[f"node/{kind.name}/{name}"]) for kind in kinds])
            self._list_features()

    def forget_feature(self, catalog: Catalog, name: str, of: str = ONE_NODE) -> None:
        """Close a feature that a commit has just removed; stores of it that were handed out go on reading."""
        with self.locked():
            self.snapshot.forget(catalog, f"node/{of}/{name}")
            if self.types.is_one:
                for each in self._with_views():
                    self.drop_cache(each._stores[name])
                    del each._stores[name]
                    each._list_features()
            else:
                self._leave_column(self.types.nodes[of], name)
                self._list_features()

    def adopt_data(self, catalog: Catalog, name: str, of: str = ONE_NODE) -> None:
        """Open node data that was just committed."""
        key, full = f"node/{of}/{name}", qualified(of, name)
        with self.locked():
            with opening_committed(f"the node data {full!r} is in {self.path}, but opening it failed", self.path):
                self.snapshot.adopt(catalog, key, catalog.names_of(catalog.fields[key]))
            self._list_data_anew(full)

    def forget_data(self, catalog: Catalog, name: str, of: str = ONE_NODE) -> None:
        """Forget node data that a commit has just removed; tensors that were handed out stay valid."""
        with self.locked():
            self.snapshot.forget(catalog, f"node/{of}/{name}")
            self._list_data_anew(qualified(of, name))

    def _list_data_anew(self, changed: str) -> None:
        held = self._data.pop(changed, None)
        if held is not None:
            self.budget.release_with(*held)  # loaders may go on with it as labels
        for each in self._with_views():
            each._list_data()

    def check_edge_feature_unused(self, name: str) -> None:
        """Raise BusyError while a loader uses the cache of an edge feature, if there is one of this name."""
        for each in self._with_views():
            store = each._edge_stores.get(name)
            if store is not None and store.cache is not None and store.cache.in_use:
                raise BusyError(f"the cache of {name!r} follows the plans of a loader that is in the middle of an epoch")

    def adopt_edge_feature(self, catalog: Catalog, name: str, of: EdgeKey) -> None:
        """Open a feature of edges that was just committed; BusyError if a loader has begun to use the one that it replaces."""
        key, full = f"edge/{edge_name(of)}/{name}", qualified(edge_name(of), name)
        with self.locked():
            with opening_committed(f"the edge feature {full!r} is in {self.path}, but opening it failed", self.path):
                self.snapshot.adopt(catalog, key, catalog.names_of(catalog.fields[key]))
            for each in self._with_views():
                if full in each._edge_stores:
                    self.drop_cache(each._edge_stores[full])
                each._open_edge_feature(of, self.catalog.fields[key])
                each._list_edge_features()

    def forget_edge_feature(self, catalog: Catalog, name: str, of: EdgeKey) -> None:
        """Close a feature of edges that a commit has just removed; stores of it that were handed out go on reading."""
        full = qualified(edge_name(of), name)
        with self.locked():
            self.snapshot.forget(catalog, f"edge/{edge_name(of)}/{name}")
            for each in self._with_views():
                self.drop_cache(each._edge_stores[full])
                del each._edge_stores[full]
                each._list_edge_features()

    def _open_feature_of_type(self, kind: NodeType, record: FieldRecord) -> None:
        """Open a new file of a type's feature; if it replaces one, the other types of that one's column keep theirs."""
        if qualified(kind.name, record.name) in self._type_stores:
            self._leave_column(kind, record.name)
        self._open_column([(kind, record)])

    def _leave_column(self, kind: NodeType, name: str) -> None:
        """Close a type's feature; the other types of its column keep theirs."""
        own = qualified(kind.name, name)
        column = self.column_of(own)
        self.drop_cache(self._stores[column])
        del self._stores[column], self._type_stores[own]
        others = (each for each in self._column_rows.pop(column).kinds if each != kind)
        left = [(each, self.catalog.fields[f"node/{each.name}/{name}"]) for each in others]
        self._open_columns(left)
