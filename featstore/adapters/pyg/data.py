"""A mini-batch as PyG's ``Data``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch_geometric.data import Data

from featstore._core.blocks import begins_with
from featstore.errors import OptionError
from featstore.load.minibatch import MiniBatch
from featstore.sampling.batch import Block

__all__ = ["check_names", "default_features", "edges_by_hop", "sampled_nodes", "to_data"]

# What a batch has besides its features: no feature may have such a name.
SAMPLED = ("edge_index", "n_id", "e_id", "batch_size", "input_id", "num_nodes", "num_sampled_nodes", "num_sampled_edges")

_EDGE_NAMES = {"edge_pos": "e_id", "weight": "edge_weight"}  # PyG's, of what an edge has


class _Kept:
    """Keeps the mini-batch, and so its memory counted, while the ``Data`` lives; deep copies and pickles keep nothing."""

    def __init__(self, batch: MiniBatch | None = None) -> None:
        self._batch = batch

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def to_data(batch: MiniBatch, input_id: torch.Tensor | None = None) -> Data:
    """Return a mini-batch as PyG's ``Data``.

    Parameters
    ----------
    batch : MiniBatch
    input_id : int64 tensor, shape (n_seeds,), optional
        What PyG calls the seeds' positions among the loader's; the seeds themselves by default, as for a mask.

    Returns
    -------
    torch_geometric.data.Data
        The features by their names, and those of edges, in the order of ``edge_index``; ``y``, the first of the labels, and
        others by their names, of the seeds alone; ``edge_index``, row 0 the sources; ``n_id``; ``batch_size``, how many of the
        first nodes are seeds; ``input_id``; ``num_nodes``; ``num_sampled_nodes``, of the seeds and of each hop;
        ``num_sampled_edges``, of each hop; ``e_id`` and ``edge_weight`` where the blocks have edge positions and weights.

    Raises
    ------
    OptionError
        A feature or a label is named like one of these; a history has pruned the batch, so that layers do not follow each other.

    Notes
    -----
    PyG's ``trim_to_layer`` leaves each layer the nodes and edges that its hop and those before it added. So each node has the
    neighbours that it drew in the first hop after it joined. A sampler with ``redraw=False`` draws no others; its edges, in one
    array, are not copied. Of other samplers the edges are copied, and what nodes draw anew in later hops is left out. Features,
    ``y`` and ``n_id`` are never copied.
    """
    if batch.history is not None:
        raise OptionError("history", "PyG's batches have one list of nodes, and pruned layers have not: use the blocks")
    has_weights = any(block.weight is not None for block in batch.blocks)
    check_names((*batch.features, *batch.edge_features), tuple(batch.labels), has_weights=has_weights)
    edge_index, arrays, n_edges = edges_by_hop(batch.blocks)
    data = Data(edge_index=edge_index)
    for name, rows in batch.features.items():
        data[name] = rows
    for name, of_blocks in batch.edge_features.items():
        data[name] = _rows_by_hop(batch.blocks, of_blocks)
    for i, (name, rows) in enumerate(batch.labels.items()):
        data["y" if i == 0 else name] = rows
    data.n_id = batch.input_ids
    for name, values in arrays.items():
        data[_EDGE_NAMES[name]] = values
    data.num_nodes = len(batch.input_ids)
    data.batch_size = len(batch.seeds)
    data.input_id = batch.seeds if input_id is None else input_id
    data.num_sampled_nodes = sampled_nodes(len(batch.input_ids), batch.blocks)
    data.num_sampled_edges = n_edges
    data.__dict__["_featstore"] = _Kept(batch)
    return data


def check_names(features: Collection[str], labels: Sequence[str], *, has_weights: bool = False) -> None:
    """Raise OptionError where a feature, or a label after the first, has the name of what every batch has, or of each other."""
    own = {*SAMPLED, *["y"][: len(labels)], *["edge_weight"][:has_weights]}
    for option, names in (("features", features), ("labels", labels[1:])):
        for name in names:
            if name in own:
                raise OptionError(option, f"a batch of PyG has an attribute {name!r} of its own: leave that {option[:-1]} out")
        own |= {*names}


def default_features(names: Iterable[str], option: str) -> tuple[str, ...]:
    """Return the features that a batch gets where none are named: ``x``, or the only one; OptionError where that is unclear."""
    found = tuple(names)
    if "x" in found:
        return ("x",)
    if len(found) > 1:
        raise OptionError(option, f"there is no feature 'x': name some of {', '.join(map(repr, found))}")
    return found


def sampled_nodes(n_nodes: int, blocks: tuple[Block, ...]) -> list[int]:
    """Return the number of seeds, and of nodes that each hop added."""
    return [blocks[-1].n_dst, *(block.n_src - block.n_dst for block in reversed(blocks))] if blocks else [n_nodes]


def edges_by_hop(blocks: tuple[Block, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[int]]:
    """Return the edges that each hop added, hop after hop; ``blocks`` come outermost first.

    Local sources and destinations, int64 [2, n_edges]; their ``edge_pos`` and ``weight``, where all blocks have them; and how
    many each hop added, the seeds' own first: those whose destination is none of the hop before.
    """
    if not blocks:
        return torch.empty((2, 0), dtype=torch.int64, device="cpu"), {}, []
    hops = blocks[::-1]
    firsts = _firsts(hops)
    counts = [len(hop.src) - first for first, hop in zip(firsts, hops, strict=True)]
    arrays = [hop.edge_arrays for hop in hops]
    common = [name for name in arrays[0] if all(name in each for each in arrays)]
    if all(_begins_with(hop, first, before) for before, first, hop in zip(hops, firsts[1:], hops[1:], strict=False)):
        outer = blocks[0]
        return _stacked(outer.src, outer.dst), {name: arrays[-1][name] for name in common}, counts

    def joined(parts: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        _join([part[first:] for first, part in zip(firsts, parts, strict=True)], out)
        return out

    n, device = sum(counts), hops[0].src.device
    edge_index = torch.empty((2, n), dtype=torch.int64, device=device)
    joined([hop.src for hop in hops], edge_index[0])
    joined([hop.dst for hop in hops], edge_index[1])
    found = {name: torch.empty(n, dtype=arrays[0][name].dtype, device=device) for name in common}
    return edge_index, {name: joined([each[name] for each in arrays], out) for name, out in found.items()}, counts


def _firsts(hops: tuple[Block, ...]) -> list[int]:
    """Return the first edge of each hop that the hop before has not: destinations ascend, so those that it added come last."""
    return [0] + [_first_of(hop.dst, before.n_dst) for before, hop in pairwise(hops)]


def _rows_by_hop(blocks: tuple[Block, ...], rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the rows of the edges that :func:`edges_by_hop` returns, of the rows of each block's edges."""
    hops, of_hops = blocks[::-1], rows[::-1]
    if not hops:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    firsts = _firsts(hops)
    if all(_begins_with(hop, first, before) for before, first, hop in zip(hops, firsts[1:], hops[1:], strict=False)):
        return rows[0]
    return torch.cat([each[first:] for first, each in zip(firsts, of_hops, strict=True)])


# In host memory torch does none of these: it would start its OpenMP threads, which take the processors from the loader's. The
# first two keep the GIL: who takes it meanwhile keeps it for up to 5 ms, a third of a packed batch.


def _first_of(ascending: torch.Tensor, value: int) -> int:
    if ascending.device.type == "cpu":
        return bisect_left(ascending.numpy(), value)
    return int(torch.searchsorted(ascending, value))


def _starts_with(values: torch.Tensor, first: torch.Tensor) -> bool:
    if values.device.type == "cpu":
        if values.dtype == torch.int64:
            return begins_with(values.numpy(), first.numpy())
        return np.array_equal(values.numpy()[: len(first)], first.numpy())
    return torch.equal(values[: len(first)], first)


def _join(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    if out.device.type == "cpu":
        np.concatenate([part.numpy() for part in parts], out=out.numpy())
    else:
        torch.cat(parts, out=out)


def _begins_with(block: Block, n: int, before: Block) -> bool:
    """Whether the first ``n`` edges of a block, and no fewer, are those of the hop before."""
    if len(before.src) != n:
        return False
    return all(
        mine.data_ptr() == other.data_ptr() or _starts_with(mine, other)
        for mine, other in zip(block.tensors, before.tensors, strict=False)
    )


def _stacked(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """Return sources and destinations as one tensor: a view, where they lie in one."""
    n, step = len(src), dst.storage_offset() - src.storage_offset()
    together = src.untyped_storage().data_ptr() == dst.untyped_storage().data_ptr()
    if n and together and step >= n and src.is_contiguous() and dst.is_contiguous():
        return src.as_strided((2, n), (step, 1))
    return torch.stack((src, dst))
