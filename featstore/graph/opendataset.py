"""A dataset's commit, opened: stores of its fields, and its adjacency, caches and partitions as parts that know each other."""

from __future__ import annotations

import contextlib
import math
import os
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.config import Options, user_path
from featstore.creation.source import torch_dtype
from featstore.errors import BusyError, FormatError
from featstore.gather.buffers import empty_tensor
from featstore.graph.adjacency import Adjacency
from featstore.graph.base import Fields, StoredGraph
from featstore.graph.neighborcache import NeighborCache
from featstore.graph.neighborlists import NeighborLists
from featstore.graph.partitions import Partitions
from featstore.graph.passes import Rows
from featstore.graph.policyinputs import Given, PolicyInputs
from featstore.graph.reopen import reduced
from featstore.graph.rowcaches import GivenParts, RowCaches
from featstore.graph.snapshot import Snapshot, check_memory, fingerprint_of, open_files, opening_committed
from featstore.storage.catalog import EDGE, NODE, Catalog, FieldRecord
from featstore.topology.base import Topology

__all__ = ["OpenDataset"]


class OpenDataset(StoredGraph):
    """What the library's other parts know of an opened dataset; users know it as :class:`~featstore.OutOfCoreGraph`.

    Attributes
    ----------
    adjacency : Adjacency
    partitions : Partitions
    row_caches : RowCaches
    neighbor_lists : NeighborLists
    snapshot : Snapshot
        The commit that is open, and what this handle has added to it.
    """

    def __init__(self, path: str | os.PathLike[str], options: Options) -> None:
        path = os.path.abspath(user_path(path))
        with open_files(path) as opened:  # before a thread or a ring is made for it
            check_memory(path, opened.catalog.files.values(), options)
            super().__init__(path, options)
            try:
                self.snapshot = Snapshot(self.path, opened, self.reader)
                try:
                    self._open_fields()
                except BaseException:
                    with contextlib.suppress(OSError):
                        self.snapshot.close()
                    raise
            except BaseException:
                self.pool.close()
                self.reader.close()
                raise
        self.adjacency = Adjacency(self, self.snapshot)
        self.partitions = Partitions(self, self.snapshot, self.adjacency)
        self.row_caches = RowCaches(self, self.snapshot, self.adjacency, self.partitions)
        self.neighbor_lists = NeighborLists(self, self.snapshot, self.adjacency, self.partitions, self.row_caches)

    def _open_fields(self) -> None:
        catalog = self.catalog
        self.num_nodes = catalog.num_nodes
        self.num_edges = catalog.num_edges
        for name, record in catalog.by_role("feature").items():
            if record.n_rows != self.num_nodes:
                raise FormatError(f"{self.path}: feature {name!r} has {record.n_rows} rows for {self.num_nodes} nodes", self.path)
            self._open_feature_file(name, record)
        self._list_features()
        for name, record in catalog.by_role("feature", EDGE).items():
            if record.n_rows != self.num_edges:
                raise FormatError(f"{self.path}: {name!r} has {record.n_rows} rows for {self.num_edges} edges", self.path)
            file, reopen = self.snapshot.file_of(record), partial(reduced, self, name, "edge_features")
            self._open_store(name, file, record.shape, torch_dtype(record.dtype), reopen, of_edges=True)
        self.edge_features = Fields.of("edge feature", self._edge_stores)
        data = catalog.by_role("data")
        self.node_data = Fields("node data", list(data), self._load_data, lambda name: (data[name].dtype, data[name].shape))

    def _list_features(self) -> None:
        self.features = Fields.of("feature", self._stores)

    def _open_feature_file(self, name: str, record: FieldRecord) -> None:
        file, reopen = self.snapshot.file_of(record), partial(reduced, self, name)
        self._open_store(name, file, record.shape, torch_dtype(record.dtype), reopen)

    def _close_files(self) -> None:
        with contextlib.ExitStack() as stack:  # all of it, from the last line up, whichever fails
            stack.callback(self.snapshot.close)
            stack.callback(self.adjacency.close)
            stack.callback(self.neighbor_lists.drop)

    # -- node data ---------------------------------------------------------------------------------------------------------------

    def _data_bytes(self, name: str) -> int:
        record = self.catalog.by_role("data")[name]
        return record.n_rows * record.row_bytes

    def data_shape(self, name: str) -> torch.Size:
        """Return the shape of ``node_data[name]``, which is not read for it; KeyError where there is none."""
        if name not in self.node_data:
            return torch.Size(self.node_data[name].shape)  # raises the error that lists what there is
        return torch.Size(self.catalog.by_role("data")[name].shape)

    def _read_data(self, name: str) -> torch.Tensor:
        record = self.catalog.by_role("data")[name]
        tensor = empty_tensor(record.shape, torch_dtype(record.dtype))
        if len(tensor):
            rows = tensor.reshape(len(tensor), -1).view(torch.uint8).numpy()
            self.snapshot.file_of(record).read(0, len(rows), rows)
        return tensor

    # -- what its parts know -----------------------------------------------------------------------------------------------------

    def fingerprint(self) -> dict[str, str]:
        """Return the id of the file that holds each field, by key: what was made from a field is stale once it differs.

        Of the adjacency it is the id of the file that first held it: :func:`featstore.convert` leaves it as it is.
        """
        return fingerprint_of(self.catalog)

    @property
    def topology(self) -> Topology:
        """The adjacency.

        In CSC form the first use reads the offsets, 8 bytes a node, which the budget counts from then on. Of chunks it reads the
        directory, and the budget counts a cache of pages besides.
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
        """Bound what the adjacency will hold once it is asked for: nothing where it was already."""
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
    ) -> PolicyInputs:
        """See :meth:`RowCaches.policy_inputs`."""
        return self.row_caches.policy_inputs(row_bytes, counts, parts, seed, budget)

    # -- features made of others -------------------------------------------------------------------------------------------------

    @property
    def catalog(self) -> Catalog:
        """The commit that is open, and what this handle has added to it."""
        return self.snapshot.catalog

    def rows_of(self, name: str) -> Rows:
        """Return a feature's rows as passes over them want them."""
        store = self.features[name]
        file = self.snapshot.file_of(self.catalog.by_role("feature")[name])
        return Rows(file, store.dtype, math.prod(store.shape[1:]))

    def check_replaceable(self, name: str) -> None:
        """Raise BusyError where a loader uses the cache of a feature."""
        with self.locked():
            store = self._stores.get(name)
            if store is not None and store.cache is not None and store.cache.in_use:
                raise BusyError(f"the cache of {name!r} follows the plans of a loader that is in the middle of an epoch")

    def adopt_feature(self, catalog: Catalog, name: str) -> None:
        """Use a feature that was just committed; BusyError where a loader has begun to use the one it replaces."""
        key = f"{NODE}/{name}"
        with self.locked():
            with opening_committed(f"the feature {name!r} is in {self.path}, but opening it failed", self.path):
                self.snapshot.adopt(catalog, key, [part.file for part in catalog.fields[key].parts])
            if name in self._stores:
                self.drop_cache(self._stores[name])
            self._open_feature_file(name, self.catalog.by_role("feature")[name])
            self._list_features()
