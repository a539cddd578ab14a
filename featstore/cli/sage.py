"""GraphSAGE with mean aggregation, of one type or of several types of nodes and edges, in plain PyTorch on a batch's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch

from featstore.inference.layers import Aggregate, TypedLayer
from featstore.load.history import BatchHistory
from featstore.sampling.batch import Block
from featstore.topology.types import EdgeKey

__all__ = ["GraphSAGE", "HeteroSAGE", "SageLayer", "mean_of_neighbors", "mean_over_edges"]

Rows = Mapping[str, torch.Tensor]
Blocks = Mapping[EdgeKey, Block]


def mean_of_neighbors(h: torch.Tensor, block: Block) -> torch.Tensor:
    """Compute the mean over each destination's drawn neighbours, shape (n_dst, d); zero without neighbours."""
    return mean_over_edges(h.index_select(0, block.src), block)


def mean_over_edges(rows: torch.Tensor, block: Block) -> torch.Tensor:
    """Compute the mean of each destination's edges, from one row an edge, shape (n_dst, d); zero without edges.

    In a block with weights the mean is weighted: the sum of the weights estimates the number of all neighbours. ``index_select``
    and ``index_add_`` add in the order of the edges, forward and backward, so every run gives the same bits.
    """
    if block.weight is not None:
        weight = block.weight.to(rows.dtype)
        total = rows.new_zeros(block.n_dst, rows.shape[1]).index_add_(0, block.dst, rows * weight[:, None])
        share = rows.new_zeros(block.n_dst).index_add_(0, block.dst, weight)
        return total / torch.where(share > 0, share, 1)[:, None]
    total = rows.new_zeros(block.n_dst, rows.shape[1]).index_add_(0, block.dst, rows)
    degree = torch.bincount(block.dst, minlength=block.n_dst).clamp_(min=1)
    return total / degree[:, None]


class SageLayer(torch.nn.Module):
    """``W_self h_v + W_neigh mean(h_u)``, for every destination ``v``; with ``n_edge``, plus ``W_edge mean(e_uv)``.

    Both means run over the same edges, so their sum is the mean of ``[W_neigh, W_edge] [h_u, e_uv]``: what a message of the
    neighbour's row and the edge's side by side gives.
    """

    def __init__(self, n_in: int, n_out: int, n_edge: int = 0) -> None:
        super().__init__()
        self.of_self = torch.nn.Linear(n_in, n_out)
        self.of_neighbors = torch.nn.Linear(n_in, n_out, bias=False)
        self.of_edges = torch.nn.Linear(n_edge, n_out, bias=False) if n_edge else None

    @property
    def is_narrower(self) -> bool:
        """Whether rows are multiplied before they are averaged, so that the narrower rows are summed along the edges."""
        return self.of_neighbors.out_features < self.of_neighbors.in_features

    def of_mean(self, h: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Compute the output, shape (n, n_out), of nodes with rows ``h`` and the means over their neighbours."""
        result: torch.Tensor = self.of_self(h) + (mean if self.is_narrower else self.of_neighbors(mean))
        return result

    def forward(self, h: torch.Tensor, block: Block, edges: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the outputs, shape (n_dst, n_out); ``edges``: a row of ``n_edge`` numbers for each edge of the block."""
        if self.is_narrower:
            neighbors = mean_of_neighbors(self.of_neighbors(h), block)
        else:
            neighbors = self.of_neighbors(mean_of_neighbors(h, block))
        result: torch.Tensor = self.of_self(h[: block.n_dst]) + neighbors
        if self.of_edges is not None:
            if edges is None:
                raise ValueError("the model has weights for rows of edges, and got none")
            result = result + self.of_edges(mean_over_edges(edges, block))
        return result


class GraphSAGE(torch.nn.Module):
    """A layer a block, with layer normalisation, ReLU and dropout between them; ``n_edge`` numbers a row of the edges, or 0.

    Hamilton, Ying, Leskovec: Inductive Representation Learning on Large Graphs. NeurIPS 2017. With features of edges beside the
    neighbours', as in Lo et al.: E-GraphSAGE. NOMS 2022.
    """

    def __init__(self, n_in: int, hidden: int, n_out: int, n_layers: int, dropout: float = 0.5, n_edge: int = 0) -> None:
        super().__init__()
        if n_layers < 1:
            raise ValueError(f"n_layers must be at least 1, not {n_layers}")
        widths = [n_in, *[hidden] * (n_layers - 1), n_out]
        self.layers = torch.nn.ModuleList(SageLayer(a, b, n_edge) for a, b in pairwise(widths))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(hidden) for _ in range(n_layers - 1))
        self.dropout = torch.nn.Dropout(dropout)
        self.n_edge = n_edge

    def forward(
        self,
        h: torch.Tensor,
        blocks: Sequence[Block],
        history: BatchHistory | None = None,
        edges: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute class scores of the seeds, shape (n_seeds, n_out).

        ``history`` is the batch's, if its loader has one. ``edges`` has a tensor a block: a row of ``n_edge`` numbers an edge.
        """
        of_edges = [None] * len(blocks) if edges is None else edges
        for i, (layer, block, rows) in enumerate(zip(self.layers, blocks, of_edges, strict=True)):
            h = layer(h, block, rows)
            if i < len(self.norms):
                h = self.norms[i](h).relu()
                if history is not None and i == len(self.norms) - 1:
                    h = history.merge(h)
                h = self.dropout(h)
        return h

    def inference_layers(self) -> list[Aggregate]:
        """Convert the layers for :func:`featstore.infer`; ValueError if they need edge features."""
        if self.n_edge:
            raise ValueError("the model was trained with --edge-features: infer averages rows of nodes, and has none of edges")
        return [
            Aggregate(partial(self._output, i), before=layer.of_neighbors if layer.is_narrower else None)
            for i, layer in enumerate(self.layers)
            if isinstance(layer, SageLayer)
        ]

    def _output(self, i: int, h: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        layer = self.layers[i]
        assert isinstance(layer, SageLayer)
        result = layer.of_mean(h, mean)
        return self.norms[i](result).relu() if i < len(self.norms) else result


class HeteroSAGE(torch.nn.Module):
    """``W_self h_v + Σ_r W_r mean_r(h_u)``, with weights of each type of nodes, and of edges ``r`` that end at ``v``'s type.

    Rows of each type are first mapped to ``hidden`` numbers; nodes of a type without features share a learned row. Layer
    normalisation, ReLU and dropout lie between layers. The last layer has class scores of the type ``target`` alone.

    Hamilton, Ying, Leskovec: Inductive Representation Learning on Large Graphs. NeurIPS 2017. With weights by relation, as in
    Schlichtkrull et al.: Modeling Relational Data with Graph Convolutional Networks. ESWC 2018.

    Parameters
    ----------
    widths : mapping of str to int
        Numbers in a row of each type of nodes; 0 for a type without features.
    edge_types : sequence of (str, str, str)
    target : str
    hidden, n_out, n_layers : int
    dropout : float
    """

    def __init__(
        self,
        widths: Mapping[str, int],
        edge_types: Sequence[EdgeKey],
        target: str,
        hidden: int,
        n_out: int,
        n_layers: int,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if n_layers < 1:
            raise ValueError(f"n_layers must be at least 1, not {n_layers}")
        self.kinds, self.edge_types = list(widths), list(edge_types)
        self.target, self.n_layers = target, n_layers
        self.inputs = torch.nn.ModuleList(torch.nn.Linear(max(1, width), hidden) for width in widths.values())
        self.of_self, self.of_neighbors, self.norms = (torch.nn.ModuleList() for _ in range(3))
        for i in range(n_layers):
            is_last = i == n_layers - 1
            width = n_out if is_last else hidden
            kinds = [target] if is_last else self.kinds
            into = [key for key in self.edge_types if key[2] in kinds]
            self.of_self.append(torch.nn.ModuleList(torch.nn.Linear(hidden, width) for _ in kinds))
            self.of_neighbors.append(torch.nn.ModuleList(torch.nn.Linear(hidden, width, bias=False) for _ in into))
            if not is_last:
                self.norms.append(torch.nn.ModuleList(torch.nn.LayerNorm(hidden) for _ in kinds))
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: Rows, blocks: Sequence[Blocks]) -> torch.Tensor:
        """Compute class scores of the seeds, shape (n_seeds, n_out); rows of a type without features have shape (n, 0)."""
        h = self.begin(x)
        for i, hop in enumerate(blocks):
            h = self.layer(i, h, hop, self.kinds)
            if i < self.n_layers - 1:
                h = {kind: self.dropout(rows) for kind, rows in h.items()}
        return h[self.target]

    def begin(self, x: Rows) -> dict[str, torch.Tensor]:
        """Map rows of each type to ``hidden`` numbers."""
        found = {}
        for kind, rows in x.items():
            given = rows if rows.shape[1] else rows.new_ones(len(rows), 1)
            found[kind] = self.inputs[self.kinds.index(kind)](given)
        return found

    def layer(self, i: int, h: Rows, blocks: Blocks, kinds: Iterable[str]) -> dict[str, torch.Tensor]:
        """Compute layer ``i`` of some types of nodes, activation included: a row for each destination of the blocks."""
        is_last = i == self.n_layers - 1
        made = [self.target] if is_last else self.kinds
        into = [key for key in self.edge_types if key[2] in made]
        found = {}
        for kind in kinds:
            if kind not in made or kind not in h:
                continue
            edges = {key: block for key, block in blocks.items() if key[2] == kind}
            n_dst = next((block.n_dst for block in edges.values()), len(h[kind]))
            rows = self._of(self.of_self, i, made.index(kind))(h[kind][:n_dst])
            for key, block in edges.items():
                rows = rows + mean_of_neighbors(self._of(self.of_neighbors, i, into.index(key))(h[key[0]]), block)
            found[kind] = rows if is_last else self._of(self.norms, i, made.index(kind))(rows).relu()
        return found

    @staticmethod
    def _of(modules: torch.nn.ModuleList, i: int, k: int) -> torch.nn.Module:
        of_layer = modules[i]
        assert isinstance(of_layer, torch.nn.ModuleList)
        return of_layer[k]

    def inference_layers(self) -> list[TypedLayer]:
        """Convert the layers for :func:`featstore.infer`."""
        return [partial(self._output, i) for i in range(self.n_layers)]

    def _output(self, i: int, h: dict[str, torch.Tensor], blocks: dict[EdgeKey, Block]) -> dict[str, torch.Tensor]:
        # All blocks end at one type; without any, the rows are those of that type.
        kinds = {key[2] for key in blocks} or set(h)
        return self.layer(i, h if i else self.begin(h), blocks, kinds)
