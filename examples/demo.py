"""featstore in five minutes: one training, over a memory map and over three strategies, in the same memory. Run by ``make demo``.

Generates a power-law graph with planted classes, whose features (1 GB) are streamed to disk. Trains GraphSAGE on it within a
budget of a quarter of that: with the features in a memory map that 16 threads read, and with featstore on demand, streamed and
packed. All see the same batches, so losses are the same to the last bit. ``demo/demo.png`` shows what differs: seconds, reads,
and memory.

What the seconds mean. featstore reads past the page cache. The memory map's file is dropped from the page cache before its run.
Each run is held to the same memory by a control group, which counts the page cache. It takes root to make one. Without it, the
kernel keeps every page that the memory map has touched, as far as memory reaches: its seconds are then those of a machine with
that memory. The demo and its picture say so, and the picture shows how much the memory map took. That is resident memory, which
counts the code of libraries, too; a group counts it once for all processes, so a peak may stand above the group's limit.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import featstore
from featstore.cli.training import train
from featstore.gather.counters import GatherCounts
from featstore.gather.plan import Tier
from featstore.storage.rowfile import ReadStats
from featstore.testing.limits import memory_group

CLASSES = 16
OVERHEAD = 448 << 20  # the interpreter, torch, the model and its activations, beside the budget
HIDDEN = 0.8  # where the model takes more of every epoch, reading is hidden behind it, and seconds do not show it
N_THREADS = 16  # that read the memory map: each waits for one page at a time
TITLES = {
    "memmap": f"np.memmap, {N_THREADS} threads",
    "ondemand": "featstore, on demand",
    "streamed": "featstore, streamed",
    "packed": "featstore, packed",
}


class Planted:
    """A graph whose nodes mostly cite nodes of their own class, popular ones most: degrees have a heavy tail on both sides.

    A node's own features say little about its class; those of its neighbourhood say much.
    """

    def __init__(self, n: int, dim: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.n, self.dim, self.seed = n, dim, seed
        self.y = rng.integers(0, CLASSES, n)
        self.centers = 0.13 * rng.standard_normal((CLASSES, dim), dtype=np.float32)
        degrees = np.minimum(2 + 3.5 * rng.pareto(1.6, n), 1000).astype(np.int64)
        self.indptr = np.r_[0, np.cumsum(degrees)]
        # Members of each class, most popular first; popularity has nothing to do with the node's number.
        shuffled = rng.permutation(n)
        self.members = shuffled[np.argsort(self.y[shuffled], kind="stable")]
        self.first = np.searchsorted(self.y[self.members], np.arange(CLASSES + 1))
        order = rng.permutation(n)
        self.splits = {"train_idx": order[: n // 50], "test_idx": order[-n // 400 :]}

    def neighbor_blocks(self, nodes: int = 1 << 16) -> Iterator[npt.NDArray[np.int64]]:
        """Yield in-neighbours, node after node."""
        rng = np.random.default_rng([self.seed, 1])
        for v in range(0, self.n, nodes):
            degrees = np.diff(self.indptr[v : v + nodes + 1])
            cited = np.repeat(self.y[v : v + nodes], degrees)
            stranger = rng.random(len(cited)) < 0.3
            cited[stranger] = rng.integers(0, CLASSES, int(stranger.sum()))
            first = self.first[cited]
            size = self.first[cited + 1] - first
            yield self.members[first + (size * rng.random(len(cited)) ** 3).astype(np.int64)]

    def feature_blocks(self, copy: Path, rows: int = 1 << 14) -> Iterator[npt.NDArray[np.float32]]:
        """Yield feature rows in order, and write them to ``copy``, an .npy file, as they go by."""
        rng = np.random.default_rng([self.seed, 2])
        with copy.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (self.n, self.dim)})
            for v in range(0, self.n, rows):
                y = self.y[v : v + rows]
                block = rng.standard_normal((len(y), self.dim), dtype=np.float32)
                block += self.centers[y]
                file.write(block.data)
                yield block
            file.flush()
            os.fsync(file.fileno())

    def write(self, folder: Path) -> None:
        """Make the dataset and the copy for the memory map."""
        n, edges = self.n, int(self.indptr[-1])
        featstore.OutOfCoreGraph.create(
            folder / "graph",
            self.indptr,
            ((edges,), np.int64, self.neighbor_blocks()),
            features={"x": ((n, self.dim), np.float32, self.feature_blocks(folder / "x.npy"))},
            node_data={"y": self.y, **self.splits},
            overwrite=True,
        ).close()


class MapStore:
    """Features in a memory map that several threads read, with the methods of a feature store that a loader uses."""

    def __init__(self, path: Path, n_threads: int) -> None:
        # A run that starts with the file in the page cache would not show what the disk costs.
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._rows = np.load(path, mmap_mode="r")
        self._rows._mmap.madvise(mmap.MADV_RANDOM)  # no read-ahead, which would fetch 32 pages a row
        self._n_threads = n_threads
        self._pool = ThreadPoolExecutor(n_threads)
        self.shape = torch.Size(self._rows.shape)
        self.dtype = torch.float32
        self.ndim = 2
        self.nbytes = self._rows.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def gather(self, ids: torch.Tensor, plan: None, tiers: Mapping[Tier, Any], counts: GatherCounts) -> torch.Tensor:
        wanted, out = ids.numpy(), np.empty((len(ids), self.shape[1]), np.float32)
        step = -(-len(wanted) // (4 * self._n_threads)) or 1

        def read(first: int) -> int:
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
            np.take(self._rows, wanted[first : first + step], axis=0, out=out[first : first + step], mode="clip")
            return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before

        # A major fault is a page that came from the drive. The other rows were in the page cache, which is this way's host tier.
        n_pages = sum(self._pool.map(read, range(0, len(wanted), step)))
        n_loaded = min(n_pages, len(wanted))
        counts.count(Tier.BASE, n_loaded)
        counts.count(Tier.HOST, len(wanted) - n_loaded)
        counts.read.add(ReadStats(n_loaded, n_pages, n_loaded * self.nbytes // max(1, len(self)), n_pages * mmap.PAGESIZE))
        return torch.from_numpy(out)


def resident_bytes(field: str) -> int:
    """Read this process's memory now (``VmRSS``) or its most so far (``VmHWM``); pages of a memory map that it uses count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def over_map(g: featstore.OutOfCoreGraph, path: Path) -> Any:
    """Return a stand-in for the graph, whose features are in a memory map; samples and labels are the graph's own."""
    names = ("num_nodes", "num_edges", "types", "own_part", "node_data", "budget", "options", "pool", "reader", "topology")
    kept = {name: getattr(g, name) for name in (*names, "neighbor_cache")}
    return SimpleNamespace(**kept, features={"x": MapStore(path, N_THREADS)})


def work(kind: str, folder: Path, memory: int, epochs: int, seconds: float) -> dict[str, Any]:
    """Train once; what runs in a process of its own."""
    torch.use_deterministic_algorithms(True)
    before = resident_bytes("VmRSS")
    once_s = 0.0
    steps: list[None] = []  # one a batch that was trained: the loader also counts those that it has made ahead
    with featstore.open(folder / "graph", memory=memory) as g:
        g.cache_neighbors(memory // 4)
        sampler = featstore.NeighborSampler(g, [5, 5], seed=0)
        seeds = g.node_data["train_idx"]
        batch_size = min(1000, max(50, g.num_nodes // 1000))  # two batches fit a quarter of the features, however few
        graph: Any = g
        strategy: featstore.Strategy
        if kind == "memmap":
            graph, strategy = over_map(g, folder / "x.npy"), featstore.OnDemand(cache=None)  # the page cache is its cache
        elif kind == "ondemand":
            strategy = featstore.OnDemand(cache="auto", policy="frequency")
        elif kind == "streamed":
            strategy = featstore.Streamed()
        else:
            start = time.perf_counter()
            pack = folder / "graph.pack"
            featstore.sample_offline(g, sampler, seeds, batch_size, epochs, pack, seed=0, overwrite=True, progress=False).close()
            strategy = featstore.Packed(pack)
            featstore.Loader(g, strategy=strategy, features="x").close()  # the first loader makes the layout
            once_s = time.perf_counter() - start
        counting = register_optimizer_step_post_hook(lambda *_: steps.append(None))
        result = train(
            graph,
            sampler,
            2,
            batch_size=batch_size,
            hidden=128,
            epochs=epochs,
            lr=0.01,
            max_seconds=seconds,
            held_out=["test"],
            progress=False,
            loader_options={"strategy": strategy},
        )
        counting.remove()
    memory_bytes = {"before": before, "peak": resident_bytes("VmHWM")}
    of = {"steps": len(steps), "batches_an_epoch": -(-len(seeds) // batch_size)}
    return {**result.to_dict(), **of, "once_s": once_s, "resident": memory_bytes}


def run(kind: str, options: argparse.Namespace, budget: int) -> dict[str, Any]:
    """Train in a child process, within a memory control group where one can be made; ``unlimited`` says why none was."""
    out = options.folder / f"{kind}.json"
    command = [sys.executable, __file__, "--folder", str(options.folder), "--worker", kind, "--memory", str(budget)]
    command += ["--epochs", str(options.epochs), "--seconds", str(options.seconds)]
    unlimited = ""
    try:
        with memory_group(budget + OVERHEAD) as group:
            subprocess.run(command, check=True, preexec_fn=group.enter)
    except OSError as error:
        unlimited = str(error)
        subprocess.run(command, check=True)
    return {**json.loads(out.read_text()), "unlimited": unlimited}


def measures(result: Mapping[str, Any]) -> dict[str, float]:
    """Work out what a run came to, an epoch: seconds, reads, and bytes of rows that were in memory, were read, were read unasked.

    If the time was up, the run has a part of its epochs, and its numbers are those of as many batches as a whole epoch has.
    """
    stats, of = result["stats"], result["batches_an_epoch"]
    trained, gathered = max(1, result["steps"]) / of, max(1, stats["batches"]) / of
    seconds = sum(epoch["seconds"] for epoch in result["epochs"])
    read = stats["rows_loaded"] * stats["row_bytes"]
    return {
        "seconds": seconds / trained,
        "computing": min(seconds, stats["seconds"].get("compute", 0.0)) / trained,
        "memory": (stats["rows"] - stats["rows_loaded"]) * stats["row_bytes"] / gathered,
        "read": read / gathered,
        "gaps": max(0, stats["bytes_read"] - read) / gathered,
        "reads": stats["reads"] / gathered,
    }


def accuracy(result: Mapping[str, Any]) -> float:
    """Return the test accuracy after the last epoch; nan without one."""
    return float(result["epochs"][-1]["test_accuracy"]) if result["epochs"] else float("nan")


def counts_of(results: Mapping[str, Mapping[str, Any]], kind: str) -> str:
    """Tell after how many batches a run was stopped, such as ``"61 of 80 batches"``; empty if it was not."""
    done, of = results[kind]["steps"], max(each["steps"] for each in results.values())
    return f"{done} of {of} batches" if done < of else ""


def computing_share(results: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the least share of an epoch that the model took, of all ways."""
    found = [measures(result) for result in results.values()]
    return min(m["computing"] / max(m["seconds"], 1e-9) for m in found)


def compare_losses(results: Mapping[str, Mapping[str, Any]]) -> int:
    """Return how many losses all runs have, the same to the last bit; 0 if any differ, or there are none."""
    found = [result["losses"] for result in results.values()]
    n = min(len(losses) for losses in found)
    return n if all(losses[:n] == found[0][:n] for losses in found) else 0


def report(results: dict[str, dict[str, Any]]) -> bool:
    """Print what the runs came to; return whether their losses are the same to the last bit."""
    slow = measures(results["memmap"])["seconds"]
    heads = f"{'seconds an epoch':>17}{'waiting':>9}{'speed':>8}{'rows in memory':>16}{'reads':>9}{'peak':>9}{'accuracy':>10}"
    print(f"\n{'':<24}{heads}")
    for kind, result in results.items():
        m = measures(result)
        rows = max(1.0, m["memory"] + m["read"])
        cells = f"{m['seconds']:>17.1f}{m['seconds'] - m['computing']:>9.1f}{slow / max(m['seconds'], 1e-9):>7.1f}×"
        cells += (
            f"{m['memory'] / rows:>16.0%}{m['reads']:>9,.0f}{result['resident']['peak'] / 1e6:>6,.0f} MB{accuracy(result):>10.4f}"
        )
        print(f"{TITLES[kind]:<24}{cells}")
    if (share := computing_share(results)) > HIDDEN:
        print(f"the model took {share:.0%} of each epoch or more: speeds say little here; compare waiting and reads")
    for kind in results:
        if counts := counts_of(results, kind):
            print(f"{TITLES[kind]}: stopped after {counts} (--seconds): accuracy is of these, seconds are scaled")
    print(f"packed: {results['packed']['once_s']:.1f} s once, to sample and to pack, are not in its epochs")
    if unlimited := results["memmap"]["unlimited"]:
        print(f"no memory control group could be made ({unlimited}): np.memmap had all memory of this machine as page cache")
    n = compare_losses(results)
    most = max(len(result["losses"]) for result in results.values())
    said = f"of the first {n} batches are identical to the last bit" if n else f"of up to {most} batches are NOT IDENTICAL"
    print(f"losses {said}")
    return bool(n)


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw seconds, where rows came from, and peak memory, a bar for each way."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    found = {kind: measures(result) for kind, result in results.items()}
    kinds = list(found)
    n_bytes = results["memmap"]["features_bytes"]
    slow = found["memmap"]["seconds"]
    best = max(slow / max(found[kind]["seconds"], 1e-9) for kind in kinds)
    figure = Figure(figsize=(14, 5), layout="constrained")
    seconds, rows, memory = figure.subplots(1, 3, sharey=True, width_ratios=[1.25, 1.25, 1])
    same = "same losses to the last bit" if compare_losses(results) else "LOSSES DIFFER"
    size, budget = f"{n_bytes / 1e9:.2g} GB", f"{results['memmap']['budget'] / 1e6:.0f} MB"
    shown = f"up to {best:.1f} × as fast as a memory map"
    if (share := computing_share(results)) > HIDDEN:
        fewer = found["memmap"]["reads"] / max(1.0, min(found[kind]["reads"] for kind in kinds))
        shown = f"up to {fewer:,.0f} × fewer reads than a memory map"
    title = f"GraphSAGE over {size} of features in {budget}: {shown}, {same}"
    figure.suptitle(title, fontsize=13, fontweight="bold")

    def bars(axes: Any, parts: list[tuple[str, str, list[float]]], labels: list[str], columns: int = 3) -> None:
        base = np.zeros(len(kinds))
        for label, color, values in parts:
            axes.barh(np.arange(len(kinds)), values, left=base, label=label, color=color, height=0.6)
            base += values
        for at, (end, text) in enumerate(zip(base, labels, strict=True)):
            axes.text(end + 0.015 * base.max(), at, text, va="center", fontsize=9)
        axes.set_xlim(0, 1.33 * base.max())
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=columns, fontsize=8.5, columnspacing=1, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)

    labels = []
    for kind in kinds:
        once_s, faster = results[kind]["once_s"], slow / max(found[kind]["seconds"], 1e-9)
        labels.append(f"{found[kind]['seconds']:.1f} s" + (f": {faster:.1f} ×" if kind != "memmap" else ""))
        labels[-1] += f"\n(+ {once_s:.1f} s once)" if once_s else ""
    waiting = [found[kind]["seconds"] - found[kind]["computing"] for kind in kinds]
    computing = [found[kind]["computing"] for kind in kinds]
    bars(seconds, [("waiting for batches", "#c44e52", waiting), ("computing", "#8c8c8c", computing)], labels)
    seconds.set_title("Seconds an epoch" + (f", {share:.0%} or more of them the model's" if share > HIDDEN else ""))
    ways = [f"{TITLES[kind].replace(', ', chr(10))}\naccuracy {accuracy(results[kind]):.3f}" for kind in kinds]
    stopped = [counts_of(results, kind) for kind in kinds]
    seconds.set_yticks(np.arange(len(kinds)), [f"{way}\nafter {n}" if n else way for way, n in zip(ways, stopped, strict=True)])
    seconds.invert_yaxis()

    tiers = [
        ("memory", "in memory", "#55a868"),
        ("read", "read: wanted rows", "#4c72b0"),
        ("gaps", "read: bytes beside them", "#dd8452"),
    ]
    reads = [f"{found[kind]['reads']:,.0f} reads" for kind in kinds]
    bars(rows, [(label, color, [found[kind][tier] / 1e6 for kind in kinds]) for tier, label, color in tiers], reads)
    rows.set_title("Where rows came from: MB an epoch")

    resident = [results[kind]["resident"] for kind in kinds]
    held = [("Python and torch", "#8c8c8c", [each["before"] / 1e6 for each in resident])]
    held.append(("rows, samples, model", "#8172b3", [(each["peak"] - each["before"]) / 1e6 for each in resident]))
    whole = (resident[0]["before"] + n_bytes) / 1e6
    memory.axvline(whole, color="#c44e52", linestyle="--", linewidth=1, label="with all rows in memory")
    bars(memory, held, [f"{each['peak'] / 1e6:,.0f} MB" for each in resident], columns=2)
    memory.set_xlim(0, max(1.1 * whole, memory.get_xlim()[1]))
    memory.set_title("Peak memory, MB")
    unlimited = "No memory control group could be made: np.memmap had all memory of the machine as page cache."
    limit = f"{(results['memmap']['budget'] + OVERHEAD) / 1e6:.0f} MB"
    counted = (
        f"Each run was held to {limit}, page cache included. A peak may be higher: it counts the code of shared libraries, too."
    )
    figure.supxlabel(unlimited if results["memmap"]["unlimited"] else counted, fontsize=9)
    figure.savefig(path, dpi=110)
    print(f"drawn: {path}")


NEXT = """
What next?
  which strategy      you need not choose: featstore.Loader estimates and takes one (docs/guide/choose.md)
  your data           from arrays: docs/guide/create.md; from OGB, IGB …: docs/guide/import.md
                      from CSV, Parquet: docs/guide/tables.md
  your training loop  README.md; from PyTorch Geometric: docs/guide/pyg.md
  all pages           make docs, then open build/site/index.html
  this machine        {python} -m featstore doctor"""


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train over a memory map and over featstore, in the same memory.")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where graph, results and plot go (default: demo)")
    parser.add_argument("--nodes", type=int, default=2_000_000, help="128 float32 features each (default: 2,000,000: 1 GB)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=90, help="each training stops after so long (default: 90)")
    parser.add_argument("--keep", action="store_true", help="keep the graph and the pack (3 GB)")
    parser.add_argument("--worker", choices=list(TITLES), help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help="budget in bytes (default: a quarter of the features)")
    options = parser.parse_args(argv)
    if options.worker:
        result = work(options.worker, options.folder, options.memory, options.epochs, options.seconds)
        (options.folder / f"{options.worker}.json").write_text(json.dumps(result))
        return

    begin = time.perf_counter()
    options.folder.mkdir(parents=True, exist_ok=True)
    planted = Planted(options.nodes, dim=128)
    size = planted.n * planted.dim * 4
    budget = options.memory or size // 4
    try:
        print(f"making a graph with {size / 1e9:.2f} GB of features …", flush=True)
        planted.write(options.folder)
        edges = int(planted.indptr[-1])
        print(
            f"{planted.n:,} nodes, {edges:,} edges, {size / 1e9:.2f} GB of features: made in {time.perf_counter() - begin:.1f} s"
        )
        print(f"budget: {budget / 1e6:.0f} MB; each run in {(budget + OVERHEAD) / 1e6:.0f} MB, page cache included", flush=True)
        results = {}
        for kind, title in TITLES.items():
            print(f"training: {title} (stops after {options.seconds:.0f} s) …", flush=True)
            results[kind] = {**run(kind, options, budget), "features_bytes": size, "budget": budget}
        same = report(results)
        draw(results, options.folder / "demo.png")
    finally:
        if not options.keep:
            for name in ("graph", "graph.pack", "graph.runs"):
                shutil.rmtree(options.folder / name, ignore_errors=True)
            (options.folder / "x.npy").unlink(missing_ok=True)
    print(f"{time.perf_counter() - begin:.0f} s in all")
    if not same:
        raise SystemExit("the losses of the runs differ, or there are none")
    print(NEXT.format(python=os.path.relpath(sys.executable)))


if __name__ == "__main__":
    main()
