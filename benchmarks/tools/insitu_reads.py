"""Reads of sampling.insitu: bytes and seconds of each hop of a window, passes beside the drive, random reads by size."""

from __future__ import annotations

import argparse
import errno
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tools.drive import direct_rate, fio_random_iops, fio_scan_bandwidth, have_fio
from benchmarks.tools.harness import PAGE_BYTES, Report, alternate, bytes_read_by_kernel, drop_from_page_cache
from benchmarks.tools.insitu_table import BLOCKS, Lists, moved_bytes, pages_of

PIECE_NODES = 1 << 20  # whose lists are asked for at once in a pass, as a window does
READERS = 64  # threads of random reads where fio is not there
RANDOM_READS = 1 << 15

Run = Callable[[str, dict[str, Any]], dict[str, Any]]  # a job, in a process of its own


# -- hops, in a child ----------------------------------------------------------------------------------------------------------


class Noted:
    """A graph whose topology notes which lists are asked for, by hop."""

    def __init__(self, g: Any) -> None:
        self._g, self.topology = g, _NotedTopology(g.topology)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._g, name)


class _NotedTopology:
    def __init__(self, topology: Any) -> None:
        self._topology = topology
        self.hop = 0
        self.asked: list[list[tuple[npt.NDArray[np.int64], int]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._topology, name)

    def begin(self, hop: int) -> None:
        self.hop = hop
        self.asked.append([])

    def lists(self, nodes: npt.NDArray[np.int64], block_bytes: int) -> Iterator[Any]:
        self.asked[self.hop].append((nodes.copy(), block_bytes))
        return self._topology.lists(nodes, block_bytes)


def hops_child(job: dict[str, Any]) -> dict[str, Any]:
    """Draw a window hop by hop; of each hop, seconds and bytes, what was needed, and seconds of reading it alone."""
    import featstore
    from featstore.sampling.window import EpochWindow, Seeds
    from featstore.storage.rundir import DiskQuota, RunDirectory

    marks: list[tuple[float, int]] = []
    lock = threading.Lock()

    class Timed(EpochWindow):
        """Notes when a hop begins."""

        def _aim(self, hop: int, *args: Any) -> None:
            with lock:
                if hop == len(marks):
                    marks.append((time.perf_counter(), bytes_read_by_kernel()))
                    noted.topology.begin(hop)
            super()._aim(hop, *args)

    with featstore.open(job["dataset"], memory=job["memory"]) as g:
        if job["lists"]:
            g.cache_neighbors(job["lists"])
        noted = Noted(g)
        sampler = featstore.EpochSampler(g, job["fanouts"], seed=1)
        order = featstore.RandomBatches(g.node_data["seeds"], job["batch_size"], seed=3).epoch(0)
        n = min(len(order), job["batches"])
        least, useful = sampler.memory_bytes(n, job["batch_size"])
        n_bytes = max(least, min(useful, g.budget.available // 2))
        numbers = itertools.count()
        with g.budget.reserve("epoch samples", n_bytes), closing(RunDirectory(f"{job['folder']}/runs")) as runs:
            window = Timed(
                sampler.hops,
                noted,
                Seeds(order.seeds),
                0,
                0,
                n,
                n_bytes=n_bytes,
                n_workers=g.options.threads,
                path=lambda: runs.file(f"drawn-{next(numbers)}"),
                disk=DiskQuota(None),
                access="pass",  # the lists are counted
            )
            window.draw()
            marks.append((time.perf_counter(), bytes_read_by_kernel()))
            spilled = window.spilled_bytes
            window.close()
        found = []
        for hop, asked in enumerate(noted.topology.asked):
            needed, gaps = needed_bytes(g.topology, [nodes for nodes, _ in asked])
            (begin_s, begin), (end_s, end) = marks[hop : hop + 2]
            alone, worked = read_alone(g, asked)
            found.append(
                {
                    "seconds": end_s - begin_s,
                    "read": end - begin,
                    "needed": needed,
                    "gaps": gaps,
                    "alone": alone,
                    "worked": worked / g.options.threads,
                }
            )
        return {"hops": found, "spilled": spilled, "batches": n}


def read_alone(g: Any, asked: list[tuple[npt.NDArray[np.int64], int]]) -> tuple[float, float]:
    """Seconds of reading the lists that a hop has asked for, by as many threads, with no drawing; and the processor's."""
    drop_from_page_cache(Path(g.topology.path))

    def read(nodes: npt.NDArray[np.int64], block_bytes: int) -> int:
        return sum(len(block.ids) for block in g.topology.lists(nodes, block_bytes))

    begin, worked = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(g.options.threads) as threads:
        list(threads.map(lambda each: read(*each), asked))
    return time.perf_counter() - begin, time.process_time() - worked


def needed_bytes(topology: Any, asked: list[npt.NDArray[np.int64]]) -> tuple[int, int]:
    """Return the bytes of the pages, or chunks, that hold lists, each counted once; and of gaps that are read over."""
    if topology.kind == "chunked":
        return chunk_bytes(topology, asked), 0
    from featstore.topology.liststream import GAP_PAGES

    width, n_pages = topology.id_bytes, -(-topology.nbytes // PAGE_BYTES)
    needed, gaps = np.zeros(n_pages, bool), 0
    for nodes in asked:
        starts, degrees = topology.offsets(nodes)
        marks = pages_of(starts * width, (starts + degrees) * width, n_pages)
        needed |= marks
        between = np.diff(np.flatnonzero(marks)) - 1
        gaps += int(between[between <= GAP_PAGES].sum())
    return int(needed.sum()) * PAGE_BYTES, gaps * PAGE_BYTES


def chunk_bytes(topology: Any, asked: list[npt.NDArray[np.int64]]) -> int:
    """Bytes of the chunks that hold edges of nodes, and where their lists begin."""
    d = topology.directory
    marks = np.zeros(d.n_chunks + 1, np.int64)
    for nodes in asked:
        starts, degrees = topology.offsets(nodes)
        chosen, first = nodes[degrees > 0], starts[degrees > 0]
        last = first + degrees[degrees > 0] - 1
        np.add.at(marks, np.searchsorted(d.first_node[1:], chosen, side="right"), 1)
        np.add.at(marks, np.searchsorted(d.first_edge[1:], last, side="right") + 1, -1)
    needed = np.cumsum(marks)[:-1] > 0
    whole = int(needed.sum()) * d.chunk_words * topology.id_bytes
    end = d.n_chunks * d.chunk_words - topology.chunks.n_rows  # words that the last chunk lacks
    return whole - (max(0, end) * topology.id_bytes if needed[-1] else 0)


# -- figures -------------------------------------------------------------------------------------------------------------------


def hops(
    args: argparse.Namespace, report: Report, jobs: dict[str, dict[str, Any]], workloads: dict[str, list[int]], run: Run
) -> None:
    """Bytes of each hop beside those needed, and its seconds beside reading and sampling alone; on both forms."""
    for (form, job), (name, fanouts) in itertools.product(jobs.items(), workloads.items()):
        whole = {"lists": job["whole"], "memory": job["memory"] + job["whole"]}
        found: dict[str, list[dict[str, Any]]] = {"disk": [], "memory": []}
        sides = {
            "disk": lambda job=job, fanouts=fanouts, found=found: found["disk"].append(run("hops", {**job, "fanouts": fanouts})),
            "memory": lambda job=job, fanouts=fanouts, found=found, whole=whole: found["memory"].append(
                run("hops", {**job, "fanouts": fanouts, **whole})
            ),
        }
        alternate(args.runs, sides)
        assert not any(hop["needed"] for each in found["memory"] for hop in each["hops"]), "lists in memory were read"
        for hop in range(len(fanouts)):
            disk = [each["hops"][hop] for each in found["disk"]]
            memory = [each["hops"][hop] for each in found["memory"]]
            title = f"R22, {name}, {form}, hop {hop + 1}"
            report.figure(
                f"{title}, bytes read, without gaps that are read over",
                [float(each["read"] - each["gaps"]) for each in disk],
                "B",
                reference="pages with lists that a batch needs" if form == "csc" else "chunks with such lists",
                references=[float(max(1, each["needed"])) for each in disk],
                target="<= 1.02",
                gaps=disk[-1]["gaps"],
                read=disk[-1]["read"],
                spilled=found["disk"][-1]["spilled"],
            )
            seconds = [each["seconds"] for each in disk]
            pairs = list(zip(disk, memory, strict=True))
            report.figure(
                f"{title}, seconds",
                seconds,
                "s",
                reference="the longer of reading its lists and of the same hop with all lists in memory",
                references=[max(one["alone"], other["seconds"]) for one, other in pairs],
                target="<= 1.2",
                reading=[each["alone"] for each in disk],
                sampling=[each["seconds"] for each in memory],
                batches=found["disk"][-1]["batches"],
            )
            report.figure(
                f"{title}, seconds",
                seconds,
                "s",
                reference="the longer of reading its lists and of the processors' time of reading and of sampling",
                references=[max(one["alone"], one["worked"] + other["seconds"]) for one, other in pairs],
                processors=[each["worked"] for each in disk],
            )


def reading(args: argparse.Namespace, report: Report, jobs: dict[str, dict[str, Any]]) -> None:
    """Passes over all lists, with no drawing, beside the drive in sequence."""
    import featstore
    from featstore.topology.liststream import LIST_BYTES

    for form, job in jobs.items():
        with featstore.open(job["dataset"], memory=job["memory"]) as g:
            file, n = Path(g.topology.path), g.num_nodes
            size = file.stat().st_size

            def lists(n_threads: int, g: Any = g, file: Path = file, n: int = n, size: int = size) -> float:
                drop_from_page_cache(file)
                begin = time.perf_counter()

                def read(first: int) -> int:
                    nodes = np.arange(first, min(n, first + PIECE_NODES))
                    return sum(len(block.ids) for block in g.topology.lists(nodes, LIST_BYTES))

                with ThreadPoolExecutor(n_threads) as threads:
                    assert sum(threads.map(read, range(0, n, PIECE_NODES))) >= g.num_edges
                return size / (time.perf_counter() - begin)

            def blocks(g: Any = g, file: Path = file, size: int = size) -> float:
                drop_from_page_cache(file)
                begin = time.perf_counter()
                assert sum(len(block.ids) for block in g.topology.blocks()) == g.num_edges
                return size / (time.perf_counter() - begin)

            sides: dict[str, Callable[[], float]] = {
                "lists": lambda lists=lists, g=g: lists(g.options.threads),
                "lists, one thread": lambda lists=lists: lists(1),
                "blocks": blocks,
                "direct reads": lambda file=file: direct_rate(file),
            }
            if have_fio():
                sides["fio"] = lambda file=file: fio_scan_bandwidth(file)
            results = alternate(args.runs, sides)
            for what, target in (("lists", ">= 0.9"), ("lists, one thread", None), ("blocks", None)):
                for whose, title in (
                    ("fio", "fio, 1 MiB in sequence, at its best depth"),
                    ("direct reads", "direct reads of 1 MiB"),
                ):
                    report.figure(
                        f"R22, {form}, a pass over all {what}",
                        results[what],
                        "B/s",
                        reference=title,
                        references=results.get(whose),
                        target=target if whose == "fio" else None,
                        file_bytes=size,
                    )


def random_reads(args: argparse.Namespace, report: Report, dataset: Path, workloads: dict[str, list[int]]) -> None:
    """Random reads of 512 B beside those of 4 KiB: a second, and of batches' drawn positions at that rate."""
    import featstore
    from featstore.sampling.sampledbatches import Drawn

    with featstore.open(dataset, memory="4GiB") as g:
        file = Path(g.topology.path)
        try:
            direct_rate(file, BLOCKS[0], 1, 1)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            print(f"# the drive has no direct reads of {BLOCKS[0]} B")
            return
        n = 64 if args.tiny else RANDOM_READS
        sides: dict[str, Callable[[], float]] = {}
        for size in BLOCKS:
            sides[f"direct reads {size}"] = lambda size=size: direct_rate(file, size, READERS, n) / size
            if have_fio():
                sides[f"fio {size}"] = lambda size=size: fio_random_iops(file, n, block_bytes=size)
        rates = alternate(args.runs, sides)
        small, large = BLOCKS
        best = "fio" if have_fio() else "direct reads"
        for whose, by in {"direct reads": f"{READERS} threads", "fio": "fio, at its best depth"}.items():
            if f"{whose} {small}" in rates:
                report.figure(
                    f"random reads of {small} B, by {by}",
                    rates[f"{whose} {small}"],
                    "reads/s",
                    reference=f"of {large} B, by {by}",
                    references=rates[f"{whose} {large}"],
                )
        lists = Lists(g)
        for name, fanouts in workloads.items():
            sampler = featstore.NeighborSampler(g, fanouts, seed=1)
            order = Drawn(sampler, featstore.RandomBatches(g.node_data["seeds"], args.batch_size, seed=3)).epoch(0)
            n_batches = min(len(order), args.alone)
            moved = moved_bytes(lists, len(fanouts), order, n_batches)
            seconds = {
                size: [moved[f"blocks of {size}"] / size / rate / n_batches for rate in rates[f"{best} {size}"]]
                for size in BLOCKS
            }
            report.figure(
                f"R22, {name}, drawn positions in blocks of {small} B, each once a batch and hop, at the rate of {best}",
                seconds[small],
                "s a batch",
                reference=f"in blocks of {large} B",
                references=seconds[large],
                blocks={size: moved[f"blocks of {size}"] // size for size in BLOCKS},
                batches=n_batches,
            )
