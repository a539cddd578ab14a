"""``featstore import`` of an OGB folder of ogbn-products' shape, made here in OGB's layout, in a control group of 1 GiB.

Figures of ``binary`` (``data.npz``, deflated) and ``csv`` (gzipped): seconds of the import beside a plain scan of the same files
in the same group, which unpacks every member, or has pyarrow parse every CSV file, and keeps nothing; the most resident memory of
the importing process, with what torch takes before it begins. Each run is a process of its own, with its files out of the page
cache. ``--nodes`` and ``--edges`` take another size. Takes 5 GB of disk.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tools.harness import GROUP_BYTES, Report, alternate, answer, arguments, main, run_child, scratch, status

NODES, EDGES, DIM = 2_449_029, 61_859_140, 100  # of ogbn-products
CLASSES = 47
STEP = 1 << 20  # rows generated at a time
FORMS = ("binary", "csv")


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Import a folder, or scan its files; say what it took."""
    if job["scan"]:
        start = time.perf_counter()
        {"binary": scan_archives, "csv": scan_csv}[job["form"]](Path(job["source"]))
        return {"seconds": time.perf_counter() - start, "cpu": time.process_time(), "peak": status("VmHWM")}
    from featstore.adapters.datasets import ogb

    before, cpu = status("VmHWM"), time.process_time()
    start = time.perf_counter()
    report = ogb(job["source"], job["path"], memory=job["memory"], progress=False, overwrite=True)
    seconds = time.perf_counter() - start
    cpu = time.process_time() - cpu
    return {"seconds": seconds, "cpu": cpu, "peak": status("VmHWM"), "before": before, "report": report.to_dict()}


def scan_archives(folder: Path) -> None:
    """Unpack every member of every archive."""
    for path in sorted(folder.rglob("*.npz")):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                with archive.open(info) as file:
                    while file.read(STEP):
                        pass


def scan_csv(folder: Path) -> None:
    """Have pyarrow parse every file, with the types that it finds."""
    import pyarrow
    import pyarrow.csv

    for path in sorted(folder.rglob("*.csv.gz")):
        with pyarrow.input_stream(os.fspath(path), compression="gzip") as stream:
            options = pyarrow.csv.ReadOptions(autogenerate_column_names=True)
            for _ in pyarrow.csv.open_csv(stream, read_options=options):
                pass


def rows_of(n: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Features with three decimals, as text of some length."""
    return (rng.integers(-2000, 2000, (n, DIM)) / 1000).astype(np.float32)


def make_binary(folder: Path, n: int, n_edges: int) -> None:
    """Write ``data.npz`` and ``node-label.npz``, deflated, array by array."""
    rng, raw = np.random.default_rng(0), folder / "raw"
    raw.mkdir(parents=True)

    def member(archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], dtype: str, blocks: Any) -> None:
        with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
            header = {"descr": dtype, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for block in blocks:
                file.write(np.ascontiguousarray(block).tobytes())

    def ids() -> Any:
        for _ in range(2):
            for first in range(0, n_edges, STEP):
                yield (n * rng.random(min(STEP, n_edges - first)) ** 2).astype(np.int64)

    with zipfile.ZipFile(raw / "data.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        member(archive, "edge_index", (2, n_edges), "<i8", ids())
        features = (rows_of(min(STEP, n - first), rng) for first in range(0, n, STEP))
        member(archive, "node_feat", (n, DIM), "<f4", features)
        for name, count in (("num_nodes_list", n), ("num_edges_list", n_edges)):
            member(archive, name, (1,), "<i8", [np.array([count])])
    np.savez_compressed(raw / "node-label.npz", node_label=rng.integers(0, CLASSES, (n, 1)))
    make_split(folder, n)


def make_csv(folder: Path, n: int, n_edges: int) -> None:
    """Write ``edge.csv.gz``, ``node-feat.csv.gz`` and the others."""
    rng, raw = np.random.default_rng(0), folder / "raw"
    raw.mkdir(parents=True)
    edges = ((n * rng.random((min(STEP, n_edges - first), 2)) ** 2).astype(np.int64) for first in range(0, n_edges, STEP))
    write_csv(raw / "edge.csv.gz", edges)
    write_csv(raw / "node-feat.csv.gz", (rows_of(min(STEP // 8, n - first), rng) for first in range(0, n, STEP // 8)))
    write_csv(raw / "node-label.csv.gz", [rng.integers(0, CLASSES, (n, 1))])
    for name, count in (("num-node-list", n), ("num-edge-list", n_edges)):
        write_csv(raw / f"{name}.csv.gz", [np.array([[count]])])
    make_split(folder, n)


def make_split(folder: Path, n: int) -> None:
    place = folder / "split" / "sales_ranking"
    place.mkdir(parents=True)
    ids = np.arange(n)[:, None]
    for name, part in zip(("train", "valid", "test"), np.split(ids, [n * 8 // 100, n * 10 // 100]), strict=True):
        write_csv(place / f"{name}.csv.gz", [part])


def write_csv(path: Path, blocks: Any) -> None:
    """Write blocks of rows without a header, gzipped."""
    import pyarrow
    import pyarrow.csv

    options = pyarrow.csv.WriteOptions(include_header=False)
    with gzip.open(path, "wb", compresslevel=1) as file:
        for block in blocks:
            columns = [pyarrow.array(np.ascontiguousarray(column)) for column in block.T]
            table = pyarrow.table(columns, names=[str(number) for number in range(len(columns))])
            pyarrow.csv.write_csv(table, file, write_options=options)


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    n, n_edges = (3_000, 40_000) if args.tiny else (args.nodes, args.edges)
    with scratch(args, "import") as folder:
        for form in FORMS:
            if args.only not in form:
                continue
            source = folder / form
            if not source.exists():
                {"binary": make_binary, "csv": make_csv}[form](folder / "new", n, n_edges)
                os.rename(folder / "new", source)
            path = folder / f"{form}-dataset"
            common = {"source": os.fspath(source), "drop": [os.fspath(source)], "form": form, "path": os.fspath(path)}
            found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}

            def once(job: dict[str, Any], results: list[dict[str, Any]]) -> float:
                results.append(run_child(__spec__.name, job, None if args.tiny else GROUP_BYTES))
                return float(results[-1]["seconds"])

            jobs = {scan: {**common, "scan": scan, "memory": f"{args.memory_mib}MiB"} for scan in found}
            sides = {name: partial(once, jobs[scan], found[scan]) for name, scan in (("import", False), ("scan", True))}
            seconds = alternate(args.runs, sides)
            last, bytes_in = found[False][-1], sum(each.stat().st_size for each in source.rglob("*") if each.is_file())
            report.figure(
                f"import of ogbn-products' shape, {form}",
                seconds["import"],
                "s",
                reference="a plain scan of the same files: unpacked"
                if form == "binary"
                else "pyarrow's own scan of the same files",
                references=seconds["scan"],
                nodes=last["report"]["nodes"]["_"],
                edges=last["report"]["edges"]["_,_,_"],
                processor_s=[each["cpu"] for each in found[False]],
                processor_s_of_scan=[each["cpu"] for each in found[True]],
                read_bytes=bytes_in,
                written_bytes=sum(each.stat().st_size for each in path.rglob("*") if each.is_file()),
            )
            report.figure(
                f"import of ogbn-products' shape, {form}: most resident memory",
                [float(each["peak"]) for each in found[False]],
                "B",
                memory=args.memory_mib << 20,
                before=last["before"],
                of_scan=found[True][-1]["peak"],
                group=None if args.tiny else GROUP_BYTES,
            )
            shutil.rmtree(path)


if __name__ == "__main__":
    if not answer(child):
        main(run, arguments(__doc__ or "", nodes=NODES, edges=EDGES, memory_mib=512))
