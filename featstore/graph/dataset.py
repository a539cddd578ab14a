"""OutOfCoreGraph: a dataset, opened."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from featstore.config import Options, user_path
from featstore.errors import ClosedError, FormatError
from featstore.gather.buffers import empty_tensor
from featstore.graph import build
from featstore.graph.opened import Fields
from featstore.graph.progress import Progress
from featstore.graph.reopen import reduced
from featstore.graph.snapshot import Snapshot, check_memory, fingerprint_of, open_files, opening_committed, topology_bytes
from featstore.graph.source import ArrayLike, torch_dtype
from featstore.graph.storededges import StoredEdges
from featstore.graph.verify import verify_files, verify_topology
from featstore.registry import adapter
from featstore.storage.catalog import EDGE, FieldRecord

__all__ = ["OutOfCoreGraph"]

# What users are shown; the rest is for loaders, samplers and the command line.
_PUBLIC = (
    *("aggregate", "budget", "cache", "cache_neighbors", "close", "closed", "create", "edge_features", "edges", "features"),
    *("from_edge_index", "from_pyg", "in_degree", "indptr", "memory_report", "neighbor_cache", "neighbors", "node_data"),
    *("num_edges", "num_nodes", "open", "options", "out_degree", "parts", "path", "pool", "reader", "topology", "verify"),
)


class OutOfCoreGraph(StoredEdges):
    """A graph whose features and adjacency lie on disk, used within a budget of memory.

    Made by :meth:`open` (which is ``featstore.open``), :meth:`create`, :meth:`from_edge_index` and :meth:`from_pyg`; a context
    manager.

    Attributes
    ----------
    path : str
    num_nodes, num_edges : int
    indptr, in_degree, out_degree : Tensor
        Read from disk whenever they are asked for; :meth:`neighbors` and :meth:`edges` read neighbour ids.
    features : mapping of str to FeatureStore
        Indexed like tensors, read from disk.
    edge_features : mapping of str to FeatureStore
        The same of edges: row ``i`` is that of the ``i``-th edge, as the edges were given.
    node_data : mapping of str to Tensor
        Labels, masks, index sets: read whole, checked and counted in the budget when first asked for. The tensor is the graph's
        own: copy it before you write to it.
    topology : Topology
        The adjacency; its offsets, or the directory of its chunks, are read when first asked for.
    neighbor_cache : NeighborCache or None
        See :meth:`cache_neighbors`.
    options : Options
    budget : Budget
    pool : BufferPool
    reader : Reader

    Notes
    -----
    Thread-safe. A gather beside :meth:`cache` or :meth:`close` delivers its rows or raises ClosedError; :meth:`cache_neighbors`
    must not run beside a sampler. Fork-safe: queues and rings are made anew in the child. Pickles as path and options: caches do
    not travel, and unpickling opens the dataset again. What is open is one commit: a dataset that is replaced goes on as it was
    until it is opened again.
    """

    def __init__(self, path: str | os.PathLike[str], options: Options) -> None:
        path = os.path.abspath(user_path(path))
        with open_files(path) as opened:  # before a thread or a ring is made for it
            check_memory(path, opened.catalog.files.values(), options)
            super().__init__(path, options)
            try:
                self._snapshot = Snapshot(self.path, opened, self.reader)
                try:
                    self._open_fields()
                except BaseException:
                    with contextlib.suppress(OSError):
                        self._snapshot.close()
                    raise
            except BaseException:
                self.pool.close()
                self.reader.close()
                raise

    def _open_fields(self) -> None:
        catalog = self._snapshot.catalog
        self.num_nodes = catalog.num_nodes
        self.num_edges = catalog.num_edges
        for name, record in catalog.by_role("feature").items():
            if record.n_rows != self.num_nodes:
                raise FormatError(f"{self.path}: feature {name!r} has {record.n_rows} rows for {self.num_nodes} nodes", self.path)
            self._open_feature_file(name, record)
        self._list_features()
        for name, record in catalog.by_role("feature", EDGE).items():
            if record.n_rows != self.num_edges:
                raise FormatError(f"{self.path}: {name!r} has {record.n_rows} rows for {self.num_edges} edges", self.path)
            file, reopen = self._snapshot.file_of(record), partial(reduced, self, name, "edge_features")
            self._open_store(name, file, record.shape, torch_dtype(record.dtype), reopen, of_edges=True)
        self.edge_features = Fields.of("edge feature", self._edge_stores)
        data = catalog.by_role("data")
        self.node_data = Fields("node data", list(data), self._load_data, lambda name: (data[name].dtype, data[name].shape))

    def _list_features(self) -> None:
        self.features = Fields.of("feature", self._stores)

    def _open_feature(self, name: str) -> None:
        self._open_feature_file(name, self._snapshot.catalog.by_role("feature")[name])
        self._list_features()

    def _open_feature_file(self, name: str, record: FieldRecord) -> None:
        file, reopen = self._snapshot.file_of(record), partial(reduced, self, name)
        self._open_store(name, file, record.shape, torch_dtype(record.dtype), reopen)

    # -- making ------------------------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        indptr: ArrayLike,
        indices: ArrayLike,
        features: Mapping[str, ArrayLike] | None = None,
        node_data: Mapping[str, ArrayLike] | None = None,
        *,
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
        features : mapping of str to array, shape (num_nodes, …), optional
        node_data : mapping of str to array, shape (any, …), optional
            Labels, masks, index sets.
        edge_features : mapping of str to array, shape (num_edges, …), optional
            Row ``i`` is that of the edge ``indices[i]``, or of column ``i`` of ``edge_index``. They are stored in this order.
        coalesce, remove_self_loops, to_undirected : bool
            Clean the edges, see :meth:`from_edge_index`; they are sorted as there.
        topology : {"csc", "chunked"}
            How the adjacency is stored. ``"csc"``: its offsets, 8 bytes a node, are in memory while it is sampled.
            ``"chunked"``: in chunks that hold offsets and neighbour ids, of which no more than a directory and a cache of pages
            is in memory. Samples are the same. :func:`featstore.convert` makes one of the other.
        chunk_bytes : int or str, optional
            Size of a chunk: a multiple of 4 KiB, at most 1 GiB; 1 MiB by default. For ``topology="chunked"``.
        stripes : sequence of path-like
            Directories on other drives, for ``topology="chunked"``: the dataset's own directory and each of these take an equal
            share of the chunks. One that is named twice takes two.
        overwrite : bool
            Replace a dataset at ``path`` in one step, when the new one is complete. If creation fails, the old one stays. Open
            handles of the old one go on reading it.
        progress : bool
            Show a progress bar, on a terminal and in a notebook.
        memory : int or str, optional
            Most memory to hold, besides inputs that are in memory: bytes, or text such as ``"1GiB"``; at least 8 MiB, and a
            chunk. By default a quarter of what is available, 1 GiB at most. It is also the budget of the returned graph.

        Returns
        -------
        OutOfCoreGraph

        Raises
        ------
        TypeError
            A dtype that is not stored, or ids and offsets that are no integers; names the argument.
        ValueError
            An input of the wrong shape or name. ``indptr`` does not ascend from 0 to ``num_edges``; names the first entry that is
            wrong, and its value.
        IndexError
            An entry of ``indices`` is no node; names the first one, and its value.
        FormatError, CorruptionError
            A file that is no ``.npy`` file; one that is cut short.
        FileExistsError
            Something is at ``path`` already (an empty directory is taken over).
        FileNotFoundError, NotADirectoryError
            The parent of ``path`` or a stripe's directory is not there.
        BusyError
            Another process is making or changing the dataset.
        BudgetError
            ``memory`` is too little.
        CommittedError
            The new dataset is complete and in place, but a later step failed: opening it, or making its name durable. The error
            has ``errno`` and ``filename`` of that step; :func:`featstore.open` opens the dataset.
        OSError
            The disk is full or failed. Nothing is left, and what was at ``path`` is as it was.

        Notes
        -----
        Every array may be a NumPy array or memmap, a torch tensor, a list, the path of a ``.npy`` file (versions 1 to 3, C or
        Fortran order), or ``(shape, dtype, iterable of row blocks)``. Dtypes: bool, uint8, int8 to int64, float16, bfloat16,
        float32, float64; ids also unsigned. Each neighbour list is stored sorted ascending, so that a graph has one form; where
        that moves an edge, 4 bytes an edge (8 from 2³¹ on) keep the order in which edges were given. Inputs are streamed once;
        ``indptr``, unless it comes in blocks, is read before, to be checked. When this returns, the dataset is durable.

        Examples
        --------
        >>> g = OutOfCoreGraph.create("graph", [0, 2, 3, 3], [1, 2, 0], {"x": np.eye(3, dtype=np.float32)})
        >>> g.features["x"][[2, 0]]
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
        """
        build.create(
            path,
            indptr,
            indices,
            features,
            node_data,
            edge_features=edge_features,
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
        return cls._open_made(path, memory)

    @classmethod
    def from_edge_index(
        cls,
        path: str | os.PathLike[str],
        edge_index: Any,
        num_nodes: int,
        features: Mapping[str, ArrayLike] | None = None,
        node_data: Mapping[str, ArrayLike] | None = None,
        *,
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
        """Write a dataset from edges in any order, by an external sort, and open it.

        Parameters
        ----------
        edge_index : integer array, shape (2, num_edges), or iterable of such blocks
            Row 0 holds sources, row 1 destinations, as in PyG. An array, memmap, tensor, ``.npy`` path, two lists or arrays; or
            an iterable of blocks ``[2, k]``, consumed once. A list of pairs is ``np.array(pairs).T``. Samplers number edges in
            this order (``edges=True``).
        num_nodes : int
        coalesce : bool
            Remove duplicates, as PyG's ``coalesce`` and DGL's ``to_simple`` do; otherwise repeated edges stay. Edges are then
            numbered as :meth:`edges` yields them. Goes with neither ``edge_features`` nor ``stripes``.
        remove_self_loops : bool
            Remove edges from a node to itself; those that stay are numbered in their order. Not with ``edge_features``.
        to_undirected : bool
            Add the reverse of each edge, as PyG's ``to_undirected`` and DGL's ``to_bidirected`` do: duplicates are removed, and
            what is said of ``coalesce`` holds.
        memory : int or str, optional
            As for :meth:`create`: edges beyond it are sorted through temporary files beside the dataset, 12 bytes an edge (16 of
            an iterator; 8 more from 2³¹ nodes on), twice that at worst.
        path, features, node_data, edge_features, topology, chunk_bytes, stripes, overwrite, progress
            See :meth:`create`.

        Raises
        ------
        IndexError
            An id is not in ``[0, num_nodes)``; names it and its position.
        FileExistsError, BusyError, TypeError, ValueError, FormatError, CorruptionError, BudgetError, CommittedError, OSError
            See :meth:`create`.

        Notes
        -----
        Even a single destination with more in-neighbours than memory holds is sorted. Each pair is written once and read once,
        once more for every level at which its bucket had to be split.
        """
        build.from_edge_index(
            path,
            edge_index,
            num_nodes,
            features,
            node_data,
            edge_features=edge_features,
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
        return cls._open_made(path, memory)

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
        data : torch_geometric.data.Data, or dataset of one
        features : str or sequence of str, optional
            Attributes that become features; ``x`` by default. All others become node data.
        path, overwrite, progress, memory
            See :meth:`create`.

        Raises
        ------
        MissingExtraError
            torch_geometric is not installed.
        TypeError, ValueError, IndexError
            ``data`` is nothing that can be stored: heterogeneous, temporal, attributes of edges in an ``adj_t``, and the like.
        FileExistsError, BusyError, FormatError, BudgetError, CommittedError, OSError
            See :meth:`create`.
        """
        made: OutOfCoreGraph = adapter("pyg").create(path, data, features, overwrite=overwrite, progress=progress, memory=memory)
        return made

    @classmethod
    def _open_made(cls, path: str | os.PathLike[str], memory: int | str | None) -> OutOfCoreGraph:
        """Open a dataset that was just made; an error says that it need not be made again."""
        where = os.path.abspath(user_path(path))
        with opening_committed(f"the dataset at {where} is complete and in place, but opening it failed", where):
            return cls.open(path, memory=memory)

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
            The budget: bytes, text such as ``"4GiB"``, or a share of the machine's memory (``"5%"``); by default half of what is
            available, divided by the processes that train together on this machine, as ``LOCAL_WORLD_SIZE`` says.
        backend : {"auto", "buffered", "io_uring", "pread"}
            How files are read. ``"io_uring"`` and ``"pread"`` are demands: OSError if they are refused. ``"buffered"`` is as
            ``"auto"``, but through the page cache. ``FEATSTORE_BACKEND`` replaces ``"auto"``.
        verify : {"always", "open", "off"}, optional
            Check the checksum of every page that is read, of all pages now, or of none. ``"always"``, or ``FEATSTORE_VERIFY``.
        threads : int, optional
            Threads that copy rows; the number of processors, or ``FEATSTORE_THREADS``.
        progress : bool
            Show a progress bar, on a terminal and in a notebook, where the offsets of a large graph are read or a large cache
            is filled.

        Returns
        -------
        OutOfCoreGraph

        Raises
        ------
        FileNotFoundError, PermissionError
            No dataset there, or none that may be read.
        CorruptionError
            The catalog is damaged; a file is longer or shorter than the catalog says, has a damaged header, or is another's.
        FormatError
            Not a dataset, or one with a link, directory, FIFO or device for a file, or with a file outside.
        VersionError
            It needs a newer release or another byte order.
        BudgetError
            The budget does not suffice to read anything; ``needed`` is the least that does.
        OSError
            The kernel refuses the named backend; too many files are open.

        Notes
        -----
        Reads the catalog, and of each file one page and (unless ``verify="off"``) its table of checksums, 0.2 % of its size.
        """
        g = cls(path, Options.resolve(memory, backend, verify, threads))
        g._shows = progress
        return g

    # -- reading -----------------------------------------------------------------------------------------------------------------

    def __dir__(self) -> list[str]:
        return sorted({*_PUBLIC, *(name for name in object.__dir__(self) if name.startswith("__"))})

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"OutOfCoreGraph({self.path!r}, num_nodes={self.num_nodes}, num_edges={self.num_edges}{state})"

    def _data_bytes(self, name: str) -> int:
        record = self._snapshot.catalog.by_role("data")[name]
        return record.n_rows * record.row_bytes

    def data_shape(self, name: str) -> torch.Size:
        """Return the shape of ``node_data[name]``, which is not read for it; KeyError where there is none."""
        if name not in self.node_data:
            return torch.Size(self.node_data[name].shape)  # raises the error that lists what there is
        return torch.Size(self._snapshot.catalog.by_role("data")[name].shape)

    def _read_data(self, name: str) -> torch.Tensor:
        record = self._snapshot.catalog.by_role("data")[name]
        tensor = empty_tensor(record.shape, torch_dtype(record.dtype))
        if len(tensor):
            rows = tensor.reshape(len(tensor), -1).view(torch.uint8).numpy()
            self._snapshot.file_of(record).read(0, len(rows), rows)
        return tensor

    def fingerprint(self) -> dict[str, str]:
        """Return the id of the file that holds each field, by key: what was made from a field is stale once it differs.

        Of the adjacency it is the id of the file that first held it: :func:`featstore.convert` leaves it as it is.
        """
        return fingerprint_of(self._snapshot.catalog)

    # -- looking after it --------------------------------------------------------------------------------------------------------

    def verify(self, progress: bool = True) -> dict[str, int]:
        """Check the whole dataset as it is on disk now: catalog, every page of every file, and the adjacency's structure.

        Parameters
        ----------
        progress : bool
            Show a progress bar, on a terminal and in a notebook.

        Returns
        -------
        dict
            ``files``, ``pages`` and ``bytes`` that were checked.

        Raises
        ------
        CorruptionError
            What is damaged, with path and offset.
        FormatError, VersionError, OSError
            As for :meth:`open`.

        Notes
        -----
        Reads every file once and the neighbour ids twice, whatever ``verify`` the dataset was opened with, in about 20 MB.
        """
        with self.locked():
            opened = open_files(self.path)
        with opened:
            catalog = opened.catalog
            total = sum(record.n_bytes for record in catalog.files.values())
            with Progress("verify", total + topology_bytes(catalog), progress) as bar:
                n_pages = verify_files(opened, bar.add)
                verify_topology(opened, bar.add)
        return {"files": len(catalog.files), "pages": n_pages, "bytes": total}

    # -- life --------------------------------------------------------------------------------------------------------------------

    def _close_files(self) -> None:
        try:
            super()._close_files()
        finally:
            self._snapshot.close()

    def __reduce__(self) -> tuple[Callable[..., OutOfCoreGraph], tuple[Any, ...]]:
        if self._closed:
            raise ClosedError(f"{self.path} is closed")
        return OutOfCoreGraph, (self.path, self.options)
