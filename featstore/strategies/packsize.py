"""Estimates of the disk space of a pack, made before it is written."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.cache.base import StaticPolicy, get_policy
from featstore.config import format_size, parse_cache_size, user_path
from featstore.errors import BudgetError, OptionError
from featstore.estimate.choice import observe
from featstore.estimate.cost import ADMIT_TABLE_BYTES, LOAD_TABLE_BYTES, ROW_TABLE_BYTES, STATIC, Workload
from featstore.pack.layout import PARTIAL, LayoutOptions, find_layouts, fitting, layout_bytes, layout_rows
from featstore.pack.makelayout import layout_sizes
from featstore.pack.nodedata import carried_bytes
from featstore.pack.offline import Pack, batches_to_sample
from featstore.pack.segments import Stored
from featstore.pack.tiers import SECTION_BYTES, TABLE_SECTIONS, assign_tiers
from featstore.pack.typedarguments import features_of_types, types_of
from featstore.plan.samples import sample_bytes
from featstore.plan.trace import Trace, lengths_of
from featstore.sampling.batches import Batches
from featstore.sampling.foreign import checked_sampler, has_own_seeds
from featstore.sampling.sampledbatches import Drawn
from featstore.storage.writer import free_bytes
from featstore.strategies.devicecache import rows_of_columns
from featstore.strategies.domain import Domain
from featstore.strategies.packed import Packed
from featstore.strategies.packlayouts import packed_length, rows_of_size
from featstore.strategies.profile import pack_trace, profile_batches
from featstore.topology.noderows import NodeRows

if TYPE_CHECKING:
    from featstore.graph.dataset import OutOfCoreGraph

__all__ = ["PackEstimate", "estimate_layout", "estimate_pack", "layouts_there"]

MARGIN = 0.5  # share of an estimate by which it may be too high: a pack is refused only if even the rest has no room
RECORD_BYTES = 4096  # most bytes of the pack's record, or of a file of node data beside its array
PACKED = Packed(cache=0.1)


@dataclass(frozen=True)
class PackEstimate:
    """The estimated disk space of a pack, or of one more layout of a pack.

    Parameters
    ----------
    path : str
        The pack's directory.
    samples_bytes, node_data_bytes : int
        Bytes of the samples, and of the labels that are copied into the pack; 0 if the pack has them.
    layout_bytes : int or None
        Bytes of the layout; None if there is no memory to estimate them.
    features_bytes : int
        Bytes of the packed features in the dataset.
    n_batches : int
        Batches of all epochs.
    n_looked_at : int
        Batches from which the estimate is made.
    free_bytes : int or None
        Free bytes of the drive; None if unknown.
    allowed_bytes : int or None
        Most bytes of the layout under a planned policy, whose layout cannot be made smaller; None: no bound.
    """

    path: str
    samples_bytes: int
    layout_bytes: int | None
    node_data_bytes: int
    features_bytes: int
    n_batches: int
    n_looked_at: int
    free_bytes: int | None
    allowed_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of all files that will be written, as far as they could be estimated."""
        return self.samples_bytes + (self.layout_bytes or 0) + self.node_data_bytes

    @property
    def fits(self) -> bool:
        """Whether there may be room: False if even half of the estimate exceeds the free or the allowed bytes."""
        return self._is_allowed and (self.free_bytes is None or (1 - MARGIN) * self.total_bytes <= self.free_bytes)

    @property
    def _is_allowed(self) -> bool:
        return self.allowed_bytes is None or (1 - MARGIN) * (self.layout_bytes or 0) <= self.allowed_bytes

    def check(self) -> None:
        """Raise OSError (ENOSPC) unless there may be room; its message has the bytes needed and available, and remedies."""
        if not self._is_allowed:
            raise OSError(
                errno.ENOSPC,
                f"the layout needs about {format_size(self.layout_bytes or 0)}, and {format_size(self.allowed_bytes or 0)} may "
                "be used: a planned policy such as 'belady' gives each batch a copy of its own rows; give more disk, a larger "
                "cache, or a static policy such as 'frequency', whose batches share rows",
                self.path,
            )
        if not self.fits:
            raise OSError(
                errno.ENOSPC,
                f"the pack needs about {self._parts()}, and {format_size(self.free_bytes or 0)} are free on the drive: make "
                "room, take another drive, a larger cache, fewer epochs, or a static policy with a bound for the disk",
                self.path,
            )

    def _parts(self) -> str:
        parts = [f"{format_size(self.samples_bytes)} of samples"] if self.samples_bytes else []
        parts.append("a layout of unknown size" if self.layout_bytes is None else f"{format_size(self.layout_bytes)} of layout")
        parts += [f"{format_size(self.node_data_bytes)} of labels"] if self.node_data_bytes else []
        return f"{format_size(self.total_bytes)} ({', '.join(parts)})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, for JSON."""
        return {**asdict(self), "total_bytes": self.total_bytes}

    def __str__(self) -> str:
        free = "" if self.free_bytes is None else f"; {format_size(self.free_bytes)} are free on the drive"
        tight = ", which may not suffice" * (self.free_bytes is not None and self.free_bytes < self.total_bytes)
        if self.allowed_bytes is not None:
            tight += f"; {format_size(self.allowed_bytes)} may be used"
        return (
            f"{self.path}: will write about {self._parts()} for {format_size(self.features_bytes)} of features and "
            f"{self.n_batches:,} batches, estimated from {self.n_looked_at:,} of them{free}{tight}"
        )


def estimate_pack(
    g: OutOfCoreGraph,
    sampler: Any,
    seeds: torch.Tensor | npt.NDArray[Any] | Sequence[int] | Batches | tuple[str, Any],
    batch_size: int | None = None,
    epochs: int = 1,
    path: str | os.PathLike[str] | None = None,
    *,
    packed: Packed = PACKED,
    features: str | Sequence[str] | Mapping[str, Any] = ("x",),
    device_cache: int | float | str | None = None,
    disk: int | None = None,
    labels: Sequence[str] = (),
    seed: int = 0,
) -> PackEstimate:
    """Estimate the disk space of :func:`~featstore.sample_offline` and of the layout of a first loader.

    Parameters
    ----------
    g, sampler, seeds, batch_size, epochs, path, seed
        As of :func:`~featstore.sample_offline`; the sampler has no seeds of its own.
    packed : Packed
        Options of the layout; ``cache`` must be a size.
    features, device_cache
        As of a :class:`~featstore.Loader`.
    labels : sequence of str
        Node data that the pack will carry, by their names in ``g.node_data``.
    disk : int, optional
        Most bytes that the layout may take. With a static policy the layout is made to fit; with a planned one it cannot be.

    Raises
    ------
    ValueError, TypeError, BudgetError, NotImplementedError
        Options that the loader would refuse, too.

    Notes
    -----
    Samples an eighth of the batches of the first epoch, eight at least and 32 at most, fewer if memory is short. Samples of
    other batches are taken to be as large. Extents hold the rows that a cache of this size misses. For ``belady`` the cache is
    simulated on the sampled batches. Good and Toulmin's estimate of the rows not seen yet extrapolates its misses to a
    superbatch. Other planned policies are taken to miss as many. For ``frequency``, a batch is judged with the rows that the
    other batches choose; other static policies score the rows. On the graphs of the tests the estimate is 0.6 to 1.3 times the
    bytes written, with a device cache up to 1.7 times. Nothing is written.
    """
    if has_own_seeds(sampler):
        raise ValueError(f"{type(sampler).__name__} has seeds of its own: batches cannot be taken from it ahead")
    asked = _Asked(g, features, packed, device_cache, disk)
    seed_batches = batches_to_sample(g, sampler, seeds, batch_size, seed=seed)[1]
    assert seed_batches is not None
    order = seed_batches.epoch(0)
    drawn = Drawn(checked_sampler(sampler, g.num_nodes), seed_batches)
    checked = drawn.epoch(0)
    batches: list[npt.NDArray[Any]] = []
    n_bytes = n_seeds = 0
    with g.budget.reserve("cost model", 0) as held:
        for index in range(profile_batches(len(order), drawn.run_length)):
            try:
                sampled = checked.sample(index)
                held.resize(held.n_bytes + 8 * len(sampled.input_ids))
            except BudgetError:
                if not batches:
                    raise
                break
            n_bytes += sample_bytes(sampled, g.num_nodes)
            n_seeds += sampled.n_seeds
            batches.append(sampled.input_ids.numpy().astype(np.int32 if g.num_nodes < 2**31 else np.int64))
            del sampled
        per_seed = n_bytes / max(1, n_seeds)
        target = f"{g.path}.pack" if path is None else os.path.abspath(user_path(path))
        estimate = PackEstimate(
            path=target,
            samples_bytes=round(per_seed * epochs * sum(len(order.seeds(index)) for index in range(len(order)))) + RECORD_BYTES,
            layout_bytes=0,
            node_data_bytes=sum(int(g.node_data[name].nbytes) + RECORD_BYTES for name in labels),
            features_bytes=0,
            n_batches=epochs * len(order),
            n_looked_at=len(batches),
            free_bytes=free_bytes(target),
        )
        of_parts = [(part, _trace_of(part.domain.rows, batches)) for part in asked.parts]
        return _with_layouts(estimate, asked, of_parts, len(order), epochs)


def estimate_layout(
    g: OutOfCoreGraph,
    pack: Pack,
    *,
    packed: Packed = PACKED,
    features: str | Sequence[str] | Mapping[str, Any] = ("x",),
    device_cache: int | float | str | None = None,
    disk: int | None = None,
    labels: Sequence[str] = (),
) -> PackEstimate:
    """Estimate the disk space of more layouts of a pack; see :func:`estimate_pack`. 0 bytes if the pack has them."""
    asked = _Asked(g, features, packed, device_cache, disk)
    estimate = PackEstimate(
        path=pack.path,
        samples_bytes=0,
        layout_bytes=0,
        node_data_bytes=carried_bytes(pack, g, labels),
        features_bytes=asked.features_bytes,
        n_batches=len(pack),
        n_looked_at=profile_batches(pack.n_batches, pack.run_length),
        free_bytes=free_bytes(pack.path),
    )
    lacking, begun = [], 0
    for part in asked.parts:
        options = asked.options(part, pack.n_batches)
        there = _like(pack, options)
        if there and (options.superbatch or fitting(pack, there, disk)):
            continue
        lacking.append((part, pack_trace(pack, layout_rows(part.domain.rows))))
        options = replace(options, disk=disk) if there and disk is not None else options
        partial = pack.file(options.name) + PARTIAL
        begun += layout_bytes(partial) if os.path.isdir(partial) else 0
    if not lacking:
        return estimate
    estimate = _with_layouts(estimate, asked, lacking, pack.n_batches, pack.epochs)
    return estimate if estimate.layout_bytes is None else replace(estimate, layout_bytes=max(0, estimate.layout_bytes - begun))


def layouts_there(
    g: OutOfCoreGraph,
    pack: Pack,
    features: str | Sequence[str] | Mapping[str, Any],
    packed: Packed,
    device_cache: int | float | str | None = None,
) -> list[LayoutOptions]:
    """Return the layouts that a pack has for these options, made for any ``disk``; arguments as of :func:`estimate_pack`."""
    asked = _Asked(g, features, packed, device_cache, None)
    return [each for part in asked.parts for each in _like(pack, asked.options(part, pack.n_batches))]


def _like(pack: Pack, options: LayoutOptions) -> list[LayoutOptions]:
    return [each for each in find_layouts(pack) if replace(each, digest="", disk=0).name == options.name]


@dataclass(frozen=True)
class _PartTiers:
    """Features with the same rows, and the rows of their tiers in memory."""

    domain: Domain
    capacity: int
    device_rows: int

    @property
    def widths(self) -> list[int]:
        return list(self.domain.row_bytes.values())


class _Asked:
    """Layouts to be estimated, with their sizes in rows: one for each part of the features that has rows."""

    def __init__(
        self,
        g: OutOfCoreGraph,
        features: str | Sequence[str] | Mapping[str, Any],
        packed: Packed,
        device_cache: int | float | str | None,
        disk: int | None,
    ) -> None:
        self.g, self.length, self.disk = g, packed.length, disk
        self.policy = get_policy(packed.policy)
        types = types_of(g)
        if types is not None:
            rows = features_of_types(g, types, features)
            nodes = Domain.of_rows(g, {name: g.columns[name] for name in rows}, rows)
        else:
            nodes = Domain.of_nodes(g, (features,) if isinstance(features, str) else features)
        self.features_bytes = sum(store.nbytes for store in nodes.stores.values())
        self.parts: list[_PartTiers] = []
        if nodes.n and nodes.stores:
            if packed.cache is None or packed.cache == "auto":
                raise OptionError("cache", "the size that is to be packed for is needed here: bytes, or a share of the rows")
            n_device = (0,) * len(nodes.each)
            if device_cache is not None:
                n_device = rows_of_columns(parse_cache_size(device_cache, "device_cache"), nodes.columns)
            each = zip(nodes.each, rows_of_size(nodes, packed.cache, g.budget.available), n_device, strict=True)
            self.parts = [_PartTiers(*part) for part in each if part[0].n]

    def options(self, part: _PartTiers, n_batches: int) -> LayoutOptions:
        """Make the options of a part's layout for a pack whose epochs have ``n_batches`` batches."""
        run_length = 0
        if not isinstance(self.policy, StaticPolicy):
            run_length = packed_length(self.length, n_batches)
        names, rows = tuple(part.domain.stores), layout_rows(part.domain.rows)
        return LayoutOptions(names, self.policy.name, part.capacity, run_length, part.device_rows, rows=rows)


def _trace_of(rows: NodeRows, batches: Sequence[npt.NDArray[Any]]) -> Trace:
    """Make the trace of the rows that batches of nodes need."""

    def ids(number: int) -> npt.NDArray[Any]:
        return rows.stored(batches[number])

    return Trace.reading(ids, lengths_of(ids, len(batches)), rows.n)


def _with_layouts(
    estimate: PackEstimate, asked: _Asked, of_parts: Sequence[tuple[_PartTiers, Trace]], n_batches: int, epochs: int
) -> PackEstimate:
    """Add the bytes of layouts, and of the features, to an estimate. ``of_parts`` has the rows of the first batches of each."""
    allowed = None if isinstance(asked.policy, StaticPolicy) else asked.disk
    estimate = replace(estimate, features_bytes=asked.features_bytes, allowed_bytes=allowed)
    try:
        n_bytes = sum(_layout_bytes(asked, part, trace, n_batches, epochs) for part, trace in of_parts if len(trace))
    except BudgetError:
        return replace(estimate, layout_bytes=None)
    is_bound = asked.disk is not None and isinstance(asked.policy, StaticPolicy)
    return replace(estimate, layout_bytes=min(n_bytes, asked.disk or 0) if is_bound else n_bytes)


def _layout_bytes(asked: _Asked, part: _PartTiers, trace: Trace, n_batches: int, epochs: int) -> int:
    g, options, total = asked.g, asked.options(part, n_batches), epochs * n_batches
    n_accesses = trace.n_accesses / len(trace) * total
    loads: float
    n_device: float
    updates: float
    if options.superbatch:
        whole, rest = divmod(n_batches, options.superbatch)
        seen = [
            (_seen(asked, part, trace, length), times) for length, times in ((options.superbatch, whole), (rest, 1)) if length
        ]
        loads = epochs * sum(times * each.loads for each, times in seen)
        n_device = epochs * sum(times * each.n_device for each, times in seen)
        n_host, updates = 0, loads  # all loaded rows may be admitted
    else:
        loads, n_device = _static(asked, part, trace, total)
        n_host, updates = options.capacity, 0.0
    sizes = layout_sizes(options, part.widths, g.budget)
    packed = np.full(total, round(loads / max(1, total)), np.int64)
    stored = sizes.n_bytes(min(options.device_rows, part.domain.n), n_host, Stored(1, packed, np.empty(0, np.int64), 0))
    tables = ROW_TABLE_BYTES * (n_accesses - n_device) + LOAD_TABLE_BYTES * loads + ADMIT_TABLE_BYTES * updates
    tables += 8 * (n_host + options.device_rows + n_device)
    return stored + round(tables) + SECTION_BYTES * TABLE_SECTIONS * total


def _seen(asked: _Asked, part: _PartTiers, trace: Trace, n_batches: int) -> Workload:
    """Estimate the workload of ``n_batches`` batches, from an empty cache, by a trace of the first ones."""
    g, first = asked.g, trace.head(n_batches)
    sizes: dict[str, Any] = {"row_bytes": 1, "capacity": part.capacity, "device_rows": part.device_rows}
    if asked.policy.name != STATIC:
        return observe(first, n_batches=n_batches, budget=g.budget, **sizes)
    with g.budget.reserve("cost model", 2 * g.num_nodes):
        out_degree = part.domain.rows.select(g.short_degrees())
        return observe(first, n_batches=n_batches, budget=g.budget, out_degree=out_degree, **sizes)


def _static(asked: _Asked, part: _PartTiers, trace: Trace, n_batches: int) -> tuple[float, float]:
    """Estimate how many rows of ``n_batches`` batches neither host nor device holds, and how many the device holds."""
    g, policy, of = asked.g, asked.policy, part.domain.rows
    if policy.name == STATIC:
        seen = _seen(asked, part, trace, n_batches)
        return seen.n_accesses - seen.n_device - seen.n_top, seen.n_device
    assert isinstance(policy, StaticPolicy)

    def counts() -> npt.NDArray[np.int64]:
        found = np.zeros(trace.n, np.int64)
        for ids in trace:
            found[ids.astype(np.intp, copy=False)] += 1
        if not of.kinds:
            return found
        of_nodes = np.zeros(g.num_nodes, np.int64)
        for node, n, row in of.spans:  # policies' inputs have an entry a node
            of_nodes[node : node + n] = found[row : row + n]
        return of_nodes

    with g.budget.reserve("cost model", (24 + policy.score_bytes) * trace.n + 8 * g.num_nodes * bool(of.kinds)):
        with g.policy_inputs(part.domain.width, counts=counts, rows=of) as inputs:
            tier_of_row = assign_tiers(inputs.scores(policy), part.device_rows, part.capacity)
        tiers = [tier_of_row.take(ids) for ids in trace]
    scale = n_batches / len(trace)
    missed = sum(int(np.count_nonzero(each == -1)) for each in tiers)
    return scale * missed, scale * sum(int(np.count_nonzero(each <= -2)) for each in tiers)
