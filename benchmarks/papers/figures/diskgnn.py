"""DiskGNN (SIGMOD 2025): samples drawn ahead, rows packed a batch at a time, a segmented disk cache; beside Ginex.

MariusGNN, the paper's other baseline, is not here: its batches are other ones. ``packed`` runs the samples of one epoch again
and again, as the paper does; ``streamed`` draws new ones each epoch and packs them on the way. There is no device, so its cache
is the host's. Disk space and pages are counts.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import featstore
from benchmarks.epochs import packing
from benchmarks.papers.figures.common import Paper, Setting
from benchmarks.papers.figures.diskgnn_segments import FANOUTS, by_batch, extents_share, reordering, search
from benchmarks.papers.figures.models import train
from featstore.cli.splits import split_seeds

PAPER = Paper("diskgnn", "DiskGNN (SIGMOD 2025)")
GINEX, PACKED, STREAMED = "superbatches (Ginex)", "packed (DiskGNN)", "packed on the way (streamed)"
MOST_TESTED = 20_000  # seeds
NO_DEVICE = "no device: its cache is the host's, and its compute is left out"


@contextmanager
def benched(at: Setting) -> Iterator[packing.Bench]:
    """The packing benchmark's workload, at the figures' scale."""
    memory = max(128, round(3072 * 2.0 ** (at.scale - 22)))
    args = argparse.Namespace(**{**vars(at.args), "memory": memory, "part": 10 if at.scale >= 18 else 3})
    bench = packing.Bench(args, at.report, at.folder, at.workload(), at.batch_size)
    try:
        yield bench
    finally:
        bench.pack.close()
        bench.g.close()


@PAPER.shows("table 1", "what an epoch takes, reads and needs before, beside Ginex", NO_DEVICE)
def table1(at: Setting) -> None:
    """Seconds before the first epoch, of the epochs, and bytes read; the accuracy is in table 5."""
    n_epochs, unit = at.args.epochs, f"R{at.scale}"
    with benched(at) as bench:
        for name, options in (
            (GINEX, {"strategy": "ginex"}),
            (STREAMED, {"strategy": "streamed"}),
            (PACKED, {"strategy": "packed", "pack": bench.copied()}),
        ):
            with bench.opened(**options) as loader:
                before_s = loader.stats()["seconds"].get("pack", 0.0) if name == PACKED else 0.0
                runs = [bench.run(loader) for _ in range(n_epochs)]
            if name == PACKED:
                before_s += bench.sampling_s
                options["pack"].close()
                shutil.rmtree(options["pack"].path)
            epochs_s = [each["seconds"] + (each["stages"].get("sample", 0.0) if name != PACKED else 0.0) for each in runs]
            at.row(unit, name, "before, s", before_s, "table 1")
            at.row(unit, name, "first epoch, s", epochs_s[0], "table 1", stages=runs[0]["stages"])
            at.row(unit, name, "later epoch, s", epochs_s[1:] or epochs_s, "table 1", stages=runs[-1]["stages"])
            at.row(unit, name, f"{n_epochs} epochs and before, s", before_s + sum(epochs_s), "table 1")
            at.row(unit, name, "read an epoch, MB", [each["kernel_bytes"] / 1e6 for each in runs[1:] or runs], "table 1")
            at.row(unit, name, "rows an epoch, MB", runs[-1]["rows"] * bench.width / 1e6, "table 1")


def trained(at: Setting, ways: dict[str, tuple[str, type[featstore.NeighborSampler]]], n_layers: int) -> None:
    """Train each model on fresh samples in superbatches, streamed, and on one epoch's samples again and again."""
    graph, fanouts = at.labelled(), [10] * n_layers
    path, blocks = at.folder / f"{graph.name}-labelled", graph.blocks()
    assert blocks is not None
    if not path.exists():
        data = {"y": graph.more["y"].astype(np.int64)}
        data |= {name: graph.more[name].astype(bool) for name in ("train_mask", "test_mask")}
        features = {"x": (tuple(int(n) for n in graph.more["x_shape"]), np.float32, blocks)}
        featstore.OutOfCoreGraph.create(path, graph.indptr, graph.ids, features, data, progress=False).close()
    features_bytes = 4 * int(np.prod(graph.more["x_shape"]))
    with featstore.open(path, memory=max(256 << 20, features_bytes)) as g:
        seeds, test = split_seeds(g, "train", "y"), split_seeds(g, "test", "y")
        assert seeds is not None
        assert test is not None
        n_classes, size, test = int(g.node_data["y"].max()) + 1, graph.batch_size, test[:MOST_TESTED]
        for label, (kind, sampler_of) in ways.items():
            sampler = sampler_of(g, fanouts, seed=0)
            with featstore.Loader(g, sampler, test, size, labels="y", strategy="ondemand") as warm:  # imports, threads of torch's
                train(warm, warm, kind, at.args.hidden, n_layers, n_classes, 1)
            for name in (GINEX, STREAMED, PACKED):
                begin = time.perf_counter()
                tested = featstore.Loader(g, sampler, test, size, labels="y", shuffle=False, strategy="ondemand")
                with training(at, g, sampler, seeds, size, name) as loader, tested:
                    before_s = time.perf_counter() - begin
                    found = train(loader, tested, kind, at.args.hidden, n_layers, n_classes, at.args.epochs)
                at.row(f"{graph.name}, {label}", name, "accuracy, %", 100 * found["accuracy"], "after the last epoch")
                at.row(f"{graph.name}, {label}", name, "end to end, s", before_s + found["seconds"], f"{at.args.epochs} epochs")


@contextmanager
def training(at: Setting, g: Any, sampler: Any, seeds: Any, batch_size: int, name: str) -> Iterator[featstore.Loader]:
    """Open the loader of a system; a pack is made of one epoch's samples, and removed afterwards."""
    given: tuple[Any, ...] = (g, sampler, seeds, batch_size)
    if name != PACKED:
        strategy = featstore.Ginex if name == GINEX else featstore.Streamed
        with featstore.Loader(*given, features=["x"], labels="y", strategy=strategy(cache=0.1)) as loader:
            yield loader
        return
    folder = at.folder / "trained.pack"
    with featstore.sample_offline(*given, path=folder, progress=False) as pack:
        with featstore.Loader(g, features=["x"], labels="y", strategy=featstore.Packed(pack, cache=0.1)) as loader:
            yield loader
    shutil.rmtree(folder)


@PAPER.shows("table 5", "accuracy and end-to-end seconds of GraphSAGE and GAT", "training on the CPU")
def table5(at: Setting) -> None:
    """Two models by system."""
    trained(at, {"SAGE": ("SAGE", featstore.NeighborSampler), "GAT": ("GAT", featstore.NeighborSampler)}, 2)


@PAPER.shows("table 6", "accuracy and end-to-end seconds of GCN, and of ShadowGNN's subgraphs", "training on the CPU")
def table6(at: Setting) -> None:
    """Another model, another sampler."""
    trained(at, {"GCN": ("GCN", featstore.NeighborSampler), "Shadow": ("SAGE", featstore.ShadowSampler)}, 2)


@PAPER.shows("table 7", "the search for a segment's length beside an exhaustive one, by the disk: seconds, bytes read")
def table7(at: Setting) -> None:
    """Also of the first batches, of which the exhaustive search tries every length."""
    search(at)


@PAPER.shows("figure 5", "amplification with and without reordering, by length of segment, and by batch")
def figure5(at: Setting) -> None:
    """Global caches are those of the longest segment."""
    reordering(at, with_space=False)
    by_batch(at)


@PAPER.shows("figure 12", "an epoch by the disk that may be taken, beside Ginex", NO_DEVICE)
def figure12(at: Setting) -> None:
    """A host tier by frequency; disks are shares of what extents of all rows take."""
    panel = f"R{at.scale}"
    with benched(at) as bench:
        ginex = bench.epoch(strategy="ginex")
        full = bench.layout("frequency")
        disk, features = full.disk_bytes, bench.width * bench.pack.num_nodes
        full.close()
        for share in (1.0, 0.75, 0.5, 0.3):
            with bench.copied() as pack:
                options: dict[str, Any] = {"pack": pack, "policy": "frequency"}
                if share < 1:
                    options["disk"] = int(share * disk)
                with bench.opened(strategy="packed", **options) as loader:
                    bench.run(loader)  # fills the host tier
                    runs = [bench.run(loader) for _ in range(at.args.runs)]
                shutil.rmtree(pack.path)
            place = f"{share * disk / features:.1f}x" + (" (all)" if share == 1 else "")
            seconds, read = [each["seconds"] for each in runs], runs[-1]["kernel_bytes"]
            reference = ginex["seconds"]
            more = {"references": [reference] * len(seconds)}
            at.row(panel, PACKED, place, seconds, "s an epoch", GINEX, **more)
            at.row(panel, GINEX, place, reference, "s an epoch")
            at.row(panel, PACKED, place, read / 1e6, "MB read", GINEX, ratio=read / max(1, ginex["kernel_bytes"]))
            at.row(panel, GINEX, place, ginex["kernel_bytes"] / 1e6, "MB read")


@PAPER.shows("figure 13", "disk that extents of all rows take, by the rows in memory")
def figure13(at: Setting) -> None:
    """Counts."""
    for graph in at.graphs():
        trace = at.trace(graph, FANOUTS)
        for percent in (0, 5, 10, 20, 30, 50):
            at.row(graph.name, "extents", percent, extents_share(trace, percent / 100), "x the features")


@PAPER.shows("figure 14", "disk that extents of all rows take, by fan-outs and batch size")
def figure14(at: Setting) -> None:
    """A tenth of the rows in memory; the same seeds."""
    for graph in at.graphs():
        for fanouts in ([10, 10], [10, 15], [10, 10, 10], [10, 15, 20]):
            place = ",".join(map(str, fanouts))
            at.row(graph.name, "by fan-outs", place, extents_share(at.trace(graph, fanouts)), "x the features")
        for factor in (0.5, 1, 2, 4):
            size = max(1, round(factor * graph.batch_size))
            trace = at.trace(graph, FANOUTS, size, most=round(200 / factor))
            at.row(f"{graph.name}, batch", "by seeds a batch", size, extents_share(trace), "x the features")


PAPER.leaves_out("figure 15", "the same on a slower drive", "it needs a second drive: --table 1 --scratch a folder on it")


@PAPER.shows("figure 16", "amplification and disk space by length of segment")
def figure16(at: Setting) -> None:
    """As figure 5, with the disk that it takes."""
    reordering(at, with_space=True)


@PAPER.shows("figure 17", "packing all batches in one pass beside packing each by itself")
def figure17(at: Setting) -> None:
    """Individual packing is that of batches spread over the epoch, counted up by their rows."""
    with benched(at) as bench:
        disk, batched, alone, _ = packing.both_ways(bench)
    each_s = [sum(seconds) for seconds in alone]
    at.row(f"R{at.scale}", "individual", "packing", each_s, "s", rows_s=[rows for _, rows in alone], disk_bytes=disk)
    at.row(f"R{at.scale}", "batched", "packing", batched, "s", "individual", references=each_s)


PAPER.leaves_out(
    "table 8", "sequential beside pipelined training", "epochs.epoch --only hidden measures an epoch beside the loop"
)
PAPER.leaves_out("figure 18", "caches added one by one", "the device's cache is PaGraph's figure 14; the others are figure 12's")
