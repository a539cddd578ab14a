"""Layer-wise inference on R22 (``--scale``): bytes, passes, seconds; beside gathers, the drive and the processor.

A GraphSAGE of three layers is run at every node, all neighbours, within ``--budget`` MiB (1024). The reference is the usual
layer-wise inference over the library's own gathers: batches of 1,000 nodes, all neighbours, each layer's input read with
``store[ids]``. It is cut after ``--seconds`` a layer, and whole layers are taken from the batches that ran. Hidden layers have
the features' width, so that every layer of the reference reads the features; what it would have to write does not count.

Two more references, and the longer of them is the bound: the bytes read, at the drive's rate, which is the best of fio's and the
library's sequential reads just before; and the processor's part alone, the same run on a copy in ``/dev/shm``, a file system in
memory (8 GB for R22). ``$FEATSTORE_R22`` names a folder that ``tools.r22`` filled.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import featstore
from benchmarks.tools.drive import fio_scan_bandwidth, have_fio, sequential_rate
from benchmarks.tools.harness import Report, arguments, bytes_read_by_kernel, drop_from_page_cache, main, scratch
from benchmarks.tools.r22 import generate
from featstore.cli.sage import GraphSAGE
from featstore.inference.infer import run_layers
from featstore.inference.output import LayerCosts
from featstore.ranks import Meeting

CLASSES, LAYERS = 47, 3
MEMORY = "/dev/shm"  # a file system in memory
BATCH = 1000


def gathered_layer(
    g: featstore.OutOfCoreGraph, layer: Any, source: featstore.FeatureStore, limit_s: float, n_batches: int
) -> float:
    """Seconds of a layer over gathers, in batches of all neighbours: those of a few, for all."""
    sampler = featstore.NeighborSampler(g, [-1], seed=0)
    ids = torch.randperm(g.num_nodes, generator=torch.Generator().manual_seed(0))[: BATCH * n_batches]
    begin, n_done = time.perf_counter(), 0
    with torch.inference_mode():
        for seeds in ids.split(BATCH):
            batch = sampler.sample(seeds)
            layer(source[batch.input_ids], batch.blocks[0])
            n_done += len(seeds)
            if time.perf_counter() - begin > limit_s:
                break
    return (time.perf_counter() - begin) * g.num_nodes / max(1, n_done)


def layers_at_all(g: featstore.OutOfCoreGraph, model: GraphSAGE) -> tuple[float, list[LayerCosts]]:
    """Run the model at every node; return the seconds, and what the layers came to."""
    begin = time.perf_counter()
    costs = run_layers(g, model.inference_layers(), "x", "h", None, "cpu", True, None, None, False, Meeting(0, 1)).costs
    return time.perf_counter() - begin, costs


def in_memory(path: Path, budget: int, model: GraphSAGE) -> float:
    """Seconds of the same run on a copy of the dataset in memory."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        copy = shutil.copytree(path, Path(folder) / "dataset")
        with featstore.open(copy, memory=f"{budget}MiB") as g:
            g.topology.degrees(0, 1)
            return layers_at_all(g, model)[0]


def drive_rate(g: featstore.OutOfCoreGraph, path: Path) -> float:
    """Bytes a second of sequential reads: the best of the library's and fio's."""
    drop_from_page_cache(path)
    rate = sequential_rate(g)
    if have_fio():
        rate = max(rate, fio_scan_bandwidth(max(path.glob("*.rows"), key=lambda file: file.stat().st_size)))
    drop_from_page_cache(path)
    return rate


def inferred(args: argparse.Namespace, report: Report, path: Path) -> None:
    """Three layers at every node, beside gathers, and beside the longer of reads and processor."""
    torch.manual_seed(0)
    for _ in range(args.runs):
        with featstore.open(path, memory=f"{args.budget}MiB") as g:
            n_in = g.features["x"].shape[1]
            model = GraphSAGE(n_in, n_in, CLASSES, LAYERS).eval()
            g.topology.degrees(0, 1)
            rate = drive_rate(g, path)
            read = bytes_read_by_kernel()
            seconds, costs = layers_at_all(g, model)
            read = bytes_read_by_kernel() - read
            theirs = sum(gathered_layer(g, layer, g.features["x"], args.seconds, args.batches) for layer in model.layers)
        reads_s, processor_s = read / rate, in_memory(path, args.budget, model)
        more = {
            "drive": round(rate),
            "blocks": [each.passes.blocks for each in costs],
            "kernel_bytes": read,
            "reads_s": round(reads_s, 2),
            "processor_s": round(processor_s, 2),
            "sum_s": round(sum(each.passes.sum_s for each in costs), 2),
            "apply_s": round(sum(each.apply_s for each in costs), 2),
            "write_s": round(sum(each.write_s for each in costs), 2),
        }
        name = f"R{args.scale}, infer, {LAYERS} layers, {args.budget} MiB"
        report.figure(
            name,
            seconds,
            "s",
            reference="layer-wise over gathers",
            ratio=seconds / theirs,
            target=None if args.tiny else "<= 0.1",
            gathers_s=round(theirs, 1),
            **more,
        )
        references = {"its reads at the drive's rate": reads_s, "the processor's part alone": processor_s}
        for which, bound in references.items():
            target = "<= 1.5" if bound == max(references.values()) and not args.tiny else None
            report.figure(name, seconds, "s", reference=which, ratio=seconds / bound, target=target, **more)


def run(args: argparse.Namespace, report: Report) -> None:
    """Make the dataset, and measure on it."""
    if args.tiny:
        args.runs, args.batches, args.budget, args.scale = 1, 2, 32, 12
    with scratch(args, "infer") as folder:
        work = generate(os.environ.get("FEATSTORE_R22", folder), args.scale)
        path = work.dataset()
        if args.only in inferred.__name__:
            inferred(args, report, path)


if __name__ == "__main__":
    main(run, arguments(__doc__ or "", budget=1024, seconds=20, batches=10**6, scale=22))
