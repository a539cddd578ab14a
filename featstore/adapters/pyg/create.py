"""A dataset from PyG's ``Data`` or ``HeteroData``."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, Dataset, HeteroData, TemporalData

from featstore.config import listed
from featstore.creation.typed import Edges, Nodes
from featstore.errors import FeatstoreWarning, warn
from featstore.gather.arrays import as_array
from featstore.graph.dataset import OutOfCoreGraph
from featstore.topology.types import name_of_links

__all__ = ["create"]

_EDGES = ("edge_index", "adj_t", "adj")


def create(
    path: str | os.PathLike[str],
    data: Any,
    features: str | Sequence[str] | None = None,
    *,
    overwrite: bool = False,
    progress: bool = True,
    memory: int | str | None = None,
) -> OutOfCoreGraph:
    """Write a dataset from a graph of PyG's, and open it.

    Parameters
    ----------
    path : path-like
        The dataset's directory.
    data : Data, HeteroData or Dataset
        A graph with ``edge_index``, or with ``adj_t`` as ``ToSparseTensor`` makes it; or a dataset of one graph. The types of
        ``HeteroData`` become types of the dataset.
    features : str or sequence of str, optional
        Attributes that become features, which are read from disk row by row; by default ``x`` alone, if it is there. With
        types, those of each type that has them.
        Attributes of edges (``edge_attr``, ``edge_weight`` and others) become edge features. All other arrays become node
        data, each read whole at first use. Links of ``RandomLinkSplit`` also become node data: ``edge_label_index`` (or any other
        ``…_index`` of two rows) and their ``edge_label``; with types, of the links' source, under the names
        ``edge_label_index:RELATION:DESTINATION`` and so on.
    overwrite, progress, memory
        See :meth:`featstore.OutOfCoreGraph.create`.

    Returns
    -------
    OutOfCoreGraph
        Open it again with ``featstore.open(path)``.

    Raises
    ------
    TypeError
        ``data`` is temporal, or of another type; it has an attribute that is no array (the error names it).
    ValueError, IndexError
        A dataset of several graphs; no edges, or no number of nodes; an ``adj_t`` with attributes of edges or weights; a
        feature that is not there, or has not one row a node or an edge; a mask of another length; an edge to no node. With types:
        an attribute of no type.
    FileExistsError, BusyError, FormatError, BudgetError, CommittedError, OSError
        See :meth:`featstore.OutOfCoreGraph.from_edge_index`.

    Notes
    -----
    Messages flow from row 0 of ``edge_index`` to row 1, as in PyG. Neighbour lists are stored sorted; samplers with
    ``edges=True`` number edges as they are in ``edge_index``. Tensors are not copied as a whole, nor are memory-mapped ones.
    """
    graph = _graph_of(data)
    options: Any = {"overwrite": overwrite, "progress": progress, "memory": memory}
    wanted = ["x"] if features is None else [features] if isinstance(features, str) else list(dict.fromkeys(features))
    if isinstance(graph, HeteroData):
        return _create_typed(path, graph, wanted, options, must_exist=features is not None)
    (attributes, of_edges), num_nodes = _attributes(graph), _num_nodes(graph)
    if features is None and "x" not in attributes:
        wanted = []
    _check_there(wanted, attributes)
    rows = _pop_features(wanted, attributes, num_nodes)
    _check_of_nodes(attributes, num_nodes)
    adjacency = _adjacency(graph, (num_nodes, num_nodes))
    _check_of_edges(graph, of_edges)
    options["edge_features"] = of_edges or None
    if isinstance(adjacency, tuple):
        return OutOfCoreGraph.create(path, *adjacency, rows, attributes, **options)
    return OutOfCoreGraph.from_edge_index(path, adjacency, num_nodes, rows, attributes, **options)


def _create_typed(
    path: str | os.PathLike[str], data: HeteroData, wanted: list[str], options: Mapping[str, Any], *, must_exist: bool
) -> OutOfCoreGraph:
    """Write and open a dataset of several types."""
    for name in data.to_dict()["_global_store"]:
        raise ValueError(f"attribute {name!r} belongs to no type: leave it out (del data.{name})")
    nodes = {kind: _nodes(data[kind], wanted, f"data[{kind!r}]") for kind in data.node_types}
    if must_exist:
        _check_there(wanted, [name for each in nodes.values() for name in (*(each.features or ()), *(each.data or ()))])
    n = {kind: each.n for kind, each in nodes.items()}
    for key in data.edge_types:
        for kind in (key[0], key[2]):
            if kind not in n:
                raise ValueError(f"edge type {key!r}: there is no node type {kind!r}; set data[{kind!r}].num_nodes")
    edges = {}
    for key in data.edge_types:
        edges[key], links = _edges(data[key], (n[key[2]], n[key[0]]), f"data[{str(key)[1:-1]}]")
        of_source = nodes[key[0]]
        named = {name_of_links(name, key): array for name, array in links.items()}
        nodes[key[0]] = dataclasses.replace(of_source, data={**(of_source.data or {}), **named})
    return OutOfCoreGraph.create(path, nodes=nodes, edges=edges, **options)


def _nodes(store: Any, wanted: Sequence[str], where: str) -> Nodes:
    """Collect the arrays of a type of nodes."""
    num_nodes, given = _num_nodes(store, where), store.to_dict()
    arrays = {name: _array(name, value, where) for name, value in given.items() if name != "num_nodes" and value is not None}
    rows = _pop_features([name for name in wanted if name in arrays], arrays, num_nodes, where)
    _check_of_nodes(arrays, num_nodes, where)
    return Nodes(num_nodes, rows, arrays)


def _edges(store: Any, shape: tuple[int, int], where: str) -> tuple[Edges, dict[str, torch.Tensor]]:
    """Collect the edges of a type, with their arrays, and the arrays of links."""
    of_edges: dict[str, torch.Tensor] = {}
    links: dict[str, torch.Tensor] = {}
    given = store.to_dict()
    for name, value in given.items():
        if name in (*_EDGES, "num_edges") or value is None:
            continue
        (links if _is_of_links(name, given) else of_edges)[name] = _array(name, value, where)
    adjacency = _adjacency(store, shape, where)
    _check_of_edges(store, of_edges, where)
    return Edges(adjacency, of_edges), links


def _graph_of(data: Any) -> Data | HeteroData:
    if isinstance(data, Dataset):
        if len(data) != 1:
            raise ValueError(f"{data} has {len(data)} graphs; give one of them, such as dataset[0]")
        data = data[0]
    if isinstance(data, TemporalData):
        raise TypeError("temporal data cannot be stored: edges have no times")
    if not isinstance(data, (Data, HeteroData)):
        raise TypeError(f"data must be a torch_geometric Data, HeteroData or dataset, not {type(data).__name__}")
    return data


def _num_nodes(data: Any, where: str = "data") -> int:
    """Get the number of nodes, if known: PyG would guess it from edges, with a warning, and miss isolated nodes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        num_nodes: int | None = data.num_nodes
    if num_nodes is None or any("num_nodes" in str(each.message) for each in caught):
        raise ValueError(f"the data do not say how many nodes there are: set {where}.num_nodes")
    return num_nodes


def _check_there(wanted: Sequence[str], names: Iterable[str]) -> None:
    there = list(dict.fromkeys(names))
    for name in wanted:
        if name not in there:
            raise ValueError(f"the data have no attribute {name!r}; they have {listed(there)}")


def _pop_features(
    wanted: Sequence[str], arrays: dict[str, torch.Tensor], num_nodes: int, where: str = "data"
) -> dict[str, torch.Tensor]:
    """Take the features out of the arrays of nodes; ValueError unless they have a row for each node."""
    rows = {name: arrays.pop(name) for name in wanted}
    for name, rows_of in rows.items():
        if rows_of.ndim == 0 or len(rows_of) != num_nodes:
            raise ValueError(
                f"{where}: feature {name!r} of shape {tuple(rows_of.shape)} has not one row for each of {num_nodes} nodes"
            )
    return rows


def _array(name: str, value: Any, where: str) -> torch.Tensor:
    """Get an attribute as a tensor of at least one dimension."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(as_array(f"attribute {name!r}", value))
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        kind = value.layout if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"attribute {name!r} is a {kind}, not an array: leave it out (del {where}.{name})")
    array: torch.Tensor = value.detach().cpu()
    return array.reshape(1) if array.ndim == 0 else array


def _attributes(data: Data) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Collect the arrays of nodes, and the arrays of edges, by name."""
    of_nodes: dict[str, torch.Tensor] = {}
    of_edges: dict[str, torch.Tensor] = {}
    given = data.to_dict()
    for name, value in given.items():
        if name in (*_EDGES, "num_nodes") or value is None:
            continue
        array = _array(name, value, "data")
        is_of_edges = (name.startswith("edge_") or data.is_edge_attr(name)) and not _is_of_links(name, given)
        (of_edges if is_of_edges else of_nodes)[name] = array
    return of_nodes, of_edges


def _is_of_links(name: str, given: Mapping[str, Any]) -> bool:
    """Tell whether an attribute is a list of links, or their labels: ``edge_label_index`` and ``edge_label``."""
    key = name.removesuffix("_index")
    shape = tuple(getattr(given.get(f"{key}_index"), "shape", ()))
    if f"{key}_index" in _EDGES or len(shape) != 2 or shape[0] != 2:
        return False
    return name != key or tuple(given[key].shape)[:1] == shape[1:]


def _check_of_edges(data: Any, of_edges: Mapping[str, torch.Tensor], where: str = "data") -> None:
    for name, value in of_edges.items():
        if data.get("edge_index") is None:
            raise ValueError(
                f"attribute {name!r} belongs to edges, and adj_t does not say in which order: give edge_index, or leave it out "
                f"(del {where}.{name})"
            )
        if len(value) != data.num_edges:
            raise ValueError(
                f"attribute {name!r} of shape {tuple(value.shape)} has not one row for each of {data.num_edges} edges: leave it "
                f"out (del {where}.{name})"
            )


def _check_of_nodes(attributes: Mapping[str, torch.Tensor], num_nodes: int, where: str = "data") -> None:
    """Refuse masks of another length, and warn of labels that a loader would refuse later."""
    for name, value in attributes.items():
        if "mask" in name and (value.dtype != torch.bool or len(value) != num_nodes):
            raise ValueError(
                f"{where}: {name!r} of {value.dtype} and shape {tuple(value.shape)} is no mask of {num_nodes} nodes: bool, an "
                "entry a node"
            )
    labels = attributes.get("y")
    if (
        labels is not None and len(labels) not in (1, num_nodes) and "batch" not in attributes
    ):  # labels of graphs have a row a graph
        warn(
            f"{where}: 'y' of shape {tuple(labels.shape)} has not one row for each of {num_nodes} nodes; it is stored, and no "
            "loader takes it as labels",
            FeatstoreWarning,
        )


def _adjacency(data: Any, shape: tuple[int, int], where: str = "the data") -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return ``edge_index``, or ``indptr`` and ``indices`` of in-neighbours; ``shape``: destinations and sources."""
    given = [name for name in _EDGES if data.get(name) is not None]
    if given in ([], ["adj"]):
        raise ValueError(f"{where}: there is no edge_index and no adj_t")
    if "edge_index" in given:
        edge_index = data.edge_index
        if not isinstance(edge_index, torch.Tensor):
            raise TypeError(f"edge_index must be a tensor, not {type(edge_index).__name__}")
        return edge_index.detach().as_subclass(torch.Tensor)  # also for PyG's EdgeIndex
    adj_t = data.adj_t
    if tuple(adj_t.sparse_sizes() if hasattr(adj_t, "sparse_sizes") else adj_t.shape) != shape:
        raise ValueError(f"adj_t is not of shape {shape}")
    if hasattr(adj_t, "csr"):  # torch_sparse.SparseTensor: rows are destinations
        indptr, indices, weights = adj_t.csr()
    elif isinstance(adj_t, torch.Tensor) and adj_t.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo):
        if adj_t.layout == torch.sparse_coo:
            _check_weights(adj_t._values())
            return adj_t._indices().flip(0)  # a repeated edge stays, which coalesce() would add to the first
        adj_t = adj_t if adj_t.layout == torch.sparse_csr else adj_t.to_sparse_csr()
        indptr, indices, weights = adj_t.crow_indices(), adj_t.col_indices(), adj_t.values()
    else:
        raise TypeError(f"adj_t must be a sparse tensor, not {type(adj_t).__name__}")
    _check_weights(weights)
    return indptr, indices


def _check_weights(weights: torch.Tensor | None) -> None:
    if weights is not None and bool((weights != 1).any()):
        raise ValueError("adj_t has weights, which are not stored: give edge_index, and the weights as edge_weight")
