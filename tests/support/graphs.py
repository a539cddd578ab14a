"""Random graphs, and small datasets of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import featstore

__all__ = ["make_graph", "skewed_dataset"]


def make_graph(num_nodes: int, mean_degree: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return CSC ``indptr`` (int64 [n+1]) and ``indices`` (int64, each list ascending) of a random graph with skewed degrees."""
    rng = np.random.default_rng(seed)
    degrees = np.minimum(rng.zipf(1.7, num_nodes), num_nodes).astype(np.float64)
    degrees = rng.poisson(degrees * mean_degree / degrees.mean())
    degrees[rng.random(num_nodes) < 0.05] = 0
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
    popular = rng.permutation(num_nodes)
    drawn = popular[(num_nodes * rng.random(indptr[-1]) ** 3).astype(np.int64)]
    destination = np.repeat(np.arange(num_nodes), degrees)
    return indptr, drawn[np.lexsort((drawn, destination))].astype(np.int64)


def skewed_dataset(path: Path, n: int, width: int, narrow: int = 0) -> Path:
    """Create a dataset, low ids with most out-edges: ``x`` float32 [n, width], ``z`` its first ``narrow`` columns, labels."""
    rng = np.random.default_rng(1)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(1, 9, n))])
    indices = (n * rng.random(indptr[-1]) ** 2).astype(np.int64)
    x = rng.standard_normal((n, width)).astype(np.float32)
    features = {"x": x, "z": x[:, :narrow].copy()} if narrow else {"x": x}
    node_data = {"y": rng.integers(0, 3, n), "train_idx": np.arange(0, n, 3), "val_idx": np.arange(1, n, 7)}
    featstore.OutOfCoreGraph.create(path, indptr, indices, features, node_data, progress=False).close()
    return path
