"""Figures that a change within the library must not slow down: in this tree and, with ``--beside DIR``, in another one, in turn.

Figures: seconds of an epoch of R22 by strategy, within a memory control group of 1 GiB; microseconds of ``store[ids]`` of 1, 100
and 10,000 rows; with ``--large`` seconds of an epoch of 2²⁵ nodes with 64 floats each, streamed in 4 GiB with EpochSampler, and
the longest time that its loop stood still. ``DIR`` is a checkout whose modules are compiled, such as a git worktree. Both sides
run this script by this interpreter, over the same dataset, each run in a process of its own with a cold page cache. A figure's
ratio is this tree's to the other's; without another tree there is none, but for ``store[ids]``, whose reference is
``tensor[ids]``. ``loads`` and ``loads_beside`` are the rows that were loaded, and ``loads_equal`` says whether they are the same.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.tools.harness import (
    GROUP_BYTES,
    ROOT,
    Report,
    alternate,
    answer,
    arguments,
    main,
    run_child,
    scratch,
    timed_epoch,
)

STRATEGIES = ("ondemand", "superbatch", "ginex", "streamed", "packed", "auto")
BUDGET_BYTES = 680 << 20  # of R22 in 1 GiB where run files are written: their dirty pages are the group's too
FANOUTS = [10, 10, 10]
LARGE: dict[str, Any] = {"fanouts": [10, 10], "batches": 600, "memory": 4 << 30, "strategy": "streamed", "group": None}
DISK = "1.5x"
SLOWEST = "<= 1.03"  # what either tree allows the other: 0.97 times as fast


# -- what runs in a child ------------------------------------------------------------------------------------------------------


def epoch_child(job: dict[str, Any]) -> dict[str, Any]:
    """Run one epoch; of a pack, make pack and layout before, which is not timed."""
    import featstore
    from featstore.strategies.registry import find_strategy

    kind = featstore.EpochSampler if job["epochwide"] else featstore.NeighborSampler
    with ExitStack() as stack:
        g = stack.enter_context(featstore.open(job["dataset"], memory=job["memory"]))
        seeds = g.node_data["seeds"][: job["batches"] * job["batch_size"]]
        drawn: tuple[Any, ...] = (kind(g, job["fanouts"], seed=0), seeds, job["batch_size"])
        options = dict(job["options"])
        if job["strategy"] == "packed":
            if not Path(job["pack"]).exists():
                featstore.sample_offline(g, *drawn, path=job["pack"], progress=False).close()
            drawn, options["pack"] = (), job["pack"]
            featstore.Loader(g, features="x", labels=None, strategy=featstore.Packed(**options)).close()
        begin = time.perf_counter()
        strategy = find_strategy(job["strategy"])(**options)
        loader = stack.enter_context(featstore.Loader(g, *drawn, features="x", labels=None, strategy=strategy))
        setup_s = time.perf_counter() - begin
        epoch = timed_epoch(loader, lambda batch: batch.x)
        stats = loader.stats()
        ends = [0.0, *(mark["seconds"] for mark in epoch["marks"])]
        return {
            "seconds": setup_s + epoch["loop_s"],
            "longest_wait_s": max(after - before for before, after in itertools.pairwise(ends)),
            "loads": stats["rows_loaded"],
            "rows": epoch["rows"],
            "batches": epoch["batches"],
            "checksum": epoch["marks"][-1]["checksum"],
            "kernel_bytes": epoch["kernel_bytes"],
            "superbatch": stats.get("superbatch"),
            "taken": stats["auto"]["taken"]["strategy"] if "auto" in stats else job["strategy"],
            "setup_s": setup_s,
            "stages": stats["seconds"],
            "tree": os.fspath(Path(featstore.__file__).parent.parent),
        }


def rows_child(job: dict[str, Any]) -> dict[str, Any]:
    """Time ``store[ids]`` from a cache of all rows and from the drive, and ``tensor[ids]``: microseconds a call.

    Calls are timed in ten parts, of which the median counts: a part in which others had the processor does not.
    """
    import numpy as np
    import torch

    import featstore

    rng = np.random.default_rng(7)
    found: dict[str, Any] = {"tree": os.fspath(Path(featstore.__file__).parent.parent)}
    with ExitStack() as stack:
        opened = [stack.enter_context(featstore.open(job["dataset"], memory=job["memory"])) for _ in range(2)]
        stores = {"cached": opened[0].features["x"], "drive": opened[1].features["x"]}
        n = min(len(stores["drive"]), job["rows"])
        opened[0].cache("x", budget=job["memory"] // 2, policy="sieve")
        x = stores["cached"][:n].clone()  # and fills the cache
        for n_ids, n_calls in ((1, 200), (100, 50), (10_000, 4)):
            calls = [torch.from_numpy(rng.integers(0, n, n_ids)) for _ in range(max(2, n_calls // job["divisor"]))]
            for kind, rows in (*stores.items(), ("tensor", x)):
                assert torch.equal(rows[calls[0]], x[calls[0]])
                parts = []
                for _ in range(10):
                    begin = time.perf_counter()
                    for ids in calls:
                        rows[ids]
                    parts.append((time.perf_counter() - begin) / len(calls) * 1e6)
                found[f"{kind} {n_ids}"] = statistics.median(parts)
    return found


CHILDREN = {"epoch": epoch_child, "rows": rows_child}


# -- figures -------------------------------------------------------------------------------------------------------------------

Results = dict[str, list[dict[str, Any]]]  # of "this" and, where there is one, of "that" tree, a run each


def in_turn(args: argparse.Namespace, what: str, job: dict[str, Any]) -> Results:
    """Do a job in each tree, in turn, and return what was found."""
    trees = {"this": ROOT, **({"that": args.beside} if args.beside else {})}
    results: Results = {name: [] for name in trees}

    def run(name: str) -> None:
        folder = trees[name].resolve()
        mine = {**job, "what": what, "drop": [job["dataset"]], "pack": f"{job['dataset']}.{name}.pack"}
        found = run_child(__spec__.name, mine, job.get("group"), tree=None if folder == ROOT else folder)
        assert Path(found["tree"]).resolve() == folder, f"{found['tree']} was imported, and not {folder}"
        results[name].append(found)

    alternate(args.runs, {name: (lambda name=name: run(name)) for name in trees})
    return results


def figure(report: Report, name: str, found: Results, field: str, unit: str = "s", **more: Any) -> None:
    """Report a field of this tree's runs, beside the other's."""
    values = [each[field] for each in found["this"]]
    if "that" in found:
        others = {"reference": "the other tree, in turn", "references": [each[field] for each in found["that"]]}
        report.figure(name, values, unit, target=SLOWEST, **others, **more)
    else:
        report.figure(name, values, unit, **more)


def epoch(args: argparse.Namespace, report: Report, name: str, job: dict[str, Any]) -> None:
    """Seconds of an epoch, and rows that were loaded."""
    found = in_turn(args, "epoch", job)
    everything = [each for runs in found.values() for each in runs]
    assert len({(each["checksum"], each["batches"], each["rows"]) for each in everything}) == 1, "the trees have other batches"
    more: dict[str, Any] = {"loads": [each["loads"] for each in found["this"]]}
    if "that" in found:
        more["loads_beside"] = [each["loads"] for each in found["that"]]
        more["loads_equal"] = more["loads"] == more["loads_beside"]
    more |= {key: found["this"][-1][key] for key in ("batches", "rows", "kernel_bytes", "superbatch", "taken")}
    more["longest_wait_s"] = [each["longest_wait_s"] for each in found["this"]]
    for name_of, runs in found.items():
        of_stage = {stage: [round(each["stages"].get(stage, 0), 2) for each in runs] for stage in runs[0]["stages"]}
        more[f"stages_{name_of}"] = {"setup": [round(each["setup_s"], 2) for each in runs], **of_stage}
    figure(report, name, found, "seconds", **more)


def epochs(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """R22 by strategy, each with a cache of a tenth of the rows: a size that is given, so that loads can be compared."""
    from benchmarks.tools import r22

    work = r22.scaled(folder, args.scale)
    batch_size = r22.batch_size(args.scale)
    job = {"dataset": os.fspath(work.dataset()), "memory": BUDGET_BYTES, "group": GROUP_BYTES, "epochwide": False}
    job |= {"fanouts": FANOUTS, "batch_size": batch_size, "batches": -(-work.n_seeds // batch_size)}
    for strategy in STRATEGIES:
        if args.strategy in ("", strategy):
            options = {"cache": 0.1, **({"policy": "sieve"} if strategy == "ondemand" else {})}
            epoch(args, report, f"R{args.scale}, an epoch, {strategy}", {**job, "strategy": strategy, "options": options})


def rows(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """Microseconds of ``store[ids]``, in each tree beside ``tensor[ids]`` and beside the other tree."""
    from benchmarks.tools import r22

    work = r22.scaled(folder, args.scale)
    n = 1_000_000
    job = {"dataset": os.fspath(work.dataset()), "rows": n, "memory": (1 << 28) + 4 * n * 512, "divisor": 50 if args.tiny else 1}
    found = in_turn(args, "rows", job)
    for n_ids in (1, 100, 10_000):
        for kind in ("cached", "drive"):
            name, field = f"store[ids] of {n_ids} rows, {kind}", f"{kind} {n_ids}"
            tensor = [each[f"tensor {n_ids}"] for each in found["this"]]
            report.figure(name, [each[field] for each in found["this"]], "us", reference="tensor[ids]", references=tensor)
            if "that" in found:
                figure(report, f"{name}, in both trees", found, field, "us")


def large(args: argparse.Namespace, report: Report, folder: Path) -> None:
    """2²⁵ nodes, streamed; the longest wait of the loop stands beside the seconds."""
    from benchmarks.tools import r22

    n_seeds = LARGE["batches"] * args.batch_size
    work = r22.generate(folder, args.large_scale, seeds=n_seeds, dim=64)
    job = {**LARGE, "dataset": os.fspath(work.dataset()), "epochwide": True, "batch_size": args.batch_size}
    name = f"{work.num_nodes:,} nodes, {job['batches']} batches in {job['memory'] >> 20} MiB, streamed, EpochSampler"
    epoch(args, report, name, {**job, "options": {"cache": 0.1, "disk": DISK}})


GROUPS: dict[str, Callable[[argparse.Namespace, Report, Path], None]] = {"epochs": epochs, "rows": rows}


def run(args: argparse.Namespace, report: Report) -> None:
    """Run the groups that ``--only`` names, and with ``--large`` the large graph."""
    with scratch(args, "strategies") as folder:
        for name, group in {**GROUPS, **({"large": large} if args.large else {})}.items():
            if args.only in name:
                group(args, report, folder)


if __name__ == "__main__":
    if not answer(lambda job: CHILDREN[job["what"]](job)):
        mine = argparse.ArgumentParser(add_help=False)
        mine.add_argument("--beside", type=Path, metavar="DIR", help="another tree, with its compiled modules")
        mine.add_argument("--large", action="store_true", help="also the graph of 2**25 nodes: 12 GB of disk and more")
        mine.add_argument("--strategy", default="", choices=["", *STRATEGIES], help="of R22's epochs this one alone")
        known, rest = mine.parse_known_args()
        shared = arguments(__doc__ or "", rest, scale=22, large_scale=25, batch_size=1000)
        options = argparse.Namespace(**vars(shared), **vars(known))
        if options.tiny:
            options.scale, options.large_scale, options.batch_size = 12, 13, 50
            LARGE.update(batches=6, memory=64 << 20)
        main(run, options)
