"""FENNEL and LDG by brute force: plain Python, every part compared, as the papers say."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Lists = Sequence[Sequence[int]]


def lists_of(indptr: np.ndarray, indices: np.ndarray) -> list[list[int]]:
    """Return the in-neighbours of every node."""
    return [indices[indptr[v] : indptr[v + 1]].tolist() for v in range(len(indptr) - 1)]


def power(x: float, exponent: float) -> float:
    """Return ``x ** exponent``, rounded as the compiled module does."""
    return math.sqrt(x) if exponent == 0.5 else x if exponent == 1.0 else math.pow(x, exponent)


def most_nodes(n: int, k: int) -> int:
    """Return the most nodes of one of ``k`` parts."""
    return max(-(-n // k), int(n * 1.1 / k))


def one_level(
    lists: Lists,
    nodes: Sequence[int],
    n_edges: int,
    k: int,
    passes: int,
    gamma: float,
    train: set[int],
    start: bool,
    within: dict[int, int] | None = None,
) -> tuple[dict[int, int], list[int]]:
    """Divide ``nodes`` into ``k`` parts; return the parts, and the neighbours found inside each in the last pass."""
    n, n_train, cap = len(nodes), len(train & set(nodes)), most_nodes(len(nodes), k)
    degree = gamma * (n_edges / 2) / max(1, n)
    a = degree * math.pow(k / max(1, n), gamma - 1)
    t = 0.5 * degree * math.pow(k / max(1, n_train), gamma - 1)
    part = {v: i * k // n for i, v in enumerate(nodes)} if start else {}
    inside = [0] * k
    for _ in range(passes):
        inside = [0] * k
        for v in nodes:
            part.pop(v, None)
            members = [[u for u, q in part.items() if q == p] for p in range(k)]
            scores = []
            for p in range(k):
                weight = a * power(float(len(members[p])), gamma - 1)
                if train:
                    weight = weight + t * power(float(len(train & set(members[p]))), gamma - 1)
                found = sum(part.get(u) == p for u in lists[v])
                scores.append(-math.inf if len(members[p]) >= cap else found - weight)
            part[v] = scores.index(max(scores))
            inside[part[v]] += sum(part.get(u) == part[v] and u != v for u in lists[v])
    return part, inside


def fennel(
    indptr: np.ndarray,
    indices: np.ndarray,
    k: int,
    passes: int = 3,
    gamma: float = 1.5,
    train: Sequence[int] = (),
    start: str | None = None,
    levels: tuple[int, int] | None = None,
) -> list[int]:
    """FENNEL over several passes, in one level or two."""
    lists, n, trained = lists_of(indptr, indices), len(indptr) - 1, set(train)
    first, second = levels or (k, 1)
    part, inside = one_level(lists, range(n), len(indices), first, passes, gamma, trained, start == "ranges")
    if levels is None:
        return [part[v] for v in range(n)]
    found = {}
    for g in range(first):
        nodes = [v for v in range(n) if part[v] == g]
        # Without any training node at all there is no term for them.
        inner, _ = one_level(lists, nodes, inside[g], second, passes, gamma, trained, start == "ranges")
        found |= {v: g * second + p for v, p in inner.items()}
    return [found[v] for v in range(n)]


def ldg(indptr: np.ndarray, indices: np.ndarray, k: int, passes: int = 3) -> list[int]:
    """LDG over several passes; without placed neighbours a node goes to the part with fewest nodes."""
    lists, n = lists_of(indptr, indices), len(indptr) - 1
    cap, part = most_nodes(n, k), [-1] * n
    for _ in range(passes):
        for v in range(n):
            part[v] = -1
            sizes = [part.count(p) for p in range(k)]
            scores = [sum(part[u] == p for u in lists[v]) * (1.0 - sizes[p] / cap) if sizes[p] < cap else -1.0 for p in range(k)]
            part[v] = scores.index(max(scores)) if max(scores) > 0 else sizes.index(min(sizes))
    return part
