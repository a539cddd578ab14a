"""Accuracy by ranks (pagraph, figure 21): 1, 2 and 4 ranks with the same global batch, global and local shuffle.

Ranks are processes of a gloo group, each with its share of the machine's cores, a GraphSAGE under DistributedDataParallel, and
its part of a global batch of :data:`GLOBAL_BATCH` seeds. With the global shuffle, ranks together train on the batches of one
process (PaGraph's DGL). With the local one each rank has the training nodes of its self-reliant part and their view, shuffled
among themselves (:class:`~featstore.PartBatches`). Every way is trained for two epochs, once a seed, which gives weights, order
and draws. Accuracy is that of the test nodes after the last epoch, measured by rank 0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

import featstore
from benchmarks.tools.harness import Report, answer
from benchmarks.tools.ranks import answers, start_ranks
from featstore.cli.sage import GraphSAGE
from featstore.cli.splits import split_seeds
from featstore.cli.training import evaluate

GRAPH = "linux414-calls"
FANOUTS = [10, 10]
GLOBAL_BATCH, EPOCHS, LEARNING_RATE = 1000, 2, 0.003
ONE = "1 rank"
WAYS = {ONE: (1, False), "2 ranks": (2, False), "4 ranks": (4, False), "2 ranks, local": (2, True), "4 ranks, local": (4, True)}
TINY = (ONE, "2 ranks", "2 ranks, local")
WITHIN = 0.5  # points of accuracy
PARTS = "bench-ranks-{}"

Int64s = npt.NDArray[np.int64]


def make_dataset(
    path: Path, indptr: Int64s, ids: npt.NDArray[np.integer[Any]], z: Any, blocks: Iterator[npt.NDArray[np.float32]]
) -> None:
    """Create the dataset with its parts, unless it is there."""
    if not path.exists():
        data = {"y": z["y"].astype(np.int64)} | {name: z[name].astype(bool) for name in ("train_mask", "test_mask")}
        features = {"x": (tuple(int(n) for n in z["x_shape"]), np.float32, blocks)}
        featstore.OutOfCoreGraph.create(path, indptr, ids, features, data, progress=False).close()
    with featstore.open(path, memory="4GiB") as g:
        seeds = split_seeds(g, "train", "y")
        assert seeds is not None
        for world_size, is_local in WAYS.values():
            if is_local and PARTS.format(world_size) not in g.parts():
                options = {"hops": len(FANOUTS), "name": PARTS.format(world_size), "progress": False}
                featstore.partition(g, world_size, "ldg", seeds, **options)


def rank_of(job: dict[str, Any]) -> dict[str, Any]:
    """Be one rank: train; rank 0 returns the accuracy of the test nodes, the rows that it requested, and seconds of an epoch."""
    rank, world_size, seed = job["rank"], job["world_size"], job["seed"]
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    if world_size > 1:
        where, patience = f"file://{job['meeting']}", timedelta(seconds=600)
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size, timeout=patience)
    sharing = {"shared": world_size} if world_size > 1 and not job["is_local"] else {}
    with featstore.open(job["dataset"], memory="4GiB", threads=1) as whole:
        g = whole.part(rank, PARTS.format(world_size), progress=False) if job["is_local"] else whole
        g.cache_neighbors("256MiB", progress=False, **sharing)
        g.cache("x", 1.0, **sharing)
        seeds = split_seeds(whole, "train", "y")
        assert seeds is not None
        batches: Any = featstore.RandomBatches(seeds, job["batch"] // world_size, seed=seed)
        if job["is_local"]:
            batches = featstore.PartBatches(whole.parts()[PARTS.format(world_size)], seeds, job["batch"] // world_size, seed=seed)
        torch.manual_seed(seed)
        n_classes = int(whole.node_data["y"].max()) + 1
        model: Any = GraphSAGE(g.features["x"].shape[1], job["hidden"], n_classes, len(FANOUTS))
        trained = torch.nn.parallel.DistributedDataParallel(model) if world_size > 1 else model
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        sampler = featstore.NeighborSampler(g, FANOUTS, seed=seed)
        begin, n_steps = time.perf_counter(), 0
        with featstore.Loader(g, sampler, batches, labels="y", strategy="ondemand") as loader:
            for _ in range(EPOCHS):
                for batch in loader:
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(trained(batch.x, batch.blocks), batch.y).backward()
                    optimizer.step()
                    n_steps += 1
            rows = loader.stats()["rows"]
        found = {"rows": rows, "steps": n_steps, "epoch_s": (time.perf_counter() - begin) / EPOCHS}
        if world_size > 1:
            dist.barrier()
            dist.destroy_process_group()
        if rank == 0:
            torch.set_num_threads(len(os.sched_getaffinity(0)))
            test = split_seeds(whole, "test", "y")
            assert test is not None
            alone = {"rank": 0, "world_size": 1, "strategy": "ondemand", "shuffle": False, "labels": "y"}
            with featstore.Loader(whole, featstore.NeighborSampler(whole, FANOUTS, seed=seed), test, 1000, **alone) as loader:
                found["accuracy"] = evaluate(model, loader)
    return found


def trained_together(job: dict[str, Any]) -> dict[str, Any]:
    """Run all ranks of a way; return what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [{**job, "rank": rank, "meeting": f"{folder}/meeting"} for rank in range(job["world_size"])]
        with start_ranks(__spec__.name, jobs) as ranks:
            return answers(ranks)[0]


def accuracy(args: argparse.Namespace, report: Report, graph: str, dataset: Path, row: Callable[..., None]) -> None:
    """Train every way once a seed; print accuracy beside that of one process. ``row`` is a setting's."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in (TINY if args.tiny else WAYS)}
    for seed in range(1 if args.tiny else args.seeds):  # a run that is stopped has whole seeds
        for way in found:
            world_size, is_local = WAYS[way]
            job = {"dataset": os.fspath(dataset), "world_size": world_size, "is_local": is_local, "seed": seed}
            job |= {"batch": 100 if args.tiny else GLOBAL_BATCH, "hidden": args.hidden}
            found[way].append(trained_together(job))
            print(f"seed {seed}, {way}: {found[way][-1]}", file=sys.stderr, flush=True)
    for way, runs in found.items():
        more = [100 * (a["accuracy"] - b["accuracy"]) for a, b in zip(runs, found[ONE], strict=True)]
        is_reference = way == ONE
        of = None if is_reference else f"{ONE}, in points of accuracy, their mean without its sign"
        row(
            f"{graph}, {len(runs)} seeds",
            way,
            "accuracy",
            [each["accuracy"] for each in runs],
            "share of the test nodes",
            of,
            ratio=None if is_reference else abs(statistics.mean(more)),
            target=None if is_reference or args.tiny else f"<= {WITHIN}",
            more=[round(each, 2) for each in more],
            **{name: [round(each[name], 2) for each in runs] for name in ("rows", "steps")},
        )
        row(graph, way, "epoch", [each["epoch_s"] for each in runs], "s")


if __name__ == "__main__":
    answer(rank_of)
