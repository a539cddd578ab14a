"""An open dataset that can be changed: fields are added, removed and updated."""

from __future__ import annotations

from functools import partial
from typing import Any

from featstore.changes.fields import Place, add_field
from featstore.changes.updates import given_rows, update_rows
from featstore.config import check_flag, listed
from featstore.creation.source import ArrayLike
from featstore.gather.rowindex import resolve_rows
from featstore.graph.feature import FeatureStore
from featstore.graph.opendataset import OpenDataset
from featstore.storage.catalog import Catalog
from featstore.topology.types import ONE_EDGE, ONE_NODE, EdgeKey, edge_name, qualified

__all__ = ["ChangingDataset"]


class ChangingDataset(OpenDataset):
    """An open dataset whose fields can be changed; users see the subclass :class:`~featstore.OutOfCoreGraph`."""

    def _place(self, type: str | EdgeKey | None) -> Place:
        """Find the nodes or edges of a type."""
        types = self.types
        if type is None:
            if not types.is_one:
                names = listed([*types.nodes, *types.edges])
                raise ValueError(f"the graph has several types, so type= names what has the field: {names}")
            type = ONE_NODE
        if isinstance(type, str):
            if type not in types.nodes:
                raise KeyError(f"no node type {type!r}; there is {listed(types.nodes)}")
            return Place(f"node/{type}", types.nodes[type].n, qualified(type, ""))
        if not isinstance(type, tuple):
            raise TypeError(f"type must be the name of a node type, or (source, relation, destination), not {type!r}")
        if type not in types.edges:
            raise KeyError(f"no edge type {type!r}; there is {listed(types.edges)}")
        name = edge_name(type)
        return Place(f"edge/{name}", types.edges[type].n_edges, qualified(name, ""))

    def _place_to_change(self, what: str, type: str | EdgeKey | None) -> Place:
        self.check_open()
        self.refuse_part(what)
        return self._place(type)

    def _check_replaceable(self, place: Place, name: str) -> None:
        if place.is_of_edges:
            with self.locked():
                self.check_edge_feature_unused(place.label + name)
        else:
            self.check_replaceable(name, place.prefix.partition("/")[2])

    def _store(self, place: Place, name: str) -> FeatureStore:
        found: FeatureStore = (self.edge_features if place.is_of_edges else self.features)[place.label + name]
        return found

    def _adopt(self, catalog: Catalog, place: Place, role: str, name: str) -> None:
        """Open a field that was just committed."""
        of = place.prefix.partition("/")[2]
        if place.is_of_edges:
            self.adopt_edge_feature(catalog, name, _key_of(of))
        elif role == "feature":
            self.adopt_feature(catalog, name, of)
        else:
            self.adopt_data(catalog, name, of)

    def _add(self, place: Place, role: str, name: str, rows: ArrayLike, overwrite: Any, progress: Any) -> None:
        overwrite, progress = check_flag("overwrite", overwrite), check_flag("progress", progress)
        if role == "feature":
            self._check_replaceable(place, name)
        with self.or_closed():
            catalog = add_field(
                self.path,
                self.catalog,
                place,
                role,
                name,
                rows,
                overwrite=overwrite,
                budget=self.budget,
                progress=progress,
                own=self.snapshot.lock,
            )
            self._adopt(catalog, place, role, name)

    def _type_of_nodes(self, type: str | None) -> str:
        """Check the name of a type of nodes, which may be left out if there is one without a name."""
        names = listed(self.types.nodes)
        if type is None and not self.types.is_one:
            raise ValueError(f"the graph has several types, so type= names that of the new nodes: {names}")
        if type is not None and not isinstance(type, str):
            raise TypeError(f"type must be the name of a node type, one of {names}, not {type!r}")
        of = ONE_NODE if type is None else type
        if of not in self.types.nodes:
            raise KeyError(f"no node type {of!r}; there is {names}")
        return of

    def _update(self, place: Place, name: str, ids: Any, rows: Any, progress: Any) -> tuple[Catalog, list[str]]:
        """Write and commit new rows of a field; return the new catalog, and the keys of the fields in the same file."""
        progress, key = check_flag("progress", progress), place.key(name)
        if key not in self.catalog.fields:
            raise KeyError(f"{place.label}{name!r} was removed from {self.path}")
        record = self.catalog.fields[key]
        what = f"{place.label}{name}"
        index, axes = resolve_rows(ids, record.shape)
        make = partial(given_rows, repr(what), index, axes, rows, record.shape, record.dtype, record.parts[0].at or 0)
        if not len(index):
            make()  # checks
            return self.catalog, [key]
        snapshot = self.snapshot
        with self.or_closed():
            return update_rows(
                self.path,
                self.catalog,
                key,
                len(index),
                make,
                snapshot.rows_of(record),
                snapshot.blocks_of_patch,
                budget=self.budget,
                progress=progress,
                own=self.snapshot.lock,
            )

    def _change_rows(self, name: str, ids: Any, rows: Any, progress: bool) -> FeatureStore:
        self.check_open()
        of, field = (ONE_NODE, name) if self.types.is_one else name.rsplit("/", 1)
        self.check_replaceable(field, of)
        place = self._place(of)
        catalog, keys = self._update(place, field, ids, rows, progress)
        self.adopt_rows(catalog, keys, field, of)
        return self._store(place, field)

    def _change_edge_rows(self, name: str, ids: Any, rows: Any, progress: bool) -> FeatureStore:
        self.check_open()
        of, field = (ONE_EDGE, name) if self.types.is_one else _edge_of(name)
        self.check_edge_feature_unused(name)
        place = self._place(of)
        catalog, _ = self._update(place, field, ids, rows, progress)
        self.adopt_edge_feature(catalog, field, of)
        return self._store(place, field)


def _edge_of(name: str) -> tuple[EdgeKey, str]:
    of, field = name.rsplit("/", 1)
    return _key_of(of), field


def _key_of(name: str) -> EdgeKey:
    source, relation, destination = name.split(",")
    return source, relation, destination
