"""Table 12 of bench_outre.py: seconds of an epoch where what is kept is chosen at random, by degree, and by saved I/O (OUTRE).

The memory is divided once for each number of layers, as a loader chooses by saved I/O. Each metric then keeps as many embeddings,
and rows in the rest. The seconds that a metric takes to find out are left out, as in the paper: it is done once a training.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from harness import Report, answer, run_child
from papers.outre_epochs import BASE_BYTES, MACRO, Work, make_sampler, more_of, run_sides

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


def table12(args: argparse.Namespace, report: Report, work: Work) -> None:
    """Seconds of an epoch, and of its sampling and gathering, by metric and layers."""
    lines = [f"{'layers':<8}{'metric':<12}{'sample':>10}{'gather':>10}{'epoch':>10}{'rows':>14}{'rows loaded':>14}"]
    for n_layers in [n for n in FANOUTS if n <= (3 if args.tiny else args.layers)]:
        files = {metric: os.fspath(Path(work.dataset).parent / f"{metric}-{n_layers}.npy") for metric in METRICS}
        common: dict[str, Any] = {"strategy": "ondemand", "parts": True, "fanouts": FANOUTS[n_layers]}
        job = work.job(**common, nodes=files)
        chosen = run_child(__file__, job, BASE_BYTES + JUDGING_BYTES + job["memory"])
        limit = {"limit_s": args.seconds}
        sides = {
            metric: {**common, **limit, "policy": metric, "history": (DIM, file, STALENESS)} for metric, file in files.items()
        }
        _, results = run_sides(args, work, sides)
        seconds = {metric: [each["seconds"] - each["setup_s"] for each in runs] for metric, runs in results.items()}
        for metric, runs in results.items():
            is_first = metric == METRICS[0]
            report.figure(
                f"table 12, {work.name}, {n_layers} layers, by {metric}: an epoch of data preparation",
                seconds[metric],
                "s",
                reference=None if is_first else METRICS[0],
                references=None if is_first else seconds[METRICS[0]],
                chosen=chosen,
                **more_of(runs[-1]),
            )
            stages = [statistics.median(each["stages"][stage] for each in runs) for stage in ("sample", "gather")]
            cells = "".join(f"{each:>10.2f}" for each in [*stages, statistics.median(seconds[metric])])
            lines.append(f"{n_layers:<8}{metric:<12}{cells}{runs[-1]['rows']:>14,}{runs[-1]['rows_loaded']:>14,}")
    print("\n".join([work.name, *lines]), file=sys.stderr, flush=True)


if __name__ == "__main__":
    answer(choose)
