"""Planted communities: a graph whose neighbours say something of a node."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


def draw(rng: np.random.Generator, n: int) -> tuple[Int64s, Int64s, Int64s]:
    """Draw communities of about 300 nodes, four of five edges inside: each node's community, indptr and ids of the lists."""
    community = rng.permutation(np.arange(n) // 300)
    order = np.argsort(community, kind="stable")
    counts = np.bincount(community)
    starts = np.cumsum(counts) - counts
    degrees = np.minimum(3 + 4 * rng.pareto(1.6, n), n // 4).astype(np.int64)
    of = np.repeat(community, degrees)
    inside = order[starts[of] + (counts[of] * rng.random(len(of))).astype(np.int64)]
    ids = np.where(rng.random(len(of)) < 0.8, inside, rng.integers(0, n, len(of)))
    return community, np.concatenate([[0], np.cumsum(degrees)]), ids
