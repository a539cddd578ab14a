"""Table 12 (outre): seconds of an epoch where what is kept is chosen at random, by degree, and by saved I/O (OUTRE).

The memory is divided once for each number of layers, as a loader chooses by saved I/O. Each metric then keeps as many embeddings,
and rows in the rest. The seconds that a metric takes to find out are left out, as in the paper: it is done once a training.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.figures.outre_epochs import BASE_BYTES, MACRO, Work, make_sampler, more_of, run_sides
from benchmarks.tools.harness import answer, run_child

DIM, STALENESS = 128, 15
FANOUTS = {2: [10, 10], 3: [4, 4, 4], 4: [3, 3, 2, 2]}  # by layers: batches of about the same size, so that one memory holds them
METRICS = ("random", "degree", "saved_io")
JUDGING_BYTES = 256 << 20  # of the group, where an epoch is counted


def choose(job: dict[str, Any]) -> dict[str, Any]:
    """Let a loader divide the memory, and write the nodes of as many embeddings by each metric; return the division."""
    import featstore
    from featstore.cache.select import top_rows

    with featstore.open(job["dataset"], memory=job["memory"]) as g:
        g.cache_neighbors(job["memory"] // 8)
        batches = featstore.PartitionBatches(g, g.node_data["seeds"], job["batch_size"], macro=MACRO)
        history = featstore.History(DIM, "auto", STALENESS)
        strategy = featstore.OnDemand(cache="auto", policy="saved_io")
        with featstore.Loader(g, make_sampler(g, job), batches, labels=None, strategy=strategy, history=history) as loader:
            split: dict[str, Any] = loader.stats()["history"]["split"]
        n = len(history)
        with g.policy_inputs(DIM * 4) as inputs:
            by_degree = top_rows(inputs.context.out_degree, n)
        nodes = {"saved_io": history.state_dict()["nodes"].numpy(), "degree": by_degree}
        nodes["random"] = np.sort(np.random.default_rng(0).choice(g.num_nodes, n, replace=False))
    for metric in METRICS:
        np.save(job["nodes"][metric], nodes[metric])
    return {name: split[name] for name in ("alpha", "beta", "nodes", "why") if name in split}


def table12(args: argparse.Namespace, work: Work, row: Callable[..., None]) -> None:
    """Seconds of an epoch, and of its sampling and gathering, by metric and layers; ``row`` is a setting's."""
    for n_layers in [n for n in FANOUTS if n <= (3 if args.tiny else args.layers)]:
        files = {metric: os.fspath(Path(work.dataset).parent / f"{metric}-{n_layers}.npy") for metric in METRICS}
        common: dict[str, Any] = {"strategy": "ondemand", "parts": True, "fanouts": FANOUTS[n_layers]}
        job = work.job(**common, nodes=files)
        limit = BASE_BYTES + JUDGING_BYTES + job["memory"]
        chosen = choose(job) if args.tiny else run_child(__spec__.name, job, limit)
        limit = {"limit_s": args.seconds}
        sides = {
            metric: {**common, **limit, "policy": metric, "history": (DIM, file, STALENESS)} for metric, file in files.items()
        }
        _, results = run_sides(args, work, sides)
        seconds = {metric: [each["seconds"] - each["setup_s"] for each in runs] for metric, runs in results.items()}
        for metric, runs in results.items():
            is_first = metric == METRICS[0]
            panel = f"{work.name}, {n_layers} layers"
            for stage in ("sample", "gather"):
                row(panel, metric, stage, [each["stages"][stage] for each in runs], "s")
            said = more_of(runs[-1]) | ({} if is_first else {"references": seconds[METRICS[0]]})
            row(panel, metric, "epoch", seconds[metric], "s", None if is_first else METRICS[0], chosen=chosen, **said)
            for count in ("rows", "rows_loaded"):
                row(panel, metric, count.replace("_", " "), float(runs[-1][count]), "rows")


if __name__ == "__main__":
    answer(choose)
