"""Train on a graph of several types from disk: python examples/hetero.py FOLDER --features disk|memory

FOLDER gets a dataset on the first run: papers with features, authors and institutions without, as in MAG240M, but small and with
planted classes. A paper's own features say little of its class; those of its authors' other papers and of what it cites say more.
With ``--features memory`` the same batches take their rows from memory, so that both runs train the same model.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch_geometric.nn import HeteroConv, SAGEConv

import featstore

CLASSES, WIDTH = 8, 64


def planted(papers: int, seed: int = 0) -> tuple[dict, dict]:
    """Return the nodes and edges of a graph, as ``OutOfCoreGraph.create`` takes them."""
    rng = np.random.default_rng(seed)
    authors, institutions = papers // 2, max(8, papers // 50)
    y, field = rng.integers(0, CLASSES, papers), rng.integers(0, CLASSES, authors)

    def like(wanted: np.ndarray, of: np.ndarray) -> np.ndarray:
        """Draw for each wanted class a node of that class, or, one time in five, any node."""
        order = np.argsort(of, kind="stable")
        first = np.searchsorted(of[order], np.arange(CLASSES + 1))
        wanted = np.where(rng.random(len(wanted)) < 0.2, rng.integers(0, CLASSES, len(wanted)), wanted)
        size = np.maximum(1, first[wanted + 1] - first[wanted])
        return order[np.minimum(first[wanted] + (rng.random(len(wanted)) * size).astype(np.int64), len(of) - 1)]

    writing = np.repeat(np.arange(papers), 3)
    writes = np.stack([like(y[writing], field), writing])
    employs = np.stack([rng.integers(0, institutions, authors), np.arange(authors)])
    citing = np.repeat(np.arange(papers), 6)
    x = (0.5 * np.eye(CLASSES, WIDTH, dtype=np.float32)[y] + rng.standard_normal((papers, WIDTH), dtype=np.float32)).astype(
        np.float16
    )
    nodes = {
        "paper": featstore.Nodes(papers, features={"x": x}, data={"y": y}),
        "author": featstore.Nodes(authors),
        "institution": featstore.Nodes(institutions),
    }
    edges = {
        ("author", "writes", "paper"): writes,
        ("paper", "rev_writes", "author"): writes[::-1],
        ("paper", "cites", "paper"): np.stack([like(y[citing], y), citing]),
        ("institution", "employs", "author"): employs,
        ("author", "rev_employs", "institution"): employs[::-1],
    }
    return nodes, edges


class Model(torch.nn.Module):
    """A convolution for each type of edges and hop, summed at each type of nodes."""

    def __init__(self, edge_types: list, hidden: int = 64) -> None:
        super().__init__()
        widths = [(-1, -1), (-1, -1)]
        self.hops = torch.nn.ModuleList(HeteroConv({key: SAGEConv(width, hidden) for key in edge_types}) for width in widths)
        self.out = torch.nn.Linear(hidden, CLASSES)

    def forward(self, x: dict, edges: dict) -> torch.Tensor:
        for hop in self.hops:
            x = {kind: rows.relu() for kind, rows in hop(x, edges).items()}
        return self.out(x["paper"])


def inputs(data, x=None) -> dict:
    """Return the features of a batch by type: types without features get a column of ones."""
    found = {kind: torch.ones(data[kind].num_nodes, 1) for kind in data.node_types}
    found["paper"] = (data["paper"].x if x is None else x[data["paper"].n_id]).float()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a graph of several types from disk.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--features", choices=["disk", "memory"], default="disk")
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--memory", default="256MiB", help="all that featstore may hold")
    parser.add_argument("--papers", type=int, default=20_000)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()

    nodes, edges = planted(options.papers)
    if not options.folder.exists():
        featstore.OutOfCoreGraph.create(options.folder, nodes=nodes, edges=edges, progress=False).close()
    x = None if options.features == "disk" else torch.from_numpy(nodes["paper"].features["x"])
    with featstore.open(options.folder, memory=options.memory) as g:
        torch.manual_seed(0)
        sampler = featstore.NeighborSampler(g, options.fanouts, redraw=False)
        split = np.random.default_rng(1).permutation(g["paper"].num_nodes)
        train, test = split[: len(split) // 2], split[len(split) * 4 // 5 :]

        def loader(ids: np.ndarray, **more) -> featstore.Loader:
            features = "x" if x is None else []
            common = {"features": features, "strategy": options.strategy, "batch_size": options.batch_size}
            return featstore.Loader(g, sampler, ("paper", ids), **common, **more)

        model = Model(g.edge_types)
        optimizer = None
        with loader(train) as batches:
            for epoch in range(options.epochs):
                begin, total = time.perf_counter(), 0.0
                for batch in batches:
                    data = batch.to_pyg()
                    out = model(inputs(data, x), data.edge_index_dict)[: data["paper"].batch_size]
                    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)  # after the first forward pass
                    optimizer.zero_grad()
                    loss = cross_entropy(out, data["paper"].y)
                    loss.backward()
                    optimizer.step()
                    total += float(loss.detach()) * len(out)
                print(f"epoch {epoch}: loss {total / len(train):.4f}, {time.perf_counter() - begin:.1f} s")
        model.eval()
        right = 0
        with torch.no_grad(), loader(test, shuffle=False) as batches:
            for batch in batches:
                data = batch.to_pyg()
                out = model(inputs(data, x), data.edge_index_dict)[: data["paper"].batch_size]
                right += int((out.argmax(1) == data["paper"].y).sum())
        print(f"accuracy {right / len(test):.4f}")


if __name__ == "__main__":
    main()
