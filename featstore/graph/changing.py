"""An open dataset that can be changed: fields are added, removed and updated."""

from __future__ import annotations

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
from featstore.graph.derive.provenance import stale_features
from featstore.graph.feature import FeatureStore
from featstore.graph.opendataset import OpenDataset
from featstore.idmaps.idmap import maps_of
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

    def add_feature(
        self,
        name: str,
        rows: ArrayLike,
        *,
        type: str | EdgeKey | None = None,
        overwrite: bool = False,
        progress: bool = True,
    ) -> FeatureStore:
        """Add a feature of nodes, or of edges, to the dataset.

        Parameters
        ----------
        name : str
        rows : array, shape (number of nodes or edges, …)
            As :meth:`create` takes features: an array, a memory map, a tensor, the path of a ``.npy`` file, or ``(shape, dtype,
            iterable of row blocks)``. Rows of edges are in the order in which the edges were given.
        type : str or tuple (source, relation, destination), optional
            The type of nodes or edges, in a graph of several types. The edges of a graph of one type are ``("_", "_", "_")``.
        overwrite : bool
            Replace a feature of that name. Stores of it that were handed out go on reading the old one, whose file is removed
            by the next change, or when the graph is closed.
        progress : bool
            Show a progress bar, on a terminal and in a notebook.

        Returns
        -------
        FeatureStore
            ``g.features[name]``, or ``g.edge_features[name]``, ready to be used; other handles have it when they are opened
            again.

        Raises
        ------
        KeyError, TypeError, ValueError
            There is no such type, or none is named; the rows have a wrong number, shape or dtype; the name is taken or not
            allowed.
        BudgetError
            The budget has no room for a block of rows.
        BusyError
            Another process is writing the dataset, or has replaced it; or a loader uses the feature that is to be replaced.
        CommittedError
            The feature is in the dataset, but making that durable, or opening it, failed.
        FormatError, CorruptionError, OSError
            A file of rows cannot be read; the disk is full or failed. The dataset is as it was, and no files are left.

        Notes
        -----
        Rows are streamed once, in at most an eighth of the available memory and 2 MiB. One commit adds the feature, after all
        of its bytes are on the drive. Whatever was made of a replaced feature is stale: packs, and caches that were saved.

        Examples
        --------
        >>> g.add_feature("z", np.ones((g.num_nodes, 8), np.float32))
        FeatureStore('z', shape=(1000, 8), dtype=torch.float32, backend='io_uring')
        """
        place = self._place_to_change("add_feature()", type)
        self._add(place, "feature", name, rows, overwrite, progress)
        return self._store(place, name)

    def add_data(
        self,
        name: str,
        rows: ArrayLike,
        *,
        type: str | None = None,
        overwrite: bool = False,
        progress: bool = True,
    ) -> None:
        """Add node data to the dataset: labels, masks, index sets. ``g.node_data[name]`` has them at once.

        Parameters
        ----------
        name : str
        rows : array, shape (any, …)
            See :meth:`add_feature`.
        type : str, optional
            The type of nodes, in a graph of several types.
        overwrite : bool
            Replace node data of that name. Tensors that were handed out stay as they are.
        progress : bool
            Show a progress bar, on a terminal and in a notebook.

        Raises
        ------
        KeyError, TypeError, ValueError, BudgetError, BusyError, CommittedError, FormatError, CorruptionError, OSError
            See :meth:`add_feature`.

        Notes
        -----
        See :meth:`add_feature`. Whoever loads batches reads labels when the loader is made: make it again.
        """
        if isinstance(type, tuple):
            raise TypeError(f"node data is of a type of nodes, not of edges {type!r}; edges have features: add_feature()")
        self._add(self._place_to_change("add_data()", type), "data", name, rows, overwrite, progress)

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

    def append_nodes(
        self,
        n: int,
        features: Mapping[str, ArrayLike] | None = None,
        data: Mapping[str, ArrayLike] | None = None,
        *,
        type: str | None = None,
        progress: bool = True,
    ) -> range:
        """Append nodes without edges to the dataset, in one commit.

        Parameters
        ----------
        n : int
            Number of new nodes. Their ids follow the others of their type.
        features : mapping of str to array, shape (n, …)
            Rows of every feature of the nodes, of its dtype; see :meth:`add_feature` for inputs.
        data : mapping of str to array, shape (any, …)
            Rows to append to node data. Data with a row for each node needs ``n``; others, such as index sets, may be left out.
        type : str, optional
            The type of the nodes, in a graph of several types.
        progress : bool
            Show a progress bar, on a terminal and in a notebook.

        Returns
        -------
        range
            The new ids, within the type. This handle goes on showing the old nodes, as all others do: open the dataset again.

        Raises
        ------
        KeyError, TypeError, ValueError
            There is no such type, or none is named; a field lacks rows, or is not there; rows have a wrong number, shape or
            dtype; there would be 2³¹ nodes or more, whose ids are wider.
        NotImplementedError
            The graph is a part; or the nodes of the type have names (:meth:`ids`).
        BudgetError, BusyError, CommittedError, FormatError, CorruptionError, OSError
            See :meth:`add_feature`. BusyError also if another handle has changed a field since this one was opened.

        Notes
        -----
        Rows are appended as patches, see :meth:`FeatureStore.update`: their own bytes are written, and those of the last block.
        Offsets and out-degrees are written anew, 16 bytes a node; neighbour ids stay as they are. Of an adjacency in chunks, the
        last chunk, the chunks' directory and out-degrees are written anew. Edges of the new nodes need a new dataset
        (:meth:`from_edge_index`). Kept parts, saved neighbour caches and packs of the old graph are stale.

        Types are ranges of ids, so nodes of types behind this one get other ids in the files, not for the user. If edges begin
        at such nodes, neighbour ids are written anew, or the chunks from the first one that changes; and so are features that
        share a file with rows of such types. Appending to the last of :attr:`node_types` costs what it costs with one type.

        Examples
        --------
        >>> g.append_nodes(2, {"x": np.zeros((2, 16), np.float32)})                 # doctest: +SKIP
        range(1000, 1002)
        """
        self.check_open()
        self.refuse_part("append_nodes()")
        new = Insertion(self.types, self._type_of_nodes(type), check_at_least("n", n, 1))
        if new.of in maps_of(self.catalog):
            of = "" if self.types.is_one else f" of type {new.of!r}"
            raise NotImplementedError(
                f"the nodes{of} of {self.path} have names, which new ones would lack: import the tables with the new nodes"
            )
        progress = check_flag("progress", progress)
        snapshot = self.snapshot
        sources = appended_rows(self.catalog, new, features, data)
        with self.or_closed():
            catalog = append_nodes(
                self.path,
                self.catalog,
                new,
                sources,
                snapshot.rows_of,
                snapshot.file_of,
                snapshot.blocks_of_patch,
                lambda: self.topology,
                budget=self.budget,
                progress=progress,
                own=self.snapshot.lock,
                stale=self.stale_features,
            )
        snapshot.committed(catalog)
        return range(new.kind.n, new.kind.n + new.n)

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

    def update_data(self, name: str, ids: Any, rows: Any, *, type: str | None = None, progress: bool = True) -> None:
        """Change rows of node data in the dataset, in one commit. ``g.node_data[name]`` has them at once.

        Parameters
        ----------
        name : str
            The name within the type.
        ids, rows, progress
            See :meth:`FeatureStore.update`.
        type : str, optional
            The type of nodes, in a graph of several types.

        Raises
        ------
        KeyError, IndexError, TypeError, ValueError, BudgetError, BusyError, CommittedError, CorruptionError, OSError
            There is no such data, or no such type; or see :meth:`FeatureStore.update`.

        Notes
        -----
        See :meth:`FeatureStore.update`. Tensors that were handed out stay as they are.
        """
        if isinstance(type, tuple):
            raise TypeError(f"node data is of a type of nodes, not of edges {type!r}; edges have features")
        place = self._place_to_change("update_data()", type)
        self.data_shape(place.label + name)  # a KeyError lists the existing names
        catalog, _ = self._update(place, name, ids, rows, progress)
        self.adopt_data(catalog, name, place.prefix.partition("/")[2])

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

    @property
    def stale_features(self) -> dict[str, list[str]]:
        """Features that :meth:`aggregate` or :func:`featstore.infer` made, and of which an input was changed since.

        By the feature's name, the names of these inputs, ``"adjacency"`` among them; types that share a file change together.
        Stale features keep their rows: make them again with ``overwrite=True``.
        """
        self.check_open()
        return stale_features(self.catalog)

    def remove_feature(self, name: str, *, type: str | EdgeKey | None = None) -> None:
        """Remove a feature of nodes, or of edges, from the dataset.

        Parameters
        ----------
        name : str
            The feature's name within its type.
        type : str or tuple (source, relation, destination), optional
            See :meth:`add_feature`.

        Raises
        ------
        KeyError, TypeError, ValueError
            There is no such feature or type; the feature was attached, and is in no file.
        BusyError
            Another process is writing the dataset, or has replaced it; or a loader uses the feature.
        CommittedError
            The feature is removed, but a power cut may bring it back.
        OSError
            The disk failed. The dataset is as it was.

        Notes
        -----
        One commit removes the feature. Open handles, and stores of it that were handed out, go on reading it; its file is
        removed when nobody has the dataset open any more. What several types of nodes share stays until all are removed.
        """
        place = self._place_to_change("remove_feature()", type)
        try:
            self._store(place, name)  # a KeyError lists the existing names
        except KeyError:
            if type is None and name in self.edge_features:
                raise KeyError(f"{name!r} is a feature of edges: give type={ONE_EDGE}") from None
            if place.label + name in self.node_data:
                raise KeyError(f"{name!r} is node data: remove_data() removes it") from None
            raise
        self._check_replaceable(place, name)
        catalog = remove_field(self.path, self.catalog, place, name, self.snapshot.lock)
        of = place.prefix.partition("/")[2]
        if place.is_of_edges:
            self.forget_edge_feature(catalog, name, _key_of(of))
        else:
            self.forget_feature(catalog, name, of)

    def remove_data(self, name: str, *, type: str | None = None) -> None:
        """Remove node data from the dataset; see :meth:`remove_feature`. Tensors that were handed out stay as they are."""
        if isinstance(type, tuple):
            raise TypeError(f"node data is of a type of nodes, not of edges {type!r}; edges have features: remove_feature()")
        place = self._place_to_change("remove_data()", type)
        self.data_shape(place.label + name)  # a KeyError lists the existing names
        catalog = remove_field(self.path, self.catalog, place, name, self.snapshot.lock)
        self.forget_data(catalog, name, place.prefix.partition("/")[2])


def _edge_of(name: str) -> tuple[EdgeKey, str]:
    of, field = name.rsplit("/", 1)
    return _key_of(of), field


def _key_of(name: str) -> EdgeKey:
    source, relation, destination = name.split(",")
    return source, relation, destination
