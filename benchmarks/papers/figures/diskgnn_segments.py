"""DiskGNN's segmented disk cache: the search's seconds and bytes, amplification with and without reordering, space; counts.

The exhaustive search steps over lengths of segment where a trace has many batches, as the paper's does; of each trace's first
batches it tries every length.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.papers.figures.common import Setting
from benchmarks.papers.figures.segment_traffic import Traffic, traffic
from benchmarks.tools.harness import alternate
from featstore.pack.segments import segments, shortest_segments
from featstore.plan.simulate import row_counts
from featstore.plan.trace import Trace

ROW_BYTES = 512
HOST_SHARE = 0.1
SHARES = (0.75, 0.5, 0.3)  # of what it takes to copy every row into every batch's extent
FANOUTS = [10, 10, 10]
LENGTHS = 20  # that the exhaustive search tries of a whole epoch; first batches of which it tries every length
THRESHOLDS = range(6)
REAL_BATCHES = 100

Batches = list[npt.NDArray[Any]]


def packed_tier(trace: Trace, share: float = HOST_SHARE) -> Batches:
    """List the rows left for the disk if the most frequent rows, so many of all, are in memory."""
    hot = np.zeros(trace.n, bool)
    hot[np.argsort(-row_counts(trace), kind="stable")[: int(share * trace.n)]] = True
    return [np.ascontiguousarray(ids[~hot[ids]]) for ids in trace]


def extents_share(trace: Trace, share: float = HOST_SHARE) -> float:
    """Disk that an extent a batch takes, as a multiple of the features, where so many rows are in memory."""
    return traffic(packed_tier(trace, share), trace.n, 1, ROW_BYTES, order=None).disk_bytes / (trace.n * ROW_BYTES)


def traces(at: Setting) -> Iterator[tuple[str, int, Batches]]:
    """Yield name, nodes, and what an epoch of each graph asks the disk for."""
    for graph in at.graphs():
        trace = at.trace(graph, FANOUTS, most=200 if graph.more is None else REAL_BATCHES)
        yield graph.name, trace.n, packed_tier(trace)


def exhaustive(batches: Batches, n: int, disk_bytes: int) -> Traffic:
    """Try lengths, in steps where there are many, and thresholds; lay out the caches of those that fit, take what reads least."""
    step = max(1, len(batches) // LENGTHS)
    best = None
    for threshold in THRESHOLDS:
        for length in range(step, len(batches) + 1, step):
            size = partial(traffic, batches, n, length, ROW_BYTES, threshold=threshold)
            if size(order=None).disk_bytes <= disk_bytes:
                found = size()
                best = found if best is None or found.bytes_read < best.bytes_read else best
    assert best is not None
    return best


def search(at: Setting) -> None:
    """Search the whole epoch, and its first batches at every length, beside the exhaustive search."""
    for name, n, batches in traces(at):
        for part in (batches, batches[:LENGTHS]) if len(batches) > LENGTHS else (batches,):
            most = traffic(part, n, 1, ROW_BYTES, order=None).disk_bytes
            least = traffic(part, n, len(part), ROW_BYTES, order=None).disk_bytes
            for share in SHARES:
                _search(at, f"{name}, {len(part)} batches", n, part, max(int(share * most), least), is_whole=part is batches)


def _search(at: Setting, panel: str, n: int, batches: Batches, disk: int, *, is_whole: bool) -> None:
    found: dict[str, Any] = {}

    def ours() -> None:
        found["ours"] = shortest_segments(batches, n, ROW_BYTES, disk)

    def theirs() -> None:
        found["theirs"] = exhaustive(batches, n, disk)

    seconds = alternate(at.args.runs, {"ours": ours, "theirs": theirs})
    best, shortest = found["theirs"], found["ours"]
    taken = traffic(batches, n, shortest.length, ROW_BYTES)
    assert taken.disk_bytes == shortest.disk_bytes <= disk
    place = f"{disk / n / ROW_BYTES:.1f}x"
    which = f"exhaustive, {'every length' if len(batches) <= LENGTHS else f'{LENGTHS} lengths'} x {len(THRESHOLDS)} thresholds"
    at.row(panel, "exhaustive", place, seconds["theirs"], "s")
    target = "<= 0.01" if is_whole else None
    at.row(panel, "shortest segment", place, seconds["ours"], "s", which, references=seconds["theirs"], target=target)
    at.row(panel, "exhaustive", place, best.amplification, "bytes read a byte", length=best.length, threshold=best.threshold)
    ratio = taken.bytes_read / best.bytes_read
    more = {"length": shortest.length, "target": "<= 1.1"}
    at.row(panel, "shortest segment", place, taken.amplification, "bytes read a byte", "exhaustive", ratio=ratio, **more)


def reordering(at: Setting, *, with_space: bool) -> None:
    """Amplification by the length of segment, by number and by MinHash, and the disk that it takes."""
    for name, n, batches in traces(at):
        for share in (0.05, 0.125, 0.25, 0.5, 0.75, 1.0):
            length = max(2, round(share * len(batches)))
            ours, plain = (traffic(batches, n, length, ROW_BYTES, order=order) for order in ("minhash", "row"))
            one = traffic(batches, n, length, ROW_BYTES, n_hashes=1)
            unit = "bytes read a byte"
            at.row(name, "by number", length, plain.amplification, unit)
            ratio = ours.pages_read / max(1, plain.pages_read)
            at.row(name, "by MinHash", length, ours.amplification, unit, "pages of caches by number", ratio=ratio)
            at.row(name, "by one MinHash", length, one.amplification, unit)
            if with_space:
                at.row(name, "disk", length, ours.disk_bytes / (n * ROW_BYTES), "x the features")


def by_batch(at: Setting) -> None:
    """Pages that a batch reads of the caches, reordered beside not: by batch, the least first."""
    for name, n, batches in traces(at):
        for length in (max(2, round(0.25 * len(batches))), len(batches)):
            ordered, plain = (
                np.concatenate([s.pages for s in segments(batches, n, length, ROW_BYTES, order=order)])
                for order in ("minhash", "row")
            )
            ratios = np.sort(ordered / np.maximum(1, plain))
            for percent in (0, 10, 25, 50, 75, 100):
                value = float(ratios[round(percent / 100 * (len(ratios) - 1))])
                at.row(f"{name}, a batch", f"segments of {length}", percent, value, "pages reordered / by number")
