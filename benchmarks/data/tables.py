"""Tables of edges and nodes, imported within a memory budget, beside pyarrow's own scan of the same files.

``edges``: CSV with ids that are text. ``nodes``: Parquet with fixed-size lists of float32. ``graph``: both by one import, so that
the ends of edges are looked up among the nodes. Each side runs in a process of its own, files out of the page cache;
``peak_bytes`` is the importer's most resident memory. What was stored is compared with files. ``engines``: encoding names by the
dataset's map, and by LMDB. ``--whole 1`` measures what the project promises: 50 M edges and 10 GB of features, in rows of 512
bytes, in a control group of 1 GiB, half of it the importer's. It takes 34 GB of disk, and root; ``--only edges`` 6 GB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

import featstore
from benchmarks.tools.harness import (
    GROUP_BYTES,
    Report,
    alternate,
    answer,
    arguments,
    bytes_read_by_kernel,
    drop_from_page_cache,
    main,
    run_child,
    scratch,
    status,
)
from featstore.adapters.datasets.tables import EdgeTable, NodeTable, import_tables

WIDTH = 128
BLOCK = 1 << 18
CHECKED = 100  # of so many batches one is looked up
NAMES_A_CALL = 10_000
WHOLE_EDGES, WHOLE_NODES, WHOLE_MIB = 50_000_000, 20_000_000, 512  # of --whole, in a group of GROUP_BYTES


def names_of(ids: Any) -> Any:
    """Names of about 20 bytes, which differ from the start."""
    return np.char.add("user-", np.char.mod("%014d", (ids * 2_654_435_761) % 10**14))


def write_edges(path: Path, n_edges: int, n_names: int) -> None:
    """A CSV file of edges between names, a tenth of them many."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(b"src,dst\n")
        for first in range(0, n_edges, BLOCK):
            k = min(BLOCK, n_edges - first)
            ends = (rng.random((2, k)) ** 3 * n_names).astype(np.int64)
            table = pa.table({"src": names_of(ends[0]), "dst": names_of(ends[1])})
            pa.csv.write_csv(table, file, pa.csv.WriteOptions(include_header=False, quoting_style="none"))


def write_nodes(path: Path, n_nodes: int) -> None:
    """A Parquet file of nodes with a feature."""
    rng = np.random.default_rng(1)
    schema = pa.schema({"id": pa.string(), "x": pa.list_(pa.float32(), WIDTH)})
    with pa.parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, n_nodes, BLOCK):
            k = min(BLOCK, n_nodes - first)
            rows = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(k * WIDTH, np.float32)), WIDTH)
            writer.write_table(pa.table({"id": names_of(np.arange(first, first + k)), "x": rows}, schema))


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Import, or scan, what the job names; return seconds, and most resident memory."""
    start = time.perf_counter()
    if job["what"] == "import edges":
        report = import_tables(
            job["out"], edges=EdgeTable(job["edges"], "src", "dst"), memory=job["memory"], overwrite=True, progress=False
        )
        n = report.edges_read
    elif job["what"] == "import nodes":
        nodes = {"user": NodeTable(job["nodes"], "id", {"x": "x"})}
        report = import_tables(job["out"], nodes, {}, memory=job["memory"], overwrite=True, progress=False)
        n = report.nodes["user"]
    elif job["what"] == "import graph":
        report = import_tables(
            job["out"],
            NodeTable(job["nodes"], "id", {"x": "x"}),
            EdgeTable(job["edges"], "src", "dst"),
            memory=job["memory"],
            overwrite=True,
            progress=False,
        )
        n = sum(report.nodes.values()) + report.edges_read
    else:
        n = 0
        if "edges" in job:
            with pa.csv.open_csv(job["edges"]) as reader:
                n += sum(len(batch) for batch in reader)
        if "nodes" in job:
            with pa.parquet.ParquetFile(job["nodes"]) as file:
                n += sum(len(batch) for batch in file.iter_batches())
    return {"seconds": time.perf_counter() - start, "peak_bytes": status("VmHWM"), "read_bytes": bytes_read_by_kernel(), "n": n}


def edges_file(args: argparse.Namespace, folder: Path) -> Path:
    """The edges' table; made at the first call."""
    n_edges, path = 20_000 if args.tiny else args.edges, folder / "edges.csv"
    if not path.exists():
        write_edges(path, n_edges, max(100, n_edges // 10))
    return path


def nodes_file(args: argparse.Namespace, folder: Path) -> Path:
    """The nodes' table, made at the first call; the ends of the edges are among them."""
    path = folder / "nodes.parquet"
    if not path.exists():
        write_nodes(path, 5_000 if args.tiny else args.nodes)
    return path


def measured(args: argparse.Namespace, report: Report, folder: Path, of: str, **files: Path) -> Path:
    """Alternate the import of the files and pyarrow's scan of them; return the dataset."""
    out, notes = folder / f"{of}-dataset", []
    sources = {name: os.fspath(path) for name, path in files.items()}
    job = {**sources, "drop": [*sources.values()], "out": os.fspath(out), "memory": args.memory_mib << 20}
    group = GROUP_BYTES if args.whole and not args.tiny else None

    def side(what: str) -> float:
        # pyarrow's scan of 10 GB of Parquet does not end in the group: it keeps what it reads ahead.
        found = run_child(__spec__.name, {**job, "what": f"{what} {of}"}, group if what == "import" else None)
        if what == "import":
            notes.append(found)
        return float(found["seconds"])

    results = alternate(args.runs, {what: (lambda what=what: side(what)) for what in ("import", "scan")})
    report.figure(
        f"{of} imported from {' and '.join(path.suffix[1:] for path in files.values())}",
        results["import"],
        "s",
        reference="pyarrow's scan of the same files",
        references=results["scan"],
        target="<= 2",
        rows=notes[-1]["n"],
        file_bytes=sum(path.stat().st_size for path in files.values()),
        memory=job["memory"],
        peak_bytes=max(note["peak_bytes"] for note in notes),
        group=group,
    )
    return out


def edges(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Edges from CSV."""
    source = edges_file(args, folder)
    out = measured(args, report, folder, "edges", edges=source)
    with featstore.open(out, memory="256MiB") as g:
        check_edges(g, source)


def check_edges(g: featstore.OutOfCoreGraph, source: Path) -> None:
    """Compare some edges with the file's, and count them."""
    n = 0
    with pa.csv.open_csv(source) as reader:
        for number, batch in enumerate(reader):
            n += len(batch)
            if number % CHECKED:
                continue
            batch = batch.slice(0, 1000)
            ends = [g.ids().encode(batch.column(name).to_pylist()).numpy() for name in ("src", "dst")]
            for src, dst in zip(*ends, strict=True):
                if src not in g.neighbors(int(dst)).numpy():
                    raise SystemExit(f"the edge {src} -> {dst} is not in the dataset")
    if n != g.num_edges:
        raise SystemExit(f"{g.num_edges} edges of {n}")


def nodes(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Features from Parquet."""
    source = nodes_file(args, folder)
    out = measured(args, report, folder, "nodes", nodes=source)
    with featstore.open(out, memory="256MiB") as g:
        check_rows(g["user"].features["x"], source)
    shutil.rmtree(out)


def check_rows(store: featstore.FeatureStore, source: Path) -> None:
    """Compare all rows with the file's."""
    first = 0
    with pa.parquet.ParquetFile(source) as file:
        for batch in file.iter_batches(BLOCK):
            rows = batch.column(1).flatten().to_numpy().reshape(-1, WIDTH)
            if not (store[first : first + len(rows)].numpy() == rows).all():
                raise SystemExit(f"rows from {first} on differ")
            first += len(rows)


def graph(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Both, by one import."""
    of_nodes, of_edges = nodes_file(args, folder), edges_file(args, folder)
    out = measured(args, report, folder, "graph", nodes=of_nodes, edges=of_edges)
    with featstore.open(out, memory="512MiB") as g:
        check_edges(g, of_edges)
        check_rows(g.features["x"], of_nodes)


def engines(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Names to ids by the dataset's map, and by an LMDB environment of the same names."""
    n_names, n_calls = (2_000, 3) if args.tiny else (args.names, 20)
    (folder / "lmdb").mkdir(exist_ok=True)
    table = folder / "names.parquet"
    with pa.parquet.ParquetWriter(table, pa.schema({"id": pa.string()})) as writer:
        for first in range(0, n_names, BLOCK):
            writer.write_table(pa.table({"id": names_of(np.arange(first, min(n_names, first + BLOCK)))}))
    start = time.perf_counter()
    import_tables(folder / "names", {"user": NodeTable(table, "id")}, {}, memory="1GiB", progress=False, overwrite=True)
    made_s = time.perf_counter() - start
    start = time.perf_counter()
    with lmdb.open(os.fspath(folder / "lmdb"), map_size=1 << 36, sync=False) as env:
        for first in range(0, n_names, BLOCK):
            block = names_of(np.arange(first, min(n_names, first + BLOCK)))
            pairs = sorted((name.encode(), (first + i).to_bytes(8, "little")) for i, name in enumerate(block.tolist()))
            with env.begin(write=True) as transaction, transaction.cursor() as cursor:
                cursor.putmulti(pairs)
        env.sync(True)
    lmdb_s = time.perf_counter() - start
    rng = np.random.default_rng(2)
    asked = [names_of(rng.integers(0, n_names, NAMES_A_CALL)).tolist() for _ in range(n_calls)]

    def by_map() -> float:
        drop_from_page_cache(folder / "names")
        with featstore.open(folder / "names", memory="256MiB") as g:
            ids, start = g.ids("user"), time.perf_counter()
            for names in asked:
                ids.encode(names)
            return n_calls * NAMES_A_CALL / (time.perf_counter() - start)

    def by_lmdb() -> float:
        drop_from_page_cache(folder / "lmdb")
        with lmdb.open(os.fspath(folder / "lmdb"), readonly=True, lock=False) as env:
            start = time.perf_counter()
            for names in asked:
                with env.begin() as transaction, transaction.cursor() as cursor:
                    found = dict(cursor.getmulti(sorted({name.encode() for name in names})))
                    [int.from_bytes(found[name.encode()], "little") for name in names]
            return n_calls * NAMES_A_CALL / (time.perf_counter() - start)

    results = alternate(args.runs, {"map": by_map, "lmdb": by_lmdb})
    sizes = {
        "map": sum(file.stat().st_size for file in (folder / "names").glob("ids@*")),
        "lmdb": (folder / "lmdb" / "data.mdb").stat().st_size,
    }
    report.figure(
        "names encoded, files out of the page cache",
        results["map"],
        "names/s",
        reference="LMDB, names sorted",
        references=results["lmdb"],
        names=n_names,
        bytes_a_name={name: round(size / n_names, 1) for name, size in sizes.items()},
        made_s={"map": round(made_s, 3), "lmdb": round(lmdb_s, 3)},
    )
    with featstore.open(folder / "names", memory="256MiB") as g:
        ids, rates = g.ids("user"), []
        for names in asked:
            found = ids.encode(names)
            start = time.perf_counter()
            if ids.decode(found) != names:
                raise SystemExit("names do not come back")
            rates.append(len(names) / (time.perf_counter() - start))
    report.figure("names decoded", statistics.median(rates), "names/s", names=n_names)


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    if args.whole:
        args.edges, args.nodes, args.memory_mib = WHOLE_EDGES, WHOLE_NODES, WHOLE_MIB
    with scratch(args, "tables") as folder:
        for group in (edges, nodes, graph) if args.whole else (edges, nodes, graph, engines):
            if args.only in group.__name__:
                group(args, report, folder)


if __name__ == "__main__":
    if not answer(child):
        main(run, arguments(__doc__ or "", edges=5_000_000, nodes=2_000_000, names=5_000_000, memory_mib=1024, whole=0))
