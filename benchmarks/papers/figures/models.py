"""Small models of the papers' accuracy tables, over the blocks of a batch, and their training: GraphSAGE, GCN and GAT."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

import featstore
from featstore.cli.sage import GraphSAGE, mean_over_edges
from featstore.cli.training import evaluate

HEADS = 4


class GCNLayer(torch.nn.Module):
    """``W`` times the mean over a node and its drawn neighbours."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.of_mean = torch.nn.Linear(n_in, n_out)

    def forward(self, h: torch.Tensor, block: Any) -> torch.Tensor:
        """Compute the outputs, shape (n_dst, n_out)."""
        degree = torch.bincount(block.dst, minlength=block.n_dst)[:, None].to(h.dtype)
        neighbors = mean_over_edges(h.index_select(0, block.src), block)
        result: torch.Tensor = self.of_mean((neighbors * degree + h[: block.n_dst]) / (degree + 1))
        return result


class GATLayer(torch.nn.Module):
    """Attention over the drawn neighbours, :data:`HEADS` heads side by side, and the node's own row beside them."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.heads = HEADS if n_out % HEADS == 0 else 1
        self.rows = torch.nn.Linear(n_in, n_out, bias=False)
        self.own = torch.nn.Linear(n_in, n_out)
        self.of_source, self.of_target = (
            torch.nn.Parameter(0.1 * torch.randn(self.heads, n_out // self.heads)) for _ in range(2)
        )

    def forward(self, h: torch.Tensor, block: Any) -> torch.Tensor:
        """Compute the outputs, shape (n_dst, n_out)."""
        rows = self.rows(h).view(len(h), self.heads, -1)
        source, target = ((rows * each).sum(2) for each in (self.of_source, self.of_target))
        scores = torch.nn.functional.leaky_relu(source.index_select(0, block.src) + target.index_select(0, block.dst), 0.2)
        weights = torch.exp(scores - scores.max() if len(scores) else scores)
        total = weights.new_zeros(block.n_dst, self.heads).index_add_(0, block.dst, weights)
        summed = rows.new_zeros(block.n_dst, *rows.shape[1:])
        summed.index_add_(0, block.dst, rows.index_select(0, block.src) * weights[:, :, None])
        mean = summed / total.clamp_min(1e-12)[:, :, None]
        result: torch.Tensor = self.own(h[: block.n_dst]) + mean.flatten(1)
        return result


class Layers(torch.nn.Module):
    """Layers of a kind with a rectifier between them; called as GraphSAGE is."""

    def __init__(self, kind: type[torch.nn.Module], n_in: int, n_hidden: int, n_classes: int, n_layers: int) -> None:
        super().__init__()
        sizes = [n_in, *[n_hidden] * (n_layers - 1), n_classes]
        self.layers = torch.nn.ModuleList(kind(a, b) for a, b in pairwise(sizes))

    def forward(self, x: torch.Tensor, blocks: Any, *_: Any) -> torch.Tensor:
        """Compute the scores of a batch's seeds."""
        for number, (layer, block) in enumerate(zip(self.layers, blocks, strict=True)):
            x = layer(torch.relu(x) if number else x, block)
        return x


def make_model(kind: str, n_in: int, n_hidden: int, n_classes: int, n_layers: int) -> torch.nn.Module:
    """Make a model: ``"SAGE"``, ``"GCN"`` or ``"GAT"``."""
    if kind == "SAGE":
        return GraphSAGE(n_in, n_hidden, n_classes, n_layers)
    return Layers({"GCN": GCNLayer, "GAT": GATLayer}[kind], n_in, n_hidden, n_classes, n_layers)


def train(
    loader: featstore.Loader, test: featstore.Loader, kind: str, hidden: int, n_layers: int, n_classes: int, epochs: int
) -> dict[str, float]:
    """Train a new model on a loader's batches; return the seconds of all epochs, and the test seeds' accuracy after them."""
    torch.manual_seed(0)
    model: Any = None
    begin = time.perf_counter()
    for _ in range(epochs):
        for batch in loader:
            if model is None:
                model = make_model(kind, batch.x.shape[1], hidden, n_classes, n_layers)
                optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch.x, batch.blocks), batch.y).backward()
            optimizer.step()
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "accuracy": evaluate(model, test)}
