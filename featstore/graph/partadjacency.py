"""The adjacency of a part of a graph: the lists that the part has, over the files of the whole graph, and degrees among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.cache.base import PolicyContext, StaticPolicy
from featstore.errors import ClosedError, CorruptionError, FormatError
from featstore.graph.adjacency import PIECE_NODES, Adjacency, Int64s
from featstore.graph.base import StoredGraph
from featstore.graph.neighbors.listscores import WriteScores
from featstore.graph.policyinputs import policy_scores
from featstore.graph.snapshot import Snapshot
from featstore.idmaps.keys import ranges
from featstore.storage.catalog import PART, Catalog
from featstore.topology.base import Topology
from featstore.topology.part import HOLDER, MOST_HOPS, OUTSIDE, Part, lists_between, lists_bytes
from featstore.topology.types import Types

__all__ = ["HOPS_ROLE", "PartAdjacency", "check_part", "load_part", "part_of_catalog"]

HOPS_ROLE: Final = "part_hops"  # kind and role of the file with the hops of each node


class PartAdjacency(Adjacency):
    """The adjacency of a view: the topology is the whole graph's, with its edge ids; all else is the part's.

    ``out_degree`` says how often each node is in the lists of the part.
    """

    def __init__(
        self, graph: StoredGraph, snapshot: Snapshot, whole: Adjacency, part: Part, out_degree: npt.NDArray[np.integer[Any]]
    ) -> None:
        super().__init__(graph, snapshot)
        self._whole = whole
        self._own: tuple[Part, npt.NDArray[np.integer[Any]]] | None = (part, out_degree)

    @property
    def _part(self) -> Part:
        return self._held()[0]

    @property
    def _out_degree(self) -> npt.NDArray[np.integer[Any]]:
        return self._held()[1]

    def _held(self) -> tuple[Part, npt.NDArray[np.integer[Any]]]:
        own = self._own
        if own is None:
            raise ClosedError(f"the view in {self._snapshot.root} is closed")
        return own

    @property
    def topology(self) -> Topology:
        self._held()
        return self._whole.topology

    def bytes_to_come(self, total: int | None = None) -> int:
        return self._whole.bytes_to_come(total)

    def close(self) -> None:
        """Forget the part; the topology is the whole graph's, and stays open."""
        self._own = None

    def read_out_degrees(self, first: int, out: Int64s) -> None:
        out[:] = self._out_degree[first : first + len(out)]

    def list_degrees(self, first: int, stop: int) -> Int64s:
        found = self._whole.list_degrees(first, stop)
        found[~self._part.has_list(first, stop)] = 0
        return found

    def list_scores(self, policy: StaticPolicy, note: Callable[[int], None] = lambda n_bytes: None) -> WriteScores:
        topology = self.topology

        def write(scores: npt.NDArray[np.float64]) -> None:
            for first in range(0, len(scores), PIECE_NODES // 4):
                piece = scores[first : first + PIECE_NODES // 4]
                out_degree = self._out_degree[first : first + len(piece)].astype(np.int64)
                in_degree = self.list_degrees(first, first + len(piece))
                degrees = partial(np.asarray, in_degree), partial(np.asarray, out_degree)
                context = PolicyContext(len(piece), topology.id_bytes, *degrees)
                piece[:] = policy_scores(policy, context, of_lists=True)
                piece[~self._part.has_list(first, first + len(piece))] = -np.inf
                note(24 * len(piece))

        return write

    def own_scores(self, scores: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.where(self._part.has_list(0, len(scores)), scores, -np.inf)

    def list_words(self) -> int:
        return int(self._out_degree.sum(dtype=np.int64)) + int(np.count_nonzero(self._part.has_list(0, len(self._out_degree))))

    def _offset_pieces(self) -> Iterator[tuple[int, Int64s]]:
        n, before = self._graph.num_nodes, 0
        with self._graph.or_closed():
            for first in range(0, n, PIECE_NODES):
                offsets = np.zeros(min(PIECE_NODES, n - first) + 1, np.int64)
                np.cumsum(self.list_degrees(first, first + len(offsets) - 1), out=offsets[1:])
                offsets += before
                before = int(offsets[-1])
                yield first, offsets

    def _edge_blocks(self, topology: Topology) -> Iterator[tuple[int, torch.Tensor]]:
        done = 0
        for edges, _ in self._blocks(topology):
            yield done, edges
            done += edges.shape[1]

    def _edges_with_pos(self, topology: Topology) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for edges, positions in self._blocks(topology):
            if topology.edge_ids is not None:
                topology.edge_ids.replace(positions.numpy(), self._graph.pool.array)
            yield edges, positions

    def _blocks(self, topology: Topology) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield blocks of the part's edges, and their numbers in the whole graph's file, both int64."""
        graph, part = self._graph, self._part
        with graph.or_closed(), graph.budget.reserve("edges", lists_bytes(topology.num_nodes)):
            for nodes, begins, counts, ids in lists_between(topology, part.hop_of, 0, part.hops):
                edges = graph.pool.tensor((2, len(ids)), torch.int64)
                positions = graph.pool.tensor(len(ids), torch.int64)
                array, at = edges.numpy(), positions.numpy()
                array[0], array[1] = ids, np.repeat(nodes, counts)
                graph.check_open()  # as its topology is the whole graph's
                starts, _ = topology.offsets(nodes)
                at[:] = ranges(starts + begins, counts)
                yield edges, positions


def part_of_catalog(catalog: Catalog, types: Types, root: str) -> tuple[Part, int, str] | None:
    """Read which part a dataset is from its catalog: the part, without nodes yet, their number, and the file of their hops.

    None: the dataset is a whole one. FormatError: the entry cannot be used.
    """
    entry = catalog.extra.get(PART)
    if entry is None:
        return None
    name, number, hops, n_nodes = (entry.get(each) for each in ("name", "number", "hops", "nodes"))
    files, n = entry.get("files"), catalog.num_nodes
    record = catalog.files.get(str(files.get(HOPS_ROLE))) if isinstance(files, dict) else None
    if not isinstance(name, str) or not isinstance(number, int) or not isinstance(hops, int) or not isinstance(n_nodes, int):
        raise FormatError(f"{root}: the catalog's part cannot be used: {entry!r:.200}", root)
    if number < 0 or not 1 <= hops <= MOST_HOPS or not types.is_one or not 1 <= n_nodes <= n:
        raise FormatError(f"{root}: the catalog's part cannot be used: {entry!r:.200}", root)
    if record is None or (record.kind, record.dtype, record.n_rows) != (HOPS_ROLE, "uint8", n) or not record.layout.is_dense:
        raise FormatError(f"{root}: the catalog names no file with the hops of the {n} nodes of its part", root)
    for field in catalog.by_role("feature").values():
        if field.n_rows != n_nodes:
            raise FormatError(f"{root}: feature {field.name!r} has {field.n_rows} rows for {n_nodes} nodes", root)
    return Part(name, number, hops, np.empty(0, np.uint8)), n_nodes, record.name


def check_part(part: Part, n_nodes: int, path: str) -> None:
    """Raise CorruptionError unless a part, whose hops were read from ``path``, has so many nodes, none too far away."""
    far = int(part.sizes[part.hops + 1 : OUTSIDE].sum())
    if far or part.n_nodes != n_nodes:
        what = f"{far} nodes beyond {part.hops} hops, and {part.n_nodes} in all, not {n_nodes}"
        raise CorruptionError(f"the hops are not those of {part}: {what}", path)


def load_part(snapshot: Snapshot, budget: Budget) -> Part | None:
    """Read which part of a graph a dataset is; None if it is a whole one. ``budget`` counts it while it lives.

    FormatError, CorruptionError: the catalog's entry cannot be used, or the file disagrees with it.
    """
    found = part_of_catalog(snapshot.catalog, snapshot.types, snapshot.root)
    if found is None:
        return None
    (part, n_nodes, name), n = found, snapshot.catalog.num_nodes
    file, hop_of = snapshot.files[name], np.empty(n, np.uint8)
    row_of = np.empty(n, np.int32 if n < 2**31 else np.int64)
    for array in (hop_of, row_of):
        budget.reserve(HOLDER, array.nbytes, owner=array)
    before = 0
    for first in range(0, n, PIECE_NODES):
        piece = hop_of[first : first + PIECE_NODES]
        file.read(first, len(piece), piece.reshape(-1, 1))
        ends = before + np.cumsum(piece != OUTSIDE)
        row_of[first : first + PIECE_NODES] = ends - (piece != OUTSIDE)
        before = int(ends[-1])
    part = replace(part, hop_of=hop_of, row_of=row_of)
    check_part(part, n_nodes, file.path)
    return part
