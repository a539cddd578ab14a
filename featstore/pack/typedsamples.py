"""Checks of batches of a graph of several types: blocks of each type of edges, between nodes of the types of its two ends."""

from __future__ import annotations

from dataclasses import replace

import torch

from featstore.errors import PluginError
from featstore.sampling.batch import Block, SampledBatch
from featstore.topology.types import EdgeType, NodeType, Types

__all__ = ["check_types", "untyped"]


def _hops(batch: SampledBatch, types: Types) -> list[tuple[Block, ...]]:
    k = max(1, len(types.edges))
    return [batch.blocks[first : first + k] for first in range(0, len(batch.blocks), k)]


def untyped(batch: SampledBatch, types: Types) -> SampledBatch:
    """Join the blocks of each hop to one; the batch itself if the graph has one type.

    PluginError: the blocks of a hop have different numbers of sources or destinations.
    """
    if types.is_one:
        return batch
    joined = []
    for hop in _hops(batch, types):
        sizes = {(block.n_src, block.n_dst) for block in hop}
        if len(sizes) > 1:
            raise PluginError(f"the blocks of a hop have {sorted(sizes)} sources and destinations")
        (n_src, n_dst), src, dst = sizes.pop(), [block.src for block in hop], [block.dst for block in hop]
        joined.append(Block(torch.cat(src), torch.cat(dst), n_src, n_dst))
    return replace(batch, blocks=tuple(joined))


def check_types(batch: SampledBatch, types: Types) -> None:
    """Raise PluginError unless the ends of edges are of their types, and edges are numbered within theirs.

    The positions in the blocks must be valid. Does nothing if the graph has one type.
    """
    if types.is_one:
        return
    nodes = batch.nodes
    for hop in _hops(batch, types):
        for kind, block in zip(types.edges.values(), hop, strict=True):
            _check_kind(nodes[block.src], kind.src, f"a source of {kind.key!r}")
            _check_kind(nodes[block.dst], kind.dst, f"a destination of {kind.key!r}")
            _check_numbers(block, kind)


def _check_kind(ids: torch.Tensor, kind: NodeType, what: str) -> None:
    if len(ids) and not kind.first <= int(ids.min()) <= int(ids.max()) < kind.stop:
        raise PluginError(f"{what} is no node of type {kind.name!r}")


def _check_numbers(block: Block, kind: EdgeType) -> None:
    numbers = block.edge_pos
    last = kind.first_edge + kind.n_edges
    if numbers is not None and len(numbers) and not kind.first_edge <= int(numbers.min()) <= int(numbers.max()) < last:
        raise PluginError(f"an edge of {kind.key!r} has a number of another type")
