"""PaGraph (TPDS 2021): rows on the device by degree, batches ahead of the loop, means made ahead, self-reliant parts.

The CPU stands for a device: its tier is memory of the process, so hits save reads of the drive and no transfer. A loop computes
by training a GraphSAGE on the processor, or is idle where that is said.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import featstore
from benchmarks.papers.figures.common import Graph, Paper, Setting
from benchmarks.papers.figures.pagraph_mean import HOP_MORE, MEANS, make_dataset, one
from benchmarks.papers.figures.ranks_accuracy import accuracy
from benchmarks.papers.figures.ranks_accuracy import make_dataset as make_parts
from benchmarks.papers.figures.ranks_figure17 import figure17 as parts_of
from benchmarks.tools.harness import alternate
from featstore.cache.select import top_rows

PAPER = Paper("pagraph", "PaGraph (TPDS 2021)")
FANOUTS = [10, 10]
POLICIES = ("degree", "frequency", "in_out_ratio", "random")
SHARES = (0.05, 0.1, 0.2, 0.4)
OPTIMUM, DRAWN = "optimum", "edges by draws"  # no policies: by the counts themselves; an edge counts as often as it is drawn
CPU = "the CPU stands for the device"
TIER = 0.2  # of the rows, where one size is enough
RANKS = 4
TRAIN_SHARE = 0.1  # of the nodes, where a graph says nothing of training nodes

Int64s = npt.NDArray[np.int64]


def counts_of(g: featstore.OutOfCoreGraph, graph: Graph, epoch: int, most: int) -> Int64s:
    """Count the batches of an epoch, or of its first ``most``, that ask for each row."""
    sampler = featstore.NeighborSampler(g, FANOUTS)
    order = featstore.RandomBatches(graph.seeds, graph.batch_size).epoch(epoch)
    counts = np.zeros(g.num_nodes, np.int64)
    for number in range(min(len(order), most)):
        counts[sampler.sample(order.seeds(number), epoch, number).input_ids.numpy()] += 1
    return counts


def most_of(at: Setting) -> int:
    """Batches of an epoch at most."""
    return int(at.args.batches) or (8 if at.args.tiny else 100)


@PAPER.shows("figure 13", "accesses that rows on the device serve, by policy and share", CPU)
def figure13(at: Setting) -> None:
    """Beside the best rows of that epoch, and degree beside rows at random; counts."""
    for graph in at.graphs():
        with featstore.open(at.dataset(graph), memory="2GiB") as g:
            g.cache_neighbors()
            before, counts = (counts_of(g, graph, epoch, most_of(at)) for epoch in (0, 1))
            length = np.diff(graph.indptr)
            drawn = np.repeat(np.minimum(1, FANOUTS[0] / np.maximum(1, length)), length)
            scores: dict[str, Any] = {OPTIMUM: counts, DRAWN: np.bincount(graph.ids, drawn, g.num_nodes)}
            with g.policy_inputs(1, before) as inputs:
                for policy in POLICIES:
                    chosen = featstore.get_policy(policy)
                    assert isinstance(chosen, featstore.StaticPolicy)
                    scores[policy] = np.array(inputs.scores(chosen))
        total, n = int(counts.sum()), len(counts)
        touched = round(int(np.count_nonzero(counts)) / n, 4)
        served = {
            policy: [float(counts[top_rows(each, round(share * n))].sum()) / total for share in SHARES]
            for policy, each in scores.items()
        }
        for policy, shares in served.items():
            for share, value, best in zip(SHARES, shares, served[OPTIMUM], strict=True):
                more: dict[str, Any] = {"rows_accessed": touched}
                if policy != OPTIMUM:
                    more |= {"ratio": value / best, "target": ">= 0.6" if policy == "degree" and share >= 0.2 else None}
                of = None if policy == OPTIMUM else "the best rows of that epoch"
                at.row(graph.name, policy, round(100 * share), value, "of accesses", of, **more)
        for share, value, reference in zip(SHARES, served["degree"], served["random"], strict=True):
            target = ">= 1.5" if share >= 0.2 else None
            at.row(graph.name, "degree", round(100 * share), value / reference, "x random", target=target)


# -- epochs --------------------------------------------------------------------------------------------------------------------


def seeds_of(at: Setting) -> Int64s:
    """Seeds of R-MAT, of so many batches."""
    return np.array(at.workload().seeds[: most_of(at) * at.batch_size])


def epoch_of(g: Any, seeds: Any, batch_size: int, compute_s: float = 0.0, view: Any = None, **options: Any) -> dict[str, Any]:
    """Run an epoch, with ``compute_s`` idle seconds a batch; return the loader's counts, ``epoch_s`` and ``loaded``."""
    options |= {"labels": None, "strategy": featstore.OnDemand(cache=None)}  # the device's rows are what is compared
    of = g if view is None else view
    with featstore.Loader(of, featstore.NeighborSampler(of, FANOUTS), seeds, batch_size, **options) as loader:
        begin, before = time.perf_counter(), loader.stats()
        for _ in loader:
            if compute_s:
                time.sleep(compute_s)
        found = loader.stats()
        return {**found, "epoch_s": time.perf_counter() - begin, "loaded": found["bytes_read"] - before["bytes_read"]}


@PAPER.shows("table 4", "bytes that an epoch loads, by rows on the device", f"{CPU}: bytes are the drive's")
def table4(at: Setting) -> None:
    """Without a host cache; bytes read from the drive, and rows that cross to the device."""
    seeds = seeds_of(at)
    with featstore.open(at.workload().dataset(), memory="3GiB") as g:
        g.cache_neighbors()
        plain = epoch_of(g, seeds, at.batch_size)
        for policy in ("degree", "random"):
            at.row(f"R{at.scale}", policy, "none", plain["loaded"] / 1e6, "MB read an epoch")
            for share in SHARES:
                found = epoch_of(g, seeds, at.batch_size, device_cache=featstore.DeviceCache(share, policy=policy))
                crossing = 1 - found["hits"]["device"] / plain["rows"]
                ratio = found["loaded"] / plain["loaded"]
                more = {"ratio": ratio, "crossing": round(crossing, 4)}
                at.row(
                    f"R{at.scale}", policy, f"{share:.0%}", found["loaded"] / 1e6, "MB read an epoch", "without a tier", **more
                )
                at.row(f"R{at.scale}", policy, f"{share:.0%}", crossing, "of the rows cross")


@PAPER.shows("figure 14", "seconds of an epoch by rows on the device", CPU)
def figure14(at: Setting) -> None:
    """By degree, beside no tier."""
    seeds = seeds_of(at)
    with featstore.open(at.workload().dataset(), memory="3GiB") as g:
        g.cache_neighbors()
        for share in SHARES:
            cache = featstore.DeviceCache(share, policy="degree")
            sides = {
                "tier": lambda cache=cache: epoch_of(g, seeds, at.batch_size, device_cache=cache)["epoch_s"],
                "none": lambda: epoch_of(g, seeds, at.batch_size)["epoch_s"],
            }
            results = alternate(at.args.runs, sides)
            place = round(100 * share)
            at.row(f"R{at.scale}", "none", place, results["none"], "s an epoch")
            at.row(f"R{at.scale}", "tier", place, results["tier"], "s an epoch", "without a tier", references=results["none"])


# -- training ------------------------------------------------------------------------------------------------------------------


def with_means(at: Setting) -> tuple[str, Path, float]:
    """Make a labelled dataset with means; return its graph's name, path, and the seconds that the means took."""
    graph = at.labelled()
    path, blocks = at.folder / f"{graph.name}-means", graph.blocks()
    assert blocks is not None
    seconds = 0.0 if path.exists() else make_dataset(path, graph.indptr, graph.ids, graph.more, blocks)
    return graph.name, path, seconds


DGL, PAGRAPH = "no tier, batch by batch (DGL)", "tier, batches ahead (PaGraph)"
SYSTEMS: dict[str, dict[str, Any]] = {DGL: {"prefetch": 0}, PAGRAPH: {"prefetch": 2, "device_cache": TIER}}
PP = {HOP_MORE: "", MEANS: " + PP"}


@PAPER.shows("figure 11", "an epoch of training on one device, with and without means made ahead", CPU)
def figure11(at: Setting) -> None:
    """GraphSAGE; with means a hop fewer is sampled."""
    name, path, mean_s = with_means(at)
    seconds: dict[str, float] = {}
    for system, options in SYSTEMS.items():
        for way, suffix in PP.items():
            found = [one(path, way, seed, at.args, **options) for seed in range(at.args.seeds)]
            side = system + suffix
            seconds[side] = float(np.median([each["epoch_s"] for each in found]))
            more: dict[str, Any] = {"ratio": seconds[side] / seconds[DGL]} if side != DGL else {}
            at.row(name, side, "epoch, s", [each["epoch_s"] for each in found], "GraphSAGE", DGL if more else None, **more)
            at.row(name, side, "rows", [each["rows"] for each in found], "GraphSAGE")
            at.row(name, side, "MB of rows", [each["bytes"] / 1e6 for each in found], "GraphSAGE")
            at.row(name, side, "MB read", [each["bytes_read"] / 1e6 for each in found], "GraphSAGE")
            at.row(name, side, "accuracy, %", [100 * each["accuracy"] for each in found], "GraphSAGE")
    if mean_s:
        at.row(name, "means made, once", "epoch, s", mean_s, "GraphSAGE")


@PAPER.shows("figure 12", "an epoch of training by loading and computing", CPU)
def figure12(at: Setting) -> None:
    """Measure what the loop waits for, what it computes, and how much of the loading is hidden."""
    name, path, _ = with_means(at)
    for system, options in SYSTEMS.items():
        for way, suffix in PP.items():
            found = one(path, way, 0, at.args, **options)
            side, unit = system + suffix, "s an epoch"
            at.row(name, side, "waiting", found["wait_s"], unit)
            at.row(name, side, "computing", found["epoch_s"] - found["wait_s"], unit)
            at.row(name, side, "hidden loading", max(0.0, found["loading_s"] - found["wait_s"]), unit)


# -- parts ---------------------------------------------------------------------------------------------------------------------


@PAPER.shows("table 5", "seconds of dividing the training nodes into four self-reliant parts")
def table5(at: Setting) -> None:
    """Whole neighbourhoods of two hops, as the paper counts, beside counts of paths."""
    for graph in at.graphs():
        seeds = np.sort(graph.seeds)
        seeds = seeds[:: max(1, len(seeds) // 20_000)]
        with featstore.open(at.dataset(graph), memory="2GiB") as g:
            for counted, visits in (("exact", 1 << 30), ("paths", 0)):
                begin = time.perf_counter()
                featstore.partition(g, RANKS, "ldg", seeds, hops=2, visits=visits, keep=False, progress=False)
                at.row(graph.name, counted, f"{len(seeds):,} training nodes", time.perf_counter() - begin, "s")


@PAPER.shows("figure 17", "hits of a rank's cache, and the nodes that a part has, by the number of parts", "counts")
def figure17(at: Setting) -> None:
    """Of the first batches of each rank."""
    args = argparse.Namespace(**{**vars(at.args), "batches": at.args.batches or most_of(at)})
    for graph in at.graphs():
        train = graph.seeds
        if graph.more is not None and "train_mask" not in graph.more:
            train = np.flatnonzero(np.random.default_rng(0).random(len(graph.indptr) - 1) < TRAIN_SHARE)
        parts_of(args, at.report, at.folder, graph.name, graph.indptr, graph.ids, np.sort(train), at.row)


@PAPER.shows("figure 18", "an epoch of one of four ranks: a tier, its own part, batches ahead", f"{CPU}; one rank runs alone")
def figure18(at: Setting) -> None:
    """Each is added to those before it. The loop idles for half as long as loading takes without any of them."""
    work = at.workload()
    seeds, size = np.sort(np.array(work.seeds)), at.batch_size
    with featstore.open(work.dataset(), memory="3GiB") as g:
        g.cache_neighbors()
        if "ranks" not in g.parts():
            featstore.partition(g, RANKS, "ldg", seeds, hops=2, name="ranks", progress=False)
        view = g.part(0, "ranks", progress=False)
        own = g.parts()["ranks"].self_reliant().part(0).numpy()
        quarter = np.random.default_rng(0).permutation(seeds)[: len(own)]
        own, quarter = own[: most_of(at) * size], quarter[: most_of(at) * size]
        cache = featstore.DeviceCache(TIER, policy="degree")
        compute_s = epoch_of(g, quarter, size, prefetch=0)["epoch_s"] / 2 / -(-len(quarter) // size)
        ways: dict[str, dict[str, Any]] = {
            "none": {"seeds": quarter, "prefetch": 0},
            "+ tier": {"seeds": quarter, "prefetch": 0, "device_cache": cache},
            "+ part": {"seeds": own, "prefetch": 0, "device_cache": cache, "view": view},
            "+ batches ahead": {"seeds": own, "prefetch": 2, "device_cache": cache, "view": view},
        }
        try:
            loaded: dict[str, float] = {}

            def side(name: str) -> float:
                given = dict(ways[name])
                found = epoch_of(g, given.pop("seeds"), size, compute_s, **given)
                loaded[name] = found["loaded"]
                return float(found["epoch_s"])

            seconds = alternate(at.args.runs, {name: (lambda name=name: side(name)) for name in ways})
        finally:
            view.close()
    for name in ways:
        of = None if name == "none" else "none"
        more = {} if of is None else {"references": seconds["none"]}
        at.row(f"R{at.scale}", name, "epoch", seconds[name], "s", of, **more)
        at.row(f"R{at.scale}", name, "read", loaded[name] / 1e6, "MB")


@PAPER.shows("figure 21", "accuracy by ranks, shuffled globally and within parts", "gloo ranks on the CPU")
def figure21(at: Setting) -> None:
    """1, 2 and 4 ranks with the same global batch; seconds of an epoch stand beside it."""
    graph = at.labelled()
    path, blocks = at.folder / f"{graph.name}-ranks", graph.blocks()
    assert blocks is not None
    make_parts(path, graph.indptr, graph.ids, graph.more, blocks)
    accuracy(at.args, at.report, graph.name, path, at.row)


PAPER.leaves_out("table 3", "the models' layers", "it has no measurement")
PAPER.leaves_out("figure 10", "the interface", "it has no measurement")
PAPER.leaves_out("figure 15", "one to four GPUs", "it needs four GPUs; figure 21 has one to four gloo ranks")
PAPER.leaves_out("figure 16", "optimisations on two GPUs", "it needs two GPUs; figure 18 has one rank of four")
