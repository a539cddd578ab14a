"""Self-reliant parts (PaGraph, TPDS 2021): nodes a part of training nodes and their in-neighbours, by how these are divided.

Training nodes are divided by ``ldg`` with whole neighbourhoods (``exact``) and by counts of paths (``paths``), by contiguous ids
(``ranges``) and at random; each run has another seed. Graphs are those in the folder ``--graphs DIR`` (``graphs.py`` and ``.npz``
files); of one without a mask of training nodes a tenth of the nodes train. With ``--tiny`` a planted graph takes their place.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import Report, arguments, main, scratch
from realgraphs import loading

import featstore
from featstore._core.trainparts import TrainPlacer

GRAPHS = ("cnr-2000", "ego-twitter", "musae_github", "cora")  # on others whole neighbourhoods take too long
TRAIN_SHARE = 0.1
VISITS = {"exact": 1 << 30, "paths": 0}
MOST_OF = {way: f"most of {way}" for way in VISITS}

Int64s = npt.NDArray[np.int64]


def planted(n: int = 2000, size: int = 50) -> tuple[Int64s, Int64s]:
    """Communities whose members have ids all over."""
    rng = np.random.default_rng(0)
    members = rng.permutation(n).reshape(-1, size)
    community = np.empty(n, np.int64)
    community[members] = np.arange(n // size)[:, None]
    return np.arange(0, 6 * n + 1, 6), np.concatenate([rng.choice(members[c], 6) for c in community])


def nodes_a_part(indptr: Int64s, indices: npt.NDArray[Any], groups: list[Int64s], hops: int) -> float:
    """Count the nodes of parts that are given by their training nodes, on average."""
    ids, n_nodes = np.ascontiguousarray(indices, np.int64), []
    for group in groups:
        part, member = np.full(len(indptr) - 1, -1, np.int32), np.zeros((len(indptr) - 1, 1), np.uint8)
        placer = TrainPlacer(part, member, len(group), 1, hops)
        placer.put_exact(group, np.arange(len(indptr) - 1, dtype=np.int32), indptr, ids, 8, np.iinfo(np.int64).max)
        n_nodes.append(int(member.sum()))
    return float(np.mean(n_nodes))


def of_graph(
    args: argparse.Namespace, report: Report, folder: Path, name: str, indptr: Int64s, indices: Any, train: Int64s
) -> None:
    """Figures of one graph; each run has another seed."""
    k, hops = args.parts, args.hops
    found: dict[str, list[float]] = {each: [] for each in (*VISITS, *MOST_OF.values(), "random")}
    seconds: dict[str, list[float]] = {each: [] for each in VISITS}
    with featstore.OutOfCoreGraph.create(folder / name, indptr, indices, progress=False, memory="1GiB") as g:
        for seed in range(args.runs):
            for way, visits in VISITS.items():
                begin = time.perf_counter()
                parts = featstore.partition(g, k, "ldg", train, hops=hops, visits=visits, seed=seed, keep=False, progress=False)
                seconds[way].append(round(time.perf_counter() - begin, 2))
                found[way].append(float(parts.n_nodes.mean()))
                found[MOST_OF[way]].append(float(np.diff(parts.offsets).max() / (len(train) / k)))
            drawn = np.random.default_rng(seed).permutation(train)
            found["random"].append(nodes_a_part(indptr, indices, np.array_split(drawn, k), hops))
    ranges = [nodes_a_part(indptr, indices, np.array_split(train, k), hops)] * args.runs
    is_promised = name == "cnr-2000"
    for way, values, reference, target in (
        ("exact", found["exact"], "random", "<= 0.6"),
        ("paths", found["paths"], "exact", "<= 1.2"),
        ("ranges", ranges, "random", None),
    ):
        report.figure(
            f"{name}, {k} parts, {hops} hops: nodes a part, {way}",
            values,
            "nodes",
            reference=reference,
            references=found[reference],
            target=target if is_promised else None,
            training_nodes=len(train),
            seconds=seconds.get(way),
        )
    for way, most in MOST_OF.items():
        target = "<= 1.02" if is_promised else None
        what = f"{name}, {k} parts, {hops} hops: training nodes of the largest part, {way}"
        report.figure(what, found[most], "x the mean", target=target)


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    graphs: dict[str, tuple[Int64s, Any, Any]] = {}
    if args.tiny:
        graphs["planted"] = (*planted(), {})
    elif (real := loading(args.graphs)) is not None:
        names = [name for name in GRAPHS if args.only in name and (args.graphs / f"{name}.npz").exists()]
        graphs |= {name: real.load(name) for name in names}
    with scratch(args, "ranks") as folder:
        for name, (indptr, indices, more) in graphs.items():
            n = len(indptr) - 1
            mask = more["train_mask"] if "train_mask" in more else np.random.default_rng(0).random(n) < TRAIN_SHARE
            of_graph(args, report, folder, name, indptr, indices, np.flatnonzero(mask))


if __name__ == "__main__":
    main(run, arguments(__doc__ or "", real_graphs="all", parts=8, hops=2))
