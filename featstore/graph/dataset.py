"""The public class of an open dataset, OutOfCoreGraph: how it is made and opened, and of which methods it consists."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from featstore.config import Options, check_flag, no_attribute
from featstore.creation import build
from featstore.creation.options import CreateOptions
from featstore.creation.source import ArrayLike
from featstore.creation.typed import Nodes, create_typed, nodes_and_edges, refuse_one_type
from featstore.errors import StaleError
from featstore.graph import reading
from featstore.graph import verify as verification
from featstore.graph.changing import ChangingDataset
from featstore.graph.derive import aggregate as aggregation
from featstore.graph.savedparts import KeptParts
from featstore.graph.snapshot import opening_committed
from featstore.registry import adapter
from featstore.topology.types import EdgeKey

__all__ = ["OutOfCoreGraph"]

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


class OutOfCoreGraph(ChangingDataset):
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

    # -- methods that are written elsewhere, by what they do ---------------------------------------------------------------------

    neighbors = reading.neighbors
    edges = reading.edges
    ids = reading.ids
    cache = reading.cache
    cache_neighbors = reading.cache_neighbors
    aggregate = aggregation.aggregate
    verify = verification.verify

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
        >>> parts = featstore.partition(g, 4, "ldg", train_idx, hops=2)           # doctest: +SKIP
        >>> view = g.part(0)                                                      # doctest: +SKIP
        >>> loader = featstore.Loader(view, featstore.NeighborSampler(view, [10, 5]), view.own_part.train_nodes)  # doctest: +SKIP
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

    # -- life --------------------------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Callable[..., OutOfCoreGraph], tuple[Any, ...]]:
        self.check_open()
        if self._whole is not None:
            return _reopened_part, (self._whole, *self.place_of_view())
        return OutOfCoreGraph, (self.path, self.options)


def _reopened_part(g: OutOfCoreGraph, *place: Any) -> OutOfCoreGraph:
    """Unpickle a view."""
    return g.part_again(*place)
