"""featstore in five minutes: train on features four times as large as the memory that they may take. Run by ``make demo``.

Generates a power-law graph with planted classes, whose features (1 GB) are streamed to disk; trains GraphSAGE on it within a
budget of a quarter of that; trains the same again with the features in a memory map that 16 threads read, and for a quarter of
the time with one thread, in the same memory (a memory control group where one can be made); and draws where the time went:
``demo/demo.png``.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
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

import featstore
from featstore.cli.training import stage_table, train
from featstore.gather.executor import Tally
from featstore.gather.plan import Tier
from featstore.testing.limits import memory_group

CLASSES = 16
OVERHEAD = 448 << 20  # the interpreter, torch, the model and its activations, beside the budget
TITLES = {"featstore": "featstore", "memmap": "np.memmap, 16 threads", "memmap1": "np.memmap, 1 thread"}
THREADS = {"memmap": 16, "memmap1": 1}  # that read a memory map: each waits for one page at a time


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
        self.splits = {"train_idx": order[: n // 50], "test_idx": order[-n // 200 :]}

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

    def gather(self, ids: torch.Tensor, plan: None, tiers: Mapping[Tier, Any], tally: Tally) -> torch.Tensor:
        tally.count(Tier.BASE, len(ids))
        wanted, out = ids.numpy(), np.empty((len(ids), self.shape[1]), np.float32)
        step = -(-len(wanted) // (4 * self._n_threads)) or 1

        def read(first: int) -> None:
            np.take(self._rows, wanted[first : first + step], axis=0, out=out[first : first + step], mode="clip")

        list(self._pool.map(read, range(0, len(wanted), step)))
        return torch.from_numpy(out)


def work(kind: str, folder: Path, memory: int, epochs: int, seconds: float) -> dict[str, Any]:
    """Train once; what runs in a process of its own."""
    torch.use_deterministic_algorithms(True)
    start = time.perf_counter()
    with featstore.open(folder / "graph", memory=memory) as g:
        g.cache_neighbors(memory // 4)
        sampler = featstore.NeighborSampler(g, [5, 5], seed=0)
        graph: Any = g
        options: dict[str, Any] = {"strategy": featstore.OnDemand(cache="auto", policy="frequency")}
        if kind in THREADS:
            names = (
                "num_nodes",
                "num_edges",
                "types",
                "own_part",
                "node_data",
                "budget",
                "options",
                "pool",
                "reader",
                "topology",
                "neighbor_cache",
            )
            store = MapStore(folder / "x.npy", THREADS[kind])
            graph = SimpleNamespace(**{name: getattr(g, name) for name in names}, features={"x": store})
            options = {"strategy": featstore.OnDemand(cache=None)}  # the page cache is its cache
        result = train(
            graph,
            sampler,
            2,
            batch_size=min(1000, max(50, g.num_nodes // 1000)),  # two batches fit a quarter of the features, however few
            hidden=128,
            epochs=epochs,
            lr=0.01,
            max_seconds=seconds,
            loader_options=options,
        )
    return {**result.to_dict(), "seconds": time.perf_counter() - start}


def run(kind: str, options: argparse.Namespace, budget: int) -> dict[str, Any]:
    """Train in a child process, within a memory control group where one can be made."""
    out = options.folder / f"{kind}.json"
    command = [sys.executable, __file__, "--folder", str(options.folder), "--worker", kind, "--memory", str(budget)]
    seconds = options.seconds / 4 if kind == "memmap1" else options.seconds  # enough to see what a batch takes
    command += ["--epochs", str(options.epochs), "--seconds", str(seconds)]
    try:
        with memory_group(budget + OVERHEAD) as group:
            subprocess.run(command, check=True, preexec_fn=group.enter)
    except OSError as error:
        print(
            f"no memory control group can be made ({error}): the page cache is NOT limited, which favours np.memmap", flush=True
        )
        subprocess.run(command, check=True)
    return dict(json.loads(out.read_text()))


def report(results: dict[str, dict[str, Any]]) -> bool:
    """Print what the runs came to; return whether their losses are the same to the last bit."""
    for kind, result in results.items():
        print(f"\n== {TITLES[kind]}: {result['seconds']:.1f} s")
        print(stage_table(result["stats"]))
    ours, theirs, single = (results[kind] for kind in TITLES)
    print(f"\nepoch      {'featstore':<28}{TITLES['memmap']}")
    for mine, other in zip(ours["epochs"], theirs["epochs"], strict=False):
        cells = [f"test {e['test_accuracy']:.4f} in {e['seconds']:6.1f} s" for e in (mine, other)]
        print(f"{mine['epoch']:>5}      {cells[0]:<28}{cells[1]}")
    for kind in THREADS:
        done, of = results[kind]["stats"]["batches"], ours["stats"]["batches"]
        if done < of:
            print(f"{TITLES[kind]}: stopped after {done} of {of} batches (--seconds)")
    n = min(len(ours["losses"]), len(theirs["losses"]))
    n_single = min(n, len(single["losses"]))
    same = n_single > 0 and all(r["losses"][:k] == ours["losses"][:k] for r, k in ((theirs, n), (single, n_single)))
    print(f"\nlosses of the first {n} batches are {'identical to the last bit' if same else 'NOT IDENTICAL'}")
    mine, many, one = (1e3 * r["stats"]["seconds"]["gather"] / max(1, r["stats"]["batches"]) for r in (ours, theirs, single))
    print(f"gather: {mine:.0f} ms a batch; {TITLES['memmap']} {many:.0f} ms, {many / max(mine, 1e-9):.1f} times")
    print(f"        {TITLES['memmap1']} {one:.0f} ms, {one / max(mine, 1e-9):.1f} times")
    return same


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw where the time went, which tier rows came from, and accuracies."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained", width_ratios=[2, 1, 1.3])
    stages = [("compute", "computing", "#4c72b0"), ("wait", "waiting for a batch", "#c44e52")]
    kinds = list(results)
    base = np.zeros(len(kinds))
    batches = np.array([max(1, results[kind]["stats"]["batches"]) for kind in kinds])
    for stage, label, color in stages:
        values = np.array([results[kind]["stats"]["seconds"].get(stage, 0.0) for kind in kinds]) / batches * 1e3
        left.barh([TITLES[kind] for kind in kinds], values, left=base, label=label, color=color, height=0.35)
        base += values
    for stage, label, color, shift in [("gather", "gathering", "#dd8452", 0.26), ("sample", "sampling", "#8c8c8c", 0.37)]:
        values = np.array([results[kind]["stats"]["seconds"].get(stage, 0.0) for kind in kinds]) / batches * 1e3
        left.barh(np.arange(len(kinds)) + shift, values, label=f"{label}, behind", color=color, height=0.1)
    left.set(xlabel="milliseconds a batch of training", title="Where time goes")
    left.invert_yaxis()
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=4, fontsize=8, frameon=False)
    hits = results["featstore"]["stats"]["hits"]
    total = max(1, sum(hits.values()))
    bars = middle.bar(["cache", "disk"], [100 * hits["host"] / total, 100 * hits["base"] / total], color=["#55a868", "#c44e52"])
    middle.bar_label(bars, fmt="%.0f %%")
    middle.set(ylabel="rows, %", ylim=(0, 110), title="Where featstore finds rows")
    for kind, marker in (("featstore", "o-"), ("memmap", "x--")):  # one thread seldom ends an epoch in its time
        epochs = results[kind]["epochs"]
        right.plot([e["epoch"] + 1 for e in epochs], [e["test_accuracy"] for e in epochs], marker, label=TITLES[kind])
    right.axhline(1 / CLASSES, color="#8c8c8c", linestyle=":", label="guessing")
    right.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1), title="What is learnt")
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"drawn: {path}")


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train out of core, beside np.memmap in the same memory.")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="where graph, results and plot go (default: demo)")
    parser.add_argument("--nodes", type=int, default=2_000_000, help="128 float32 features each (default: 2,000,000: 1 GB)")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=80, help="training stops after so long (default: 80)")
    parser.add_argument("--keep", action="store_true", help="keep the graph (2 GB)")
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
        planted.write(options.folder)
        edges = int(planted.indptr[-1])
        print(f"{planted.n:,} nodes, {edges:,} edges, {size / 1e9:.2f} GB of features: {time.perf_counter() - begin:.1f} s")
        print(f"budget: {budget / 1e6:.0f} MB; each run in {(budget + OVERHEAD) / 1e6:.0f} MB, page cache included", flush=True)
        results = {kind: run(kind, options, budget) for kind in TITLES}
        same = report(results)
        draw(results, options.folder / "demo.png")
    finally:
        if not options.keep:
            shutil.rmtree(options.folder / "graph", ignore_errors=True)
            (options.folder / "x.npy").unlink(missing_ok=True)
    print(f"{time.perf_counter() - begin:.0f} s in all")
    if not same:
        raise SystemExit("the losses of the runs differ, or there are none")


if __name__ == "__main__":
    main()
