"""The public class of an open dataset, OutOfCoreGraph: how it is made and opened, and of which methods it consists."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.cache.base import Policy
from featstore.config import Options, check_flag, check_integer, listed, no_attribute, user_path
from featstore.creation import build
from featstore.creation.options import CreateOptions
from featstore.creation.source import ArrayLike
from featstore.creation.typed import Nodes, create_typed, nodes_and_edges, refuse_one_type
from featstore.errors import BudgetError, CorruptionError, StaleError
from featstore.graph import verify as verification
from featstore.graph.adjacency import SHOWN_AFTER_S, Adjacency
from featstore.graph.base import StoredGraph
from featstore.graph.changing import Changes
from featstore.graph.derive.aggregate import aggregate_in_hops, default_name
from featstore.graph.derive.provenance import stale_features
from featstore.graph.feature import FeatureStore
from featstore.graph.fields import Fields
from featstore.graph.neighborlists import NEIGHBOR_POLICY, NeighborLists
from featstore.graph.neighbors.neighborcache import NeighborCache
from featstore.graph.openfields import OpenFields
from featstore.graph.partadjacency import PartAdjacency, load_part
from featstore.graph.partitions import Partitions
from featstore.graph.policyinputs import Given, PolicyInputs
from featstore.graph.rowcaches import GivenParts, RowCaches
from featstore.graph.savedparts import KeptParts
from featstore.graph.selfreliant import SelfReliantParts
from featstore.graph.snapshot import Snapshot, check_memory, fingerprint_of, open_files, opening_committed
from featstore.graph.typeviews import EdgeView
from featstore.idmaps.idmap import IdMap, map_of
from featstore.progress import Progress
from featstore.ranks import Meeting
from featstore.registry import adapter
from featstore.storage.catalog import Catalog
from featstore.topology.base import Topology
from featstore.topology.edgelists import EdgeLists
from featstore.topology.noderows import NodeRows
from featstore.topology.part import HOLDER, MOST_HOPS, Part, reach, reach_bytes
from featstore.topology.types import ONE_EDGE, EdgeKey, Types, edge_name, qualified

__all__ = ["OutOfCoreGraph", "View"]

# Names that dir() shows to users; the other ones are for loaders, samplers and the command line.
_PUBLIC = (
    *("add_data", "add_feature", "aggregate", "append_nodes", "budget", "cache", "cache_neighbors", "close", "closed", "create"),
    *("edge_features", "edge_types", "edges", "features", "from_edge_index", "from_pyg", "ids", "in_degree", "indptr"),
    *("memory_report", "neighbor_cache", "neighbors", "node_data", "node_types", "num_edges", "num_nodes", "open", "options"),
    *("out_degree", "own_part", "part", "parts", "path", "pool", "reader", "remove_data", "remove_feature", "stale_features"),
    *("topology", "update_data", "verify"),
)
_ELSEWHERE = {
    "degree": "there are in_degree and out_degree",
    "edata": "edge features are g.edge_features",
    "edge_index": "g.edges() yields the edges in blocks",
    "metadata": "PyG's metadata are (g.node_types, g.edge_types)",
    "ndata": "there are g.features and g.node_data",
    "num_features": "a feature's width is g.features[name].shape[1]",
    "num_node_features": "a feature's width is g.features[name].shape[1]",
    "number_of_edges": "it is num_edges",
    "number_of_nodes": "it is num_nodes",
    "x_dict": "features of a type are g[type].features",
}  # names in other libraries


@dataclass(frozen=True)
class View:
    """A part of an open dataset: the dataset, the part, and how often each node is in the part's lists."""

    whole: OutOfCoreGraph
    part: Part
    out_degree: npt.NDArray[Any]


class OutOfCoreGraph(StoredGraph):
    """A graph whose features and adjacency lie on disk, used within a budget of memory.

    Graphs are made by :meth:`open` (which is ``featstore.open``), :meth:`create`, :meth:`from_edge_index` and :meth:`from_pyg`. A
    graph is a context manager.

    Attributes
    ----------
    path : str
    num_nodes, num_edges : int
        Of all types.
    node_types : list of str
    edge_types : list of (str, str, str)
        Names of the types, ``g["paper"]`` and ``g["author", "writes", "paper"]``; one ``"_"`` and one ``("_", "_", "_")`` if the
        graph has no types. With types, features and data have names such as ``"paper/x"`` and ``"author,writes,paper/w"`` in the
        mappings below, and rows are those of ids within the type.
    indptr, in_degree, out_degree : Tensor
        Read from disk at each access; :meth:`neighbors` and :meth:`edges` read neighbour ids.
    features : mapping of str to FeatureStore
        Features of nodes, indexed like tensors and read from disk.
    edge_features : mapping of str to FeatureStore
        Features of edges: row ``i`` is that of the ``i``-th edge in the order of the input.
    node_data : mapping of str to Tensor
        Labels, masks, index sets: read whole, checked and counted in the budget at the first access. The tensor belongs to the
        graph: copy it before you write to it.
    topology : Topology
        The adjacency; its offsets, or the directory of its chunks, are read at the first access.
    neighbor_cache : NeighborCache or None
        See :meth:`cache_neighbors`.
    own_part : Part or None
        The part of a larger graph that this is: a view (:meth:`part`), or a dataset made by :func:`featstore.export`. It says
        which nodes these are; ids and ``num_nodes`` are those of the larger graph.
    options : Options
    budget : Budget
    pool : BufferPool
    reader : Reader

    Notes
    -----
    A graph is thread-safe. A gather beside :meth:`cache` or :meth:`close` delivers its rows or raises ClosedError;
    :meth:`cache_neighbors` must not run beside a sampler. A graph is fork-safe: the child makes its own queues and rings. It
    pickles as path and options: caches are not included, and unpickling opens the dataset again. A graph shows one commit: if
    the dataset is replaced, an open graph goes on reading the old one.
    """

    def __init__(
        self, path: str | os.PathLike[str], options: Options | None = None, view: View | None = None, **others: object
    ) -> None:
        if options is None or others:
            raise TypeError("a dataset is opened with featstore.open(path, memory=…)")
        if view is not None:
            self._open_view(view)
            return
        path = os.path.abspath(user_path(path))
        with open_files(path) as opened:  # before a thread or a ring is made for the dataset
            check_memory(path, opened.catalog.files.values(), options)
            super().__init__(path, options)
            try:
                self._show(Snapshot(self.path, opened, self.reader))
                try:
                    self.own_part = load_part(self.snapshot, self.budget)
                    self.fields = OpenFields(self, self.snapshot)
                except BaseException:
                    with contextlib.suppress(OSError):
                        self.snapshot.close()
                    raise
            except BaseException:
                self.pool.close()
                self.reader.close()
                raise
        self._compose(Adjacency(self, self.snapshot))

    def _open_view(self, view: View) -> None:
        """Open a part of an open dataset over its files, its reader and its budget, with caches of its own."""
        super().__init__(view.whole.path, view.whole.options, view.whole)
        self.own_part = view.part
        self._show(view.whole.snapshot)
        self.shows_progress = view.whole.shows_progress
        self.fields = OpenFields(self, self.snapshot, view.whole.fields)
        self._compose(PartAdjacency(self, self.snapshot, view.whole.adjacency, view.part, view.out_degree))

    def _show(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.num_nodes, self.num_edges = snapshot.catalog.num_nodes, snapshot.catalog.num_edges

    def _compose(self, adjacency: Adjacency) -> None:
        self.adjacency = adjacency
        self.partitions = Partitions(self, self.snapshot, self.adjacency)
        self.row_caches = RowCaches(self, self.snapshot, self.adjacency, self.partitions)
        self.changes = Changes(self, self.snapshot, self.adjacency, self.fields)
        self.neighbor_lists = NeighborLists(self, self.snapshot, self.adjacency, self.partitions, self.row_caches)

    # -- making and opening ------------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        indptr: ArrayLike | None = None,
        indices: ArrayLike | None = None,
        features: Mapping[str, ArrayLike] | None = None,
        node_data: Mapping[str, ArrayLike] | None = None,
        *,
        nodes: Mapping[str, Nodes] | None = None,
        edges: Mapping[EdgeKey, Any] | None = None,
        edge_features: Mapping[str, ArrayLike] | None = None,
        coalesce: bool = False,
        remove_self_loops: bool = False,
        to_undirected: bool = False,
        topology: str = "csc",
        chunk_bytes: int | str | None = None,
        stripes: Sequence[str | os.PathLike[str]] = (),
        overwrite: bool = False,
        progress: bool = True,
        memory: int | str | None = None,
    ) -> OutOfCoreGraph:
        """Write a dataset and open it.

        Parameters
        ----------
        path : path-like
            The dataset's directory. Its parent must exist.
        indptr : integer array, shape (num_nodes + 1,)
        indices : integer array, shape (num_edges,)
            The in-neighbours of node ``v`` are ``indices[indptr[v]:indptr[v + 1]]``, in any order.
        nodes : mapping of str to Nodes, optional
            Types of nodes, in place of ``indptr``, ``indices`` and fields: the number of nodes of each type, its features and
            its data.
        edges : mapping of (str, str, str) to edges, optional
            Types of edges, by the type of the source, the relation and the type of the destination: sources and destinations
            as :meth:`from_edge_index` takes them, or a tuple ``(indptr, indices)``; or :class:`~featstore.Edges`, which also
            hold features. Ids count from 0 in each type.
        features : mapping of str to array, shape (num_nodes, …), optional
        node_data : mapping of str to array, shape (any, …), optional
            Labels, masks, index sets.
        edge_features : mapping of str to array, shape (num_edges, …), optional
            Row ``i`` is that of the edge ``indices[i]``, or of column ``i`` of ``edge_index``. Rows are stored in this order.
        coalesce, remove_self_loops, to_undirected : bool
            Clean the edges, see :meth:`from_edge_index`; they are sorted as there.
        topology : {"csc", "chunked"}
            Form in which the adjacency is stored. ``"csc"``: its offsets, 8 bytes a node, are in memory while it is sampled.
            ``"chunked"``: chunks hold offsets and neighbour ids, and only a directory and a cache of pages are in memory.
            Samples are the same. :func:`featstore.convert` converts one form to the other.
        chunk_bytes : int or str, optional
            Size of a chunk: a multiple of 4 KiB, at most 1 GiB; 1 MiB by default. For ``topology="chunked"``.
        stripes : sequence of path-like
            Directories on other drives, for ``topology="chunked"``: the dataset's own directory and each of these take an equal
            share of the chunks. A directory that is named twice takes two shares.
        overwrite : bool
            Replace a dataset at ``path`` in one step, when the new one is complete. If creation fails, the old dataset stays.
            Open handles of the old dataset go on reading it.
        progress : bool
            Show a progress bar, on a terminal and in a notebook.
        memory : int or str, optional
            Most memory to hold, besides inputs that are in memory: bytes, or text such as ``"1GiB"``; at least 8 MiB, and a
            chunk. By default a quarter of the available memory, at most 1 GiB. It is also the budget of the returned graph.

        Returns
        -------
        OutOfCoreGraph

        Raises
        ------
        TypeError
            A dtype is not supported, or ids or offsets are no integers; the error names the argument. Arguments of a graph of
            one type are mixed with those of several types.
        ValueError
            An input has a wrong shape or name, or ``indptr`` does not ascend from 0 to ``num_edges``. The error names the first
            wrong entry and its value.
        IndexError
            An entry of ``indices`` is no node; the error names the first one and its value.
        FormatError, CorruptionError
            A file is no ``.npy`` file; a file is cut short.
        FileExistsError
            ``path`` exists already (an empty directory is taken over).
        FileNotFoundError, NotADirectoryError
            The parent of ``path`` or a stripe's directory does not exist.
        BusyError
            Another process is making or changing the dataset.
        BudgetError
            ``memory`` is too little.
        CommittedError
            The new dataset is complete and in place, but a later step failed: opening it, or making its name durable. The error
            has ``errno`` and ``filename`` of that step; :func:`featstore.open` opens the dataset.
        OSError
            The disk is full or failed. No new files are left, and a dataset at ``path`` is as it was.

        Notes
        -----
        Every array may be a NumPy array or memmap, a torch tensor, a list, the path of a ``.npy`` file (versions 1 to 3, C or
        Fortran order), or ``(shape, dtype, iterable of row blocks)``. Dtypes: bool, uint8, int8 to int64, float16, bfloat16,
        float32, float64; ids also unsigned. Each neighbour list is stored in ascending order, so that a graph has one form. If
        that moves an edge, 4 bytes an edge (8 from 2³¹ edges on) keep the order of the input. Inputs are streamed once;
        ``indptr``, unless it comes in blocks, is first read to be checked. When this returns, the dataset is durable.

        Names of types are as those of fields, without commas; ``"_"`` is the name of nodes without types. Edges of several types
        are sorted as by :meth:`from_edge_index`.

        Examples
        --------
        >>> g = OutOfCoreGraph.create("graph", [0, 2, 3, 3], [1, 2, 0], {"x": np.eye(3, dtype=np.float32)})
        >>> g.features["x"][[2, 0]]
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
        >>> g = OutOfCoreGraph.create(
        ...     "typed",
        ...     nodes={"paper": featstore.Nodes(3, features={"x": np.eye(3)}), "author": featstore.Nodes(2)},
        ...     edges={("author", "writes", "paper"): np.array([[0, 1, 1], [2, 0, 1]])},
        ... )
        >>> g["paper"].features["x"][2]
        tensor([0., 0., 1.], dtype=torch.float64)
        """
        options = CreateOptions.of(
            path,
            coalesce=coalesce,
            remove_self_loops=remove_self_loops,
            to_undirected=to_undirected,
            topology=topology,
            chunk_bytes=chunk_bytes,
            stripes=stripes,
            overwrite=overwrite,
            progress=progress,
            memory=memory,
        )
        if nodes is not None or edges is not None:
            arrays = {"indptr": indptr, "indices": indices, "features": features, "node_data": node_data}
            refuse_one_type(arrays | {"edge_features": edge_features}, options.cleaning)
            create_typed(options, {} if nodes is None else nodes, {} if edges is None else edges)
        elif indptr is None or indices is None:
            raise TypeError("a graph is made of indptr and indices, or of nodes and edges")
        else:
            build.create(options, indptr, indices, features, node_data, edge_features)
        return cls._open_made(options)

    @classmethod
    def from_edge_index(
        cls,
        path: str | os.PathLike[str],
        edge_index: Any,
        num_nodes: int | Mapping[str, int],
        features: Mapping[str, Any] | None = None,
        node_data: Mapping[str, Any] | None = None,
        *,
        edge_features: Mapping[Any, Any] | None = None,
        coalesce: bool = False,
        remove_self_loops: bool = False,
        to_undirected: bool = False,
        topology: str = "csc",
        chunk_bytes: int | str | None = None,
        stripes: Sequence[str | os.PathLike[str]] = (),
        overwrite: bool = False,
        progress: bool = True,
        memory: int | str | None = None,
    ) -> OutOfCoreGraph:
        """Write a dataset from edges in any order, by an external sort, and open it.

        Parameters
        ----------
        edge_index : integer array, shape (2, num_edges), or iterable of such blocks
            Row 0 holds sources, row 1 destinations, as in PyG. An array, memmap, tensor, ``.npy`` path, two lists or arrays; or
            an iterable of blocks ``[2, k]``, consumed once. A list of pairs is ``np.array(pairs).T``. Samplers number edges in
            this order (``edges=True``). Of several types a mapping of ``(source, relation, destination)`` to one of these, as
            PyG's ``edge_index_dict``; all fields are mappings by type then, and edges are not cleaned.
        num_nodes : int, or mapping of type to int
        coalesce : bool
            Remove duplicates, as PyG's ``coalesce`` and DGL's ``to_simple`` do; otherwise repeated edges stay. Edges are then
            numbered as :meth:`edges` yields them. Not allowed with ``edge_features`` or ``stripes``.
        remove_self_loops : bool
            Remove edges from a node to itself; the other edges are numbered in their order. Not allowed with ``edge_features``.
        to_undirected : bool
            Add the reverse of each edge, as PyG's ``to_undirected`` and DGL's ``to_bidirected`` do, and remove duplicates. The
            numbering and limits of ``coalesce`` apply.
        memory : int or str, optional
            As for :meth:`create`. Edges beyond it are sorted through temporary files beside the dataset, 12 bytes an edge (16 of
            an iterator; 8 more from 2³¹ nodes on), twice that at worst.
        path, features, node_data, edge_features, topology, chunk_bytes, stripes, overwrite, progress
            See :meth:`create`.

        Raises
        ------
        IndexError
            An id is not in ``[0, num_nodes)``; the error names the id and its position.
        FileExistsError, BusyError, TypeError, ValueError, FormatError, CorruptionError, BudgetError, CommittedError, OSError
            See :meth:`create`.

        Notes
        -----
        The sort also handles a single destination with more in-neighbours than memory holds. Each pair is written and read once,
        and once more for every level at which its bucket had to be split.
        """
        options = CreateOptions.of(
            path,
            coalesce=coalesce,
            remove_self_loops=remove_self_loops,
            to_undirected=to_undirected,
            topology=topology,
            chunk_bytes=chunk_bytes,
            stripes=stripes,
            overwrite=overwrite,
            progress=progress,
            memory=memory,
        )
        if isinstance(edge_index, Mapping):
            refuse_one_type({}, options.cleaning)
            create_typed(options, *nodes_and_edges(edge_index, num_nodes, features, node_data, edge_features))
        else:
            n = cast("int", num_nodes)  # else it is refused there
            build.from_edge_index(options, edge_index, n, features, node_data, edge_features)
        return cls._open_made(options)

    @classmethod
    def from_pyg(
        cls,
        path: str | os.PathLike[str],
        data: Any,
        features: str | Sequence[str] | None = None,
        *,
        overwrite: bool = False,
        progress: bool = True,
        memory: int | str | None = None,
    ) -> OutOfCoreGraph:
        """Write a dataset from a PyG graph, and open it; see :func:`featstore.adapters.pyg.create`.

        Parameters
        ----------
        data : torch_geometric.data.Data or HeteroData, or dataset of one
        features : str or sequence of str, optional
            Attributes that become features, of each type that has them; ``x`` by default. All other attributes become node data.
        path, overwrite, progress, memory
            See :meth:`create`.

        Raises
        ------
        MissingExtraError
            torch_geometric is not installed.
        TypeError, ValueError, IndexError
            ``data`` cannot be stored: it is temporal, has attributes of edges in an ``adj_t``, and the like.
        FileExistsError, BusyError, FormatError, BudgetError, CommittedError, OSError
            See :meth:`create`.
        """
        made: OutOfCoreGraph = adapter("pyg").create(path, data, features, overwrite=overwrite, progress=progress, memory=memory)
        return made

    @classmethod
    def _open_made(cls, made: CreateOptions) -> OutOfCoreGraph:
        """Open a dataset that was just made; an error says that it need not be made again."""
        where = os.path.abspath(made.path)
        with opening_committed(f"the dataset at {where} is complete and in place, but opening it failed", where):
            return cls.open(made.path, memory=made.memory)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        memory: int | str | None = None,
        backend: str = "auto",
        verify: str | None = None,
        threads: int | None = None,
        *,
        progress: bool = True,
    ) -> OutOfCoreGraph:
        """Open a dataset for reading.

        Parameters
        ----------
        path : path-like
        memory : int or str, optional
            The budget: bytes, text such as ``"4GiB"``, or a share of the machine's memory (``"5%"``). By default half of the
            available memory. The default, and a share, is divided by the number of processes on this machine
            (``LOCAL_WORLD_SIZE``).
        backend : {"auto", "buffered", "io_uring", "pread"}
            Method of reading files. ``"io_uring"`` and ``"pread"`` are demands: OSError if they are refused. ``"buffered"`` is as
            ``"auto"``, but through the page cache. ``FEATSTORE_BACKEND`` replaces ``"auto"``.
        verify : {"always", "open", "off"}, optional
            Check the checksum of every page that is read, of all pages now, or of none. By default ``FEATSTORE_VERIFY``, or
            ``"always"``.
        threads : int, optional
            Threads that copy rows. By default ``FEATSTORE_THREADS``, or the number of processors.
        progress : bool
            Show a progress bar, on a terminal and in a notebook, while the offsets of a large graph are read or a large cache is
            filled.

        Returns
        -------
        OutOfCoreGraph

        Raises
        ------
        FileNotFoundError, PermissionError
            There is no dataset at ``path``, or it may not be read.
        CorruptionError
            The catalog is damaged; a file has another length than the catalog says, a damaged header, or belongs elsewhere.
        FormatError
            ``path`` is no dataset, a file is a link, directory, FIFO or device, or the catalog names a file outside the dataset.
        VersionError
            The dataset needs a newer release or another byte order.
        BudgetError
            The budget does not suffice for reading; ``needed`` is a budget that does.
        OSError
            The kernel refuses the named backend; too many files are open.

        Notes
        -----
        Opening reads the catalog and one page of each file. Unless ``verify="off"``, it also reads each file's table of
        checksums, 0.2 % of the file's size. Pages of a table too large for the budget are read later, as they are needed.
        """
        g = cls(path, Options.resolve(memory, backend, verify, threads))
        g.shows_progress = progress
        return g

    # -- describing --------------------------------------------------------------------------------------------------------------

    if not TYPE_CHECKING:  # for a type checker __getattr__ would define every name

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property failed: with the error of its own
                return object.__getattribute__(self, name)
            for kind in ("features", "node_data", "edge_features"):
                if name in self.__dict__.get(kind, ()):
                    raise AttributeError(f"a graph has no attribute {name!r}; it has {kind}[{name!r}]", name=name, obj=self)
            raise no_attribute(self, name, _ELSEWHERE.get(name, ""))

    def __dir__(self) -> list[str]:
        return sorted({*_PUBLIC, *(name for name in object.__dir__(self) if name.startswith("__"))})

    def _title(self) -> str:
        state = ", closed" if self._closed else ""
        return f"OutOfCoreGraph({self.path!r}, num_nodes={self.num_nodes}, num_edges={self.num_edges}{state})"

    @property
    def types(self) -> Types:
        """See :attr:`StoredGraph.types`."""
        return self.snapshot.types

    @overload
    def __getitem__(self, name: str) -> Any: ...
    @overload
    def __getitem__(self, name: EdgeKey) -> EdgeView: ...
    def __getitem__(self, name: str | EdgeKey) -> Any:
        """Get a feature or a type by name, as in PyG.

        Without types, ``g["x"]`` is ``g.features["x"]``. With types, ``g["paper"]`` is a :class:`NodeView`, and
        ``g["author", "writes", "paper"]`` an :class:`EdgeView`. ``g.features`` always means features.

        Raises
        ------
        KeyError
            No feature or type has this name; the error lists the existing names.
        TypeError
            The index is not a name.
        """
        if self.types.is_one or isinstance(name, str):
            return super().__getitem__(cast(str, name))
        if not isinstance(name, tuple):
            raise TypeError(f"a graph of several types is indexed by the name of a type, not by {name!r}")
        edges = self.types.edges
        if name not in edges:
            raise KeyError(f"no edge type {name!r}; there is {listed(edges)}")
        return EdgeView(name, edges[name].n_edges, cast(Fields, self.edge_features).of_type(edge_name(name)))

    @property
    def topology(self) -> Topology:
        """The adjacency.

        In CSC form the first use reads the offsets, 8 bytes a node, which the budget counts from then on. In chunked form it
        reads the directory of chunks, and the budget also counts a cache of pages.
        """
        return self.adjacency.topology

    @property
    def neighbor_cache(self) -> NeighborCache | None:
        """Neighbour lists in memory, see :meth:`~featstore.OutOfCoreGraph.cache_neighbors`; None without any."""
        return self.neighbor_lists.cache

    @neighbor_cache.setter
    def neighbor_cache(self, cache: NeighborCache | None) -> None:
        self.neighbor_lists.cache = cache

    @property
    def indptr(self) -> torch.Tensor:
        """Offsets of the in-neighbours of each node, int64 ``[num_nodes + 1]``, as given to :meth:`create`.

        Each access reads the offsets again, as do :attr:`in_degree` and :attr:`out_degree`: keep the tensor, which is yours. The
        budget counts its 8 bytes a node while it lives. Raises BudgetError, ClosedError, CorruptionError and OSError.
        """
        self.refuse_types("indptr")
        return self.adjacency.indptr()

    @property
    def in_degree(self) -> torch.Tensor:
        """Number of in-neighbours of each node, repeated ones counted: int64 ``[num_nodes]``; see :attr:`indptr`."""
        self.refuse_types("in_degree")
        return self.adjacency.in_degree()

    @property
    def out_degree(self) -> torch.Tensor:
        """Number of out-neighbours of each node, repeated ones counted: int64 ``[num_nodes]``; see :attr:`indptr`."""
        self.refuse_types("out_degree")
        return self.adjacency.out_degree()

    # -- reading back, and keeping rows and lists in memory ----------------------------------------------------------------------

    @overload
    def neighbors(self, node: int, edge_pos: Literal[False] = False) -> torch.Tensor: ...

    @overload
    def neighbors(self, node: int, edge_pos: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...

    def neighbors(self, node: int, edge_pos: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Read all in-neighbours of one node.

        Parameters
        ----------
        node : int
            In ``[0, num_nodes)``.
        edge_pos : bool
            Return also the position of each edge in the input, as ``edge_pos`` of sampled blocks does.

        Returns
        -------
        neighbors : int64 tensor, shape (in-degree,)
            Ascending; a neighbour occurs once for each of its edges.
        edge_pos : int64 tensor, shape (in-degree,)
            Only with ``edge_pos=True``.

        Raises
        ------
        IndexError
            ``node`` is no node.
        TypeError
            ``node`` is not an integer. Use ``NeighborSampler(g, [-1])`` for many nodes.
        BudgetError, ClosedError, CorruptionError, OSError

        Notes
        -----
        The call reads the pages that hold the list. The first call opens the adjacency, as samplers do.
        """
        self.refuse_types("neighbors()")
        return self.adjacency.neighbors(node, edge_pos)

    @overload
    def edges(self, edge_pos: Literal[False] = False) -> Iterator[torch.Tensor]: ...

    @overload
    def edges(self, edge_pos: Literal[True]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]: ...

    def edges(self, edge_pos: bool = False) -> Iterator[torch.Tensor] | Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Read all edges once, in sequence and in blocks.

        Parameters
        ----------
        edge_pos : bool
            Yield also the position of each edge in the input, which is its row in ``edge_features``.

        Yields
        ------
        edge_index : int64 tensor, shape (2, k)
            Sources and destinations, as :meth:`from_edge_index` takes them; ``k`` is at least 1. Edges ascend by
            destination, then by source. Each block is yours, and counts in the budget while it lives.
        edge_pos : int64 tensor, shape (k,)
            Only with ``edge_pos=True``; then a pair is yielded.

        Raises
        ------
        BudgetError, ClosedError, CorruptionError, OSError

        Notes
        -----
        A block has at most half a million edges, or fewer if little memory is left. The budget counts buffers for reading ahead
        as ``edges``. The call opens the adjacency, as samplers do.
        """
        self.refuse_types("edges()")
        return self.adjacency.edges(edge_pos)

    def ids(self, node_type: str | None = None) -> IdMap:
        """Get the map of the names that nodes had where they came from, text or integers, to their ids.

        Parameters
        ----------
        node_type : str, optional
            A type of nodes; not given for a graph of one type.

        Returns
        -------
        IdMap
            ``g.ids("paper").encode(names)`` is an int64 tensor of ids, ``g.ids("paper").decode(ids)`` gives the names.

        Raises
        ------
        KeyError
            There is no such type.
        ValueError
            The nodes have no names, or there are several types and none is given.
        FormatError, ClosedError
            The catalog's entry cannot be used; the graph is closed.

        Notes
        -----
        Imports of tables keep such maps (:func:`featstore.adapters.datasets.tables.import_tables`). They stay on disk.
        """
        self.check_open()
        snapshot, types = self.snapshot, self.types.nodes
        if node_type is None and len(types) > 1:
            raise ValueError(f"name a type of nodes: {listed(types)}")
        of = next(iter(types)) if node_type is None else node_type
        if of not in types:
            raise KeyError(f"no node type {of!r}; there is {listed(types)}")
        found = map_of(self.catalog, of, types[of].n, self.path)
        if found is None:
            raise ValueError(
                f"{self.path} keeps no names of nodes{'' if self.types.is_one else f' of type {of!r}'}: it was made of ids; "
                "featstore import table keeps the names"
            )
        return IdMap(of, found, snapshot.files, self.budget)

    def cache(
        self,
        name: str | None = None,
        budget: int | float | str = "auto",
        policy: str | Policy | type[Policy] = "degree",
        *,
        counts: Given = None,
        parts: GivenParts = None,
        seed: int = 0,
        shared: bool | int = False,
    ) -> None:
        """Cache rows of a feature in memory, in place of an earlier cache of it.

        Parameters
        ----------
        name : str, optional
            The feature; by default all features of nodes, with equally many cached rows.
        budget : int, float or str
            Memory of the cache within the graph's budget, its row map of 4 bytes a node included: bytes, or text such as
            ``"1GiB"``. A share (``"10%"`` or ``0.1``) means the bytes of this share of the rows. A cache never takes more than
            all rows take; 0 means no cache. The default ``"auto"`` takes seven eighths of the available budget, and gives rows
            back if other holders need the memory.
        policy : str, Policy or class
            A registered name (``featstore.available_policies()``), an instance for this cache alone, or a class.
        counts : integer array, shape (num_nodes,), or callable that returns it, optional
            Accesses of each row in a profiled run, for ``policy="frequency"``; a callable is called if the policy needs it.
        parts : integer array, shape (num_nodes,), callable that returns it, str or KeptParts, optional
            The part of each node, for policies that need it; or parts that the dataset keeps, by their name.
        seed : int
            Seed of randomised policies.
        shared : bool or int
            Share one copy in shared memory among this machine's ranks: for static policies by name or class, and a stated
            ``budget``, which is that of the one copy. Each rank's budget counts its share. Every rank makes this call, with equal
            arguments. True: as many ranks as ``LOCAL_WORLD_SIZE`` says, or one process. A number: so many.

        Raises
        ------
        BudgetError
            The graph's budget has too little left, or ``budget`` is too small for one row. The message names the least that
            works.
        BusyError
            The feature's cache follows the plans of a loader that is in the middle of an epoch. Or another rank was still filling
            the shared cache after half an hour.
        PluginError
            The policy failed.
        KeyError, ValueError, TypeError
            The feature or the policy does not exist, an array has a wrong shape, or a number of bytes below 4,096 has no unit.
        CorruptionError, OSError
            Filling a static cache failed; or shared memory is too small (ENOSPC).

        Notes
        -----
        The rows of a static policy are read now, in one ascending pass; if that takes longer than two seconds, a progress bar is
        shown (:meth:`open`: ``progress``). On an error the feature has no cache.
        """
        self.row_caches.cache(name, budget, policy, counts=counts, parts=parts, seed=seed, shared=shared)

    def cache_neighbors(
        self,
        budget: int | float | str | None = None,
        policy: str | Policy | type[Policy] = NEIGHBOR_POLICY,
        *,
        counts: Given = None,
        parts: GivenParts = None,
        seed: int = 0,
        edges: bool = False,
        save: bool = False,
        progress: bool = True,
        shared: bool | int = False,
    ) -> None:
        """Cache neighbour lists in memory, for samplers, in place of an earlier cache of them.

        Parameters
        ----------
        budget : int, float or str, optional
            Memory of the cache within the graph's budget: bytes or text, or a share of the whole budget (``"10%"`` or ``0.1``).
            By default all available memory; 0 means no cache. If the whole adjacency fits, sampling reads nothing from disk.
        policy : str, Policy or class
            A static policy, which scores the nodes whose lists are cached. ``"cross_partition"`` prefers lists that batches of
            other parts use. ``"saved_io"`` prefers lists with the most drawn edges (``counts``) for their bytes.
        counts : integer array, shape (num_nodes,), or callable, optional
            Edges that an epoch draws from each node's list, or a callable that returns them and is called if the policy needs
            them; ``featstore.estimate.savedio.edges_drawn`` counts them.
        parts, seed
            As for :meth:`cache`. The default of ``parts`` for ``"cross_partition"`` are the parts that were kept last.
        edges : bool
            Also keep the numbers of the lists' edges, for samplers with ``edges=True``: 4 bytes an edge (8 from 2³¹ edges on),
            of the same ``budget``, so fewer lists may fit. Only datasets whose lists were sorted by ``create`` store such
            numbers; for others this changes nothing.
        save : bool
            Also store the cache in the dataset, unless it holds the whole adjacency. A later call with the same budget, policy,
            seed and ``edges`` (without ``counts``, and with no ``parts`` but kept ones) loads the cache instead of making it.
        progress : bool
            Show a progress bar, on a terminal and in a notebook.
        shared : bool or int
            Share one copy among this machine's ranks, as for :meth:`cache`; the ``budget`` is stated in bytes. A cache that was
            saved is loaded by the first rank; ``save`` itself is for one process.

        Raises
        ------
        BudgetError
            Not even the cache's table of 8 bytes a node fits. The message names the least that works.
        ValueError, PluginError, CorruptionError, OSError
            The policy is unknown or not static; a cache with these arguments could not be recognised, so it cannot be saved; the
            policy needs parts, and none are kept; the policy failed; a list holds an id that is no node, or a number that is no
            edge; reading or saving failed; shared memory is too small (ENOSPC).
        StaleError
            The parts were made for another adjacency than the dataset has now.
        BusyError
            The cache cannot be saved: another process is writing the dataset, or has replaced it. The cache is in use all the
            same. Or another rank was still making the shared cache after half an hour.
        CommittedError
            The cache is saved, but making that durable failed: a power cut may undo it. The cache is in use all the same.

        Notes
        -----
        The call reads the adjacency once, sequentially, and with ``edges`` the numbers of all edges. On an error there is no
        cache, unless only saving failed.
        """
        self.neighbor_lists.choose(
            budget, policy, counts=counts, parts=parts, seed=seed, edges=edges, save=save, progress=progress, shared=shared
        )

    verify = verification.verify

    # -- changing ----------------------------------------------------------------------------------------------------------------

    def add_feature(
        self,
        name: str,
        rows: ArrayLike,
        *,
        type: str | EdgeKey | None = None,
        overwrite: bool = False,
        progress: bool = True,
    ) -> FeatureStore:
        """Add a feature of nodes, or of edges, to the dataset.

        Parameters
        ----------
        name : str
        rows : array, shape (number of nodes or edges, …)
            As :meth:`create` takes features: an array, a memory map, a tensor, the path of a ``.npy`` file, or ``(shape, dtype,
            iterable of row blocks)``. Rows of edges are in the order in which the edges were given.
        type : str or tuple (source, relation, destination), optional
            The type of nodes or edges, in a graph of several types. The edges of a graph of one type are ``("_", "_", "_")``.
        overwrite : bool
            Replace a feature of that name. Stores of it that were handed out go on reading the old one, whose file is removed
            by the next change, or when the graph is closed.
        progress : bool
            Show a progress bar, on a terminal and in a notebook.

        Returns
        -------
        FeatureStore
            ``g.features[name]``, or ``g.edge_features[name]``, ready to be used; other handles have it when they are opened
            again.

        Raises
        ------
        KeyError, TypeError, ValueError
            There is no such type, or none is named; the rows have a wrong number, shape or dtype; the name is taken or not
            allowed.
        BudgetError
            The budget has no room for a block of rows.
        BusyError
            Another process is writing the dataset, or has replaced it; or a loader uses the feature that is to be replaced.
        CommittedError
            The feature is in the dataset, but making that durable, or opening it, failed.
        FormatError, CorruptionError, OSError
            A file of rows cannot be read; the disk is full or failed. The dataset is as it was, and no files are left.

        Notes
        -----
        Rows are streamed once, in at most an eighth of the available memory and 2 MiB. One commit adds the feature, after all
        of its bytes are on the drive. Whatever was made of a replaced feature is stale: packs, and caches that were saved.

        Examples
        --------
        >>> g.add_feature("z", np.ones((g.num_nodes, 8), np.float32)).shape
        torch.Size([1000, 8])
        """
        return self.changes.add_feature(name, rows, type, overwrite, progress)

    def add_data(
        self,
        name: str,
        rows: ArrayLike,
        *,
        type: str | None = None,
        overwrite: bool = False,
        progress: bool = True,
    ) -> None:
        """Add node data to the dataset: labels, masks, index sets. ``g.node_data[name]`` has them at once.

        Parameters
        ----------
        name : str
        rows : array, shape (any, …)
            See :meth:`add_feature`.
        type : str, optional
            The type of nodes, in a graph of several types.
        overwrite : bool
            Replace node data of that name. Tensors that were handed out stay as they are.
        progress : bool
            Show a progress bar, on a terminal and in a notebook.

        Raises
        ------
        KeyError, TypeError, ValueError, BudgetError, BusyError, CommittedError, FormatError, CorruptionError, OSError
            See :meth:`add_feature`.

        Notes
        -----
        See :meth:`add_feature`. Whoever loads batches reads labels when the loader is made: make it again.
        """
        self.changes.add_data(name, rows, type, overwrite, progress)

    def append_nodes(
        self,
        n: int,
        features: Mapping[str, ArrayLike] | None = None,
        data: Mapping[str, ArrayLike] | None = None,
        *,
        type: str | None = None,
        progress: bool = True,
    ) -> range:
        """Append nodes without edges to the dataset, in one commit.

        Parameters
        ----------
        n : int
            Number of new nodes. Their ids follow the others of their type.
        features : mapping of str to array, shape (n, …)
            Rows of every feature of the nodes, of its dtype; see :meth:`add_feature` for inputs.
        data : mapping of str to array, shape (any, …)
            Rows to append to node data. Data with a row for each node needs ``n``; others, such as index sets, may be left out.
        type : str, optional
            The type of the nodes, in a graph of several types.
        progress : bool
            Show a progress bar, on a terminal and in a notebook.

        Returns
        -------
        range
            The new ids, within the type. This handle goes on showing the old nodes, as all others do: open the dataset again.

        Raises
        ------
        KeyError, TypeError, ValueError
            There is no such type, or none is named; a field lacks rows, or is not there; rows have a wrong number, shape or
            dtype; there would be 2³¹ nodes or more, whose ids are wider.
        NotImplementedError
            The graph is a part; or the nodes of the type have names (:meth:`ids`).
        BudgetError, BusyError, CommittedError, FormatError, CorruptionError, OSError
            See :meth:`add_feature`. BusyError also if another handle has changed a field since this one was opened.

        Notes
        -----
        Rows are appended as patches, see :meth:`FeatureStore.update`: their own bytes are written, and those of the last block.
        Offsets and out-degrees are written anew, 16 bytes a node; neighbour ids stay as they are. Of an adjacency in chunks, the
        last chunk, the chunks' directory and out-degrees are written anew. Edges of the new nodes need a new dataset
        (:meth:`from_edge_index`). Kept parts, saved neighbour caches and packs of the old graph are stale.

        Types are ranges of ids, so nodes of types behind this one get other ids in the files, not for the user. If edges begin
        at such nodes, neighbour ids are written anew, or the chunks from the first one that changes; and so are features that
        share a file with rows of such types. Appending to the last of :attr:`node_types` costs what it costs with one type.

        Examples
        --------
        >>> g.append_nodes(2, {"x": np.zeros((2, 16), np.float32)})
        range(1000, 1002)
        """
        return self.changes.append_nodes(n, features, data, type, progress)

    def update_data(self, name: str, ids: Any, rows: Any, *, type: str | None = None, progress: bool = True) -> None:
        """Change rows of node data in the dataset, in one commit. ``g.node_data[name]`` has them at once.

        Parameters
        ----------
        name : str
            The name within the type.
        ids, rows, progress
            See :meth:`FeatureStore.update`.
        type : str, optional
            The type of nodes, in a graph of several types.

        Raises
        ------
        KeyError, IndexError, TypeError, ValueError, BudgetError, BusyError, CommittedError, CorruptionError, OSError
            There is no such data, or no such type; or see :meth:`FeatureStore.update`.

        Notes
        -----
        See :meth:`FeatureStore.update`. Tensors that were handed out stay as they are.
        """
        self.changes.update_data(name, ids, rows, type, progress)

    @property
    def stale_features(self) -> dict[str, list[str]]:
        """Features that :meth:`aggregate` or :func:`featstore.infer` made, and of which an input was changed since.

        By the feature's name, the names of these inputs, ``"adjacency"`` among them; types that share a file change together.
        Stale features keep their rows: make them again with ``overwrite=True``.
        """
        self.check_open()
        return stale_features(self.catalog)

    def remove_feature(self, name: str, *, type: str | EdgeKey | None = None) -> None:
        """Remove a feature of nodes, or of edges, from the dataset.

        Parameters
        ----------
        name : str
            The feature's name within its type.
        type : str or tuple (source, relation, destination), optional
            See :meth:`add_feature`.

        Raises
        ------
        KeyError, TypeError, ValueError
            There is no such feature or type; the feature was attached, and is in no file.
        BusyError
            Another process is writing the dataset, or has replaced it; or a loader uses the feature.
        CommittedError
            The feature is removed, but a power cut may bring it back.
        OSError
            The disk failed. The dataset is as it was.

        Notes
        -----
        One commit removes the feature. Open handles, and stores of it that were handed out, go on reading it; its file is
        removed when nobody has the dataset open any more. What several types of nodes share stays until all are removed.
        """
        self.changes.remove_feature(name, type)

    def remove_data(self, name: str, *, type: str | None = None) -> None:
        """Remove node data from the dataset; see :meth:`remove_feature`. Tensors that were handed out stay as they are."""
        self.changes.remove_data(name, type)

    def aggregate(
        self,
        feature: str,
        op: str = "mean",
        *,
        edge_type: EdgeKey | None = None,
        hops: int = 1,
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
        overwrite: bool = False,
        memory: int | str | None = None,
        progress: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> FeatureStore:
        """Aggregate a feature over each node's in-neighbours, out of core, and add the new feature to the dataset.

        Training on the new feature saves a hop of sampling and gathering: PaGraph's preprocessing.

        Parameters
        ----------
        feature : str
            Name of a feature of any dtype and row shape; in a graph of several types, of the type at which the edges begin.
        op : {"mean", "sum", "gcn"}
            Over the list of in-neighbours N(v), in which a repeated edge counts each time. ``"sum"``: Σ x_u. ``"mean"``: Σ x_u
            divided by the length of the list, 0 if it is empty. ``"gcn"``: s_v · Σ s_u x_u over N(v) and v itself, where s_v =
            1/√(d_v + 1). v counts exactly once, with or without edges from v to v, and d_v is the number of in-edges from other
            nodes. In a directed graph, s_u and s_v are both made of in-degrees, as in PyG's ``gcn_norm``.
        edge_type : tuple (source, relation, destination), optional
            The type of edges over which rows are aggregated, of a graph of several types. The new feature is one of the
            destination's type: ``g["author"].features["x_mean"]``. ``"gcn"`` and several hops need edges that begin and end at
            one type of nodes.
        hops : int
            Number of aggregations, each of the result of the one before. Fields between hops are float64.
        name : str, optional
            Name of the new feature; by default ``x_mean``, and ``x_mean2`` for two hops. It may be ``feature`` if the edges end
            at another type of nodes than they begin at.
        dtype : torch.dtype or str, optional
            Floating-point dtype of the new feature: by default that of ``feature``, and float64 for integers and bools.
        overwrite : bool
            Replace a feature of that name. Stores of it that were handed out go on reading the old one, whose file is removed
            when the graph is closed.
        memory : int or str, optional
            Most bytes to hold, within the graph's budget; by default nearly all available memory.
        progress : bool
            Show a progress bar, with the time left, on a terminal and in a notebook.
        rank, world_size : int, optional
            Those of torch's process group by default: all ranks call alike, on one dataset, and each makes its rows. ``rank=0,
            world_size=1`` makes the feature alone.

        Returns
        -------
        FeatureStore
            ``g.features[name]``, or ``g[destination].features[name]``, ready to be used; other handles have it when they are
            opened again.

        Raises
        ------
        KeyError, ValueError, TypeError
            The feature, ``op`` or ``edge_type`` does not exist, or does not fit; the name is taken or not allowed; ``dtype`` is
            not floating-point.
        BudgetError
            There is too little memory for the sums of one node; the error names a sufficient amount.
        BusyError
            Another process is writing the dataset, or has changed it since it was opened; or a loader uses the feature that is
            to be replaced.
        CommittedError
            The feature is in the dataset, but making that durable, or opening it, failed.
        CorruptionError, OSError
            Reading or writing failed. The dataset is as it was, and no files are left.
        RuntimeError
            Another rank failed, or torch says that it is lost. The rows that ranks have made are there for the next call.

        Notes
        -----
        Sums are made in float64, in ascending order of the neighbours, and rounded once, to ``dtype``. They equal SciPy's
        product ``csr_array((ones, indices, indptr)) @ x`` in float64 bit for bit. int64 beyond 2⁵³ is rounded first.

        Nodes are processed in blocks whose sums fit the memory, 8 bytes a number; each block reads the feature once, in sequence.
        The graph's threads add; their number changes no bit.

        One commit adds the feature. After a kill or Ctrl-C, the same call resumes the work, except for the last seconds. The
        dataset's writer lock is held meanwhile. The disk must hold the new feature, and between hops two float64 fields.

        Examples
        --------
        >>> g.aggregate("x", op="mean", name="x_mean").shape
        torch.Size([1000, 16])

        References
        ----------
        Bai et al.: PaGraph. IEEE TPDS 2021, section 5.1 (PP). Kipf, Welling: Semi-Supervised Classification with Graph
        Convolutional Networks. ICLR 2017, equation 2 (gcn).
        """
        self.check_open()
        self.refuse_part("aggregate()")
        with self.or_closed(), Meeting(rank, world_size) as meeting:
            aggregate_in_hops(
                self, self.fields, self.adjacency, feature, op, edge_type, hops, name, dtype, overwrite, memory, progress, meeting
            )
        name = default_name(feature, op, hops) if name is None else name
        return self.features[name if edge_type is None else qualified(edge_type[2], name)]

    # -- as loaders, samplers and the command line use it ------------------------------------------------------------------------

    @property
    def catalog(self) -> Catalog:
        """The catalog of the open commit, with fields and entries that this handle has added since."""
        return self.snapshot.catalog

    def fingerprint(self) -> dict[str, str]:
        """Identify the file of each field by its id, by key; anything made from a field is stale once the field's id differs.

        The id of the adjacency is that of the files that first held it, so :func:`featstore.convert` does not change it.
        """
        return fingerprint_of(self.catalog)

    def edge_lists(self, key: EdgeKey = ONE_EDGE) -> EdgeLists:
        """Get the neighbour lists of a type of edges; those of a graph of one type by default."""
        return EdgeLists(self.topology, self.types.edges[key])

    def topology_bytes(self) -> int:
        """Bound the bytes that the adjacency will hold after its first use; 0 if it is open already."""
        return self.adjacency.bytes_to_come()

    def short_degrees(self) -> npt.NDArray[np.uint16]:
        """See :meth:`Adjacency.short_degrees`."""
        return self.adjacency.short_degrees()

    def policy_inputs(
        self,
        row_bytes: int,
        counts: Given = None,
        parts: GivenParts = None,
        seed: int = 0,
        budget: Budget | None = None,
        rows: NodeRows | None = None,
    ) -> PolicyInputs:
        """See :meth:`RowCaches.policy_inputs`."""
        return self.row_caches.policy_inputs(row_bytes, counts, parts, seed, budget, rows=rows)

    def _data_bytes(self, name: str) -> int:
        return self.fields.data_bytes(name)

    def _read_data(self, name: str) -> torch.Tensor:
        return self.fields.read_data(name)

    def _change_rows(self, name: str, ids: Any, rows: Any, progress: bool) -> FeatureStore:
        return self.changes.update_rows(name, ids, rows, progress)

    def _change_edge_rows(self, name: str, ids: Any, rows: Any, progress: bool) -> FeatureStore:
        return self.changes.update_edge_rows(name, ids, rows, progress)

    # -- parts -------------------------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, KeptParts]:
        """List the partitions that the dataset keeps, by name, the latest last; :func:`featstore.partition` makes them.

        Partitions that other handles have kept since this dataset was opened are not listed.
        """
        return self.partitions.by_name()

    def part(self, i: int, name: str | None = None, *, progress: bool = True) -> OutOfCoreGraph:
        """View one of the dataset's self-reliant parts as a graph of its own, over the same files.

        Parameters
        ----------
        i : int
            Number of the part, such as the rank of a process.
        name : str, optional
            Name of the kept parts; by default the self-reliant ones that were kept last. See :func:`featstore.partition`.
        progress : bool
            Show a progress bar, on a terminal and in a notebook.

        Returns
        -------
        OutOfCoreGraph
            The view, whose ``own_part`` names its nodes: the part's training nodes, and their in-neighbours within the hops of
            the parts. An open view of the same part is returned again. Closing it leaves the graph open; closing the graph
            closes it.

        Raises
        ------
        IndexError
            There is no such part.
        ValueError, NotImplementedError
            There are no such parts, or they are parts of all nodes; the part has no training nodes; this is a part already.
        StaleError
            The parts were made for another adjacency than the dataset has now.
        BudgetError, ClosedError, CorruptionError, OSError
            There is no memory for the part; reading failed.

        Notes
        -----
        Nodes have their ids in the whole graph, and draws are those of the whole graph, bit for bit. Another node is an
        IndexError that names the part, in samplers, loaders and features. Caches, and degrees that policies see, are the part's
        own: how often a node is in the lists of the part. Files, ``memory`` and node data are shared.

        The call reads the lists of the part once. The view holds 5 bytes a node of the whole graph (9 from 2³¹ edges on).

        References
        ----------
        PaGraph, TPDS 2021, sections 3.2 and 4.

        Examples
        --------
        >>> parts = featstore.partition(g, 4, "ldg", train_idx, hops=2)
        >>> view = g.part(0)
        >>> loader = featstore.Loader(view, featstore.NeighborSampler(view, [10, 5]), view.own_part.train_nodes)
        """
        number, kept = self.find_part(i, name)
        progress, key = check_flag("progress", progress), (kept.name, kept.generation, number)
        with self.locked():
            found = self._views.get(key)
        if found is None:
            reached = self.reach_part(number, kept, progress)  # not under the lock, as it reads the part's lists
            with self.locked():
                found = self._views.get(key)  # another thread may have been faster
                if found is None:
                    found = self._views[key] = OutOfCoreGraph(self.path, self.options, reached)
        assert isinstance(found, OutOfCoreGraph)
        return found

    def part_again(self, number: int, name: str, generation: int) -> OutOfCoreGraph:
        """View a part that was viewed before, elsewhere; StaleError if the parts were replaced since."""
        _, kept = self.find_part(number, name)
        if kept.generation != generation:
            raise StaleError(f"{self.path}: parts {name!r} were replaced since part {number} of them was pickled", self.path)
        return self.part(number, name, progress=False)

    def find_part(self, i: Any, name: str | None = None) -> tuple[int, KeptParts]:
        """Find a self-reliant part that is kept, by default one of those kept last; raises as :meth:`OutOfCoreGraph.part`."""
        self.check_open()
        self.refuse_part("part()")
        self.refuse_types("part()")
        kept = self.partitions.self_reliant(name)
        number = check_integer("i, the number of a part,", i)
        if not 0 <= number < kept.n_parts:
            raise IndexError(f"part {number} is not in [0, {kept.n_parts}), the parts {kept.name!r}")
        return number, kept

    def train_nodes_of(self, number: int, kept: KeptParts, parts: SelfReliantParts | None = None) -> npt.NDArray[np.int64]:
        """Read the training nodes of a part; ValueError if it has none, or cannot be taken alone."""
        parts = kept.self_reliant() if parts is None else parts
        train = parts.part(number).numpy()
        if not len(train):
            raise ValueError(f"part {number} of {kept.name!r} has no training nodes: make fewer parts")
        if parts.hops > MOST_HOPS:
            raise ValueError(f"parts {kept.name!r} have hops={parts.hops}; those of at most {MOST_HOPS} hops can be taken alone")
        return train

    def check_room_for_part(self, holder: str, kept: KeptParts, n_bytes: int) -> None:
        """Raise BudgetError unless ``n_bytes`` fit beside the adjacency and the training nodes; ``needed`` is enough for all."""
        n_bytes += 8 * (kept.n_train + 2 * kept.n_parts + 1)
        try:
            self.budget.reserve(holder, self.adjacency.bytes_to_come() + n_bytes).release()
        except BudgetError as error:
            others, needed = self.budget.used - self.reader.held_bytes + n_bytes, error.needed or 0
            # What the reader and the adjacency hold grows with the budget.
            while (more := others + self.reader.least_bytes(needed) + self.adjacency.bytes_to_come(needed)) > needed:
                needed = more
            raise BudgetError(error.reason, needed) from None

    def reach_part(self, number: int, kept: KeptParts, progress: bool) -> View:
        """Find the nodes of a part, and their degrees in it."""
        self.check_room_for_part(HOLDER, kept, reach_bytes(self.num_nodes, self.num_edges, counts=True))
        parts = kept.self_reliant()
        train = self.train_nodes_of(number, kept, parts)
        n_nodes = int(parts.n_nodes[number])
        with self.or_closed(), Progress("part", self.num_edges, progress, unit=" edges", delay_s=SHOWN_AFTER_S) as bar:
            hop_of, out_degree = reach(self.topology, train, parts.hops, self.budget, bar.add, counts=True)
            bar.reach(self.num_edges)
        part = Part(kept.name, number, parts.hops, hop_of)
        if part.n_nodes != n_nodes:
            raise CorruptionError(f"{part} has {part.n_nodes} nodes, and {n_nodes} by what is kept: partition again", self.path)
        assert out_degree is not None
        return View(self, part, out_degree)

    # -- life --------------------------------------------------------------------------------------------------------------------

    def _close_files(self) -> None:
        with contextlib.ExitStack() as stack:  # runs all calls, from the last one up, even if one fails
            if self._whole is None:
                stack.callback(self.snapshot.close)
            stack.callback(self.adjacency.close)
            stack.callback(self.neighbor_lists.drop)

    def __reduce__(self) -> tuple[Callable[..., OutOfCoreGraph], tuple[Any, ...]]:
        self.check_open()
        if self._whole is not None:
            return _reopened_part, (self._whole, *self.place_of_view())
        return OutOfCoreGraph, (self.path, self.options)


def _reopened_part(g: OutOfCoreGraph, *place: Any) -> OutOfCoreGraph:
    """Unpickle a view."""
    return g.part_again(*place)
