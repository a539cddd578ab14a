"""Ginex (VLDB 2022): neighbour and feature caches in superbatches, Belady's policy, beside a memory map and a static cache.

The figures carry the numbers of the paper; 1–3 and 7–13 are drawings and pseudocode. There is no device: transfer and compute,
which the paper hides beside preparation, are left out, so an epoch is its data preparation. Fan-outs are [10, 10, 10]. Sides
run in a control group with 400 MiB for the interpreter: below scale 20 that holds all rows in a memory map's page cache.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import featstore
from benchmarks.epochs import epoch
from benchmarks.papers.figures.common import BASE_BYTES, Paper, Setting
from benchmarks.tools.harness import PAGE_BYTES, alternate, whole_epoch

PAPER = Paper("ginex", "Ginex (VLDB 2022)")
NO_DEVICE = "data preparation alone: no device computes"
FANOUTS = [10, 10, 10]
SHARE = 0.1  # of the rows, in a cache
STAGES = ("sample", "plan", "switch", "load", "gather", "update")
MEMMAP, STATIC, GINEX = "memory map (PyG+)", "static caches (Ali+PG)", "superbatches (Ginex)"
SIDES: dict[str, dict[str, Any]] = {
    MEMMAP: {"side": "memmap"},
    STATIC: {"strategy": "ondemand", "policy": "degree", "cache": SHARE},
    GINEX: {"strategy": "ginex", "cache": SHARE},
    "superbatches beside the loop": {"strategy": "superbatch", "cache": SHARE},
    "packed on the way (streamed)": {"strategy": "streamed", "cache": SHARE},
}
THREE = (MEMMAP, STATIC, GINEX)  # the paper's
LEAST_MEMORY = 64 << 20


def job_of(at: Setting, dim: int = 128) -> dict[str, Any]:
    """Describe an epoch of R-MAT in memory that a sixth of it or so fits into, as R22 in 1 GiB."""
    work, batch_size = at.workload(dim), at.batch_size
    memory = max(LEAST_MEMORY, round((800 << 20) * 2.0 ** (at.scale - 22)))
    return {
        "dataset": os.fspath(work.dataset()),
        "features": os.fspath(work.feature_file()),
        "drop": [os.fspath(work.dataset()), os.fspath(work.feature_file())],
        "memory": memory,
        "neighbors": min(8 * work.num_nodes + 6 * work.n_edges, memory // 8),
        "batch_size": batch_size,
        "n_batches": -(-work.n_seeds // batch_size),
        "prefetch": 1,
        "side": "featstore",
        "threads": at.args.threads,
        "limit_s": 0,
    }


def with_memory(job: dict[str, Any], factor: float) -> dict[str, Any]:
    """Give all sides memory for batches that are larger by ``factor``."""
    return {**job, "memory": round(job["memory"] * max(1.0, factor))}


def epochs(at: Setting, jobs: dict[str, dict[str, Any]]) -> tuple[dict[str, list[float]], dict[str, dict[str, Any]]]:
    """Run an epoch of each side in turn; return seconds, and what the last run of each said. All sides read the same rows."""
    found: dict[str, dict[str, Any]] = {}

    def side(name: str) -> float:
        job = jobs[name]
        if job["side"] == "memmap":
            job = {**job, "limit_s": at.args.seconds}
        elif job["strategy"] != "ondemand":
            job = {"length": max(4, job["n_batches"] // 4), **job}
        found[name] = at.child(epoch, job, BASE_BYTES + job["memory"])
        return epoch.epoch_s(found[name], job["n_batches"])

    seconds = alternate(at.args.runs, {name: (lambda name=name: side(name)) for name in jobs})
    first, *others = found.values()
    for other in others:
        epoch.check_same(first, other)
    return seconds, found


def stages_of(result: dict[str, Any], n_batches: int) -> dict[str, float]:
    """Seconds of an epoch by stage; what a memory map's look-up takes is gathering. A cut run goes on as its second half did."""
    marks = result["marks"]
    stages = {stage: whole_epoch([mark["stages"].get(stage, 0.0) for mark in marks], n_batches) for stage in STAGES}
    return {**stages, "gather": stages["gather"] + whole_epoch([mark["lookup_s"] for mark in marks], n_batches)}


def compare(at: Setting, place: float | str, job: dict[str, Any], cache: float = SHARE) -> None:
    """Report seconds of an epoch of the paper's three sides at one place of a figure, beside the memory map."""
    names = THREE
    seconds, found = epochs(at, {name: {**job, **SIDES[name], "cache": cache} for name in names})
    for name in names:
        is_first = name == names[0]
        more = {} if is_first else {"references": seconds[names[0]]}
        loaded = found[name]["rows_loaded"] if name != MEMMAP else found[name]["rows"]
        at.row(
            f"R{at.scale}", name, place, seconds[name], "s an epoch", None if is_first else names[0], rows_loaded=loaded, **more
        )
    for name in names[1:]:
        faster = [a / b for a, b in zip(seconds[names[0]], seconds[name], strict=True)]
        at.row(f"R{at.scale}", name, place, faster, f"times faster than {names[0]}")


@PAPER.shows("figure 4", "an epoch over a memory map by stage, and pages read for each row asked for", NO_DEVICE)
def figure4(at: Setting) -> None:
    """Stages of an epoch over a memory map."""
    job = {**job_of(at), **SIDES[MEMMAP]}
    seconds, found = epochs(at, {MEMMAP: job})
    stages = stages_of(found[MEMMAP], job["n_batches"])
    for stage in ("sample", "gather"):
        at.row(f"R{at.scale}", MEMMAP, stage, stages[stage], "s an epoch")
    at.row(f"R{at.scale}", MEMMAP, "epoch", seconds[MEMMAP], "s an epoch")
    pages = found[MEMMAP]["kernel_bytes"] / PAGE_BYTES / found[MEMMAP]["rows"]
    at.row(f"R{at.scale}", MEMMAP, "miss ratio", pages, "pages read a row", least_resident=job["memory"] + BASE_BYTES)


@PAPER.shows("figure 5", "rows that a cache misses, static by degree (PaGraph) beside the optimum, by its size")
def figure5(at: Setting) -> None:
    """Miss ratios by policy; counts."""
    for graph in at.graphs():
        trace = at.trace(graph, FANOUTS)
        accesses = int(trace.lengths.sum())
        out_degree = np.bincount(graph.ids, minlength=trace.n)
        for policy in ("degree", "frequency", "sieve", "belady"):
            for percent in (2, 5, 10, 20, 40):
                loaded = featstore.simulate(trace, trace.n * percent // 100, policy, out_degree=lambda of=out_degree: of)
                at.row(graph.name, policy, percent, float(loaded.sum()) / accesses, "of accesses missed")


@PAPER.shows("figure 6", "sampling and gathering alone, beside both at once")
def figure6(at: Setting) -> None:
    """Stages one after the other, and with batches prefetched."""
    job = {**job_of(at), **SIDES[STATIC]}
    seconds, found = epochs(at, {"alone": {**job, "prefetch": 0}, "at once": {**job, "prefetch": 2}})
    stages = stages_of(found["alone"], job["n_batches"])
    for stage in ("sample", "gather"):
        at.row(f"R{at.scale}", "alone", stage, 1e3 * stages[stage] / job["n_batches"], "ms a batch")
    for side, runs in seconds.items():
        each = [1e3 * (s - found[side]["setup_s"]) / job["n_batches"] for s in runs]
        at.row(f"R{at.scale}", side, "both", each, "ms a batch")


@PAPER.shows("figure 14", "an epoch by stage: memory map, static caches, superbatches", NO_DEVICE)
def figure14(at: Setting) -> None:
    """Stages of the paper's three sides, and of two that are the library's."""
    job = job_of(at)
    seconds, found = epochs(at, {name: {**job, **side} for name, side in SIDES.items()})
    for name in SIDES:
        for stage, each in stages_of(found[name], job["n_batches"]).items():
            at.row(f"R{at.scale}", name, stage, each, "s")
        more: dict[str, Any] = {"references": seconds[MEMMAP], "stages": found[name]["stages"]}
        at.row(f"R{at.scale}", name, "epoch", seconds[name], "s", MEMMAP, **more)


@PAPER.shows("figure 15", "superbatches with a static cache by degree (Ginex-PG) beside Belady's", NO_DEVICE)
def figure15(at: Setting) -> None:
    """The policy alone is exchanged."""
    job = {**job_of(at), **SIDES[GINEX]}
    policies = ("degree", "belady")
    seconds, found = epochs(at, {policy: {**job, "policy": policy} for policy in policies})
    for policy in policies:
        for stage, each in stages_of(found[policy], job["n_batches"]).items():
            at.row(f"R{at.scale}", policy, stage, each, "s")
        at.row(f"R{at.scale}", policy, "epoch", seconds[policy], "s", "degree", references=seconds["degree"])
        missed = (found[policy]["rows_loaded"] + found[policy]["filled"]) / found[policy]["rows"]
        at.row(f"R{at.scale}", policy, "miss ratio", missed, "of accesses")


@PAPER.shows("figure 16", "an epoch by the length of a superbatch, beside the default", NO_DEVICE)
def figure16(at: Setting) -> None:
    """Lengths in batches; the paper gives them as bytes of run files."""
    job = {**job_of(at), **SIDES[GINEX]}
    default = max(4, job["n_batches"] // 4)
    lengths = [max(2, round(share * default)) for share in (0.25, 0.5, 1, 2, 4)]
    seconds, found = epochs(at, {str(length): {**job, "length": length} for length in lengths})
    for length in lengths:
        reference = seconds[str(default)]
        rows = found[str(length)]["rows_loaded"]
        at.row(f"R{at.scale}", GINEX, length, seconds[str(length)], "s", "default length", references=reference, rows_loaded=rows)


@PAPER.shows("figure 17", "an epoch by the number of features: 32 to 192", NO_DEVICE)
def figure17(at: Setting) -> None:
    """Rows of a quarter to one and a half times 512 bytes, in caches of the same bytes; those of 768 straddle pages."""
    for dim in (32, 64, 128, 192):
        compare(at, dim, with_memory(job_of(at, dim), dim / 128), cache=SHARE * 128 / dim)


@PAPER.shows("figure 18", "an epoch by the memory: caches of 5, 10 and 20 % of the rows", NO_DEVICE)
def figure18(at: Setting) -> None:
    """The group's memory follows the caches', so that the memory map has as much more."""
    job = job_of(at)
    for factor in (0.5, 1.0, 2.0):
        more = round((factor - 1) * SHARE * at.workload().num_nodes * 4 * at.workload().dim)
        compare(at, 100 * factor * SHARE, {**job, "memory": job["memory"] + more}, cache=factor * SHARE)


@PAPER.shows("figure 19", "an epoch by the size of a batch: a quarter to twice the default", NO_DEVICE)
def figure19(at: Setting) -> None:
    """The same seeds in more or fewer batches."""
    job = job_of(at)
    for factor in (0.25, 0.5, 1.0, 2.0):
        size = max(2, round(factor * job["batch_size"]))
        n_batches = -(-at.workload().n_seeds // size)
        compare(at, size, {**with_memory(job, factor), "batch_size": size, "n_batches": n_batches})


PAPER.leaves_out("table 3", "machines of a cloud, beside DistDGL on eight", "it needs eight machines with two GPUs each")
PAPER.leaves_out("table 4", "cost beside DistDGL", "it needs eight machines with two GPUs each")
