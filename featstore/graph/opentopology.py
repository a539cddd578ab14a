"""Opening of a dataset's adjacency, in the form in which it is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.graph.snapshot import Snapshot
from featstore.storage.catalog import EDGE
from featstore.topology.base import CscTopology, Topology, scan_ids, stored_offsets
from featstore.topology.chunks import ChunkedTopology
from featstore.topology.edgeids import EDGE_IDS, EdgeIds

__all__ = ["held_bytes", "load_topology", "stored_ids", "stored_pieces", "stored_size"]


def load_topology(snapshot: Snapshot, budget: Budget, note: Callable[[int], None] = lambda n_bytes: None) -> Topology:
    """Open the adjacency; ``budget`` counts its memory, and ``note`` gets the bytes of offsets as they are read."""
    topology = _load(snapshot, budget, note)
    if f"{EDGE}/{EDGE_IDS}" in snapshot.catalog.fields:
        file, _ = snapshot.topology_file(EDGE_IDS, snapshot.catalog.num_edges)
        topology.edge_ids = EdgeIds(file)
    return topology


def _load(snapshot: Snapshot, budget: Budget, note: Callable[[int], None]) -> Topology:
    catalog = snapshot.catalog
    n, n_nodes, n_edges = snapshot.types.num_lists, catalog.num_nodes, catalog.num_edges
    if catalog.topology == "csc":
        indptr, _ = snapshot.topology_file("indptr", n + 1)
        indices, id_bytes = snapshot.topology_file("indices", n_edges)
        return CscTopology.load(n, n_edges, indptr, indices, id_bytes, budget, note, n_nodes)
    chunks, lengths, _ = snapshot.topology_files("chunks")
    directory, _ = snapshot.topology_file("chunk_directory", width=3)
    return ChunkedTopology.load(n, n_edges, chunks, directory, catalog.chunk_bytes, budget, n_nodes, lengths)


def held_bytes(snapshot: Snapshot, total: int) -> int:
    """Bound the bytes that :func:`load_topology` holds under a budget of ``total`` bytes."""
    catalog = snapshot.catalog
    if catalog.topology == "csc":
        return CscTopology.held_bytes(snapshot.types.num_lists)
    _, lengths, id_bytes = snapshot.topology_files("chunks")
    return ChunkedTopology.held_bytes(
        snapshot.types.num_lists, -(-sum(lengths) * id_bytes // catalog.chunk_bytes), id_bytes, total
    )


def stored_size(snapshot: Snapshot) -> tuple[int, bool]:
    """Count the bytes of all neighbour ids; return them, and whether an open adjacency holds its offsets in memory."""
    catalog = snapshot.catalog
    is_csc = catalog.topology == "csc"
    *_, id_bytes = snapshot.topology_files("indices" if is_csc else "chunks")
    return catalog.num_edges * id_bytes, is_csc


def stored_pieces(
    snapshot: Snapshot, topology: Callable[[], Topology], n_nodes: int
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield the offsets of all nodes as :meth:`Topology.offset_pieces` does, without keeping them in memory.

    ``topology`` opens the adjacency; it is only called in chunked form, where opening does not read all offsets.
    """
    catalog = snapshot.catalog
    if catalog.topology != "csc":
        return topology().offset_pieces(n_nodes)
    indptr, _ = snapshot.topology_file("indptr", snapshot.types.num_lists + 1)
    return stored_offsets(indptr, snapshot.types.num_lists, catalog.num_edges, n_nodes)


def stored_ids(snapshot: Snapshot, topology: Callable[[], Topology], block_bytes: int) -> tuple[int, Iterator[npt.NDArray[Any]]]:
    """Read all neighbour ids in order, in checked blocks; return the bytes of an id, and an iterator of the blocks.

    ``topology`` is as for :func:`stored_pieces`.
    """
    catalog = snapshot.catalog
    if catalog.topology != "csc":
        opened = topology()
        return opened.id_bytes, (ids for _, ids in opened.scan(block_bytes))
    indices, id_bytes = snapshot.topology_file("indices", catalog.num_edges)
    return id_bytes, (ids for _, ids in scan_ids(indices, catalog.num_nodes, catalog.num_edges, id_bytes, block_bytes))
