"""papers100M's size and shape in 10 GB: seconds of an epoch of data preparation by strategy, beside what the machine can do.

    python -m benchmarks.sizes.papers100m --folder DIR                            # makes the graph once: 35 GB of disk
    python -m benchmarks.sizes.papers100m --folder DIR --only streamed,15-10-5    # runs whose titles have these words
    python -m benchmarks.sizes.papers100m --folder DIR --batches 300              # runs are cut, and scaled to the epoch
    python -m benchmarks.sizes.papers100m --folder DIR --later                    # and second epochs, which find caches filled
    python -m benchmarks.sizes.papers100m --folder DIR --scale 20                 # 868 thousand nodes
    python -m benchmarks.sizes.papers100m --folder DIR --shape mag240m --scale 24 # 15 million of MAG240M's papers of 768 features

The graph is an R-MAT of 2 to the power of ``--scale`` nodes that is cut to papers100M's 111,059,956 (or in proportion), ids
permuted, drawn until 1,615,685,872 edges are left and cleaned of duplicates by the library, with 128 float16 features and
1,207,179 training nodes that have in-edges; or one of MAG240M's papers and citations (``--shape``). A row has its node's id in
its first columns: a sample of each batch is checked.

A run is an epoch, sampling included, in a process of its own within a memory control group of ``--memory`` and what an
interpreter takes, the page cache cold. One that is cut runs the epoch's own superbatches, three or more, and is scaled by its
rate after the first of them. Beside each stands the time that the drive and the cores would take for no more than what it read,
wrote, copied and drew, at rates measured before: reads and writes of 1 MiB, random reads of 4 KiB (fio's where it is installed),
rows of the same width through ``torch.index_select(out=)``, edges drawn where all lists are in memory. ``waits`` are the
longest times that the loop stood still, with the stages that ended meanwhile. ``--train`` adds a GraphSAGE that is trained on the
processor.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tools.drive import direct_rate, fio_random_iops, fio_scan_bandwidth, have_fio
from benchmarks.tools.harness import (
    BASE_BYTES,
    Report,
    answer,
    arguments,
    io_bytes,
    main,
    reset_peak,
    run_child,
    status,
    timed_epoch,
    whole_epoch,
)
from benchmarks.tools.r22 import rmat_edges

SCALE = 27  # of the real sizes
# Nodes, edges, training nodes, float16 features a node; of MAG240M its papers.
SHAPES = {"papers100m": (111_059_956, 1_615_685_872, 1_207_179, 128), "mag240m": (121_751_666, 1_297_748_926, 1_112_392, 768)}
CLASSES = 172
CHUNK_EDGES = 1 << 21
BLOCK_ROWS = 1 << 16
PATTERNS = 4096  # rows that differ beside their ids
MARGIN_BYTES = 64 << 20
MODEL_BYTES = 4 << 30  # of training: a batch's activations and their gradients
BATCH_SIZE, MEMORY = 1024, 10_000_000_000
FANOUTS = {"15-10-5": [15, 10, 5], "10-10-10": [10, 10, 10]}
STRATEGIES = ("auto", "streamed", "superbatch", "ondemand", "packed")
SAMPLERS = ("neighbor", "epoch")
FORMS = ("csc", "chunked")
LEAST_SUPERBATCHES = 3
RATE_BYTES = 2 << 30  # read, written or copied to measure a rate
RANDOM_READS, READERS = 60_000, 32
TRAINED = 20  # batches
HIDDEN = 64
N_WAITS = 3


# -- the graph -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The sizes of a graph at a scale; 27 is its own."""

    name: str
    scale: int

    def _scaled(self, position: int) -> int:
        return max(1, round(SHAPES[self.name][position] * 2.0 ** (self.scale - SCALE)))

    @property
    def n_nodes(self) -> int:
        """Nodes: less than 2 to the power of the scale."""
        return self._scaled(0)

    @property
    def n_edges(self) -> int:
        """Edges before duplicates are removed."""
        return self._scaled(1)

    @property
    def n_training(self) -> int:
        """Training nodes."""
        return self._scaled(2)

    @property
    def dim(self) -> int:
        """Features a node, 2 bytes each."""
        return SHAPES[self.name][3]


def edge_blocks(shape: Shape, has_list: npt.NDArray[np.bool_]) -> Iterator[npt.NDArray[np.int64]]:
    """Yield edges ``[2, k]`` whose two ends are below the number of nodes; note in ``has_list`` which nodes are destinations."""
    ids = np.random.Generator(np.random.SFC64(shape.scale)).permutation(1 << shape.scale).astype(np.uint32)

    def draw(number: int) -> npt.NDArray[np.int64]:
        rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence((shape.scale, number))))
        source, destination = (ids[each] for each in rmat_edges(rng, shape.scale, min(CHUNK_EDGES, 2 * shape.n_edges)))
        kept = np.flatnonzero((source < shape.n_nodes) & (destination < shape.n_nodes))
        return np.stack([source[kept], destination[kept]]).astype(np.int64)

    left, numbers = shape.n_edges, itertools.count()
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        pending = [threads.submit(draw, next(numbers)) for _ in range(2 * (os.cpu_count() or 1))]
        while left:
            block = pending.pop(0).result()[:, :left]
            pending.append(threads.submit(draw, next(numbers)))
            left -= block.shape[1]
            has_list[block[1]] = True
            yield block
        threads.shutdown(cancel_futures=True)


def patterns(dim: int) -> npt.NDArray[np.float16]:
    """The rows without their ids, in [0, 1), shape (PATTERNS, dim)."""
    return np.random.default_rng(0).random((PATTERNS, dim), np.float32).astype(np.float16)


def id_columns(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float16]:
    """The first two columns of rows: 14 bits of the id each, as the bits of small finite numbers."""
    bits = np.stack([ids & 0x3FFF, ids >> 14], axis=1).astype(np.uint16)
    return bits.view(np.float16)


def feature_blocks(shape: Shape) -> Iterator[npt.NDArray[np.float16]]:
    """Yield all feature rows in order."""
    base = np.tile(patterns(shape.dim), (BLOCK_ROWS // PATTERNS, 1))
    for first in range(0, shape.n_nodes, BLOCK_ROWS):
        block = base[: min(BLOCK_ROWS, shape.n_nodes - first)].copy()
        block[:, :2] = id_columns(np.arange(first, first + len(block)))
        yield block


def dataset(folder: Path, shape: Shape, form: str) -> Path:
    """Make the dataset, unless it is there, store its adjacency in this form, and return its path."""
    import featstore

    path = folder / f"{shape.name}-{shape.scale}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()
        has_list = np.zeros(shape.n_nodes, bool)

        def training() -> Iterator[npt.NDArray[np.int64]]:
            candidates = np.flatnonzero(has_list)  # written last: all edges were drawn
            yield np.random.default_rng(1).choice(candidates, shape.n_training, replace=False).astype(np.int64)

        labels = np.random.default_rng(2).integers(0, CLASSES, shape.n_nodes, np.int16)
        featstore.OutOfCoreGraph.from_edge_index(
            path,
            edge_blocks(shape, has_list),
            shape.n_nodes,
            {"x": ((shape.n_nodes, shape.dim), np.float16, feature_blocks(shape))},
            {"y": labels, "train_idx": ((shape.n_training,), np.int64, training())},
            coalesce=True,
            memory="2GiB",
        ).close()
        print(f"{path.name}: made in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    featstore.convert(path, form, memory="2GiB")
    return path


# -- what runs in a child ------------------------------------------------------------------------------------------------------


def sampler_of(g: Any, job: dict[str, Any]) -> Any:
    """Make the job's sampler."""
    import featstore

    kind = featstore.EpochSampler if job["sampler"] == "epoch" else featstore.NeighborSampler
    return kind(g, job["fanouts"], seed=1)


def rates_child(job: dict[str, Any]) -> dict[str, Any]:
    """Measure what bounds an epoch: the drive, copies of rows, and drawing where all lists are in memory."""
    import torch

    import featstore

    features = max(Path(job["dataset"]).glob("node.*"), key=lambda path: path.stat().st_size)
    if have_fio():
        found = {"read": fio_scan_bandwidth(features, 5), "iops": fio_random_iops(features, RANDOM_READS)}
    else:
        random_rate = direct_rate(features, 4096, READERS, RANDOM_READS)
        found = {"read": direct_rate(features, most_bytes=RATE_BYTES), "iops": random_rate / 4096}
    found["write"] = write_rate(Path(job["dataset"]).parent, job["rate_bytes"])
    rows = torch.zeros((job["rate_bytes"] // (2 * job["dim"]), job["dim"]), dtype=torch.float16)
    ids = torch.randint(0, len(rows), (min(len(rows), 500_000),))
    out = torch.empty((len(ids), job["dim"]), dtype=torch.float16)
    torch.index_select(rows, 0, ids, out=out)
    begin = time.perf_counter()
    for _ in range(4):
        torch.index_select(rows, 0, ids, out=out)
    found["rows"] = 4 * len(ids) / (time.perf_counter() - begin)
    del rows, out
    with featstore.open(job["dataset"], memory=job["all_lists"]) as g:
        g.cache_neighbors()
        sampler, seeds = featstore.NeighborSampler(g, job["fanouts"]), g.node_data["train_idx"]
        n = min(24, len(seeds) // job["batch_size"])

        def drawn(number: int) -> int:
            batch = sampler.sample(seeds[number * job["batch_size"] : (number + 1) * job["batch_size"]], 0, number)
            return sum(len(block.src) for block in batch.blocks)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(drawn, range(min(n, 4))))
            begin = time.perf_counter()
            found["edges"] = sum(threads.map(drawn, range(n))) / (time.perf_counter() - begin)
    return found


def write_rate(folder: Path, n_bytes: int) -> float:
    """Bytes a second of direct writes of 1 MiB by four threads, into new blocks."""
    import mmap

    path, step = folder / "write-rate.tmp", 1 << 20
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        os.posix_fallocate(fd, 0, n_bytes)

        def write(first: int) -> None:
            with mmap.mmap(-1, step) as block:
                block[:] = os.urandom(step)
                for at in range(first * step, n_bytes - step + 1, 4 * step):
                    os.pwrite(fd, block, at)

        begin = time.perf_counter()
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(write, range(4)))
        os.fdatasync(fd)
        return n_bytes / (time.perf_counter() - begin)
    finally:
        os.close(fd)
        path.unlink()


def epoch_child(job: dict[str, Any]) -> dict[str, Any]:
    """Run an epoch, or the batches of it that are asked for, and say what it took."""
    import torch

    import featstore
    from featstore.strategies.registry import find_strategy

    pattern = patterns(job["dim"])

    def rows_of(batch: Any) -> torch.Tensor:
        counted["edges"] += sum(len(block.src) for block in batch.blocks)
        some = slice(None, None, max(1, len(batch.input_ids) // 64))
        ids, rows = batch.input_ids[some].numpy(), batch.x[some].numpy()
        assert np.array_equal(rows[:, :2], id_columns(ids)), "a row is another node's"
        assert np.array_equal(rows[:, 2:], pattern[ids % PATTERNS, 2:]), "a row is damaged"
        if job["train"]:
            step(batch)
        found: torch.Tensor = batch.x
        return found

    step = trained_on(job["dim"]) if job["train"] else None
    counted, imported = {"edges": 0}, status("VmRSS")
    reset_peak()
    with ExitStack() as stack:
        begin = time.perf_counter()
        g = stack.enter_context(featstore.open(job["dataset"], memory=job["memory"]))
        open_s = time.perf_counter() - begin
        seeds = g.node_data["train_idx"]
        drawn: tuple[Any, ...] = (sampler_of(g, job), seeds, job["batch_size"])
        pack_s, options = 0.0, {}
        if job["strategy"] == "packed":
            pack, n = Path(job["pack"]), job["batches"] or -(-len(seeds) // job["batch_size"])
            stack.callback(lambda: shutil.rmtree(pack, ignore_errors=True))
            begin = time.perf_counter()
            featstore.sample_offline(g, drawn[0], seeds[: n * job["batch_size"]], job["batch_size"], path=pack).close()
            featstore.Loader(g, features="x", labels=None, strategy=featstore.Packed(pack)).close()
            pack_s, drawn, options = time.perf_counter() - begin, (), {"pack": pack}
        begin = time.perf_counter()
        read, written = io_bytes()
        strategy = find_strategy(job["strategy"])(**options)
        loader = stack.enter_context(featstore.Loader(g, *drawn, features="x", labels="y", strategy=strategy))
        setup_s = time.perf_counter() - begin
        length = loader.stats().get("superbatch", {}).get("batches", 1)
        most = job["batches"]
        if most and not job["train"]:  # of training the share that it hides is wanted, not the epoch
            most = length * max(LEAST_SUPERBATCHES, -(-most // length))
        epoch = timed_epoch(loader, rows_of, most=most, note=lambda: {"stages": loader.stats()["seconds"], "io": io_bytes()})
        first_read, first_written = (
            after - before for after, before in zip(epoch["marks"][0]["io"], (read, written), strict=True)
        )
        read, written = (after - before for after, before in zip(io_bytes(), (read, written), strict=True))
        stats, n_edges = loader.stats(), counted["edges"]
        n_batches = len(loader)
        later = timed_epoch(loader, rows_of)["loop_s"] if job["later"] and epoch["batches"] == n_batches else None
    costs = [setup_s + mark["seconds"] for mark in epoch["marks"]]
    return {
        "seconds": scaled(costs, n_batches, length),
        "later_s": later,
        "ran": [epoch["batches"], n_batches],
        "open_s": open_s,
        "setup_s": setup_s,
        "first_s": costs[0],
        "first_read": first_read,
        "first_written": first_written,
        "pack_s": pack_s,
        "rows": epoch["rows"],
        "edges": n_edges,
        "rows_loaded": stats["rows_loaded"],
        "hits": stats["hits"],
        "reads": stats["reads"],
        "read": read,
        "written": written,
        "stages": stats["seconds"],
        "hidden": stats["hidden"],
        "superbatch": stats.get("superbatch"),
        "taken": stats["auto"]["taken"] if "auto" in stats else {},
        "estimates": {each["strategy"]: each["epoch_s"] for each in stats["auto"]["estimates"]} if "auto" in stats else {},
        "waits": longest_waits(epoch["marks"]),
        "steady_wait_s": max((b - a for a, b in itertools.pairwise(costs[length:])), default=0.0),
        "peak": status("VmHWM") - imported,
    }


def scaled(costs: list[float], n_batches: int, length: int) -> float:
    """Seconds of the epoch: of one that was cut in superbatches of ``length``, by the rate after its first superbatch."""
    n = len(costs)
    if n >= n_batches or length >= n:
        return whole_epoch(costs, n_batches)
    return costs[-1] + (costs[-1] - costs[length - 1]) / (n - length) * (n_batches - n)


def longest_waits(marks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The longest times between two batches: where, how long, and the seconds of the stages that ended in them."""
    waits, before = [], {"seconds": 0.0, "stages": {}}
    for number, mark in enumerate(marks):
        stages = {name: round(s - before["stages"].get(name, 0.0), 2) for name, s in mark["stages"].items()}
        stages = {name: s for name, s in stages.items() if s >= 0.01 and name != "wait"}
        waits.append({"batch": number, "seconds": round(mark["seconds"] - before["seconds"], 2), "stages": stages})
        before = mark
    return sorted(waits, key=lambda wait: -wait["seconds"])[:N_WAITS]


def trained_on(dim: int) -> Any:
    """Make a GraphSAGE, and return what trains it on a batch."""
    import torch

    from featstore.cli.sage import GraphSAGE

    torch.manual_seed(0)
    model = GraphSAGE(dim, HIDDEN, CLASSES, 3, 0.0)
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch.x.float(), batch.blocks), batch.y.long())
        loss.backward()
        optimizer.step()

    return step


CHILDREN = {"rates": rates_child, "epoch": epoch_child}


# -- figures -------------------------------------------------------------------------------------------------------------------


def bound_of(found: dict[str, Any], rates: dict[str, float]) -> dict[str, float]:
    """Seconds of the whole epoch that drive and cores take at their rates, by stage: none can be faster and do as much."""
    share = found["ran"][1] / found["ran"][0]  # of a run that was cut
    drive = max(found["read"] / rates["read"], found["reads"] / rates["iops"]) + found["written"] / rates["write"]
    cores = {"copy": found["rows"] / rates["rows"], "draw": found["edges"] / rates["edges"]}
    return {"drive": share * drive, **{name: share * s for name, s in cores.items()}, "cores": share * sum(cores.values())}


def titles(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the runs whose titles have all the words of ``--only``."""
    for form, fanouts, sampler, strategy in itertools.product(FORMS, FANOUTS, SAMPLERS, STRATEGIES):
        title = f"{strategy}, {sampler}, {fanouts}, {form}"
        if all(word in title.split(", ") for word in filter(None, args.only.split(","))):
            yield title, {"strategy": strategy, "sampler": sampler, "fanouts": FANOUTS[fanouts], "form": form}


def run(args: argparse.Namespace, report: Report) -> None:
    """Make the graph, measure the rates, run the epochs."""
    shape = Shape(args.shape, args.scale)
    job: dict[str, Any] = {"memory": args.memory, "batch_size": args.batch_size, "batches": args.batches, "train": False}
    job |= {"later": args.later, "dim": shape.dim}
    rates: dict[str, float] = {}
    for title, one in titles(args):
        path = dataset(args.folder, shape, one["form"])
        job |= {"dataset": os.fspath(path), "drop": [os.fspath(path)], "pack": os.fspath(args.folder / "pack"), **one}
        if not rates:
            lists = int(1.2 * (4 * shape.n_edges + 8 * shape.n_nodes)) + (1 << 28)
            share = min(1.0, 2.0 ** (shape.scale - SCALE))
            more = {"all_lists": lists, "rate_bytes": max(1 << 24, int(RATE_BYTES * share))}
            rates = run_child(__spec__.name, {**job, **more, "what": "rates"})
            report.figure("rates of this machine", rates["read"], "B/s", **rates)
        for trains in (False, True) if args.train else (False,):
            job["train"] = trains
            job["batches"] = TRAINED if trains else args.batches
            limit = BASE_BYTES + MARGIN_BYTES + args.memory + MODEL_BYTES * trains
            results = [run_child(__spec__.name, {**job, "what": "epoch"}, limit) for _ in range(args.runs)]
            last = results[-1]
            bound = bound_of(last, rates)
            longest = max(bound["drive"], bound["cores"])
            is_promised = one["strategy"] == "auto" and not (trains or args.batches)
            is_promised &= (args.shape, args.scale, args.memory) == ("papers100m", SCALE, MEMORY)
            report.figure(
                f"{title}{', trained on' * trains}",
                [each["seconds"] for each in results],
                "s",
                reference="the longer of what the drive and the cores take for as much, at the rates above",
                references=[longest] * len(results),
                target="<= 1.3" if is_promised else None,
                bound={name: round(s, 1) for name, s in bound.items()},
                **last,
                memory_peak_allowed=args.memory + MARGIN_BYTES,
            )
            if is_promised:
                report.figure(f"{title}, set-up included", [each["seconds"] for each in results], "s", target="<= 190")
                # No way is faster than what the drive takes for as much.
                drive_s = last["first_read"] / rates["read"] + last["first_written"] / rates["write"]
                values = [each["first_s"] for each in results]
                report.figure(f"{title}, until the first batch", values, "s", target="<= 30", drive_s=round(drive_s, 1))
            first, n = last["ran"]
            cut = f" (scaled from {first} of {n} batches)" if first < n else ""
            seconds = statistics.median(each["seconds"] for each in results)
            later = "" if last["later_s"] is None else f", the second {last['later_s']:.0f} s"
            hidden = f"; training hid {last['hidden']:.0%} of loading" * trains
            print(
                f"{title}: {seconds:.0f} s an epoch{cut}{later}; drive {bound['drive']:.0f}, "
                f"copies {bound['copy']:.0f}, drawing {bound['draw']:.0f} s; first batch after {last['first_s']:.1f} s{hidden}",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    if not answer(lambda job: CHILDREN[job["what"]](job)):
        mine = argparse.ArgumentParser(add_help=False)
        mine.add_argument("--folder", type=Path, required=True, help="has the graph, or gets it; on the drive to be measured")
        mine.add_argument("--shape", choices=sorted(SHAPES), default="papers100m", help="whose sizes and widths of rows")
        mine.add_argument("--train", action="store_true", help="also train a GraphSAGE on the processor")
        mine.add_argument("--later", action="store_true", help="also run a second epoch, which finds caches filled")
        known, rest = mine.parse_known_args()
        shared = arguments(__doc__ or "", ["--runs", "1", *rest], scale=SCALE, batches=0, batch_size=BATCH_SIZE, memory=MEMORY)
        options = argparse.Namespace(**vars(shared), **vars(known))
        if options.tiny:
            options.scale, options.batch_size, options.memory = 12, 16, 64 << 20
        main(run, options)
