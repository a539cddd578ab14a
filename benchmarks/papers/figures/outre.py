"""OUTRE (VLDB 2024): partition batches, historical embeddings, the split of memory between both; beside a memory map and Ginex.

Graphs are planted communities, since R-MAT has none to partition, and real ones. Epochs have rows of 2 KiB in a quarter of the
features' memory, in a control group, and compute nothing: transfer and compute are left out.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

import featstore
from benchmarks.papers.figures.common import Graph, Paper, Setting
from benchmarks.papers.figures.outre_accuracy import make_dataset
from benchmarks.papers.figures.outre_epochs import Work, make_work, run_sides
from benchmarks.papers.figures.outre_epochs import table6 as by_stage
from benchmarks.papers.figures.outre_graphs import METHODS, PLANTED, SEEDS_A_PART, Loops, communities
from benchmarks.papers.figures.outre_history import STALENESS, accuracy_with_history
from benchmarks.papers.figures.outre_history import requested as requested_with
from benchmarks.papers.figures.outre_metrics import table12 as by_metric
from benchmarks.papers.figures.outre_split import split
from benchmarks.tools.harness import alternate, reset_peak, status
from featstore.partitioning.assign import judge

PAPER = Paper("outre", "OUTRE (VLDB 2024)")
NO_DEVICE = "data preparation alone: no device computes"
FANOUTS = [10, 10]
EPOCH_BATCHES = {"linux414-calls": 500, "cnr-2000": 200, "ego-twitter": 50}  # seeds a batch in epochs: rows are large
PARTS = (100, 10_000)
MOST_NODES = 300_000  # of the planted graph, whose rows are large


def graphs(at: Setting) -> Iterator[Graph]:
    """Yield planted communities, and the real graphs that are there; ``--graph`` names some of them."""
    if not at.args.graph or PLANTED in at.args.graph:
        indptr, ids, seeds = communities(min(MOST_NODES, max(6_000, 1 << at.scale)))
        yield Graph(PLANTED, indptr, ids, seeds, min(1000, max(100, len(seeds) // 40)))
    yield from at.real_graphs()


def works(at: Setting) -> Iterator[Work]:
    """Make each graph's dataset with large rows and parts, one after the other."""
    for graph in graphs(at):
        size = 20 if at.args.tiny else EPOCH_BATCHES.get(graph.name, min(200, max(20, len(graph.seeds) // 200)))
        seeds = graph.seeds[: 50 * size] if at.args.tiny else graph.seeds
        yield make_work(at.folder / "epochs", graph.name, graph.indptr, graph.ids, seeds, size, graph.blocks())
        shutil.rmtree(at.folder / "epochs")  # graphs one at a time: features are large


def requested(g: featstore.OutOfCoreGraph, batches: Any, fanouts: list[int]) -> int:
    """Rows that the batches of one epoch ask for."""
    sampler, order = featstore.NeighborSampler(g, fanouts), batches.epoch(0)
    return sum(len(sampler.sample(order.seeds(k), 0, k).input_ids) for k in range(len(order)))


def parted(g: featstore.OutOfCoreGraph, graph: Graph, **options: Any) -> tuple[Any, int]:
    """Divide a graph into parts of about :data:`SEEDS_A_PART` seeds; return them and a macro-batch of two batches of seeds."""
    k = max(2, len(graph.seeds) // min(SEEDS_A_PART, max(50, graph.batch_size // 2)))
    parts = featstore.partition(g, k, train_idx=graph.seeds, keep=False, progress=False, **options)
    return parts, max(1, -(-2 * graph.batch_size * k // len(graph.seeds)))


def in_parts(g: featstore.OutOfCoreGraph, graph: Graph, **options: Any) -> featstore.PartitionBatches:
    """Partition batches of a method's parts."""
    parts, macro = parted(g, graph, **options)
    return featstore.PartitionBatches(g, torch.from_numpy(graph.seeds), graph.batch_size, parts, macro)


def methods() -> dict[str, dict[str, Any]]:
    """Partitioners that are installed."""
    return {name: options for name, options in METHODS.items() if name != "metis" or find_spec("pymetis") is not None}


@PAPER.shows("table 2", "rows that random batches request, for each training node (redundancy ratio); counts")
def table2(at: Setting) -> None:
    """By depth."""
    for graph in graphs(at):
        with featstore.open(at.dataset(graph), memory="2GiB") as g:
            g.cache_neighbors()
            for fanouts in (FANOUTS, [10, 10, 10]):
                n = requested(g, featstore.RandomBatches(graph.seeds, graph.batch_size), fanouts)
                place = ",".join(map(str, fanouts))
                more = {"rows": n, "nodes": g.num_nodes, "training_nodes": len(graph.seeds)}
                at.row(graph.name, "random batches", place, n / len(graph.seeds), "rows a training node", **more)


@PAPER.shows("table 3", "rows that partition batches request, for each training node; counts")
def table3(at: Setting) -> None:
    """Beside random batches, by partitioner."""
    for graph in graphs(at):
        with featstore.open(at.dataset(graph), memory="2GiB") as g:
            g.cache_neighbors()
            plain = requested(g, featstore.RandomBatches(graph.seeds, graph.batch_size), FANOUTS)
            n_seeds, unit = len(graph.seeds), "rows a training node"
            at.row(graph.name, "random batches", "ratio", plain / n_seeds, unit)
            for name, options in methods().items():
                found = requested(g, in_parts(g, graph, **options), FANOUTS) / plain
                target = "<= 0.75" if name == "fennel" else None
                at.row(graph.name, name, "ratio", found * plain / n_seeds, unit, "random batches", ratio=found)
                at.row(graph.name, name, "less", 100 * (1 - found), "% less")
                at.row(graph.name, name, "of random", found, "x random", target=target)


@PAPER.shows("table 4", "rows requested where a share of the nodes reuses its embeddings; counts")
def table4(at: Setting) -> None:
    """Of random batches, whose loop merges zeros."""
    for graph in graphs(at):
        with featstore.open(at.dataset(graph), memory="3GiB") as g:
            g.cache_neighbors()
            sampler, order = (
                featstore.NeighborSampler(g, [10, 10, 10]),
                featstore.RandomBatches(graph.seeds, graph.batch_size),
            )
            for share in (0.0, 0.1, 0.2):
                history = featstore.History(1, share, STALENESS) if share else None
                n = requested_with(g, sampler, order, history)
                at.row(graph.name, "random batches", f"{share:.0%}", n / len(graph.seeds), "rows a training node", rows_asked=n)


@PAPER.shows("table 6", "an epoch by stage, each mechanism added to those before it", NO_DEVICE)
def table6(at: Setting) -> None:
    """Rows stand beside the seconds."""
    for work in works(at):
        by_stage(at.args, work, at.row)


@PAPER.shows(
    "table 7", "an epoch by partitioner, and what its parts cut", f"{NO_DEVICE}; accuracy: partition_batches --only accuracy"
)
def table7(at: Setting) -> None:
    """Superbatches of partition batches, at equal memory."""
    for work in works(at):
        names = {"none": None} | {name: name.replace(" ", "-").replace(",", "") for name in methods()}
        quality: dict[str, Any] = {}
        with featstore.open(work.dataset, memory="1GiB") as g:
            seeds = g.node_data["seeds"].numpy()
            for name, options in methods().items():
                begin = time.perf_counter()
                parts = featstore.partition(g, work.n_parts, train_idx=seeds, name=names[name], progress=False, **options)
                quality[name] = time.perf_counter() - begin, judge(g, parts, work.n_parts, seeds, progress=False)
        sides = {name: {"strategy": "superbatch"} | ({"parts": kept} if kept else {}) for name, kept in names.items()}
        seconds, results = run_sides(at.args, work, sides)
        for name in names:
            of = None if name == "none" else "none"
            more = {} if of is None else {"references": seconds["none"]}
            at.row(work.name, name, "epoch", seconds[name], "s", of, **more)
            at.row(work.name, name, "rows", float(results[name][-1]["rows"]), "rows")
            if name in quality:
                partition_s, judged = quality[name]
                at.row(work.name, name, "partition", partition_s, "s")
                at.row(work.name, name, "cut", judged.cut, "of the edges", train_balance=round(judged.train_balance, 3))


@PAPER.shows("table 8", "seconds and memory of partitioning")
def table8(at: Setting) -> None:
    """FENNEL streamed from the drive, as plain loops in memory, and METIS; memory beyond what was resident before."""
    loops = Loops(at.folder)
    for graph in graphs(at):
        for k in dict.fromkeys(min(each, len(graph.indptr) // 20) for each in PARTS):
            _partition(at, loops, graph, k)


def _partition(at: Setting, loops: Loops, graph: Graph, k: int) -> None:
    indptr, ids = np.ascontiguousarray(graph.indptr), np.ascontiguousarray(graph.ids, np.int32)
    with featstore.open(at.dataset(graph), memory="256MiB") as g:
        ways: dict[str, Any] = {
            "plain loops": lambda: loops.partition(indptr, ids, k, at.args.passes),
            "streamed": lambda: featstore.partition(g, k, passes=at.args.passes, keep=False, progress=False),
        }
        if "metis" in methods():
            ways["metis"] = lambda: featstore.partition(g, k, "metis", keep=False, progress=False)
        resident: dict[str, int] = {}

        def side(name: str) -> float:
            reset_peak()
            before, begin = status("VmRSS"), time.perf_counter()
            ways[name]()
            seconds, resident[name] = time.perf_counter() - begin, max(0, status("VmHWM") - before)
            return seconds

        found = alternate(at.args.runs, {name: (lambda name=name: side(name)) for name in ways})
    panel = f"{graph.name}, {k:,} parts"
    for name, seconds in found.items():
        of = None if name == "plain loops" else "plain loops in memory"
        more = {} if of is None else {"references": found["plain loops"]}
        at.row(panel, name, "partition", seconds, "s", of, passes=at.args.passes, **more)
        at.row(panel, name, "memory", resident[name] / 1e6, "MB beyond what was resident before")


ONE_LAYER = "a history keeps the embeddings of the second layer alone"
PAPER.leaves_out("table 9", "which layers' embeddings are kept", ONE_LAYER)
PAPER.leaves_out("table 10", "the same by the number of layers", ONE_LAYER)


@PAPER.shows("table 11", "accuracy and rows by staleness", "training on the CPU")
def table11(at: Setting) -> None:
    """Two epochs of a GraphSAGE."""
    graph = at.labelled()
    path, blocks = at.folder / f"{graph.name}-histories", graph.blocks()
    assert blocks is not None
    make_dataset(path, graph.indptr, graph.ids, graph.more, blocks)
    accuracy_with_history(at.args, graph.name, path, at.row)


@PAPER.shows("table 12", "an epoch by the metric that chooses what is kept, and by layers", NO_DEVICE)
def table12(at: Setting) -> None:
    """As many embeddings, and rows in the rest."""
    for work in works(at):
        by_metric(at.args, work, at.row)


PAPER.leaves_out("figure 4", "accuracy by time", "python -m benchmarks.choices.convergence trains until validation stops it")


@PAPER.shows(
    "figure 5", "reads by the split of memory between rows and embeddings", "counts, with the beta that a loader measured"
)
def figure5(at: Setting) -> None:
    """The split that a loader chooses stands among nine others."""
    for work in works(at):
        split(work, at.row)
