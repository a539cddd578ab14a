"""Sampling hop by hop, one neighbour at a time in Python integers: what is the same for every sampler but its draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from featstore.sampling.batch import SampledBatch

Blocks: TypeAlias = "list[tuple[list[int], list[int], int, int]]"  # sources, destinations, how many there are of each
Drawn: TypeAlias = "Callable[[int, list[int]], Iterable[tuple[int, int]]]"


def grown(seeds: list[int], n_hops: int, drawn: Drawn, redraw: bool = True) -> tuple[list[int], Blocks]:
    """Return the nodes of a batch, and its blocks, outermost first.

    ``drawn(hop, nodes)`` gives the edges that nodes draw: the place of each one's destination among them, and its source. With
    ``redraw`` all nodes draw in each hop; without it those alone that have not drawn yet, and earlier hops' edges stay.
    """
    nodes = list(seeds)
    number = {node: i for i, node in enumerate(nodes)}
    blocks: Blocks = []
    src: list[int] = []
    dst: list[int] = []
    n_dst = 0
    for hop in range(n_hops):
        first, n_dst, src, dst = (0, len(nodes), [], []) if redraw else (n_dst, len(nodes), list(src), list(dst))
        for place, source in drawn(hop, nodes[first:n_dst]):
            if source not in number:
                number[source] = len(nodes)
                nodes.append(source)
            src.append(number[source])
            dst.append(first + place)
        blocks.append((src, dst, len(nodes), n_dst))
    return nodes, blocks[::-1]


def check_batch(batch: SampledBatch, expected: tuple[list[int], Blocks], n_seeds: int, epoch: int, index: int) -> None:
    """Assert that a batch has these nodes and blocks."""
    nodes, blocks = expected
    assert batch.input_ids.tolist() == nodes
    assert (batch.index, batch.epoch, batch.n_seeds) == (index, epoch, n_seeds)
    assert [(b.src.tolist(), b.dst.tolist(), b.n_src, b.n_dst) for b in batch.blocks] == blocks
