"""Samplers of the library as PyG's ``BaseSampler``."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NegativeSampling, NodeSamplerInput, SamplerOutput
from torch_geometric.sampler.base import NumNeighbors
from torch_geometric.sampler.neighbor_sampler import edge_sample, node_sample

from featstore.adapters.pyg.data import edges_by_hop, repeated_seeds, sampled_nodes
from featstore.errors import OptionError, PluginError
from featstore.gather.arrays import find_ids, first_seen, id_array
from featstore.sampling.batch import Sampler as OwnSampler
from featstore.sampling.foreign import checked_sampler

__all__ = ["Sampler", "fanouts_of"]


def fanouts_of(num_neighbors: Any, *, has_types: bool = False) -> Any:
    """Return PyG's ``num_neighbors`` as fan-outs; OptionError where they are for edge types, and the graph has none."""
    values = num_neighbors.values if isinstance(num_neighbors, NumNeighbors) else num_neighbors
    if isinstance(values, Mapping):
        if has_types:
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

    Notes
    -----
    Needs neither pyg-lib nor torch-sparse, nor the adjacency in memory. The draws of a batch are keyed with a number from
    torch's random generator: they follow ``torch.manual_seed``, and differ from worker to worker and from epoch to epoch. The
    number stands for the batch's index, so ``batch_dependency`` has no effect here. Nodes, edges and counts of hops are those of
    :func:`to_data`. A seed may be given more than once: its edges are copied, as are those of all seeds if the sampler puts them
    in another order. Sampling by time, and disjoint samples, raise NotImplementedError; a sampler that returns other seeds than
    it was given raises PluginError.

    Examples
    --------
    >>> sampler = Sampler(featstore.NeighborSampler(g, [10, 10], redraw=False))                        # doctest: +SKIP
    >>> LinkNeighborLoader(stores(g), num_neighbors=[], edge_label_index=(None, edges),                # doctest: +SKIP
    ...                    neighbor_sampler=sampler, neg_sampling="binary", batch_size=512)
    """

    def __init__(self, sampler: Any, num_nodes: int | None = None) -> None:
        n: Any = getattr(getattr(sampler, "graph", sampler), "num_nodes", None) if num_nodes is None else num_nodes
        if n is None:
            raise TypeError(f"num_nodes must be given: {type(sampler).__name__} does not say how many nodes there are")
        if getattr(sampler, "fanouts_of_types", None) is not None:
            raise NotImplementedError(
                "PyG's loaders over a graph of several types are not built yet; take featstore.adapters.pyg.NeighborLoader"
            )
        self.num_nodes: int = operator.index(n)
        self.sampler: OwnSampler = checked_sampler(sampler, self.num_nodes)

    def __repr__(self) -> str:
        return f"Sampler({self.sampler!r})"

    @property
    def num_neighbors(self) -> list[int]:
        """Neighbours of each hop, the seeds' first; -1 takes all. PyG's ``model.inference(loader)`` asks for them."""
        fanouts = getattr(self.sampler, "fanouts", None)
        if fanouts is None:
            raise AttributeError(
                f"{self.sampler!r} has no fan-outs, which num_neighbors would be", name="num_neighbors", obj=self
            )
        return list(fanouts)

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> SamplerOutput:
        """Return the sampled neighbourhood of nodes; PyG's loaders call this. NotImplementedError: times, or a type of nodes."""
        return node_sample(_without_types(index), self._sample)

    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None) -> SamplerOutput:
        """Return the sampled neighbourhood of the ends of edges, and of negative ones; PyG's loaders call this."""
        return edge_sample(_without_types(index), self._sample, self.num_nodes, disjoint=False, neg_sampling=neg_sampling)

    def _sample(self, seeds: torch.Tensor, times: torch.Tensor | None = None) -> SamplerOutput:
        given = id_array("seeds", seeds).astype(np.int64)
        first, places = first_seen(given)
        key = int(torch.randint(2**63 - 1, (), device="cpu"))
        distinct = given[first]
        batch = self.sampler.sample(torch.from_numpy(distinct), epoch=0, index=key)
        of_batch, there = find_ids(batch.seeds.numpy(), distinct)  # a user's sampler may have put them in another order
        if len(batch.seeds) != len(distinct) or not there.all():
            raise PluginError(f"a sampler returned other seeds than the {len(distinct)} that it was given")
        number = torch.from_numpy(of_batch[places])
        edge_index, arrays, n_edges = edges_by_hop(batch.blocks)
        if "weight" in arrays:
            raise NotImplementedError(f"{self.sampler!r} weighs edges, and a SamplerOutput has no weights: use MiniBatch.to_pyg")
        edge = arrays.get("edge_pos")
        nodes, n_nodes = batch.input_ids, sampled_nodes(len(batch.input_ids), batch.blocks)
        if not torch.equal(number, torch.arange(len(distinct), device="cpu")):
            edge_index, chosen, n_edges = repeated_seeds(edge_index, n_edges, number)
            edge = None if edge is None else edge[chosen]
            nodes = torch.cat([nodes[number], nodes[len(distinct) :]])
            n_nodes[0] = len(number)
        return SamplerOutput(
            node=nodes,
            row=edge_index[0],
            col=edge_index[1],
            edge=edge,
            batch=None,
            num_sampled_nodes=n_nodes,
            num_sampled_edges=n_edges,
        )


def _without_types(index: Any) -> Any:
    if index.input_type is not None:
        raise NotImplementedError(f"the graph has one type of nodes and edges; there is no {index.input_type!r}")
    if index.time is not None:
        raise NotImplementedError("sampling by time is not there")
    return index
