"""In-situ sampling (DaMoN 2024): bytes that an epoch's sampling moves, and its seconds beside random access.

There is no device in the drive: the host reads, so the bytes that the paper saves on the way to the host are those of the sample
beside those of the lists. A twentieth of the lists is in memory where seconds are taken.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import featstore
from benchmarks.papers.figures.common import Graph, Paper, Setting
from benchmarks.sampling import insitu
from benchmarks.tools.harness import alternate
from benchmarks.tools.insitu_table import table

PAPER = Paper("insitu", "In-situ sampling (DaMoN 2024)")
SMART = "no FPGA in the drive: the host reads and draws"
FANOUTS = {"25,10": [25, 10], "20,15,10": [20, 15, 10]}
SEED_DIVISOR = 10  # of the nodes that have neighbours, where a graph says nothing of seeds


def with_seeds(at: Setting, graph: Graph) -> tuple[Any, int]:
    """Create the adjacency of a graph with seeds of its own; return its path and how many there are."""
    path, seeds = at.folder / f"{graph.name}-seeds", graph.seeds
    if graph.more is not None and "train_mask" not in graph.more:
        seeds = np.sort(np.random.default_rng(0).choice(seeds, max(1, len(seeds) // SEED_DIVISOR), replace=False))
    if not path.exists():
        data = {"seeds": seeds.astype(np.int64)}
        featstore.OutOfCoreGraph.create(path, graph.indptr, graph.ids, node_data=data, progress=False).close()
    return path, len(seeds)


@PAPER.shows("table 2", "bytes of an epoch's sample, and of what each way to read the lists moves", f"{SMART}; counts")
def table2(at: Setting) -> None:
    """Whole lists and blocks batch by batch, the edge file once a batch or once a hop, needed pages a hop."""
    for graph in at.graphs():
        table(with_seeds(at, graph)[0], graph.name, FANOUTS, graph.batch_size, at.row)


@PAPER.shows("figure 5", "seconds of sampling an epoch at a time beside random access and batch by batch", SMART)
def figure5(at: Setting) -> None:
    """All sides draw the same batches; each run starts with a cold page cache."""
    graph = at.rmat()
    path, n_seeds = with_seeds(at, graph)
    n_bytes = 4 * len(graph.ids)
    n_batches = -(-n_seeds // at.batch_size)
    job: dict[str, Any] = {
        "dataset": os.fspath(path),
        "drop": [os.fspath(path)],
        "folder": os.fspath(at.folder),
        "memory": max(64 << 20, 4 * n_bytes),
        "batch_size": at.batch_size,
        "batches": n_batches,
        "lists": n_bytes // insitu.CACHED + 8 * len(graph.indptr) + 8192,
    }
    for name, fanouts in FANOUTS.items():
        few = {"batches": min(n_batches, 40)}
        sides: dict[str, dict[str, Any]] = {
            "random access": {**few, "epochwide": True, "options": {"window": 1, "access": "random"}},
            "batch by batch": {**few, "epochwide": False},
            "an epoch at a time": {"epochwide": True},
        }
        found: dict[str, dict[str, Any]] = {}

        def side(label: str, fanouts: list[int] = fanouts, sides: Any = sides, found: Any = found) -> float:
            found[label] = at.child(insitu, {**job, "what": "sample", "fanouts": fanouts, **sides[label]})
            return float(found[label]["seconds"]) / found[label]["batches"]

        seconds = alternate(at.args.runs, {label: (lambda label=label, side=side: side(label)) for label in sides})
        reference = seconds["random access"]
        for label in sides:
            of = None if label == "random access" else "random access"
            more = {} if of is None else {"references": reference}
            at.row(graph.name, label, name, [1e3 * s for s in seconds[label]], "ms a batch", of, **_scaled(more))
            at.row(graph.name, label, name, found[label]["read"] / found[label]["batches"] / 1e6, "MB read a batch")
            faster = [a / b for a, b in zip(reference, seconds[label], strict=True)]
            at.row(graph.name, label, name, faster, "times faster than random access")


def _scaled(more: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [1e3 * s for s in runs] for name, runs in more.items()}
