"""Train GraphSAGE on a featstore dataset, in plain PyTorch: python examples/train_sage.py DATASET --memory 400MB

The dataset has a feature "x", labels "y", and seeds "train_idx" and "test_idx".
"""

import argparse
import time
from itertools import pairwise

import torch
from torch.nn.functional import cross_entropy

import featstore


class SAGE(torch.nn.Module):
    """Each layer sees a node and the mean of its sampled in-neighbours."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.of_self = torch.nn.ModuleList(torch.nn.Linear(a, b) for a, b in pairs)
        self.of_neighbors = torch.nn.ModuleList(torch.nn.Linear(a, b, bias=False) for a, b in pairs)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(b) for _, b in pairs[:-1])

    def forward(self, h: torch.Tensor, blocks: tuple[featstore.Block, ...]) -> torch.Tensor:
        for i, block in enumerate(blocks):  # outermost hop first
            messages = self.of_neighbors[i](h).index_select(0, block.src)
            total = messages.new_zeros(block.n_dst, messages.shape[1]).index_add_(0, block.dst, messages)
            degree = torch.bincount(block.dst, minlength=block.n_dst).clamp_(min=1)
            h = self.of_self[i](h[: block.n_dst]) + total / degree[:, None]  # a block's first sources are its destinations
            if i < len(self.norms):
                h = torch.dropout(self.norms[i](h).relu(), 0.5, self.training)
        return h


def main() -> None:
    parser = argparse.ArgumentParser(description="Train GraphSAGE on a featstore dataset.")
    parser.add_argument("dataset")
    parser.add_argument("--memory", default="1GiB", help="all that featstore may hold")
    parser.add_argument("--fanouts", type=int, nargs="+", default=[10, 10])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=0.003)
    options = parser.parse_args()
    torch.manual_seed(0)

    with featstore.open(options.dataset, memory=options.memory) as g:
        sampler = featstore.NeighborSampler(g, options.fanouts, seed=0)
        train = featstore.Loader(g, sampler, g.node_data["train_idx"], options.batch_size)  # chooses a strategy by itself
        test = featstore.Loader(g, sampler, g.node_data["test_idx"], options.batch_size, shuffle=False)
        n_classes = int(g.node_data["y"].max()) + 1
        widths = [g.features["x"].shape[1], *[options.hidden] * (len(options.fanouts) - 1), n_classes]
        model = SAGE(*widths)
        optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

        for epoch in range(options.epochs):
            start = time.perf_counter()
            model.train()
            for batch in train:
                loss = cross_entropy(model(batch.x, batch.blocks), batch.y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            seconds = time.perf_counter() - start
            model.eval()
            with torch.no_grad():
                right = sum(int((model(batch.x, batch.blocks).argmax(1) == batch.y).sum()) for batch in test)
            n_test = len(g.node_data["test_idx"])
            print(f"epoch {epoch}: loss {loss.item():.4f}, test accuracy {right / n_test:.4f}, {seconds:.1f} s")
        print(train.stats())


if __name__ == "__main__":
    main()
