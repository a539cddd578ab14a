"""Neighbour caches kept in the dataset: made once, and loaded by every run with the same request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from featstore.budget import Budget
from featstore.errors import BusyError, CorruptionError
from featstore.gather.buffers import private_array
from featstore.gather.sharedmemory import Allocate
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.storage.catalog import EDGE, Catalog, current_catalog
from featstore.storage.rowfile import RowFile
from featstore.storage.update import Update
from featstore.storage.writer import FileRecord
from featstore.topology.base import Topology, huge_bytes

__all__ = ["is_still_saved", "load_neighbor_cache", "made_of", "save_neighbor_cache", "saved_bytes"]

_KEY = "cache/neighbors"
_ARRAYS = ("records", "offset_of_node")
_NUMBERS = "edge_ids"  # a further array, if edge ids are kept


def made_of(catalog: Catalog) -> dict[str, str]:
    """Identify the adjacency by the file ids of its fields; caches and parts made from another adjacency are never used."""
    return {key.removeprefix(f"{EDGE}/"): file_id for key, file_id in catalog.adjacency().items()}


def saved_bytes(catalog: Catalog) -> int:
    """Get the requested size of the saved cache, in bytes; 0 if there is no saved cache."""
    n_bytes = catalog.extra.get(_KEY, {}).get("bytes")
    return n_bytes if isinstance(n_bytes, int) else 0


def is_still_saved(root: str, catalog: Catalog) -> bool:
    """Check whether the dataset still has the saved cache that it had when opened; any handle may have saved another since."""
    return current_catalog(root).extra.get(_KEY) == catalog.extra.get(_KEY)


def save_neighbor_cache(
    root: str,
    catalog: Catalog,
    cache: NeighborCache,
    recipe: Mapping[str, Any],
    adopt: Callable[[Catalog, str, list[str]], None],
) -> None:
    """Save a cache of a part of the lists, in place of an earlier saved one.

    ``catalog`` is that of the opened dataset: BusyError if the dataset was replaced since. The cache is loaded for the same
    ``recipe``. ``adopt(catalog, key, files)`` is called after the commit, while the lock of the writer is still held.
    CommittedError if the cache is saved but may not be durable. After other OSErrors the dataset is as it was.
    """
    with Update(root) as update:
        if made_of(update.catalog) != made_of(catalog):
            raise BusyError("the dataset was replaced since it was opened", root)
        files: dict[str, FileRecord] = {}
        for name, array in cache.to_arrays().items():
            files[name] = update.write_array(f"cache.neighbors.{name}", name, array.dtype, (array,))
        entry = {**recipe, "made_of": made_of(catalog), **{name: file.name for name, file in files.items()}}
        old = update.catalog.extra.get(_KEY, {})
        update.add(files.values(), extra={_KEY: entry}, drop=[str(old[name]) for name in (*_ARRAYS, _NUMBERS) if name in old])
        adopt(update.commit(), _KEY, [file.name for file in files.values()])


def load_neighbor_cache(
    catalog: Catalog,
    files: Mapping[str, RowFile],
    topology: Topology,
    budget: Budget,
    recipe: Mapping[str, Any],
    edges: bool,
    allocate: Allocate = private_array,
) -> NeighborCache | None:
    """Load the saved cache of the same request, topology and ``edges``; None if there is none.

    BudgetError if it does not fit; CorruptionError if it is no cache of this topology.
    """
    entry = catalog.extra.get(_KEY)
    if entry is None or entry.get("made_of") != made_of(catalog) or any(entry.get(key) != value for key, value in recipe.items()):
        return None
    numbers = topology.edge_ids if edges else None
    if (numbers is not None) != (_NUMBERS in entry):
        return None
    dtypes: dict[str, np.dtype[Any]] = dict(zip(_ARRAYS, (topology.id_dtype, np.dtype(np.int64)), strict=True))
    if numbers is not None:
        dtypes[_NUMBERS] = numbers.dtype
    records: dict[str, FileRecord] = {}
    for name, dtype in dtypes.items():
        record = catalog.files.get(str(entry.get(name)))
        if record is None or record.dtype != dtype.name or record.layout.row_bytes != dtype.itemsize:
            return None
        records[name] = record
    n_bytes = sum(huge_bytes(record.n_rows * record.layout.row_bytes) for record in records.values())
    with budget.reserve("neighbor cache", n_bytes).kept() as reservation:
        arrays = {name: allocate(name, record.n_rows, dtypes[name]) for name, record in records.items()}
        for name, record in records.items():
            if record.n_rows:
                rows = arrays[name].view(np.uint8).reshape(record.n_rows, record.layout.row_bytes)
                files[record.name].read(0, record.n_rows, rows)
        try:
            return NeighborCache.from_arrays(topology, arrays, reservation)
        except ValueError as error:
            path = files[records[_ARRAYS[0]].name].path
            raise CorruptionError(f"the saved neighbour cache does not fit the topology: {error}", path) from None
