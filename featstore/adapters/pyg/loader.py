"""The library's loader with PyG's keywords, which yields PyG's ``Data``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch_geometric.data import Data

from featstore.adapters.pyg.data import check_names, default_features, to_data, to_hetero_data
from featstore.adapters.pyg.sampler import fanouts_of
from featstore.config import check_flag, listed, refuse_path
from featstore.display import Display, ShownAsTables
from featstore.errors import OptionError, PluginError
from featstore.graph.dataset import OutOfCoreGraph
from featstore.load.heterobatch import HeteroMiniBatch
from featstore.load.loader import Loader
from featstore.load.seedlabels import SeedLabels
from featstore.pack.packgraph import PackedGraph
from featstore.pack.typedarguments import types_of
from featstore.sampling.batch import Sampler
from featstore.sampling.neighbor import NeighborSampler
from featstore.strategies.base import Strategy
from featstore.topology.types import Types

__all__ = ["NeighborLoader"]

Ids = torch.Tensor | npt.NDArray[Any] | Sequence[int]

# Unused keywords of PyG's loader, and of torch's: the values that are accepted, and advice for others.
_CLASSES = "a batch is a Data, or a HeteroData of a graph of several types"
_THREADS = "batches are made by threads, not by processes: threads= says how many sample, prefetch= how many batches are ahead"
_BATCHES = "input_nodes= may be an object that says which seeds form which batch, such as featstore.RandomBatches"
_PINNED = 'device="cuda" pins memory by itself, and delivers batches on the device'
_OTHERS: dict[str, tuple[tuple[Any, ...], str]] = {
    "input_time": ((None,), "sampling by time is not there"),
    "time_attr": ((None,), "sampling by time is not there"),
    "temporal_strategy": (("uniform",), "sampling by time is not there"),
    "subgraph_type": (("directional",), "a batch has the edges that were sampled"),
    "directed": ((True,), "a batch has the edges that were sampled"),
    "is_sorted": ((True, False), ""),
    "filter_per_worker": ((None, True, False), ""),
    "persistent_workers": ((True, False), ""),
    "custom_cls": ((None,), _CLASSES),
    "transform_sampler_output": ((None,), "transform= is given the whole batch"),
    "input_id": ((None,), "batch.input_id has the positions in input_nodes"),
    "sampler": ((None,), _BATCHES),
    "batch_sampler": ((None,), _BATCHES),
    "generator": ((None,), "seed= decides the order and the draws"),
    "pin_memory": ((False,), _PINNED),
    "pin_memory_device": (("",), _PINNED),
    "prefetch_factor": ((None,), _THREADS),
    "worker_init_fn": ((None,), _THREADS),
    "multiprocessing_context": ((None,), _THREADS),
    "timeout": ((0,), _THREADS),
    "collate_fn": ((None,), "transform= is given each batch"),
    "dataset": ((None,), "give the graph as the first argument"),
}


class NeighborLoader(ShownAsTables):
    """Iterate over mini-batches of a dataset as ``torch_geometric.data.Data`` or ``HeteroData``, an epoch a ``for`` loop.

    A replacement for ``torch_geometric.loader.NeighborLoader``. It takes PyG's keywords if they mean the same, and the keywords
    of :class:`~featstore.Loader`, which does the work.

    Parameters
    ----------
    g : OutOfCoreGraph or PackedGraph
    num_neighbors : sequence of int, or mapping of (str, str, str) to such, optional
        Neighbours to draw in each hop, the seeds' own first; -1 takes all; a mapping names them for each type of edges. Every
        node draws once, as in PyG. Without it, and without ``neighbor_sampler``, the strategy brings its batches, as
        :class:`~featstore.Packed` does.
    input_nodes : integer array or tensor, boolean mask of shape (num_nodes,), or Batches, optional
        Seeds; all nodes by default. One that a batch has twice is two nodes of it, as in PyG. In a graph of several types: a
        type, or ``(type, ids or mask)``.
    batch_size : int, optional
        Seeds a batch; 1 by default, as in PyG.
    shuffle, drop_last, replace, disjoint : bool
        A new order of the seeds each epoch; leave out a last batch that is not full; draw with replacement; a subgraph for each
        seed, whose number ``batch.batch`` has for each node.
    weight_attr : str, optional
        With ``num_neighbors``: an edge feature by which neighbours are drawn, see :class:`~featstore.NeighborSampler`.
    transform : callable, optional
        Called with each batch, in the loop's thread; the loop gets its result.
    neighbor_sampler : Sampler, optional
        In place of ``num_neighbors``, ``replace``, ``disjoint`` and ``weight_attr``: any sampler that
        :class:`~featstore.Loader` takes.
    features : str, sequence of str, or mapping of str to such, optional
        Features to gather, a mapping for each type of nodes; by default ``x``, or the only one.
    edge_features : str, sequence of str, or mapping of (str, str, str) to such, optional
        Edge features to gather, as ``edge_attr`` of PyG's batches; by default all, if the sampler numbers edges. With
        ``num_neighbors`` the sampler numbers them if there are edge features, unless ``edges`` is false.
    edges : bool, optional
        With ``num_neighbors``: number the edges, for ``batch.e_id``; by default only if edge features are gathered. If edges were
        not given in the order of the stored lists, the numbers take further reads.
    labels : str, sequence of str, None, array or tensor, shape (n_given, …), or mapping of str to such
        Node data of the seeds: the first is ``batch.y``, others have their own names. ``"auto"``: ``y`` where there is one. Or
        rows beside the seeds, see :class:`~featstore.Loader`.
    strategy : str, Strategy or class
        How rows come off the disk. The batches are the same, bit for bit.
    seed : int
        Decides the draws and the order.
    num_workers : int
        Threads that sample, if not 0; there are no worker processes.
    **options : Any
        Options of :class:`~featstore.Loader`: ``prefetch``, ``threads``, ``device``, ``device_cache`` and others. As PyG's, this
        loader delivers all batches in each process of a group, unless ``rank`` and ``world_size`` say which.
        Keywords of PyG's loader that change nothing here are accepted, too; others raise OptionError with advice.

    Attributes
    ----------
    loader : Loader
    transform : callable or None

    Raises
    ------
    OptionError
        A keyword of PyG's that is not there; several ways to sample at once; ``num_neighbors`` for edge types that there are
        not; a feature or a label with a name that PyG's batches use.
    ValueError, TypeError, IndexError, BusyError, BudgetError, ClosedError
        See :class:`~featstore.Loader`.

    Notes
    -----
    :func:`to_data` describes a batch. ``batch.y`` has the labels of the seeds, the first ``batch_size`` nodes; in PyG it has a
    row for every node. ``batch.y[:batch.batch_size]`` is right for both. Other node data are in memory:
    ``g.node_data["train_mask"][batch.n_id]``.

    Examples
    --------
    >>> loader = NeighborLoader(g, num_neighbors=[10, 10], input_nodes=train_idx, batch_size=1024)
    >>> for batch in loader:
    ...     out = model(batch.x, batch.edge_index)[: batch.batch_size]
    """

    def __init__(
        self,
        g: OutOfCoreGraph | PackedGraph,
        num_neighbors: Sequence[int] | None = None,
        input_nodes: Any = None,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        replace: bool = False,
        disjoint: bool = False,
        weight_attr: str | None = None,
        drop_last: bool = False,
        transform: Callable[[Data], Any] | None = None,
        neighbor_sampler: Sampler | None = None,
        features: str | Sequence[str] | None = None,
        edge_features: str | Sequence[str] | None = None,
        edges: bool | None = None,
        labels: str | Sequence[str] | torch.Tensor | npt.NDArray[Any] | Mapping[str, Any] | None = "auto",
        strategy: str | Strategy | type[Strategy] = "auto",
        seed: int = 0,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        _check_graph(g, is_sampled=num_neighbors is not None)
        types = types_of(g)
        options = _own_options(options, num_workers)
        if transform is not None and not callable(transform):
            raise TypeError(f"transform must be callable, not {type(transform).__name__}")
        self.transform = transform
        sampler: Any = neighbor_sampler
        if edges is not None:
            check_flag("edges", edges)
            if num_neighbors is None:
                raise OptionError("edges", "it goes with num_neighbors; a sampler says it itself: NeighborSampler(…, edges=True)")
        if num_neighbors is not None:
            if neighbor_sampler is not None:
                raise OptionError("neighbor_sampler", "it has its own num_neighbors; give one of the two")
            assert not isinstance(g, PackedGraph), "_check_graph has refused it"
            if edges is None:
                edges = bool(g.edge_features if edge_features is None else edge_features)
            fanouts = fanouts_of(num_neighbors, types)
            sampler = NeighborSampler(g, fanouts, replace, seed, redraw=False, edges=edges, disjoint=disjoint, weight=weight_attr)
        elif disjoint or weight_attr is not None:
            name, said = ("disjoint", "disjoint=True") if disjoint else ("weight_attr", f"weight={weight_attr!r}")
            raise OptionError(name, f"it goes with num_neighbors; a sampler says it itself: NeighborSampler(…, {said})")
        kind = None
        if types is not None:
            input_nodes = _typed_nodes(types, input_nodes)
            kind = types.nodes[input_nodes[0]]
        elif input_nodes is None and sampler is not None:
            input_nodes = torch.arange(g.num_nodes, device="cpu")
        elif isinstance(input_nodes, str) or (isinstance(input_nodes, tuple) and input_nodes and isinstance(input_nodes[0], str)):
            raise OptionError(
                "input_nodes", "the graph has one type of nodes; give ids or a mask, such as g.node_data['train_idx']"
            )
        ids = input_nodes if kind is None else input_nodes[1]
        is_ids = isinstance(ids, (torch.Tensor, np.ndarray, Sequence))
        if sampler is not None and is_ids and batch_size is None:
            batch_size = 1
        there, of_edges_there = (_own_names(each) if types is not None else list(each) for each in (g.features, g.edge_features))
        names: Any = default_features(there, "features") if features is None else _names(features)
        if edge_features is None:
            edge_features = of_edges_there if getattr(sampler, "edges", False) and not isinstance(g, PackedGraph) else ()
        of_edges: Any = _names(edge_features)
        of_seeds: Any = SeedLabels(g, labels, kind)  # which the loader takes as they are
        is_disjoint = getattr(sampler, "disjoint", False)
        check_names((*_flat(names), *_flat(of_edges)), tuple(of_seeds), is_disjoint=is_disjoint)
        self._gives_positions = is_ids and not _is_mask(ids)
        if not {"rank", "world_size"} & options.keys():  # as PyG's: a process group changes nothing
            options |= {"rank": 0, "world_size": 1}
        self.loader = Loader(
            g,
            sampler,
            input_nodes,
            batch_size,
            features=names,
            edge_features=of_edges,
            labels=of_seeds,
            strategy=strategy,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            **options,
        )

    def _batch(self, batch: Any) -> Any:
        if self._gives_positions and batch.seed_positions is None:
            raise PluginError(f"batch {batch.index}: the sampler returned seeds that are not in input_nodes")
        make = to_hetero_data if isinstance(batch, HeteroMiniBatch) else to_data
        data = make(batch, batch.seed_positions if self._gives_positions else None)
        return data if self.transform is None else self.transform(data)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over the next epoch; see :class:`~featstore.Loader`."""
        return map(self._batch, iter(self.loader))

    def _display(self) -> Display:
        return replace(self.loader._display(), title=f"NeighborLoader({len(self)} batches)")

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``for`` loop run ``epoch``; see :meth:`featstore.Loader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of training; see :meth:`featstore.Loader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`; see :meth:`featstore.Loader.load_state_dict`."""
        self.loader.load_state_dict(state)

    def stats(self) -> dict[str, Any]:
        """Report the loader's counts and seconds; see :meth:`featstore.Loader.stats`."""
        return self.loader.stats()

    def close(self) -> None:
        """Stop the loader and give its memory back; see :meth:`featstore.Loader.close`."""
        self.loader.close()

    def __enter__(self) -> NeighborLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.loader.__exit__(kind, error, trace)


def _names(given: Any) -> Any:
    """Make names a tuple; names by type stay as they are."""
    return given if isinstance(given, Mapping) else (given,) if isinstance(given, str) else tuple(given)


def _flat(names: Any) -> list[str]:
    """List names that may be given by type, each once."""
    if not isinstance(names, Mapping):
        return list(names)
    return list(dict.fromkeys(name for of_type in names.values() for name in _names(of_type)))


def _own_names(fields: Iterable[str]) -> list[str]:
    """List the names that fields have within their types, each once."""
    return list(dict.fromkeys(field.rpartition("/")[2] for field in fields))


def _typed_nodes(types: Types, given: Any) -> tuple[str, Any]:
    """Read PyG's ``input_nodes`` of a graph of several types: a type, which stands for all of its nodes, or a type and ids."""
    kind, ids = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(kind, str) or kind not in types.nodes:
        there = listed(types.nodes)
        raise OptionError("input_nodes", f"give a type, or (type, ids), of the types {there}, not {given!r}")
    return kind, torch.arange(types.nodes[kind].n, device="cpu") if ids is None else ids


def _is_mask(ids: Any) -> bool:
    return getattr(ids, "dtype", None) in (torch.bool, np.dtype(bool))


def _check_graph(g: Any, is_sampled: bool) -> None:
    refuse_path(g)
    if isinstance(g, PackedGraph) and is_sampled:
        raise OptionError("num_neighbors", "a PackedGraph has samples of its own: leave num_neighbors and input_nodes out")
    if not isinstance(g, (OutOfCoreGraph, PackedGraph)):
        advice = "make one of PyG's data with featstore.OutOfCoreGraph.from_pyg(path, data)"
        raise TypeError(f"g must be an OutOfCoreGraph, not {type(g).__name__}: {advice}")


def _own_options(given: Mapping[str, Any], num_workers: int) -> dict[str, Any]:
    """Return the options that are the library's loader's; OptionError for PyG's that would change something."""
    options = dict(given)
    for name, (harmless, advice) in _OTHERS.items():
        if name in options:
            value = getattr(options[name], "value", options[name])  # an enumeration's
            del options[name]
            if not any(value is each or (type(value) is type(each) and value == each) for each in harmless):
                raise OptionError(name, advice)
    if num_workers:
        if options.get("threads") is not None:
            raise OptionError("num_workers", "threads= says how many threads sample; give one of the two")
        options["threads"] = num_workers
    return options
