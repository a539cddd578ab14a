"""Packed layouts on R22, host tier of 10 % of the rows: seconds of an epoch's data preparation after sampling, bytes, packing.

Figures: extents read against fio's sequential rate and by the kernel's count of bytes; streamed and frozen epochs against bounds
made of the same rows' copy in memory and their I/O at the drive's best rates, against ``superbatch``, and against one random read
a miss at fio's rate; batched packing, a whole layout as a loader makes it, against individual packing of it and against the
drive; rows of Belady-packed extents against static tiers; a static host tier with a disk too small for all extents. A rate of the
drive is the best that anything reached in the same run: fio at its best depth, or the library's own reader of extents. On-demand
epochs (``sieve``, ``tiers``) and ``superbatch`` run once, whole. Individual packing reads at the drive's random rate: ``--part``
batches, spread over the epoch, are packed and the rest counted by its rows.
Without fio, the figures against fio's rates have no ratio, and those that are made of them alone are left out.
``$FEATSTORE_R22`` names a folder that ``tools.r22`` filled.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tools.drive import SCAN_DEPTHS, fio_beside, fio_random_iops, fio_scan_bandwidth, have_fio
from benchmarks.tools.harness import PAGE_BYTES, Report, arguments, bytes_read_by_kernel, main, scratch
from benchmarks.tools.packing_copy import EpochCopy

SHARE = 0.1


def fio_write_bandwidth(path: Path, n_bytes: int, keep: bool = False) -> float:
    """Bytes a second of sequential writes to a file, over its blocks where there is one: 1 MiB, 16 in flight.

    The file is removed, unless ``keep`` is given.
    """
    command = ["fio", "--name=reference", f"--filename={path}", "--ioengine=io_uring", "--direct=1", "--thread", "--rw=write"]
    command += ["--bs=1M", "--iodepth=16", f"--size={max(1 << 20, n_bytes >> 20 << 20)}", "--output-format=json"]
    done = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if not keep:
        path.unlink()
    result = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write"]
    return float(result["io_bytes"]) / (float(result["runtime"]) / 1e3)


class Bench:
    """The workload, its samples, and what is measured of them."""

    def __init__(
        self, args: argparse.Namespace, report: Report, folder: Path, work: Any = None, batch_size: int | None = None
    ) -> None:
        import featstore
        from benchmarks.tools import r22

        self.args, self.report, self.folder = args, report, folder
        if work is None:
            source = Path(os.environ.get("FEATSTORE_R22", folder)) if not args.tiny else folder
            work = r22.scaled(source, args.scale)
        self.g = featstore.open(work.dataset(), memory=args.memory << 20)
        self.g.cache_neighbors(min(8 * work.num_nodes + 6 * work.n_edges, self.g.budget.available // 4))
        self.sampler = featstore.NeighborSampler(self.g, [10, 10, 10], seed=0)
        self.seeds = self.g.node_data["seeds"]
        self.batch_size = batch_size or r22.batch_size(args.scale)
        path = folder / "samples.pack"
        shutil.rmtree(path, ignore_errors=True)
        begin = time.perf_counter()
        self.pack = featstore.sample_offline(self.g, self.sampler, self.seeds, self.batch_size, path=path, progress=False)
        self.sampling_s = time.perf_counter() - begin
        self.n = len(self.pack)
        self.base = Path(self.g.features["x"].source.path)
        self.width = self.g.features["x"].row_bytes
        self.loader = featstore.Loader
        self.rows = int(self.pack.lengths.sum())

    def read_extents(self, layout: Any) -> tuple[float, float]:
        """Read all extents of a layout as a run does, into one output; bytes a second, and the kernel's bytes by missed rows'."""
        n_missed = layout.tables.n_packed
        out = np.zeros((int(n_missed.max()), self.width), np.uint8)
        before, begin = bytes_read_by_kernel(), time.perf_counter()
        source = layout.batches("x", np.arange(self.n), 32 << 20)
        for k in n_missed.tolist():
            if k:
                source.gather(np.arange(k, dtype=np.int32), out, None)
        seconds = time.perf_counter() - begin
        read = bytes_read_by_kernel() - before
        source.close()
        return source.stats.bytes_read / seconds, read / float(n_missed.sum() * self.width)

    def read_rate(self) -> float:
        """The drive's sequential read rate now: the best of fio on the base file, and the library's reader on extents."""
        layout = self.layout("belady")
        ours, _ = self.read_extents(layout)
        layout.close()
        return max(ours, fio_scan_bandwidth(self.base)) if have_fio() else ours

    def write_rate(self) -> float:
        """fio's sequential write rate now, to a new file."""
        return fio_write_bandwidth(self.folder / "fio", self.base.stat().st_size)

    def scan_and_write_s(self, read_rate: float, write_bytes: int) -> float:
        """The least seconds to read the base file and to write so many bytes over a file's blocks.

        One after the other, or both at once, which some drives do faster.
        """
        path, size = self.folder / "fio-over", self.base.stat().st_size
        fio_write_bandwidth(path, write_bytes, keep=True)  # its blocks, unless they are there
        write_rate = fio_write_bandwidth(path, write_bytes, keep=True)
        with ThreadPoolExecutor(1) as beside:
            reading = beside.submit(fio_scan_bandwidth, self.base, 10, SCAN_DEPTHS[-1:])
            wrote = fio_write_bandwidth(path, write_bytes)
            read = reading.result()
        return min(size / read_rate + write_bytes / write_rate, max(size / read, write_bytes / wrote))

    def copies(self) -> EpochCopy:
        """The epoch's rows as copies in memory: those that the Belady layout's cache serves, and those of its extents."""
        layout = self.layout("belady")
        missed = np.array(layout.tables.n_packed, np.int64)
        plans = (layout.tables.plan(b, self.pack.ids(b)) for b in range(self.n))
        admitted = [0 if plan.changes is None else len(plan.changes.in_rows) for plan in plans]
        layout.close()
        hits, capacity = self.pack.lengths - missed, int(SHARE * self.pack.num_nodes)
        return EpochCopy(hits, missed, np.array(admitted, np.int64), capacity, self.width)

    def all_in_memory_s(self, copies: EpochCopy, n_bytes: int) -> float:
        """Seconds to copy an epoch's rows and those that the cache admits, while fio reads so many bytes of extents."""
        layout = self.layout("belady")
        path = Path(layout.folder) / "extents.0.rows"
        layout.close()
        with fio_beside(path) as read:
            before, begin = read(), time.perf_counter()
            copied = copies.seconds_with_admissions()
            rate = (read() - before) / (time.perf_counter() - begin)
        return max(copied, n_bytes / rate)

    @contextmanager
    def opened(self, **options: Any) -> Iterator[Any]:
        """A loader; its cache goes with it, the pool stays warm, as it does from epoch to epoch of a training."""
        from featstore.strategies.registry import find_strategy

        name = options.pop("strategy")
        given: dict[str, Any] = {"features": "x", "labels": None}
        fields: dict[str, Any] = {"cache": SHARE}
        if name != "ondemand":
            fields["disk"] = 30 << 30
        if name != "packed":
            given |= {"sampler": self.sampler, "seeds": self.seeds, "batch_size": self.batch_size}
        if name in ("superbatch", "streamed"):
            fields |= {"run_dir": self.folder / "runs", "length": self.n}
        with self.loader(self.g, strategy=find_strategy(name)(**fields | options), **given) as loader:
            yield loader
        self.g.cache("x", 0)

    def run(self, loader: Any) -> dict[str, Any]:
        """Run an epoch of a loader without a model; what it took after sampling."""
        earlier = loader.stats()["seconds"]
        before = bytes_read_by_kernel()
        begin, busy = time.perf_counter(), sum(os.times()[:2])
        n = sum(len(batch.x) for batch in loader)
        seconds, busy = time.perf_counter() - begin, sum(os.times()[:2]) - busy
        read = bytes_read_by_kernel() - before
        stages = {name: s - earlier.get(name, 0.0) for name, s in loader.stats()["seconds"].items()}
        busy /= seconds * len(os.sched_getaffinity(0))
        return {"seconds": seconds - stages.get("sample", 0.0), "kernel_bytes": read, "stages": stages, "rows": n, "busy": busy}

    def epoch(self, **options: Any) -> dict[str, Any]:
        """Run the first epoch of a new loader."""
        with self.opened(**options) as loader:
            return self.run(loader)

    def superbatch_s(self) -> dict[str, Any]:
        """Seconds of a whole superbatch epoch after sampling; its first batches, which miss the most, would not do."""
        result = self.epoch(strategy="superbatch")
        assert result["rows"] == self.rows
        return {"seconds": result["seconds"], "stages": result["stages"]}

    def copied(self) -> Any:
        """A copy of the pack without its layouts."""
        import featstore

        path = self.folder / "copy.pack"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.pack.path, path, ignore=shutil.ignore_patterns("layout-*"))
        return featstore.Pack(path)

    def layout(self, policy: str) -> Any:
        """Make (once) and open the layout of a policy."""
        from featstore.pack.layout import Layout, find_layouts

        if policy not in {found.policy for found in find_layouts(self.pack)}:
            length = self.n if policy == "belady" else "auto"
            import featstore

            strategy = featstore.Packed(self.pack, cache=SHARE, policy=policy, length=length)
            self.loader(self.g, strategy=strategy, features="x", labels=None).close()
            self.g.cache("x", 0)
        options = next(found for found in find_layouts(self.pack) if found.policy == policy)
        return Layout(self.pack, options, self.g.reader)

    def missed(self, policy: str) -> np.ndarray:
        """Rows that each batch misses; those that the cache starts with last."""
        layout = self.layout(policy)
        try:
            return np.append(layout.tables.n_packed, len(layout.tables.fill_rows))
        finally:
            layout.close()


def extents(bench: Bench) -> None:
    """Read all extents as a run does, against fio on the same file."""
    layout = bench.layout("belady")
    path = Path(layout.folder) / "extents.0.rows"
    ours, theirs, amplification = [], [], []
    for _ in range(bench.args.runs):
        if have_fio():
            theirs.append(fio_scan_bandwidth(path))
        rate, read = bench.read_extents(layout)
        ours.append(rate)
        amplification.append(read)
    layout.close()
    reference = f"fio, sequential, best depth of {SCAN_DEPTHS}"
    bench.report.figure(
        "extents read", ours, "bytes/s", reference=reference, references=theirs or None, target=">= 0.9", verified=True
    )
    bench.report.figure("bytes of extents by the kernel", amplification, "of missed rows' bytes", target="<= 1.02")


def epochs(bench: Bench) -> None:
    """Streamed and frozen epochs against their bounds and against superbatch."""
    bench.layout("belady").close()
    missed = int(bench.missed("belady").sum())
    rows: dict[str, list[float]] = defaultdict(list)
    stages: dict[str, Any] = {}
    copies, by_copy = bench.copies(), []
    for name, options in (("streamed", {"strategy": "streamed"}), ("frozen", {"strategy": "packed", "pack": bench.pack})):
        with bench.opened(**options) as loader:
            first = bench.run(loader)  # of the loader: fresh files and pages
            assert first["rows"] == bench.rows
            bench.report.figure(f"R22 {name}, a loader's first epoch", first["seconds"], "s", stages=first["stages"])
            for _ in range(bench.args.runs):
                by_copy.append(copies.seconds())
                copy = min(by_copy[-1].values())  # a bound takes the best rate, whoever's
                rows["copy"].append(copy)
                read = bench.read_rate()
                extents_s = missed * bench.width / read
                rows["read rate"].append(read)
                if name == "frozen":
                    rows["frozen bound"].append(max(copy, extents_s))
                if have_fio():
                    iops = fio_random_iops(bench.base, min(200_000, bench.base.stat().st_size // 4096))
                    rows["random"].append(missed / iops)
                    if name == "frozen":
                        rows["all in memory"].append(bench.all_in_memory_s(copies, missed * bench.width))
                    if name == "streamed":
                        rows["streamed I/O"].append(bench.scan_and_write_s(read, missed * bench.width) + extents_s)
                found = bench.run(loader)
                rows[name].append(found["seconds"])
                rows[f"{name} busy"].append(found["busy"])
                stages[name] = found["stages"]
    superbatch = bench.superbatch_s()
    # Packing runs beside a part of planning, and reading beside the copy: the bound is the longer of what the processor must do,
    # planning where nothing is packed and the copy, and what the drive must do.
    rows["streamed bound"] = [
        max(superbatch["stages"]["plan"] + copy, io) for copy, io in zip(rows["copy"], rows["streamed I/O"], strict=False)
    ]
    more = {"copy_s": rows["copy"], "copies": by_copy, "read_bytes_per_s": rows["read rate"], "superbatch": superbatch}
    more |= {"streamed_io_s": rows["streamed I/O"], "missed": missed, "rows": bench.rows}
    bounds = {
        "streamed": "max(plan + copy, base read and extents written and read at the best rates of fio and the reader)",
        "frozen": "max(copy, extents read at the best sequential rate measured)",
    }
    for number, (name, times) in enumerate((("streamed", 12), ("frozen", 25))):
        random = rows["random"][number * bench.args.runs :][: bench.args.runs]
        bench.report.figure(
            f"R22 {name}, data preparation",
            rows[name],
            "s",
            reference=bounds[name],
            references=rows[f"{name} bound"] or None,
            target="<= 1.25",
            stages=stages[name],
            **more,
        )
        bench.report.figure(f"R22 {name}, processor time in all cores' time", rows[f"{name} busy"], "of it")
        bench.report.figure(
            f"R22 {name} against superbatch",
            [superbatch["seconds"] / s for s in rows[name]],
            "times faster",
            target=f">= {times}",
            superbatch_s=superbatch["seconds"],
        )
        if have_fio():
            bench.report.figure(
                f"R22 {name} against random reads",
                [them / s for them, s in zip(random, rows[name], strict=True)],
                "times faster",
                target=f">= {times}",
                random_s=random,
            )
    bench.report.figure(
        "R22 frozen against all that it moves",
        rows["frozen"],
        "s",
        reference="the copies and those of admitted rows, by plain calls, while fio reads the extents",
        references=rows["all in memory"] or None,
    )
    bench.report.figure(
        "R22 superbatch",
        superbatch["seconds"],
        "s",
        reference="a random read a miss at fio's best rate",
        references=rows["random"][-1:] or None,
    )


def sieve(bench: Bench) -> None:
    """Streamed and frozen epochs as ratios to a whole on-demand epoch under sieve, whose cache starts empty."""
    result = bench.epoch(strategy="ondemand", policy="sieve")
    assert result["rows"] == bench.rows
    ondemand = result["stages"]["gather"] + result["stages"].get("update", 0.0)
    for strategy, options in (("streamed", {}), ("packed", {"pack": bench.pack})):
        ours = bench.epoch(strategy=strategy, **options)["seconds"]
        bench.report.figure(
            f"R22 {strategy} against sieve", ours, "s", reference="sieve on demand, a whole epoch", ratio=ours / ondemand
        )


def individually(bench: Bench, layout: Any) -> tuple[float, float]:
    """Make what a layout is, each batch's extent by itself: its rows read at random, and written after each other.

    The same tables and checksums, as safe on the drive. Returns the seconds of the tables and of the file; the latter are those
    of batches spread over the epoch, of which the first ones miss the most, counted up to all by their rows.
    """
    from featstore.cache.base import get_policy
    from featstore.pack.makelayout import layout_sizes
    from featstore.pack.tiers import make_tables
    from featstore.storage.extents import KIND, PAGES
    from featstore.storage.rundir import DiskQuota
    from featstore.storage.writer import RowFileWriter

    folder, store = bench.folder / "individual", bench.g.features["x"]
    folder.mkdir()
    begin = time.perf_counter()
    sizes = layout_sizes(layout.options, [bench.width], bench.g.budget)
    make_tables(bench.pack, sizes, get_policy("belady"), lambda _: np.empty(0), bench.g.budget, str(folder), DiskQuota(None))
    tables_s = time.perf_counter() - begin
    part, done = np.unique(np.linspace(0, bench.n - 1, bench.args.part, dtype=np.int64)).tolist(), 0
    begin = time.perf_counter()
    with RowFileWriter(folder, "extents", PAGES, kind=KIND, dtype="uint8") as writer:
        for b in part:
            rows = layout.tables.packed(b, bench.pack.ids(b))
            found = store.take(rows.astype(np.int64)).numpy().view(np.uint8).reshape(-1)
            pages = np.zeros((-(-len(found) // PAGE_BYTES), PAGE_BYTES), np.uint8)
            pages.reshape(-1)[: len(found)] = found
            writer.write(pages)
            done += len(rows)
        writer.commit()
    rows_s = time.perf_counter() - begin
    shutil.rmtree(folder)
    return tables_s, rows_s * float(layout.tables.n_packed.sum()) / max(1, done)


def both_ways(bench: Bench) -> tuple[int, list[float], list[tuple[float, float]], list[float]]:
    """Pack a whole layout at once and batch by batch; return its bytes, both ways' seconds, and the drive's bound with fio."""
    layout = bench.layout("belady")
    whole = layout.disk_bytes
    batched, bound, alone = [], [], []
    for _ in range(bench.args.runs):
        if have_fio():
            bound.append(bench.base.stat().st_size / bench.read_rate() + whole / bench.write_rate())
        with bench.copied() as pack:
            with bench.opened(strategy="packed", pack=pack) as loader:
                batched.append(loader.stats()["seconds"]["pack"])
            shutil.rmtree(pack.path)
        alone.append(individually(bench, layout))
    layout.close()
    return whole, batched, alone, bound


def packing(bench: Bench) -> None:
    """Batched packing against individual packing and against one read of the base and one write of the layout.

    Both sides make a whole layout of samples that are there: tables, extents and their checksums, flushed to the drive. Batched
    is what a loader does for a pack that has none.
    """
    whole, batched, alone, bound = both_ways(bench)
    figure = bench.report.figure
    figure(
        "batched packing",
        batched,
        "s",
        reference="base read + layout written at the best rates of fio and the reader",
        references=bound or None,
        target="<= 1.5",
    )
    figure(
        "batched packing against individual",
        [sum(a) / b for a, b in zip(alone, batched, strict=True)],
        "times faster",
        target=">= 5",
        individual_s=[sum(a) for a in alone],
        tables_s=[a[0] for a in alone],
        disk_bytes=whole,
    )


def tiers(bench: Bench) -> None:
    """Batches that share rows on a small disk: seconds and bytes of an epoch, against an extent a batch and on demand.

    All with a host tier by frequency, filled before; bytes by the kernel's count.
    """
    options: dict[str, Any] = {"policy": "frequency"}
    ondemand = bench.epoch(strategy="ondemand", **options)
    assert ondemand["rows"] == bench.rows
    seconds = ondemand["stages"]["gather"] + ondemand["stages"].get("update", 0.0)
    n_bytes = ondemand["kernel_bytes"]
    full = bench.layout("frequency")
    disk = full.disk_bytes
    full.close()
    whole: dict[str, Any] = {}
    for fraction in (None, 0.75, 0.5):
        pack = bench.pack if fraction is None else bench.copied()
        try:
            size = 30 << 30 if fraction is None else int(fraction * disk)
            with bench.opened(strategy="packed", pack=pack, **options | {"disk": size}) as loader:
                made = loader.stats()["seconds"].get("pack", 0.0)
                bench.run(loader)  # fills the host tier
                found = [bench.run(loader) for _ in range(bench.args.runs)]
                hits = loader.stats()["hits"]
        finally:
            if pack is not bench.pack:
                pack.close()
                shutil.rmtree(pack.path)
        times, read = [run["seconds"] for run in found], found[0]["kernel_bytes"]
        whole = whole or {"seconds": statistics.median(times), "bytes": read}
        more = {"hits": hits, "made_s": made, "disk": size if fraction else disk}
        name = "frequency, extents of all rows" if fraction is None else f"frequency, {fraction:.0%} of that disk"
        figure = bench.report.figure
        figure(name, times, "s", reference="on demand", references=[seconds] * len(times), **more)
        figure(f"{name}: bytes read", read, "bytes", reference="on demand", ratio=read / n_bytes)
        if fraction is not None:
            figure(f"{name}, against extents", times, "s", references=[whole["seconds"]] * len(times), reference="all rows")
            figure(f"{name}: bytes against extents", read, "bytes", reference="all rows", ratio=read / whole["bytes"])


def rows_read(bench: Bench) -> None:
    """Rows of Belady-packed extents against those of static tiers, the cache's fill counted."""
    belady, static = (float(bench.missed(policy).sum()) for policy in ("belady", "frequency"))
    bench.report.figure(
        "rows read, Belady-packed",
        belady,
        "rows",
        reference="static tiers",
        ratio=belady / static,
        target="<= 0.85",
        static=static,
    )


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    with scratch(args, "packing") as folder:
        bench = Bench(args, report, folder)
        try:
            for name, figure in (
                ("extents", extents),
                ("epochs", epochs),
                ("packing", packing),
                ("rows", rows_read),
                ("sieve", sieve),
                ("tiers", tiers),
            ):
                if args.only in name:
                    figure(bench)
        finally:
            bench.pack.close()
            bench.g.close()


if __name__ == "__main__":
    options = arguments(__doc__ or "", scale=22, memory=3072, part=10)
    if options.tiny:
        options.scale, options.memory, options.part = 12, 128, 3
    main(run, options)
