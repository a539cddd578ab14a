"""Conversion of other frameworks' samples to the library's own form. No framework is imported.

These forms are accepted, by their attributes alone:

- a :class:`SampledBatch`;
- ``(input_ids, blocks)``: blocks outermost first, each a :class:`Block` or ``(src, dst, n_src, n_dst)``;
- DGL's ``(input_nodes, output_nodes, blocks)``: message-flow graphs with ``edges()``, ``num_src_nodes()``, ``num_dst_nodes()``;
- PyG's sampler output or batch: ``node`` (or ``n_id``), ``row`` and ``col`` (or ``edge_index``), ``num_sampled_nodes`` and
  ``num_sampled_edges``, which PyG's neighbour samplers count with pyg-lib. Layer ``i`` gets the nodes and edges that
  ``trim_to_layer`` leaves for the layer. With ``batch``, of PyG's ``disjoint=True``, it has a subgraph for each seed.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from featstore.distinct import distinct
from featstore.errors import FeatstoreError, PluginError
from featstore.gather.arrays import as_array, first_seen
from featstore.registry import error_text
from featstore.sampling.batch import EDGE_ARRAYS, Block, CheckedSampler, NodeCopies, SampledBatch
from featstore.sampling.epochwide import EpochSampler
from featstore.sampling.labor import LaborSampler
from featstore.sampling.layer import LayerSampler
from featstore.sampling.neighbor import NeighborSampler
from featstore.sampling.shadow import ShadowSampler

__all__ = ["adjacency_of", "as_sampled", "check_same_graph", "checked_sampler", "graph_id", "has_own_seeds", "sampled_by"]


def _ids(values: Any) -> torch.Tensor:
    """Copy numbers of nodes or edges to a dense int64 tensor in host memory.

    A copy, because the sampler may reuse its memory or keep its batches.
    """
    if isinstance(values, torch.Tensor):
        kind, dtype, ndim = values.dtype, str(values.dtype), values.ndim
        is_integer = not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
    else:
        try:
            values = as_array("ids", values)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PluginError(f"it returned ids of {type(values).__name__}, which are not an array: {error}") from None
        dtype, ndim = str(values.dtype), values.ndim
        is_integer = values.dtype.kind in "iu" or not values.size
    if ndim != 1 or not is_integer:
        raise PluginError(f"it returned ids of {dtype} and {ndim} dimensions, not 1-D integers")
    if isinstance(values, torch.Tensor):
        found = values.to("cpu", torch.int64, copy=True).contiguous()
    else:
        found = torch.from_numpy(values.astype(np.int64))  # of any byte order and stride, read-only ones too
    if "uint64" in dtype and bool((found < 0).any()):
        raise PluginError(f"it returned id {int(found[found < 0][0]) % (1 << 64)}, which does not fit int64")
    return found


def _size(value: Any, what: str) -> int:
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        raise PluginError(f"it returned {what} of {value!r}, which is not an integer") from None


def _numbers(name: str, values: Any) -> torch.Tensor:
    """Copy floating-point numbers of edges to a dense tensor in host memory."""
    dtypes = EDGE_ARRAYS[name]
    found = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(as_array(name, values)))
    if found.ndim != 1 or found.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise PluginError(f"it returned {name} of {found.dtype} and {found.ndim} dimensions, not 1-D {wanted}")
    return found.detach().to("cpu", copy=True).contiguous()


def _block(src: Any, dst: Any, n_src: Any, n_dst: Any, given: Mapping[str, Any] | None = None) -> Block:
    """Make a block, its edges ordered by destination, with the ``given`` arrays of :data:`EDGE_ARRAYS`."""
    sources, destinations = _ids(src), _ids(dst)
    arrays = {
        name: _ids(values) if EDGE_ARRAYS[name] == (torch.int64,) else _numbers(name, values)
        for name, values in (given or {}).items()
    }
    if any(len(values) != len(sources) for values in (destinations, *arrays.values())):
        more = "".join(f" and {len(values)} entries of {name}" for name, values in arrays.items())
        raise PluginError(f"it returned {len(sources)} sources for {len(destinations)} destinations{more}")
    if len(destinations) > 1 and bool((destinations[1:] < destinations[:-1]).any()):
        destinations, order = torch.sort(destinations, stable=True)
        sources = sources[order]
        arrays = {name: values[order] for name, values in arrays.items()}
    return Block(sources, destinations, _size(n_src, "sources"), _size(n_dst, "destinations"), **arrays)


def _any_block(block: Any) -> Block:
    if isinstance(block, Block):
        return _block(block.src, block.dst, block.n_src, block.n_dst, block.edge_arrays)
    if hasattr(block, "num_dst_nodes"):
        src, dst = block.edges()  # DGL's
        return _block(src, dst, block.num_src_nodes(), block.num_dst_nodes())
    if isinstance(block, (tuple, list)) and len(block) == 4:
        return _block(*block)
    raise PluginError(f"it returned a block of {type(block).__name__}, which is not a form of (src, dst, n_src, n_dst)")


def _pyg_blocks(sample: Any) -> tuple[torch.Tensor, tuple[Block, ...]]:
    if getattr(sample, "num_sampled_nodes", None) is None or getattr(sample, "num_sampled_edges", None) is None:
        raise PluginError(
            f"it returned {type(sample).__name__} without num_sampled_nodes and num_sampled_edges, from which the "
            "blocks of each hop are made: PyG's neighbour samplers count them with pyg-lib, those of subgraphs never do"
        )
    nodes = _ids(sample.node if getattr(sample, "node", None) is not None else sample.n_id)
    edges = sample.edge_index if getattr(sample, "row", None) is None else (sample.row, sample.col)
    if edges is None:
        raise PluginError(f"it returned {type(sample).__name__} without row and col, and without edge_index")
    row, col = _ids(edges[0]), _ids(edges[1])
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
    """Check a sampler's result, in one of the forms above, and copy it to a :class:`SampledBatch`.

    A :class:`SampledBatch` may have no blocks, for models of features alone. PluginError: the result has none of the forms; ids
    are no nodes, or occur twice; blocks do not fit each other.
    """
    batch: Any = None  # the number of each node's subgraph
    if isinstance(sample, SampledBatch):
        nodes, n_seeds = _ids(sample.input_ids), _size(sample.n_seeds, "seeds")
        blocks = _blocks(sample.blocks)
        if sample.copies is not None:
            rows, batch = _ids(sample.copies.rows), sample.copies.batch
            if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(nodes):
                raise PluginError(f"it returned copies of node number {int(rows.max())}, and {len(nodes)} nodes")
            nodes = nodes[rows]
    elif any(getattr(sample, name, None) is not None for name in ("num_sampled_nodes", "n_id", "node")):  # PyG's
        nodes, blocks = _pyg_blocks(sample)
        n_seeds, batch = blocks[-1].n_dst if blocks else -1, _subgraphs_of(sample, nodes)
    elif isinstance(sample, (tuple, list)) and len(sample) in (2, 3):
        nodes, blocks = _ids(sample[0]), _blocks(sample[-1])
        n_seeds = blocks[-1].n_dst if blocks else -1
    else:
        raise PluginError(f"it returned {type(sample).__name__}, which is not a form of (input_ids, blocks)")
    numbers = None if batch is None else _ids(batch)
    _check(nodes, n_seeds, blocks, num_nodes, numbers)
    if numbers is None:
        return SampledBatch(index, epoch, nodes, n_seeds, blocks)
    first, places = first_seen(nodes.numpy())
    copies = NodeCopies(torch.from_numpy(places), numbers)
    return SampledBatch(index, epoch, nodes[torch.from_numpy(first)], n_seeds, blocks, copies=copies)


def _subgraphs_of(sample: Any, nodes: torch.Tensor) -> Any:
    """Get ``batch`` of a sample of PyG's; in a ``Data`` whose nodes are distinct it may be an attribute of the user's nodes."""
    batch = getattr(sample, "batch", None)
    if batch is None or getattr(sample, "row", None) is not None or len(distinct(nodes.numpy())) < len(nodes):
        return batch
    n_seeds = int(sample.num_sampled_nodes[0])
    is_number = isinstance(batch, torch.Tensor) and batch.dtype == torch.int64 and batch.shape == nodes.shape
    return batch if is_number and torch.equal(batch[:n_seeds].cpu(), torch.arange(n_seeds, device="cpu")) else None


def _blocks(blocks: Any) -> tuple[Block, ...]:
    if not isinstance(blocks, (tuple, list)):
        raise PluginError(f"it returned blocks of {type(blocks).__name__}, not a tuple or list")
    return tuple(_any_block(block) for block in blocks)


def _check(
    nodes: torch.Tensor, n_seeds: int, blocks: tuple[Block, ...], num_nodes: int, batch: torch.Tensor | None = None
) -> None:
    ids = nodes.numpy()
    if not blocks and n_seeds < 0:
        raise PluginError("it returned no blocks")
    if len(ids) and (ids.min() < 0 or ids.max() >= num_nodes):
        raise PluginError(f"it returned node {ids[(ids < 0) | (ids >= num_nodes)][0]}; there are {num_nodes}")
    n = len(ids)
    if batch is None:
        if len(distinct(ids)) < n:
            raise PluginError("it returned a node twice in one batch")
    elif len(batch) != n or not torch.equal(batch[:n_seeds], torch.arange(max(0, n_seeds), device="cpu")):
        raise PluginError("it returned subgraphs (batch) that are not a number a node, beginning with the seeds' 0, 1, …")
    elif n and not 0 <= int(batch.min()) <= int(batch.max()) < n_seeds:
        raise PluginError(f"it returned a node of subgraph {int(batch.max())}, and {n_seeds} seeds")
    elif len(distinct(ids[:n_seeds])) < n_seeds:
        raise PluginError("it returned a seed twice in one batch")
    for hop, block in enumerate(blocks):
        if block.n_src != n or not 0 <= block.n_dst <= n:
            raise PluginError(f"block {hop} has {block.n_src} sources and {block.n_dst} destinations; {n} nodes were expected")
        if len(block.src) and (int(block.src.min()) < 0 or int(block.src.max()) >= n):
            raise PluginError(f"block {hop} names a source outside its {n}")
        if len(block.dst) and (int(block.dst[0]) < 0 or int(block.dst[-1]) >= block.n_dst):
            raise PluginError(f"block {hop} names a destination outside its {block.n_dst}")
        if batch is not None and not torch.equal(batch[block.src], batch[block.dst]):
            raise PluginError(f"block {hop} has an edge between two subgraphs")
        n = block.n_dst
    if not 0 <= n_seeds <= n or (blocks and n_seeds != n):
        raise PluginError(f"it returned a batch of {n_seeds} seeds; its innermost block has {n} destinations")


def sampled_by(sampler: Any, sample: Any, num_nodes: int, epoch: int, index: int) -> SampledBatch:
    """Check and copy what a sampler returned, see :func:`as_sampled`; the PluginError names the sampler."""
    try:
        return as_sampled(sample, num_nodes, epoch, index)
    except PluginError as error:
        raise PluginError(f"sampler {_label(sampler)!r}: {error}") from error.__cause__
    except (FeatstoreError, OSError, MemoryError):
        raise
    except Exception as error:  # of an attribute or an array of the answer
        raise PluginError(f"sampler {_label(sampler)!r}: what it returned cannot be read: {error_text(error)}") from error


def _label(sampler: Any) -> str:
    """Name a sampler by its class, a function by its name."""
    return str(getattr(sampler, "__qualname__", type(sampler).__qualname__))


class _ForeignSampler(CheckedSampler):
    """A sampler of a user or framework, whose batches are checked and converted to the library's form."""

    def __init__(self, sampler: Any, num_nodes: int) -> None:
        self._sampler, self.num_nodes = sampler, num_nodes
        self._method = getattr(sampler, "sample", None)
        self.disjoint = bool(getattr(sampler, "disjoint", False))
        fanouts = getattr(sampler, "fanouts", None)  # used to bound the largest batch
        self._fanouts = fanouts if isinstance(fanouts, (list, tuple)) else None

    @property
    def label(self) -> str:
        return _label(self._sampler)

    @property
    def fanouts(self) -> Sequence[int] | None:
        return self._fanouts

    def sample(self, seeds: torch.Tensor, epoch: int = 0, index: int = 0) -> SampledBatch:
        seeds = copy.deepcopy(seeds)  # a tensor cannot be read-only, and a foreign batch may keep it
        sample = self._sampler(seeds) if self._method is None else self._method(seeds, epoch=epoch, index=index)
        return sampled_by(self._sampler, sample, self.num_nodes, epoch, index)


# The library's samplers, whose batches need no check, and the wrapper of all others, which has checked its batches.
OWN_SAMPLERS = (NeighborSampler, LaborSampler, LayerSampler, ShadowSampler, EpochSampler, _ForeignSampler)


def has_own_seeds(sampler: Any) -> bool:
    """Tell whether a sampler is an iterable of its own batches, as a ``DataLoader`` is, and does not sample given seeds."""
    if isinstance(sampler, (DataLoader, str)):
        return isinstance(sampler, DataLoader)  # PyG's loaders have a __call__, which takes positions among their own seeds
    return isinstance(sampler, Iterable) and not callable(getattr(sampler, "sample", sampler))


def adjacency_of(graph: Any) -> dict[str, str]:
    """Collect the ids of the files that hold a graph's adjacency, by field."""
    return {key: file_id for key, file_id in graph.fingerprint().items() if key.startswith("edge/")}


def graph_id(graph: Any) -> str | None:
    """Get a text that distinguishes a graph's adjacency from others; None if unknown."""
    if not hasattr(graph, "fingerprint"):
        return None
    # The out_degree file, which both forms of an adjacency have; edge features, which may change, are left out.
    return " ".join(file_id for key, file_id in adjacency_of(graph).items() if key.endswith("/out_degree")) or None


def check_same_graph(state: Mapping[str, Any], graph: str | None) -> None:
    """Raise ValueError if a state was saved with another graph than ``graph``, by their :func:`graph_id`."""
    saved = state.get("graph")
    if None not in (saved, graph) and saved != graph:
        raise ValueError(
            "the state is of another graph than the loader's: the adjacency was made at another time. If it is the same graph, "
            "created anew, remove the state's 'graph'"
        )


def _check_graph(sampler: Any, num_nodes: int, graph: Any) -> None:
    """Raise ValueError if a sampler's attributes name another graph, or another number of nodes."""
    own: Any = getattr(sampler, "graph", None)
    n_own = getattr(sampler if own is None else own, "num_nodes", None)
    there, here, who = _named(own), _named(graph), f"the sampler {_label(sampler)!r}"
    if isinstance(n_own, Integral) and n_own != num_nodes:
        raise ValueError(f"{who} samples {there} of {n_own} nodes, and the batches are for {here} of {num_nodes} nodes")
    if graph is None or own is graph or not (hasattr(own, "fingerprint") and hasattr(graph, "fingerprint")):
        return
    if adjacency_of(own) != adjacency_of(graph):
        replaced = ", which was replaced between the two openings" * (there == here)
        raise ValueError(
            f"{who} samples {there}, and the batches are for {here}: the adjacency is another{replaced}; make the sampler "
            "of the graph that its batches are for"
        )


def _named(graph: Any) -> str:
    return str(getattr(graph, "path", "a graph"))


def checked_sampler(sampler: Any, num_nodes: int, graph: Any = None) -> CheckedSampler:
    """Wrap a sampler so that its batches are checked; the library's own samplers are returned as they are.

    ``sampler`` has ``sample(seeds, epoch=…, index=…)``, or is called with the seeds; it may return any of the forms above.
    Checking a batch takes about as long as sorting its ids. TypeError: the sampler has no ``sample`` and cannot be called, or it
    is an iterable of its own batches. ValueError: the sampler's attribute ``graph`` has another adjacency than ``graph``; or
    ``num_nodes``, of that attribute, or of a sampler without it, is another number. Graphs are compared by the ids of their
    adjacency's files: a dataset opened twice, and a copy of its directory, are one graph.
    """
    _check_graph(sampler, num_nodes, graph)
    if isinstance(sampler, OWN_SAMPLERS) and type(sampler) in OWN_SAMPLERS:  # a subclass may return anything
        return sampler
    if isinstance(sampler, (list, tuple)) and all(isinstance(each, int) for each in sampler):  # fan-outs
        raise TypeError(f"a sampler is an object, such as featstore.NeighborSampler(g, fanouts=[10, 5]), not {sampler!r:.80}")
    if has_own_seeds(sampler):
        raise TypeError(
            f"{type(sampler).__name__} has seeds and batches of its own, and cannot sample others: give its sampler, or give "
            "it to featstore.sample_offline, without seeds and batch_size"
        )
    if not callable(getattr(sampler, "sample", sampler)):
        name = type(sampler).__name__
        raise TypeError(f"a sampler has sample(seeds, epoch=, index=), or is called with seeds; {name} does neither")
    return _ForeignSampler(sampler, num_nodes)
