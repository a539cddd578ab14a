"""GraphSAGE over several types of nodes and edges, in plain PyTorch on a batch's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from featstore.cli.sage import mean_of_neighbors
from featstore.inference.layers import TypedLayer
from featstore.sampling.batch import Block
from featstore.topology.types import EdgeKey

__all__ = ["HeteroSAGE"]

Rows = Mapping[str, torch.Tensor]
Blocks = Mapping[EdgeKey, Block]


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
