"""R-GAT's graph at a scale of one's own: an epoch of a graph of several types, beside a memory map of the papers' rows.

The graph has the six types of nodes of MLPerf's R-GAT (IGB-heterogeneous) in their proportions, their relations in both
directions, and 1,024 float16 features a paper: with ``--papers 10000000`` 20 million nodes, 330 million edges and 20 GB. Memory
is in proportion, 16 GiB for those, and 2 GiB to create it. Sources are drawn so that few are in many lists.

Figures: seconds to create it, and the most resident memory; seconds of an epoch of ``streamed``, ``ondemand`` and ``auto``
(sampling included), and of the same batches whose rows come from a memory map read by 16 threads (tools.memmap). Each is a
process of its own within a memory control group, the page cache cold. All sides have the lists in memory. A row has its paper's
number in its first columns: a sample of each batch is checked. Runs over the memory map are cut after ``--seconds``, and their
second half stands for the rest.

``--only accuracy`` (``tools.rgat``) trains an R-GAT through featstore, and the same model over PyG's NeighborLoader in memory.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tools.harness import (
    BASE_BYTES,
    MARGIN_BYTES,
    Report,
    alternate,
    answer,
    arguments,
    bytes_read_by_kernel,
    main,
    reset_peak,
    run_child,
    scratch,
    status,
    timed_epoch,
    whole_epoch,
    within,
)

DIM = 1024
OF = 10_000_000  # papers, for 16 GiB
MEMORY = 16 << 30
CREATE_MEMORY = 2 << 30
LEAST_CREATE_MEMORY = 64 << 20
LISTS_FRACTION = 1 / 4  # of the memory, that featstore has for the lists if rows come from a memory map
# Nodes a paper; IGB-heterogeneous has 269,346,174 papers.
NODES = {"paper": 1.0, "author": 1.03, "fos": 0.00265, "institute": 0.0001, "journal": 0.00018, "conference": 0.000017}
# Edges a paper; each but the first in both directions.
EDGES = {
    ("paper", "cites", "paper"): 14.0,
    ("paper", "written_by", "author"): 4.0,
    ("paper", "topic", "fos"): 5.0,
    ("author", "affiliated_to", "institute"): 0.17,
    ("paper", "published", "journal"): 0.2,
    ("paper", "venue", "conference"): 0.15,
}
BLOCK = 1 << 17  # edges at a time
ROWS = 1 << 12  # papers at a time
TITLES = {"streamed": "streamed", "ondemand": "on demand", "auto": "auto", "memmap": "np.memmap, 16 threads"}


def edges_of(number: int, n_src: int, n_dst: int, n_edges: int, *, reverse: bool) -> Iterator[npt.NDArray[np.int64]]:
    """Yield edges ``[2, k]``: both ends skewed, ids spread; the same pairs, turned round, if ``reverse``."""
    for first in range(0, n_edges, BLOCK):
        rng = np.random.default_rng((number, first))
        k = min(BLOCK, n_edges - first)
        ends = []
        for n in (n_src, n_dst):
            rank = (n * rng.random(k) ** 2.5).astype(np.int64)
            ends.append(rank * 2654435761 % n)
        yield np.stack(ends[::-1] if reverse else ends)


def id_columns(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float16]:
    """The first two columns of rows: 14 bits of the id each, as the bits of small finite numbers."""
    return np.stack([ids & 0x3FFF, ids >> 14], axis=1).astype(np.uint16).view(np.float16)


def rows_of_papers(n: int) -> Iterator[npt.NDArray[np.float16]]:
    """Yield all rows in order."""
    base = np.random.default_rng(0).random((ROWS, DIM), np.float32).astype(np.float16)
    for first in range(0, n, len(base)):
        block = base[: min(len(base), n - first)].copy()
        block[:, :2] = id_columns(np.arange(first, first + len(block)))
        yield block


def make(job: dict[str, Any]) -> dict[str, Any]:
    """Make the dataset; return the seconds, and the most resident memory beyond what the import took."""
    import featstore

    papers = job["papers"]
    n = {kind: max(2, int(share * papers)) for kind, share in NODES.items()}
    x = ((papers, DIM), np.float16, rows_of_papers(papers))
    nodes = {kind: featstore.Nodes(count, {"x": x} if kind == "paper" else None) for kind, count in n.items()}
    edges: dict[Any, Any] = {}
    for number, ((src, relation, dst), share) in enumerate(EDGES.items()):
        n_edges = int(share * papers)
        edges[src, relation, dst] = edges_of(number, n[src], n[dst], n_edges, reverse=False)
        if src != dst:
            edges[dst, f"rev_{relation}", src] = edges_of(number, n[src], n[dst], n_edges, reverse=True)
    imported = status("VmRSS")
    reset_peak()
    begin = time.perf_counter()
    featstore.OutOfCoreGraph.create(job["dataset"], nodes=nodes, edges=edges, memory=job["memory"], progress=False).close()
    return {"seconds": time.perf_counter() - begin, "peak": status("VmHWM") - imported}


def memmap_of(path: Path, papers: int) -> Any:
    """Map the papers' rows, which lie behind the first page of their file, and read them by threads."""
    from benchmarks.tools.memmap import MemmapRows

    file = max(path.glob("node@*"), key=lambda each: each.stat().st_size)
    return MemmapRows(np.memmap(file, np.float16, "r", offset=4096, shape=(papers, DIM)))


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Create the dataset, or run an epoch, and say what it took."""
    if job["side"] == "create":
        return make(job)
    import torch

    import featstore

    papers, by_map = job["papers"], job["side"] == "memmap"
    mapped = memmap_of(Path(job["dataset"]), papers) if by_map else None

    def rows_of(batch: Any) -> torch.Tensor:
        ids = batch.input_ids["paper"]
        rows = batch.x["paper"] if mapped is None else mapped[ids]
        some = slice(None, None, max(1, len(ids) // 64))
        assert np.array_equal(rows[some, :2].numpy(), id_columns(ids[some].numpy())), "a row is another paper's"
        return rows.view(torch.float32)

    memory = int(job["memory"] * LISTS_FRACTION) if by_map else job["memory"]
    before = bytes_read_by_kernel()
    begin = time.perf_counter()
    with featstore.open(job["dataset"], memory=memory) as g:
        if job["side"] != "auto":  # which keeps lists in memory by itself
            g.cache_neighbors(job["memory"] // 8)
        sampler = featstore.NeighborSampler(g, job["fanouts"], seed=1)
        seeds = "paper", np.random.default_rng(1).permutation(papers)[: job["batches"] * job["batch_size"]]
        strategy = featstore.OnDemand(cache=None) if by_map else job["side"]
        more = {"features": [] if by_map else "x", "labels": None, "strategy": strategy}
        with featstore.Loader(g, sampler, seeds, job["batch_size"], **more) as loader:
            set_up = time.perf_counter() - begin
            epoch = timed_epoch(loader, rows_of, limit_s=job["seconds"] if by_map else 0)
            stats, n = loader.stats(), len(loader)
    costs = [set_up + mark["seconds"] for mark in epoch["marks"]]
    taken = stats["auto"]["taken"] if "auto" in stats else {}
    return {
        "seconds": whole_epoch(costs, n),
        "ran": [epoch["batches"], n],
        "rows": epoch["rows"],
        "read": bytes_read_by_kernel() - before,
        "stages": stats["seconds"],
        "taken": {"strategy": taken.get("strategy"), "policy": taken.get("policy")},
    }


def run(args: argparse.Namespace, report: Report) -> None:
    """Make the graph, and run its epochs in turn."""
    papers = 20_000 if args.tiny else args.papers
    memory = 256 << 20 if args.tiny else max(256 << 20, int(MEMORY * papers / OF))
    runs = args.runs
    names = [name for name in TITLES if args.only in name or name == "memmap"]
    with scratch(args, "types") as folder:
        if args.only in "accuracy":
            from benchmarks.tools.rgat import accuracy  # here, since it imports PyG, which children need not

            accuracy(args, report, folder)
        if args.only and args.only in "accuracy":
            return
        path = folder / f"rgat-{papers}"
        job = {"dataset": os.fspath(path), "drop": [os.fspath(path)], "papers": papers, "memory": memory}
        if not path.exists():
            budget = max(LEAST_CREATE_MEMORY, int(CREATE_MEMORY * papers / OF))
            made = run_child(__spec__.name, {**job, "side": "create", "memory": budget}, BASE_BYTES + budget + MARGIN_BYTES)
            report.figure("create R-GAT's shape", made["seconds"], "s", papers=papers, budget=budget)
            within(report, "create R-GAT's shape", [made], budget, papers=papers)
        job |= {"fanouts": [10, 5], "batch_size": 64 if args.tiny else 1024, "batches": 4 if args.tiny else args.batches}
        job["seconds"] = args.seconds
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in TITLES}

        def side(name: str) -> float:
            one = run_child(__spec__.name, {**job, "side": name}, BASE_BYTES + memory)
            found[name].append(one)
            return float(one["seconds"])

        results = alternate(runs, {name: lambda name=name: side(name) for name in names})  # type: ignore[misc]
        for name in names:
            last = found[name][-1]
            more = {key: last[key] for key in ("ran", "rows", "read", "taken", "stages")} | {"memory": memory, "papers": papers}
            title = f"an epoch of R-GAT's shape, {TITLES[name]}"
            if name == "memmap":
                report.figure(title, results[name], "s", **more)
                continue
            target = {"streamed": "<= 0.1", "ondemand": "<= 0.333"}.get(name)
            reference = "the same batches, rows of a memory map read by 16 threads"
            report.figure(title, results[name], "s", reference=reference, references=results["memmap"], target=target, **more)


if __name__ == "__main__":
    if not answer(child):
        main(run, arguments(__doc__ or "", papers=1_000_000, batches=200, seconds=120))
