"""PyG itself, imported without its warnings, and a sampler of its base class that needs none of its compiled packages."""

# ruff: noqa: F401 - names of PyG for other files
from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

with warnings.catch_warnings():
    # torch_geometric compiles a class with torch.jit.script when it is imported; torch calls that deprecated.
    warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated", DeprecationWarning)
    import torch_geometric
    from torch_geometric.data import Data, HeteroData
    from torch_geometric.loader import LinkNeighborLoader, NeighborLoader, NodeLoader
    from torch_geometric.nn import GATConv, GCNConv, GraphConv, GraphSAGE, HeteroConv, SAGEConv, to_hetero
    from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, NodeSamplerInput, SamplerOutput
    from torch_geometric.sampler import NeighborSampler as ItsSampler
    from torch_geometric.utils import k_hop_subgraph, trim_to_layer


def data_of(indptr: Any, indices: Any) -> Data:
    """Return a graph in PyG's form: columns (source, destination), the edges of a destination together."""
    destinations = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    return Data(edge_index=torch.from_numpy(np.stack([indices, destinations])), num_nodes=len(indptr) - 1)


class HopSampler(BaseSampler):
    """Samples in-neighbours hop by hop, as PyG's NeighborSampler does with pyg-lib: each hop expands the nodes of the last one.

    Draws depend on the seeds alone; a fan-out of -1 takes a list as it is.
    """

    def __init__(self, indptr: Any, indices: Any, fanouts: Sequence[int]) -> None:
        self.indptr, self.indices, self.fanouts = np.asarray(indptr), np.asarray(indices), tuple(fanouts)

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
        """Return the sampled nodes, the seeds first, and edges of local numbers, hop after hop."""
        nodes = index.node.tolist()
        number = {node: i for i, node in enumerate(nodes)}
        rng = np.random.default_rng(nodes)
        row: list[int] = []
        col: list[int] = []
        edge: list[int] = []
        n_nodes, n_edges = [len(nodes)], []
        for fanout in self.fanouts:
            first, before = len(nodes) - n_nodes[-1], len(edge)
            for destination in range(first, len(nodes)):
                start, end = self.indptr[nodes[destination]], self.indptr[nodes[destination] + 1]
                drawn = np.arange(start, end)
                if fanout >= 0:
                    drawn = rng.choice(drawn, min(fanout, end - start), replace=False)
                for position in drawn.tolist():
                    source = int(self.indices[position])
                    if source not in number:
                        number[source] = len(nodes)
                        nodes.append(source)
                    row.append(number[source])
                    col.append(destination)
                    edge.append(position)
            n_nodes.append(len(nodes) - sum(n_nodes))
            n_edges.append(len(edge) - before)
        return SamplerOutput(
            node=torch.tensor(nodes),
            row=torch.tensor(row, dtype=torch.int64),
            col=torch.tensor(col, dtype=torch.int64),
            edge=torch.tensor(edge, dtype=torch.int64),
            num_sampled_nodes=n_nodes,
            num_sampled_edges=n_edges,
            metadata=(index.input_id, index.time),
        )

    def sample_from_edges(self, index: Any, neg_sampling: Any = None) -> Any:
        """Part of the base class; not used."""
        raise NotImplementedError


def take_types(
    node_types: list[str],
    edge_types: list[tuple[str, str, str]],
    colptr: dict[str, torch.Tensor],
    row: dict[str, torch.Tensor],
    seeds: dict[str, torch.Tensor],
    num_neighbors: dict[str, list[int]],
    *others: Any,
) -> tuple[Any, ...]:
    """Stand in for pyg-lib's ``hetero_neighbor_sample`` where lists are taken whole, or not at all; same arguments and results.

    A hop goes from the nodes that the last one added, relation by relation; new nodes join as they are first seen.
    """
    assert others[-5:-1] == (False, True, False, "uniform"), "no draws with replacement, no induced or disjoint subgraphs"
    nodes = {kind: seeds.get(kind, torch.empty(0, dtype=torch.int64)).numpy() for kind in node_types}
    n = dict.fromkeys(node_types, 0)
    for source, relation, destination in edge_types:
        name = f"{source}__{relation}__{destination}"
        n[destination] = len(colptr[name]) - 1
        n[source] = max(n[source], _most(row[name]))
    number = {kind: np.full(max(n[kind], _most(torch.from_numpy(nodes[kind]))), -1) for kind in node_types}
    for kind, ids in nodes.items():
        number[kind][ids] = np.arange(len(ids))
    names = ["__".join(key) for key in edge_types]
    found: dict[str, list[list[np.ndarray]]] = {name: [] for name in names}
    n_nodes = {kind: [len(ids)] for kind, ids in nodes.items()}
    for hop in range(len(next(iter(num_neighbors.values())))):
        first = {kind: len(ids) - n_nodes[kind][-1] for kind, ids in nodes.items()}
        stop = {kind: len(ids) for kind, ids in nodes.items()}
        for (source, _, destination), name in zip(edge_types, names, strict=True):
            fanout = num_neighbors[name][hop]
            assert fanout in (0, -1)
            local = np.arange(first[destination], stop[destination] if fanout else first[destination])
            starts, ends = (colptr[name].numpy()[nodes[destination][local] + k] for k in (0, 1))
            edges = np.concatenate([np.arange(a, b) for a, b in zip(starts, ends, strict=True)] or [np.empty(0, np.int64)])
            drawn = row[name].numpy()[edges]
            new = drawn[number[source][drawn] < 0]
            new = new[np.sort(np.unique(new, return_index=True)[1])]
            number[source][new] = len(nodes[source]) + np.arange(len(new))
            nodes[source] = np.concatenate([nodes[source], new])
            found[name].append([number[source][drawn], np.repeat(local, ends - starts), edges])
        for kind, ids in nodes.items():
            n_nodes[kind].append(len(ids) - stop[kind])
    rows, cols, edge_ids = (
        {name: torch.from_numpy(np.concatenate([hop[k] for hop in hops])) for name, hops in found.items()} for k in range(3)
    )
    n_edges = {name: [len(hop[0]) for hop in hops] for name, hops in found.items()}
    return rows, cols, {kind: torch.from_numpy(ids) for kind, ids in nodes.items()}, edge_ids, n_nodes, n_edges


def _most(ids: torch.Tensor) -> int:
    return int(ids.max()) + 1 if len(ids) else 0


def is_compiled() -> bool:
    """Tell whether PyG samples by pyg-lib or torch-sparse here; in a test that does, let it warn of the latter."""
    if not torch_geometric.typing.WITH_PYG_LIB:
        warnings.filterwarnings("ignore", "Using '.*Sampler' without a 'pyg-lib' installation is deprecated", UserWarning)
    return bool(torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE)


def whole_lists(data: Data, indptr: Any, indices: Any, depth: int) -> BaseSampler:
    """Return a sampler of whole lists of a graph of :func:`data_of`: PyG's own where it is compiled, else one that stands in."""
    return ItsSampler(data, [-1] * depth, is_sorted=True) if is_compiled() else HopSampler(indptr, indices, [-1] * depth)


def use_stand_in(monkeypatch: Any) -> None:
    """Let PyG's own NeighborSampler, and so its NeighborLoader, sample graphs of several types where it is not compiled.

    torch-sparse takes the types of edges in the order of their names, and counts no nodes or edges of hops.
    """
    if is_compiled():
        return
    monkeypatch.setattr(torch_geometric.typing, "WITH_PYG_LIB", True)
    monkeypatch.setattr(torch.ops.pyg, "hetero_neighbor_sample", take_types, raising=False)
