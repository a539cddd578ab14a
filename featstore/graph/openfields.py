"""The fields of an open commit: stores of their rows, and how the stores follow what this process commits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch

from featstore.budget import Living
from featstore.creation.source import torch_dtype
from featstore.errors import BusyError, FormatError
from featstore.gather.buffers import empty_tensor
from featstore.gather.partrows import PartRows
from featstore.gather.sources import RowSource, SourceRange
from featstore.graph.base import StoredGraph
from featstore.graph.fields import Fields
from featstore.graph.passes import StoredRows
from featstore.graph.reopen import reduced
from featstore.graph.snapshot import Snapshot, opening_committed
from featstore.storage.catalog import Catalog, FieldRecord
from featstore.topology.noderows import RowsOfTypes
from featstore.topology.types import ONE_NODE, EdgeKey, NodeType, edge_name, qualified

__all__ = ["OpenFields"]


class OpenFields:
    """Stores of the fields of an open dataset's snapshot, and of a change of them that this handle has committed.

    ``whole`` has the fields of the graph that ``graph`` is a view of: the stores of its views change with its own.
    """

    def __init__(self, graph: StoredGraph, snapshot: Snapshot, whole: OpenFields | None = None) -> None:
        self._graph, self._snapshot = graph, snapshot
        self._views: Living[OpenFields] = Living()
        self._open_all()
        if whole is not None:
            whole._views.add(self)

    @property
    def catalog(self) -> Catalog:
        """The catalog of the open commit, with fields and entries that this handle has added since."""
        return self._snapshot.catalog

    def _open_all(self) -> None:
        graph, catalog, types = self._graph, self.catalog, self._snapshot.types
        of_types: list[tuple[NodeType, FieldRecord]] = []
        for kind in types.nodes.values():
            n = kind.n if graph.own_part is None or graph.own_part.row_of is None else graph.own_part.n_nodes
            for name, record in catalog.by_role("feature", f"node/{kind.name}").items():
                if record.n_rows != n:
                    raise FormatError(f"{graph.path}: feature {name!r} has {record.n_rows} rows for {n} nodes", graph.path)
                if types.is_one:
                    self._open_feature_file(name, record)
                else:
                    of_types.append((kind, record))
        self._open_columns(of_types)
        graph.list_features()
        for of in types.edges.values():
            for name, record in catalog.by_role("feature", f"edge/{edge_name(of.key)}").items():
                if record.n_rows != of.n_edges:
                    raise FormatError(f"{graph.path}: {name!r} has {record.n_rows} rows for {of.n_edges} edges", graph.path)
                self._open_edge_feature(of.key, record)
        self._list_edge_features()
        self._list_data()

    def _open_edge_feature(self, of: EdgeKey, record: FieldRecord) -> None:
        graph = self._graph
        full = qualified(edge_name(of), record.name)
        file, reopen = self._snapshot.rows_of(record), partial(reduced, graph, full, "edge_features")
        graph.open_store(graph.edge_stores, full, file, record.shape, torch_dtype(record.dtype), reopen)

    def _list_edge_features(self) -> None:
        graph = self._graph
        graph.edge_features = Fields.of("edge feature", graph.edge_stores)

    def _list_data(self) -> None:
        graph = self._graph
        data: dict[str, FieldRecord] = {}
        for kind in graph.types.nodes:
            data |= {qualified(kind, name): each for name, each in self.catalog.by_role("data", f"node/{kind}").items()}
        self._data_records = data
        graph.node_data = Fields("node data", list(data), graph.load_data, lambda name: (data[name].dtype, data[name].shape))

    def _open_columns(self, fields: list[tuple[NodeType, FieldRecord]]) -> None:
        """Open features of types, of which some may share a file."""
        of_files: dict[str, list[tuple[NodeType, FieldRecord]]] = {}
        for kind, record in fields:
            of_files.setdefault(" ".join(part.file for part in record.parts), []).append((kind, record))
        for of_file in of_files.values():
            self._open_column(of_file)

    def _open_column(self, fields: list[tuple[NodeType, FieldRecord]]) -> None:
        """Open a file of features that some types of nodes share, and a store of the rows of each."""
        graph = self._graph
        record = fields[0][1]
        file = self._snapshot.rows_of(record)
        name = qualified(",".join(kind.name for kind, _ in fields), record.name)
        parts = tuple((kind, each.parts[0].at or 0) for kind, each in fields)
        graph.column_rows[name] = RowsOfTypes(file.n_rows, parts)
        dtype, width = torch_dtype(record.dtype), record.shape[1:]
        graph.open_store(graph.columns, name, file, (file.n_rows, *width), dtype, partial(reduced, graph, name))
        for kind, first in parts:
            own = qualified(kind.name, record.name)
            if len(parts) == 1 and kind.n == file.n_rows:  # else the file has rows of a type that has another one since
                graph.type_stores[own] = graph.columns[name]
                continue
            rows = SourceRange(file, first, kind.n)
            graph.open_store(graph.type_stores, own, rows, (kind.n, *width), dtype, partial(reduced, graph, own))

    def _open_feature_file(self, name: str, record: FieldRecord) -> None:
        graph = self._graph
        reopen, source = partial(reduced, graph, name), cast(RowSource, self._snapshot.rows_of(record))
        if graph.own_part is not None and graph.own_part.row_of is not None:
            source = PartRows(self._snapshot.file_of(record), graph.own_part.row_of)  # rows of a part are never changed
        shape = (graph.num_nodes, *record.shape[1:])
        graph.open_store(graph.columns, name, source, shape, torch_dtype(record.dtype), reopen)

    def data_bytes(self, name: str) -> int:
        """Count the bytes of a field of node data in memory."""
        record = self._data_records[name]
        return record.n_rows * record.row_bytes

    def data_shape(self, name: str) -> torch.Size:
        """Get the shape of ``node_data[name]`` without reading it; KeyError if there is no such field."""
        graph = self._graph
        if name not in graph.node_data:
            return torch.Size(graph.node_data[name].shape)  # raises the KeyError that lists the existing names
        return torch.Size(self._data_records[name].shape)

    def read_data(self, name: str) -> torch.Tensor:
        """Read a field of node data."""
        record = self._data_records[name]
        tensor = empty_tensor(record.shape, torch_dtype(record.dtype))
        if len(tensor):
            rows = tensor.reshape(len(tensor), -1).view(torch.uint8).numpy()
            self._snapshot.rows_of(record).read(0, len(rows), rows)
        return tensor

    def rows_of(self, name: str, of: str = ONE_NODE) -> StoredRows:
        """Get the stored rows of a feature of a type of nodes, by its name there, in the form that passes over them need."""
        record = self.catalog.fields[f"node/{of}/{name}"]
        file, width = self._snapshot.rows_of(record), math.prod(record.shape[1:])
        return StoredRows(file, torch_dtype(record.dtype), width, record.parts[0].at or 0)

    def check_replaceable(self, name: str, of: str = ONE_NODE) -> None:
        """Check that a feature may be replaced, or made; BusyError while a loader uses its cache."""
        graph = self._graph
        full = qualified(of, name)
        with graph.locked():
            if graph.is_attached(full):
                raise ValueError(f"{full!r} is a feature that was attached to {graph.path}: close it, or take another name")
            stores = [graph.columns[graph.column_of(full)]] if full in graph.features else []
            stores += [each._graph.columns[name] for each in self._of_views() if name in each._graph.columns]
            if any(store.cache is not None and store.cache.in_use for store in stores):
                raise BusyError(f"the cache of {full!r} follows the plans of a loader that is in the middle of an epoch")

    def _of_views(self) -> list[OpenFields]:
        """List the fields of the graph's open views, which share its files."""
        return [each for each in self._views if not each._graph.closed]

    def _adopt(self, catalog: Catalog, key: str, what: str) -> FieldRecord:
        """Add the entry of a field that was just committed, which messages call ``what``, to the open commit; return it."""
        path = self._graph.path
        with opening_committed(f"{what} is in {path}, but opening it failed", path):
            self._snapshot.adopt(catalog, key, catalog.names_of(catalog.fields[key]))
        return self.catalog.fields[key]

    def adopt_feature(self, catalog: Catalog, name: str, of: str = ONE_NODE) -> None:
        """Open a feature that was just committed; BusyError if a loader has begun to use the replaced feature."""
        graph = self._graph
        with graph.locked():
            record = self._adopt(catalog, f"node/{of}/{name}", f"the feature {qualified(of, name)!r}")
            if graph.types.is_one:
                graphs = (self, *self._of_views())
                for store in [each._graph.columns[name] for each in graphs if name in each._graph.columns]:
                    graph.drop_cache(store)
                for each in graphs:
                    each._open_feature_file(name, record)
                    each._graph.list_features()
            else:
                self._open_feature_of_type(graph.types.nodes[of], record)
                graph.list_features()

    def adopt_rows(self, catalog: Catalog, keys: Sequence[str], name: str, of: str) -> None:
        """Open a feature whose rows were just changed; ``keys`` are those of all fields in its file."""
        graph = self._graph
        if graph.types.is_one:
            self.adopt_feature(catalog, name, of)
            return
        with graph.locked():
            full = qualified(of, name)
            with opening_committed(f"the new rows of {full!r} are in {graph.path}, but opening them failed", graph.path):
                for key in keys:
                    self._snapshot.adopt(catalog, key, catalog.names_of(catalog.fields[key]))
            column = graph.column_of(full)
            graph.drop_cache(graph.columns[column])
            del graph.columns[column]
            kinds = graph.column_rows.pop(column).kinds
            # Another handle may have replaced or removed rows of some types: they stay in the old file here, beside the new one.
            self._open_columns([(kind, self.catalog.fields[f"node/{kind.name}/{name}"]) for kind in kinds])
            graph.list_features()

    def forget_feature(self, catalog: Catalog, name: str, of: str = ONE_NODE) -> None:
        """Close a feature that a commit has just removed; stores of it that were handed out go on reading."""
        graph = self._graph
        with graph.locked():
            self._snapshot.forget(catalog, f"node/{of}/{name}")
            if graph.types.is_one:
                for each in (self, *self._of_views()):
                    graph.drop_cache(each._graph.columns[name])
                    del each._graph.columns[name]
                    each._graph.list_features()
            else:
                self._leave_column(graph.types.nodes[of], name)
                graph.list_features()

    def adopt_data(self, catalog: Catalog, name: str, of: str = ONE_NODE) -> None:
        """Open node data that was just committed."""
        full = qualified(of, name)
        with self._graph.locked():
            self._adopt(catalog, f"node/{of}/{name}", f"the node data {full!r}")
            self._list_data_anew(full)

    def forget_data(self, catalog: Catalog, name: str, of: str = ONE_NODE) -> None:
        """Forget node data that a commit has just removed; tensors that were handed out stay valid."""
        with self._graph.locked():
            self._snapshot.forget(catalog, f"node/{of}/{name}")
            self._list_data_anew(qualified(of, name))

    def _list_data_anew(self, changed: str) -> None:
        self._graph.release_data(changed)
        for each in (self, *self._of_views()):
            each._list_data()

    def check_edge_feature_unused(self, name: str) -> None:
        """Raise BusyError while a loader uses the cache of an edge feature, if there is one of this name."""
        for each in (self, *self._of_views()):
            store = each._graph.edge_stores.get(name)
            if store is not None and store.cache is not None and store.cache.in_use:
                raise BusyError(f"the cache of {name!r} follows the plans of a loader that is in the middle of an epoch")

    def adopt_edge_feature(self, catalog: Catalog, name: str, of: EdgeKey) -> None:
        """Open a feature of edges that was just committed; BusyError if a loader has begun to use the one that it replaces."""
        graph = self._graph
        full = qualified(edge_name(of), name)
        with graph.locked():
            record = self._adopt(catalog, f"edge/{edge_name(of)}/{name}", f"the edge feature {full!r}")
            for each in (self, *self._of_views()):
                if full in each._graph.edge_stores:
                    graph.drop_cache(each._graph.edge_stores[full])
                each._open_edge_feature(of, record)
                each._list_edge_features()

    def forget_edge_feature(self, catalog: Catalog, name: str, of: EdgeKey) -> None:
        """Close a feature of edges that a commit has just removed; stores of it that were handed out go on reading."""
        graph = self._graph
        full = qualified(edge_name(of), name)
        with graph.locked():
            self._snapshot.forget(catalog, f"edge/{edge_name(of)}/{name}")
            for each in (self, *self._of_views()):
                graph.drop_cache(each._graph.edge_stores[full])
                del each._graph.edge_stores[full]
                each._list_edge_features()

    def _open_feature_of_type(self, kind: NodeType, record: FieldRecord) -> None:
        """Open a new file of a type's feature; if it replaces one, the other types of that one's column keep theirs."""
        if qualified(kind.name, record.name) in self._graph.type_stores:
            self._leave_column(kind, record.name)
        self._open_column([(kind, record)])

    def _leave_column(self, kind: NodeType, name: str) -> None:
        """Close a type's feature; the other types of its column keep theirs."""
        graph = self._graph
        own = qualified(kind.name, name)
        column = graph.column_of(own)
        graph.drop_cache(graph.columns[column])
        del graph.columns[column], graph.type_stores[own]
        others = (each for each in graph.column_rows.pop(column).kinds if each != kind)
        left = [(each, self.catalog.fields[f"node/{each.name}/{name}"]) for each in others]
        self._open_columns(left)
