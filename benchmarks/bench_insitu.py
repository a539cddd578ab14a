"""Sampling an epoch at a time, R22 with a twentieth of its neighbour lists in memory (in-situ sampling, DaMoN 2024).

Figures: seconds of an epoch's samples, written to a file, by :class:`featstore.EpochSampler`, beside those of
:class:`featstore.NeighborSampler` in the same memory (``from disk``) and with all lists in memory (``in memory``); bytes that the
kernel read beside those of the pages that each hop needs, read once (``bytes``); and the bytes of an epoch by what is read: whole
lists and blocks batch by batch, the edge file once a batch, or once a hop, beside those of the sample (``--table 2``; the paper's
table 2, and its figure 5 in bytes: ``--figure 5`` plots them). ``--graph PATH`` takes a dataset of your own for the table.

Each timed run is a process of its own and starts with a cold page cache; the sides take turns.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import Report, alternate, answer, arguments, bytes_read_by_kernel, main, run_child, scratch

FANOUTS = {"25,10": [25, 10], "20,15,10": [20, 15, 10]}
CACHED = 20  # a neighbour list in so many is in memory, by bytes
PAGE = 4096
BLOCKS = (512, 4096)  # random access: bytes of a block


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Sample an epoch into a file; say how long it took, and what was read."""
    import featstore
    from featstore.plan.samples import SampleWriter
    from featstore.sampling.drawn import Drawn, in_turn

    with featstore.open(job["dataset"], memory=job["memory"]) as g:
        if job["lists"]:
            g.cache_neighbors(job["lists"])
        kind = featstore.EpochSampler if job["epochwide"] else featstore.NeighborSampler
        sampler = kind(g, job["fanouts"], seed=1)
        order = Drawn(sampler, featstore.RandomBatches(g.node_data["seeds"], job["batch_size"], seed=3)).epoch(0)
        n, before, begin = min(len(order), job["batches"]), bytes_read_by_kernel(), time.perf_counter()
        nodes = edges = 0
        with (
            closing(in_turn(order, 0)) as batches,
            SampleWriter(Path(job["folder"]) / "samples", g.num_nodes) as writer,
            ThreadPoolExecutor(g.options.threads) as threads,
        ):
            pending = deque(threads.submit(batches.sample, k) for k in range(min(n, g.options.threads)))
            for k in range(len(pending), n + len(pending)):
                batch = pending.popleft().result()
                if k < n:
                    pending.append(threads.submit(batches.sample, k))
                nodes += len(batch.input_ids)
                edges += sum(len(block.src) for block in batch.blocks)
                writer.add(batch)
        return {
            "seconds": time.perf_counter() - begin,
            "read": bytes_read_by_kernel() - before,
            "batches": n,
            "nodes": nodes,
            "edges": edges,
        }


def epochs(args: argparse.Namespace, report: Report, job: dict[str, Any], lists: int) -> None:
    """Epoch-wide sampling, batch by batch, and with everything in memory."""
    for name, fanouts in FANOUTS.items():
        epoch(args, report, {**job, "fanouts": fanouts, "lists": lists, "epochwide": False}, name)


def epoch(args: argparse.Namespace, report: Report, job: dict[str, Any], name: str) -> None:
    """Seconds of an epoch of one workload, the three sides in turn."""
    n_alone = min(args.alone, args.batches)
    jobs = {
        "epoch": {**job, "epochwide": True},
        "batch": {**job, "batches": n_alone},
        "memory": {**job, "lists": job["whole"], "memory": job["memory"] + job["whole"]},
    }
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in jobs}
    alternate(args.runs, {side: (lambda side=side: found[side].append(run_child(__file__, jobs[side]))) for side in jobs})
    seconds = {side: [each["seconds"] / each["batches"] for each in runs] for side, runs in found.items()}
    last = found["epoch"][-1]
    report.figure(
        f"R22, {name}, from disk, seconds a batch of epoch-wide sampling",
        seconds["epoch"],
        "s",
        reference=f"NeighborSampler in the same memory, {n_alone} batches",
        references=seconds["batch"],
        target="<= 0.5",
        batches=last["batches"],
        nodes_per_s=last["nodes"] / last["seconds"],
        read=last["read"],
        read_batch_by_batch=found["batch"][-1]["read"] / n_alone * last["batches"],
    )
    report.figure(
        f"R22, {name}, in memory, seconds a batch of epoch-wide sampling from disk",
        seconds["epoch"],
        "s",
        reference="NeighborSampler with all lists in memory, which writes its samples too",
        references=seconds["memory"],
        target="<= 1.67",
    )


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


def moved_bytes(lists: Lists, n_hops: int, order: Any) -> dict[str, int]:
    """Return the bytes of an epoch's sample, and those that each way to read it moves."""
    indptr, width = lists.indptr, lists.width
    needed = [np.zeros(-(-lists.nbytes // PAGE), bool) for _ in range(n_hops)]
    moved = dict.fromkeys(["sample", "whole lists", *(f"blocks of {size}" for size in BLOCKS), "the file a batch"], 0)
    for position in range(len(order)):
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
    moved["needed pages a hop"] = sum(int(each.sum()) for each in needed) * PAGE
    return moved


def pages_of(first: npt.NDArray[np.int64], end: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.bool_]:
    """Mark the pages, of ``n``, that byte ranges touch."""
    has = end > first
    marks = np.zeros(n + 1, np.int64)
    np.add.at(marks, first[has] // PAGE, 1)
    np.add.at(marks, (end[has] - 1) // PAGE + 1, -1)
    return np.cumsum(marks)[:n] > 0


def table(args: argparse.Namespace, report: Report, datasets: dict[str, Path]) -> None:
    """Table 2 and figure 5 in bytes."""
    import featstore
    from featstore.sampling.drawn import Drawn

    rows: dict[str, dict[str, int]] = {}
    for graph, dataset in datasets.items():
        with featstore.open(dataset, memory="4GiB") as g:
            lists = Lists(g)
            seeds = g.node_data["seeds"] if "seeds" in g.node_data else g.node_data["train_idx"]
            for name, fanouts in FANOUTS.items():
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
    if args.figure:
        plot(rows, Path(args.plot))


def plot(rows: dict[str, dict[str, int]], path: Path) -> None:
    """Draw the bytes of an epoch, a group of bars a graph."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ways = list(next(iter(rows.values())))
    figure, axes = pyplot.subplots(figsize=(2 + 2 * len(rows), 4))
    for k, way in enumerate(ways):
        places = np.arange(len(rows)) + (k - len(ways) / 2) / (len(ways) + 1)
        axes.bar(places, [each[way] for each in rows.values()], 1 / (len(ways) + 1), label=way)
    axes.set_yscale("log")
    axes.set_xticks(np.arange(len(rows)), list(rows), rotation=20, ha="right")
    axes.set_ylabel("bytes an epoch")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    print(f"drawn: {path}")


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures, or the table."""
    import r22

    with scratch(args, "insitu") as folder:
        if args.table or args.figure:
            datasets = {Path(path).name: Path(path) for path in args.graph}
            if not datasets:
                datasets = {"R22": r22.generate(folder, args.scale, seeds=args.batches * args.batch_size, dim=16).dataset()}
            table(args, report, datasets)
            return
        work = r22.generate(folder, args.scale, seeds=args.batches * args.batch_size, dim=16)
        dataset = work.dataset()
        whole = work.n_edges * 4
        job = {
            "dataset": os.fspath(dataset),
            "folder": os.fspath(folder),
            "memory": max(args.least_mib << 20, whole * 4),
            "batches": args.batches,
            "batch_size": args.batch_size,
            "whole": whole + (1 << 20),
            # What the demand for a cold page cache goes by.
            "features": os.fspath(dataset),
        }
        epochs(args, report, job, whole // CACHED + 8 * work.num_nodes + 8192)


if __name__ == "__main__":
    if not answer(child):
        own = argparse.ArgumentParser(add_help=False)
        own.add_argument("--scale", type=int, default=22)
        own.add_argument("--table", type=int, choices=[2])
        own.add_argument("--figure", type=int, choices=[5])
        own.add_argument("--graph", action="append", default=[], help="a dataset of your own, for the table")
        own.add_argument("--plot", default="insitu.png", help="where the figure goes")
        mine, rest = own.parse_known_args()
        options = argparse.Namespace(
            **vars(arguments(__doc__ or "", rest, batches=200, batch_size=1000, alone=40, least_mib=64)), **vars(mine)
        )
        if options.tiny:
            options.scale, options.runs, options.batches, options.batch_size, options.alone = 12, 1, 4, 64, 2
        main(run, options)
