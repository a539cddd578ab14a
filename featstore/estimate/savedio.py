"""Saved I/O: the reads that a row or an embedding in memory would save, and the split of memory that saves the most (OUTRE)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.sampling.batch import SampledBatch, Sampler
from featstore.sampling.batches import Batches
from featstore.sampling.foreign import checked_sampler
from featstore.sampling.sampledbatches import Drawn

__all__ = ["STEPS", "SavedIO", "Split", "best_split", "edges_drawn", "prefix_sums"]

Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

STEPS = 100  # of alpha, from 0 to 1
NEVER = -1


class SavedIO:
    """Accesses of an epoch by node, and the cost that a kept embedding saves by not expanding a node of the seeds' own hop.

    Attributes
    ----------
    accesses : int64 array, shape (n,)
        Batches that have the node: the reads that its row in memory saves.
    edges : int64 array, shape (n,)
        Edges drawn below the node, from lists that are not in memory.
    rows : int64 array, shape (n,)
        Rows that the node was the first to bring into its batch, its own row included.
    drawn : int64 array, shape (n,)
        Edges that the node drew itself, in all hops, from a list that is not in memory: the draws that its list in memory saves.
    n_batches, n_edges, n_rows : int
        Batches so far, the edges that they drew, and their rows.

    Notes
    -----
    A node that joins in a later hop is credited to the node that drew it first, and so on up to a node of the seeds' own hop.
    So each row and each edge is credited once. (The paper counts an edge once for each node that leads to it.) A kept node is
    credited only in batches in which it would be pulled: it is no seed, and was pushed at most ``staleness`` steps ago. Each node
    is judged alone, as if no other node's embedding were kept.

    ``BYTES`` bytes a node; linear in the edges of a batch. Sheng et al.: OUTRE, VLDB 2024, sections 4.4 and 5.3.
    """

    BYTES = 36

    def __init__(self, n: int, staleness: int) -> None:
        self.n, self.staleness = n, staleness
        self.accesses, self.edges, self.rows, self.drawn = (np.zeros(n, np.int64) for _ in range(4))
        self._pushed = np.full(n, NEVER, np.int32)
        self.n_batches = self.n_edges = self.n_rows = 0

    def add(self, sampled: SampledBatch, is_outside: Callable[[Int64s], npt.NDArray[np.bool_]]) -> None:
        """Count the next batch, sampled without pruning, by a sampler whose nodes draw anew in every hop.

        ``is_outside(nodes)`` marks the nodes whose lists are not in memory.
        """
        ids = sampled.input_ids.numpy()
        last, *later = reversed(sampled.blocks)
        step, outside = self.n_batches, is_outside(ids)
        top = np.arange(len(ids))  # for each node, the node of the seeds' own hop that brought it in
        edges = np.zeros(last.n_src, np.int64)
        drawn = np.bincount(last.dst.numpy(), minlength=len(ids))
        for block in later:
            src, dst = block.src.numpy(), block.dst.numpy()
            # Assigned backwards, so that the first edge to a source is kept.
            first = np.empty(block.n_src, np.int64)
            first[src[::-1]] = dst[::-1]
            top[block.n_dst : block.n_src] = top[first[block.n_dst :]]
            by_node = np.bincount(dst, minlength=len(ids))
            drawn += by_node
            expanded = np.flatnonzero(outside & (by_node > 0))
            edges += np.bincount(top[expanded], by_node[expanded], minlength=last.n_src).astype(np.int64)
        self.accesses[ids] += 1
        self.drawn[ids] += np.where(outside, drawn, 0)
        hop = ids[: last.n_src]
        pushed = self._pushed[hop]
        pulled = (pushed != NEVER) & (step - pushed <= self.staleness)
        pulled[: sampled.n_seeds] = False
        self.edges[hop[pulled]] += edges[pulled]
        self.rows[hop[pulled]] += np.bincount(top, minlength=last.n_src)[pulled]
        self._pushed[hop[~pulled]] = step
        self.n_batches += 1
        self.n_edges += int(drawn.sum())
        self.n_rows += len(ids)

    def embeddings(self, beta: float) -> Floats:
        """Compute the reads that each node's embedding saves, in rows (equation 4); an edge costs ``beta``."""
        saved: Floats = np.float64(beta) * self.edges.astype(np.float64) + self.rows
        return saved


def edges_drawn(sampler: Sampler, batches: Batches, n: int, epoch: int = 0) -> Int64s:
    """Sample an epoch, and count the edges that each node draws from its list, int64 [n].

    These are the ``counts=`` of ``g.cache_neighbors(…, policy="saved_io")``: Sheng et al.: OUTRE, VLDB 2024, section 4.4.
    """
    counts, drawn = np.zeros(n, np.int64), Drawn(checked_sampler(sampler, n), batches)
    order = drawn.epoch(epoch)
    with closing(order.windowed(0)) as windowed:
        for index in range(len(order)):
            sampled = windowed.sample(index)
            nodes = sampled.nodes.numpy()
            for block in sampled.blocks:
                # A node that is there several times draws several times.
                np.add.at(counts, nodes[: block.n_dst], np.bincount(block.dst.numpy(), minlength=block.n_dst))
    drawn.trim()
    return counts


def prefix_sums(values: npt.NDArray[Any], order: npt.NDArray[Any] | None = None) -> Floats:
    """Compute the sums of the first 0, 1 … n values, float64 [n + 1]; the values in ``order``, by default the largest first."""
    ordered = np.sort(values)[::-1] if order is None else values[order]
    return np.concatenate([np.zeros(1), np.cumsum(ordered, dtype=np.float64)])


@dataclass(frozen=True)
class Split:
    """Divisions of memory between features and embeddings, for each alpha, the embeddings' share, that was tried.

    ``n_bytes`` are divided. At each of ``alphas``, ``features``, ``embeddings`` and ``lists`` of neighbours have the reads saved
    in an epoch, in rows; ``nodes`` has the number of embeddings kept. Lists count only if they share the features' memory.
    ``alphas[taken]`` saves the most; of equals it is the least. ``beta`` is the cost of a sampled edge, in reads of a row.
    """

    n_bytes: int
    alphas: list[float]
    features: list[float]
    embeddings: list[float]
    lists: list[float]
    nodes: list[int]
    taken: int
    beta: float = 1.0

    @property
    def alpha(self) -> float:
        """The taken share of embeddings."""
        return self.alphas[self.taken]

    @property
    def benefits(self) -> list[float]:
        """Total reads saved at each alpha (equation 5)."""
        return [sum(each) for each in zip(self.features, self.embeddings, self.lists, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "alpha": self.alpha,
            "beta": self.beta,
            "bytes": self.n_bytes,
            "nodes": self.nodes[self.taken],
            "curve": {
                "alpha": self.alphas,
                "features": self.features,
                "embeddings": self.embeddings,
                "lists": self.lists,
                "nodes": self.nodes,
                "saved": self.benefits,
            },
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Split:
        """Restore the split from the result of :meth:`to_dict`."""
        curve = found["curve"]
        features, embeddings, lists = (curve[name] for name in ("features", "embeddings", "lists"))
        taken = curve["alpha"].index(found["alpha"])
        return cls(found["bytes"], curve["alpha"], features, embeddings, lists, curve["nodes"], taken, found["beta"])

    def table(self) -> str:
        """Format the curve as text, a line for every tenth, and one for the taken alpha."""
        lines = [f"{'alpha':>7}{'nodes':>12}{'embeddings':>14}{'features':>14}{'lists':>14}{'saved':>14}"]
        benefits = self.benefits
        for k, alpha in enumerate(self.alphas):
            if k % max(1, STEPS // 10) == 0 or k == self.taken:
                cells = (self.embeddings[k], self.features[k], self.lists[k], benefits[k])
                mark = "*" if k == self.taken else " "
                lines.append(f"{mark}{alpha:>6.2f}{self.nodes[k]:>12,}" + "".join(f"{each:>14,.0f}" for each in cells))
        return "\n".join(lines)


def best_split(
    n_bytes: int,
    embeddings: Floats,
    embedding_bytes: int,
    features: Callable[[int], float],
    lists: Callable[[int], float] = lambda n_bytes: 0.0,
    beta: float = 1.0,
) -> Split:
    """Divide ``n_bytes`` so that the most I/O is saved (equation 5); alpha = 0, 0.01 … 1 is the embeddings' share.

    ``embeddings`` has the reads that each node's embedding saves. Embeddings that save none are never kept; the others take
    ``embedding_bytes`` each, tables included. ``features(n)`` and ``lists(n)`` return the reads that a cache of ``n`` bytes
    saves. ``beta`` is only stored in the result.
    """
    sums = prefix_sums(embeddings[embeddings > 0])
    steps = range(STEPS + 1)
    found = Split(n_bytes, [k / STEPS for k in steps], [], [], [], [], 0, beta)
    for k in steps:
        of_embeddings = n_bytes * k // STEPS
        kept = min(len(sums) - 1, of_embeddings // embedding_bytes)
        found.nodes.append(kept)
        found.embeddings.append(float(sums[kept]))
        found.features.append(float(features(n_bytes - of_embeddings)))
        found.lists.append(float(lists(n_bytes - of_embeddings)))
    return replace(found, taken=int(np.argmax(found.benefits)))
