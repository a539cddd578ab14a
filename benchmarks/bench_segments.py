"""Segmented disk cache: the search's seconds and bytes beside an exhaustive one, amplification with and without reordering.

``--plot FOLDER`` draws the figures 5 and 16 of the DiskGNN paper (SIGMOD 2025), a file a graph. Real graphs are taken, where they
are there, from the folder ``--graphs`` (``graphs.py`` and ``.npz`` files), by default ``../shared/data`` beside the checkout.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from harness import Report, alternate, arguments, main, scratch
from r22 import generate

import featstore
from featstore.plan.segments import Traffic, segments, shortest_segments, traffic
from featstore.plan.simulate import row_counts
from featstore.plan.trace import Trace, record

ROW_BYTES = 512
HOST_SHARE = 0.1
SHARES = (0.75, 0.5, 0.3)  # of what it takes to copy every row into every batch's extent
FANOUTS = [10, 10, 10]
GRAPHS = {"linux414-calls": 1000, "cnr-2000": 1000, "ego-twitter": 200}  # seeds a batch
LENGTHS = 20  # steps of the exhaustive search
THRESHOLDS = range(6)

Batches = list[npt.NDArray[Any]]


def packed_tier(trace: Trace) -> Batches:
    """Return what is left for the disk where the most frequent rows are in memory."""
    hot = np.zeros(trace.n, bool)
    hot[np.argsort(-row_counts(trace), kind="stable")[: int(HOST_SHARE * trace.n)]] = True
    return [np.ascontiguousarray(ids[~hot[ids]]) for ids in trace]


def recorded(folder: Path, name: str, indptr: Any, indices: Any, seeds: npt.NDArray[Any], batch_size: int) -> Trace:
    """Sample one epoch of a graph."""
    path = folder / name
    if not path.exists():
        featstore.OutOfCoreGraph.create(path, indptr, indices, progress=False).close()
    with featstore.open(path, memory="2GiB") as g:
        g.cache_neighbors()
        return record(featstore.NeighborSampler(g, FANOUTS), torch.from_numpy(seeds).split(batch_size), g.num_nodes)


def exhaustive(batches: Batches, n: int, disk_bytes: int) -> Traffic:
    """Try lengths, in steps, and thresholds; lay out the caches of those that fit, and take what reads least."""
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


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of a call."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def search(args: argparse.Namespace, report: Report, name: str, n: int, batches: Batches) -> None:
    """The paper's table 7."""
    most = traffic(batches, n, 1, ROW_BYTES, order=None).disk_bytes
    least = traffic(batches, n, len(batches), ROW_BYTES, order=None).disk_bytes
    for share in SHARES:
        if args.only not in searched(name, share):
            continue
        disk = max(int(share * most), least)
        theirs_s, best = timed(partial(exhaustive, batches, n, disk))
        ours = alternate(
            args.runs, {"search": lambda disk=disk: timed(partial(shortest_segments, batches, n, ROW_BYTES, disk))[0]}
        )
        found = shortest_segments(batches, n, ROW_BYTES, disk)
        taken = traffic(batches, n, found.length, ROW_BYTES)
        assert taken.disk_bytes == found.disk_bytes <= disk
        what = f"{name}, disk of {share:.0%} of a copy for every batch ({disk / n / ROW_BYTES:.1f} x the features)"
        report.figure(
            f"search for segments, {what}",
            ours["search"],
            "s",
            reference=f"exhaustive, {LENGTHS} lengths x {len(THRESHOLDS)} thresholds: {theirs_s:.3g} s",
            ratio=min(ours["search"]) / theirs_s,
            target=None if args.tiny else "<= 0.01",
            length=found.length,
        )
        report.figure(
            f"bytes read, {what}",
            float(taken.bytes_read),
            "B",
            reference=f"exhaustive: length {best.length}, threshold {best.threshold}, amplification {best.amplification:.2f}",
            ratio=taken.bytes_read / best.bytes_read,
            target=None if args.tiny else "<= 1.1",
            amplification=round(taken.amplification, 3),
        )


def reordering(args: argparse.Namespace, report: Report, name: str, n: int, batches: Batches) -> list[dict[str, Any]]:
    """Amplification and disk space per length of segment, with and without reordering; the rows of a picture."""
    lines = []
    features = n * ROW_BYTES
    for share in (0.05, 0.125, 0.25, 0.5, 0.75, 1.0):
        length = max(2, round(share * len(batches)))
        ours, plain = (traffic(batches, n, length, ROW_BYTES, order=order) for order in ("minhash", "row"))
        one = traffic(batches, n, length, ROW_BYTES, n_hashes=1)
        report.figure(
            f"pages of the disk cache read, {name}, segments of {length} batches",
            float(ours.pages_read),
            "pages",
            reference="the same rows by number",
            ratio=ours.pages_read / max(1, plain.pages_read),
            amplification=round(ours.amplification, 3),
            amplification_unordered=round(plain.amplification, 3),
            amplification_one_hash=round(one.amplification, 3),
            disk=round(ours.disk_bytes / features, 3),
        )
        lines.append({"length": length, "ordered": ours, "plain": plain, "disk": ours.disk_bytes / features})
    return lines


def draw(path: Path, name: str, n: int, batches: Batches, lines: list[dict[str, Any]]) -> None:
    """Draw the paper's figures 5a, 5b and 16."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(13, 3.8), layout="constrained")
    by_length, by_batch, space = figure.subplots(1, 3)
    lengths = [line["length"] for line in lines]
    for key, label in (("plain", "by number"), ("ordered", "by MinHash")):
        by_length.plot(lengths, [line[key].amplification for line in lines], marker="o", label=label)
    by_length.set(
        xlabel="batches a segment", ylabel="bytes read / bytes asked for", ylim=(0, None), title=f"{name}: amplification"
    )
    for length, label in ((lengths[2], f"segments of {lengths[2]}"), (lengths[-1], "one segment")):
        ordered, plain = (
            np.concatenate([s.pages for s in segments(batches, n, length, ROW_BYTES, order=order)])
            for order in ("minhash", "row")
        )
        by_batch.plot(np.linspace(0, 100, len(ordered)), np.sort(ordered / np.maximum(1, plain)), label=label)
    by_batch.set(xlabel="batches, % (by ratio)", ylabel="pages, reordered / not", ylim=(0, 1.05), title="disk cache, a batch")
    space.plot(lengths, [line["disk"] for line in lines], marker="o", color="C2")
    space.set(xlabel="batches a segment", ylabel="disk space / features", ylim=(0, None), title="disk space")
    by_length.legend()
    by_batch.legend()
    figure.savefig(path)


def wanted(args: argparse.Namespace, name: str) -> bool:
    """Whether ``--only`` leaves a figure of this graph."""
    return any(args.only in what for what in (*(searched(name, share) for share in SHARES), f"reordering {name}"))


def searched(name: str, share: float) -> str:
    """What ``--only`` calls the search of a graph's segments for a disk."""
    return f"search {name}, {share:.0%}"


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    traces = {}
    with scratch(args, "segments") as folder:
        if wanted(args, "R22"):
            work = generate(folder, 14, seeds=2000) if args.tiny else generate(folder, 22)
            batch_size = 100 if args.tiny else 1000
            traces["R22"] = recorded(folder, "R22", work.indptr, work.indices, np.array(work.seeds), batch_size)
        sys.path.insert(0, str(args.graphs))
        for name, size in {} if args.tiny else GRAPHS.items():
            if wanted(args, name) and (args.graphs / f"{name}.npz").exists():
                from graphs import load

                indptr, indices, _ = load(name)
                rng = np.random.default_rng(0)
                seeds = rng.permutation(np.flatnonzero(np.diff(indptr)))[: 100 * size].astype(np.int64)
                traces[name] = recorded(folder, name, indptr, indices, seeds, size)
    for name, trace in traces.items():
        batches = packed_tier(trace)
        if any(args.only in searched(name, share) for share in SHARES):
            search(args, report, name, trace.n, batches)
        if args.only in f"reordering {name}":
            lines = reordering(args, report, name, trace.n, batches)
            if args.plot is not None:
                draw(args.plot / f"segments-{name}.png", name, trace.n, batches, lines)


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--plot", type=Path)
    own.add_argument("--graphs", type=Path, default=Path(__file__).resolve().parents[2] / "shared" / "data")
    mine, rest = own.parse_known_args()
    main(run, argparse.Namespace(**vars(arguments(__doc__ or "", rest)), **vars(mine)))
