"""``featstore bench``: the drive under a feature measured, through featstore's own reader."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from featstore.cli.arguments import (
    add_opening,
    open_graph,
    positive,
)
from featstore.cli.output import print_result
from featstore.config import format_size
from featstore.graph.feature import FeatureStore

__all__ = ["add_arguments", "measure", "measure_table", "run"]

SCAN_BYTES = 256 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``featstore bench``."""
    add_opening(parser)
    parser.add_argument("--feature", help="feature to read (default: the largest)")
    parser.add_argument("--rows", type=positive, default=50_000, help="rows a gather (default: 50000)")
    parser.add_argument("--runs", type=positive, default=3, help="runs, of which the median counts (default: 3)")


def run(options: argparse.Namespace) -> int:
    """Measure reads and gathers of one feature."""
    with open_graph(options.path, options) as graph:
        names = list(graph.features)
        if not names:
            raise ValueError(f"{options.path}: the dataset has no features")
        name = options.feature or max(names, key=lambda each: graph.features[each].nbytes)
        store = graph.features[name]
        if not len(store):
            raise ValueError(f"{options.path}: feature {name!r} has no rows")
        result = measure(store, options.rows, options.runs, np.random.default_rng(0))
    print_result(options, result, measure_table(result))
    return 0


def measure(store: FeatureStore, rows: int, runs: int, rng: np.random.Generator) -> dict[str, Any]:
    """Measure a feature's file; medians over ``runs``.

    Parameters
    ----------
    store : FeatureStore
        Without a cache, or its hits are measured too.
    rows : int
        Rows of a gather; fewer where there are fewer.
    runs : int
    rng : numpy.random.Generator
        Draws the rows.

    Returns
    -------
    dict
        ``random``: distinct uniform rows, a read a page; ``gather``: the same number with neighbouring pages read together
        where that is cheaper; ``scan``: consecutive rows. Each with ``seconds``, ``rows_per_s``, ``reads_per_s``,
        ``bytes_per_s`` (bytes read from the file). ``memory``: ``torch.index_select`` from a tensor of as many rows, for
        comparison, without reads.

    Notes
    -----
    Where the file is read directly (``mode``), what the page cache holds does not matter.
    """
    n = len(store)
    rows = min(rows, n)
    width = store.nbytes // n
    out = torch.empty((rows, *store.shape[1:]), dtype=store.dtype)
    draws = [rng.choice(n, rows, replace=False) for _ in range(runs)]
    scan_rows = min(n, max(1, SCAN_BYTES // max(1, width)))
    step = max(1, min(scan_rows, (8 << 20) // max(1, width)))

    def scan(_: int) -> None:
        for first in range(0, scan_rows, step):
            store[first : min(first + step, scan_rows)]

    table = torch.zeros_like(out)
    places = [torch.from_numpy(rng.integers(0, rows, rows)) for _ in range(runs)]
    stats = store.stats()
    return {
        "feature": store.name,
        "row_bytes": width,
        "rows": rows,
        "runs": runs,
        **{key: stats[key] for key in ("backend", "reason", "mode")},
        "random": _timed(store, rows, runs, lambda run: store.take(draws[run], out=out, coalesce_gap=0)),
        "gather": _timed(store, rows, runs, lambda run: store.take(draws[run], out=out)),
        "scan": _timed(store, scan_rows, runs, scan),
        "memory": _timed(None, rows, runs, lambda run: torch.index_select(table, 0, places[run], out=out)),
    }


def _timed(store: FeatureStore | None, rows: int, runs: int, work: Callable[[int], object]) -> dict[str, float]:
    seconds, reads, n_bytes = [], [], []
    for run in range(runs):
        before = store.stats() if store is not None else {"reads": 0, "bytes_read": 0}
        start = time.perf_counter()
        work(run)
        seconds.append(max(1e-9, time.perf_counter() - start))
        after = store.stats() if store is not None else before
        reads.append(after["reads"] - before["reads"])
        n_bytes.append(after["bytes_read"] - before["bytes_read"])
    median = statistics.median(seconds)
    return {
        "seconds": median,
        "rows_per_s": rows / median,
        "reads_per_s": statistics.median(r / s for r, s in zip(reads, seconds, strict=True)),
        "bytes_per_s": statistics.median(b / s for b, s in zip(n_bytes, seconds, strict=True)),
    }


def measure_table(result: dict[str, Any]) -> str:
    """Return the measurements as text."""
    names = {
        "random": "random rows, a read a page",
        "gather": "random rows, neighbours merged",
        "scan": "scan",
        "memory": "torch.index_select in memory",
    }
    lines = [
        f"feature {result['feature']!r}: rows of {format_size(result['row_bytes'])}",
        f"{result['rows']:,} rows a gather, median of {result['runs']} runs",
        f"reader {result['backend']}, {result['mode']} ({result['reason']})",
        "",
        f"{'':<32}{'seconds':>10}{'rows/s':>14}{'reads/s':>12}{'bytes/s':>14}",
    ]
    for key, text in names.items():
        row = result[key]
        reads = f"{row['reads_per_s']:,.0f}" if row["reads_per_s"] else "-"
        n_bytes = format_size(int(row["bytes_per_s"])) if row["bytes_per_s"] else "-"
        lines.append(f"{text:<32}{row['seconds']:>10.4f}{row['rows_per_s']:>14,.0f}{reads:>12}{n_bytes:>14}")
    return "\n".join(lines)
