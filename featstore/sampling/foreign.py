"""Samples of other makes: what any sampler may return, as the library's own form. No framework is imported.

Accepted are, by their attributes alone:

- a :class:`SampledBatch`;
- ``(input_ids, blocks)``: blocks outermost first, each a :class:`Block` or ``(src, dst, n_src, n_dst)``;
- DGL's ``(input_nodes, output_nodes, blocks)``: message-flow graphs with ``edges()``, ``num_src_nodes()``, ``num_dst_nodes()``;
- PyG's sampler output or batch: ``node`` (or ``n_id``), ``row`` and ``col`` (or ``edge_index``), ``num_sampled_nodes`` and
  ``num_sampled_edges``: layer ``i`` gets the nodes and edges that ``trim_to_layer`` leaves it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from featstore.errors import PluginError
from featstore.sampling.batch import Block, SampledBatch

__all__ = ["as_sampled"]


def _ids(values: Any) -> torch.Tensor:
    tensor = values.detach().cpu() if isinstance(values, torch.Tensor) else torch.as_tensor(np.asarray(values))
    if tensor.ndim != 1 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise PluginError(f"a sampler returned ids of {tensor.dtype} and {tensor.ndim} dimensions, not 1-D integers")
    return tensor.to(torch.int64)


def _block(src: Any, dst: Any, n_src: int, n_dst: int) -> Block:
    """Make a block, its edges ordered by destination."""
    sources, destinations = _ids(src), _ids(dst)
    if len(sources) != len(destinations):
        raise PluginError(f"a sampler returned {len(sources)} sources for {len(destinations)} destinations")
    if len(destinations) > 1 and bool((destinations[1:] < destinations[:-1]).any()):
        destinations, order = torch.sort(destinations, stable=True)
        sources = sources[order]
    return Block(sources, destinations, int(n_src), int(n_dst))


def _dgl_block(block: Any) -> Block:
    src, dst = block.edges()
    return _block(src, dst, block.num_src_nodes(), block.num_dst_nodes())


def _pyg_blocks(sample: Any) -> tuple[torch.Tensor, tuple[Block, ...]]:
    nodes = _ids(sample.node if getattr(sample, "node", None) is not None else sample.n_id)
    row, col = sample.edge_index if getattr(sample, "row", None) is None else (sample.row, sample.col)
    row, col = _ids(row), _ids(col)
    n_nodes = [int(n) for n in sample.num_sampled_nodes]  # of the seeds, then of each hop
    n_edges = [int(n) for n in sample.num_sampled_edges]
    if len(n_nodes) != len(n_edges) + 1 or sum(n_nodes) != len(nodes) or sum(n_edges) != len(row):
        raise PluginError(f"{n_nodes} sampled nodes and {n_edges} sampled edges a hop do not make up the sample")
    blocks = []
    for hop in range(len(n_edges), 0, -1):  # the outermost layer first
        k = sum(n_edges[:hop])
        blocks.append(_block(row[:k], col[:k], sum(n_nodes[: hop + 1]), sum(n_nodes[:hop])))
    return nodes, tuple(blocks)


def as_sampled(sample: Any, num_nodes: int, epoch: int, index: int) -> SampledBatch:
    """Return what a sampler returned as a checked :class:`SampledBatch`.

    Parameters
    ----------
    sample : object
        In one of the forms above.
    num_nodes : int
    epoch, index : int
        The batch's place.

    Raises
    ------
    PluginError
        In none of the forms; ids that are no nodes or occur twice; blocks that do not fit each other.

    Notes
    -----
    A :class:`SampledBatch` is taken as it is, but for its epoch and index.
    """
    if isinstance(sample, SampledBatch):
        return SampledBatch(index, epoch, sample.input_ids, sample.n_seeds, sample.blocks)
    if hasattr(sample, "num_sampled_nodes"):
        nodes, blocks = _pyg_blocks(sample)
    elif isinstance(sample, (tuple, list)) and len(sample) in (2, 3):
        nodes = _ids(sample[0])
        blocks = tuple(
            block if isinstance(block, Block) else _dgl_block(block) if hasattr(block, "num_dst_nodes") else _block(*block)
            for block in sample[-1]
        )
    else:
        raise PluginError(f"a sampler returned {type(sample).__name__}, which is no form of (input_ids, blocks)")
    _check(nodes, blocks, num_nodes)
    return SampledBatch(index, epoch, nodes, blocks[-1].n_dst, blocks)


def _check(nodes: torch.Tensor, blocks: tuple[Block, ...], num_nodes: int) -> None:
    ids = nodes.numpy()
    if not blocks:
        raise PluginError("a sampler returned no blocks")
    if len(ids) and (ids.min() < 0 or ids.max() >= num_nodes):
        raise PluginError(f"a sampler returned node {ids[(ids < 0) | (ids >= num_nodes)][0]}; there are {num_nodes}")
    if len(np.unique(ids)) < len(ids):
        raise PluginError("a sampler returned a node twice in one batch")
    n = len(ids)
    for hop, block in enumerate(blocks):
        if block.n_src != n or not 0 <= block.n_dst <= n:
            raise PluginError(f"block {hop} has {block.n_src} sources and {block.n_dst} destinations; {n} nodes were expected")
        if len(block.src) and (int(block.src.min()) < 0 or int(block.src.max()) >= n):
            raise PluginError(f"block {hop} names a source outside its {n}")
        if len(block.dst) and (int(block.dst[0]) < 0 or int(block.dst[-1]) >= block.n_dst):
            raise PluginError(f"block {hop} names a destination outside its {block.n_dst}")
        n = block.n_dst
