"""The partitions that an open dataset keeps: listing, finding and keeping them, and opening their lists in part order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.config import listed
from featstore.graph.adjacency import Adjacency
from featstore.graph.base import StoredGraph
from featstore.graph.savedparts import PARTS_KEY, Blocks, KeptParts, file_of_parts, kept_parts, read_parts, save_parts
from featstore.graph.selfreliant import SelfReliantParts
from featstore.graph.snapshot import Snapshot
from featstore.progress import Progress
from featstore.storage.catalog import read_catalog
from featstore.topology.crossedges import count_cross_edges, counts_dtype
from featstore.topology.partlists import PartLists
from featstore.topology.partorder import PartOrder

__all__ = ["Partitions"]


class Partitions:
    """Partitions kept in a graph's dataset, as of the open commit."""

    def __init__(self, graph: StoredGraph, snapshot: Snapshot, adjacency: Adjacency) -> None:
        self._graph, self._snapshot, self._adjacency = graph, snapshot, adjacency

    def by_name(self) -> dict[str, KeptParts]:
        """List the partitions by name, the latest last."""
        with self._graph.locked():
            return kept_parts(self._snapshot.catalog, self._read)

    def find(self, name: str | None = None) -> KeptParts:
        """Find the parts of all nodes kept under ``name``, by default the latest.

        ValueError, which lists the names, if there are none; or if these parts are self-reliant.
        """
        every, path = self.by_name(), self._graph.path
        kept = {each: parts for each, parts in every.items() if parts.hops is None}
        if name in every:
            every[name].refuse_self_reliant()
        if not kept:
            raise ValueError(
                f"{path} keeps no parts: make some with featstore.partition or featstore partition, or give an array"
            )
        if name is None:
            return list(kept.values())[-1]
        if name not in kept:
            raise ValueError(f"{path} keeps no parts {name!r}; there is {listed(kept)}")
        return kept[name]

    def self_reliant(self, name: str | None = None) -> KeptParts:
        """Find the self-reliant parts kept under ``name``, by default the latest; ValueError, which lists names, if none are."""
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be that of kept parts, not {name!r}")
        every, path = self.by_name(), self._graph.path
        kept = [each for each in every.values() if each.hops is not None]
        if name in every and every[name].hops is None:
            raise ValueError(f"parts {name!r} are parts of all nodes: featstore.partition makes self-reliant ones with hops=")
        found = kept[-1:] if name is None else [each for each in kept if each.name == name]
        if not found:
            there = listed(each.name for each in kept)
            what = "no self-reliant parts" if name is None else f"no self-reliant parts {name!r}"
            raise ValueError(f"{path} keeps {what}; there is {there}: featstore.partition makes some with hops=")
        return found[0]

    def keep(
        self,
        name: str,
        parts: npt.NDArray[np.int32],
        train_nodes: npt.NDArray[np.int64] | None,
        recipe: Mapping[str, Any],
        progress: bool = False,
        keep_lists: bool = False,
    ) -> None:
        """Keep parts under a name, in one commit; :func:`featstore.partition` checks the parts and calls this.

        The adjacency is read once, to count edges between parts. With ``keep_lists`` it is read once more for each window in
        which lists are put in part order.
        """
        graph, topology = self._graph, self._adjacency.topology
        arrays: dict[str, npt.NDArray[Any] | Blocks] = {"parts": parts}
        if train_nodes is not None:
            arrays["train_nodes"] = train_nodes
        budget, holder, n_parts = graph.budget, "partitioning", int(recipe["n_parts"])
        held = budget.reserve(holder, counts_dtype(topology.num_edges).itemsize * graph.num_nodes)
        with graph.or_closed(), held, Progress("edges between parts", topology.nbytes, progress) as bar:
            arrays["cross_out_degree"] = count_cross_edges(topology, parts, budget, holder, bar.add)
            if keep_lists:
                held.resize(held.n_bytes + PartOrder.nbytes(topology, n_parts))
                order = PartOrder(topology, parts, n_parts, budget, holder)
                arrays |= {"part_nodes": order.nodes, "part_offsets": order.offsets}
                arrays["part_indices"] = Blocks(topology.id_dtype, order.blocks(bar.add))
            with graph.locked():
                save_parts(self._snapshot, name, arrays, recipe, self._snapshot.adopt)

    def keep_self_reliant(self, name: str, parts: SelfReliantParts, recipe: Mapping[str, Any]) -> None:
        """Keep self-reliant parts under a name, in one commit."""
        arrays = {"train_nodes": parts.train_nodes.numpy(), "train_offsets": parts.offsets, "part_sizes": parts.n_nodes}
        with self._graph.or_closed(), self._graph.locked():
            save_parts(self._snapshot, name, arrays, {**recipe, "hops": parts.hops}, self._snapshot.adopt)

    def files_of(self, name: str) -> list[str]:
        """List the ids of the files of parts that are kept under ``name``, in the order of their names."""
        catalog = self._snapshot.catalog
        files = catalog.extra[PARTS_KEY + name]["files"].values()
        return [catalog.files[file].rows_id for file in sorted(files)]

    def adopt(self, name: str, files: Sequence[str]) -> KeptParts | None:
        """Open parts that another process has just kept, whose files have these ids; None if the dataset has not those."""
        graph, key = self._graph, PARTS_KEY + name
        with graph.or_closed(), graph.locked():
            catalog = read_catalog(graph.path)
            names = [str(each) for each in catalog.extra.get(key, {}).get("files", {}).values()]
            if [catalog.files[each].rows_id for each in sorted(names) if each in catalog.files] != list(files):
                return None
            self._snapshot.adopt(catalog, key, names)
        return self.by_name()[name]

    def lists(self, kept: KeptParts) -> PartLists:
        """Open the adjacency in part order, which is kept with parts that have ``has_lists``; loaders call this."""
        topology = self._adjacency.topology
        with self._graph.locked():
            nodes, ids = (file_of_parts(self._snapshot, kept, role) for role in ("part_nodes", "part_indices"))
            return PartLists(topology, nodes, ids, read_parts(self._snapshot, self._graph.budget, kept, "part_offsets"))

    def _read(self, kept: KeptParts, role: str) -> torch.Tensor:
        with self._graph.locked():
            return read_parts(self._snapshot, self._graph.budget, kept, role)
