"""Streamed's division of memory by default, beside a grid of divisions by hand: seconds of an epoch, and bytes moved.

Caches, batches ahead, planning, packing and the length of superbatches share one memory; the strategy chooses by what an epoch
then reads and writes. Here the same epoch of EpochSampler also runs with each cache and length of a grid, in turn, in memories
from a twentieth to a half of the features. Graphs: R22; one of 2²⁴ nodes with 64 floats each (8 GB of disk), in 1.5 GiB, too;
and, where the variable FEATSTORE_P100 names the dataset that ``python -m benchmarks.sizes.papers100m`` makes, that, in 10 GB,
too. Each run is a process of its own, with a cold page cache; its first epoch counts, with all set-up.
"""

from __future__ import annotations

import argparse
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.tools.harness import Report, alternate, answer, arguments, io_bytes, main, run_child, scratch, timed_epoch

FANOUTS = [10, 10, 10]
DEFAULT = "by default"
CACHES = (0.0, 0.1, 0.25, 0.5)  # of the memory
PARTS = (1, 4)  # superbatches of an epoch
SHARES = (1 / 20, 1 / 8, 1 / 4, 1 / 2)  # memory, of the features
LIMIT = 3  # a division by hand is stopped after this many times the default's seconds: it is not the best one
SET_UP_S = 10.0  # of the process


def epoch_child(job: dict[str, Any]) -> dict[str, Any]:
    """Run an epoch; say what it read and wrote by the kernel's count, or why there was no room."""
    import featstore

    with ExitStack() as stack:
        begin, (read, written) = time.perf_counter(), io_bytes()
        try:
            g = stack.enter_context(featstore.open(job["dataset"], memory=job["memory"]))
            seeds = g.node_data[job["seeds"]][: job["batches"] * job["batch_size"]]
            sampler = featstore.EpochSampler(g, FANOUTS, seed=0)
            strategy = featstore.Streamed(**job["options"])
            loader = stack.enter_context(
                featstore.Loader(g, sampler, seeds, job["batch_size"], features="x", labels=None, strategy=strategy)
            )
            setup_s = time.perf_counter() - begin
            epoch = timed_epoch(loader, lambda batch: batch.x)
        except featstore.BudgetError as error:
            return {"refused": str(error)}
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return {"refused": str(error)}
        stats = loader.stats()
    read, written = (after - before for after, before in zip(io_bytes(), (read, written), strict=True))
    return {
        "seconds": setup_s + epoch["loop_s"],
        "read": read,
        "written": written,
        "asked": stats["bytes_requested"],
        "rows": epoch["rows"],
        "hits": stats["hits"],
        "superbatch": stats["superbatch"],
        "checksum": epoch["marks"][-1]["checksum"],
    }


def grid(job: dict[str, Any], *, tiny: bool) -> dict[str, dict[str, Any]]:
    """The options of each side: none, and a cache and a length by hand; few of them if ``tiny``."""
    found: dict[str, dict[str, Any]] = {DEFAULT: {}}
    for share in CACHES[: 2 if tiny else None]:
        for parts in PARTS[: 1 if tiny else None]:
            options = {"cache": int(share * job["memory"]), "length": -(-job["batches"] // parts)}
            found[f"cache {share:.0%}, {parts} superbatches"] = options
    return found


def compare(args: argparse.Namespace, report: Report, title: str, job: dict[str, Any], most_read: float | None = None) -> None:
    """Run all sides, and report the default beside the best by hand."""
    runs: dict[str, list[dict[str, Any]]] = {}

    def run(side: str, options: dict[str, Any]) -> float | None:
        mine = {**job, "options": options, "what": "epoch", "drop": [job["dataset"]]}
        first = runs.get(DEFAULT, [{}])[0].get("seconds")
        try:
            found = run_child(__spec__.name, mine, most_s=None if first is None else LIMIT * first + SET_UP_S)
        except subprocess.TimeoutExpired as stopped:
            found = {"refused": f"stopped after {stopped.timeout:.0f} s"}
        runs.setdefault(side, []).append(found)
        shown = found.get("refused") or f"{found['seconds']:.1f} s, {(found['read'] + found['written']) / 1e9:.1f} GB moved"
        print(f"{title}, {side}: {shown}", file=sys.stderr, flush=True)
        return found.get("seconds")

    sides = {side: (lambda side=side, options=options: run(side, options)) for side, options in grid(job, tiny=args.tiny).items()}
    seconds = alternate(args.runs, sides)
    ran = {side: each for side, each in runs.items() if "refused" not in each[-1]}
    assert DEFAULT in ran or not ran, runs[DEFAULT][-1]["refused"]
    if not ran:
        print(f"{title}: no division has room", file=sys.stderr, flush=True)
        return
    assert len({(each["checksum"], each["rows"]) for one in ran.values() for each in one}) == 1, "sides have other batches"
    middle = {side: sorted(each["seconds"] for each in one)[len(one) // 2] for side, one in ran.items()}
    best = min(middle.keys() - {DEFAULT}, key=middle.__getitem__)
    moved = {side: one[-1]["read"] + one[-1]["written"] for side, one in ran.items()}
    report.figure(
        f"{title}, an epoch by default",
        seconds[DEFAULT],
        "s",
        reference=f"the best by hand, {best}",
        references=seconds[best],
        target=None if args.tiny else "<= 1.15",
        by_hand={side: [round(middle[side], 2), moved[side]] for side in sorted(middle, key=middle.__getitem__)},
        refused=sorted(runs.keys() - ran.keys()),
        **{name: ran[DEFAULT][-1][name] for name in ("read", "written", "asked", "hits", "superbatch")},
    )
    if most_read is not None:
        one = ran[DEFAULT][-1]
        rows_bytes = one["rows"] * job["row_bytes"]
        report.figure(
            f"{title}, bytes read by default",
            [one["read"]],
            "B",
            reference="the rows asked for",
            references=[rows_bytes],
            target=None if args.tiny else f"<= {most_read}",
        )


def run(args: argparse.Namespace, report: Report) -> None:
    """The graphs that ``--only`` names, in each memory."""
    subprocess.run([sys.executable, "-c", "import featstore, torch"], check=True)  # or the first side reads their files
    with scratch(args, "division") as folder:
        for name, job, n_bytes, more in graphs(args, folder):
            memories = {**more, **{f"{share:.0%} of the features": int(share * n_bytes) for share in SHARES}}
            for shown, memory in ({"enough": 64 << 20} if args.tiny else memories).items():
                if args.memory_mib and memory >> 20 != args.memory_mib:
                    continue
                compare(args, report, f"{name}, {shown}", {**job, "memory": memory}, 1.2 if shown == "1.5 GiB" else None)


def graphs(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any], int, dict[str, int]]]:
    """Yield the graphs that ``--only`` names: the title, the job, the bytes of the features, and memories of its own."""
    from benchmarks.tools import r22

    for name, scale, dim, memories in (("R22", args.scale, 128, {}), ("wide", args.wide_scale, 64, {"1.5 GiB": 3 << 29})):
        if args.only in name:
            kept = os.environ.get("FEATSTORE_R22") if name == "R22" else None
            work = r22.generate(kept or folder, scale, seeds=max(1, round(200_000 * 2.0 ** min(0, scale - 22))), dim=dim)
            title = "R22" if name == "R22" else f"{work.num_nodes:,} nodes x 64 floats"
            job = {
                "dataset": os.fspath(work.dataset()),
                "seeds": "seeds",
                "batches": 4 if args.tiny else 200,
                "row_bytes": 4 * dim,
            }
            yield title, {**job, "batch_size": args.batch_size}, work.num_nodes * dim * 4, memories
    path = os.environ.get("FEATSTORE_P100")
    if path and args.only in "P100" and not args.tiny:
        import featstore

        with featstore.open(path) as g:
            n_nodes, row_bytes, n_seeds = g.num_nodes, g.features["x"].row_bytes, len(g.node_data["train_idx"])
        job = {"dataset": path, "seeds": "train_idx", "batches": -(-n_seeds // 1024), "batch_size": 1024, "row_bytes": row_bytes}
        yield "P100", job, n_nodes * row_bytes, {"10 GB": 10_000_000_000}


if __name__ == "__main__":
    if not answer(lambda job: epoch_child(job)):
        options = arguments(__doc__ or "", scale=22, wide_scale=24, batch_size=1000, memory_mib=0)
        if options.tiny:
            options.scale, options.wide_scale, options.batch_size = 12, 13, 50
        main(run, options)
