"""PyTorch Geometric on R22: its loader over a memory map, its loader over the library's stores, and the library's loader.

Figures: seconds of an epoch in a memory control group of 1 GiB for each of the three, with the same sampler, the memory map read
by ``--threads`` threads (tools.memmap) and by one beside it; what an epoch of the adapter takes beside one of the library's own
loader (target: at most 1.05).

PyG's own sampler needs pyg-lib or torch-sparse and the adjacency in memory. ``featstore.adapters.pyg.Sampler`` samples for all
three, so the figures compare how rows are read. Each run is a process of its own with a cold page cache. Runs over the memory map
are cut after ``--seconds``, between batches, and their second half stands for the rest; all others run whole epochs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

from benchmarks.tools.harness import (
    GROUP_BYTES,
    Report,
    alternate,
    answer,
    arguments,
    main,
    run_child,
    scratch,
    timed_epoch,
    whole_epoch,
)

RUN_FILES_BYTES = 40 << 20  # dirty pages of run files are the group's memory, too
FANOUTS = [10, 10, 10]
SHARE = 0.1  # of the rows in the cache of packed epochs
SIDES = {
    "memmap": "PyG over np.memmap",
    "memmap1": "PyG over np.memmap",
    "stores": "PyG over featstore's stores",
    "fresh": "featstore's loader through the adapter, fresh samples (streamed)",
    "packed": "featstore's loader through the adapter, packed",
}


def import_pyg() -> None:
    """Import PyG without its warning about torch.jit.script."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch_geometric  # noqa: F401


# -- what runs in a child ------------------------------------------------------------------------------------------------------


def memmap_store(path: str, n_threads: int) -> Any:
    """Return a PyG feature store over a ``.npy`` file, mapped for random access and read by threads."""
    import torch
    from torch_geometric.data import FeatureStore, TensorAttr

    from benchmarks.tools.memmap import MemmapRows

    mapped = MemmapRows(path, n_threads)

    class MemmapStore(FeatureStore):
        def _get_tensor(self, attr: Any) -> torch.Tensor:
            return mapped[attr.index]

        def get_all_tensor_attrs(self) -> list[Any]:
            return [TensorAttr(group_name=None, attr_name="x")]

        def _get_tensor_size(self, attr: Any) -> tuple[int, ...]:
            return tuple(mapped.rows.shape)

        def _put_tensor(self, tensor: Any, attr: Any) -> bool:
            raise NotImplementedError

        def _remove_tensor(self, attr: Any) -> bool:
            raise NotImplementedError

    return MemmapStore()


def loader_of(job: dict[str, Any], g: Any) -> Any:
    """Return the loader of one side."""
    from torch_geometric.loader import NodeLoader

    import featstore
    from featstore.adapters.pyg import EdgeStore, NeighborLoader, Sampler, stores

    sampler = featstore.NeighborSampler(g, FANOUTS, redraw=False)
    seeds, size = g.node_data["seeds"], job["batch_size"]
    if job["side"] == "fresh":
        return NeighborLoader(g, None, seeds, neighbor_sampler=sampler, batch_size=size, strategy="streamed", prefetch=1)
    if job["side"] == "packed":
        return NeighborLoader(g, strategy=featstore.Packed(job["pack"], cache=SHARE), prefetch=1)
    if job["side"] == "stores":
        g.cache("x", budget=job["cache_bytes"], policy="sieve")
        return NodeLoader(stores(g), Sampler(sampler), seeds, batch_size=size)
    store = memmap_store(job["features"], 1 if job["side"] == "memmap1" else job["threads"])
    return NodeLoader((store, EdgeStore(g)), Sampler(sampler), seeds, batch_size=size)


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Run one epoch, or its first batches, and say what it took."""
    import_pyg()
    import featstore

    plans = job["side"] in ("fresh", "packed")
    with featstore.open(job["dataset"], memory=job["memory"] - (RUN_FILES_BYTES if plans else 0)) as g:
        if job["side"] != "packed":  # a pack needs no adjacency
            g.cache_neighbors(job["adjacency" if plans else "neighbors"])
        loader = loader_of(job, g)
        epoch = timed_epoch(loader, lambda batch: batch.x, limit_s=job["limit_s"] if job["side"].startswith("memmap") else 0)
        n_whole = len(loader)
        if hasattr(loader, "close"):
            loader.close()
        marks = epoch.pop("marks")
        return epoch | {
            "seconds": whole_epoch([mark["seconds"] for mark in marks], n_whole),
            "of_batches": n_whole,
            "peak": g.budget.peak,
        }


# -- figures -------------------------------------------------------------------------------------------------------------------


def make_pack(job: dict[str, Any]) -> None:
    """Sample the epoch and pack its rows, outside the control group and before anything is timed."""
    import featstore

    with featstore.open(job["dataset"], memory=job["roomy"]) as g:
        g.cache_neighbors(job["neighbors"])
        sampler = featstore.NeighborSampler(g, FANOUTS, redraw=False)
        seeds, size = g.node_data["seeds"], job["batch_size"]
        with featstore.sample_offline(g, sampler, seeds, size, path=job["pack"], overwrite=True, progress=False) as pack:
            with featstore.Loader(g, labels=None, strategy=featstore.Packed(pack, cache=SHARE)) as loader:
                next(iter(loader))


def three_ways(args: argparse.Namespace, report: Report, job: dict[str, Any]) -> None:
    """Seconds of an epoch in 1 GiB, one run after the other."""
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    make_pack(job)

    def side(name: str) -> float:
        results[name].append(run_child(__spec__.name, {**job, "side": name}, GROUP_BYTES))
        return float(results[name][-1]["seconds"])

    sides: dict[str, Callable[[], float]] = {name: (lambda name=name: side(name)) for name in SIDES}
    runs = alternate(args.runs, sides)
    for name, reference, target in (
        ("stores", "memmap", ">= 1.5"),
        ("fresh", "memmap", ">= 10"),
        ("packed", "memmap", ">= 10"),
        ("stores", "memmap1", None),
        ("fresh", "memmap1", None),
        ("packed", "memmap1", None),
    ):
        faster = [theirs / ours for theirs, ours in zip(runs[reference], runs[name], strict=True)]
        by = f"{job['threads']} threads" if reference == "memmap" else "1 thread"
        report.figure(
            f"R22 in 1 GiB, an epoch of {SIDES[name]}",
            faster,
            "x",
            reference=f"{SIDES[reference]} with MADV_RANDOM read by {by}, the library's sampler for both",
            ratio=statistics.median(faster),
            target=target,
            seconds=runs[name],
            reference_seconds=runs[reference],
            details={each: results[each][-1] for each in (reference, name)},
        )


def cost(args: argparse.Namespace, report: Report, job: dict[str, Any]) -> None:
    """Seconds of an epoch through the adapter, against the library's own loader with the same sampler and options."""
    import_pyg()
    import featstore
    from featstore.adapters.pyg import NeighborLoader

    with featstore.open(job["dataset"], memory=job["roomy"]) as g:
        g.cache_neighbors(job["neighbors"])
        sampler = featstore.NeighborSampler(g, FANOUTS, redraw=False)
        seeds = g.node_data["seeds"][: args.batches * job["batch_size"]]
        size = job["batch_size"]
        # A packed epoch is so short that it is run whole.
        every = g.node_data["seeds"]
        with featstore.sample_offline(g, sampler, every, size, path=job["pack"], overwrite=True, progress=False) as pack:
            for strategy in (
                featstore.OnDemand(cache=0.1, policy="sieve"),
                featstore.Superbatch(cache=0.1),
                featstore.Streamed(cache=0.1),
                featstore.Packed(pack, cache=0.1),
            ):
                common: dict[str, Any] = {"labels": None, "strategy": strategy, "shuffle": False}
                own: dict[str, Any] = {} if strategy.name == "packed" else {"batch_size": job["batch_size"]}
                samples = {} if strategy.name == "packed" else {"sampler": sampler, "seeds": seeds}
                with featstore.Loader(g, features=["x"], **samples, **own, **common) as ours:

                    def plain(loader: Any = ours) -> None:
                        loader.set_epoch(0)
                        for _ in loader:
                            pass

                    values, references = [], []
                    given = {} if strategy.name == "packed" else {"neighbor_sampler": sampler, "input_nodes": seeds}
                    with NeighborLoader(g, None, features=["x"], **given, **own, **common) as adapted:

                        def through(loader: Any = adapted) -> None:
                            loader.set_epoch(0)
                            for _ in loader:
                                pass

                        begin = time.perf_counter()
                        plain()
                        # Of short epochs more pairs: one differs from the next by more than the adapter may cost.
                        pairs = args.runs if args.tiny else max(args.runs, min(25, int(30 / (time.perf_counter() - begin)) // 2))
                        runs = alternate(pairs, {"adapter": through, "loader": plain}, warm_up=1)
                        values, references = runs["adapter"], runs["loader"]
                report.figure(
                    f"R22, an epoch through PyG's Data, {strategy.name}",
                    values,
                    "s",
                    reference="featstore.Loader, same sampler",
                    references=references,
                    target="<= 1.05",
                    batches=len(ours),
                )


def run(args: argparse.Namespace, report: Report) -> None:
    """All figures."""
    from benchmarks.tools import r22

    with scratch(args, "pyg") as folder:
        work = r22.scaled(folder, args.scale)
        memory = args.memory << 20
        neighbors = min(8 * work.num_nodes + 6 * work.n_edges, memory // 2)
        job = {
            "pack": os.fspath(folder / "pack"),
            "dataset": os.fspath(work.dataset()),
            "features": os.fspath(work.feature_file()),
            "drop": [os.fspath(work.dataset()), os.fspath(work.feature_file())],
            "memory": memory,
            "roomy": args.roomy << 20,
            "neighbors": neighbors,
            "adjacency": min(8 * (work.num_nodes + 1) + 4 * work.n_edges + (1 << 20), memory // 2),  # all of it
            "cache_bytes": memory // 5,
            "batch_size": max(1, 1000 >> max(0, 19 - args.scale)),
            "limit_s": args.seconds,
            "threads": args.threads,
        }
        for name, figure in {"ways": three_ways, "cost": cost}.items():
            if args.only in name:
                figure(args, report, job)


if __name__ == "__main__":
    if not answer(child):
        options = arguments(__doc__ or "", batches=40, scale=22, memory=720, roomy=1500, seconds=60, threads=16)
        if options.tiny:
            options.scale, options.batches = 12, 5
            options.memory = options.roomy = 64
        main(run, options)
