"""Table 2 and figure 5 of bench_insitu.py: bytes of an epoch by what is read, beside those of its sample."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import PAGE_BYTES, Report
from realgraphs import wanted

BLOCKS = (512, 4096)  # random access: bytes of a block
SEED_SHARE = 10  # of the nodes that have neighbours, where a graph says nothing of seeds


class Lists:
    """The neighbour lists of a graph in memory, to look up where drawn neighbours lie."""

    def __init__(self, g: Any) -> None:
        g.cache_neighbors()
        self.n, self.width, self.nbytes = g.num_nodes, g.topology.id_bytes, g.topology.nbytes
        self.indptr = np.concatenate([[0], np.cumsum(g.topology.degrees())])
        self._keys = np.repeat(np.arange(self.n), np.diff(self.indptr)) * self.n + g.neighbor_cache.records

    def drawn_at(self, ids: npt.NDArray[np.int64], block: Any) -> npt.NDArray[np.int64]:
        """Return the bytes at which the neighbours of a block begin: lists ascend, so each is found in its own."""
        return np.searchsorted(self._keys, ids[block.dst.numpy()] * self.n + ids[block.src.numpy()]) * self.width


def moved_bytes(lists: Lists, n_hops: int, order: Any, n_batches: int | None = None) -> dict[str, int]:
    """Return the bytes of an epoch's sample, or of its first batches, and those that each way to read it moves."""
    indptr, width = lists.indptr, lists.width
    needed = [np.zeros(-(-lists.nbytes // PAGE_BYTES), bool) for _ in range(n_hops)]
    ways = ["sample", "whole lists", *(f"blocks of {size}" for size in BLOCKS), "the file a batch"]
    moved = dict.fromkeys(ways, 0)
    for position in range(len(order) if n_batches is None else n_batches):
        batch, seen = order.sample(position), 0
        ids = batch.input_ids.numpy()
        for hop, block in enumerate(reversed(batch.blocks)):
            moved["sample"] += width * len(block.src)
            fresh = ids[seen : block.n_dst]
            first, end = indptr[fresh] * width, indptr[fresh + 1] * width
            moved["whole lists"] += int((end - first).sum())
            needed[hop] |= pages_of(first, end, len(needed[hop]))
            at = lists.drawn_at(ids, block)
            for size in BLOCKS:
                moved[f"blocks of {size}"] += size * len(np.unique(at // size))
            seen = block.n_dst
        moved["the file a batch"] += lists.nbytes
    moved["the file a hop"] = n_hops * lists.nbytes
    moved["needed pages a hop"] = sum(int(each.sum()) for each in needed) * PAGE_BYTES
    return moved


def pages_of(first: npt.NDArray[np.int64], end: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.bool_]:
    """Mark the pages, of ``n``, that byte ranges touch."""
    has = end > first
    marks = np.zeros(n + 1, np.int64)
    np.add.at(marks, first[has] // PAGE_BYTES, 1)
    np.add.at(marks, (end[has] - 1) // PAGE_BYTES + 1, -1)
    return np.cumsum(marks)[:n] > 0


def graph_of(name: str, graphs: Path | None, folder: Path) -> Path:
    """Return the dataset ``name``, a path, or one made of the real graph of that name in the folder ``graphs``."""
    import featstore

    if (Path(name) / "catalog.lmdb").exists():
        return Path(name)
    real = wanted(graphs, name, f"--graph {name}")
    path = folder / name
    if not path.exists():
        indptr, ids, z = real.load(name)
        if "train_mask" in z:
            seeds = np.flatnonzero(z["train_mask"])
        else:
            has = np.flatnonzero(np.diff(indptr))
            seeds = np.random.default_rng(0).choice(has, max(1, len(has) // SEED_SHARE), replace=False)
        data = {"seeds": seeds.astype(np.int64)}
        featstore.OutOfCoreGraph.create(path, indptr, ids, node_data=data, progress=False).close()
    return path


def table(args: argparse.Namespace, report: Report, datasets: dict[str, Path], fanouts_of: dict[str, list[int]]) -> None:
    """Table 2 and figure 5 in bytes."""
    import featstore
    from featstore.sampling.sampledbatches import Drawn

    rows: dict[str, dict[str, int]] = {}
    for graph, dataset in datasets.items():
        with featstore.open(dataset, memory="4GiB") as g:
            lists = Lists(g)
            seeds = g.node_data["seeds"] if "seeds" in g.node_data else g.node_data["train_idx"]
            for name, fanouts in fanouts_of.items():
                sampler = featstore.NeighborSampler(g, fanouts, seed=1)
                order = Drawn(sampler, featstore.RandomBatches(seeds, args.batch_size, seed=3)).epoch(0)
                moved = moved_bytes(lists, len(fanouts), order)
                rows[f"{graph} {{{name}}}"] = moved
                for way, n_bytes in moved.items():
                    report.figure(
                        f"{graph}, {name}, {way}",
                        [float(n_bytes)],
                        "B an epoch",
                        reference="the sample's bytes",
                        references=[float(max(1, moved["sample"]))],
                        batches=len(order),
                    )
    if args.figure or args.plot is not None:
        plot(rows, args.plot or Path("insitu.png"))


def plot(rows: dict[str, dict[str, int]], path: Path) -> None:
    """Draw the bytes of an epoch, a group of bars a graph."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ways = list(next(iter(rows.values())))
    figure, axes = pyplot.subplots(figsize=(2 + len(rows), 4.5))
    for k, way in enumerate(ways):
        places = np.arange(len(rows)) + (k - len(ways) / 2) / (len(ways) + 1)
        axes.bar(places, [each[way] for each in rows.values()], 1 / (len(ways) + 1), label=way)
    axes.set_yscale("log")
    axes.set_xticks(np.arange(len(rows)), list(rows), rotation=20, ha="right", fontsize="small")
    axes.set_ylabel("bytes an epoch")
    axes.legend(fontsize="x-small", ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    print(f"drawn: {path}")
