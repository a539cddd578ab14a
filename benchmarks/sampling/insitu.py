"""Sampling an epoch at a time, R22 with a twentieth of its neighbour lists in memory (in-situ sampling, DaMoN 2024).

``--only`` takes a group of figures:

- ``epochs``: seconds of an epoch's samples, written to a file, by :class:`featstore.EpochSampler` from CSC and from chunks,
  beside those of :class:`featstore.NeighborSampler` in the same memory and with all lists in memory;
- ``hops``: bytes of each hop by the kernel's count, beside those of the pages or chunks that hold needed lists; and its seconds,
  beside the longer of reading the same lists alone and of the same hop with all lists in memory;
- ``reading``: passes over all lists beside fio in sequence;
- ``random``: the drive's random reads of 512 B beside those of 4 KiB, and what drawn positions of batches take at either rate;
- ``waits``: how long a loop that computes for as long as sampling takes waits in its second epoch;
- ``r26``: 60 batches of R26 (67 M nodes, 1.01 G edges) in 4 GiB, what is held of the offsets, and a streamed epoch of a loader
  with either sampler. It takes 50 GB of disk; ``$FEATSTORE_R22`` may name a folder where sizes.growth has left R26;
- ``huge``: 2**28 nodes whose offsets take 2 GiB, created of streams, sampled and trained in 1 GiB. It takes 4 GB of disk.

The paper's own table and figure are drawn by ``python -m benchmarks.papers insitu``. Helpers lie in ``tools``.

Each timed run of a sampler is a process of its own and starts with a cold page cache; the sides take turns. ``hops`` notes hops
inside the window that draws, so it is tied to the library's inside.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tools.harness import Report, alternate, answer, arguments, bytes_read_by_kernel, main, run_child, scratch, status
from benchmarks.tools.insitu_large import CHILDREN as LARGE_CHILDREN
from benchmarks.tools.insitu_large import huge, r26
from benchmarks.tools.insitu_reads import hops, hops_child, random_reads, reading

FANOUTS = {"25,10": [25, 10], "20,15,10": [20, 15, 10]}
SIZES = {
    "batches": 200,
    "batch_size": 1000,
    "alone": 40,
    "least_mib": 64,
    "chunk_kib": 1024,
    "huge_scale": 28,
    "huge_mib": 1024,
}
CACHED = 20  # a neighbour list in so many is in memory, by bytes


# -- in a process of its own ---------------------------------------------------------------------------------------------------


def sample_child(job: dict[str, Any]) -> dict[str, Any]:
    """Sample an epoch, into a file unless ``writes`` is false; say how long it took, and what was read.

    With ``digests`` it also says what each batch and those before it hold, which takes time.
    """
    import featstore
    from featstore.plan.samples import SampleWriter
    from featstore.sampling.sampledbatches import Drawn

    open_graph = featstore.OutOfCoreGraph.open  # which imports torch: no part of what opening costs
    kind = featstore.EpochSampler if job["epochwide"] else featstore.NeighborSampler
    opened = time.perf_counter()
    with open_graph(job["dataset"], memory=job["memory"]) as g:
        assert g.topology.num_nodes == g.num_nodes
        open_s, offsets = time.perf_counter() - opened, held_of_offsets(g)
        if job["lists"]:
            g.cache_neighbors(job["lists"])
        sampler = kind(g, job["fanouts"], seed=1, **job.get("options", {}))
        order = Drawn(sampler, featstore.RandomBatches(g.node_data["seeds"], job["batch_size"], seed=3)).epoch(0)
        n = min(len(order), job["batches"])
        before, begin = bytes_read_by_kernel(), time.perf_counter()
        nodes = edges = 0
        digest, digests = hashlib.blake2b(digest_size=8), []
        to_file = job.get("writes", True)
        with (
            closing(order.windowed(0, stop=n)) as batches,
            SampleWriter(Path(job["folder"]) / "samples", g.num_nodes) if to_file else nullcontext() as writer,
            ThreadPoolExecutor(g.options.threads) as threads,
        ):
            pending = deque(threads.submit(batches.sample, k) for k in range(min(n, g.options.threads)))
            for k in range(len(pending), n + len(pending)):
                batch = pending.popleft().result()
                if k < n:
                    pending.append(threads.submit(batches.sample, k))
                nodes += len(batch.input_ids)
                edges += sum(len(block.src) for block in batch.blocks)
                if writer is not None:
                    writer.add(batch)
                if job.get("digests", False):
                    for ids in (batch.input_ids, *(each for block in batch.blocks for each in (block.src, block.dst))):
                        digest.update(len(ids).to_bytes(8, "little"))
                        digest.update(np.ascontiguousarray(ids.numpy(), np.int64).data)
                    digests.append(digest.hexdigest())
        return {
            "seconds": time.perf_counter() - begin,
            "read": bytes_read_by_kernel() - before,
            "batches": n,
            "nodes": nodes,
            "edges": edges,
            "digests": digests,
            "open_s": open_s,
            "offsets": offsets,
            "peak": status("VmHWM"),
            "stats": sampler.stats(),
        }


def held_of_offsets(g: Any) -> int:
    """Bytes that an open graph holds to find lists by."""
    report = g.memory_report()
    return sum(report.get(holder, 0) for holder in ("indptr", "chunk directory", "offset pages"))


def waits_child(job: dict[str, Any]) -> dict[str, Any]:
    """Time an epoch of nothing but sampling; then the waits of two epochs whose loop sleeps for as long, batch by batch."""
    import featstore

    def waits_of(loader: Any, compute_s: float) -> list[float]:
        found, batches = [], iter(loader)
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            found.append(time.perf_counter() - begin)
            if batch is None:
                return found
            del batch
            time.sleep(compute_s)

    with featstore.open(job["dataset"], memory=job["memory"]) as g:
        if job["lists"]:
            g.cache_neighbors(job["lists"])
        seeds = g.node_data["seeds"][: job["batches"] * job["batch_size"]]

        def loader() -> Any:
            sampler = featstore.EpochSampler(g, job["fanouts"], seed=1)
            return featstore.Loader(g, sampler, seeds, job["batch_size"], features=[], labels=None, seed=3)

        with loader() as alone:
            sampling = sum(waits_of(alone, 0.0))
            n = len(alone)
        with loader() as beside:
            first, second = (waits_of(beside, sampling / n) for _ in range(2))
    return {"sampling": sampling, "first": sum(first), "second": sum(second), "first batch": second[0], "batches": n}


CHILDREN = {"sample": sample_child, "hops": hops_child, "waits": waits_child, **LARGE_CHILDREN}


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Do the job that is named."""
    return CHILDREN[job["what"]](job)


def run_job(what: str, job: dict[str, Any]) -> dict[str, Any]:
    """Do a job in a process of its own."""
    return run_child(__spec__.name, {**job, "what": what, "drop": [job["dataset"]]})


Sides = dict[str, dict[str, Any]]


def in_turns(runs: int, what: str, jobs: Sides) -> dict[str, list[dict[str, Any]]]:
    """Do jobs in turn, and return what each run of each found."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in jobs}
    alternate(runs, {side: (lambda side=side: found[side].append(run_job(what, jobs[side]))) for side in jobs})
    return found


# -- figures -------------------------------------------------------------------------------------------------------------------


def epochs(args: argparse.Namespace, report: Report, jobs: Sides) -> None:
    """Seconds of an epoch of each workload: at a time from both forms, batch by batch, and with everything in memory."""
    for name, fanouts in workloads(args).items():
        job = {**jobs["csc"], "fanouts": fanouts, "epochwide": False}
        n_alone = min(args.alone, args.batches)
        memory = {**job, "lists": job["whole"], "memory": job["memory"] + job["whole"]}
        sides = {
            "csc": {**job, "epochwide": True},
            "chunks": {**job, "dataset": jobs["chunks"]["dataset"], "epochwide": True},
            "batch": {**job, "batches": n_alone},
            "random": {**job, "batches": n_alone, "epochwide": True, "options": {"window": 1, "access": "random"}},
            "memory": memory,
            "memory, not written": {**memory, "writes": False},
        }
        check_same(sides)
        found = in_turns(args.runs, "sample", sides)
        seconds = {side: [each["seconds"] / each["batches"] for each in runs] for side, runs in found.items()}
        for form in ("csc", "chunks"):
            last = found[form][-1]
            report.figure(
                f"R22, {name}, from disk in {form}, seconds a batch of epoch-wide sampling",
                seconds[form],
                "s",
                reference=f"NeighborSampler over csc in the same memory, {n_alone} batches",
                references=seconds["batch"],
                target="<= 0.5",
                batches=last["batches"],
                nodes_per_s=last["nodes"] / last["seconds"],
                read=last["read"],
                read_batch_by_batch=found["batch"][-1]["read"] / n_alone * last["batches"],
                stats=last["stats"],
            )
        # The paper's baseline reads drawn blocks batch by batch. Here two samplers do: it is the faster one.
        ways = {"random": 'EpochSampler(window=1, access="random")', "batch": "NeighborSampler, pages of its lists"}
        faster = min(ways, key=lambda side: statistics.median(seconds[side]))
        report.figure(
            f"R22, {name}, in csc, seconds a batch of epoch-wide sampling, beside random access",
            seconds["csc"],
            "s",
            reference=f"random reads batch by batch, {n_alone} batches, the faster of two ways: {ways[faster]}",
            references=seconds[faster],
            target="<= 0.294",
            read_at_random=found[faster][-1]["read"] / n_alone * found["csc"][-1]["batches"],
            ways={ways[side]: seconds[side] for side in ways},
        )
        report.figure(
            f"R22, {name}, in memory, seconds a batch of epoch-wide sampling from disk",
            seconds["csc"],
            "s",
            reference="NeighborSampler with all lists in memory, which writes its samples too",
            references=seconds["memory"],
            target="<= 1.67",
        )
        report.figure(
            f"R22, {name}, in memory, seconds a batch of epoch-wide sampling from disk, beside batches that are not written",
            seconds["csc"],
            "s",
            reference="NeighborSampler with all lists in memory, which writes nothing",
            references=seconds["memory, not written"],
        )


def check_same(sides: Sides) -> None:
    """Check that all sides draw the same batches, in runs that are not timed."""
    digests = {side: run_job("sample", {**job, "digests": True})["digests"] for side, job in sides.items()}
    longest = max(digests.values(), key=len)
    for side, each in digests.items():
        assert each, f"{side} has drawn nothing"
        assert each == longest[: len(each)], f"{side} draws other batches"


def waits(args: argparse.Namespace, report: Report, jobs: Sides) -> None:
    """Waits of a second epoch, sampled while the loop of the first computes."""
    for name, fanouts in workloads(args).items():
        found = in_turns(args.runs, "waits", {"csc": {**jobs["csc"], "fanouts": fanouts}})["csc"]
        report.figure(
            f"R22, {name}, waits of the second epoch, whose loop computes for as long as sampling takes",
            [each["second"] for each in found],
            "s",
            reference="an epoch of nothing but sampling",
            references=[each["sampling"] for each in found],
            target="<= 0.05",
            waits_of_the_first=[each["first"] for each in found],
            first_batch=[each["first batch"] for each in found],
            batches=found[-1]["batches"],
        )


# -- workloads -----------------------------------------------------------------------------------------------------------------


def workloads(args: argparse.Namespace) -> dict[str, list[int]]:
    """Fan-outs of the figures: the deepest alone in the smallest run, whose processes all start anew."""
    return dict(list(FANOUTS.items())[-1:]) if args.tiny else FANOUTS


def datasets_of(work: Any, chunk_kib: int, folder: Path | None = None) -> dict[str, Path]:
    """Create the adjacency of a workload (once) in CSC form and in chunks, without features.

    They lie beside the workload; with a folder, only the chunks are made, and lie there.
    """
    import featstore

    forms: dict[str, tuple[Path, dict[str, Any]]] = {
        "csc": (work.directory / "csc", {}),
        "chunks": (
            (work.directory if folder is None else folder / f"R{work.scale}") / f"chunks-{chunk_kib}",
            {"topology": "chunked", "chunk_bytes": chunk_kib << 10},
        ),
    }
    if folder is not None:
        (folder / f"R{work.scale}").mkdir(exist_ok=True)
        del forms["csc"]
    for path, options in forms.values():
        if not path.exists():
            data = {"seeds": work.seeds}
            featstore.OutOfCoreGraph.create(
                path, work.indptr, work.indices, node_data=data, memory="2GiB", progress=False, **options
            ).close()
    return {form: path for form, (path, _) in forms.items()}


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    from benchmarks.tools import r22

    with scratch(args, "insitu") as folder:
        make = partial(r22.generate, folder, args.scale, seeds=args.batches * args.batch_size, dim=16)
        groups: dict[str, Callable[[], None]] = {
            "r26": lambda: r26(args, report, folder, in_turns, datasets_of),
            "huge": lambda: huge(args, report, folder, in_turns),
        }
        own = ("epochs", "hops", "reading", "random", "waits")
        if any(args.only in name for name in own):
            work = make()
            paths = datasets_of(work, args.chunk_kib)
            whole = work.n_edges * 4
            job = {
                "folder": os.fspath(folder),
                "memory": max(args.least_mib << 20, whole * 4),
                "batches": args.batches,
                "batch_size": args.batch_size,
                "whole": whole + (8 * work.num_nodes) + (1 << 20),
                "lists": whole // CACHED + 8 * work.num_nodes + 8192,
            }
            jobs = {form: {**job, "dataset": os.fspath(path)} for form, path in paths.items()}
            groups = {
                "epochs": lambda: epochs(args, report, jobs),
                "hops": lambda: hops(args, report, jobs, workloads(args), run_job),
                "reading": lambda: reading(args, report, jobs),
                "random": lambda: random_reads(args, report, paths["csc"], workloads(args)),
                "waits": lambda: waits(args, report, jobs),
                **groups,
            }
        for name, group in groups.items():
            if args.only in name:
                group()


if __name__ == "__main__":
    if not answer(child):
        mine = argparse.ArgumentParser(add_help=False)
        mine.add_argument("--scale", type=int, default=22)
        known, rest = mine.parse_known_args()
        shared = arguments(__doc__ or "", rest, **SIZES)
        options = argparse.Namespace(**vars(shared), **vars(known))
        if options.tiny:
            options.scale, options.batches, options.batch_size, options.alone = 12, 4, 64, 2
            options.chunk_kib, options.huge_scale, options.huge_mib = 16, 22, 24
        main(run, options)
