"""Train GraphSAGE with embeddings of earlier steps, and without: python examples/history.py

With a history, nodes next to the seeds that were computed a few steps ago are not computed again (OUTRE). Fewer rows are
requested; the embeddings are somewhat older, which can cost accuracy. The graph is that of partition_batches.py.
"""

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from partition_batches import CLASSES, make_graph
from torch.nn.functional import cross_entropy

import featstore


class SAGE(torch.nn.Module):
    """Each layer sees a node and the mean of its sampled in-neighbours."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2 * a, b) for a, b in pairwise(widths))

    def forward(self, h: torch.Tensor, blocks: tuple[featstore.Block, ...], history: Any = None) -> torch.Tensor:
        for layer, block in zip(self.layers, blocks, strict=True):  # outermost hop first
            if block is blocks[-1] and history is not None:
                h = history.merge(h)  # rows of computed nodes → rows of all sources of the last block
            if block is not blocks[0]:
                h = torch.dropout(h.relu(), 0.5, self.training)
            total = h.new_zeros(block.n_dst, h.shape[1]).index_add_(0, block.dst, h.index_select(0, block.src))
            degree = torch.bincount(block.dst, minlength=block.n_dst).clamp_(min=1)
            h = layer(torch.cat([h[: block.n_dst], total / degree[:, None]], 1))
        return h


def train(g: featstore.OutOfCoreGraph, history: featstore.History | None, options: argparse.Namespace) -> tuple[float, float]:
    """Train a new model; return its test accuracy, and the rows that training requested for a seed."""
    torch.manual_seed(0)
    sampler = featstore.NeighborSampler(g, [10, 10], seed=0)
    seeds, test = g.node_data["train_idx"], g.node_data["test_idx"]
    model = SAGE(g.features["x"].shape[1], options.hidden, CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    strategy = featstore.Superbatch(cache=0.1)
    with featstore.Loader(g, sampler, seeds, options.batch_size, history=history, strategy=strategy) as loader:
        for _ in range(options.epochs):
            for batch in loader:
                optimizer.zero_grad()
                cross_entropy(model(batch.x, batch.blocks, batch.history), batch.y).backward()
                optimizer.step()
        rows = loader.stats()["rows"]
    model.eval()
    with torch.no_grad(), featstore.Loader(g, sampler, test, options.batch_size, shuffle=False) as loader:
        right = sum(int((model(batch.x, batch.blocks).argmax(1) == batch.y).sum()) for batch in loader)
    return right / len(test), rows / (options.epochs * len(seeds))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a training with historical embeddings and one without.")
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--kept", type=float, default=0.5, help="share of the nodes whose embeddings are kept (default: 0.5)")
    parser.add_argument("--staleness", type=int, default=15, help="steps for which one is used (default: 15)")
    parser.add_argument("--memory", default="64MiB", help="all that featstore may hold")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_graph(Path(folder) / "graph", options.nodes)
        with featstore.open(Path(folder) / "graph", memory=options.memory) as g:
            history = featstore.History(options.hidden, options.kept, options.staleness)
            for name, kept in {"without": None, "history": history}.items():
                accuracy, rows = train(g, kept, options)
                print(f"{name:8}  {rows:6.1f} rows a seed, test accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
