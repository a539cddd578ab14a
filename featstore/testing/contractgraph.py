"""The dataset that the contract suite of strategies trains on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import featstore

__all__ = ["ContractGraph", "contract_graph"]


@dataclass(frozen=True)
class ContractGraph:
    """A small dataset on disk, and the arrays that it was made of: features ``"x"`` and ``"z"``, edge feature ``"w"``."""

    path: str
    features: Mapping[str, Any]
    y: Any
    seeds: Any
    edge_features: Mapping[str, Any]


@cache
def contract_graph() -> ContractGraph:
    """Make the graph that the suite trains on, once a process: 900 nodes, rows of 100 and of 6 bytes, 227 seeds."""
    global _folder
    _folder = tempfile.TemporaryDirectory(prefix="featstore-contract-")
    n, path = 900, os.path.join(_folder.name, "graph")
    rng = np.random.default_rng(11)
    indptr = np.concatenate([[0], np.cumsum(rng.integers(0, 12, n))])
    indices = rng.permutation(n)[(n * rng.random(indptr[-1]) ** 2).astype(np.int64)]  # some nodes are requested often
    features: dict[str, Any] = {
        "x": rng.standard_normal((n, 25)).astype(np.float32),
        "z": rng.standard_normal((n, 3)).astype(np.float16),
    }
    y, seeds = rng.integers(0, 4, n), np.sort(rng.choice(n, 227, replace=False))
    data = {"y": y, "train_idx": seeds}
    edges: dict[str, Any] = {"w": rng.standard_normal((len(indices), 3)).astype(np.float32)}
    featstore.OutOfCoreGraph.create(path, indptr, indices, features, data, edge_features=edges, progress=False).close()
    return ContractGraph(path, features, y, seeds, edges)


_folder: tempfile.TemporaryDirectory[str] | None = None  # removed when the process ends
