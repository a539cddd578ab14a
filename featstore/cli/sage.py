"""GraphSAGE with mean aggregation, in plain PyTorch on a batch's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch

from featstore.inference.layers import Aggregate
from featstore.load.history import BatchHistory
from featstore.sampling.batch import Block

__all__ = ["GraphSAGE", "SageLayer", "mean_of_neighbors", "mean_over_edges"]


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
