"""Table 2 of the in-situ paper (papers.figures.insitu): bytes of an epoch by what is read, beside those of its sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.tools.harness import PAGE_BYTES

BLOCKS = (512, 4096)  # random access: bytes of a block


class Lists:
    """The neighbour lists of a graph in memory, to look up where drawn neighbours lie."""

    def __init__(self, g: Any) -> None:
        g.cache_neighbors()
        self.n, self.width, self.nbytes = g.num_nodes, g.topology.id_bytes, g.topology.nbytes
        self.indptr = np.concatenate([[0], np.cumsum(g.topology.degrees())])
        self._keys = np.repeat(np.arange(self.n), np.diff(self.indptr)) * self.n + g.neighbor_cache.records

    def drawn_at(self, ids: npt.NDArray[np.int64], block: Any) -> npt.NDArray[np.int64]:
        """Return the bytes at which the neighbours of a block begin: lists ascend, so each is found in its own."""
        return np.searchsorted(self._keys, ids[block.dst.numpy()] * self.n + ids[block.src.numpy()]) * self.width


def moved_bytes(lists: Lists, n_hops: int, order: Any, n_batches: int | None = None) -> dict[str, int]:
    """Return the bytes of an epoch's sample, or of its first batches, and those that each way to read it moves."""
    indptr, width = lists.indptr, lists.width
    needed = [np.zeros(-(-lists.nbytes // PAGE_BYTES), bool) for _ in range(n_hops)]
    ways = ["sample", "whole lists", *(f"blocks of {size}" for size in BLOCKS), "the file a batch"]
    moved = dict.fromkeys(ways, 0)
    for position in range(len(order) if n_batches is None else n_batches):
        batch, seen = order.sample(position), 0
        ids = batch.input_ids.numpy()
        for hop, block in enumerate(reversed(batch.blocks)):
            moved["sample"] += width * len(block.src)
            fresh = ids[seen : block.n_dst]
            first, end = indptr[fresh] * width, indptr[fresh + 1] * width
            moved["whole lists"] += int((end - first).sum())
            needed[hop] |= pages_of(first, end, len(needed[hop]))
            at = lists.drawn_at(ids, block)
            for size in BLOCKS:
                moved[f"blocks of {size}"] += size * len(np.unique(at // size))
            seen = block.n_dst
        moved["the file a batch"] += lists.nbytes
    moved["the file a hop"] = n_hops * lists.nbytes
    moved["needed pages a hop"] = sum(int(each.sum()) for each in needed) * PAGE_BYTES
    return moved


def pages_of(first: npt.NDArray[np.int64], end: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.bool_]:
    """Mark the pages, of ``n``, that byte ranges touch."""
    has = end > first
    marks = np.zeros(n + 1, np.int64)
    np.add.at(marks, first[has] // PAGE_BYTES, 1)
    np.add.at(marks, (end[has] - 1) // PAGE_BYTES + 1, -1)
    return np.cumsum(marks)[:n] > 0


def table(dataset: Path, name: str, fanouts_of: dict[str, list[int]], batch_size: int, row: Callable[..., None]) -> None:
    """Table 2 in bytes, of one graph; ``row`` is a setting's."""
    import featstore
    from featstore.sampling.sampledbatches import Drawn

    with featstore.open(dataset, memory="4GiB") as g:
        lists = Lists(g)
        for label, fanouts in fanouts_of.items():
            sampler = featstore.NeighborSampler(g, fanouts, seed=1)
            order = Drawn(sampler, featstore.RandomBatches(g.node_data["seeds"], batch_size, seed=3)).epoch(0)
            moved = moved_bytes(lists, len(fanouts), order)
            for way, n_bytes in moved.items():
                of = None if way == "sample" else "the sample's bytes"
                more = {} if of is None else {"references": [float(max(1, moved["sample"]))]}
                row(name, way, label, [float(n_bytes)], "B an epoch", of, batches=len(order), **more)
