"""Saved I/O: the reads that a row or an embedding in memory would save, and the split of memory that saves most (OUTRE)."""

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
    """Accesses of an epoch by node, and the cost of expanding a node of the seeds' own hop where a kept embedding would do.

    Attributes
    ----------
    accesses : int64 array, shape (n,)
        Batches that have the node: what its row in memory saves.
    edges : int64 array, shape (n,)
        Edges drawn below the node, from lists that are not in memory.
    rows : int64 array, shape (n,)
        Rows that the node was the first to bring into its batch, its own among them.
    drawn : int64 array, shape (n,)
        Edges that the node drew itself from a list that is not in memory, in all hops: what its list in memory saves.
    n_batches, n_edges, n_rows : int
        Batches so far, the edges that they drew, and their rows.

    Notes
    -----
    A node that joins in a later hop is credited to the node that drew it first, and so on up to a node of the seeds' own hop.
    So each row and each edge is credited once. (The paper counts edges that several nodes lead to once for each.) A kept node
    is credited in those batches alone in which it would be pulled: not where it is a seed, and not where it was never pushed,
    or longer ago than ``staleness`` steps. As nodes are decided on one by one, no other node's embedding matters.

    ``BYTES`` bytes a node; linear in the edges of a batch. Sheng et al.: OUTRE, VLDB 2024, sections 4.4 and 5.3.
    """

    BYTES = 36

    def __init__(self, n: int, staleness: int) -> None:
        self.n, self.staleness = n, staleness
        self.accesses, self.edges, self.rows, self.drawn = (np.zeros(n, np.int64) for _ in range(4))
        self._pushed = np.full(n, NEVER, np.int32)
        self.n_batches = self.n_edges = self.n_rows = 0

    def add(self, sampled: SampledBatch, is_outside: Callable[[Int64s], npt.NDArray[np.bool_]]) -> None:
        """Count the next batch, one that was sampled whole by nodes that draw anew in every hop.

        ``is_outside(nodes)`` says whose lists are not in memory.
        """
        ids = sampled.input_ids.numpy()
        last, *later = reversed(sampled.blocks)
        step, outside = self.n_batches, is_outside(ids)
        top = np.arange(len(ids))  # the node of the seeds' own hop that has brought each
        edges = np.zeros(last.n_src, np.int64)
        drawn = np.bincount(last.dst.numpy(), minlength=len(ids))
        for block in later:
            src, dst = block.src.numpy(), block.dst.numpy()
            # Assigned backwards, the first edge to a source stays.
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
        """Return the reads of a row that each node's embedding saves (equation 4); an edge costs ``beta``."""
        saved: Floats = np.float64(beta) * self.edges.astype(np.float64) + self.rows
        return saved


def edges_drawn(sampler: Sampler, batches: Batches, n: int, epoch: int = 0) -> Int64s:
    """Sample an epoch, and count the edges that each node draws from its list, int64 [n].

    These are the ``counts=`` of ``g.cache_neighbors(…, policy="saved_io")``: Sheng et al.: OUTRE, VLDB 2024, section 4.4.
    """
    counts, drawn = np.zeros(n, np.int64), Drawn(checked_sampler(sampler, n), batches)
    order = drawn.epoch(epoch)
    with closing(order.in_turn(0)) as turns:
        for index in range(len(order)):
            sampled = turns.sample(index)
            for block in sampled.blocks:
                counts[sampled.input_ids[: block.n_dst].numpy()] += np.bincount(block.dst.numpy(), minlength=block.n_dst)
    drawn.trim()
    return counts


def prefix_sums(values: npt.NDArray[Any], order: npt.NDArray[Any] | None = None) -> Floats:
    """Return the sums of the first 0, 1 … n values, float64 [n + 1]: the largest first, or as ``order`` says."""
    ordered = np.sort(values)[::-1] if order is None else values[order]
    return np.concatenate([np.zeros(1), np.cumsum(ordered, dtype=np.float64)])


@dataclass(frozen=True)
class Split:
    """The memory divided between features and embeddings, for each alpha, the embeddings' share, that was tried.

    Of ``n_bytes``: the reads that ``features``, ``embeddings`` and ``lists`` of neighbours save an epoch at each of ``alphas``,
    in rows (lists only where they share the features' memory), and the embeddings kept (``nodes``). ``alphas[taken]`` saves
    most; of equals it is the least. ``beta``: what an edge that is sampled costs, in reads of a row.
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
        """The share that was taken."""
        return self.alphas[self.taken]

    @property
    def benefits(self) -> list[float]:
        """Reads that are saved in all at each alpha (equation 5)."""
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
        """Return the split that :meth:`to_dict` wrote."""
        curve = found["curve"]
        features, embeddings, lists = (curve[name] for name in ("features", "embeddings", "lists"))
        taken = curve["alpha"].index(found["alpha"])
        return cls(found["bytes"], curve["alpha"], features, embeddings, lists, curve["nodes"], taken, found["beta"])

    def table(self) -> str:
        """Return the curve as text, a line for every tenth, and for the alpha that was taken."""
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
    """Divide ``n_bytes`` so that most I/O is saved (equation 5): alpha = 0, 0.01 … 1 of them for embeddings.

    ``embeddings`` has what each node's saves; those of no use are never kept, the others take ``embedding_bytes``, tables
    included. ``features(n)`` and ``lists(n)`` return the reads that a cache of so many bytes saves. ``beta`` is kept for the
    record.
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
