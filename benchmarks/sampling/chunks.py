"""In-situ sampling: the adjacency in chunks, against the same adjacency in CSC form.

Figures of ``chunks``: nodes a second of NeighborSampler on chunks of 1 to 64 MiB beside its rate over CSC in the same memory
(target at the default size: at least half), with nothing cached and with a tenth of the adjacency cached; bytes that it reads a
batch; bytes a second of a pass over all lists; seconds to convert. ``--scale 20`` takes a smaller graph than R22.
"""

from __future__ import annotations

import argparse
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

import featstore
from benchmarks.tools.harness import Report, alternate, arguments, bytes_read_by_kernel, drop_from_page_cache, main, scratch
from benchmarks.tools.r22 import Workload, generate
from featstore.topology.chunkformat import DEFAULT_CHUNK_BYTES

FANOUTS = (10, 10, 10)
BATCH_SIZE = 1000
THREADS = 2
CHUNK_MIB = (1, 2, 4, 8, 16, 64)
MEMORY = "512MiB"


def files_of(g: featstore.OutOfCoreGraph) -> list[Path]:
    """The files of the adjacency."""
    return sorted(Path(g.path).glob("edge.*.rows"))


class Side:
    """A dataset, opened, and its sampler; each run samples batches that were not sampled before."""

    def __init__(self, path: Path, work: Workload, cached: int) -> None:
        self.graph = featstore.open(path, memory=MEMORY)
        if cached:
            self.graph.cache_neighbors(cached, progress=False)
        self._sampler = featstore.NeighborSampler(self.graph, FANOUTS)
        self._parts = torch.from_numpy(work.seeds).split(BATCH_SIZE)
        self._numbers = itertools.count()
        self.n_bytes = self.n_batches = 0

    def rate(self, n_batches: int) -> float:
        """Return nodes a second."""
        for path in files_of(self.graph):
            drop_from_page_cache(path)
        numbers = [next(self._numbers) % len(self._parts) for _ in range(n_batches)]
        before = bytes_read_by_kernel()
        with ThreadPoolExecutor(THREADS) as pool:
            start = time.perf_counter()
            n_nodes = sum(pool.map(lambda i: len(self._sampler.sample(self._parts[i], 0, i).input_ids), numbers))
            seconds = time.perf_counter() - start
        self.n_bytes += bytes_read_by_kernel() - before
        self.n_batches += n_batches
        return n_nodes / seconds

    def scan(self) -> float:
        """Return bytes a second of a pass over all lists."""
        for path in files_of(self.graph):
            drop_from_page_cache(path)
        start = time.perf_counter()
        n_ids = sum(len(block.ids) for block in self.graph.topology.blocks(32 << 20))
        return n_ids * self.graph.topology.id_bytes / (time.perf_counter() - start)

    def close(self) -> None:
        """Close the dataset."""
        self.graph.close()


def chunks(args: argparse.Namespace, report: Report, folder: Path, work: Workload) -> None:
    """The adjacency in chunks of several sizes, and in CSC form."""
    csc = folder / "csc"
    if not csc.exists():
        featstore.OutOfCoreGraph.create(csc, work.indptr, work.indices, progress=False, memory="1GiB").close()
    sizes = (1, 8) if args.tiny else CHUNK_MIB
    paths = {}
    for mib in sizes:
        paths[mib] = folder / f"chunks-{mib}"
        if not paths[mib].exists():
            featstore.OutOfCoreGraph.create(
                paths[mib],
                work.indptr,
                work.indices,
                topology="chunked",
                chunk_bytes=mib << 20,
                progress=False,
                memory="1GiB",
            ).close()
    n_batches = 2 if args.tiny else 10
    for cached in (0, work.num_nodes * 8 + work.n_edges * 4 // 10):
        with_cache = ", a tenth of the adjacency cached" * bool(cached)
        sides = {"csc": Side(csc, work, cached), **{str(mib): Side(path, work, cached) for mib, path in paths.items()}}
        results = alternate(args.runs, {name: partial(side.rate, n_batches) for name, side in sides.items()}, warm_up=1)
        passes = alternate(args.runs, {name: side.scan for name, side in sides.items()}) if not cached else {}
        for mib in sizes:
            is_default = mib << 20 == DEFAULT_CHUNK_BYTES
            report.figure(
                f"sampling on chunks of {mib} MiB{with_cache}",
                results[str(mib)],
                "nodes/s",
                reference="NeighborSampler over csc in the same memory",
                references=results["csc"],
                target=">= 0.5" if is_default else None,
                bytes_a_batch=round(sides[str(mib)].n_bytes / sides[str(mib)].n_batches),
                bytes_a_batch_of_csc=round(sides["csc"].n_bytes / sides["csc"].n_batches),
                held=dict(sides[str(mib)].graph.memory_report()),
            )
            if not cached:
                report.figure(
                    f"a pass over all lists in chunks of {mib} MiB",
                    passes[str(mib)],
                    "B/s",
                    reference="the same over csc",
                    references=passes["csc"],
                )
        for side in sides.values():
            side.close()
    start = time.perf_counter()
    form = "csc" if featstore.convert(csc, "chunked", progress=False) else "chunked"
    seconds = time.perf_counter() - start
    featstore.convert(csc, form, progress=False)
    report.figure("convert csc to chunks", seconds, "s", edges=work.n_edges)


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    with scratch(args, "insitu") as folder:
        work = generate(folder, 14 if args.tiny else args.scale, dim=1, seeds=2_000 if args.tiny else 200_000)
        for group in (chunks,):
            if args.only in group.__name__:
                group(args, report, folder, work)


if __name__ == "__main__":
    main(run, arguments(__doc__ or "", scale=22))
