"""OutOfCoreGraph: a dataset, opened."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.cache.base import Policy, StaticPolicy, get_policy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.table import FeatureCache
from featstore.config import Budget, Options, parse_size
from featstore.errors import ClosedError, FormatError
from featstore.graph import build
from featstore.graph.feature import FeatureStore
from featstore.graph.fields import Fields
from featstore.graph.opened import Opened
from featstore.graph.policyinputs import Given, PolicyInputs
from featstore.graph.progress import Progress
from featstore.graph.savedcache import load_neighbor_cache, save_neighbor_cache
from featstore.graph.snapshot import open_snapshot
from featstore.graph.source import ArrayLike, torch_dtype
from featstore.graph.topology import NeighborCache, Topology, huge_bytes
from featstore.graph.verify import verify_files, verify_topology
from featstore.storage.builddir import restore_moved
from featstore.storage.catalog import EDGE, Catalog, read_catalog

__all__ = ["OutOfCoreGraph"]


class OutOfCoreGraph(Opened):
    """A graph whose features and adjacency lie on disk, used within a budget of memory.

    Made by :meth:`open` (which is ``featstore.open``), :meth:`create` and :meth:`from_edge_index`; a context manager.

    Attributes
    ----------
    path : str
    num_nodes, num_edges : int
    features : mapping of str to FeatureStore
        Indexed like tensors, read from disk.
    node_data : mapping of str to Tensor
        Labels, masks, index sets: read whole, checked and counted in the budget when first asked for. The tensor is the graph's
        own: copy it before you write to it.
    topology : Topology
        The adjacency; its offsets are read when first asked for.
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
        path = os.path.abspath(os.fspath(path))
        # Before a thread or a ring is made for it.
        if not os.path.lexists(path):
            restore_moved(path)
        os.stat(path)
        super().__init__(path, options)
        self.neighbor_cache: NeighborCache | None = None
        self._topology: Topology | None = None
        try:
            self._snapshot = open_snapshot(self.path, self.reader)
            try:
                self._open_fields()
            except BaseException:
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
                raise FormatError(f"{self.path}: feature {name!r} has {record.n_rows} rows for {self.num_nodes} nodes")
            self._open_store(name, self._snapshot.file_of(record), record.shape, torch_dtype(record.dtype), _Reopen(self, name))
        self.features = Fields("feature", list(self._stores), self._stores.__getitem__)
        self.node_data = Fields("node data", list(catalog.by_role("data")), self._load_data)

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
        topology: str = "csc",
        overwrite: bool = False,
        progress: bool = True,
        memory: int | str | None = None,
    ) -> OutOfCoreGraph:
        """Write a dataset and open it.

        Parameters
        ----------
        path : path-like
            Where the dataset shall be; its parent exists.
        indptr : integer array, shape (num_nodes + 1,)
        indices : integer array, shape (num_edges,)
            The in-neighbours of node ``v`` are ``indices[indptr[v]:indptr[v + 1]]``, in any order.
        features : mapping of str to array, shape (num_nodes, …), optional
        node_data : mapping of str to array, shape (any, …), optional
            Labels, masks, index sets.
        topology : {"csc"}
        overwrite : bool
            Replace a dataset that is there, at once when the new one is whole: if it fails, the old one stays. Whoever has the
            old one open goes on reading it.
        progress : bool
            Show a progress bar where stderr is a terminal.
        memory : int or str, optional
            Bounds what making it holds, inputs in memory excepted: bytes or text such as ``"1GiB"``; by default a quarter of what
            is available, 1 GiB at most. At least 8 MiB. Also the budget of the graph returned.

        Returns
        -------
        OutOfCoreGraph

        Raises
        ------
        CorruptionError
            ``indptr`` does not ascend from 0 to ``num_edges``, an id is no node, or a ``.npy`` file is cut short.
        FileExistsError
            Something is at ``path`` already (an empty directory is taken over).
        BusyError
            Another process is making or changing the dataset.
        TypeError, ValueError, FormatError
            An input of the wrong dtype, shape or name; a file that is no ``.npy`` file.
        BudgetError
            ``memory`` is too little.
        OSError
            The disk is full or failed. Nothing is left, and what was at ``path`` is as it was.

        Notes
        -----
        Every array may be a NumPy array or memmap, a torch tensor, a list, the path of a ``.npy`` file (versions 1 to 3, C or
        Fortran order), or ``(shape, dtype, iterable of row blocks)``. Dtypes: bool, uint8, int8 to int64, float16, bfloat16,
        float32, float64; ids also unsigned. Each neighbour list is stored sorted ascending, so that a graph has one form. Inputs
        are streamed once. When this returns, the dataset is durable.

        Examples
        --------
        >>> g = OutOfCoreGraph.create("graph", [0, 2, 3, 3], [1, 2, 0], {"x": np.eye(3, dtype=np.float32)})
        >>> g.features["x"][[2, 0]]
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
        """
        build.create(
            path, indptr, indices, features, node_data, topology=topology, overwrite=overwrite, progress=progress, memory=memory
        )
        return cls.open(path, memory=memory)

    @classmethod
    def from_edge_index(
        cls,
        path: str | os.PathLike[str],
        edge_index: Any,
        num_nodes: int,
        features: Mapping[str, ArrayLike] | None = None,
        node_data: Mapping[str, ArrayLike] | None = None,
        *,
        topology: str = "csc",
        overwrite: bool = False,
        progress: bool = True,
        memory: int | str | None = None,
    ) -> OutOfCoreGraph:
        """Write a dataset from edges in any order, by an external sort, and open it.

        Parameters
        ----------
        edge_index : integer array, shape (2, num_edges), or iterable of such blocks
            Row 0 holds sources, row 1 destinations, as in PyG. An array, memmap, tensor, ``.npy`` path or lists; or an iterator
            of blocks ``[2, k]``, consumed once. Repeated edges stay.
        num_nodes : int
        memory : int or str, optional
            As for :meth:`create`: edges beyond it are sorted through temporary files beside the dataset, 8 bytes an edge (16 from
            2³¹ nodes on), twice that at worst.
        path, features, node_data, topology, overwrite, progress
            See :meth:`create`.

        Raises
        ------
        IndexError
            An id is not in ``[0, num_nodes)``; names it and its position.
        FileExistsError, BusyError, TypeError, ValueError, FormatError, CorruptionError, BudgetError, OSError
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
            topology=topology,
            overwrite=overwrite,
            progress=progress,
            memory=memory,
        )
        return cls.open(path, memory=memory)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        memory: int | str | None = None,
        backend: str = "auto",
        verify: str | None = None,
        threads: int | None = None,
    ) -> OutOfCoreGraph:
        """Open a dataset for reading.

        Parameters
        ----------
        path : path-like
        memory : int or str, optional
            The budget: bytes or text such as ``"4GiB"``; half of what is available by default.
        backend : {"auto", "io_uring", "pread"}
            How files are read. One asked for by name is a demand; ``FEATSTORE_BACKEND`` replaces ``"auto"``.
        verify : {"always", "open", "off"}, optional
            Check the checksum of every page that is read, of all pages now, or of none. ``"always"``, or ``FEATSTORE_VERIFY``.
        threads : int, optional
            Threads that copy rows; the number of processors, or ``FEATSTORE_THREADS``.

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
            The budget does not suffice to read anything.
        OSError
            The backend asked for cannot be had; too many open files.

        Notes
        -----
        Reads the catalog, and of each file one page and (unless ``verify="off"``) its table of checksums, 0.2 % of its size.
        """
        return cls(path, Options.resolve(memory, backend, verify, threads))

    # -- reading -----------------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"OutOfCoreGraph({self.path!r}, num_nodes={self.num_nodes}, num_edges={self.num_edges}{state})"

    @property
    def topology(self) -> Topology:
        """The adjacency. The first use reads the offsets, 8 bytes a node, which the budget counts from then on."""
        with self.locked():
            if self._topology is None:
                indptr, _ = self._snapshot.topology_file("indptr", self.num_nodes + 1)
                indices, id_bytes = self._snapshot.topology_file("indices", self.num_edges)
                self._topology = Topology.load(self.num_nodes, self.num_edges, indptr, indices, id_bytes, self.budget)
            return self._topology

    def _data_bytes(self, name: str) -> int:
        record = self._snapshot.catalog.by_role("data")[name]
        return record.n_rows * record.row_bytes

    def _read_data(self, name: str) -> torch.Tensor:
        record = self._snapshot.catalog.by_role("data")[name]
        tensor = torch.empty(record.shape, dtype=torch_dtype(record.dtype))
        if len(tensor):
            rows = tensor.reshape(len(tensor), -1).view(torch.uint8).numpy()
            self._snapshot.file_of(record).read(0, len(rows), rows)
        return tensor

    # -- caches ------------------------------------------------------------------------------------------------------------------

    def cache(
        self,
        name: str,
        budget: int | str,
        policy: str | Policy | type[Policy] = "degree",
        *,
        counts: Given = None,
        parts: Given = None,
        seed: int = 0,
    ) -> None:
        """Keep rows of a feature in memory; replaces an earlier cache of it.

        Parameters
        ----------
        name : str
            The feature.
        budget : int or str
            What the cache may take of the graph's budget, its row map of 4 bytes a node included: bytes or text such as
            ``"1GiB"``. Never more than all rows take; 0: no cache.
        policy : str, Policy or class
            A registered name (``featstore.available_policies()``), an instance for this cache alone, or a class.
        counts : integer array, shape (num_nodes,), or callable that returns it, optional
            Accesses of each row in a profiled run, for ``policy="frequency"``; called if the policy asks.
        parts : integer array, shape (num_nodes,), or callable that returns it, optional
            The partition of each node, for policies that ask for it.
        seed : int
            Of randomised policies.

        Raises
        ------
        BudgetError
            The graph's budget has not that much left, or ``budget`` has no room for a single row; names the least that works.
        BusyError
            The feature's cache follows the plans of a loader that is in the middle of an epoch.
        PluginError
            The policy failed.
        KeyError, ValueError, TypeError
            No such feature; no such policy, or an array of the wrong shape.
        CorruptionError, OSError
            Filling a static cache failed.

        Notes
        -----
        A static policy's rows are read now, in one ascending pass. On an error the feature has no cache.
        """
        store = self.features[name]
        n_bytes, chosen = parse_size(budget), get_policy(policy)
        if isinstance(chosen, PlannedPolicy):
            raise ValueError(f"policy {chosen.name!r} plans ahead: use it through a Loader with strategy='superbatch'")
        with self.locked():
            self._drop_cache(store)
        # Not under the lock: a provider of counts samples an epoch, on threads that ask for the topology.
        if n_bytes == 0:
            return
        file = self._snapshot.file_of(self._snapshot.catalog.by_role("feature")[name])
        with self.policy_inputs(file.row_bytes, counts, parts, seed, self.budget) as inputs:
            capacity = FeatureCache.capacity_for(n_bytes, file.row_bytes, self.num_nodes, chosen)
            cache = FeatureCache(
                capacity, file.row_bytes, self.num_nodes, chosen, inputs.context, self.budget, name=f"cache of {name!r}"
            )
            try:
                cache.fill(lambda rows, out: file.gather(rows, out))
                with self.locked():
                    self._drop_cache(store)  # another thread's, or a loader's, who came meanwhile
                    store.use_cache(cache)
            except BaseException:
                cache.close()
                raise

    def policy_inputs(
        self, row_bytes: int, counts: Given = None, parts: Given = None, seed: int = 0, budget: Budget | None = None
    ) -> PolicyInputs:
        """Return what a policy may know of this graph: a context manager, whose arrays the budget counts; caches call this."""

        def out_degree() -> npt.NDArray[np.int64]:
            file, width = self._snapshot.topology_file("out_degree", self.num_nodes)
            if width != 8:
                raise FormatError(f"{file.path}: out-degrees of {width} bytes")
            rows = np.empty((self.num_nodes, 8), np.uint8)
            if self.num_nodes:
                file.read(0, self.num_nodes, rows)
            return rows.reshape(-1).view(np.int64)

        def in_degree() -> npt.NDArray[np.int64]:
            return self.topology.degrees()

        return PolicyInputs(
            self.num_nodes, row_bytes, self.budget if budget is None else budget, in_degree, out_degree, counts, parts, seed
        )

    def cache_neighbors(
        self,
        budget: int | str | None = None,
        policy: str | Policy | type[Policy] = "in_out_ratio",
        *,
        counts: Given = None,
        parts: Given = None,
        seed: int = 0,
        save: bool = False,
    ) -> None:
        """Keep neighbour lists in memory, for samplers; replaces an earlier cache of them.

        Parameters
        ----------
        budget : int or str, optional
            What the cache may take of the graph's budget: bytes or text; all that is left by default. With room for the whole
            adjacency nothing is read from disk while sampling; 0: no cache.
        policy : str, Policy or class
            A static policy, which scores the nodes whose lists stay.
        counts, parts, seed
            As for :meth:`cache`.
        save : bool
            Keep the cache in the dataset, too, unless it is one of the whole adjacency: asked for the same budget, policy and
            seed (and no ``counts`` or ``parts``), whoever opens the dataset afterwards loads it instead of making it anew.

        Raises
        ------
        BudgetError
            Not even the cache's table of 8 bytes a node fits; names the least that works.
        ValueError, PluginError, CorruptionError, OSError
            No such or no static policy, or nothing to recognise a saved cache by; the policy failed; a list holds what is no
            node; reading or saving failed.
        BusyError
            It cannot be saved: somebody is writing the dataset, or has replaced it. The cache is in use all the same.

        Notes
        -----
        Reads the adjacency once, sequentially. On an error there is no cache.
        """
        chosen = get_policy(policy)
        if not isinstance(chosen, StaticPolicy):
            raise ValueError(f"neighbour lists are cached once, by score: policy {chosen.name!r} is not a static one")
        usual = isinstance(policy, str) and counts is None and parts is None
        if save and (not usual or budget is None):
            raise ValueError("a cache is saved for a policy's name and a stated budget, without counts= and parts=")
        self._check_open()
        self._drop_neighbor_cache()
        topology = self.topology
        n_bytes = self.budget.available if budget is None else parse_size(budget)
        if n_bytes == 0:
            return
        recipe = {"policy": chosen.name, "bytes": n_bytes, "seed": seed}
        found = self._stored_neighbors(n_bytes, self.budget, recipe if usual else None)
        if found is not None:
            self.neighbor_cache = found
            return
        with self.policy_inputs(topology.id_bytes, counts, parts, seed, self.budget) as inputs:
            scores = inputs.scores(chosen)
            if budget is None:
                n_bytes = self.budget.available
            self.neighbor_cache = NeighborCache.build(topology, self.budget, scores, n_bytes)
        if save:
            save_neighbor_cache(self.path, self._snapshot.catalog, self.neighbor_cache, recipe)

    def _stored_neighbors(self, n_bytes: int, budget: Budget, recipe: Mapping[str, Any] | None) -> NeighborCache | None:
        """Load what needs no choice: the whole adjacency, where it fits ``n_bytes``, or the saved cache of ``recipe``."""
        topology = self.topology
        if huge_bytes(topology.nbytes) <= n_bytes:
            return NeighborCache.build(topology, budget, None, n_bytes)
        if recipe is None:
            return None
        return load_neighbor_cache(self._snapshot.catalog, self._snapshot.files, topology, budget, recipe)

    def make_neighbor_cache(self, budget: Budget, scratch: Budget, policy: str = "in_out_ratio") -> tuple[NeighborCache, bool]:
        """Return a neighbour cache that fills ``budget``, a share of the graph's that the caller holds; loaders call this.

        Parameters
        ----------
        budget : Budget
            Counts the cache.
        scratch : Budget
            Counts what choosing the nodes takes meanwhile: 24 bytes a node, and :meth:`NeighborCache.scratch_bytes`.
        policy : str

        Returns
        -------
        NeighborCache
        bool
            Whether it was loaded as it is stored in the dataset: the whole adjacency, or a cache that :meth:`cache_neighbors`
            saved with the same size and policy.

        Raises
        ------
        BudgetError, ValueError, PluginError, CorruptionError, OSError
            As :meth:`cache_neighbors`.
        """
        chosen = get_policy(policy)
        if not isinstance(chosen, StaticPolicy):
            raise ValueError(f"neighbour lists are cached once, by score: policy {chosen.name!r} is not a static one")
        self._check_open()
        n_bytes = budget.available
        found = self._stored_neighbors(n_bytes, budget, {"policy": chosen.name, "bytes": n_bytes, "seed": 0})
        if found is not None:
            return found, True
        with self.policy_inputs(self.topology.id_bytes, None, None, 0, scratch) as inputs:
            return NeighborCache.build(self.topology, budget, inputs.scores(chosen), n_bytes, scratch), False

    def _drop_neighbor_cache(self) -> None:
        old, self.neighbor_cache = self.neighbor_cache, None
        if old is not None:
            old.close()

    def identity(self) -> dict[str, str]:
        """Return the id of the file that holds each field, by key: what was made from a field is stale once it differs."""
        return _identity_of(self._snapshot.catalog)

    # -- looking after it --------------------------------------------------------------------------------------------------------

    def verify(self, progress: bool = True) -> dict[str, int]:
        """Check the whole dataset as it is on disk now: catalog, every page of every file, and the adjacency's structure.

        Parameters
        ----------
        progress : bool
            Show a progress bar where stderr is a terminal.

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
            catalog = read_catalog(self.path)
        total = sum(record.n_bytes for record in catalog.files.values())
        with Progress("verify", total + _topology_bytes(catalog), progress) as bar:
            n_pages = verify_files(self.path, catalog, bar.add)
            verify_topology(self.path, catalog, bar.add)
        return {"files": len(catalog.files), "pages": n_pages, "bytes": total}

    # -- life --------------------------------------------------------------------------------------------------------------------

    def _close_files(self) -> None:
        self._drop_neighbor_cache()
        if self._topology is not None:
            self._topology.close()
        self._snapshot.close()

    def __reduce__(self) -> tuple[Callable[..., OutOfCoreGraph], tuple[Any, ...]]:
        if self._closed:
            raise ClosedError(f"{self.path} is closed")
        return OutOfCoreGraph, (self.path, self.options)


def _identity_of(catalog: Catalog) -> dict[str, str]:
    """Return the id of the file that holds each field, by key."""
    return {
        key: " ".join(catalog.files[part.file].file_id for part in record.parts) for key, record in sorted(catalog.fields.items())
    }


def _topology_bytes(catalog: Catalog) -> int:
    names = {part.file for record in catalog.by_role("topology", EDGE).values() for part in record.parts}
    return sum(catalog.files[name].n_rows * 8 for name in names)


# --- stores that travel ---------------------------------------------------------------------------------------------------------

_reopened: weakref.WeakValueDictionary[tuple[int, str, Options], OutOfCoreGraph] = weakref.WeakValueDictionary()
_reopened_lock = threading.Lock()


class _Reopen:
    """How one feature's store is pickled. Keeps its graph alive as long as the store."""

    def __init__(self, graph: OutOfCoreGraph, name: str) -> None:
        self._graph = graph
        self._name = name

    def __call__(self) -> tuple[Callable[..., FeatureStore], tuple[Any, ...]]:
        if self._graph.closed:
            raise ClosedError(f"{self._graph.path} is closed")
        return _reopen_store, (self._graph.path, self._graph.options, self._name)


def _is_current(graph: OutOfCoreGraph) -> bool:
    """Return whether the dataset at a graph's path is still the one that it has open."""
    try:
        return _identity_of(read_catalog(graph.path)) == graph.identity()
    except (OSError, ValueError):
        return False  # opening it anew says what is wrong, or waits for whoever is replacing it


def _reopen_store(path: str, options: Options, name: str) -> FeatureStore:
    """Unpickle a store; the stores of one dataset, as it is now, share one graph, and so one budget."""
    key = os.getpid(), path, options
    with _reopened_lock:
        graph = _reopened.get(key)
        if graph is None or graph.closed or not _is_current(graph):
            graph = _reopened[key] = OutOfCoreGraph(path, options)
        return graph.features[name]
