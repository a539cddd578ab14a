"""A dataset as PyG's ``FeatureStore`` and ``GraphStore``, which PyG's own loaders read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch_geometric.data import EdgeAttr, FeatureStore, GraphStore, TensorAttr
from torch_geometric.data.feature_store import _FieldStatus
from torch_geometric.data.graph_store import EdgeLayout

from featstore.adapters.pyg.data import default_features
from featstore.config import listed, refuse_path
from featstore.errors import BudgetError, ClosedError
from featstore.gather.rowindex import resolve_rows
from featstore.graph.dataset import OutOfCoreGraph
from featstore.pack.typedarguments import types_of
from featstore.topology.edgeids import EdgeIds
from featstore.topology.types import EdgeKey, EdgeType, qualified

__all__ = ["EdgeStore", "NodeStore", "stores"]

_NODES_AT_ONCE = 1 << 16
_IDS = "n_id"  # an attribute of types without any other


def stores(
    g: OutOfCoreGraph, attributes: Sequence[str] | Mapping[str, Sequence[str]] | None = None
) -> tuple[NodeStore, EdgeStore]:
    """Make the pair of stores of a dataset that PyG's loaders take in place of a ``Data`` or ``HeteroData``.

    Parameters
    ----------
    g : OutOfCoreGraph
    attributes : sequence of str, or mapping of str to such, optional
        Names of the features and node data that batches get, and that alone can be read. Node data need an entry for each node.
        By default batches get ``x``, or the only feature, and all such node data, and every feature can be read. In a graph of
        several types: of every type that has them, or by type.

    Returns
    -------
    NodeStore, EdgeStore
        ``torch_geometric.data.FeatureStore`` and ``GraphStore``.

    Raises
    ------
    KeyError, ValueError
        No such feature and no such node data; node data have another number of entries than there are nodes; attributes by
        type, where the graph has one.
    OptionError
        There are several features, none of them ``x``, and no ``attributes``.
    TypeError, ClosedError
        ``g`` is no graph of the library that is on disk as a dataset, or it is closed.

    Notes
    -----
    Both only read. They pickle as path and options: a worker process, forked or spawned, reads by itself, and has a budget of
    the same size of its own. PyG's ``NeighborLoader`` asks for the whole adjacency in memory, and for pyg-lib or torch-sparse;
    with ``neighbor_sampler=Sampler(…)`` it needs neither.

    PyG knows a type of nodes by its attributes. A type that would have none in a batch has ``n_id``, the ids within the type.

    Examples
    --------
    >>> from torch_geometric.loader import NodeLoader
    >>> from featstore.adapters.pyg import Sampler
    >>> sampler = Sampler(featstore.NeighborSampler(g, [10, 10], redraw=False))
    >>> loader = NodeLoader(stores(g), sampler, input_nodes=train_idx, batch_size=1024, num_workers=2)
    """
    refuse_path(g)
    if not isinstance(g, OutOfCoreGraph):
        raise TypeError(f"stores are made of an OutOfCoreGraph, not of a {type(g).__name__}")
    g.refuse_part("stores()")
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


@dataclass
class TypedNodeAttr(NodeAttr):
    """The same in a graph of several types of nodes, of which the group is one."""

    def __post_init__(self) -> None:
        if not isinstance(self.group_name, str) and self.group_name is not _FieldStatus.UNSET:
            raise KeyError(f"no attribute of {self.group_name!r}: give a type of nodes, as in store['paper', 'x', ids]")


class NodeStore(FeatureStore):  # type: ignore[misc]
    """Features and node data as attributes of types of nodes; parameters as of :func:`stores`.

    ``store["paper", "x", ids]`` reads rows; of the one type of a graph without types, ``store[None, "x", ids]``. An index is a
    tensor or array of ids, a mask, a slice, a range or an int; ``None`` reads everything. Ids out of range are an IndexError,
    before anything is read. An attribute that is not there is a KeyError. Sizes are known without reading.
    """

    def __init__(self, g: OutOfCoreGraph, attributes: Sequence[str] | Mapping[str, Sequence[str]] | None = None) -> None:
        types = types_of(g)
        super().__init__(NodeAttr if types is None else TypedNodeAttr)
        if g.closed:
            raise ClosedError(f"{g.path} is closed")
        self._g = g
        # The field of each attribute that can be read, and the attributes that a batch gets, by type.
        self._fields: dict[str | None, dict[str, str]] = {}
        self._of_batches: dict[str | None, tuple[str, ...]] = {}
        self._n_nodes: dict[str | None, int] = (
            {None: g.num_nodes} if types is None else {kind.name: kind.n for kind in types.nodes.values()}
        )
        for group, names in self._asked(attributes).items():
            self._add(group, names)

    def _asked(self, attributes: Any) -> dict[str | None, Sequence[str] | None]:
        """Sort the attributes that are asked for by type; None for the default ones."""
        groups, is_typed = list(self._n_nodes), None not in self._n_nodes
        if attributes is None:
            return dict.fromkeys(groups)
        if isinstance(attributes, Mapping):
            for group in attributes:
                if not is_typed or group not in self._n_nodes:
                    there = f"it has {listed(groups)}" if is_typed else "give a sequence of names"
                    raise KeyError(f"attributes: the graph has no node type {group!r}; {there}")
            return {group: tuple(attributes.get(group, ())) for group in groups}
        names = tuple(attributes)
        if not is_typed:
            return {None: names}
        for name in names:
            if not any(self._has(group, name) for group in groups):
                raise KeyError(f"attributes: no type has a feature or node data {name!r}")
        return {group: tuple(name for name in names if self._has(group, name)) for group in groups}

    def _field(self, group: str | None, name: str) -> str:
        return name if group is None else qualified(group, name)

    def _has(self, group: str | None, name: str) -> bool:
        field = self._field(group, name)
        return field in self._g.features or field in self._g.node_data

    def _add(self, group: str | None, names: Sequence[str] | None) -> None:
        """Add the attributes of a type, all that there are if none are named."""
        g, n = self._g, self._n_nodes[group]
        if names is None:
            view = g if group is None else g[group]
            features, data = list(view.features), list(view.node_data)
            whole = [
                name for name in data if g.fields.data_shape(self._field(group, name))[:1] == (n,) and f"{name}_index" not in data
            ]
            names, of_batches = (*features, *whole), (*default_features(features, "attributes"), *whole)
        else:
            of_batches = tuple(names)
        for name in names:
            field = self._field(group, name)
            if field not in g.features and g.fields.data_shape(field)[:1] != (n,):
                raise ValueError(
                    f"node data {field!r} of shape {tuple(g.fields.data_shape(field))} have no entry for each of the nodes"
                )
        self._fields[group] = {name: self._field(group, name) for name in names}
        self._of_batches[group] = of_batches or ((_IDS,) if group is not None else ())

    def _shape(self, attr: TensorAttr) -> torch.Size:
        group, name = attr.group_name, attr.attr_name
        fields = self._fields.get(group)
        if fields is None and None not in self._fields:
            raise KeyError(f"no attribute of {group!r}: the types of nodes are {listed(self._fields)}")
        if fields is None or not isinstance(name, str) or name not in fields:
            if name == _IDS and self._of_batches.get(group) == (_IDS,):
                return torch.Size((self._n_nodes[group],))
            of = "" if group is None else f" of {group!r}"
            what = f"{name!r}{of}" if isinstance(name, str) else f"without a name{of}: give attr_name"
            raise KeyError(f"no attribute {what}; there is {listed(fields or ())}")
        field = fields[name]
        return self._g.features[field].shape if field in self._g.features else self._g.fields.data_shape(field)

    def _get_tensor(self, attr: TensorAttr) -> torch.Tensor:
        shape, group = self._shape(attr), attr.group_name
        index = slice(None) if attr.index is None else attr.index
        field = self._fields[group].get(attr.attr_name)
        if field is not None and field in self._g.features:
            return self._g.features[field][index]
        rows, lead = resolve_rows(index, shape)
        chosen = torch.arange(rows.start, rows.stop, device="cpu") if isinstance(rows, range) else torch.from_numpy(rows)
        found = chosen if field is None else self._g.node_data[field][chosen]  # a copy: the tensor is the graph's own
        return found[0] if lead is None else found.reshape(*lead, *shape[1:])

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...]:
        shape = self._shape(attr)
        if attr.index is None:
            return tuple(shape)
        _, lead = resolve_rows(attr.index, shape)
        return (*(() if lead is None else lead), *shape[1:])

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """List the attributes that a batch gets; their index is not set."""
        attr = self._tensor_attr_cls
        return [attr(group_name=group, attr_name=name) for group, names in self._of_batches.items() for name in names]

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        _read_only("put_tensor")

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        _read_only("remove_tensor")

    def __len__(self) -> int:
        """Attributes."""
        return sum(map(len, self._fields.values()))

    def __repr__(self) -> str:
        names = [field for fields in self._fields.values() for field in fields.values()]
        return f"NodeStore({self._g.path!r}, {', '.join(names)})"


def _fits(size: Sequence[int | None], kind: EdgeType) -> bool:
    """Tell whether a size is that of a type of edges, where it is known."""
    return len(size) == 2 and size[0] in (None, kind.src.n) and size[1] in (None, kind.dst.n)


def _places(numbers: EdgeIds | None, kind: EdgeType, first: int, n: int) -> slice | npt.NDArray[np.intp]:
    """Compute the places of the stored edges ``first …`` in their type: their numbers in the input, if ``numbers`` has them."""
    if numbers is None:
        return slice(first - kind.first_edge, first - kind.first_edge + n)
    found = np.empty(n, numbers.dtype)
    numbers.read(first, found)
    found -= kind.first_edge
    return found.astype(np.intp, copy=False)


class EdgeStore(GraphStore):  # type: ignore[misc]
    """The adjacency by type of edges: in CSC form as it is stored, in COO form on request. The one type of a graph is None.

    An edge index is read whole into memory that counts in the graph's budget, 8 bytes an edge, in COO form 16. COO form has the
    edges in the order of the input, as the rows of edge features. With ``is_sorted=True``, and from ``coo()``, they are in the
    stored order, by destination. CSR form raises KeyError; ``csr()`` makes one from CSC in memory. An unknown size may be None.
    """

    def __init__(self, g: OutOfCoreGraph) -> None:
        super().__init__()
        if g.closed:
            raise ClosedError(f"{g.path} is closed")
        self._g = g
        self._kinds: dict[EdgeKey | None, EdgeType] = {
            None if types_of(g) is None else key: kind for key, kind in g.types.edges.items()
        }

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[torch.Tensor, torch.Tensor] | None:
        g, kind = self._g, self._check(edge_attr)
        topology, is_csc = g.topology, edge_attr.layout == EdgeLayout.CSC
        numbers = None if edge_attr.is_sorted or is_csc else topology.edge_ids
        try:
            row = g.pool.tensor((kind.n_edges,), torch.int64)
            other = g.pool.tensor((kind.n_lists + 1 if is_csc else kind.n_edges,), torch.int64)
            ids, of_lists = row.numpy(), other.numpy()
            of_lists[:1] = 0  # of a type without nodes
            for first in range(0, kind.n_lists, _NODES_AT_ONCE):
                stop = min(first + _NODES_AT_ONCE, kind.n_lists)
                offsets = topology.offsets_between(kind.first_list + first, kind.first_list + stop)
                edge = int(offsets[0])
                for piece in topology.lists(np.arange(kind.first_list + first, kind.first_list + stop)):
                    # The lists follow each other, and so do their edges.
                    found = piece.ids[max(0, int(piece.at[0])) : int(piece.at[-1] + piece.degree[-1])]
                    ids[_places(numbers, kind, edge, len(found))] = found
                    edge += len(found)
                if is_csc:
                    np.subtract(offsets, kind.first_edge, out=of_lists[first : stop + 1])
                else:
                    nodes = np.repeat(np.arange(first, stop), np.diff(offsets))
                    of_lists[_places(numbers, kind, int(offsets[0]), len(nodes))] = nodes
            ids -= kind.src.first
        except BudgetError as error:
            raise BudgetError(
                f"the whole adjacency in memory: {error.reason}; a sampler of the library reads it from disk "
                "(featstore.adapters.pyg.Sampler)",
                error.needed,
            ) from None
        return row, other

    def _check(self, attr: EdgeAttr) -> EdgeType:
        """Find the type of edges of an attribute; KeyError if there is none, or not in this form."""
        kind = self._kinds.get(attr.edge_type)
        why = None
        if kind is None:
            there = listed(self._kinds)
            why = "edge_type=None is the one type of edges" if None in self._kinds else f"the types of edges are {there}"
        elif attr.size is not None and not _fits(attr.size, kind):
            why = f"its size is {(kind.src.n, kind.dst.n)}"
        elif attr.layout == EdgeLayout.CSR:
            why = "CSC and COO forms are there, and csr() makes one of CSC"
        if kind is None or why is not None:
            raise KeyError(f"'edge_index' for '{attr}' not found: {why}")
        return kind

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """List the only stored layout: CSC."""
        return [
            EdgeAttr(edge_type=key, layout=EdgeLayout.CSC, size=(kind.src.n, kind.dst.n)) for key, kind in self._kinds.items()
        ]

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        _read_only("put_edge_index")

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        _read_only("remove_edge_index")

    def __repr__(self) -> str:
        return f"EdgeStore({self._g.path!r}, num_edges={self._g.num_edges})"
