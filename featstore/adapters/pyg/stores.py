"""A dataset as PyG's ``FeatureStore`` and ``GraphStore``, which PyG's own loaders read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch_geometric.data import EdgeAttr, FeatureStore, GraphStore, TensorAttr
from torch_geometric.data.feature_store import _FieldStatus
from torch_geometric.data.graph_store import EdgeLayout

from featstore.adapters.pyg.data import default_features
from featstore.errors import BudgetError, ClosedError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.rowindex import resolve_rows
from featstore.topology.edgeids import EdgeIds

__all__ = ["EdgeStore", "NodeStore", "stores"]

_NODES_AT_ONCE = 1 << 16


def stores(g: OutOfCoreGraph, attributes: Sequence[str] | None = None) -> tuple[NodeStore, EdgeStore]:
    """Make the pair of stores of a dataset that PyG's loaders take in place of a ``Data``.

    Parameters
    ----------
    g : OutOfCoreGraph
    attributes : sequence of str, optional
        Names of the features and node data that batches get, and that alone can be read. Node data need an entry for each node.
        By default batches get ``x``, or the only feature, and all such node data, and every feature can be read.

    Returns
    -------
    NodeStore, EdgeStore
        ``torch_geometric.data.FeatureStore`` and ``GraphStore``.

    Raises
    ------
    KeyError, ValueError
        No such feature and no such node data; node data have another number of entries than there are nodes.
    OptionError
        There are several features, none of them ``x``, and no ``attributes``.
    TypeError, ClosedError
        ``g`` is no graph of the library that is on disk as a dataset, or it is closed.

    Notes
    -----
    Both only read. They pickle as path and options: a worker process, forked or spawned, reads by itself, and has a budget of
    the same size of its own. PyG's ``NeighborLoader`` asks for the whole adjacency in memory, and for pyg-lib or torch-sparse;
    with ``neighbor_sampler=Sampler(…)`` it needs neither.

    Examples
    --------
    >>> sampler = Sampler(featstore.NeighborSampler(g, [10, 10], redraw=False))                      # doctest: +SKIP
    >>> loader = NodeLoader(stores(g), sampler, input_nodes=train_idx, batch_size=1024, num_workers=4)  # doctest: +SKIP
    """
    if not isinstance(g, OutOfCoreGraph):
        raise TypeError(f"stores are made of an OutOfCoreGraph, not of a {type(g).__name__}")
    g.refuse_types("stores()")
    return NodeStore(g, attributes), EdgeStore(g)


def _read_only(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what}: a dataset on disk is not changed in place; make one with featstore.adapters.pyg.create(path, data), or with "
        "featstore.OutOfCoreGraph.create(path, …, overwrite=True)"
    )


@dataclass
class NodeAttr(TensorAttr):  # type: ignore[misc]  # of a package without types
    """PyG's attribute, extended to an index that is a NumPy array, which cannot be compared as a whole; the group is None."""

    def __post_init__(self) -> None:
        group = self.group_name
        if group is not None and group is not _FieldStatus.UNSET:
            raise KeyError(f"no attribute of {group!r}: group_name=None is the one type of nodes, as in store[None, 'x', ids]")

    @classmethod
    def cast(cls, *args: Any, **kwargs: Any) -> Any:
        """Convert the arguments to an attribute, unless they are one."""
        return cls(None) if args == (None,) and not kwargs else super().cast(*args, **kwargs)

    def is_set(self, key: str) -> bool:
        """Tell whether a field was given."""
        return getattr(self, key) is not _FieldStatus.UNSET


class NodeStore(FeatureStore):  # type: ignore[misc]
    """Features and node data as attributes of the one type of nodes, ``group_name=None``; parameters as of :func:`stores`.

    ``store[None, "x", ids]`` reads rows. An index is a tensor or array of ids, a mask, a slice, a range or an int; ``None``
    reads everything. Ids out of range are an IndexError, before anything is read. An attribute that is not there is a KeyError.
    Sizes are known without reading.
    """

    def __init__(self, g: OutOfCoreGraph, attributes: Sequence[str] | None = None) -> None:
        super().__init__(NodeAttr)
        if g.closed:
            raise ClosedError(f"{g.path} is closed")
        self._g = g
        if attributes is None:
            data = [
                name for name in g.node_data if g.data_shape(name)[:1] == (g.num_nodes,) and f"{name}_index" not in g.node_data
            ]
            self._names = (*g.features, *data)
            self._of_batches = (*default_features(g.features, "attributes"), *data)
        else:
            self._names = self._of_batches = tuple(attributes)
        for name in self._names:
            if name not in g.features and g.data_shape(name)[:1] != (g.num_nodes,):
                raise ValueError(f"node data {name!r} of shape {tuple(g.data_shape(name))} have no entry for each of the nodes")

    def _shape(self, attr: TensorAttr) -> torch.Size:
        name = attr.attr_name
        if attr.group_name is not None or not isinstance(name, str) or name not in self._names:
            group = "" if attr.group_name is None else f" of {attr.group_name!r}: group_name=None is the one type of nodes"
            what = f"{name!r}{group}" if isinstance(name, str) else f"without a name{group}: give attr_name"
            raise KeyError(f"no attribute {what}; there is {', '.join(map(repr, self._names)) or 'none'}")
        return self._g.features[name].shape if name in self._g.features else self._g.data_shape(name)

    def _get_tensor(self, attr: TensorAttr) -> torch.Tensor:
        shape, name = self._shape(attr), attr.attr_name
        index = slice(None) if attr.index is None else attr.index
        if name in self._g.features:
            return self._g.features[name][index]
        rows, lead = resolve_rows(index, shape)
        data = self._g.node_data[name]
        chosen = torch.arange(rows.start, rows.stop, device="cpu") if isinstance(rows, range) else torch.from_numpy(rows)
        found = data[chosen]  # a copy: the tensor is the graph's own
        return found[0] if lead is None else found.reshape(*lead, *shape[1:])

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...]:
        shape = self._shape(attr)
        if attr.index is None:
            return tuple(shape)
        _, lead = resolve_rows(attr.index, shape)
        return (*(() if lead is None else lead), *shape[1:])

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """List the attributes that a batch gets; their index is not set."""
        return [NodeAttr(group_name=None, attr_name=name) for name in self._of_batches]

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        _read_only("put_tensor")

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        _read_only("remove_tensor")

    def __len__(self) -> int:
        """Attributes."""
        return len(self._names)

    def __repr__(self) -> str:
        return f"NodeStore({self._g.path!r}, {', '.join(self._names)})"


def _places(numbers: EdgeIds | None, first: int, n: int) -> slice | npt.NDArray[np.intp]:
    """Compute the places of the stored edges ``first …``: their numbers in the input or, without ``numbers``, as stored."""
    if numbers is None:
        return slice(first, first + n)
    found = np.empty(n, numbers.dtype)
    numbers.read(first, found)
    return found.astype(np.intp, copy=False)


class EdgeStore(GraphStore):  # type: ignore[misc]
    """The adjacency, of the one type of edges, ``edge_type=None``: in CSC form as it is stored, in COO form on request.

    An edge index is read whole into memory that counts in the graph's budget, 8 bytes an edge, in COO form 16. COO form has the
    edges in the order of the input, as the rows of edge features. With ``is_sorted=True``, and from :meth:`coo`, they are in the
    stored order, by destination. CSR form raises KeyError; :meth:`csr` makes one from CSC in memory. An unknown size may be None.
    """

    def __init__(self, g: OutOfCoreGraph) -> None:
        super().__init__()
        if g.closed:
            raise ClosedError(f"{g.path} is closed")
        self._g = g

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[torch.Tensor, torch.Tensor] | None:
        g, n = self._g, self._g.num_nodes
        self._check(edge_attr)
        topology = g.topology
        places = None if edge_attr.is_sorted or edge_attr.layout == EdgeLayout.CSC else topology.edge_ids
        try:
            row = g.pool.tensor((g.num_edges,), torch.int64)
            ids = row.numpy()
            for first, block in topology.scan():
                ids[_places(places, first, len(block))] = block
            if edge_attr.layout == EdgeLayout.CSC:
                indptr = g.pool.tensor((n + 1,), torch.int64)
                indptr[:1] = 0  # of a graph without nodes
                for first, offsets in topology.offset_pieces(_NODES_AT_ONCE):
                    indptr.numpy()[first : first + len(offsets)] = offsets
                return row, indptr
            col = g.pool.tensor((g.num_edges,), torch.int64)
            for first, offsets in topology.offset_pieces(_NODES_AT_ONCE):
                nodes = np.arange(first, first + len(offsets) - 1)
                col.numpy()[_places(places, int(offsets[0]), int(offsets[-1] - offsets[0]))] = np.repeat(nodes, np.diff(offsets))
        except BudgetError as error:
            raise BudgetError(
                f"the whole adjacency in memory: {error.reason}; a sampler of the library reads it from disk "
                "(featstore.adapters.pyg.Sampler)",
                error.needed,
            ) from None
        return row, col

    def _check(self, attr: EdgeAttr) -> None:
        n = self._g.num_nodes
        why = None
        if attr.edge_type is not None:
            why = "edge_type=None is the one type of edges"
        elif attr.size is not None and (len(attr.size) != 2 or any(each not in (None, n) for each in attr.size)):
            why = f"its size is {(n, n)}"
        elif attr.layout == EdgeLayout.CSR:
            why = "CSC and COO forms are there, and csr() makes one of CSC"
        if why is not None:
            raise KeyError(f"'edge_index' for '{attr}' not found: {why}")

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """List the only stored layout: CSC."""
        return [EdgeAttr(edge_type=None, layout=EdgeLayout.CSC, size=(self._g.num_nodes, self._g.num_nodes))]

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        _read_only("put_edge_index")

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        _read_only("remove_edge_index")

    def __repr__(self) -> str:
        return f"EdgeStore({self._g.path!r}, num_edges={self._g.num_edges})"
