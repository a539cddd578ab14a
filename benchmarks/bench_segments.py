"""Segmented disk cache: the search's seconds and bytes beside an exhaustive one, amplification with and without reordering.

The exhaustive search steps over lengths of segment where a trace has many batches, as the paper's does; of each trace's first
batches it tries every length. ``--plot FOLDER`` draws the figures 5 and 16 of the DiskGNN paper (SIGMOD 2025), a file a graph.
Real graphs are taken, where they are there, from the folder ``--graphs`` (``graphs.py`` and ``.npz`` files).
``$FEATSTORE_R22`` names a folder that ``r22.py`` filled.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from harness import Report, alternate, arguments, main, scratch
from papers.segment_traffic import Traffic, traffic
from r22 import generate
from realgraphs import loading

import featstore
from featstore.pack.segments import segments, shortest_segments
from featstore.plan.simulate import row_counts
from featstore.plan.trace import Trace, record

ROW_BYTES = 512
HOST_SHARE = 0.1
SHARES = (0.75, 0.5, 0.3)  # of what it takes to copy every row into every batch's extent
FANOUTS = [10, 10, 10]
GRAPHS = {"linux414-calls": 1000, "cnr-2000": 1000, "ego-twitter": 200}  # seeds a batch
LENGTHS = 20  # that the exhaustive search tries of a whole epoch; first batches of which it tries every length
THRESHOLDS = range(6)
GROUPS = ("search", "every length")  # of a whole epoch, of its first batches

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


def search(args: argparse.Namespace, report: Report, name: str, n: int, batches: Batches, group: str) -> None:
    """The paper's table 7."""
    most = traffic(batches, n, 1, ROW_BYTES, order=None).disk_bytes
    least = traffic(batches, n, len(batches), ROW_BYTES, order=None).disk_bytes
    for share in SHARES:
        if args.only not in searched(group, name, share):
            continue
        disk = max(int(share * most), least)
        found: dict[str, Any] = {}

        def ours(disk: int = disk, found: dict[str, Any] = found) -> None:
            found["ours"] = shortest_segments(batches, n, ROW_BYTES, disk)

        def theirs(disk: int = disk, found: dict[str, Any] = found) -> None:
            found["theirs"] = exhaustive(batches, n, disk)

        seconds = alternate(args.runs, {"ours": ours, "theirs": theirs})
        best, shortest = found["theirs"], found["ours"]
        taken = traffic(batches, n, shortest.length, ROW_BYTES)
        assert taken.disk_bytes == shortest.disk_bytes <= disk
        which = "every length" if len(batches) <= LENGTHS else f"{LENGTHS} lengths"
        size = f"{share:.0%} of a copy for each ({disk / n / ROW_BYTES:.1f} x the features)"
        what = f"{len(batches)} batches of {name}, disk of {size}"
        report.figure(
            f"search for segments, {what}",
            seconds["ours"],
            "s",
            reference=f"exhaustive, {which} x {len(THRESHOLDS)} thresholds",
            references=seconds["theirs"],
            target="<= 0.01" if group == "search" and not args.tiny else None,
            length=shortest.length,
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
    by_batch.set(xlabel="batches, % (by ratio)", ylabel="pages, reordered / not", ylim=(0, None), title="disk cache, a batch")
    space.plot(lengths, [line["disk"] for line in lines], marker="o", color="C2")
    space.set(xlabel="batches a segment", ylabel="disk space / features", ylim=(0, None), title="disk space")
    by_length.legend()
    by_batch.legend()
    figure.savefig(path)


def wanted(args: argparse.Namespace, name: str) -> bool:
    """Whether ``--only`` leaves a figure of this graph."""
    searches = (searched(group, name, share) for group in GROUPS for share in SHARES)
    return any(args.only in what for what in (*searches, f"reordering {name}"))


def searched(group: str, name: str, share: float) -> str:
    """What ``--only`` calls the search of a graph's segments for a disk."""
    return f"{group} {name}, {share:.0%}"


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    traces = {}
    with scratch(args, "segments") as folder:
        if wanted(args, "R22"):
            source = Path(os.environ.get("FEATSTORE_R22", folder))
            work = generate(folder, 12, seeds=1200) if args.tiny else generate(source, 22)
            batch_size = 100 if args.tiny else 1000
            traces["R22"] = recorded(folder, "R22", work.indptr, work.indices, np.array(work.seeds), batch_size)
        real = None if args.tiny else loading(args.graphs)
        for name, size in GRAPHS.items():
            if real is not None and wanted(args, name) and (args.graphs / f"{name}.npz").exists():
                indptr, indices, _ = real.load(name)
                rng = np.random.default_rng(0)
                seeds = rng.permutation(np.flatnonzero(np.diff(indptr)))[: 100 * size].astype(np.int64)
                traces[name] = recorded(folder, name, indptr, indices, seeds, size)
    for name, trace in traces.items():
        batches = packed_tier(trace)
        for group, part in zip(GROUPS, (batches, batches[:LENGTHS]), strict=True):
            if group == "search" or len(part) < len(batches):
                search(args, report, name, trace.n, part, group)
        if args.only in f"reordering {name}":
            lines = reordering(args, report, name, trace.n, batches)
            if args.plot is not None:
                draw(args.plot / f"segments-{name}.png", name, trace.n, batches, lines)


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--plot", type=Path)
    mine, rest = own.parse_known_args()
    main(run, argparse.Namespace(**vars(arguments(__doc__ or "", rest, real_graphs="all of real graphs")), **vars(mine)))
