"""Train a model of PyTorch Geometric from disk: python examples/pyg.py FOLDER --loader ours|stores|memory

FOLDER gets a dataset on the first run, made from a PyG graph in memory: a planted one here, your own Data in its place. The three
loaders train the same model in the same loop.
"""

import argparse
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GraphSAGE

import featstore
from featstore.adapters.pyg import NeighborLoader, Sampler, stores


def planted_graph(n: int, n_classes: int, width: int = 64, degree: int = 12) -> Data:
    """Return a graph whose nodes mostly cite nodes of their class, with features that tell the class only vaguely."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(n_classes, (n,), generator=generator)
    by_class, first = torch.sort(y, stable=True)[1], torch.bincount(y, minlength=n_classes).cumsum(0)
    size = torch.bincount(y, minlength=n_classes)
    cites = torch.arange(n).repeat_interleave(degree)
    stranger = torch.rand(len(cites), generator=generator) < 0.2
    like = torch.where(stranger, torch.randint(n_classes, (len(cites),), generator=generator), y[cites])
    place = (torch.rand(len(cites), generator=generator) * size[like]).long() + first[like] - size[like]
    x = 0.5 * torch.nn.functional.one_hot(y, width) + torch.randn(n, width, generator=generator)
    split = torch.rand(n, generator=generator)
    edge_index = torch.stack([by_class[place], cites])
    return Data(x=x, y=y, edge_index=edge_index, train_mask=split < 0.5, test_mask=split > 0.8)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model of PyTorch Geometric from disk.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--loader", choices=["ours", "stores", "memory"], default="ours")
    parser.add_argument("--strategy", default="auto", help="of the library's own loader")
    parser.add_argument("--memory", default="256MiB", help="all that featstore may hold")
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--num-neighbors", type=int, nargs="+", default=[10, 10])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--num-workers", type=int, default=0, help="processes of PyG's loader; threads of the library's")
    options = parser.parse_args()

    if not options.folder.exists():
        graph = planted_graph(options.nodes, n_classes=8)
        featstore.OutOfCoreGraph.from_pyg(options.folder, graph, progress=False).close()
    with featstore.open(options.folder, memory=options.memory) as g:
        torch.manual_seed(0)
        common = {"batch_size": options.batch_size, "num_workers": options.num_workers}
        if options.loader == "ours":

            def loader(nodes, **more):
                return NeighborLoader(g, options.num_neighbors, nodes, strategy=options.strategy, **common, **more)
        else:
            sampler = Sampler(featstore.NeighborSampler(g, options.num_neighbors, redraw=False))
            data = stores(g) if options.loader == "stores" else in_memory(g)

            def loader(nodes, **more):
                return NodeLoader(data, sampler, nodes, **common, **more)

        n_classes = int(g.node_data["y"].max()) + 1
        model = GraphSAGE(g.features["x"].shape[1], 64, len(options.num_neighbors), n_classes)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train = loader(g.node_data["train_mask"], shuffle=True)
        for epoch in range(options.epochs):
            start = time.perf_counter()
            for batch in train:
                loss = cross_entropy(outputs(model, batch), batch.y[: batch.batch_size])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.4f}, {time.perf_counter() - start:.1f} s")
        model.eval()
        with torch.no_grad():
            right = [outputs(model, b).argmax(1) == b.y[: b.batch_size] for b in loader(g.node_data["test_mask"])]
        print(f"test accuracy {torch.cat(right).double().mean():.4f}")


def outputs(model: torch.nn.Module, batch: Data) -> torch.Tensor:
    """Return the model's outputs for the seeds; each layer computes what the next one needs."""
    counts = {"num_sampled_nodes_per_hop": batch.num_sampled_nodes, "num_sampled_edges_per_hop": batch.num_sampled_edges}
    return model(batch.x, batch.edge_index, **counts)[: batch.batch_size]


def in_memory(g: featstore.OutOfCoreGraph) -> Data:
    """Return the dataset as PyG holds it in memory."""
    edges = torch.stack(stores(g)[1].coo()[:2])
    return Data(x=g.features["x"][:], y=g.node_data["y"], edge_index=edges)


if __name__ == "__main__":
    main()
