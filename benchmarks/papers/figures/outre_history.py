"""Historical embeddings of partition_batches: rows requested, seconds of data preparation, and accuracy, beside the same without.

What a history saves depends on which batches came before, not on what they computed: where rows are counted, the loop merges rows
of zeros. Accuracy is that of the same model trained both ways (``outre_accuracy.py``).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import featstore
from benchmarks.papers.figures.outre_accuracy import LARGE, train_ways
from benchmarks.papers.figures.outre_epochs import Work, more_of, run_sides
from benchmarks.papers.figures.outre_graphs import random_and_partitioned
from benchmarks.tools.harness import Report

SHARE, STALENESS = 0.2, 15  # of the nodes; steps: the defaults
FANOUTS = ([10, 10], [10, 10, 10])
DIM = 128  # of embeddings, where seconds are taken
LONG = 100  # steps, in large batches
LARGE_BATCH, BATCHES_BYTES = 1000, 256 << 20  # seeds, and what such batches take beside a quarter of the features
RANDOM, MACRO = "random batches", "default macro"
STALENESSES = (0, STALENESS, 50, 100, 500, 1000)  # table 11 of the paper, whose count begins at 1
LOST = "gradients of pulled rows lost"
WAYS: dict[str, dict[str, Any]] = {
    RANDOM: {},
    f"{RANDOM}, staleness {STALENESS}": {"history": (SHARE, STALENESS)},
    f"{RANDOM}, staleness {STALENESS}, {LOST}": {"history": (SHARE, STALENESS, torch.float32, False)},
    MACRO: {"parts": LARGE, "share": None},
} | {f"{MACRO}, staleness {s}": {"parts": LARGE, "share": None, "history": (SHARE, s)} for s in STALENESSES}

Int64s = npt.NDArray[np.int64]


def rows_with_history(
    args: argparse.Namespace,
    report: Report,
    name: str,
    arrays: tuple[Int64s, npt.NDArray[np.int32]],
    seeds: Int64s,
    batch_size: int,
    path: Path,
    *,
    has_target: bool,
) -> None:
    """Count the rows that an epoch of two and of three hops requests, in partition batches and in random ones."""
    with random_and_partitioned(path, arrays, seeds, batch_size) as (g, batches):
        for fanouts in FANOUTS:
            sampler = featstore.NeighborSampler(g, fanouts)
            for kind, order in batches.items():
                plain = requested(g, sampler, order, None)
                history = featstore.History(1, SHARE, STALENESS)
                counted = requested(g, sampler, order, history)
                report.figure(
                    f"{name}, {kind}, rows requested, {fanouts}, history of {SHARE:.0%} for {STALENESS} steps",
                    float(counted),
                    "rows",
                    reference="without history",
                    ratio=counted / plain,
                    target="<= 0.8" if kind != RANDOM and has_target else None,
                    **history.stats(),
                )


def requested(g: featstore.OutOfCoreGraph, sampler: Any, batches: Any, history: featstore.History | None) -> int:
    """Return the rows that the batches of one epoch ask for."""
    n_rows = 0
    with featstore.Loader(g, sampler, batches, features=[], labels=None, history=history, strategy="ondemand") as loader:
        for batch in loader:
            n_rows += len(batch.input_ids)
            merge_zeros(batch, 1)
    return n_rows


def merge_zeros(batch: Any, dim: int) -> None:
    """Merge as a model does that has computed zeros."""
    if batch.history is not None:
        batch.history.merge(torch.zeros(batch.history.n_sources - len(batch.history.rows.pull), dim))


def preparation_with_history(args: argparse.Namespace, report: Report, work: Work) -> None:
    """Seconds of an epoch of partition batches with and without a history, whose table is part of the memory.

    In small batches of few parts, the history keeps a fixed share of the nodes; one whose nodes the loader chooses is reported,
    too, its choice apart. In large batches of the default macro-batch, the loader chooses the nodes of a history of half
    precision whose gradients are lost.
    """
    large = {"parts": True, "macro": None, "batch_size": 20 if args.tiny else LARGE_BATCH}
    large["memory"] = work.features_bytes // 4 + BATCHES_BYTES
    for strategy in ("superbatch", "streamed"):
        plain = {"strategy": strategy, "parts": True}
        sides = {name: {**plain, "history": (DIM, nodes, STALENESS)} for name, nodes in (("history", SHARE), ("auto", "auto"))}
        seconds, results = run_sides(args, work, {"plain": plain, **sides})
        wide = {"strategy": strategy, **large}
        narrow = {**wide, "history": (DIM, "auto", LONG), "narrow": True}
        more = run_sides(args, work, {"plain, large": wide, "large": narrow})
        seconds, results = seconds | more[0], results | more[1]
        for side, base, target in (
            ("auto", "plain", None),
            ("history", "plain", ">= 1.25"),
            ("large", "plain, large", ">= 1.25"),
        ):
            ours, theirs = results[side][-1], results[base][-1]
            batches = "batches of 1,000 seeds in default macro-batches" if side == "large" else "partition batches"
            report.figure(
                f"{work.name}, {strategy}: data preparation in {batches}, without a history",
                seconds[base],
                "s",
                reference=f"with a history ({side}), dim {DIM}, at equal memory",
                references=seconds[side],
                target=None if args.tiny else target,
                split=ours["split"],
                split_s=[each["split_s"] for each in results[side]],
                rows_loaded_ratio=round(theirs["rows_loaded"] / max(1, ours["rows_loaded"]), 4),
                reference_rows=ours["rows"],
                reference_rows_loaded=ours["rows_loaded"],
                reference_kernel_bytes=ours["kernel_bytes"],
                reference_stages={stage: round(each, 3) for stage, each in ours["stages"].items()},
                **{name: each for name, each in more_of(theirs).items() if name not in ("split", "split_s")},
            )


def accuracy_with_history(args: argparse.Namespace, graph: str, dataset: Path, row: Callable[..., None]) -> None:
    """Accuracy and rows by staleness, in the default macro-batches (table 11), and in random batches; ``row`` is a setting's."""
    found = train_ways(args, WAYS, dataset)
    for name, runs in found.items():
        plain = next(base for base in (RANDOM, MACRO) if name.startswith(base))
        pairs = list(zip(runs, found[plain], strict=True))
        less = [100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs]
        assert "staleness 0" not in name or all(a == b for a, b in pairs), "a history that is never used has changed the training"
        of = None if name == plain else f"{plain}, in points of accuracy"
        more = {"rows": [each["rows"] for each in runs], "less": [round(each, 2) for each in less]}
        more |= {} if of is None else {"ratio": sum(less) / len(less)}
        target = ">= -0.5" if name.endswith(f"staleness {STALENESS}") else None
        panel = f"{graph}, {len(runs)} seeds"
        row(panel, name, "accuracy, %", [100 * each["accuracy"] for each in runs], "of the test nodes", of, target=target, **more)
        row(panel, name, "rows", sum(a["rows"] / b["rows"] for a, b in pairs) / len(pairs), f"x without ({plain})")
