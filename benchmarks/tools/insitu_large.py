"""Large graphs of sampling.insitu: R26 in 4 GiB, sampled and loaded, and a graph whose offsets alone are beyond its budget."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tools.harness import Report, bytes_read_by_kernel, reset_peak, status, timed_epoch, within
from benchmarks.tools.r22 import generate

R26 = {"scale": 26, "dim": 64, "seeds": 256_000}  # as sizes.growth makes it
R26_BATCHES, R26_FANOUTS, R26_MEMORY = 60, [10, 10, 10], 4 << 30
STREAMED = {"cache": 0.1, "disk": "1x"}

# The huge graph: a node in LIST_EVERY has a list, of LIST_EDGES sources that have lists, too.
LIST_EVERY, LIST_EDGES = 64, 4
BLOCK = 1 << 16  # nodes, edges and rows at a time
HUGE_SEEDS, HUGE_BATCH, HUGE_FANOUTS, HUGE_SHIFT = 100_000, 1000, [4, 4], np.uint64(40)

Turns = Callable[[int, str, dict[str, dict[str, Any]]], dict[str, list[dict[str, Any]]]]  # runs, what a child does, jobs by side
Datasets = Callable[[Any, int, Path], dict[str, Path]]


# -- in a process of its own ---------------------------------------------------------------------------------------------------


def loader_child(job: dict[str, Any]) -> dict[str, Any]:
    """Run a streamed epoch of a loader, and say what it took, by stage."""
    import torch  # noqa: F401

    import featstore

    kind = featstore.EpochSampler if job["epochwide"] else featstore.NeighborSampler
    strategy, loader_of, opened = featstore.Streamed(**job["strategy"]), featstore.Loader, featstore.OutOfCoreGraph.open
    imported = status("VmRSS")
    reset_peak()
    with opened(job["dataset"], memory=job["memory"]) as g:
        seeds = g.node_data["seeds"][: job["batches"] * job["batch_size"]]
        read, begin = bytes_read_by_kernel(), time.perf_counter()
        sampler = kind(g, job["fanouts"], seed=1)
        with loader_of(g, sampler, seeds, job["batch_size"], features="x", labels=None, strategy=strategy, seed=3) as loader:
            epoch = timed_epoch(loader, lambda batch: batch.x)
            stats = loader.stats()
        return {
            "seconds": time.perf_counter() - begin,
            "read": bytes_read_by_kernel() - read,
            "rows": epoch["rows"],
            "checksums": [mark["checksum"] for mark in epoch["marks"]],
            "stages": stats["seconds"],
            "superbatch": stats["superbatch"],
            "peak": status("VmHWM") - imported,
            "budget_peak": g.budget.peak,
        }


def values_of(nodes: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """The huge graph's feature, shape (n, 1): a hash of the node in [0, 1)."""
    mixed = nodes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> HUGE_SHIFT
    return (mixed.astype(np.float32) * np.float32(2.0**-24))[:, None]


def blocks(n: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the numbers 0 … n - 1, a block at a time."""
    for first in range(0, n, BLOCK):
        yield np.arange(first, min(first + BLOCK, n))


def make_child(job: dict[str, Any]) -> dict[str, Any]:
    """Create the huge graph of streams, in chunks, within the memory."""
    import featstore

    n, n_lists = job["nodes"], job["nodes"] // LIST_EVERY
    n_edges = n_lists * LIST_EDGES
    rng = np.random.default_rng(0)
    seeds = rng.choice(n_lists, min(n_lists, HUGE_SEEDS), replace=False) * LIST_EVERY
    offsets = ((nodes + LIST_EVERY - 1) // LIST_EVERY * LIST_EDGES for nodes in blocks(n + 1))
    # An odd factor scatters them; n_lists is a power of two, so that a list has no source twice.
    ids = (edges * 2_654_435_761 % n_lists * LIST_EVERY for edges in blocks(n_edges))
    features = {"x": ((n, 1), np.float32, (values_of(nodes) for nodes in blocks(n)))}
    arrays = ((n + 1,), "int64", offsets), ((n_edges,), "int64", ids)
    create = featstore.OutOfCoreGraph.create
    imported = status("VmRSS")
    reset_peak()
    begin = time.perf_counter()
    create(job["dataset"], *arrays, features, {"seeds": seeds}, topology="chunked", memory=job["memory"], progress=False).close()
    return {"seconds": time.perf_counter() - begin, "peak": status("VmHWM") - imported, "edges": n_edges}


def train_child(job: dict[str, Any]) -> dict[str, Any]:
    """Train on some batches of the huge graph, every row of them checked."""
    import torch

    import featstore

    kind = featstore.EpochSampler if job["epochwide"] else featstore.NeighborSampler
    strategy, loader_of, opened = featstore.OnDemand(cache=None), featstore.Loader, featstore.OutOfCoreGraph.open
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 8), torch.nn.Linear(16, 2)])
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

    def step(batch: Any) -> float:
        h = batch.x
        for layer, block in zip(layers, batch.blocks, strict=True):
            sums = torch.zeros(block.n_dst, h.shape[1]).index_add(0, block.dst, h[block.src])
            degrees = torch.bincount(block.dst, minlength=block.n_dst).clamp(min=1)[:, None]
            h = layer(torch.cat([h[: block.n_dst], sums / degrees], 1)).relu()
        loss = torch.nn.functional.cross_entropy(h, (batch.x[: len(h), 0] > 0.5).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    layers[0](torch.zeros(1, 2)).sum().backward()  # what torch loads for training is no part of what loading holds
    imported = status("VmRSS")
    reset_peak()
    begin = time.perf_counter()
    with opened(job["dataset"], memory=job["memory"]) as g:
        open_s = time.perf_counter() - begin
        seeds = g.node_data["seeds"][: job["batches"] * job["batch_size"]]
        sampler = kind(g, HUGE_FANOUTS, seed=1)
        losses, nodes = [], 0
        with loader_of(g, sampler, seeds, job["batch_size"], features="x", labels=None, strategy=strategy, seed=3) as loader:
            for batch in loader:
                assert np.array_equal(batch.x.numpy(), values_of(batch.input_ids.numpy())), "a row is another node's"
                losses.append(step(batch))
                nodes += len(batch.input_ids)
        return {
            "seconds": time.perf_counter() - begin,
            "open_s": open_s,
            "peak": status("VmHWM") - imported,
            "budget_peak": g.budget.peak,
            "holders": dict(g.memory_report()),
            "losses": [losses[0], losses[-1]],
            "nodes": nodes,
        }


CHILDREN = {"loader": loader_child, "make": make_child, "train": train_child}


# -- figures -------------------------------------------------------------------------------------------------------------------


def r26(args: argparse.Namespace, report: Report, folder: Path, turns: Turns, datasets: Datasets) -> None:
    """R26 in 4 GiB: seconds of 60 batches' samples, what is held of the offsets, and a streamed epoch of a loader."""
    size = {"scale": 13, "dim": 64, "seeds": 2_000} if args.tiny else R26
    work = generate(folder if args.tiny else Path(os.environ.get("FEATSTORE_R22", folder)), **size)
    job = {
        "folder": os.fspath(folder),
        "memory": R26_MEMORY,
        "batches": 4 if args.tiny else R26_BATCHES,
        "batch_size": 64 if args.tiny else 1000,
        "fanouts": R26_FANOUTS,
        "lists": 0,
    }
    with_features = work.dataset()
    chunks = os.fspath(datasets(work, args.chunk_kib, folder)["chunks"])
    csc = {**job, "dataset": os.fspath(with_features)}
    found = turns(
        args.runs,
        "sample",
        {
            "neighbor, csc": {**csc, "epochwide": False},
            "epoch, csc": {**csc, "epochwide": True},
            "epoch, chunks": {**job, "dataset": chunks, "epochwide": True},
        },
    )
    title = f"R{size['scale']}, {job['batches']} batches of {job['batch_size']} in 4 GiB"
    for side in ("epoch, csc", "epoch, chunks"):
        report.figure(
            f"{title}, EpochSampler, {side.split(', ')[1]}",
            [each["seconds"] for each in found[side]],
            "s",
            target="<= 20",
            neighbor_sampler=[each["seconds"] for each in found["neighbor, csc"]],
            read=found[side][-1]["read"],
            neighbor_sampler_read=found["neighbor, csc"][-1]["read"],
            peak=found[side][-1]["peak"],
            stats=found[side][-1]["stats"],
        )
    report.figure(
        f"{title}, bytes held to find lists by, in chunks",
        [float(each["offsets"]) for each in found["epoch, chunks"]],
        "B",
        reference="over csc",
        references=[float(each["offsets"]) for each in found["epoch, csc"]],
        open_s=[each["open_s"] for each in found["epoch, chunks"]],
        reference_open_s=[each["open_s"] for each in found["epoch, csc"]],
    )
    streamed = {**csc, "strategy": STREAMED}
    found = turns(args.runs, "loader", {"epoch": {**streamed, "epochwide": True}, "neighbor": {**streamed, "epochwide": False}})
    ours, theirs = found["epoch"], found["neighbor"]
    for one, other in zip(ours, theirs, strict=True):
        assert one["checksums"] == other["checksums"], "the samplers give other batches"
    report.figure(
        f"{title}, a streamed epoch of a loader, EpochSampler",
        [each["seconds"] for each in ours],
        "s",
        reference="the same with NeighborSampler",
        references=[each["seconds"] for each in theirs],
        **{name: ours[-1][name] for name in ("stages", "superbatch", "rows", "read")},
        **{f"reference_{name}": theirs[-1][name] for name in ("stages", "superbatch", "read")},
    )
    for name, runs in {"EpochSampler": ours, "NeighborSampler": theirs}.items():
        within(report, f"{title}, a streamed epoch of a loader, {name}", runs, job["memory"])


def huge(args: argparse.Namespace, report: Report, folder: Path, turns: Turns) -> None:
    """A graph whose offsets alone are beyond its budget: created of streams, sampled and trained."""
    nodes, memory = 1 << args.huge_scale, args.huge_mib << 20
    path = folder / f"huge-{args.huge_scale}"
    title = f"2**{args.huge_scale} nodes in {args.huge_mib} MiB"
    shutil.rmtree(path, ignore_errors=True)
    job = {"dataset": os.fspath(path), "nodes": nodes, "memory": memory}
    (made,) = turns(1, "make", {"make": job})["make"]
    offsets = 8 * (nodes + 1)
    report.figure(f"{title}, created in chunks", made["seconds"], "s", offsets_bytes=offsets, edges=made["edges"])
    within(report, f"{title}, created in chunks", [made], memory)
    job |= {"batches": 4 if args.tiny else 20, "batch_size": 64 if args.tiny else HUGE_BATCH}
    jobs = {"NeighborSampler": {**job, "epochwide": False}, "EpochSampler": {**job, "epochwide": True}}
    for name, runs in turns(args.runs, "train", jobs).items():
        last = runs[-1]
        assert last["budget_peak"] <= memory
        more = {each: last[each] for each in ("nodes", "losses", "budget_peak")}
        seconds = [each["seconds"] for each in runs]
        report.figure(f"{title}, {job['batches']} batches trained, {name}", seconds, "s", open_s=last["open_s"], **more)
        within(report, f"{title}, trained, {name}", runs, memory, holders=last["holders"])
