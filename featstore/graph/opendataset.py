"""An opened commit of a dataset: stores of its fields, and its adjacency, caches and partitions, each an object of its own."""

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
from featstore.graph.passes import StoredRows
from featstore.graph.policyinputs import Given, PolicyInputs
from featstore.graph.reopen import reduced
from featstore.graph.rowcaches import GivenParts, RowCaches
from featstore.graph.snapshot import Snapshot, check_memory, fingerprint_of, open_files, opening_committed
from featstore.storage.catalog import EDGE, NODE, Catalog, FieldRecord
from featstore.topology.base import Topology

__all__ = ["OpenDataset"]


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
    """

    def __init__(self, path: str | os.PathLike[str], options: Options) -> None:
        path = os.path.abspath(user_path(path))
        with open_files(path) as opened:  # before a thread or a ring is made for the dataset
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
        with contextlib.ExitStack() as stack:  # runs all calls, from the last one up, even if one fails
            stack.callback(self.snapshot.close)
            stack.callback(self.adjacency.close)
            stack.callback(self.neighbor_lists.drop)

    # -- node data ---------------------------------------------------------------------------------------------------------------

    def _data_bytes(self, name: str) -> int:
        record = self.catalog.by_role("data")[name]
        return record.n_rows * record.row_bytes

    def data_shape(self, name: str) -> torch.Size:
        """Get the shape of ``node_data[name]`` without reading it; KeyError if there is no such field."""
        if name not in self.node_data:
            return torch.Size(self.node_data[name].shape)  # raises the KeyError that lists the existing names
        return torch.Size(self.catalog.by_role("data")[name].shape)

    def _read_data(self, name: str) -> torch.Tensor:
        record = self.catalog.by_role("data")[name]
        tensor = empty_tensor(record.shape, torch_dtype(record.dtype))
        if len(tensor):
            rows = tensor.reshape(len(tensor), -1).view(torch.uint8).numpy()
            self.snapshot.file_of(record).read(0, len(rows), rows)
        return tensor

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
    ) -> PolicyInputs:
        """See :meth:`RowCaches.policy_inputs`."""
        return self.row_caches.policy_inputs(row_bytes, counts, parts, seed, budget)

    # -- features made of others -------------------------------------------------------------------------------------------------

    @property
    def catalog(self) -> Catalog:
        """The catalog of the open commit, with fields and entries that this handle has added since."""
        return self.snapshot.catalog

    def rows_of(self, name: str) -> StoredRows:
        """Get a feature's stored rows in the form that passes over them need."""
        store = self.features[name]
        file = self.snapshot.file_of(self.catalog.by_role("feature")[name])
        return StoredRows(file, store.dtype, math.prod(store.shape[1:]))

    def check_replaceable(self, name: str) -> None:
        """Check that a feature may be replaced; BusyError while a loader uses its cache."""
        with self.locked():
            store = self._stores.get(name)
            if store is not None and store.cache is not None and store.cache.in_use:
                raise BusyError(f"the cache of {name!r} follows the plans of a loader that is in the middle of an epoch")

    def adopt_feature(self, catalog: Catalog, name: str) -> None:
        """Open a feature that was just committed; BusyError if a loader has begun to use the replaced feature."""
        key = f"{NODE}/{name}"
        with self.locked():
            with opening_committed(f"the feature {name!r} is in {self.path}, but opening it failed", self.path):
                self.snapshot.adopt(catalog, key, [part.file for part in catalog.fields[key].parts])
            if name in self._stores:
                self.drop_cache(self._stores[name])
            self._open_feature_file(name, self.catalog.by_role("feature")[name])
            self._list_features()
