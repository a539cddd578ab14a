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
    from torch_geometric.nn import GATConv, GCNConv, GraphConv, GraphSAGE, HeteroConv, SAGEConv
    from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, NodeSamplerInput, SamplerOutput
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
