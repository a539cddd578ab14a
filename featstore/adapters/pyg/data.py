"""A mini-batch as PyG's ``Data``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData

from featstore._core.blocks import begins_with
from featstore.config import listed
from featstore.errors import OptionError
from featstore.gather.arrays import first_seen
from featstore.load.heterobatch import HeteroMiniBatch
from featstore.load.minibatch import LoadedBatch, MiniBatch
from featstore.sampling.batch import Block

__all__ = [
    "GivenSeeds",
    "check_names",
    "default_features",
    "edges_by_hop",
    "sampled_nodes",
    "seeds_edges",
    "to_data",
    "to_hetero_data",
]

# Names of a batch's attributes besides its features; no feature may have such a name.
SAMPLED = ("edge_index", "n_id", "e_id", "batch_size", "input_id", "num_nodes", "num_sampled_nodes", "num_sampled_edges")

_EDGE_NAMES = {"edge_pos": "e_id", "weight": "edge_weight"}  # PyG's prefix of edge attributes


class _Kept:
    """Holder of the mini-batch while the ``Data`` lives, so that its memory is counted; deep copies and pickles drop it."""

    def __init__(self, batch: LoadedBatch | None = None) -> None:
        self._batch = batch

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def to_data(batch: MiniBatch, input_id: torch.Tensor | None = None) -> Data:
    """Return a mini-batch as PyG's ``Data``.

    Parameters
    ----------
    batch : MiniBatch
    input_id : int64 tensor, shape (n_given,), optional
        The seeds' positions among the loader's seeds, in PyG's sense; by default the seeds themselves, as for a mask.

    Returns
    -------
    torch_geometric.data.Data
        The features by their names, edge features in the order of ``edge_index``; ``y``, the first of the labels, and other
        labels by their names, for the seeds alone; ``edge_index``, with sources in row 0; ``n_id``; ``batch_size``, the number
        of seeds, which are the first nodes; ``input_id``; ``num_nodes``; ``num_sampled_nodes``, of the seeds and of each hop;
        ``num_sampled_edges``, of each hop; ``e_id`` and ``edge_weight`` if the blocks have edge positions and weights; ``batch``,
        the number of each node's subgraph, if there is one for each seed (of seeds that repeat, for each distinct one).

    Raises
    ------
    OptionError
        A feature or a label is named like one of these; a history has pruned the batch, so that layers do not follow each other.

    Notes
    -----
    PyG's ``trim_to_layer`` leaves each layer the nodes and edges that its hop and earlier hops added. So each node has the
    neighbours that it drew in the first hop after it joined. A sampler with ``redraw=False`` draws no others; its edges, in one
    array, are not copied. With other samplers the edges are copied, and neighbours drawn anew in later hops are left out.
    Features, ``y`` and ``n_id`` are not copied, unless seeds repeat: PyG has a node for each seed as it was given, so each gets a
    copy of its row and of the edges that it drew.
    """
    if batch.history is not None:
        raise OptionError("history", "PyG's batches have one list of nodes, and pruned layers have not: use the blocks")
    has_weights = any(block.weight is not None for block in batch.blocks)
    check_names((*batch.features, *batch.edge_features), tuple(batch.labels), has_weights, batch.batch is not None)
    edge_index, arrays, n_edges = edges_by_hop(batch.blocks)
    arrays = {_EDGE_NAMES[name]: values for name, values in arrays.items()}
    arrays |= {name: _rows_by_hop(batch.blocks, rows) for name, rows in batch.edge_features.items()}
    of_nodes, n_nodes = {**batch.features, "n_id": batch.input_ids}, sampled_nodes(len(batch.input_ids), batch.blocks)
    if batch.batch is not None:
        of_nodes["batch"] = batch.batch
    number = batch.seed_index
    if len(batch.seeds) < len(number):
        given = GivenSeeds(number)
        edge_index, chosen, n_edges = seeds_edges(edge_index, n_edges, given, given)
        arrays = {name: values[chosen] for name, values in arrays.items()}
        of_nodes = {name: given.of_nodes(rows) for name, rows in of_nodes.items()}
        n_nodes[0] = len(number)
    data = Data(edge_index=edge_index)
    for name, rows in {**of_nodes, **arrays}.items():
        data[name] = rows
    for i, (name, rows) in enumerate(batch.labels.items()):
        data["y" if i == 0 else name] = rows
    data.num_nodes = len(data.n_id)
    data.batch_size = len(number)
    data.input_id = data.n_id[: len(number)] if input_id is None else input_id
    data.num_sampled_nodes = n_nodes
    data.num_sampled_edges = n_edges
    data.__dict__["_featstore"] = _Kept(batch)
    return data


def to_hetero_data(batch: HeteroMiniBatch, input_id: torch.Tensor | None = None) -> HeteroData:
    """Return a mini-batch of several types as PyG's ``HeteroData``.

    Parameters
    ----------
    batch : HeteroMiniBatch
    input_id : int64 tensor, shape (n_given,), optional
        As for :func:`to_data`; by default the seeds' ids within their type.

    Returns
    -------
    torch_geometric.data.HeteroData
        Of each type of nodes the features by their names, ``n_id``, ``num_nodes``, and ``num_sampled_nodes``, of the seeds and of
        each hop; of the seeds' type also ``y``, other labels by their names, ``batch_size`` and ``input_id``. Of each type of
        edges ``edge_index``, edge features in its order, ``num_sampled_edges`` of each hop, and ``e_id`` and ``edge_weight`` if
        the blocks have edge positions and weights. ``batch`` as of :func:`to_data`, of each type of nodes.

    Raises
    ------
    OptionError
        A feature or a label is named like one of these.

    Notes
    -----
    Edges, memory and seeds that repeat are those of :func:`to_data`, of each type.
    """
    has_weights = any(block.weight is not None for hop in batch.blocks for block in hop.values())
    check_names((*batch.features, *batch.edge_features), tuple(batch.labels), has_weights, batch.batch is not None)
    number = batch.seed_index
    given = {batch.seed_type: GivenSeeds(number)} if len(batch.seeds) < len(number) else {}
    data = HeteroData()
    for kind, ids in batch.input_ids.items():
        store, n_nodes = data[kind], list(batch.num_sampled_nodes[kind])
        if kind in given:
            ids, n_nodes[0] = given[kind].of_nodes(ids), len(number)
        store.n_id, store.num_nodes, store.num_sampled_nodes = ids, len(ids), n_nodes
        if batch.batch is not None:
            store.batch = given[kind].of_nodes(batch.batch[kind]) if kind in given else batch.batch[kind]
    for name, of_types in batch.features.items():
        for kind, rows in of_types.items():
            data[kind][name] = given[kind].of_nodes(rows) if kind in given else rows
    for key in batch.blocks[0] if batch.blocks else ():
        blocks = tuple(hop[key] for hop in batch.blocks)
        edge_index, arrays, n_edges = edges_by_hop(blocks)
        arrays = {_EDGE_NAMES[name]: values for name, values in arrays.items()}
        for name, hops in batch.edge_features.items():
            if key in hops[0]:
                arrays[name] = _rows_by_hop(blocks, tuple(hop[key] for hop in hops))
        edge_index, chosen, n_edges = seeds_edges(edge_index, n_edges, given.get(key[0]), given.get(key[2]))
        store = data[key]
        store.edge_index, store.num_sampled_edges = edge_index, n_edges
        for name, values in arrays.items():
            store[name] = values[chosen]
    seeds = data[batch.seed_type]
    for i, (name, rows) in enumerate(batch.labels.items()):
        seeds["y" if i == 0 else name] = rows
    seeds.batch_size = len(number)
    seeds.input_id = seeds.n_id[: len(number)] if input_id is None else input_id
    data.__dict__["_featstore"] = _Kept(batch)
    return data


def check_names(features: Collection[str], labels: Sequence[str], has_weights: bool = False, is_disjoint: bool = False) -> None:
    """Raise OptionError if a feature, or a label after the first, has the name of a batch's attribute, or of another one."""
    own = {*SAMPLED, *["y"][: len(labels)], *["edge_weight"][:has_weights], *["batch"][:is_disjoint]}
    for option, names in (("features", features), ("labels", labels[1:])):
        for name in names:
            if name in own:
                raise OptionError(option, f"a batch of PyG has an attribute {name!r} of its own: leave that {option[:-1]} out")
        own |= {*names}


def default_features(names: Iterable[str], option: str) -> tuple[str, ...]:
    """Choose the features of a batch if none are named: ``x``, or the only one; OptionError if that is unclear."""
    found = tuple(names)
    if "x" in found:
        return ("x",)
    if len(found) > 1:
        raise OptionError(option, f"there is no feature 'x': name some of {listed(found)}")
    return found


def sampled_nodes(n_nodes: int, blocks: tuple[Block, ...]) -> list[int]:
    """Count the seeds, and the nodes that each hop added."""
    return [blocks[-1].n_dst, *(block.n_src - block.n_dst for block in reversed(blocks))] if blocks else [n_nodes]


def edges_by_hop(blocks: tuple[Block, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[int]]:
    """Collect the edges that each hop added, hop after hop; ``blocks`` come outermost first.

    Returns local sources and destinations, int64 [2, n_edges]; their ``edge_pos`` and ``weight``, if all blocks have them; and
    the number of edges that each hop added, the seeds' own first. A hop adds the edges to destinations that the previous hop
    lacks.
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


class GivenSeeds:
    """The seeds of one type of nodes as they were given, where PyG has a node for each, though the batch has each seed once.

    Parameters
    ----------
    number : int64 tensor, shape (n_given,)
        The number of each given seed among the distinct ones, which are the first nodes of the type, in any order.
    """

    def __init__(self, number: torch.Tensor) -> None:
        self.number = number
        places = torch.from_numpy(first_seen(number.numpy(force=True))[0]).to(number.device)
        self._n_distinct = len(places)
        self._first = torch.empty_like(places)
        self._first[number[places]] = places  # a sampler may have put the seeds in another order than they were given in

    def of_nodes(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy the rows of a batch's nodes, one for each given seed and for each other node."""
        return torch.cat([rows[self.number], rows[self._n_distinct :]])

    def renumbered(self, nodes: torch.Tensor) -> torch.Tensor:
        """Number nodes of the batch as :meth:`of_nodes` has them; a seed is the node of its first appearance."""
        seed = self._first[nodes.clamp(max=self._n_distinct - 1)]
        return torch.where(nodes < self._n_distinct, seed, nodes + (len(self.number) - self._n_distinct))

    def edges(self, destinations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the edges of each given seed among those that the distinct seeds drew; ``destinations`` of these ascend.

        Returns positions of edges, int64 [n], and which given seed has the edge.
        """
        device = destinations.device
        starts = torch.searchsorted(destinations.contiguous(), torch.arange(self._n_distinct + 1, device=device))
        degree = starts.diff()[self.number]
        owner = torch.repeat_interleave(torch.arange(len(degree), device=device), degree)
        before = degree.cumsum(0) - degree
        return torch.arange(len(owner), device=device) - before[owner] + starts[self.number][owner], owner


def seeds_edges(
    edges: torch.Tensor, n_edges: list[int], sources: GivenSeeds | None, destinations: GivenSeeds | None
) -> tuple[torch.Tensor, torch.Tensor | slice, list[int]]:
    """Copy the edges of :func:`edges_by_hop` for seeds as they were given: each gets those that it drew.

    ``sources`` and ``destinations`` are the seeds of the types at the two ends; None where the batch has them as they were given.
    Returns the edges, numbered where each given seed is a node; which edges they were; and the number of edges of each hop.
    """
    if sources is None and destinations is None:
        return edges, slice(None), n_edges
    src, dst = edges[0], edges[1]
    chosen: torch.Tensor | slice = slice(None)
    if destinations is not None:
        n_own = n_edges[0] if n_edges else 0
        own, owner = destinations.edges(dst[:n_own])
        chosen = torch.cat([own, torch.arange(n_own, len(dst), device=dst.device)])
        src, dst = src[chosen], torch.cat([owner, destinations.renumbered(dst[n_own:])])
        n_edges = [len(owner), *n_edges[1:]] if n_edges else []
    if sources is not None:
        src = sources.renumbered(src)
    return torch.stack([src, dst]), chosen, n_edges


def _firsts(hops: tuple[Block, ...]) -> list[int]:
    """Find the first edge of each hop that the previous hop lacks; destinations ascend, so added edges come last."""
    return [0] + [_first_of(hop.dst, before.n_dst) for before, hop in pairwise(hops)]


def _rows_by_hop(blocks: tuple[Block, ...], rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Select the rows of the edges of :func:`edges_by_hop` from the rows of each block's edges."""
    hops, of_hops = blocks[::-1], rows[::-1]
    if not hops:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    firsts = _firsts(hops)
    if all(_begins_with(hop, first, before) for before, first, hop in zip(hops, firsts[1:], hops[1:], strict=False)):
        return rows[0]
    return torch.cat([each[first:] for first, each in zip(firsts, of_hops, strict=True)])


# In host memory these use NumPy, not torch, whose OpenMP threads would take the processors from the loader's threads. The first
# two keep the GIL: a thread that took it meanwhile would keep it for up to 5 ms, a third of a packed batch.


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
    """Tell whether exactly the first ``n`` edges of a block are the edges of the previous hop."""
    if len(before.src) != n:
        return False
    return all(
        mine.data_ptr() == other.data_ptr() or _starts_with(mine, other)
        for mine, other in zip(block.tensors, before.tensors, strict=False)
    )


def _stacked(src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """Stack sources and destinations into one tensor; a view if they lie in one."""
    n, step = len(src), dst.storage_offset() - src.storage_offset()
    together = src.untyped_storage().data_ptr() == dst.untyped_storage().data_ptr()
    if n and together and step >= n and src.is_contiguous() and dst.is_contiguous():
        return src.as_strided((2, n), (step, 1))
    return torch.stack((src, dst))
