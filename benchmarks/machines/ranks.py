"""Self-reliant parts (PaGraph, TPDS 2021): nodes a part of training nodes and their in-neighbours, by how these are divided.

Training nodes are divided by ``ldg`` with whole neighbourhoods (``exact``) and by counts of paths (``paths``), by contiguous ids
(``ranges``) and at random; each run has another seed. Graphs are those in the folder ``--graphs DIR`` (``graphs.py`` and ``.npz``
files); of one without a mask of training nodes a tenth of the nodes train. With ``--tiny`` a planted graph takes their place.

``--only export`` (R22, ``--scale``): two ranks, each a process with its exported part alone, in a network namespace of its own if
that is allowed, have the batches of the whole dataset, bit for bit. Beside it: a part's bytes on disk, the seconds of an export.
``--only drive`` (``tools.ranks_drive``; R22, ``--scale``): two ranks that wait for one drive. ``$FEATSTORE_R22`` names a folder
that ``tools.r22`` filled. Hits of ranks' caches and accuracy by ranks are PaGraph's figures 17 and 21 (``python -m
benchmarks.papers``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

import featstore
from benchmarks.tools.harness import Report, answer, arguments, main, scratch
from benchmarks.tools.r22 import generate
from benchmarks.tools.ranks import answers, start_ranks
from benchmarks.tools.ranks_drive import drive
from benchmarks.tools.realgraphs import loading
from featstore._core.trainparts import TrainPlacer

GRAPHS = ("cnr-2000", "ego-twitter", "musae_github", "cora")  # on others whole neighbourhoods take too long
PROMISED = ("cnr-2000", "planted")  # graphs whose parts have targets; those of the planted one are met at its size
TRAIN_SHARE = 0.1
VISITS = {"exact": 1 << 30, "paths": 0}
RANKS, PARTS = 2, "bench-export"
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
    is_promised = name in PROMISED
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


def rank_of(job: dict[str, Any]) -> dict[str, Any]:
    """Be one rank: find a digest of each batch of its part's seeds, and how many ids of lists outside of the part were read."""
    with featstore.open(job["dataset"], memory=job["memory"]) as g:
        parts, seeds = g.parts()[PARTS], g.node_data["seeds"]
        graph = g.part(job["rank"], PARTS) if job["is_view"] else g
        is_in = np.ones(g.num_nodes, bool) if graph.own_part is None else graph.own_part.has_list(0, g.num_nodes)
        outside, topology = 0, g.topology
        read_edges = topology.read_edges

        def counted(positions: Int64s, out: npt.NDArray[Any]) -> None:
            nonlocal outside
            assert topology.resident_offsets is not None
            outside += int(np.count_nonzero(~is_in[np.searchsorted(topology.resident_offsets, positions, side="right") - 1]))
            read_edges(positions, out)

        topology.read_edges = counted  # type: ignore[method-assign]
        sampler = featstore.NeighborSampler(graph, job["fanouts"], seed=0)
        batches = featstore.PartBatches(parts, seeds, job["batch"])
        options: dict[str, Any] = {"strategy": job["strategy"], "labels": None, "rank": job["rank"], "world_size": RANKS}
        digests = []
        with featstore.Loader(graph, sampler, batches, **options) as loader:
            for batch in loader:
                found = xxhash.xxh3_128()
                for tensor in (batch.seeds, batch.input_ids, batch.x, *(each for b in batch.blocks for each in (b.src, b.dst))):
                    found.update(tensor.numpy().data)
                digests.append(found.hexdigest())
                if len(digests) == job["batches"]:
                    break
    return {"digests": digests, "outside": outside}


def jobs(job: dict[str, Any], datasets: list[Path]) -> list[dict[str, Any]]:
    """The job of each rank."""
    return [{**job, "rank": rank, "dataset": os.fspath(dataset)} for rank, dataset in enumerate(datasets)]


def together(job: dict[str, Any], datasets: list[Path], prefix: list[str]) -> list[dict[str, Any]]:
    """Run the ranks side by side, each with its dataset; return what each found."""
    with start_ranks(__spec__.name, jobs(job, datasets), before=lambda rank: prefix) as ranks:
        return answers(ranks)


def namespace() -> list[str]:
    """A command's beginning that puts it into a network namespace of its own, without a link; empty where that is refused."""
    command = ["unshare", "--net"]
    if shutil.which("unshare") and not subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        return command
    return []


def exported(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Figures of exported parts."""
    scale = 12 if args.tiny else args.scale
    dataset = generate(os.environ.get("FEATSTORE_R22", folder), scale).dataset()
    fanouts = [10] * args.hops
    job: dict[str, Any] = {
        "memory": "64MiB" if args.tiny else "2GiB",
        "fanouts": fanouts,
        "batch": 50 if args.tiny else 1000,
        "batches": 8 if args.tiny else 50,
    }
    paths, seconds, n_nodes = [folder / f"part.{rank}" for rank in range(RANKS)], [], []
    with featstore.open(dataset, memory="1GiB") as g:
        featstore.partition(g, RANKS, "ldg", g.node_data["seeds"], hops=args.hops, name=PARTS, progress=False)
        for rank, path in enumerate(paths):
            begin = time.perf_counter()
            n_nodes.append(featstore.export(g, path, rank, PARTS, overwrite=True, progress=False).n_nodes)
            seconds.append(time.perf_counter() - begin)
        num_nodes = g.num_nodes
    prefix = namespace()
    where = "namespaces" if prefix else "processes"
    name = f"R{scale}, {RANKS} exported parts, {args.hops} hops"
    for strategy in ("superbatch",) if args.tiny else ("ondemand", "superbatch"):
        whole, views = (
            [rank_of(each) for each in jobs({**job, "strategy": strategy, "is_view": is_view}, [dataset] * RANKS)]
            for is_view in (False, True)
        )
        alone = together({**job, "strategy": strategy, "is_view": False}, paths, prefix)
        for what, found in ((f"in {where}", alone), ("as views", views)):
            differ = sum(
                a != b for x, y in zip(found, whole, strict=True) for a, b in zip(x["digests"], y["digests"], strict=True)
            )
            n = sum(len(each["digests"]) for each in whole)
            report.figure(f"{name}, {strategy}, {what}: batches that differ", differ, "batches", target="<= 0", batches=n)
        outside = sum(each["outside"] for each in views)
        report.figure(f"{name}, {strategy}, as views: ids read of lists outside the part", outside, "ids", target="<= 0")
    sizes = [float(sum(each.stat().st_size for each in path.iterdir() if each.is_file())) for path in (*paths, dataset)]
    report.figure(
        f"{name}: bytes on disk of the larger part",
        max(sizes[:-1]),
        "bytes",
        reference="the whole dataset",
        ratio=max(sizes[:-1]) / sizes[-1],
        nodes=[each / num_nodes for each in n_nodes],
    )
    report.figure(f"{name}: seconds of an export", seconds, "s", gigabytes=sizes[-1] / 1e9)


def of_graphs(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Figures of each graph: nodes a part."""
    graphs = dict[str, tuple[Int64s, Any, Any]]()
    if args.tiny:
        indptr, indices = planted()
        graphs["planted"] = indptr, indices, {"train_mask": np.arange(len(indptr) - 1) % 10 == 0}
    elif (real := loading(args.graphs)) is not None:
        names = sorted(path.stem for path in args.graphs.glob("*.npz"))
        graphs |= {name: real.load(name) for name in names if args.only in name}
    for name, (indptr, indices, more) in graphs.items():
        n = len(indptr) - 1
        mask = more["train_mask"] if "train_mask" in more else np.random.default_rng(0).random(n) < TRAIN_SHARE
        if args.only in name and (args.tiny or name in GRAPHS):
            of_graph(args, report, folder, name, indptr, indices, np.flatnonzero(mask))


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    if args.only in "export":
        with scratch(args, "export") as folder:
            exported(args, report, folder)
    if args.only in "drive":
        with scratch(args, "drive") as folder:
            scale = 12 if args.tiny else args.scale
            drive(args, report, f"R{scale}", generate(os.environ.get("FEATSTORE_R22", folder), scale).dataset())
    if args.only not in ("export", "drive"):
        with scratch(args, "ranks") as folder:
            of_graphs(args, report, folder)


if __name__ == "__main__":
    if not answer(rank_of):
        more = {"parts": 8, "hops": 2, "scale": 22, "batches": 50}
        main(run, arguments(__doc__ or "", real_graphs="all but export and drive", **more))
