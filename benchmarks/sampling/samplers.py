"""Sampling on R22: neighbours in memory against a plain C sampler, from disk against reading one list at a time; by layers.

``python -m benchmarks.sampling.samplers`` makes the graph (64 M edges, 0.8 GB of scratch) and takes some minutes. All sides
deliver the same batches; the first of each is compared bit for bit.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import featstore
from benchmarks.tools.harness import Report, alternate, arguments, bytes_read_by_kernel, drop_from_page_cache, main, scratch
from benchmarks.tools.r22 import Workload, generate
from featstore.budget import Budget
from featstore.gather.buffers import BufferPool
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.sampling.batch import SampledBatch
from featstore.sampling.labor import LaborSampler
from featstore.sampling.layer import LayerSampler
from featstore.sampling.neighbor import NeighborSampler
from featstore.sampling.rng import batch_key
from featstore.sampling.sampledbatches import Drawn
from featstore.sampling.shadow import ShadowSampler
from featstore.storage.rowfile import RowFile
from featstore.topology.base import CscTopology, huge_bytes
from featstore.topology.types import Types

FANOUTS = (10, 10, 10)
BATCH_SIZE = 1000
THREADS = 2
Int64s = npt.NDArray[np.int64]


@dataclass
class View:
    """A graph as the sampler sees it: the open dataset with another neighbour cache, or another way to read it."""

    num_nodes: int
    topology: CscTopology
    neighbor_cache: NeighborCache | None
    pool: BufferPool
    budget: Budget
    own_part: None = None

    @property
    def types(self) -> Types:
        return Types.one(self.num_nodes, self.topology.num_edges)

    @property
    def neighbor_lists(self) -> View:
        return self

    def using(self) -> AbstractContextManager[NeighborCache | None]:
        return nullcontext(self.neighbor_cache)


class PlainC:
    """one_at_a_time.c, compiled here; one instance may be called from several threads."""

    def __init__(self, folder: Path, work: Workload, n_threads: int) -> None:
        library = folder / "one_at_a_time.so"
        source = Path(__file__).with_name("one_at_a_time.c")
        subprocess.run([os.environ.get("CC", "cc"), "-O3", "-shared", "-fPIC", "-o", library, source], check=True)
        self._sample = ctypes.CDLL(str(library)).one_at_a_time
        self._sample.restype = ctypes.c_int64
        self._indptr = np.array(work.indptr)
        self._indices = np.array(work.indices)
        self._free = [self._memory(work.num_nodes) for _ in range(n_threads)]

    def _memory(self, n: int) -> tuple[npt.NDArray[Any], ...]:
        most = BATCH_SIZE
        for fanout in FANOUTS:
            most = min(n, most * (fanout + 1))
        n_edges = len(FANOUTS) * most * max(FANOUTS)
        return np.full(n, -1, np.int32), np.zeros(n + 1, np.int64), np.zeros(n_edges, np.int64), np.zeros(n_edges, np.int64)

    def sample(self, seeds: Int64s, epoch: int, index: int, fanouts: tuple[int, ...] = FANOUTS) -> tuple[Int64s, list[Int64s]]:
        """Return views of the nodes, and of the sources of each hop, valid until the next call."""
        number, nodes, src, dst = memory = self._free.pop()
        nodes[: len(seeds)] = seeds
        ends = np.zeros(len(fanouts) + 1, np.int64)
        counts = np.array(fanouts, np.int64)
        arrays = [ctypes.c_void_p(array.ctypes.data) for array in (counts, number, nodes, src, dst, ends[1:])]
        key = ctypes.c_uint64(batch_key(0, epoch, index))
        graph = [ctypes.c_void_p(array.ctypes.data) for array in (self._indptr, self._indices)]
        n = self._sample(*graph, ctypes.c_int64(len(seeds)), ctypes.c_int(len(fanouts)), arrays[0], key, *arrays[1:])
        self._free.append(memory)
        return nodes[:n], [src[a:b] for a, b in itertools.pairwise(ends.tolist())]


class OneListAtATime:
    """The same file, each list's share of a gather a blocking read of its own."""

    def __init__(self, file: RowFile, indptr: Int64s) -> None:
        self._file = file
        self._indptr = indptr
        self.path = file.path
        self.read = file.read

    def gather(
        self, rows: Int64s, out: npt.NDArray[np.uint8], positions: Int64s | None = None, gap_bytes: int | None = None
    ) -> None:
        """Gather list by list; rows of one list follow one another."""
        lists = np.searchsorted(self._indptr, rows, side="right")
        cuts = np.r_[0, np.flatnonzero(np.diff(lists)) + 1, len(rows)].tolist()
        for first, end in itertools.pairwise(cuts):
            self._file.gather(rows[first:end], out[first:end], None, gap_bytes)


def rate(sample: Callable[[int], int], n_batches: int, n_threads: int) -> float:
    """Sample batches 0 … n_batches - 1 on some threads; return nodes a second."""
    with ThreadPoolExecutor(n_threads) as pool:
        start = time.perf_counter()
        n_nodes = sum(pool.map(sample, range(n_batches)))
        return n_nodes / (time.perf_counter() - start)


def check_same(sampler: NeighborSampler, plain: PlainC, seeds: torch.Tensor) -> None:
    """Fail unless both give the same batch."""
    batch = sampler.sample(seeds, 0, 0)
    nodes, sources = plain.sample(seeds.numpy(), 0, 0)
    same = np.array_equal(batch.input_ids.numpy(), nodes)
    for block, src in zip(reversed(batch.blocks), sources, strict=True):
        same = same and np.array_equal(block.src.numpy(), src)
    if not same:
        raise SystemExit("the reference gives another batch")


def memory(args: argparse.Namespace, report: Report, folder: Path, work: Workload, view: View) -> None:
    """Whole adjacency in memory."""
    view.neighbor_cache = NeighborCache.build(view.topology, view.budget)
    parts = torch.from_numpy(work.seeds).split(BATCH_SIZE)[: 4 if args.tiny else args.batches]
    sampler = NeighborSampler(view, FANOUTS)
    plain = PlainC(folder, work, THREADS)
    check_same(sampler, plain, parts[0])

    def ours(index: int) -> int:
        return len(sampler.sample(parts[index], 0, index).input_ids)

    def theirs(index: int) -> int:
        return len(plain.sample(parts[index].numpy(), 0, index)[0])

    sides: dict[str, Callable[[], float | None]] = {}
    for n_threads in (1, THREADS):
        sides[f"ours {n_threads}"] = partial(rate, ours, len(parts), n_threads)
        sides[f"plain {n_threads}"] = partial(rate, theirs, len(parts), n_threads)
    results = alternate(args.runs, sides, warm_up=1)
    for n_threads in (1, THREADS):
        stats = sampler.stats()
        report.figure(
            f"sampling in memory, {n_threads} thread{'s' * (n_threads > 1)}",
            results[f"ours {n_threads}"],
            "nodes/s",
            reference="plain C, one destination at a time, same threads",
            references=results[f"plain {n_threads}"],
            nodes_a_batch=round(stats["nodes"] / stats["batches"]),
            edges_a_batch=round(stats["edges"] / stats["batches"]),
            scratch_bytes=view.budget.report()["sampler scratch"],
        )
    report.figure("sampling in memory, nodes/s promised", results[f"ours {THREADS}"], "nodes/s", target=">= 20e6")
    view.neighbor_cache.close()
    view.neighbor_cache = None


def edges(args: argparse.Namespace, report: Report, folder: Path, work: Workload, view: View) -> None:
    """Sampling with the numbers of edges against sampling without, the adjacency in memory.

    Lists are as they were given, and reversed: then the numbers are those of a stored permutation, in memory and on disk.
    """
    seeds = torch.from_numpy(work.seeds)
    parts = seeds.split(BATCH_SIZE)[: 4 if args.tiny else args.batches]
    few = parts[: max(1, len(parts) // 10)]

    def side(sampler: Any, batches: tuple[torch.Tensor, ...]) -> float:
        return rate(lambda index: len(sampler.sample(batches[index], 0, index).input_ids), len(batches), 1)

    def in_windows(sampler: featstore.EpochSampler, batches: tuple[torch.Tensor, ...]) -> float:
        order = Drawn(sampler, featstore.RandomBatches(seeds, BATCH_SIZE, seed=3)).epoch(0)
        start = time.perf_counter()
        with closing(order.windowed(0, stop=len(batches))) as drawn:
            n_nodes = sum(len(drawn.sample(number).input_ids) for number in range(len(batches)))
        return n_nodes / (time.perf_counter() - start)

    neighbors = (NeighborSampler, FANOUTS, side, parts)
    windows = (featstore.EpochSampler, FANOUTS, in_windows, parts)
    all_samplers: list[tuple[Callable[..., Any], Any, Callable[..., float], tuple[torch.Tensor, ...]]] = [
        neighbors,
        (LaborSampler, FANOUTS, side, parts),
        (LayerSampler, [2000, 2000], side, few),
        (ShadowSampler, FANOUTS[:2], side, few),
        windows,
    ]
    kinds = {
        "": all_samplers,
        ", of a permutation in memory": all_samplers,
        ", of a permutation on disk": [(*neighbors[:3], few), (*windows[:3], few)],
    }
    for what, samplers in kinds.items():
        with featstore.open(permuted(folder, work) if what else folder / "dataset", memory="2GiB", threads=1) as g:
            assert (g.topology.edge_ids is not None) == bool(what)
            g.cache_neighbors(edges=what.endswith("memory"))
            for kind, sizes, measure, batches in samplers:
                sides = {name: partial(measure, kind(g, sizes, edges=name == "with"), batches) for name in ("with", "without")}
                results = alternate(args.runs, sides, warm_up=1)
                report.figure(
                    f"{kind.__name__} with the numbers of edges{what}, lists in memory, 1 thread",
                    results["with"],
                    "nodes/s",
                    reference="the same without",
                    references=results["without"],
                    target=">= 0.8",
                    batches=len(batches),
                )


def permuted(folder: Path, work: Workload) -> Path:
    """Create (once) the adjacency of lists that were given in descending order: what sorting moved is stored."""
    path = folder / "permuted"
    if not path.exists():
        indptr = np.array(work.indptr)
        last = np.repeat(indptr[:-1] + indptr[1:] - 1, np.diff(indptr))
        ids = work.indices[last - np.arange(len(last))]
        featstore.OutOfCoreGraph.create(path, indptr, ids, progress=False).close()
    return path


def layers(args: argparse.Namespace, report: Report, folder: Path, work: Workload, view: View) -> None:
    """Layer-neighbour sampling, the adjacency in memory: its rate, and the nodes of its batches."""
    view.neighbor_cache = NeighborCache.build(view.topology, view.budget)
    parts = torch.from_numpy(work.seeds).split(BATCH_SIZE)[: 4 if args.tiny else args.batches]
    samplers: dict[str, NeighborSampler | LaborSampler] = {
        "neighbor": NeighborSampler(view, FANOUTS),
        "labor": LaborSampler(view, FANOUTS),
        "dependent": LaborSampler(view, FANOUTS, batch_dependency=256),
    }

    def side(name: str) -> float:
        return rate(lambda index: len(samplers[name].sample(parts[index], 0, index).input_ids), len(parts), 1)

    results = alternate(args.runs, {name: partial(side, name) for name in samplers}, warm_up=1)
    stats = {name: sampler.stats() for name, sampler in samplers.items()}
    for name in ("labor", "dependent"):
        report.figure(
            f"sampling by layers in memory, 1 thread{', batch_dependency=256' * (name == 'dependent')}",
            results[name],
            "nodes/s",
            reference="NeighborSampler, same thread",
            references=results["neighbor"],
            nodes_a_batch=round(stats[name]["nodes"] / stats[name]["batches"]),
            edges_a_batch=round(stats[name]["edges"] / stats[name]["batches"]),
        )
    nodes = {name: [each["nodes"] / each["batches"]] for name, each in stats.items()}
    report.figure(
        "nodes of a batch by layers", nodes["labor"], "nodes", reference="NeighborSampler", references=nodes["neighbor"]
    )
    view.neighbor_cache.close()
    view.neighbor_cache = None


def weighted(folder: Path, work: Workload) -> Path:
    """Create (once) the graph with three weights: uniform, exponential, and heavy-tailed ones."""
    path = folder / "weighted"
    if not path.exists():
        rng, n = np.random.default_rng(0), len(work.indices)
        weights = {"uniform": rng.random(n, np.float32), "exponential": rng.standard_exponential(n, np.float32)}
        weights["pareto"] = (1 - rng.random(n, np.float32)) ** np.float32(-1 / 1.5)
        made = featstore.OutOfCoreGraph.create(path, work.indptr, work.indices, edge_features=weights, progress=False)
        made.close()
    return path


def weights(args: argparse.Namespace, report: Report, folder: Path, work: Workload, view: View) -> None:
    """Draws by weight against uniform ones, lists and weights in memory; and of a few batches, weights on disk."""
    parts = torch.from_numpy(work.seeds).split(BATCH_SIZE)[: 4 if args.tiny else args.batches]
    few = parts[: max(1, len(parts) // 20)]
    with featstore.open(weighted(folder, work), memory="4GiB", threads=1) as g:
        g.cache_neighbors()
        names = list(g.edge_features)
        samplers = {name: NeighborSampler(g, FANOUTS, weight=name or None) for name in ("", *names)}
        assert all(each._weights is None or each._weights.in_memory for each in samplers.values())

        def side(sampler: NeighborSampler, batches: tuple[torch.Tensor, ...]) -> float:
            return rate(lambda index: len(sampler.sample(batches[index], 0, index).input_ids), len(batches), 1)

        results = alternate(args.runs, {name: partial(side, each, parts) for name, each in samplers.items()}, warm_up=1)
        for name in names:
            report.figure(
                f"sampling by {name} weights in memory, 1 thread",
                results[name],
                "nodes/s",
                reference="NeighborSampler without weights, same thread",
                references=results[""],
                target=">= 0.5",
                weight_bytes=g.budget.report()["edge weights"],
                batches=len(parts),
            )
        uniform = samplers["uniform"]
        first = uniform.sample(parts[0], 0, 0)
        assert uniform._weights is not None
        uniform._weights._give_back(0)
        again = uniform.sample(parts[0], 0, 0)
        same = zip(first.tensors, again.tensors, strict=True)
        assert all(torch.equal(a, b) for a, b in same), "weights on disk give other batches"
        results = alternate(args.runs, {"disk": partial(side, uniform, few), "none": partial(side, samplers[""], few)}, warm_up=1)
        report.figure(
            "sampling by weights that are read for each hop, lists in memory, 1 thread",
            results["disk"],
            "nodes/s",
            reference="NeighborSampler without weights, same thread",
            references=results["none"],
            batches=len(few),
        )


def moved(folder: Path, work: Workload) -> Path:
    """Create (once) the graph with exponential weights and its edges in an order of their own."""
    path = folder / "weighted-moved"
    if not path.exists():
        rng, n = np.random.default_rng(0), len(work.indices)
        order, dst = rng.permutation(n), np.repeat(np.arange(len(work.indptr) - 1), np.diff(work.indptr))
        edges, given = np.stack([work.indices[order], dst[order]]), {"exponential": rng.standard_exponential(n, np.float32)}
        featstore.OutOfCoreGraph.from_edge_index(path, edges, len(work.indptr) - 1, edge_features=given, progress=False).close()
    return path


def drive(args: argparse.Namespace, report: Report, folder: Path, work: Workload, view: View) -> None:
    """Draws by weight against uniform ones, lists and weights on the drive, edges given in another order than the lists."""
    parts = torch.from_numpy(work.seeds).split(BATCH_SIZE)[: 4 if args.tiny else max(4, args.batches // 5)]
    with featstore.open(moved(folder, work), memory=max(16 << 20, 2 * len(work.indices)), threads=1) as g:
        begin = time.perf_counter()
        by_weight = NeighborSampler(g, FANOUTS, weight="exponential")
        made_s = time.perf_counter() - begin
        assert by_weight._weights is not None
        assert by_weight._weights._tables or args.tiny
        samplers = {"weights": by_weight, "none": NeighborSampler(g, FANOUTS)}

        def side(sampler: NeighborSampler) -> float:
            return rate(lambda index: len(sampler.sample(parts[index], 0, index).input_ids), len(parts), 1)

        def read(sampler: NeighborSampler) -> int:
            before = bytes_read_by_kernel()
            side(sampler)
            return bytes_read_by_kernel() - before

        results = alternate(args.runs, {name: partial(side, each) for name, each in samplers.items()}, warm_up=1)
        report.figure(
            "sampling by weights on the drive, lists on the drive, 1 thread",
            results["weights"],
            "nodes/s",
            reference="NeighborSampler without weights, same thread",
            references=results["none"],
            target=">= 0.25",  # a column has 8 bytes, a neighbour 4
            read_mb={name: round(read(each) / len(parts) / 1e6, 1) for name, each in samplers.items()},
            tables_made_s=round(made_s, 2),
            memory=g.budget.total,
            batches=len(parts),
        )


def whole_lists(args: argparse.Namespace, report: Report, folder: Path, work: Workload, view: View) -> None:
    """Layers of a fixed size and induced subgraphs, the adjacency in memory: edges gone through, against edges drawn."""
    view.neighbor_cache = NeighborCache.build(view.topology, view.budget)
    parts = torch.from_numpy(work.seeds).split(BATCH_SIZE)[: 4 if args.tiny else args.batches]
    degrees = torch.from_numpy(np.diff(work.indptr))
    samplers: dict[str, Any] = {
        "neighbor": NeighborSampler(view, FANOUTS[:2]),
        "LayerSampler": LayerSampler(view, [2000, 2000]),
        "LayerSampler, replace": LayerSampler(view, [2000, 2000], replace=True),
        "ShadowSampler": ShadowSampler(view, FANOUTS[:2]),
    }

    def touched(name: str, batch: SampledBatch) -> int:
        if name == "neighbor":
            return sum(len(block.src) for block in batch.blocks)
        looked_at = batch.blocks[:1] if name == "ShadowSampler" else batch.blocks
        return sum(int(degrees[batch.input_ids[: block.n_dst]].sum()) for block in looked_at)

    counts = {name: [touched(name, s.sample(part, 0, i)) for i, part in enumerate(parts)] for name, s in samplers.items()}

    def side(name: str) -> float:
        def sample(index: int) -> int:
            samplers[name].sample(parts[index], 0, index)
            return counts[name][index]

        return rate(sample, len(parts), 1)

    results = alternate(args.runs, {name: partial(side, name) for name in samplers}, warm_up=1)
    for name in samplers:
        if name != "neighbor":
            report.figure(
                f"edges gone through in memory, 1 thread, {name}",
                results[name],
                "edges/s",
                reference="edges that NeighborSampler draws, same thread",
                references=results["neighbor"],
                edges_a_batch=round(sum(counts[name]) / len(parts)),
            )
    view.neighbor_cache.close()
    view.neighbor_cache = None


def disk(args: argparse.Namespace, report: Report, folder: Path, work: Workload, view: View) -> None:
    """Lists of the nodes with the highest out- to in-degree ratio in memory, a tenth of the adjacency; the rest on disk."""
    out_degree = np.bincount(work.indices, minlength=view.num_nodes)
    scores = out_degree / np.maximum(view.topology.degrees(), 1)
    cache = NeighborCache.build(view.topology, view.budget, scores, huge_bytes(8 * view.num_nodes) + view.topology.nbytes // 10)
    view.neighbor_cache = cache
    topology = view.topology
    slow = CscTopology(
        topology.num_nodes, topology.num_edges, topology.indptr, OneListAtATime(topology.indices, topology.indptr), 4
    )
    parts = torch.from_numpy(work.seeds).split(BATCH_SIZE)
    sampler = NeighborSampler(view, FANOUTS)
    reference = NeighborSampler(View(view.num_nodes, slow, cache, view.pool, view.budget), FANOUTS)
    check_same(sampler, PlainC(folder, work, 1), parts[0])
    fresh = itertools.count()
    path = Path(topology.indices.path)

    def side(which: NeighborSampler, n_batches: int) -> float:
        numbers = [next(fresh) % len(parts) for _ in range(n_batches)]
        drop_from_page_cache(path)

        def sample(i: int) -> int:
            return len(which.sample(parts[numbers[i]], 0, numbers[i]).input_ids)

        return rate(sample, n_batches, THREADS)

    before = bytes_read_by_kernel()
    side(sampler, 4)
    n_bytes = (bytes_read_by_kernel() - before) / 4
    results = alternate(args.runs, {"ours": partial(side, sampler, 2 if args.tiny else 20), "list": partial(side, reference, 2)})
    stats = sampler.stats()
    report.figure(
        "sampling from disk, a tenth of the adjacency cached",
        results["ours"],
        "nodes/s",
        reference="the same sampler reading one list at a time",
        references=results["list"],
        target=">= 5",
        threads=THREADS,
        cached_nodes=cache.n_cached,
        rows_read_a_batch=round(stats["edge_rows_read"] / stats["batches"]),
        bytes_read_a_batch=round(n_bytes),
    )
    cache.close()


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    with scratch(args, "sampling") as folder:
        work = generate(folder, 12 if args.tiny else 22)
        path = folder / "dataset"
        if not path.exists():
            featstore.OutOfCoreGraph.create(path, work.indptr, work.indices, progress=False).close()
        with featstore.open(path, memory="2GiB") as g:
            view = View(g.num_nodes, g.topology, None, g.pool, g.budget)
            for group in (memory, edges, layers, weights, drive, whole_lists, disk):
                if args.only in group.__name__:
                    group(args, report, folder, work, view)


if __name__ == "__main__":
    main(run, arguments(__doc__ or "", batches=100))
