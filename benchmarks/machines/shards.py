"""Rows of another machine: calls between two processes of this one, and an epoch over a link of 1 Gbit/s and 5 ms.

``calls``: rank 0 asks rank 1 for ``n`` random rows of ``--row-bytes``, one call after the other. It does so by
:class:`featstore.distributed.Sharded`, and by engines that this could be built on, over rows in memory: gloo's ``send`` and
``recv``, ``all_to_all`` and torch's RPC, each in its simplest form, and a Ray actor (``tools.ray_actor``), which is asked for
pieces as ``Sharded`` asks, or for a whole call at once. Rows a second; ``ms`` is the median call. First over the loopback
device, then over a link: two network namespaces are joined (``--mbit``, ``--delay-us`` in each direction;
``tools.delayed_link``). With ``--tiny``, Ray and the calls over the link run only if ``--only`` asks for calls.

``link``: rank 0 runs epochs over such a link, rank 1 has most of the rows (``--share`` percent). Bytes a second that came over
the link in an epoch, against one TCP connection over it. A link needs root; without, stderr says so.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tools import ray_actor
from benchmarks.tools.delayed_link import Link, link, stream_bytes_per_s, why_not
from benchmarks.tools.harness import Report, answer, arguments, main, scratch
from benchmarks.tools.ranks import answers, start_ranks

ENGINES = ("sharded", "send and recv", "all_to_all", "rpc", "a Ray actor", "a Ray actor, whole calls")
STRATEGIES = ("superbatch", "ginex", "ondemand")
PORT = 29533


# -- one rank ------------------------------------------------------------------------------------------------------------------


def timed_calls(call: Callable[[Any], Any], job: dict[str, Any], n: int) -> dict[str, float]:
    """Call with ``n`` random ids, for some seconds or ``calls`` calls; return rows a second, and milliseconds of a call."""
    rng, seconds = np.random.default_rng(n), list[float]()
    for number in range(job["calls"] + 3):
        ids = rng.integers(1, job["n"], n)
        begin = time.perf_counter()
        call(ids)
        if number >= 3:
            seconds.append(time.perf_counter() - begin)
    return {"rows_per_s": n * len(seconds) / sum(seconds), "ms": 1000 * statistics.median(seconds)}


def by_messages(rank: int, rows: Any, job: dict[str, Any], n: int, collective: bool) -> dict[str, float]:
    """Rank 0 sends ids, and rank 1 the rows: point to point, or both by a collective operation."""
    import torch
    import torch.distributed as dist

    wanted, out = torch.empty(n, dtype=torch.int64), torch.empty((n, job["row_bytes"]), dtype=torch.uint8)
    none, nothing = wanted[:0], out[:0]

    def ask(ids: Any) -> None:
        if collective:
            dist.all_to_all_single(none, torch.from_numpy(ids), [0, 0], [0, n])
            dist.all_to_all_single(out, nothing, [0, n], [0, 0])
        else:
            dist.send(torch.from_numpy(ids), 1)
            dist.recv(out, 1)

    if rank == 0:
        return timed_calls(ask, job, n)
    for _ in range(job["calls"] + 3):
        if collective:
            dist.all_to_all_single(wanted, none, [n, 0], [0, 0])
            dist.all_to_all_single(nothing, rows.index_select(0, wanted), [0, 0], [n, 0])
        else:
            dist.recv(wanted, 0)
            dist.send(rows.index_select(0, wanted), 0)
    return {}


_rows: Any = None  # of rank 1, for calls by RPC


def _selected(ids: Any) -> Any:
    return _rows.index_select(0, ids)


def by_rpc(rank: int, rows: Any, job: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed.rpc as rpc

    global _rows
    _rows = rows
    # Else rows come through shared memory, which two machines do not have.
    by_tcp: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{job['meets']}/rpc", **by_tcp)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    found = {}
    if rank == 0:
        for n in job["sizes"]:
            found[str(n)] = timed_calls(lambda ids: rpc.rpc_sync("rank1", _selected, (torch.from_numpy(ids),)), job, n)
    rpc.shutdown()
    return found


def by_ray(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """This process asks an actor, whose raylet is there already."""
    rows, found = np.load(job["rows"], mmap_mode="r"), dict[str, Any]()
    with ray_actor.asking(job["ray"], job["rows"]) as ask:
        out = np.empty((min(1000, job["n"]), job["row_bytes"]), np.uint8)
        ask(np.arange(len(out)), out, 99)
        assert np.array_equal(out, rows[: len(out)])
        for name, most in (("a Ray actor", ray_actor.piece_rows(job["row_bytes"])), ("a Ray actor, whole calls", job["n"])):
            found[name] = {}
            for n in job["sizes"]:
                out = np.empty((n, job["row_bytes"]), np.uint8)
                found[name][str(n)] = timed_calls(lambda ids, out=out, most=most: ask(ids, out, most), job, n)
    return found


def sharded(rank: int, job: dict[str, Any], rows: Any = None) -> Any:
    """Open this rank's datasets, and make the feature; of ``rows`` in memory if they are given."""
    import featstore
    from featstore.distributed import Sharded
    from featstore.gather.sources import MemorySource
    from featstore.graph.feature import FeatureStore

    g = featstore.open(job["graph"], memory=job["memory"], threads=1)
    part = featstore.open(job["parts"][rank], memory=job["memory"], threads=1)
    ids = range(job["cut"]) if rank == 0 else range(job["cut"], job["n"])
    own = part.features["x"]
    if rows is not None:
        mine = rows[ids.start : ids.stop]
        own = FeatureStore("x", MemorySource(mine.numpy(), 1), mine.shape, mine.dtype, part.reader, part.pool, 1)
    return g, part, Sharded(g, "x", own, ids, timeout=60)


def calls(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{job['meets']}/store", rank=rank, world_size=2)
    found: dict[str, Any] = {}
    rows = torch.from_numpy(np.load(job["rows"]))
    g, part, x = sharded(rank, job, rows)
    with part, g, x:
        out = {n: torch.empty((n, job["row_bytes"]), dtype=torch.uint8) for n in job["sizes"]}
        if rank == 0:
            assert torch.equal(x[: min(1000, job["n"])], rows[:1000])
            found["sharded"] = {str(n): timed_calls(lambda ids, n=n: x.take(ids, out=out[n]), job, n) for n in job["sizes"]}
    for name, collective in (("send and recv", False), ("all_to_all", True)):
        found[name] = {str(n): by_messages(rank, rows, job, n, collective) for n in job["sizes"]}
    dist.destroy_process_group()
    found["rpc"] = by_rpc(rank, rows, job)
    return found


def epochs(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """An epoch of each strategy on rank 0, each beside a TCP stream before it; the first epoch is not counted."""
    import torch.distributed as dist

    import featstore

    dist.init_process_group("gloo", init_method=f"file://{job['meets']}/store", rank=rank, world_size=2)
    found: dict[str, Any] = {"stream": []}
    g, part, x = sharded(rank, job)
    with part, g, x:
        for turn, strategy in enumerate(job["strategies"]):
            dist.barrier()
            rate = stream_bytes_per_s(job["address"], PORT + turn, job["stream_bytes"], sends=rank == 1)
            found["stream"].append(rate)
            if rank == 0:
                sampler = featstore.NeighborSampler(g, job["fanouts"], seed=0)
                seeds = np.random.default_rng(0).permutation(job["n"])[: job["seeds"]]
                options = {"rank": 0, "world_size": 1, "features": "x", "labels": None}
                made = {
                    "ondemand": featstore.OnDemand(cache=0.1, policy="lru"),
                    "superbatch": featstore.Superbatch(cache=0.1),
                    "ginex": featstore.Ginex(cache=0.1),
                }[strategy]
                with featstore.Loader(g, sampler, seeds, job["batch"], strategy=made, **options) as loader:
                    for _epoch in range(2):
                        before, begin = x.stats()["remote"], time.perf_counter()
                        for _ in loader:
                            pass
                        seconds, after = time.perf_counter() - begin, x.stats()["remote"]
                    got = {name: after[name] - before[name] for name in after}
                    found[strategy] = {"bytes_per_s": got["bytes"] / seconds, "s": seconds, **got}
            dist.barrier()
    dist.destroy_process_group()
    return found


# -- all of them ---------------------------------------------------------------------------------------------------------------


def together(job: dict[str, Any], joined: Link | None = None, n_ranks: int = 2) -> dict[str, Any]:
    """Run the ranks; return what rank 0 found."""

    def before(rank: int) -> list[str]:
        return [] if joined is None else joined.command(rank)

    def more(rank: int) -> dict[str, str]:
        device = "lo" if joined is None else joined.devices[rank]
        return {"GLOO_SOCKET_IFNAME": device, "TP_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1"}

    with tempfile.TemporaryDirectory(prefix="shards-") as meets:
        jobs = [{**job, "meets": meets, "rank": rank} for rank in range(n_ranks)]
        with start_ranks(__spec__.name, jobs, before=before, more=more) as ranks:
            return answers(ranks)[0]


def make(folder: Path, args: argparse.Namespace, n: int, row_bytes: int, share: float) -> dict[str, Any]:
    """Make the datasets of both ranks: the graph, without features, and each one's rows; rank 1 has a ``share`` of them."""
    import featstore

    rng, n = np.random.default_rng(0), 2000 if args.tiny else n
    cut = max(1, round(n * (1 - share)))
    rows = rng.integers(0, 256, (n, row_bytes), np.uint8)
    pairs = np.stack([(n * rng.random(8 * n) ** 2).astype(np.int64), rng.integers(0, n, 8 * n)])
    options: dict[str, Any] = {"progress": False, "overwrite": True}
    featstore.OutOfCoreGraph.from_edge_index(folder / "graph", pairs, n, **options).close()
    for name, part in (("rows-0", rows[:cut]), ("rows-1", rows[cut:])):
        nothing = np.zeros(len(part) + 1, np.int64)
        featstore.OutOfCoreGraph.create(folder / name, nothing, nothing[:0], {"x": part}, **options).close()
    np.save(folder / "rows.npy", rows)
    return {
        "graph": str(folder / "graph"),
        "parts": [str(folder / "rows-0"), str(folder / "rows-1")],
        "rows": str(folder / "rows.npy"),
        "n": n,
        "cut": cut,
        "row_bytes": row_bytes,
        "memory": "64MiB" if args.tiny else "1GiB",
    }


def asked(job: dict[str, Any], joined: Link | None, with_ray: bool) -> dict[str, Any]:
    """Call by all engines, Ray's after its processes have started, and while they are the only ones."""
    found = together({**job, "what": "calls"}, joined)
    if with_ray:
        with ray_actor.cluster(joined) as at:
            found |= together({**job, "what": "ray", "ray": at}, joined, n_ranks=1)
    return found


def of_calls(args: argparse.Namespace, report: Report, job: dict[str, Any], where: str, joined: Link | None) -> None:
    job = {**job, "sizes": [100] if args.tiny else [100, 1000, 10_000], "calls": 3 if args.tiny else 100}
    is_whole = not args.tiny or bool(args.only)
    reason = ray_actor.why_not() if is_whole else ""
    if reason:
        print(f"# the Ray actor is left out: {reason}", file=sys.stderr, flush=True)
    found = [asked(job, joined, is_whole and not reason) for _ in range(args.runs)]
    for n in job["sizes"]:
        of = {name: [each[name][str(n)] for each in found] for name in ENGINES if name in found[0]}
        for name, runs in of.items():
            is_compared = name not in ("send and recv", "all_to_all", "rpc")
            report.figure(
                f"rows of another process{where}, {n} rows a call: {name}",
                [each["rows_per_s"] for each in runs],
                "rows/s",
                reference="send and recv" if is_compared else None,
                references=[each["rows_per_s"] for each in of["send and recv"]] if is_compared else None,
                ms=[round(each["ms"], 3) for each in runs],
                row_bytes=args.row_bytes,
            )


def over(args: argparse.Namespace) -> str:
    return f"{args.mbit} Mbit/s and {args.delay_us / 1000:g} ms"


def joining(args: argparse.Namespace) -> AbstractContextManager[Link | None]:
    """The link; None, which stderr explains, where there can be none."""
    reason = why_not()
    if reason:
        print(f"# the link is left out: {reason}", file=sys.stderr, flush=True)
        return nullcontext()
    return link(args.mbit * 1_000_000, args.delay_us / 1e6)


def of_link(args: argparse.Namespace, report: Report, job: dict[str, Any]) -> None:
    with joining(args) as joined:
        found: list[dict[str, Any]] = []
        more = {"what": "epochs", "strategies": STRATEGIES[: 1 if args.tiny else None], "fanouts": [10, 10]}
        more |= {"seeds": 200 if args.tiny else args.seeds, "batch": 50 if args.tiny else 1000}
        more |= {"stream_bytes": 2 << 20 if args.tiny else 100 << 20}
        if joined is not None:
            found = [together({**job, **more, "address": joined.addresses[1]}, joined) for _ in range(args.runs)]
    for turn, strategy in enumerate(STRATEGIES[: 1 if args.tiny else None] if found else ()):
        report.figure(
            f"an epoch over {over(args)}: {strategy}",
            [each[strategy]["bytes_per_s"] for each in found],
            "bytes/s",
            reference="one TCP connection over the link",
            references=[each["stream"][turn] for each in found],
            target=">= 0.8" if strategy == "superbatch" else None,
            seconds=[round(each[strategy]["s"], 3) for each in found],
            remote=[each[strategy] for each in found][-1],
        )


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    if "calls".startswith(args.only):
        with scratch(args, "shards-calls") as folder:
            job = make(folder, args, args.nodes, args.row_bytes, 1.0)
            of_calls(args, report, job, "", None)
            if not args.tiny or args.only:
                with joining(args) as joined:
                    if joined is not None:
                        of_calls(args, report, job, f" over {over(args)}", joined)
    if "link".startswith(args.only):
        with scratch(args, "shards-link") as folder:
            of_link(args, report, make(folder, args, args.link_nodes, args.link_row_bytes, args.share / 100))


if __name__ == "__main__":
    children = {"calls": calls, "ray": by_ray, "epochs": epochs}
    if not answer(lambda job: children[job["what"]](job["rank"], job)):
        sizes = {"nodes": 400_000, "row_bytes": 512, "link_nodes": 100_000, "link_row_bytes": 3072, "seeds": 5000}
        main(run, arguments(__doc__ or "", **sizes, mbit=1000, delay_us=5000, share=90))
