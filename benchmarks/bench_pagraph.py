"""Rows on the device (PaGraph, TPDS 2021): accesses that it serves, bytes loaded, seconds of epochs, computing beside loading.

``--figure 13``: the share of accesses that a tier of 5, 10, 20 and 40 % of the rows serves, [10, 10], by policy, beside the best
that any fixed rows could, and by degree with edges weighted by how often they are drawn (``--plot FILE`` draws it). ``--table
4``: bytes that an epoch loads. ``--figure 14``: seconds of epochs against the tier's size. ``--only overlap``: epochs whose loop
computes, idle, for half, once and twice as long as loading takes. ``--only mean`` (``pagraph_mean.py``): training on means made
ahead against a hop more, on linux414-calls. ``--only gpu`` (``pagraph_gpu.py``): hits, host rows and waiting on a GPU; skipped,
and said, where there is none. Real graphs are in the folder ``--graphs DIR`` (``graphs.py`` and ``.npz`` files); without it
figure 13 is of R-MAT alone. ``$FEATSTORE_R22`` names a folder that ``r22.py`` filled. But for ``--only gpu``, the CPU stands in
for a device.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import Report, alternate, arguments, main, scratch
from papers.pagraph_gpu import have_cuda, placing, waiting
from papers.pagraph_mean import make_dataset, mean
from r22 import generate
from realgraphs import loading, wanted

import featstore
from featstore.cache.select import top_rows

FANOUTS = [10, 10]
GRAPHS = {"linux414-calls": 1000, "cnr-2000": 1000, "ego-twitter": 200}  # seeds a batch
POLICIES = ("degree", "frequency", "in_out_ratio", "random")
SHARES = (0.05, 0.1, 0.2, 0.4)
OPTIMUM, DRAWN = "optimum", "edges by draws"  # no policies: by the counts themselves; an edge counts as often as it is drawn

Int64s = npt.NDArray[np.int64]
Graph = tuple[str, Int64s, npt.NDArray[np.int32], Int64s, int]  # name, adjacency, seeds, seeds a batch


def graphs(args: argparse.Namespace, folder: Path) -> Iterator[Graph]:
    """Yield R-MAT, and the real graphs that are there."""
    scale = 12 if args.tiny else args.scale
    work = generate(os.environ.get("FEATSTORE_R22", folder) if scale == 22 else folder, scale=scale)
    arrays = np.ascontiguousarray(work.indptr), np.ascontiguousarray(work.indices)
    yield f"R{scale}", *arrays, np.array(work.seeds), 50 if args.tiny else 1000
    real = None if args.tiny else loading(args.graphs)
    if real is None:
        return
    for name, batch_size in GRAPHS.items():
        if (args.graphs / f"{name}.npz").exists():
            indptr, ids, z = real.load(name)
            seeds = np.flatnonzero(z["train_mask"]) if "train_mask" in z else np.flatnonzero(np.diff(indptr) > 0)
            yield name, indptr, ids, seeds, batch_size


def counts_of(g: featstore.OutOfCoreGraph, seeds: Int64s, batch_size: int, epoch: int, most: int) -> Int64s:
    """How many batches of an epoch, or of its first ``most``, ask for each row."""
    sampler = featstore.NeighborSampler(g, FANOUTS)
    order = featstore.RandomBatches(seeds, batch_size).epoch(epoch)
    counts = np.zeros(g.num_nodes, np.int64)
    for number in range(min(len(order), most)):
        counts[sampler.sample(order.seeds(number), epoch, number).input_ids.numpy()] += 1
    return counts


def hit_shares(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Figure 13: the share of an epoch's accesses that the best rows of each policy serve."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, indptr, ids, seeds, batch_size in graphs(args, folder):
        path = folder / f"{name}-adjacency"
        if not path.exists():
            featstore.OutOfCoreGraph.create(path, indptr, ids, progress=False).close()
        most = 8 if args.tiny else args.batches
        with featstore.open(path, memory="2GiB") as g:
            g.cache_neighbors()
            before, counts = (counts_of(g, seeds, batch_size, epoch, most) for epoch in (0, 1))
            length = np.diff(indptr)
            drawn = np.repeat(np.minimum(1, FANOUTS[0] / np.maximum(1, length)), length)
            scores: dict[str, Any] = {OPTIMUM: counts, DRAWN: np.bincount(ids, drawn, g.num_nodes)}
            with g.policy_inputs(1, before) as inputs:
                for policy in POLICIES:
                    chosen = featstore.get_policy(policy)
                    assert isinstance(chosen, featstore.StaticPolicy)
                    scores[policy] = np.array(inputs.scores(chosen))
        total, n = int(counts.sum()), len(counts)
        touched = int(np.count_nonzero(counts)) / n
        shares = {
            policy: [float(counts[top_rows(each, round(share * n))].sum()) / total for share in SHARES]
            for policy, each in scores.items()
        }
        found[name] = shares
        for policy in (*POLICIES, DRAWN):
            for number, share in enumerate(SHARES):
                target = ">= 0.6" if policy == "degree" and share >= 0.2 and not args.tiny else None
                report.figure(
                    f"{name}, accesses served by {share:.0%} of the rows, {policy}",
                    shares[policy][number],
                    "of accesses",
                    reference="the best rows of that epoch",
                    ratio=shares[policy][number] / shares[OPTIMUM][number],
                    target=target,
                    random=round(shares["random"][number], 4),
                    rows_accessed=round(touched, 4),
                )
        for number, share in enumerate(SHARES):
            report.figure(
                f"{name}, accesses served by {share:.0%} of the rows, degree against random",
                shares["degree"][number],
                "of accesses",
                reference="as many rows at random",
                ratio=shares["degree"][number] / shares["random"][number],
                target=">= 1.5" if share >= 0.2 and not args.tiny else None,
            )
    if args.plot is not None:
        _plot(found, args.plot)


def _plot(found: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Draw a panel a graph, a line a policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    size = (4 * len(found) + 1.5, 3.6)
    figure, panels = plt.subplots(1, len(found), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for axes, (name, shares) in zip(panels[0], found.items(), strict=True):
        for policy, line in shares.items():
            axes.plot(
                [100 * share for share in SHARES],
                [100 * each for each in line],
                {OPTIMUM: "--", DRAWN: ":"}.get(policy, "o-"),
                label=policy,
            )
        axes.set(title=name, xlabel="rows on the device, %")
        axes.grid(visible=True, alpha=0.3)
    panels[0][0].set_ylabel("accesses served, %")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(path)
    plt.close(figure)


def made(args: argparse.Namespace, folder: Path) -> tuple[Path, Int64s, int]:
    """Make a dataset of R-MAT with features; return its path, seeds, and seeds a batch."""
    scale = 12 if args.tiny else args.scale
    work = generate(os.environ.get("FEATSTORE_R22", folder) if scale == 22 else folder, scale=scale)
    path = folder / f"R{scale}-features"
    if not path.exists():
        features = {"x": ((work.num_nodes, work.dim), np.float32, work.feature_blocks())}
        arrays = np.ascontiguousarray(work.indptr), np.ascontiguousarray(work.indices)
        featstore.OutOfCoreGraph.create(path, *arrays, features=features, progress=False).close()
    batch_size = 50 if args.tiny else 1000
    return path, np.array(work.seeds[: (8 if args.tiny else args.batches) * batch_size]), batch_size


def epoch_of(
    g: featstore.OutOfCoreGraph, seeds: Int64s, batch_size: int, compute_s: float = 0.0, **options: Any
) -> dict[str, Any]:
    """Run an epoch, with ``compute_s`` idle seconds a batch; return the loader's counts, and ``epoch_s``."""
    options |= {"labels": None, "strategy": featstore.OnDemand(cache=None)}  # the device's rows are what is compared
    with featstore.Loader(g, featstore.NeighborSampler(g, FANOUTS), seeds, batch_size, **options) as loader:
        begin, before = time.perf_counter(), loader.stats()
        for _ in loader:
            if compute_s:
                time.sleep(compute_s)
        found = loader.stats()
        return {**found, "epoch_s": time.perf_counter() - begin, "loaded": found["bytes_read"] - before["bytes_read"]}


def epochs(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Table 4 and figure 14: bytes that an epoch loads, and its seconds, by the tier's size."""
    path, seeds, batch_size = made(args, folder)
    with featstore.open(path, memory="3GiB") as g:
        g.cache_neighbors()
        plain = epoch_of(g, seeds, batch_size)
        crossing = plain["rows"]
        for policy in ("degree", "random"):
            for share in SHARES:
                cache = featstore.DeviceCache(share, policy=policy)
                if args.only in "table 4":
                    found = epoch_of(g, seeds, batch_size, device_cache=cache)
                    report.figure(
                        f"bytes read from the drive an epoch, {share:.0%} on the device, {policy}",
                        float(found["loaded"]),
                        "B",
                        reference="without a tier",
                        ratio=found["loaded"] / plain["loaded"],
                        crossing=round(1 - found["hits"]["device"] / crossing, 4),
                    )
                if args.only in "figure 14" and policy == "degree":
                    sides = {
                        "tier": lambda cache=cache: epoch_of(g, seeds, batch_size, device_cache=cache)["epoch_s"],
                        "none": lambda: epoch_of(g, seeds, batch_size)["epoch_s"],
                    }
                    results = alternate(args.runs, sides)
                    report.figure(
                        f"epoch, {share:.0%} on the device, degree",
                        results["tier"],
                        "s",
                        reference="without a tier",
                        references=results["none"],
                    )


def overlap(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Compute, idle, for half, once and twice as long as loading takes."""
    path, seeds, batch_size = made(args, folder)
    with featstore.open(path, memory="3GiB") as g:
        g.cache_neighbors()
        epoch_of(g, seeds, batch_size)  # first touch of buffers
        for factor in (0.5, 1.0, 2.0):
            hidden, epoch_s, longer_s = [], [], []
            for _ in range(args.runs):
                loading = epoch_of(g, seeds, batch_size, prefetch="auto")["epoch_s"]
                n_batches = -(-len(seeds) // batch_size)
                found = epoch_of(g, seeds, batch_size, factor * loading / n_batches, prefetch="auto")
                hidden.append(found["hidden"])
                epoch_s.append(found["epoch_s"])
                longer_s.append(max(1.0, factor) * loading)
            report.figure(
                f"epoch, computing for {factor:g} times as long as loading",
                epoch_s,
                "s",
                reference="the longer of the two alone",
                references=longer_s,
                target=None if args.tiny else "<= 1.15",
                hidden=[round(each, 3) for each in hidden],
            )


def means(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Means made ahead, on linux414-calls; the smallest run learns nothing, of a small R-MAT."""
    name, path = "linux414-calls", folder / "means"
    if args.tiny:
        work, rng = generate(folder, scale=12), np.random.default_rng(0)
        n = work.num_nodes
        indptr, ids = np.ascontiguousarray(work.indptr), np.ascontiguousarray(work.indices)
        is_seed = np.isin(np.arange(n), work.seeds[:400])
        z: Any = {"y": rng.integers(0, 5, n), "train_mask": is_seed, "test_mask": ~is_seed, "x_shape": (n, 8)}
        name, blocks = "R12", iter([rng.standard_normal((n, 8)).astype(np.float32)])
    elif args.graphs is None and not args.only:
        return  # of all figures those that need no real graph
    else:
        real = wanted(args.graphs, name, "--only mean")
        indptr, ids, z = real.load(name)
        blocks = real.feature_blocks(z)
    mean(args, report, name, path, make_dataset(path, indptr, ids, z, blocks))


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    with scratch(args, "pagraph") as folder:
        if args.only in "figure 13":
            hit_shares(args, report, folder)
        if args.only in "table 4" or args.only in "figure 14":
            epochs(args, report, folder)
        if args.only in "overlap":
            overlap(args, report, folder)
        if args.only in "mean":
            means(args, report, folder)
        if args.only in "gpu" and have_cuda():
            placing(args, report)
            waiting(args, report, *made(args, folder))


if __name__ == "__main__":
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--plot", type=Path, help="of --figure 13: the picture's file")
    own.add_argument("--table", type=int, choices=[4], help="only this table of the paper, as --only 'table 4' does")
    own.add_argument("--figure", type=int, choices=[13, 14], help="only this figure, as --only 'figure 13' does")
    mine, rest = own.parse_known_args()
    options = arguments(
        __doc__ or "", rest, real_graphs="figure 13 of real graphs; mean", scale=22, batches=200, epochs=3, seeds=3, hidden=64
    )
    if mine.table is not None:
        options.only = f"table {mine.table}"
    if mine.figure is not None:
        options.only = f"figure {mine.figure}"
    main(run, argparse.Namespace(**vars(options), **vars(mine)))
