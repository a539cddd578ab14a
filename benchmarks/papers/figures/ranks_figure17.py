"""PaGraph's figure 17 (pagraph): hits of a rank's cache, and the share of the nodes that a part has, by number of parts.

Training nodes are divided by ``ldg``, by contiguous ids (``ranges``) and at random. A rank's cache holds the rows with the
highest out-degree: in its part, as a view's policies see it, and in the whole graph. Each rank samples the batches of its own
seeds from its view; ids that it reads of lists outside of its part are counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import featstore
from benchmarks.tools.harness import Report
from featstore.cache.select import top_rows
from featstore.graph.selfreliant import SelfReliantParts
from featstore.topology.part import OUTSIDE, reach

METHODS = ("ldg", "ranges", "random")
PARTS = (1, 2, 4, 8)
FANOUT, BATCH_SIZE = 10, 500
SHARE = 0.1  # of all rows, in a rank's cache

Int64s = npt.NDArray[np.int64]


def parted(g: featstore.OutOfCoreGraph, method: str, k: int, train: Int64s, hops: int) -> tuple[featstore.KeptParts, list[float]]:
    """Keep parts in the dataset; return them, and the share of the nodes that each has."""
    name = f"{method}-{k}"
    if method == "ldg":
        parts = featstore.partition(g, k, "ldg", train, hops=hops, name=name, progress=False)
    else:
        order = np.random.default_rng(0).permutation(train) if method == "random" else train
        groups = [np.sort(each) for each in np.array_split(order, k)]
        offsets = np.cumsum([0, *map(len, groups)])
        sizes = [np.count_nonzero(reach(g.topology, group, hops, g.budget)[0] != OUTSIDE) for group in groups]
        parts = SelfReliantParts(g.num_nodes, hops, torch.from_numpy(np.concatenate(groups)), offsets, np.array(sizes))
        g.partitions.keep_self_reliant(name, parts, {"method": method, "n_parts": k, "options": {}})
    return g.parts()[name], [n / g.num_nodes for n in parts.n_nodes.tolist()]


def outside_of(g: featstore.OutOfCoreGraph, view: featstore.OutOfCoreGraph) -> Iterator[int]:
    """Count the ids that are read of lists outside of a view's part; yields, and yields the count when it is asked again."""
    part, topology, n_outside = view.own_part, g.topology, 0
    assert part is not None
    is_in, offsets, read_edges = part.has_list(0, g.num_nodes), topology.resident_offsets, topology.read_edges
    assert offsets is not None

    def counted(positions: Int64s, out: npt.NDArray[Any]) -> None:
        nonlocal n_outside
        n_outside += int(np.count_nonzero(~is_in[np.searchsorted(offsets, positions, side="right") - 1]))
        read_edges(positions, out)

    topology.read_edges = counted  # type: ignore[method-assign]
    try:
        yield 0
        yield n_outside
    finally:
        del topology.read_edges


def of_rank(g: featstore.OutOfCoreGraph, kept: featstore.KeptParts, rank: int, hops: int, most: int) -> dict[str, Any]:
    """Sample a rank's batches; return hits of both caches, accesses, and ids read of lists outside."""
    view = g.part(rank, kept.name, progress=False)
    try:
        seeds = kept.self_reliant().part(rank)
        sampler = featstore.NeighborSampler(view, [FANOUT] * hops, seed=0)
        counting = outside_of(g, view)
        next(counting)
        counts = np.zeros(g.num_nodes, np.int64)
        epoch = featstore.RandomBatches(seeds, BATCH_SIZE).epoch(0)
        for number in range(min(most, len(epoch))):
            counts[sampler.sample(epoch.seeds(number), 0, number).input_ids.numpy()] += 1
        n_outside = next(counting)
        counting.close()
        n_rows = round(SHARE * g.num_nodes)
        own, whole = (int(counts[top_rows(each.out_degree.numpy(), n_rows)].sum()) for each in (view, g))
        return {"own": own, "whole": whole, "accesses": int(counts.sum()), "outside": n_outside}
    finally:
        view.close()


def figure17(
    args: argparse.Namespace,
    report: Report,
    folder: Path,
    name: str,
    indptr: Int64s,
    indices: Any,
    train: Int64s,
    row: Callable[..., None],
) -> None:
    """Figures of one graph; parts of each method and number, made with one seed. ``row`` is a setting's."""
    hops, n_outside, n_views = args.hops, 0, 0
    with featstore.OutOfCoreGraph.create(
        folder / f"{name}-17", indptr, indices, progress=False, overwrite=True, memory="1GiB"
    ) as g:
        for k in (2,) if args.tiny else PARTS:
            shares, hits = {}, {}
            for method in METHODS:
                kept, shares[method] = parted(g, method, k, train, hops)
                found = [of_rank(g, kept, rank, hops, 4 if args.tiny else args.batches) for rank in range(k)]
                total = sum(each["accesses"] for each in found)
                hits[method] = {which: sum(each[which] for each in found) / total for which in ("own", "whole")}
                n_outside += sum(each["outside"] for each in found)
                n_views += k
            for method in METHODS:
                share, of = float(np.mean(shares[method])), None if method == "random" else "random"
                more: dict[str, Any] = {"most": round(max(shares[method]), 4), "training_nodes": len(train)}
                more |= {} if of is None else {"ratio": share / float(np.mean(shares["random"]))}
                row(f"{name}, {hops} hops", method, k, share, "of the nodes in a part", of, **more)
                own, whole = hits[method]["own"], hits[method]["whole"]
                of = "the rows with the highest degree in the whole graph"
                row(f"{name}, {SHARE:.0%} of the rows", method, k, own, "of accesses served", of, ratio=own / whole)
    row(name, "all methods", "all parts", n_outside, "ids read of lists outside of parts", target="<= 0", views=n_views)
