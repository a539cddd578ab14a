"""OutOfCoreGraph: a dataset, opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import torch

from featstore.cache.base import Policy
from featstore.config import Options, user_path
from featstore.creation import build
from featstore.creation.source import ArrayLike
from featstore.errors import ClosedError
from featstore.graph.aggregate import aggregate, default_name
from featstore.graph.feature import FeatureStore
from featstore.graph.neighborlists import NEIGHBOR_POLICY
from featstore.graph.opendataset import OpenDataset
from featstore.graph.policyinputs import Given
from featstore.graph.rowcaches import GivenParts
from featstore.graph.savedparts import KeptParts
from featstore.graph.snapshot import open_files, opening_committed, topology_bytes
from featstore.graph.verify import verify_files, verify_topology
from featstore.progress import Progress
from featstore.registry import adapter

__all__ = ["OutOfCoreGraph"]

# What users are shown; the rest is for loaders, samplers and the command line.
_PUBLIC = (
    *("aggregate", "budget", "cache", "cache_neighbors", "close", "closed", "create", "edge_features", "edges", "features"),
    *("from_edge_index", "from_pyg", "in_degree", "indptr", "memory_report", "neighbor_cache", "neighbors", "node_data"),
    *("num_edges", "num_nodes", "open", "options", "out_degree", "parts", "path", "pool", "reader", "topology", "verify"),
)


class OutOfCoreGraph(OpenDataset):
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
        g.shows_progress = progress
        return g

    # -- reading -----------------------------------------------------------------------------------------------------------------

    def __dir__(self) -> list[str]:
        return sorted({*_PUBLIC, *(name for name in object.__dir__(self) if name.startswith("__"))})

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"OutOfCoreGraph({self.path!r}, num_nodes={self.num_nodes}, num_edges={self.num_edges}{state})"

    @property
    def indptr(self) -> torch.Tensor:
        """Where the in-neighbours of each node begin, int64 ``[num_nodes + 1]``, as given to :meth:`create`.

        Read anew whenever it is asked for, as are :attr:`in_degree` and :attr:`out_degree`: keep the tensor, which is yours. The
        budget counts its 8 bytes a node while it lives. Raises BudgetError, ClosedError, CorruptionError and OSError.
        """
        return self.adjacency.indptr()

    @property
    def in_degree(self) -> torch.Tensor:
        """In-neighbours of each node, repeated ones counted: int64 ``[num_nodes]``; see :attr:`indptr`."""
        return self.adjacency.in_degree()

    @property
    def out_degree(self) -> torch.Tensor:
        """Out-neighbours of each node, repeated ones counted: int64 ``[num_nodes]``; see :attr:`indptr`."""
        return self.adjacency.out_degree()

    @overload
    def neighbors(self, node: int, edge_pos: Literal[False] = False) -> torch.Tensor: ...
    @overload
    def neighbors(self, node: int, edge_pos: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...

    def neighbors(self, node: int, edge_pos: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return all in-neighbours of one node.

        Parameters
        ----------
        node : int
            In ``[0, num_nodes)``.
        edge_pos : bool
            Return also which edge of the input each is, as ``edge_pos`` of sampled blocks does.

        Returns
        -------
        neighbors : int64 tensor, shape (in-degree,)
            Ascending; a neighbour by several edges occurs as often.
        edge_pos : int64 tensor, shape (in-degree,)
            If asked for.

        Raises
        ------
        IndexError
            No such node.
        TypeError
            Not an integer. For many nodes: ``NeighborSampler(g, [-1])``.
        BudgetError, ClosedError, CorruptionError, OSError

        Notes
        -----
        Reads the pages that hold the list. The first call opens :attr:`topology`, as samplers do.
        """
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
            Yield also which edge of the input each is: its row in :attr:`edge_features`.

        Yields
        ------
        edge_index : int64 tensor, shape (2, k)
            Sources and destinations, as :meth:`from_edge_index` takes them; ``k`` is at least 1. Ascending by
            destination, then by source. Each block is yours, and counts in the budget while it lives.
        edge_pos : int64 tensor, shape (k,)
            If asked for; then a pair is yielded.

        Raises
        ------
        BudgetError, ClosedError, CorruptionError, OSError

        Notes
        -----
        A block has at most half a million edges, fewer where little memory is left; what is read ahead counts as ``edges``. Opens
        :attr:`topology`, as samplers do.
        """
        return self.adjacency.edges(edge_pos)

    # -- memory ------------------------------------------------------------------------------------------------------------------

    def cache(
        self,
        name: str | None = None,
        budget: int | float | str = "auto",
        policy: str | Policy | type[Policy] = "degree",
        *,
        counts: Given = None,
        parts: GivenParts = None,
        seed: int = 0,
    ) -> None:
        """Keep rows of a feature in memory; replaces an earlier cache of it.

        Parameters
        ----------
        name : str, optional
            The feature; by default all features of nodes, each with as many rows.
        budget : int, float or str
            Memory of the cache within the graph's budget, its row map of 4 bytes a node included: bytes, or text such as
            ``"1GiB"``. A share (``"10%"`` or ``0.1``) means the bytes that this share of the rows takes. Never more than all rows
            take; 0: no cache. By default ``"auto"``: seven eighths of what the budget has left, and rows are given back where
            others need the memory.
        policy : str, Policy or class
            A registered name (``featstore.available_policies()``), an instance for this cache alone, or a class.
        counts : integer array, shape (num_nodes,), or callable that returns it, optional
            Accesses of each row in a profiled run, for ``policy="frequency"``; called if the policy asks.
        parts : integer array, shape (num_nodes,), callable that returns it, str or KeptParts, optional
            The partition of each node, for policies that ask for it; or parts that the dataset keeps, by their name.
        seed : int
            Of randomised policies.

        Raises
        ------
        BudgetError
            The graph's budget has less left, or ``budget`` is too small for one row. The message names the least that works.
        BusyError
            The feature's cache follows the plans of a loader that is in the middle of an epoch.
        PluginError
            The policy failed.
        KeyError, ValueError, TypeError
            No such feature; no such policy, or an array of the wrong shape; a number of bytes below 4,096 without a unit.
        CorruptionError, OSError
            Filling a static cache failed.

        Notes
        -----
        A static policy's rows are read now, in one ascending pass; where that takes longer than two seconds a bar shows how far
        it is (:meth:`open`: ``progress``). On an error the feature has no cache.
        """
        self.row_caches.cache(name, budget, policy, counts=counts, parts=parts, seed=seed)

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
    ) -> None:
        """Keep neighbour lists in memory, for samplers; replaces an earlier cache of them.

        Parameters
        ----------
        budget : int, float or str, optional
            Memory of the cache within the graph's budget: bytes or text, or a share of the whole budget (``"10%"`` or ``0.1``).
            By default all that is left; 0: no cache. If the whole adjacency fits, sampling reads nothing from disk.
        policy : str, Policy or class
            A static policy, which scores the nodes whose lists stay. ``"cross_partition"`` keeps those that batches of other
            parts ask for; ``"saved_io"`` those with most edges drawn, by ``counts``, for their bytes.
        counts : integer array, shape (num_nodes,), or callable, optional
            Edges that an epoch draws from each node's list, or what returns them once the policy asks;
            :func:`featstore.estimate.savedio.edges_drawn` counts them.
        parts, seed
            As for :meth:`cache`. For ``"cross_partition"`` ``parts`` are those that were kept last by default.
        edges : bool
            Also keep the numbers of the lists' edges, for samplers with ``edges=True``: 4 bytes an edge (8 from 2³¹ edges on), of
            the same ``budget``, so fewer lists may fit. Only datasets whose lists were sorted by ``create`` store such numbers;
            for others this changes nothing.
        save : bool
            Also store the cache in the dataset, unless it holds the whole adjacency. A later call with the same budget, policy,
            seed and ``edges`` (and no ``counts``, no ``parts`` but kept ones) loads it instead of making it anew.
        progress : bool
            Show a progress bar, on a terminal and in a notebook.

        Raises
        ------
        BudgetError
            Not even the cache's table of 8 bytes a node fits. The message names the least that works.
        ValueError, PluginError, CorruptionError, OSError
            No such or no static policy, or nothing to recognise a saved cache by; the policy needs parts, and none are kept; the
            policy failed; a list holds what is no node, or a number is no edge's; reading or saving failed.
        StaleError
            The parts were made for another adjacency than the dataset has now.
        BusyError
            It cannot be saved: somebody is writing the dataset, or has replaced it. The cache is in use all the same.
        CommittedError
            It is saved, but making that durable failed: a power cut may undo it. The cache is in use all the same.

        Notes
        -----
        Reads the adjacency once, sequentially, and with ``edges`` the numbers of all edges. On an error there is no cache, unless
        only saving failed.
        """
        self.neighbor_lists.choose(
            budget, policy, counts=counts, parts=parts, seed=seed, edges=edges, save=save, progress=progress
        )

    # -- what is made of it ------------------------------------------------------------------------------------------------------

    def aggregate(
        self,
        feature: str,
        op: str = "mean",
        *,
        hops: int = 1,
        name: str | None = None,
        dtype: torch.dtype | str | None = None,
        overwrite: bool = False,
        memory: int | str | None = None,
        progress: bool = True,
    ) -> FeatureStore:
        """Make a feature of each node's in-neighbours' rows, out of core, and add it to the dataset.

        Training on it saves a hop of sampling and gathering: PaGraph's preprocessing.

        Parameters
        ----------
        feature : str
            Of any dtype and row shape.
        op : {"mean", "sum", "gcn"}
            Over the list of in-neighbours N(v), in which a repeated edge counts each time. ``"sum"``: Σ x_u. ``"mean"``: Σ x_u
            divided by the length of the list, 0 where it is empty. ``"gcn"``: s_v · Σ s_u x_u over N(v) and v itself, where s_v =
            1/√(d_v + 1); v counts exactly once, whatever edges lead from v to v, and d_v are the in-edges from other nodes.
            Where edges have a direction, s_u and s_v are both made of in-degrees, as in PyG's ``gcn_norm``.
        hops : int
            Aggregate so often, each time what came of it before. Between hops there are float64 fields.
        name : str, optional
            Of the new feature; by default ``x_mean``, and ``x_mean2`` for two hops.
        dtype : torch.dtype or str, optional
            Of the new feature, a floating-point one: by default the feature's own, float64 for integers and bools.
        overwrite : bool
            Replace a feature of that name. Stores of it that were handed out go on reading the old one, whose file is removed
            when the graph is closed.
        memory : int or str, optional
            Most bytes to hold, within the graph's budget; by default nearly all that it has left.
        progress : bool
            Show a progress bar, with the time left, on a terminal and in a notebook.

        Returns
        -------
        FeatureStore
            ``g.features[name]``, ready to be used; other handles have it when they are opened again.

        Raises
        ------
        KeyError, ValueError, TypeError
            No such feature; no such op, a name that is taken or none, no floating-point dtype.
        BudgetError
            Too little memory for the sums of one node; names what does.
        BusyError
            Somebody else is writing the dataset, or has changed it since it was opened; or a loader uses the feature that is to
            be replaced.
        CommittedError
            The feature is in the dataset, but making that durable, or opening it, failed.
        CorruptionError, OSError
            Reading or writing failed. The dataset is as it was, and nothing is left.

        Notes
        -----
        Sums are made in float64, in ascending order of the neighbours, and rounded once, to ``dtype``: bit for bit what SciPy's
        product ``csr_array((ones, indices, indptr)) @ x`` has in float64. int64 beyond 2⁵³ is rounded first.

        Blocks of nodes whose sums fit the memory, 8 bytes a number, take turns; each reads the feature once, in sequence. The
        graph's threads add; how many they are changes no bit.

        All is added in one commit. After a kill or Ctrl-C, the same call goes on where the last one was, but for the last
        seconds. The dataset's writer lock is held meanwhile. Needs disk for the new feature, and between hops for two float64
        fields.

        Examples
        --------
        >>> g.aggregate("x", op="mean", name="x_mean")
        FeatureStore('x_mean', shape=(1000, 16), dtype=torch.float32, backend='io_uring')

        References
        ----------
        Bai et al.: PaGraph. IEEE TPDS 2021, section 5.1 (PP). Kipf, Welling: Semi-Supervised Classification with Graph
        Convolutional Networks. ICLR 2017, equation 2 (gcn).
        """
        self.check_open()
        with self.or_closed():
            aggregate(self, feature, op, hops, name, dtype, overwrite, memory, progress)
        return self.features[default_name(feature, op, hops) if name is None else name]

    def parts(self) -> dict[str, KeptParts]:
        """Return the partitions that the dataset keeps, by name, the latest last; :func:`featstore.partition` makes them.

        Those that others have kept since this dataset was opened are not among them.
        """
        return self.partitions.by_name()

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

    def __reduce__(self) -> tuple[Callable[..., OutOfCoreGraph], tuple[Any, ...]]:
        if self._closed:
            raise ClosedError(f"{self.path} is closed")
        return OutOfCoreGraph, (self.path, self.options)
