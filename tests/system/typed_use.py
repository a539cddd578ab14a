"""Code of a user who checks types by ``mypy --strict``; ``make lint`` checks it, and nothing runs it."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import torch
from torch.utils.data import DataLoader

import featstore
from featstore.sampling.batch import Block


def index(x: featstore.FeatureStore, ids: torch.Tensor) -> torch.Tensor:
    shape: torch.Size = x.size()
    width: int = x.size(1)
    out = torch.empty(len(ids), width, dtype=x.dtype)
    later: Future[torch.Tensor] = x.take_async(ids)
    rows: list[torch.Tensor] = [
        x[0],
        x[1:3],
        x[[1, 2]],
        x[np.arange(3)],
        x[ids],
        x[ids > 3],
        x.take(ids, out=out),
        later.result(),
    ]
    rows.append(later.result())
    for row in x:
        rows.append(row)
    print(len(x), shape, x.stats()["reads"], np.asarray(x).shape)
    return torch.cat(rows)


def workers(x: featstore.FeatureStore) -> DataLoader[torch.Tensor]:
    return DataLoader(x, batch_size=10, num_workers=2)


def train(path: str, model: torch.nn.Module) -> float:
    total = 0.0
    with featstore.open(path, memory="4GiB") as g:
        sampler = featstore.NeighborSampler(g, [10, 10], seed=0)
        strategy, history = featstore.Superbatch(cache=0.1), featstore.History(16, nodes=0.2)
        with featstore.Loader(g, sampler, g.node_data["train_idx"], 1000, strategy=strategy, history=history) as loader:
            for batch in loader:
                h: torch.Tensor = batch.history.merge(batch.features["x"])
                sources: list[torch.Tensor] = [block.src for block in batch.blocks]
                loss = torch.nn.functional.cross_entropy(model(h, sources), batch.y)
                classes: int = batch.to("cpu").y.shape[-1]
                total += loss.item() / classes
            print(loader, loader.stats()["hidden"], g.memory_report().peak)
    return total


def read_back(g: featstore.OutOfCoreGraph) -> list[torch.Tensor]:
    ids, edge_pos = g.neighbors(3, edge_pos=True)
    for block, numbers in g.edges(edge_pos=True):
        ids, edge_pos = block[0], numbers
    blocks: list[torch.Tensor] = list(g.edges())
    return [g.indptr, g.in_degree, g.out_degree, g.neighbors(3), ids, edge_pos, *blocks]


def matrix(path: str, ids: torch.Tensor) -> torch.Tensor:
    with featstore.create(path, ((9, 2), torch.float32, iter([np.ones((9, 2), np.float32)])), overwrite=True) as m:
        store: featstore.FeatureStore = m["x"]
        return store[ids]


def by_type(h: dict[str, torch.Tensor], blocks: dict[tuple[str, str, str], Block]) -> dict[str, torch.Tensor]:
    return {key[2]: h[key[2]][: block.n_dst] for key, block in blocks.items()}


def types(path: str, pairs: torch.Tensor) -> int:
    nodes = {"paper": featstore.Nodes(2, {"x": np.eye(2)}, {"y": [0, 1]}), "author": featstore.Nodes(3)}
    edges = {("author", "writes", "paper"): featstore.Edges(pairs, {"w": torch.ones(4)}), ("paper", "cites", "paper"): pairs}
    with featstore.OutOfCoreGraph.create(path, nodes=nodes, edges=edges) as g:
        names: list[str] = g.node_types
        n_edges: list[int] = [g[key].num_edges for key in g.edge_types]
        means: featstore.FeatureStore = g.aggregate("x", edge_type=("paper", "cites", "paper"), dtype="float32")
        outputs: dict[str, featstore.FeatureStore] = featstore.infer(g, [by_type], {"paper": "x"}, out=f"h{len(means)}")
        rows: torch.Tensor = g["paper"].features["x"][[0, 1]]
        return len(names) + sum(n_edges) + len(rows) + len(outputs)


def train_types(g: featstore.OutOfCoreGraph, seeds: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    loader = featstore.Loader[featstore.HeteroMiniBatch](g, featstore.NeighborSampler(g, [3, 3]), ("paper", seeds))
    for batch in loader:
        block: Block = batch.blocks[0]["author", "writes", "paper"]
        found += [batch.x["paper"], batch.y, block.src]
    return found


def both(one: featstore.Loader, typed: featstore.Loader[featstore.HeteroMiniBatch]) -> tuple[torch.Tensor, torch.Tensor]:
    with typed as loader:
        return next(iter(one)).x, next(iter(loader)).x["paper"]


def make(path: str) -> int:
    try:
        with featstore.OutOfCoreGraph.create(path, np.zeros(3, np.int64), [], {"x": np.eye(2)}, {"y": torch.zeros(2)}) as g:
            g.cache("x", budget="10%", policy="degree")
            parts: torch.Tensor = featstore.partition(g, 2, method="fennel")
            pack = featstore.sample_offline(g, featstore.NeighborSampler(g, [2]), parts, batch_size=1)
            return len(pack)
    except featstore.BudgetError as error:
        return error.needed or 0
