"""Methods of an open graph that read it back, and that keep rows and lists of it in memory to be read from there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, overload

import torch

from featstore.cache.base import Policy
from featstore.config import listed
from featstore.graph.neighborlists import NEIGHBOR_POLICY
from featstore.graph.opendataset import OpenDataset
from featstore.graph.policyinputs import Given
from featstore.graph.rowcaches import GivenParts
from featstore.idmaps.idmap import IdMap, map_of

__all__ = ["cache", "cache_neighbors", "edges", "ids", "neighbors"]


@overload
def neighbors(self: OpenDataset, node: int, edge_pos: Literal[False] = False) -> torch.Tensor: ...
@overload
def neighbors(self: OpenDataset, node: int, edge_pos: Literal[True]) -> tuple[torch.Tensor, torch.Tensor]: ...


def neighbors(self: OpenDataset, node: int, edge_pos: bool = False) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
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
def edges(self: OpenDataset, edge_pos: Literal[False] = False) -> Iterator[torch.Tensor]: ...
@overload
def edges(self: OpenDataset, edge_pos: Literal[True]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]: ...


def edges(self: OpenDataset, edge_pos: bool = False) -> Iterator[torch.Tensor] | Iterator[tuple[torch.Tensor, torch.Tensor]]:
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


def ids(self: OpenDataset, node_type: str | None = None) -> IdMap:
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
    self: OpenDataset,
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
    self: OpenDataset,
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
        Also keep the numbers of the lists' edges, for samplers with ``edges=True``: 4 bytes an edge (8 from 2³¹ edges on), of
        the same ``budget``, so fewer lists may fit. Only datasets whose lists were sorted by ``create`` store such numbers;
        for others this changes nothing.
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
