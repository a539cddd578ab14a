"""Layer-neighbour sampling of partition_batches: rows requested beside neighbour sampling, and those that a small cache loads.

Rows are counted, so that other work on the machine changes nothing. A cache of a tenth of the nodes under an online policy starts
empty; what it loads is simulated on the batches of one epoch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import featstore
from benchmarks.papers.figures.outre_graphs import random_and_partitioned
from benchmarks.tools.harness import Report
from featstore.plan.simulate import simulate

FANOUTS = [10, 10, 10]
CACHED = 10  # a node in so many
POLICY = "sieve"
SAMPLERS: dict[str, dict[str, Any]] = {
    "LABOR-0": {},
    "LABOR-0, dependency 64": {"batch_dependency": 64},
    "LABOR-0, dependency 256": {"batch_dependency": 256},
    "LABOR-1": {"importance_sampling": 1},
    "LABOR-*": {"importance_sampling": -1},
}

Int64s = npt.NDArray[np.int64]


def shared_draws(
    args: argparse.Namespace,
    report: Report,
    name: str,
    arrays: tuple[Int64s, npt.NDArray[np.int32]],
    seeds: Int64s,
    batch_size: int,
    path: Path,
    samplers: Sequence[str] = tuple(SAMPLERS),
) -> None:
    """Count rows of neighbour sampling and of some forms of LABOR, in random batches and in batches of parts."""
    with random_and_partitioned(path, arrays, seeds, batch_size) as (g, batches):
        usual = rows(args, g, featstore.NeighborSampler(g, FANOUTS), batches["random batches"])
        for kind, order in batches.items():
            plain = rows(args, g, featstore.NeighborSampler(g, FANOUTS), order)
            counts = {"neighbours": plain} | {
                label: rows(args, g, featstore.LaborSampler(g, FANOUTS, **SAMPLERS[label]), order) for label in samplers
            }
            for label, (requested, loaded) in counts.items():
                is_linux = name.startswith("linux") and kind == "random batches"
                for what, n, reference, target in (
                    ("requested", requested, usual[0], "<= 0.85" if is_linux and label == "LABOR-0" else None),
                    ("loaded", loaded, usual[1], "<= 0.75" if is_linux and label == "LABOR-0, dependency 256" else None),
                ):
                    report.figure(
                        f"{name}, {kind}, rows {what}, {FANOUTS}, {label}",
                        float(n),
                        "rows",
                        reference="neighbour sampling in random batches",
                        ratio=n / reference,
                        target=target,
                    )


def rows(args: argparse.Namespace, g: Any, sampler: Any, batches: Any) -> tuple[int, int]:
    """Return the rows that the batches of one epoch ask for, and those that the cache loads."""
    order = batches.epoch(0)
    n = min(len(order), 4 if args.tiny else len(order))
    trace = [sampler.sample(order.seeds(k), 0, k).input_ids.numpy() for k in range(n)]
    loaded = simulate(trace, g.num_nodes // CACHED, POLICY, n=g.num_nodes)
    return sum(map(len, trace)), int(loaded.sum())
