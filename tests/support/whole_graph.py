"""Aggregation over a whole graph in memory, in NumPy: what the library is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.sampling.batch import Block

__all__ = ["aggregated", "skewed_graph", "whole_block"]

Int64s = npt.NDArray[np.int64]


def aggregated(indptr: Int64s, indices: npt.NDArray[Any], x: npt.NDArray[Any], op: str) -> npt.NDArray[np.float64]:
    """Compute ``aggregate`` of ``x``, by ``np.add.at`` over the edges in order: SciPy's product has the same bits."""
    n = len(indptr) - 1
    rows = x.reshape(n, math.prod(x.shape[1:])).astype(np.float64)
    src, dst = indices.astype(np.int64), np.repeat(np.arange(n), np.diff(indptr))
    out = np.zeros_like(rows)
    if op == "gcn":
        is_other = src != dst
        scale = 1 / np.sqrt(np.bincount(dst[is_other], minlength=n) + 1.0)
        src, dst = np.concatenate([src[is_other], np.arange(n)]), np.concatenate([dst[is_other], np.arange(n)])
        order = np.lexsort((src, dst))
        np.add.at(out, dst[order], (rows * scale[:, None])[src[order]])
        return (out * scale[:, None]).reshape(x.shape)
    np.add.at(out, dst, rows[src])
    if op == "mean":
        out /= np.maximum(np.diff(indptr), 1)[:, None]
    return out.reshape(x.shape)


def whole_block(indptr: Int64s, indices: npt.NDArray[Any]) -> Block:
    """Return the whole graph as one block."""
    n = len(indptr) - 1
    dst = np.repeat(np.arange(n), np.diff(indptr))
    return Block(torch.from_numpy(indices.astype(np.int64)), torch.from_numpy(dst), n, n)


def skewed_graph(n: int, mean: float, hubs: Sequence[int] = (), hub_degree: int = 0, seed: int = 0) -> tuple[Int64s, Int64s]:
    """Return a graph whose lists ascend, with isolated nodes, repeated edges, self loops, and some long lists."""
    rng = np.random.default_rng(seed)
    degrees = rng.poisson(mean, n)
    degrees[rng.random(n) < 0.1] = 0
    degrees[list(hubs)] = hub_degree
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    dst = np.repeat(np.arange(n), degrees)
    src = (n * rng.random(len(dst)) ** 2).astype(np.int64)
    src = np.where(rng.random(len(dst)) < 0.1, dst, src)
    return indptr, src[np.lexsort((src, dst))]
