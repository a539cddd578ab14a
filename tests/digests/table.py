"""Digests of batches and counts of loads by sampler, kept in a table; ``python -m tests.digests.table`` writes it anew."""

from __future__ import annotations

import itertools
import json
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import featstore
from tests.support.frozen import SAMPLERS, STRATEGIES, THREADS, digest_of, make_dataset, make_loader_of, make_pack

__all__ = ["TABLE", "entry", "make_graph", "train"]

TABLE = Path(__file__).with_name("digests.json")
DIM, N_CLASSES, HIDDEN = 25, 5, 8


def make_graph(folder: Path) -> Path:
    """Create the dataset that digests are of: 3,000 nodes with rows of 100 bytes, edges with rows of 12."""
    return make_dataset(folder / "graph", 3_000, DIM, edge_dim=3)


class _Model(torch.nn.Module):
    """Sums over neighbours, and a matrix a hop that no generator drew; uses rows and weights of edges where there are some."""

    def __init__(self, n_hops: int) -> None:
        super().__init__()
        widths = [DIM, *[HIDDEN] * (n_hops - 1), N_CLASSES]
        steps = [torch.arange(a * b).reshape(a, b) * 7919 % 1009 for a, b in itertools.pairwise(widths)]
        self.layers = torch.nn.ParameterList((each / 1009 - 0.5) / len(each) for each in steps)

    def forward(self, batch: featstore.MiniBatch) -> torch.Tensor:
        h: torch.Tensor = batch.x
        for number, (block, layer) in enumerate(zip(batch.blocks, self.layers, strict=True)):
            messages = h[block.src] if block.weight is None else h[block.src] * block.weight[:, None]
            h = h[: block.n_dst].index_add(0, block.dst, messages)
            for rows in batch.edge_features.values():
                h = h + rows[number].new_zeros(block.n_dst, 1).index_add_(0, block.dst, rows[number].sum(1, keepdim=True))
            h = (h @ layer).tanh()
        return h


@dataclass
class Found:
    """Of two epochs: the digest of each one's batches, the rows that both loaded, and all losses to the last bit."""

    digests: list[str]
    rows_loaded: int
    losses: list[str]


def train(graph: Path, sampler: str, name: str) -> Found:
    """Train with a strategy whose sizes are given: a cache of a tenth of the rows, three superbatches an epoch.

    Losses are the same bits on one machine alone, and where torch computes in one thread.
    """
    losses = list[str]()
    model: torch.nn.Module | None = None

    def steps(loader: featstore.Loader) -> Iterator[featstore.MiniBatch]:
        nonlocal model
        for batch in loader:
            model = model or _Model(len(batch.blocks))
            loss = torch.nn.functional.cross_entropy(model(batch), batch.y)
            for weights, gradient in zip(model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True):
                weights.data -= 0.1 * gradient
            losses.append(loss.item().hex())
            yield batch

    pack = graph.with_name(f"{sampler}.pack")
    if name == "packed" and not pack.exists():
        make_pack(pack, graph, sampler)
    length = {} if name in ("ondemand", "auto") else {"length": 4}
    strategy = STRATEGIES[name](pack if name == "packed" else None, cache=0.1, **length)
    options: dict[str, Any] = {"edge_features": "w"} if sampler == "edges" else {}
    with featstore.open(graph, memory="16MB", threads=THREADS) as g, make_loader_of(g, sampler, strategy, **options) as loader:
        digests = [digest_of(steps(loader)) for _ in range(2)]
        return Found(digests, loader.stats()["rows_loaded"], losses)


def entry(found: dict[str, Found]) -> dict[str, Any]:
    """Make the table's entry of a sampler, by what was found of each strategy: what "auto" takes depends on the machine."""
    loaded = {name: each.rows_loaded for name, each in found.items() if name != "auto"}
    return {"digests": found["ondemand"].digests, "rows_loaded": loaded}


def main() -> None:
    """Write the table."""
    warnings.simplefilter("ignore", featstore.PerformanceWarning)
    with tempfile.TemporaryDirectory() as folder:
        graph = make_graph(Path(folder))
        table = {each: entry({name: train(graph, each, name) for name in STRATEGIES}) for each in SAMPLERS}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
