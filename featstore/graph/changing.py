"""Changes of an open dataset: fields are added, removed and updated, and nodes appended, each in one commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from featstore.changes.append import append_nodes, appended_rows
from featstore.changes.fields import Place, add_field, remove_field
from featstore.changes.insertion import Insertion
from featstore.changes.updates import given_rows, update_rows
from featstore.config import check_at_least, check_flag, listed
from featstore.creation.source import ArrayLike
from featstore.gather.rowindex import resolve_rows
from featstore.graph.adjacency import Adjacency
from featstore.graph.base import StoredGraph
from featstore.graph.derive.provenance import stale_features
from featstore.graph.feature import FeatureStore
from featstore.graph.openfields import OpenFields
from featstore.graph.snapshot import Snapshot
from featstore.idmaps.idmap import maps_of
from featstore.storage.catalog import Catalog
from featstore.topology.types import ONE_EDGE, ONE_NODE, EdgeKey, Types, edge_name, qualified

__all__ = ["Changes"]


class Changes:
    """Changes of a graph's dataset, which its open fields follow."""

    def __init__(self, graph: StoredGraph, snapshot: Snapshot, adjacency: Adjacency, fields: OpenFields) -> None:
        self._graph, self._snapshot, self._adjacency, self._fields = graph, snapshot, adjacency, fields

    def add_feature(
        self, name: str, rows: ArrayLike, type: str | EdgeKey | None, overwrite: bool, progress: bool
    ) -> FeatureStore:
        """See :meth:`featstore.OutOfCoreGraph.add_feature`."""
        place = self._place_to_change("add_feature()", type)
        self._add(place, "feature", name, rows, overwrite, progress)
        return self._store(place, name)

    def add_data(self, name: str, rows: ArrayLike, type: str | None, overwrite: bool, progress: bool) -> None:
        """See :meth:`featstore.OutOfCoreGraph.add_data`."""
        if isinstance(type, tuple):
            raise TypeError(f"node data is of a type of nodes, not of edges {type!r}; edges have features: add_feature()")
        self._add(self._place_to_change("add_data()", type), "data", name, rows, overwrite, progress)

    def _add(self, place: Place, role: str, name: str, rows: ArrayLike, overwrite: Any, progress: Any) -> None:
        graph = self._graph
        overwrite, progress = check_flag("overwrite", overwrite), check_flag("progress", progress)
        if role == "feature":
            self._check_replaceable(place, name)
        with graph.or_closed():
            catalog = add_field(
                graph.path,
                self._snapshot.catalog,
                place,
                role,
                name,
                rows,
                overwrite=overwrite,
                budget=graph.budget,
                progress=progress,
                own=self._snapshot.lock,
            )
            self._adopt(catalog, place, role, name)

    def append_nodes(
        self,
        n: int,
        features: Mapping[str, ArrayLike] | None,
        data: Mapping[str, ArrayLike] | None,
        type: str | None,
        progress: bool,
    ) -> range:
        """See :meth:`featstore.OutOfCoreGraph.append_nodes`."""
        graph, snapshot = self._graph, self._snapshot
        graph.check_open()
        graph.refuse_part("append_nodes()")
        new = Insertion(graph.types, self._type_of_nodes(type), check_at_least("n", n, 1))
        if new.of in maps_of(snapshot.catalog):
            of = "" if graph.types.is_one else f" of type {new.of!r}"
            raise NotImplementedError(
                f"the nodes{of} of {graph.path} have names, which new ones would lack: import the tables with the new nodes"
            )
        progress = check_flag("progress", progress)
        sources = appended_rows(snapshot.catalog, new, features, data)
        with graph.or_closed():
            catalog = append_nodes(
                graph.path,
                snapshot.catalog,
                new,
                sources,
                snapshot.rows_of,
                snapshot.file_of,
                snapshot.blocks_of_patch,
                lambda: self._adjacency.topology,
                budget=graph.budget,
                progress=progress,
                own=snapshot.lock,
                stale=stale_features(snapshot.catalog),
            )
        snapshot.committed(catalog)
        return range(new.kind.n, new.kind.n + new.n)

    def _type_of_nodes(self, type: str | None) -> str:
        """Check the name of a type of nodes, which may be left out if there is one without a name."""
        graph = self._graph
        names = listed(graph.types.nodes)
        if type is None and not graph.types.is_one:
            raise ValueError(f"the graph has several types, so type= names that of the new nodes: {names}")
        if type is not None and not isinstance(type, str):
            raise TypeError(f"type must be the name of a node type, one of {names}, not {type!r}")
        of = ONE_NODE if type is None else type
        if of not in graph.types.nodes:
            raise KeyError(f"no node type {of!r}; there is {names}")
        return of

    def update_data(self, name: str, ids: Any, rows: Any, type: str | None, progress: bool) -> None:
        """See :meth:`featstore.OutOfCoreGraph.update_data`."""
        if isinstance(type, tuple):
            raise TypeError(f"node data is of a type of nodes, not of edges {type!r}; edges have features")
        place = self._place_to_change("update_data()", type)
        self._fields.data_shape(place.label + name)  # a KeyError lists the existing names
        catalog, _ = self._update(place, name, ids, rows, progress)
        self._fields.adopt_data(catalog, name, place.prefix.partition("/")[2])

    def _update(self, place: Place, name: str, ids: Any, rows: Any, progress: Any) -> tuple[Catalog, list[str]]:
        """Write and commit new rows of a field; return the new catalog, and the keys of the fields in the same file."""
        graph, snapshot = self._graph, self._snapshot
        progress, key = check_flag("progress", progress), place.key(name)
        if key not in snapshot.catalog.fields:
            raise KeyError(f"{place.label}{name!r} was removed from {graph.path}")
        record = snapshot.catalog.fields[key]
        what = f"{place.label}{name}"
        index, axes = resolve_rows(ids, record.shape)
        make = partial(given_rows, repr(what), index, axes, rows, record.shape, record.dtype, record.parts[0].at or 0)
        if not len(index):
            make()  # checks
            return snapshot.catalog, [key]
        with graph.or_closed():
            return update_rows(
                graph.path,
                snapshot.catalog,
                key,
                len(index),
                make,
                snapshot.rows_of(record),
                snapshot.blocks_of_patch,
                budget=graph.budget,
                progress=progress,
                own=snapshot.lock,
            )

    def update_rows(self, name: str, ids: Any, rows: Any, progress: bool) -> FeatureStore:
        """Change rows of a feature of nodes, given by its full name; see :meth:`FeatureStore.update`."""
        graph = self._graph
        graph.check_open()
        of, field = (ONE_NODE, name) if graph.types.is_one else name.rsplit("/", 1)
        self._fields.check_replaceable(field, of)
        place = self._place(of)
        catalog, keys = self._update(place, field, ids, rows, progress)
        self._fields.adopt_rows(catalog, keys, field, of)
        return self._store(place, field)

    def update_edge_rows(self, name: str, ids: Any, rows: Any, progress: bool) -> FeatureStore:
        """Change rows of a feature of edges, given by its full name; see :meth:`FeatureStore.update`."""
        graph = self._graph
        graph.check_open()
        of, field = (ONE_EDGE, name) if graph.types.is_one else _edge_of(name)
        self._fields.check_edge_feature_unused(name)
        place = self._place(of)
        catalog, _ = self._update(place, field, ids, rows, progress)
        self._fields.adopt_edge_feature(catalog, field, of)
        return self._store(place, field)

    def remove_feature(self, name: str, type: str | EdgeKey | None) -> None:
        """See :meth:`featstore.OutOfCoreGraph.remove_feature`."""
        graph = self._graph
        place = self._place_to_change("remove_feature()", type)
        try:
            self._store(place, name)  # a KeyError lists the existing names
        except KeyError:
            if type is None and name in graph.edge_features:
                raise KeyError(f"{name!r} is a feature of edges: give type={ONE_EDGE}") from None
            if place.label + name in graph.node_data:
                raise KeyError(f"{name!r} is node data: remove_data() removes it") from None
            raise
        self._check_replaceable(place, name)
        catalog = remove_field(graph.path, self._snapshot.catalog, place, name, self._snapshot.lock)
        of = place.prefix.partition("/")[2]
        if place.is_of_edges:
            self._fields.forget_edge_feature(catalog, name, _edge_key(of))
        else:
            self._fields.forget_feature(catalog, name, of)

    def remove_data(self, name: str, type: str | None) -> None:
        """See :meth:`featstore.OutOfCoreGraph.remove_data`."""
        if isinstance(type, tuple):
            raise TypeError(f"node data is of a type of nodes, not of edges {type!r}; edges have features: remove_feature()")
        place = self._place_to_change("remove_data()", type)
        self._fields.data_shape(place.label + name)  # a KeyError lists the existing names
        catalog = remove_field(self._graph.path, self._snapshot.catalog, place, name, self._snapshot.lock)
        self._fields.forget_data(catalog, name, place.prefix.partition("/")[2])

    def _place(self, type: str | EdgeKey | None) -> Place:
        """Find the nodes or edges of a type."""
        types = self._graph.types
        if type is None:
            if not types.is_one:
                names = listed([*types.nodes, *types.edges])
                raise ValueError(f"the graph has several types, so type= names what has the field: {names}")
            type = ONE_NODE
        if isinstance(type, str):
            if type not in types.nodes:
                raise KeyError(f"no node type {type!r}; there is {listed(types.nodes)}")
            return Place(f"node/{type}", types.nodes[type].n, qualified(type, ""), _type_with_rows(types))
        if not isinstance(type, tuple):
            raise TypeError(f"type must be the name of a node type, or (source, relation, destination), not {type!r}")
        if type not in types.edges:
            raise KeyError(f"no edge type {type!r}; there is {listed(types.edges)}")
        name = edge_name(type)
        return Place(f"edge/{name}", types.edges[type].n_edges, qualified(name, ""))

    def _place_to_change(self, what: str, type: str | EdgeKey | None) -> Place:
        self._graph.check_open()
        self._graph.refuse_part(what)
        return self._place(type)

    def _check_replaceable(self, place: Place, name: str) -> None:
        if place.is_of_edges:
            with self._graph.locked():
                self._fields.check_edge_feature_unused(place.label + name)
        else:
            self._fields.check_replaceable(name, place.prefix.partition("/")[2])

    def _store(self, place: Place, name: str) -> FeatureStore:
        graph = self._graph
        found: FeatureStore = (graph.edge_features if place.is_of_edges else graph.features)[place.label + name]
        return found

    def _adopt(self, catalog: Catalog, place: Place, role: str, name: str) -> None:
        """Open a field that was just committed."""
        of = place.prefix.partition("/")[2]
        if place.is_of_edges:
            self._fields.adopt_edge_feature(catalog, name, _edge_key(of))
        elif role == "feature":
            self._fields.adopt_feature(catalog, name, of)
        else:
            self._fields.adopt_data(catalog, name, of)


def _type_with_rows(types: Types) -> dict[int, str]:
    """Say of numbers of rows which type of edges has as many, where only one has."""
    found = Counter(each.n_edges for each in types.edges.values())
    return {
        each.n_edges: f"; edges are {each.n_edges}: give type={each.key}"
        for each in types.edges.values()
        if found[each.n_edges] == 1
    }


def _edge_of(name: str) -> tuple[EdgeKey, str]:
    of, field = name.rsplit("/", 1)
    return _edge_key(of), field


def _edge_key(name: str) -> EdgeKey:
    source, relation, destination = name.split(",")
    return source, relation, destination
