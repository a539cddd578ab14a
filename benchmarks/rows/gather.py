"""Gathers: cold against fio, hot against torch, in one run each.

``python -m benchmarks.rows.gather`` needs about 9 GB of scratch, and fio for the ratios of cold gathers. ``--only hot`` needs
neither.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch

import featstore
from benchmarks.tools.drive import RANDOM_DEPTHS, direct_rate, fio_random_iops, fio_scan_bandwidth, have_fio
from benchmarks.tools.harness import (
    PAGE_BYTES,
    Report,
    alternate,
    arguments,
    bytes_read_by_kernel,
    drop_from_page_cache,
    main,
    scratch,
)

GROUPS = ("cold", "scan", "blocks", "gaps", "widths", "backends", "verify", "hot", "few")
SMALL_BYTES = 200_000_000  # of a cache that fits the last-level cache of some processors
GAPS_KIB = (0, 8, 16, 24, 256)  # the last is a scan where rows are dense


def blocks_of_rows(n_rows: int, row_bytes: int, block_rows: int = 1 << 15) -> Iterator[np.ndarray]:
    """Yield uint8 rows that depend on the row number, without drawing every byte."""
    pattern = np.random.default_rng(1).integers(0, 256, (block_rows, row_bytes), dtype=np.uint8)
    for first in range(0, n_rows, block_rows):
        block = pattern[: min(block_rows, n_rows - first)]
        block[:, : min(8, row_bytes)] = np.arange(first, first + len(block)).view(np.uint8).reshape(-1, 8)[:, : min(8, row_bytes)]
        yield block


def make(folder: Path, n_rows: int, row_bytes: int) -> Path:
    """Create (once) a dataset of ``n_rows`` nodes without edges, whose field ``x`` has rows of ``row_bytes`` bytes."""
    path = folder / f"{n_rows}x{row_bytes}"
    if not path.exists():
        indptr, indices = np.zeros(n_rows + 1, np.int64), np.empty(0, np.int64)
        rows = ((n_rows, row_bytes), np.uint8, blocks_of_rows(n_rows, row_bytes))
        featstore.OutOfCoreGraph.create(path, indptr, indices, features={"x": rows}, progress=False).close()
        drop_from_page_cache(path)
    return path


def data_file(path: Path) -> Path:
    """The file of the dataset's features: its largest."""
    return max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


class Gather:
    """Timed gathers of freshly drawn distinct rows from one open store."""

    def __init__(self, store: featstore.FeatureStore, n_ids: int, seed: int, coalesce_gap: int | None) -> None:
        self.store = store
        self.rng = np.random.default_rng(seed)
        self.n_ids = n_ids
        self.gap = coalesce_gap
        self.out = torch.empty((n_ids, *store.shape[1:]), dtype=store.dtype)
        self.bytes_read: list[float] = []
        self.n_blocks: list[float] = []
        self.seconds: list[float] = []

    def __call__(self) -> float:
        """Gather; return the distinct 4 KiB blocks that the rows touch, a second."""
        n_rows, row_bytes = len(self.store), self.store.nbytes // len(self.store)
        ids = self.rng.choice(n_rows, self.n_ids, replace=False)
        before, start = bytes_read_by_kernel(), time.perf_counter()
        self.store.take(torch.from_numpy(ids), out=self.out, coalesce_gap=self.gap)
        self.seconds.append(time.perf_counter() - start)
        self.bytes_read.append(bytes_read_by_kernel() - before)
        # The first bytes of a row are its number: a gather that lied would show.
        width = min(8, row_bytes)
        wanted = ids.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]
        assert np.array_equal(self.out[:, :width].numpy(), wanted)
        self.n_blocks.append(distinct_blocks(ids, row_bytes))
        return self.n_blocks[-1] / self.seconds[-1]


def distinct_blocks(ids: np.ndarray, row_bytes: int) -> int:
    """Distinct 4 KiB blocks that a layout without needless straddling must touch for these rows."""
    if row_bytes <= PAGE_BYTES:
        return len(np.unique(ids // (PAGE_BYTES // row_bytes)))
    if row_bytes % PAGE_BYTES:
        return len(ids) * -(-row_bytes // PAGE_BYTES)
    return len(ids) * (row_bytes // PAGE_BYTES)


def cold(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Random rows of 512 B: blocks a second against fio's random 4 KiB reads of the same file, and the bytes read.

    fio runs with as many reads in flight as the reader, for which the project promises something, and at its own best depth.
    """
    n_rows, n_ids = (20_000, 500) if args.tiny else (args.rows, 50_000)
    path = make(folder, n_rows, 512)
    with featstore.open(path, memory="512MiB") as g:
        gather = Gather(g.features["x"], n_ids, 2, coalesce_gap=0)
        depth = g.reader.options.queue_depth
        depths = sorted({depth, *RANDOM_DEPTHS}) if have_fio() else []
        sides: dict[str, Callable[[], float]] = {"ours": gather}
        sides |= {f"fio {each}": partial(fio_random_iops, data_file(path), 2 * n_ids, (each,)) for each in depths}
        results = alternate(max(args.runs, 7), sides, warm_up=1)
        note = {"backend": g.features["x"].stats()["backend"], "depth": depth}
    rates = {each: results.get(f"fio {each}") for each in (depth, *depths)}
    best = max(depths, key=lambda each: statistics.median(results[f"fio {each}"]), default=depth)
    for of_fio, target in ((f"the same depth, {depth}", ">= 0.95"), (f"its best depth, {best}", None))[: 2 if depths else 1]:
        report.figure(
            "cold gather, 512 B rows",
            results["ours"],
            "blocks/s",
            reference=f"fio randread 4 KiB, io_uring, O_DIRECT, at {of_fio}",
            references=rates[depth if target else best],
            target=target,
            **note,
        )
    minimum = [n * PAGE_BYTES for n in gather.n_blocks]
    report.figure(
        "cold gather, bytes read",
        gather.bytes_read,
        "bytes",
        reference="distinct 4 KiB blocks",
        references=minimum,
        target="<= 1.02",
    )


def scan(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Many rows with default coalescing: time against the lesser of fio's random reads and fio's scan."""
    n_rows, n_ids = (20_000, 8_000) if args.tiny else (args.rows, 200_000)
    path = make(folder, n_rows, 512)
    file = data_file(path)
    with featstore.open(path, memory="512MiB") as g:
        gather = Gather(g.features["x"], n_ids, 3, coalesce_gap=None)

        def seconds() -> float:
            gather()
            return gather.seconds[-1]

        def best() -> float:
            random_s = gather.n_blocks[-1] / fio_random_iops(file, n_ids)
            return min(random_s, file.stat().st_size / fio_scan_bandwidth(file))

        sides = {"ours": seconds, "fio": best} if have_fio() else {"ours": seconds}
        results = alternate(args.runs, sides, warm_up=1)
    report.figure(
        "gather of 200,000 rows, default coalescing",
        results["ours"],
        "s",
        reference="lesser of random reads and a scan, by fio, each at its best depth",
        references=results.get("fio"),
        target="<= 1.1",
        bytes_read=gather.bytes_read,
    )


def blocks(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """All rows in order by ``store.blocks()``: bytes a second against direct reads and fio's scan, and the bytes read."""
    n_rows = 20_000 if args.tiny else args.rows
    path = make(folder, n_rows, 512)
    file = data_file(path)
    read: list[float] = []
    with featstore.open(path, memory="512MiB") as g:
        store = g.features["x"]

        def ours(rows: int | None) -> float:
            before, start = bytes_read_by_kernel(), time.perf_counter()
            done = 0
            for first, block in store.blocks(rows):
                assert int(block[0, :8].numpy().view("<i8")[0]) == first == done
                done += len(block)
            seconds = time.perf_counter() - start
            assert done == n_rows
            read.append(bytes_read_by_kernel() - before)
            return store.nbytes / seconds

        sides = {"blocks()": partial(ours, None), "blocks(rows=1000)": partial(ours, 1000), "direct": partial(direct_rate, file)}
        if have_fio():
            sides["fio"] = partial(fio_scan_bandwidth, file)
        results = alternate(args.runs, sides, warm_up=1)
    direct, fio = "direct reads of 1 MiB by 4 threads", "fio's scan, at its best depth"
    for name in ("blocks()", "blocks(rows=1000)"):
        figure = partial(report.figure, f"{name}, 512 B rows", results[name], "bytes/s")
        figure(reference=direct, references=results["direct"], target=">= 0.95")
        figure(reference=fio, references=results.get("fio"))
    size = [float(n_rows * 512)] * len(read)
    report.figure("blocks(), bytes read", read, "bytes", reference="bytes of the rows", references=size, target="<= 1.02")


def gaps(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Rows ever denser, over gaps of several sizes: seconds against those with the default gap, and fio's scan of the file."""
    n_rows, counts = (20_000, (2_000,)) if args.tiny else (args.rows, (50_000, 100_000, 200_000, 400_000))
    path = make(folder, n_rows, 512)
    file = data_file(path)
    with featstore.open(path, memory="512MiB") as g:
        store = g.features["x"]
        for n_ids in counts:
            gather = Gather(store, n_ids, 4, coalesce_gap=None)

            def seconds(gap: int | None, gather: Gather = gather) -> float:
                gather.gap = gap
                gather()
                return gather.seconds[-1]

            sides: dict[str, Callable[[], float]] = {"default": partial(seconds, None)}
            sides |= {f"{gap} KiB": partial(seconds, gap << 10) for gap in GAPS_KIB}
            if have_fio():
                sides["fio's scan"] = lambda: file.stat().st_size / fio_scan_bandwidth(file, 2)
            seconds(None)  # measures the drive
            drive = g.reader.drive
            results = alternate(args.runs, sides)
            default = results.pop("default")
            for name, series in results.items():
                report.figure(
                    f"{n_ids:,} rows, {name}",
                    series,
                    "s",
                    reference="the default gap",
                    references=default,
                    default_gap=None if drive is None else drive.gap_bytes,
                )


def widths(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Rows that do not divide a page: blocks read against the blocks that they must touch."""
    for row_bytes in (400, 3072, 5732):
        n_rows, n_ids = (5_000, 300) if args.tiny else (min(args.rows, 2_000_000_000 // row_bytes), 20_000)
        with featstore.open(make(folder, n_rows, row_bytes), memory="512MiB") as g:
            gather = Gather(g.features["x"], n_ids, row_bytes, coalesce_gap=0)
            alternate(args.runs, {"ours": gather}, warm_up=1)
        minimum = [n * PAGE_BYTES for n in gather.n_blocks]
        report.figure(
            f"blocks read, {row_bytes} B rows",
            [n / PAGE_BYTES for n in gather.bytes_read],
            "blocks",
            reference="blocks that the rows must touch",
            references=[n / PAGE_BYTES for n in minimum],
            target="<= 1.02",
        )


def pair(args: argparse.Namespace, folder: Path, **options: str) -> dict[str, list[float]]:
    """Blocks a second of random 512 B rows: ``default`` options of ``open``, and ``other`` with these."""
    n_rows, n_ids = (20_000, 500) if args.tiny else (args.rows, 50_000)
    path = make(folder, n_rows, 512)
    with featstore.open(path, memory="512MiB") as g, featstore.open(path, memory="512MiB", **options) as other:
        sides = {"default": Gather(g.features["x"], n_ids, 4, 0), "other": Gather(other.features["x"], n_ids, 4, 0)}
        return alternate(max(args.runs, 5), sides, warm_up=1)


def backends(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """The pread pool against the ring."""
    results = pair(args, folder, backend="pread")
    report.figure(
        "cold gather, backend='pread'",
        results["other"],
        "blocks/s",
        reference="backend='io_uring'",
        references=results["default"],
        target=">= 0.8",
    )


def verify(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Checksums on every read against none."""
    results = pair(args, folder, verify="off")
    report.figure(
        "cold gather, verify='always'",
        results["default"],
        "blocks/s",
        reference="verify='off'",
        references=results["other"],
        target=">= 0.9",
    )


def hot(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Rows in the host cache: ``take(out=)`` against ``torch.index_select(out=)``, ``store[ids]`` against ``tensor[ids]``."""
    for row_bytes, target in ((512, ">= 3"), (4096, ">= 2")):
        hot_width(args, report, folder, row_bytes, target)
        hot_small(args, report, folder, row_bytes)


def hot_width(args: argparse.Namespace, report: Report, folder: Path, row_bytes: int, target: str) -> None:
    """The hot figures at one row width."""
    n_rows = 4_000 if args.tiny else (1 << 30) // row_bytes
    n_ids = 1_000 if args.tiny else (1 << 27) // row_bytes
    dim = row_bytes // 4
    rng = np.random.default_rng(5)
    # torch allocates ordinary pages; NumPy asks for huge ones, which help torch's gather too: both are measured.
    huge = torch.from_numpy(rng.standard_normal((n_rows, dim), dtype=np.float32))
    x = torch.empty_like(huge).copy_(huge)
    path = folder / f"hot-{row_bytes}"
    indptr, indices = np.zeros(n_rows + 1, np.int64), np.empty(0, np.int64)
    featstore.OutOfCoreGraph.create(path, indptr, indices, features={"x": x.numpy()}, progress=False, overwrite=True).close()
    ids = itertools.cycle([torch.from_numpy(rng.integers(0, n_rows, n_ids)) for _ in range(8)])
    out_ours, out_theirs = torch.empty(n_ids, dim), torch.empty(n_ids, dim)
    with featstore.open(path, memory=2 * x.nbytes + (1 << 28)) as g:
        g.cache("x", budget=x.nbytes + (64 << 20), policy="random")
        store = g.features["x"]
        check = next(ids)
        assert torch.equal(store[check], x[check])

        def rate(gather: Callable[[torch.Tensor], object]) -> float:
            rows = next(ids)
            start = time.perf_counter()
            gather(rows)
            return n_ids / (time.perf_counter() - start)

        with_out: dict[str, Callable[[], float]] = {
            "ours": lambda: rate(lambda rows: store.take(rows, out=out_ours)),
            "torch": lambda: rate(lambda rows: torch.index_select(x, 0, rows, out=out_theirs)),
            "huge": lambda: rate(lambda rows: torch.index_select(huge, 0, rows, out=out_theirs)),
        }
        fresh: dict[str, Callable[[], float]] = {"ours": lambda: rate(store.__getitem__), "torch": lambda: rate(x.__getitem__)}
        results = alternate(max(args.runs, 9), with_out, warm_up=2)
        name, note = f"hot take(out=), {row_bytes} B rows", {"threads": torch.get_num_threads()}
        reference = "torch.index_select(out=)"
        report.figure(name, results["ours"], "rows/s", reference=reference, references=results["torch"], target=">= 1.0", **note)
        reference += " of a tensor on huge pages"
        report.figure(name, results["ours"], "rows/s", reference=reference, references=results["huge"], **note)
        results = alternate(max(args.runs, 9), fresh, warm_up=2)
        name, reference = f"hot store[ids], {row_bytes} B rows", "tensor[ids]"
        report.figure(name, results["ours"], "rows/s", reference=reference, references=results["torch"], target=target, **note)


def hot_small(args: argparse.Namespace, report: Report, folder: Path, row_bytes: int) -> None:
    """A cache that the last-level cache of some processors holds, where one copying thread and all differ most."""
    n_rows, n_ids, dim = (
        (4_000, 1_000, row_bytes // 4) if args.tiny else (SMALL_BYTES // row_bytes, (1 << 27) // row_bytes, row_bytes // 4)
    )
    rng = np.random.default_rng(6)
    x = torch.empty(n_rows, dim).copy_(torch.from_numpy(rng.standard_normal((n_rows, dim), dtype=np.float32)))
    path = folder / f"hot-small-{row_bytes}"
    indptr, indices = np.zeros(n_rows + 1, np.int64), np.empty(0, np.int64)
    featstore.OutOfCoreGraph.create(path, indptr, indices, features={"x": x.numpy()}, progress=False, overwrite=True).close()
    ids = itertools.cycle([torch.from_numpy(rng.integers(0, n_rows, n_ids)) for _ in range(8)])
    out_ours, out_theirs = torch.empty(n_ids, dim), torch.empty(n_ids, dim)
    n_torch = torch.get_num_threads()
    with ExitStack() as stack:
        sides: dict[str, Callable[[], float]] = {}
        counts = list(dict.fromkeys((1, len(os.sched_getaffinity(0)))))
        for n_threads in counts:
            g = stack.enter_context(featstore.open(path, memory=2 * x.nbytes + (1 << 28), threads=n_threads))
            g.cache("x", budget=x.nbytes + (64 << 20), policy="random")
            store = g.features["x"]
            check = next(ids)
            assert torch.equal(store.take(check, out=out_ours), x[check])

            def ours(store: featstore.FeatureStore = store) -> float:
                rows = next(ids)
                start = time.perf_counter()
                store.take(rows, out=out_ours)
                return n_ids / (time.perf_counter() - start)

            def theirs(n_threads: int = n_threads) -> float:
                rows = next(ids)
                torch.set_num_threads(n_threads)
                try:
                    start = time.perf_counter()
                    torch.index_select(x, 0, rows, out=out_theirs)
                    return n_ids / (time.perf_counter() - start)
                finally:
                    torch.set_num_threads(n_torch)

            sides |= {f"ours {n_threads}": ours, f"torch {n_threads}": theirs}
        results = alternate(max(args.runs, 9), sides, warm_up=2)
    for n_threads in counts:
        report.figure(
            f"hot take(out=), {row_bytes} B rows, {x.nbytes / 1e6:.0f} MB cached, {n_threads} thread{'s' * (n_threads > 1)}",
            results[f"ours {n_threads}"],
            "rows/s",
            reference="torch.index_select(out=), as many threads",
            references=results[f"torch {n_threads}"],
            target=">= 1.0",
        )


def few(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """``store[ids]`` of few rows: microseconds a call, from a static cache, from an online one, and from the drive."""
    n_rows, row_bytes = (4_000, 512) if args.tiny else (1_000_000, 512)
    path = make(folder, n_rows, row_bytes)
    x = torch.from_numpy(np.concatenate([block.copy() for block in blocks_of_rows(n_rows, row_bytes)]))
    rng = np.random.default_rng(7)
    pages = mmap.mmap(-1, PAGE_BYTES)
    with ExitStack() as stack:
        stores = {}
        for kind, policy in (("static cache", "degree"), ("online cache", "sieve"), ("drive", None)):
            g = stack.enter_context(featstore.open(path, memory=2 * n_rows * row_bytes + (1 << 28)))
            if policy is not None:
                g.cache("x", budget=n_rows * row_bytes + (96 << 20), policy=policy)
                g.features["x"][:]  # an online cache begins empty
            stores[kind] = g.features["x"]
        direct = os.open(data_file(path), os.O_RDONLY | os.O_DIRECT)
        stack.callback(os.close, direct)

        def one_page(ids: torch.Tensor) -> None:
            for row in ids.tolist():
                os.preadv(direct, [pages], PAGE_BYTES + row * row_bytes // PAGE_BYTES * PAGE_BYTES)

        for n_ids, n_calls in ((1, 2_000), (100, 500), (10_000, 20)):
            calls = [torch.from_numpy(rng.integers(0, n_rows, n_ids)) for _ in range(max(2, n_calls // (50 if args.tiny else 1)))]
            assert all(torch.equal(store[calls[0]], x[calls[0]]) for store in stores.values())

            def microseconds(gather: Callable[[torch.Tensor], object], calls: list[torch.Tensor] = calls) -> float:
                start = time.perf_counter()
                for ids in calls:
                    gather(ids)
                return (time.perf_counter() - start) / len(calls) * 1e6

            sides = {kind: partial(microseconds, store.__getitem__) for kind, store in stores.items()}
            sides |= {"tensor": partial(microseconds, x.__getitem__), "page": partial(microseconds, one_page)}
            results = alternate(max(args.runs, 5), sides, warm_up=1)
            for kind in stores:
                on_drive = kind == "drive"
                report.figure(
                    f"store[ids] of {n_ids} rows, {kind}",
                    results[kind],
                    "us",
                    reference="a direct read of a page for each, one after the other" if on_drive else "tensor[ids]",
                    references=results["page" if on_drive else "tensor"],
                )


def run(args: argparse.Namespace, report: Report) -> None:
    """Run the groups that ``--only`` names."""
    with scratch(args, "gather") as folder:
        for name in GROUPS:
            if args.only in name:
                globals()[name](args, report, folder)


if __name__ == "__main__":
    parsed = arguments(__doc__ or "", rows=8_000_000)
    main(run, parsed)
