"""Samplers of the library as PyG's ``BaseSampler``."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    HeteroSamplerOutput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.base import NumNeighbors
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from featstore.adapters.pyg.data import GivenSeeds, edges_by_hop, sampled_nodes, seeds_edges
from featstore.config import listed
from featstore.errors import OptionError, PluginError
from featstore.gather.arrays import find_ids, first_seen, id_array
from featstore.graph.base import StoredGraph
from featstore.load.heterobatch import TypedNodes
from featstore.pack.typedarguments import types_of
from featstore.sampling.batch import Block, CheckedSampler, SampledBatch
from featstore.sampling.foreign import checked_sampler
from featstore.sampling.scratch import Int64s
from featstore.topology.types import EdgeKey, Types

__all__ = ["Sampler", "fanouts_of"]


def fanouts_of(num_neighbors: Any, types: Types | None = None) -> Any:
    """Convert PyG's ``num_neighbors`` to fan-outs; OptionError where they are for edge types, and the graph has none."""
    values = num_neighbors
    if isinstance(num_neighbors, NumNeighbors):
        # Its keys are texts, and its default is for the types of edges that it does not name.
        values = num_neighbors.values if types is None else num_neighbors.get_values(list(types.edges))
    if isinstance(values, Mapping):
        if types is not None:
            return {key: fanouts_of(each) for key, each in values.items()}
        raise OptionError("num_neighbors", "the graph has one type of edges: give a list, a number for each hop")
    try:
        return [operator.index(each) for each in values]
    except TypeError:
        raise OptionError("num_neighbors", f"a list of integers, one for each hop, not {num_neighbors!r}") from None


class Sampler(BaseSampler):  # type: ignore[misc]  # of a package without types
    """A sampler of the library under PyG's loaders: ``NodeLoader``, ``LinkLoader``, ``NeighborLoader``, ``LinkNeighborLoader``.

    Parameters
    ----------
    sampler : Sampler
        :class:`~featstore.NeighborSampler` or :class:`~featstore.LaborSampler`, best with ``redraw=False``, or any other that
        :class:`~featstore.Loader` takes.
    num_nodes : int, optional
        Nodes of the graph; by default from the sampler's attribute ``graph`` or ``num_nodes``. TypeError if it has neither.

    Attributes
    ----------
    sampler : Sampler
    num_nodes : int or dict of str to int
        Of each type of nodes, in a graph of several.

    Notes
    -----
    Needs neither pyg-lib nor torch-sparse, nor the adjacency in memory. The draws of a batch are keyed with a number from
    torch's random generator: they follow ``torch.manual_seed``, and differ from worker to worker and from epoch to epoch. The
    number stands for the batch's index, so ``batch_dependency`` has no effect here. Nodes, edges and counts of hops are those of
    :func:`to_data`, and so is ``batch`` of a sampler with ``disjoint=True``. A seed may be given more than once: its edges are
    copied, as are those of all seeds if the sampler puts them in another order. Sampling by time, and disjoint samples of links,
    raise NotImplementedError; a sampler that returns other seeds than it was given raises PluginError.

    Over a graph of several types, seeds come with their type, ``input_nodes=("paper", ids)``, and a sample is a
    ``HeteroSamplerOutput``, which names every type of nodes and of edges. Of links, seeds are of the types of both ends.

    Examples
    --------
    >>> from torch_geometric.loader import LinkNeighborLoader
    >>> from featstore.adapters.pyg import Sampler, stores
    >>> edges = torch.tensor([[0, 1, 2], [3, 4, 5]])
    >>> sampler = Sampler(featstore.NeighborSampler(g, [10, 10], redraw=False))
    >>> loader = LinkNeighborLoader(stores(g), num_neighbors=[], edge_label_index=(None, edges),
    ...                             neighbor_sampler=sampler, neg_sampling="binary", batch_size=512)
    """

    def __init__(self, sampler: Any, num_nodes: int | None = None) -> None:
        graph: Any = getattr(sampler, "graph", None)
        n: Any = getattr(sampler if graph is None else graph, "num_nodes", None) if num_nodes is None else num_nodes
        if n is None:
            raise TypeError(f"num_nodes must be given: {type(sampler).__name__} does not say how many nodes there are")
        self.sampler: CheckedSampler = checked_sampler(sampler, operator.index(n))
        self.num_nodes: int | dict[str, int] = operator.index(n)
        self._graph, self._types = graph, types_of(graph) if isinstance(graph, StoredGraph) else None
        if self._types is not None:
            if self.sampler is not sampler:
                raise NotImplementedError(
                    f"a {type(sampler).__name__} does not sample for PyG's loaders over a graph of several types: take a "
                    "NeighborSampler or a LaborSampler"
                )
            self.num_nodes = {kind.name: kind.n for kind in self._types.nodes.values()}

    def __repr__(self) -> str:
        return f"Sampler({self.sampler!r})"

    @property
    def num_neighbors(self) -> list[int] | dict[EdgeKey, list[int]]:
        """Neighbours of each hop, the seeds' first; -1 takes all. PyG's ``model.inference(loader)`` asks for them."""
        if self._types is not None:
            return {key: list(fanouts) for key, fanouts in (self.sampler.fanouts_of_types or {}).items()}
        fanouts = self.sampler.fanouts
        if fanouts is None:
            raise AttributeError(
                f"{self.sampler!r} has no fan-outs, which num_neighbors would be", name="num_neighbors", obj=self
            )
        return list(fanouts)

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> SamplerOutput | HeteroSamplerOutput:
        """Sample the neighbourhood of nodes; PyG's loaders call this.

        Raises
        ------
        ValueError
            Seeds of a graph of several types come without their type, or with one that the graph has not.
        IndexError
            A seed is not a node of its type.
        NotImplementedError
            Seeds have times, or a type, where the graph has one of nodes.
        """
        if self._types is None:
            return node_sample(_without_types(index), self._sample)
        kind = index.input_type
        if kind not in self._types.nodes:
            raise ValueError(f"input_nodes: give (type, ids), of the types {_named(self._types)}, not seeds of {kind!r}")
        return node_sample(_without_times(index), self._sample_types)

    def sample_from_edges(
        self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput | HeteroSamplerOutput:
        """Sample the neighbourhood of the ends of edges, and of negative ones; PyG's loaders call this.

        Errors are those of :meth:`sample_from_nodes`. The type of edges may be one that the graph has not, between its types of
        nodes.
        """
        if self.sampler.disjoint:
            raise NotImplementedError("disjoint samples of links are not there: leave disjoint out")
        if self._types is None:
            return edge_sample(_without_types(index), self._sample, self.num_nodes, disjoint=False, neg_sampling=neg_sampling)
        key = index.input_type
        if key is None or key[0] not in self._types.nodes or key[-1] not in self._types.nodes:
            there = f"a type of edges between the types {_named(self._types)}"
            raise ValueError(f"edge_label_index: give ((source, relation, destination), edges), {there}, not edges of {key!r}")
        return edge_sample(_without_times(index), self._sample_types, self.num_nodes, disjoint=False, neg_sampling=neg_sampling)

    def _draw(self, distinct: Int64s) -> SampledBatch:
        """Sample distinct seeds, keyed by torch's random generator."""
        key = int(torch.randint(2**63 - 1, (), device="cpu"))
        return self.sampler.sample(torch.from_numpy(distinct), epoch=0, index=key)

    def _edges(
        self, blocks: tuple[Block, ...], sources: GivenSeeds | None, destinations: GivenSeeds | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[int]]:
        """Collect the edges of one type: sources and destinations, int64 [2, n]; their numbers; and how many each hop added."""
        edge_index, arrays, n_edges = edges_by_hop(blocks)
        if "weight" in arrays:
            raise NotImplementedError(f"{self.sampler!r} weighs edges, and a SamplerOutput has no weights: use MiniBatch.to_pyg")
        edge_index, chosen, n_edges = seeds_edges(edge_index, n_edges, sources, destinations)
        edge = arrays.get("edge_pos")
        return edge_index, None if edge is None else edge[chosen], n_edges

    def _sample(self, seeds: torch.Tensor, times: torch.Tensor | None = None) -> SamplerOutput:
        ids = id_array("seeds", seeds).astype(np.int64)
        first, places = first_seen(ids)
        distinct = ids[first]
        batch = self._draw(distinct)
        of_batch, there = find_ids(batch.seeds.numpy(), distinct)  # a user's sampler may have put them in another order
        if len(batch.seeds) != len(distinct) or not there.all():
            raise PluginError(f"a sampler returned other seeds than the {len(distinct)} that it was given")
        given = _given(of_batch[places])
        edge_index, edge, n_edges = self._edges(batch.blocks, given, given)
        nodes, n_nodes = batch.nodes, sampled_nodes(batch.n_nodes, batch.blocks)
        number = None if batch.copies is None else batch.copies.batch
        if given is not None:
            nodes, n_nodes[0] = given.of_nodes(nodes), len(ids)
            number = None if number is None else given.of_nodes(number)
        return SamplerOutput(
            node=nodes,
            row=edge_index[0],
            col=edge_index[1],
            edge=edge,
            batch=number,
            num_sampled_nodes=n_nodes,
            num_sampled_edges=n_edges,
        )

    def _sample_types(self, seeds: dict[str, torch.Tensor], times: Any = None) -> HeteroSamplerOutput:
        types = self._types
        assert types is not None
        distinct, given = [], {}
        for name, of_type in seeds.items():
            kind, ids = types.nodes[name], id_array("seeds", of_type).astype(np.int64)
            bad = np.flatnonzero((ids < 0) | (ids >= kind.n))  # ids of all types would take it for a node of another one
            if len(bad):
                raise IndexError(f"seed {ids[bad[0]]} at position {bad[0]} is out of range for {kind.n} nodes of {name!r}")
            first, places = first_seen(ids)
            distinct.append(ids[first] + kind.first)
            given[name] = _given(places)
        batch = self._draw(np.concatenate(distinct))
        nodes = TypedNodes(types, batch, self._graph.pool)
        found: dict[str, dict[Any, Any]] = {name: {} for name in ("node", "row", "col", "edge", "batch", "n_nodes", "n_edges")}
        for name, own in nodes.input_ids.items():
            n_nodes, as_given = list(nodes.num_sampled_nodes[name]), given.get(name)
            if as_given is not None:
                own, n_nodes[0] = as_given.of_nodes(own), len(as_given.number)
            found["node"][name], found["n_nodes"][name] = own, n_nodes
            if nodes.batch is not None:
                number = nodes.batch[name]
                found["batch"][name] = number if as_given is None else as_given.of_nodes(number)
        blocks = nodes.local_blocks()
        for key in types.edges:
            edge_index, edge, n_edges = self._edges(tuple(hop[key] for hop in blocks), given.get(key[0]), given.get(key[2]))
            found["row"][key], found["col"][key] = edge_index
            found["edge"][key], found["n_edges"][key] = edge, n_edges
        return HeteroSamplerOutput(
            node=found["node"],
            row=found["row"],
            col=found["col"],
            edge=found["edge"],
            batch=found["batch"] or None,
            num_sampled_nodes=found["n_nodes"],
            num_sampled_edges=found["n_edges"],
        )


def _given(number: Int64s) -> GivenSeeds | None:
    """Say how seeds were given, by the number of each in the batch; None where the batch has them so."""
    return None if np.array_equal(number, np.arange(len(number))) else GivenSeeds(torch.from_numpy(number))


def _named(types: Types) -> str:
    return listed(types.nodes)


def _without_types(index: Any) -> Any:
    if index.input_type is not None:
        raise NotImplementedError(f"the graph has one type of nodes and edges; there is no {index.input_type!r}")
    return _without_times(index)


def _without_times(index: Any) -> Any:
    if index.time is not None:
        raise NotImplementedError("sampling by time is not there")
    return index
