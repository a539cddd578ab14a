"""FENNEL, LDG and PaGraph's algorithm by brute force: plain Python, every part compared, as the papers say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

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


def neighborhood(lists: list[list[int]], node: int, hops: int) -> tuple[set[int], int]:
    """The in-neighbours within some hops, and the node; and how many edges are followed to find them."""
    found, edge, n_edges = {node}, {node}, 0
    for _ in range(hops):
        n_edges += sum(len(lists[v]) for v in edge)
        edge = {u for v in edge for u in lists[v]} - found
        found |= edge
    return found, n_edges


def paths_to(lists: list[list[int]], node: int, hops: int, ends: set[int]) -> int:
    """Paths of one to ``hops`` edges, backwards from a node, that end in ``ends``."""

    @cache  # paths in cycles are exponentially many
    def paths(node: int, hops: int) -> int:
        return sum((u in ends) + (paths(u, hops - 1) if hops > 1 else 0) for u in lists[node])

    return paths(node, hops)


def pagraph(
    indptr: np.ndarray, indices: np.ndarray, order: list[int], k: int, hops: int, visits: int = 50, refreshes: int = 64
) -> tuple[list[set[int]], list[set[int]]]:
    """PaGraph's algorithm 1: each part's training nodes, and all its nodes; by paths once ``visits * E`` edges were followed."""
    lists, n = lists_of(indptr, indices), len(order)
    trained: list[set[int]] = [set() for _ in range(k)]
    whole: list[set[int]] = [set() for _ in range(k)]
    followed = done = 0

    def put(node: int, counts: list[int], sizes: list[int]) -> int:
        least, above = n // k, sum(len(each) > n // k for each in trained)
        free = [i for i in range(k) if len(trained[i]) < least or (len(trained[i]) == least and above < n % k)]
        score = {i: Fraction(1 + counts[i]) * (Fraction(n, k) - len(trained[i])) / (sizes[i] + 1) for i in free}
        best = min(free, key=lambda i: (-score[i], len(trained[i]), i))
        trained[best].add(node)
        return best

    while done < n and followed < visits * len(indices):
        found, n_edges = neighborhood(lists, order[done], hops)
        best = put(order[done], [len(each & found) for each in trained], [len(each) for each in whole])
        whole[best] |= found
        followed, done = followed + n_edges, done + 1
    chunk = max(1, -(-n // refreshes))
    for first in range(done, n, chunk):
        now, sizes = order[first : first + chunk], [len(each) for each in whole]
        counts = [[paths_to(lists, node, hops, each) for each in trained] for node in now]
        for node, of in zip(now, counts, strict=True):
            put(node, of, sizes)
        whole = [set().union(*(neighborhood(lists, v, hops)[0] for v in each)) for each in trained]
    return trained, whole
