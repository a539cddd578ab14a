"""Dividing the nodes of a dataset into parts, and keeping the parts in the dataset."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from featstore._core.partition import edges_inside
from featstore.config import check_at_least, check_flag, refuse_path
from featstore.errors import OptionError, PluginError
from featstore.gather.arrays import id_array, refuse_mask
from featstore.graph.dataset import OutOfCoreGraph
from featstore.graph.savedparts import HOLDER, KeptParts, check_parts_name
from featstore.graph.selfreliant import SelfReliantParts
from featstore.partitioning.base import GraphStream, Partitioner, get_partitioner
from featstore.partitioning.byranks import made_by_first
from featstore.partitioning.ldg import LDG
from featstore.partitioning.trainparts import TrainParts
from featstore.progress import Progress
from featstore.ranks import Meeting, check_ranks, process_group
from featstore.registry import error_text, is_plugin, plugin_errors, whole_number
from featstore.topology.partarrays import MOST_PARTS, by_part, check_parts

__all__ = ["PartQuality", "judge", "partition"]

ARRAY = "array"  # the method's name where the parts are the user's
_PIECE = 1 << 16

Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Given = torch.Tensor | npt.NDArray[Any] | Sequence[int]


@overload
def partition(
    g: OutOfCoreGraph,
    n_parts: int | None = None,
    method: str | Partitioner | type[Partitioner] | Given = "fennel",
    train_idx: Given | None = None,
    *,
    passes: int | None = None,
    gamma: float | None = None,
    start: str | None = None,
    levels: Sequence[int] | None = None,
    hops: None = None,
    visits: None = None,
    name: str | None = None,
    keep: bool = True,
    keep_lists: bool = False,
    seed: int = 0,
    progress: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    **options: Any,
) -> torch.Tensor: ...
@overload
def partition(
    g: OutOfCoreGraph,
    n_parts: int | None = None,
    method: str | Partitioner | type[Partitioner] | Given = "fennel",
    train_idx: Given | None = None,
    *,
    hops: int,
    visits: int | None = None,
    name: str | None = None,
    keep: bool = True,
    seed: int = 0,
    progress: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    **options: Any,
) -> SelfReliantParts: ...
def partition(
    g: OutOfCoreGraph,
    n_parts: int | None = None,
    method: str | Partitioner | type[Partitioner] | Given = "fennel",
    train_idx: Given | None = None,
    *,
    passes: int | None = None,
    gamma: float | None = None,
    start: str | None = None,
    levels: Sequence[int] | None = None,
    hops: int | None = None,
    visits: int | None = None,
    name: str | None = None,
    keep: bool = True,
    keep_lists: bool = False,
    seed: int = 0,
    progress: bool = True,
    rank: int | None = None,
    world_size: int | None = None,
    **options: Any,
) -> torch.Tensor | SelfReliantParts:
    """Divide nodes into parts with few edges between them, for partition batches, and keep the parts in the dataset.

    Parameters
    ----------
    g : OutOfCoreGraph
    n_parts : int, optional
        At least 1. Needed unless ``method`` is an array. More parts than nodes are allowed: some are then empty.
    method : str, Partitioner, class, or integer array, shape (num_nodes,)
        ``"fennel"`` and ``"ldg"`` stream the adjacency in bounded memory; ``"ranges"`` cuts the ids, ``"random"`` draws.
        ``"metis"`` needs pymetis, and several times the memory of the whole adjacency. Also a registered name, or an array of
        parts that were made elsewhere.
    train_idx : integer array or tensor, or boolean mask, shape (num_nodes,), optional
        Training nodes. ``"fennel"`` spreads them over the parts; they are kept with the parts.
    passes, gamma, start, levels
        Options of ``"fennel"``: see :class:`~featstore.partitioning.fennel.Fennel`.
    hops, visits : int, optional
        With ``"ldg"`` and ``train_idx``: make self-reliant parts, for processes that train together. Training nodes alone are
        divided; a part also has their in-neighbours within ``hops``. See
        :class:`~featstore.partitioning.trainparts.TrainParts` and :class:`~featstore.PartBatches`.
    name : str, optional
        Name under which the parts are kept; ``<method>-<n_parts>`` by default, and ``-hops-<hops>`` after it. Existing parts of
        that name are replaced.
    keep : bool
        False: leave the dataset as it is.
    keep_lists : bool
        Also keep the adjacency in part order: whole neighbour lists, the lists of a part next to each other. A loader of
        :class:`~featstore.PartitionBatches` then reads the lists of a macro-batch in sequence. Takes the size of the adjacency,
        and 4 bytes a node (8 from 2³¹ nodes on).
    seed : int
        Seed of randomised methods.
    progress : bool
        Show a progress bar, with the time left, on a terminal and in a notebook.
    rank, world_size : int, optional
        Those of torch's process group by default: all ranks call alike, on one dataset. Rank 0 makes and keeps the parts; the
        others wait, and read them. ``rank=0, world_size=1`` makes them alone. With ``keep=False`` each rank makes its own.
    **options
        Options of other methods.

    Returns
    -------
    Tensor of int32, shape (num_nodes,)
        The part of each node, in ``[0, n_parts)``. Counted in the graph's budget while it lives. With ``hops``, the
        :class:`~featstore.graph.selfreliant.SelfReliantParts` instead.

    Raises
    ------
    OptionError
        The method has no such option, or its value cannot be used.
    ValueError, TypeError, IndexError
        There is no such method, a number is out of range, a training node is no node, or an array has a wrong length, dtype or
        range. Ranks differ in their arguments, or have different directories.
    RuntimeError
        Another rank failed, or torch says that it is lost.
    MissingExtraError
        ``"metis"`` without pymetis.
    PluginError
        A partitioner of another package failed, or returned no valid parts.
    BudgetError
        The graph's budget does not suffice; the error names the memory that does.
    BusyError, CommittedError
        Another process is writing the dataset, or has replaced it; the parts are kept, but making them durable failed.
    CorruptionError, OSError
        Reading or writing failed.

    Notes
    -----
    One commit keeps everything: if the call fails or is killed, the dataset is unchanged, and a second call starts over. ``g``
    has the parts at once (:meth:`OutOfCoreGraph.parts`); other handles have them after they are opened again. ``"fennel"`` needs
    5 bytes a node and the offsets of the adjacency; a pass reads all neighbour ids once, in sequence. Keeping the parts takes one
    more pass, to count each node's edges into other parts: 4 bytes a node, 8 from 2³¹ edges on. ``keep_lists`` needs 20 bytes a
    node and 16 a part in addition, and reads the adjacency once more for each half of the free memory that the lists fill.
    Self-reliant parts need 22 bytes a node, three bits a node and part, and up to half of the free memory for lists or counts.
    Counts of paths of as many parts as fit there at 8 bytes a node are made in one pass a hop; of more in several.

    References
    ----------
    OUTRE, VLDB 2024, sections 4.2 and 5.2. PaGraph, TPDS 2021, section 3.2.

    Examples
    --------
    >>> parts = featstore.partition(g, 3_000, train_idx=g.node_data["train_idx"])
    >>> g.parts()["fennel-3000"].n_parts
    3000
    """
    named = {"passes": passes, "gamma": gamma, "start": start, "levels": levels, "hops": hops, "visits": visits, **options}
    keep = check_flag("keep", keep)
    own = check_ranks(rank, world_size, process_group())
    with Meeting(*own) if keep else Meeting(0, 1) as meeting:
        seed = check_at_least("seed", seed, 0)
        for each, flag in (("keep_lists", keep_lists), ("progress", progress)):
            check_flag(each, flag)
        if keep_lists and not keep:
            raise ValueError("keep_lists goes with keep=True: lists are kept with their parts")
        if name is not None:
            check_parts_name(name)
        refuse_path(g)
        if not hasattr(g, "topology"):
            raise TypeError(f"a graph with an adjacency is partitioned, not a {type(g).__name__}")
        g.refuse_types("partition()")
        g.refuse_part("partition()")
        asked = _Asked(g, meeting, n_parts, train_idx, named, name, keep, keep_lists, seed, progress)
        if hops is not None and (method is LDG or (isinstance(method, str) and method == "ldg")):
            return _self_reliant(asked)
        return _of_all_nodes(asked, method)


@dataclass(frozen=True)
class _Asked:
    """The arguments of :func:`partition`, checked as far as they do not depend on its method; ``options`` are the method's."""

    g: OutOfCoreGraph
    meeting: Meeting
    n_parts: int | None
    train_idx: Given | None
    options: dict[str, Any]
    name: str | None
    keep: bool
    keep_lists: bool
    seed: int
    progress: bool


def _of_all_nodes(asked: _Asked, method: str | Partitioner | type[Partitioner] | Given) -> torch.Tensor:
    g, n_parts, train_idx, name = asked.g, asked.n_parts, asked.train_idx, asked.name
    given = method if isinstance(method, (torch.Tensor, np.ndarray, list, tuple)) else None
    chosen = None if given is not None else get_partitioner(method, asked.options)  # type: ignore[arg-type]
    if given is not None:
        for each in [each for each, value in asked.options.items() if value is not None]:
            raise TypeError(f"{each} is an option of a method, and the parts are given")
    elif n_parts is None:
        raise TypeError("n_parts is needed: how many parts to make; for PartitionBatches, 40 for each batch of seeds")
    if n_parts is not None:
        n_parts = check_at_least("n_parts", n_parts, 1, MOST_PARTS)
    n = g.num_nodes
    if chosen is not None and n_parts is not None:
        try:
            chosen.check(n_parts)
        except ValueError:
            raise  # the options do not allow this number
        except Exception:
            with plugin_errors(f"partitioner {chosen.name!r}", "check"):
                raise
    with g.budget.reserve("partitioning", n if train_idx is not None else 0) as held:
        is_train = None if train_idx is None else _mask(train_idx, n)
        held.resize(held.n_bytes + (4 * n if given is not None else 0))
        array = None if given is None else check_parts(given, n, n_parts, "the parts").copy()
        if array is not None and n_parts is None:
            n_parts = int(array.max(initial=0)) + 1
        assert n_parts is not None
        label = ARRAY if chosen is None else chosen.name
        recipe: dict[str, Any] = asdict(chosen) if chosen is not None and is_dataclass(chosen) else {}
        saved = {"method": label, "n_parts": n_parts, "options": _plain({**recipe, "seed": asked.seed})}
        name = f"{label}-{n_parts}" if name is None else name

        def make() -> torch.Tensor:
            parts = array
            if parts is None:
                assert chosen is not None
                # The result is counted as long as the tensor lives.
                held.resize(held.n_bytes + 4 * n)
                parts = _assigned(asked, chosen, n_parts, is_train)
            if asked.keep:
                with g.budget.reserve("partitioning", 0 if is_train is None else 16 * int(is_train.sum(dtype=np.int64))):
                    trained = None if is_train is None else by_part(parts, n_parts, np.flatnonzero(is_train))[1]
                    g.partitions.keep(name, parts, trained, saved, asked.progress, asked.keep_lists)
            held.resize(held.n_bytes - 4 * n)
            tensor = torch.from_numpy(parts)
            g.budget.reserve(HOLDER, 4 * n, owner=tensor)
            return tensor

        same = {**_flat(saved), "keep_lists": asked.keep_lists, "method": (label, _digest(array)), "train_idx": _digest(is_train)}
        return made_by_first(asked.meeting, g, name, same, make, KeptParts.load)


def _self_reliant(asked: _Asked) -> SelfReliantParts:
    g, n_parts, train_idx, name = asked.g, asked.n_parts, asked.train_idx, asked.name
    given = {each: value for each, value in asked.options.items() if value is not None}
    known = [each.name for each in fields(TrainParts)]
    for each in given:
        if each not in known:
            raise OptionError(each, f"method 'ldg' with hops has {', '.join(known)}")
    if asked.keep_lists:
        raise ValueError("keep_lists goes without hops: self-reliant parts are of training nodes alone")
    if n_parts is None or train_idx is None:
        raise TypeError("n_parts and train_idx are needed with hops: how many parts to make, and the training nodes to divide")
    n_parts, chosen = check_at_least("n_parts", n_parts, 1, MOST_PARTS), TrainParts(**given)
    recipe = {"method": "ldg", "n_parts": n_parts, "options": {**asdict(chosen), "seed": asked.seed}}
    name = f"ldg-{n_parts}-hops-{chosen.hops}" if name is None else name
    with g.budget.reserve("partitioning", g.num_nodes) as held:
        is_train = _mask(train_idx, g.num_nodes)

        def make() -> SelfReliantParts:
            held.resize(held.n_bytes + 8 * int(is_train.sum(dtype=np.int64)))
            train = np.flatnonzero(is_train)
            with Progress("partition", len(train), asked.progress, unit=" nodes") as bar:
                parts = chosen.assign(g.topology, train, n_parts, asked.seed, g.budget, bar.add)
            if asked.keep:
                g.partitions.keep_self_reliant(name, parts, recipe)
            return parts

        same = {**_flat(recipe), "train_idx": _digest(is_train)}
        return made_by_first(asked.meeting, g, name, same, make, KeptParts.self_reliant)


def _flat(recipe: dict[str, Any]) -> dict[str, Any]:
    """List the arguments of a recipe, and those of the method with them."""
    return {**recipe["options"], **{key: value for key, value in recipe.items() if key != "options"}}


def _digest(array: npt.NDArray[Any] | None) -> str | None:
    return None if array is None else xxhash.xxh3_128_hexdigest(array.data)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Convert options to JSON's types; a plug-in's option of another type becomes its repr."""
    simple = (str, int, float, bool, type(None))
    return {
        key: list(each) if isinstance(each, tuple) else each if isinstance(each, simple) else repr(each)
        for key, each in options.items()
    }


def _assigned(asked: _Asked, chosen: Partitioner, n_parts: int, is_train: Bytes | None) -> Int32s:
    g, topology = asked.g, asked.g.topology
    label = f"partitioner {chosen.name!r}"
    with plugin_errors(label, "n_passes"):
        n_passes: Any = chosen.n_passes
    n_bytes = whole_number(label, "n_passes", n_passes) * topology.nbytes
    with Progress("partition", n_bytes, asked.progress) as bar:
        stream = GraphStream(topology, n_parts, is_train, asked.seed, g.budget, bar)
        with closing(stream), plugin_errors(label, "assign"):
            answer = chosen.assign(stream)
    try:
        found = check_parts(answer, g.num_nodes, n_parts, "its answer")
    except MemoryError:
        raise
    except Exception as error:
        raise PluginError(f"{label}: {error_text(error)}") from error
    # A plug-in may keep its array, and write to it later.
    return found.copy() if is_plugin(chosen) else found


def _mask(train_idx: Given, n: int) -> Bytes:
    """Make a byte a node: 1 for nodes in ``train_idx``, given as ids or as a mask."""
    array = id_array("train_idx", train_idx)
    if array.ndim != 1:
        raise ValueError(f"train_idx must be one-dimensional, not of shape {array.shape}")
    if array.dtype.kind == "b":
        if len(array) != n:
            raise ValueError(f"train_idx: a mask must have one entry a node ({n}), not {len(array)}")
        return array.astype(np.uint8)
    if array.dtype.kind not in "iu" and len(array):
        raise TypeError(f"train_idx must be integers or a mask, not {array.dtype}")
    is_train = np.zeros(n, np.uint8)
    for first in range(0, len(array), _PIECE):
        piece = array[first : first + _PIECE]
        bad = np.flatnonzero((piece < 0) | (piece >= n))
        if len(bad):
            raise IndexError(f"train_idx: {piece[bad[0]]} at position {first + bad[0]} is not a node: the graph has {n}")
        is_train[piece.astype(np.int64)] = 1
    refuse_mask("train_idx: ids", array)
    return is_train


@dataclass(frozen=True)
class PartQuality:
    """Quality of parts.

    ``cut`` is the share of the edges whose ends are in different parts. ``balance`` and ``train_balance`` are the nodes, and the
    training nodes, of the largest part over the mean of all parts; 1 is perfect, NaN if there are none. ``n_empty`` parts have no
    node.
    """

    cut: float
    balance: float
    train_balance: float
    n_empty: int


def judge(g: OutOfCoreGraph, parts: Given, n_parts: int, train_idx: Given | None = None, *, progress: bool = True) -> PartQuality:
    """Measure the edges that parts cut, and the balance of the parts; reads the adjacency once, in sequence.

    Errors are those of :func:`partition`.
    """
    g.refuse_types("judge()")
    checked = check_parts(parts, g.num_nodes, n_parts)
    topology, n_inside = g.topology, 0
    with Progress("judge", topology.nbytes, progress) as bar:
        stream = GraphStream(topology, n_parts, None, 0, g.budget, bar)
        for block in stream.list_blocks():
            ids = block.ids
            n_inside += edges_inside(block.offsets, block.first_node, checked, ids, ids.itemsize, block.first_edge)
    with g.budget.reserve("partitioning", 9 * g.num_nodes + 24 * n_parts):
        sizes = np.bincount(checked, minlength=n_parts)
        trained = None if train_idx is None else np.bincount(checked[_mask(train_idx, g.num_nodes) > 0], minlength=n_parts)
    return PartQuality(
        cut=1 - n_inside / g.num_edges if g.num_edges else 0.0,
        balance=_balance(sizes),
        train_balance=float("nan") if trained is None else _balance(trained),
        n_empty=int((sizes == 0).sum()),
    )


def _balance(counts: npt.NDArray[np.int64]) -> float:
    return float(counts.max() / counts.mean()) if counts.any() else float("nan")
