"""Graphs, samplers and strategies of the tables that hold across versions; made by integer arithmetic, not by a generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

import featstore

__all__ = [
    "BATCH",
    "N_BATCHES",
    "SAMPLERS",
    "STRATEGIES",
    "digest_of",
    "make_dataset",
    "make_loader_of",
    "make_pack",
    "scrambled",
]

BATCH, N_BATCHES = 100, 10
SEED = 3
THREADS = 2  # of opening and of loaders: sizes that depend on them are the same on every machine
DISK = "256MiB"  # of run files: as long as superbatches may become, on every disk

SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "neighbor": lambda g: featstore.NeighborSampler(g, [5, 5], seed=1),
    "layer": lambda g: featstore.LayerSampler(g, [300, 300], seed=4),
    "epoch": lambda g: featstore.EpochSampler(g, [5, 5], seed=1),
    "replacement": lambda g: featstore.NeighborSampler(g, [5, 3], replace=True, seed=2),
    "labor": lambda g: featstore.LaborSampler(g, [5, 5], batch_dependency=3, seed=4),
    "shadow": lambda g: featstore.ShadowSampler(g, [4, 3], layers=3, seed=4),
    "window": lambda g: featstore.EpochSampler(g, [5, -1], seed=1, window=3),
    "edges": lambda g: featstore.NeighborSampler(g, [5, 5], seed=1, edges=True),
}
STRATEGIES: dict[str, Callable[..., featstore.Strategy]] = {
    "ondemand": lambda pack, **options: featstore.OnDemand(**{"cache": "auto", **options}),
    "superbatch": lambda pack, **options: featstore.Superbatch(disk=DISK, **options),
    "ginex": lambda pack, **options: featstore.Ginex(disk=DISK, **options),
    "streamed": lambda pack, **options: featstore.Streamed(disk=DISK, **options),
    "packed": lambda pack, **options: featstore.Packed(pack, **{"cache": "auto", **options}),
    "auto": lambda pack, **options: featstore.Auto(disk=DISK, **options),
}


def scrambled(first: int, stop: int, salt: int = 0) -> npt.NDArray[np.uint64]:
    """Return the SplitMix64 finalizer of each integer from ``first`` to ``stop``, uint64 [stop - first]."""
    mixed = (np.arange(first, stop, dtype=np.uint64) + np.uint64(salt << 40)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
    return mixed ^ mixed >> np.uint64(31)


def _below(bound: int, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return (values % np.uint64(bound)).astype(np.int64)


def _blocks(n: int, dim: int, salt: int) -> Iterator[npt.NDArray[np.float32]]:
    """Yield all rows of a float32 feature [n, dim], some at a time: multiples of 2⁻²⁴ in [0, 1)."""
    step = 1 << 12
    for first in range(0, n, step):
        words = scrambled(first * dim, min(first + step, n) * dim, salt) >> np.uint64(40)
        yield (words.astype(np.float32) * np.float32(2.0**-24)).reshape(-1, dim)


def make_dataset(path: Path, n: int, dim: int, *, edge_dim: int = 0, n_many: int = 6_000) -> Path:
    """Create a dataset of ``n`` nodes: lists of 2 … 40 sources, some of which are in many; ``x`` float32 [n, dim].

    Node data: ``y``, classes 0 … 4; the distinct nodes ``train_idx`` [1000], ``val_idx`` [500], which has none of them, and
    ``many_idx`` [n_many]. With ``edge_dim`` the edge feature ``w``, float32 [n_edges, edge_dim].
    """
    words = scrambled(0, n, 1)
    degrees = 2 + _below(8, words) + np.where(_below(16, words >> np.uint64(8)) == 0, 30, 0)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    n_edges = int(indptr[-1])
    indices = _below(n, scrambled(0, n_edges, 2)) * _below(n, scrambled(0, n_edges, 3)) // n
    order = np.argsort(scrambled(0, n, 4), kind="stable")
    n_train = BATCH * N_BATCHES
    data = {"train_idx": order[:n_train], "val_idx": order[n_train : n_train * 3 // 2], "many_idx": order[:n_many]}
    data["y"] = _below(5, scrambled(0, n, 5))
    features: dict[str, Any] = {"x": ((n, dim), np.dtype(np.float32), _blocks(n, dim, 6))}
    edges: dict[str, Any] = {"w": ((n_edges, edge_dim), np.dtype(np.float32), _blocks(n_edges, edge_dim, 7))} if edge_dim else {}
    featstore.OutOfCoreGraph.create(path, indptr, indices, features, data, edge_features=edges, progress=False).close()
    return path


def make_pack(path: Path, graph: Path, sampler: str, seeds: str = "train_idx") -> Path:
    """Sample two epochs offline, and return the pack; :func:`make_loader_of` has the same batches."""
    with featstore.open(graph, memory="64MB", threads=THREADS) as g:
        draw = SAMPLERS[sampler](g)
        options = {"shuffle": False, "seed": SEED, "progress": False}
        featstore.sample_offline(g, draw, g.node_data[seeds], BATCH, 2, path, **options).close()
    return path


def make_loader_of(
    g: featstore.OutOfCoreGraph, sampler: str, strategy: featstore.Strategy, seeds: str = "train_idx", **options: Any
) -> featstore.Loader:
    """Make a loader whose batches do not depend on its strategy: those of ``seeds`` in their order, or of a pack."""
    is_packed = getattr(strategy, "pack", None) is not None
    drawn = () if is_packed else (SAMPLERS[sampler](g), g.node_data[seeds], BATCH)
    return featstore.Loader(g, *drawn, strategy=strategy, shuffle=False, seed=SEED, threads=THREADS, **options)


def _add(digest: Any, name: str, values: torch.Tensor) -> None:
    """Add a tensor: integers as int64, rows as the bytes that they are."""
    is_rows = values.dtype.is_floating_point
    array = np.ascontiguousarray(values.numpy() if is_rows else values.to(torch.int64).numpy())
    digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
    digest.update(array.data.cast("B") if array.size else b"")


def digest_of(batches: Iterable[featstore.MiniBatch]) -> str:
    """Return the xxh3 of what batches hold, in their order: ids, blocks, features, labels; no results of float arithmetic."""
    digest = xxhash.xxh3_128()
    for batch in batches:
        digest.update(f"batch {batch.index}\n".encode())
        _add(digest, "seeds", batch.seeds)
        _add(digest, "input_ids", batch.input_ids)
        for block in batch.blocks:
            digest.update(f"block {block.n_src} {block.n_dst}\n".encode())
            _add(digest, "src", block.src)
            _add(digest, "dst", block.dst)
            if block.edge_pos is not None:
                _add(digest, "edge_pos", block.edge_pos)
        for name, rows in sorted(batch.features.items()):
            _add(digest, name, rows)
        for name, tensors in sorted(batch.edge_features.items()):
            for rows in tensors:
                _add(digest, name, rows)
        if batch.y is not None:
            _add(digest, "y", batch.y)
    return digest.hexdigest()
