"""Accuracy of sizes.types: an R-GAT trained through featstore, and the same model over PyG's NeighborLoader in memory.

The graph is generated: papers of eight classes, their authors, and the institutions of these. A paper's own features say little
of its class; what it cites and who wrote it say more. Both sides begin with the same weights, draw as many neighbours, and take
all neighbours of the same test papers. Order and draws are each side's own, and so are the lists. Those of the reference are
arrays in memory, from which pyg-lib draws, or NumPy where that is not installed. So the sides differ as two runs of one side do.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import cross_entropy

import featstore
from benchmarks.tools.harness import Report

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated", DeprecationWarning)
    import torch_geometric.typing
    from torch_geometric.data import HeteroData
    from torch_geometric.loader import NeighborLoader
    from torch_geometric.nn import GATConv, HeteroConv, Linear
    from torch_geometric.sampler import BaseSampler, HeteroSamplerOutput, NodeSamplerInput
    from torch_geometric.utils import trim_to_layer

from featstore.adapters.pyg import NeighborLoader as OwnLoader  # after PyG, which is imported without its warnings above

CLASSES, WIDTH, HIDDEN, HEADS = 8, 32, 32, 2
PAPERS, EPOCHS, BATCH_SIZE, SEEDS = 40_000, 4, 256, 3
TRAINED_SHARE = 0.2  # the others are tested: as many that two equally good models differ by chance in less than half a point
FANOUTS = [6, 3]
LEARNING_RATE = 0.01  # at the start; it falls to 0
WITHIN = 0.5  # points between the means
WRITES = ("author", "writes", "paper")

Int64s = npt.NDArray[np.int64]
Arrays = dict[Any, npt.NDArray[Any]]


def planted(papers: int) -> tuple[dict[str, int], Arrays, npt.NDArray[np.float32], Int64s]:
    """Generate the graph: nodes by type, edges by type, rows of papers, classes of papers."""
    rng = np.random.default_rng(0)
    n = {"paper": papers, "author": papers // 2, "institution": max(CLASSES, papers // 50)}
    of = {kind: rng.integers(0, CLASSES, count) for kind, count in n.items()}

    def like(classes: Int64s, kind: str, share: float) -> Int64s:
        """Draw a node of each class, or, but for this share, any node."""
        order = np.argsort(of[kind], kind="stable")
        first = np.searchsorted(of[kind][order], np.arange(CLASSES + 1))
        own = first[classes] + (rng.random(len(classes)) * (first[classes + 1] - first[classes])).astype(np.int64)
        return np.where(rng.random(len(classes)) < share, order[own], rng.integers(0, n[kind], len(classes)))

    written, citing, authors = np.repeat(np.arange(papers), 3), np.repeat(np.arange(papers), 5), np.arange(n["author"])
    writes = np.stack([like(of["paper"][written], "author", 0.7), written])
    cites = np.stack([like(of["paper"][citing], "paper", 0.6), citing])
    employs = np.stack([like(of["author"], "institution", 0.7), authors])
    edges = {
        WRITES: writes,
        ("paper", "rev_writes", "author"): writes[::-1].copy(),
        ("paper", "cites", "paper"): cites,
        ("institution", "employs", "author"): employs,
        ("author", "rev_employs", "institution"): employs[::-1].copy(),
    }
    x = 0.8 * np.eye(CLASSES, WIDTH, dtype=np.float32)[of["paper"]] + rng.standard_normal((papers, WIDTH), dtype=np.float32)
    return n, edges, x, of["paper"]


class RGat(torch.nn.Module):
    """Two hops of attention for each type of edges, summed at each type of nodes with a linear map of its own rows.

    Each hop computes what the next one needs, as the batch's counts say.
    """

    def __init__(self, widths: dict[str, int], keys: list[Any]) -> None:
        super().__init__()
        self.hops, self.own = torch.nn.ModuleList(), torch.nn.ModuleList()
        for number in range(len(FANOUTS)):
            of = widths if number == 0 else dict.fromkeys(widths, HIDDEN)
            self.hops.append(
                HeteroConv(
                    {key: GATConv((of[key[0]], of[key[2]]), HIDDEN // HEADS, heads=HEADS, add_self_loops=False) for key in keys}
                )
            )
            self.own.append(torch.nn.ModuleDict({kind: Linear(width, HIDDEN) for kind, width in of.items()}))
        self.out = Linear(HIDDEN, CLASSES)

    def forward(self, data: Any) -> torch.Tensor:
        """Compute the classes of the seeds. Types without rows have a column of ones."""
        x = {kind: data[kind].x if "x" in data[kind] else torch.ones(len(data[kind].n_id), 1) for kind in data.node_types}
        edges, counts = data.edge_index_dict, (data.num_sampled_nodes_dict, data.num_sampled_edges_dict)
        for number, (hop, own) in enumerate(zip(self.hops, self.own, strict=True)):
            x, edges, _ = trim_to_layer(number, *counts, x, edges)
            found = hop(x, edges)
            x = {kind: (own[kind](rows) + found.get(kind, 0)).relu() for kind, rows in x.items()}
        return self.out(x["paper"])[: data["paper"].batch_size]


class InMemory(BaseSampler):
    """Draw from lists in memory, without replacement: the reference's sampler where pyg-lib is not installed."""

    def __init__(self, n: dict[str, int], edges: Arrays, fanouts: list[int]) -> None:
        self.n, self.fanouts, self.lists = n, fanouts, {}
        for key, (src, dst) in edges.items():
            order = np.argsort(dst, kind="stable")
            self.lists[key] = np.searchsorted(dst[order], np.arange(n[key[2]] + 1)), src[order]

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> HeteroSamplerOutput:
        """Sample hop by hop, each from the nodes that the last one added."""
        rng = np.random.default_rng(int(torch.randint(2**62, ())))
        nodes = {kind: np.empty(0, np.int64) for kind in self.n} | {str(index.input_type): index.node.numpy()}
        number = {kind: np.full(count, -1) for kind, count in self.n.items()}
        for kind, ids in nodes.items():
            number[kind][ids] = np.arange(len(ids))
        found: dict[Any, list[Int64s]] = {key: [] for key in self.lists}
        n_nodes = {kind: [len(ids)] for kind, ids in nodes.items()}
        first = dict.fromkeys(nodes, 0)
        for fanout in self.fanouts:
            stop = {kind: len(ids) for kind, ids in nodes.items()}
            for key, (indptr, sources) in self.lists.items():
                ids = nodes[key[2]][first[key[2]] : stop[key[2]]]
                starts, degree = indptr[ids], indptr[ids + 1] - indptr[ids]
                owner = np.repeat(np.arange(len(ids)), degree)
                begin = np.cumsum(degree) - degree
                at = starts[owner] + np.arange(len(owner)) - begin[owner]
                if fanout >= 0:
                    at = at[np.lexsort((rng.random(len(at)), owner))]  # each list in random order
                    kept = np.arange(len(owner)) - begin[owner] < fanout
                    at, owner = at[kept], owner[kept]
                src = sources[at]
                new = np.unique(src[number[key[0]][src] < 0])
                number[key[0]][new] = len(nodes[key[0]]) + np.arange(len(new))
                nodes[key[0]] = np.concatenate([nodes[key[0]], new])
                found[key].append(np.stack([number[key[0]][src], owner + first[key[2]]]))
            first = stop
            for kind, ids in nodes.items():
                n_nodes[kind].append(len(ids) - stop[kind])
        n_edges = {key: [hop.shape[1] for hop in hops] for key, hops in found.items()}
        row, col = ({key: torch.from_numpy(np.concatenate(hops, 1)[k]) for key, hops in found.items()} for k in (0, 1))
        ids_of = {kind: torch.from_numpy(ids) for kind, ids in nodes.items()}
        counts = {"num_sampled_nodes": n_nodes, "num_sampled_edges": n_edges}
        return HeteroSamplerOutput(ids_of, row, col, dict.fromkeys(row), **counts, metadata=(index.input_id, index.time))

    def sample_from_edges(self, index: Any, neg_sampling: Any = None) -> Any:
        """Part of the base class: links are not sampled here."""
        raise NotImplementedError("this sampler samples from nodes")


def train(model: RGat, batches: Any, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.01, total_iters=epochs * len(batches))
    for _ in range(epochs):
        for data in batches:
            optimizer.zero_grad()
            cross_entropy(model(data), data["paper"].y[: data["paper"].batch_size]).backward()
            optimizer.step()
            rate.step()


@torch.no_grad()
def accuracy_of(model: RGat, batches: Any) -> float:
    """Compute the share of seeds whose class is found, in percent."""
    right = n = 0
    for data in batches:
        found = model(data).argmax(1)
        right += int((found == data["paper"].y[: len(found)]).sum())
        n += len(found)
    return 100 * right / n


def accuracy(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Train on both sides, once a seed, and report the accuracies and the difference of their means."""
    papers, epochs = (2_000, 1) if args.tiny else (PAPERS, EPOCHS)
    n, edges, x, y = planted(papers)
    path = folder / f"planted-{papers}"
    if not path.exists():
        nodes: dict[str, Any] = {kind: featstore.Nodes(count) for kind, count in n.items()}
        nodes["paper"] = featstore.Nodes(papers, {"x": x}, {"y": y})
        featstore.OutOfCoreGraph.create(path, nodes=nodes, edges=edges, progress=False).close()
    data = HeteroData()
    for kind, count in n.items():
        data[kind].num_nodes = count
    data["paper"].x, data["paper"].y = torch.from_numpy(x), torch.from_numpy(y)
    for key, pairs in edges.items():
        data[key].edge_index = torch.from_numpy(pairs)
    split = np.random.default_rng(1).permutation(papers)
    training, test = (torch.from_numpy(ids) for ids in np.split(split, [int(TRAINED_SHARE * papers)]))
    widths = {kind: WIDTH if kind == "paper" else 1 for kind in n}
    has_pyg_lib = torch_geometric.typing.WITH_PYG_LIB
    found: dict[str, list[float]] = {"memory": [], "featstore": []}

    def in_memory(ids: torch.Tensor, fanouts: list[int], batch_size: int = BATCH_SIZE, **more: Any) -> Any:
        sampler = None if has_pyg_lib else InMemory(n, edges, fanouts)
        return NeighborLoader(data, fanouts, ("paper", ids), batch_size=batch_size, neighbor_sampler=sampler, **more)

    with featstore.open(path, memory="256MiB") as g:

        def through(ids: torch.Tensor, fanouts: list[int], batch_size: int = BATCH_SIZE, **more: Any) -> Any:
            strategy = featstore.Streamed(cache=0.1)
            return OwnLoader(g, fanouts, ("paper", ids), batch_size=batch_size, features="x", strategy=strategy, **more)

        whole = [-1] * len(FANOUTS)
        for seed in range(1 if args.tiny else SEEDS):
            for side, loader in (("memory", in_memory), ("featstore", through)):
                torch.manual_seed(seed)
                model = RGat(widths, list(edges))
                more = {"seed": seed} if side == "featstore" else {}
                train(model, loader(training, FANOUTS, shuffle=True, **more), epochs)
                found[side].append(accuracy_of(model, loader(test, whole, 4 * BATCH_SIZE)))
                print(f"# seed {seed}, {side}: {found[side][-1]:.2f} %", file=sys.stderr, flush=True)
    means = {side: statistics.mean(each) for side, each in found.items()}
    more = {"papers": papers, "epochs": epochs, "fanouts": FANOUTS, "pyg_lib": has_pyg_lib}
    report.figure("R-GAT, accuracy in memory", found["memory"], "%", mean=round(means["memory"], 3), **more)
    reference = "the same model over PyG's NeighborLoader in memory"
    report.figure(
        "R-GAT, accuracy through featstore",
        found["featstore"],
        "%",
        reference=reference,
        references=found["memory"],
        mean=round(means["featstore"], 3),
        **more,
    )
    difference = abs(means["featstore"] - means["memory"])
    report.figure("R-GAT, difference of the mean accuracies", difference, "points", target=f"<= {WITHIN}", **more)
