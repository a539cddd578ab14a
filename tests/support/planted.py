"""Small graphs that are the same every time: a citation graph with planted classes, and communities with shuffled ids."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np

import featstore

CLASSES = 5


def communities(rng: np.random.Generator, n: int, n_communities: int, degree: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each node's community, ids shuffled, and ``indptr, indices``: nine of ten neighbours are of a node's community."""
    community = rng.permutation(np.arange(n) % n_communities)
    members = [np.flatnonzero(community == c) for c in range(n_communities)]
    lists = [np.where(rng.random(degree) < 0.1, rng.integers(0, n, degree), rng.choice(members[c], degree)) for c in community]
    return community, np.arange(0, degree * n + 1, degree), np.concatenate(lists)


def make_planted(path: Path, n: int = 2500, n_words: int = 100, seed: int = 0) -> SimpleNamespace:
    """Create the dataset ``path`` and return the arrays it was made of: ``path, x, y, train_idx, test_idx``.

    Three of four edges come from a node of the same class, popular nodes first. A node has a dozen of ``n_words`` words, a fifth
    of them from the vocabulary of its class: alone they tell a class less well than those of its neighbourhood do.
    """
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, n)
    degrees = np.minimum(2 + 3 * rng.pareto(1.6, n), n // 4).astype(np.int64)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    cited = np.repeat(y, degrees)
    stranger = rng.random(len(cited)) < 0.25
    cited[stranger] = rng.integers(0, CLASSES, int(stranger.sum()))
    members = [rng.permutation(np.flatnonzero(y == c)) for c in range(CLASSES)]
    indices = np.empty(len(cited), np.int64)
    for c in range(CLASSES):
        chosen = cited == c
        indices[chosen] = members[c][(len(members[c]) * rng.random(int(chosen.sum())) ** 3).astype(np.int64)]
    x = np.zeros((n, n_words), np.float32)
    own_words = n_words // CLASSES
    for _ in range(12):
        from_own = rng.random(n) < 1 / 5
        words = np.where(from_own, own_words * y + rng.integers(0, own_words, n), rng.integers(0, n_words, n))
        x[np.arange(n), words] = 1
    order = rng.permutation(n)
    splits = {"train_idx": order[: n // 5], "test_idx": order[n // 5 : 2 * n // 5]}
    featstore.OutOfCoreGraph.create(path, indptr, indices, {"x": x}, {"y": y, **splits}, progress=False).close()
    return SimpleNamespace(path=path, x=x, y=y, **splits)
