"""``featstore bench``: the drive under a dataset measured, and gathers of a feature."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from featstore.cli.arguments import add_opening, open_graph, positive
from featstore.cli.output import print_result
from featstore.config import format_size
from featstore.graph.feature import FeatureStore
from featstore.storage.drive import drive_speed

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_opening(parser)
    parser.add_argument("--feature", help="feature to gather from (default: the largest)")
    parser.add_argument("--rows", type=positive, default=50_000, help="rows a gather (default: 50000)")
    parser.add_argument("--runs", type=positive, default=3, help="gathers, of which the median counts (default: 3)")


def run(options: argparse.Namespace) -> int:
    """Measure the drive, then gathers of one feature."""
    with open_graph(options.path, options) as graph:
        names = list(graph.features)
        if not names:
            raise ValueError(f"{options.path}: the dataset has no features")
        name = options.feature or max(names, key=lambda each: graph.features[each].nbytes)
        store = graph.features[name]
        if not len(store):
            raise ValueError(f"{options.path}: feature {name!r} has no rows")
        drive = drive_speed(graph.reader, graph.path, [each.source for each in graph.features.values()], again=True)
        gathers = _gathers(store, options.rows, options.runs, np.random.default_rng(0))
    result = {"drive": {**asdict(drive), "gap_bytes": drive.gap_bytes}, **gathers}
    print_result(options, result, _table(result))
    return 0


def _gathers(store: FeatureStore, rows: int, runs: int, rng: np.random.Generator) -> dict[str, Any]:
    """Time gathers of distinct uniform rows, ``rows`` or as many as there are; medians over ``runs``.

    ``gather`` reads the rows from the drive: the store has no cache, and if the file is read directly (``mode``), the page cache
    does not matter. ``memory`` is ``torch.index_select`` from a tensor of as many rows.
    """
    n = len(store)
    own = None if store.own_part is None else np.asarray(store.own_part.nodes)  # an exported part has no other rows
    rows = min(rows, n if own is None else len(own))
    out = torch.empty((rows, *store.shape[1:]), dtype=store.dtype, device="cpu")
    draws = [rng.choice(n if own is None else own, rows, replace=False) for _ in range(runs)]
    table = torch.zeros_like(out)
    places = [torch.from_numpy(rng.integers(0, rows, rows)) for _ in range(runs)]
    stats = store.stats()
    return {
        "feature": store.name,
        "row_bytes": store.nbytes // n,
        "rows": rows,
        "runs": runs,
        **{key: stats[key] for key in ("backend", "reason", "mode")},
        "gather": _timed(store, rows, runs, lambda run: store.take(draws[run], out=out)),
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


def _table(result: dict[str, Any]) -> str:
    drive = result["drive"]
    lines = [
        f"reader {result['backend']}, {result['mode']} ({result['reason']})",
        "",
        f"{'drive: random reads of 4 KiB':<32}{drive['iops']:>14,.0f}/s",
        f"{'drive: sequential reads':<32}{format_size(int(drive['bandwidth'])):>14}/s",
        f"{'drive: sequential writes':<32}{format_size(int(drive['write_bandwidth'])):>14}/s",
        f"{'drive: reads over gaps':<32}{format_size(int(drive['gather_bandwidth'])):>14}/s",
        f"{'gap worth reading over':<32}{format_size(drive['gap_bytes']):>14}",
        "",
        f"feature {result['feature']!r}: rows of {format_size(result['row_bytes'])}",
        f"{result['rows']:,} rows a gather, median of {result['runs']} runs",
        "",
        f"{'':<32}{'seconds':>10}{'rows/s':>14}{'reads/s':>12}{'bytes/s':>14}",
    ]
    for key, text in {"gather": "random rows", "memory": "torch.index_select in memory"}.items():
        row = result[key]
        reads = f"{row['reads_per_s']:,.0f}" if row["reads_per_s"] else "-"
        n_bytes = format_size(int(row["bytes_per_s"])) if row["bytes_per_s"] else "-"
        lines.append(f"{text:<32}{row['seconds']:>10.4f}{row['rows_per_s']:>14,.0f}{reads:>12}{n_bytes:>14}")
    return "\n".join(lines)
