"""The layouts of a pack that a loader runs, one for features with the same rows: existing ones, and those to be made."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, TypeGuard

import numpy.typing as npt

from featstore.cache.base import StaticPolicy, get_policy
from featstore.cache.planned import PlannedPolicy
from featstore.cache.sizes import in_proportion
from featstore.estimate.cost import PLANNED, OnDisk
from featstore.estimate.length import Planning
from featstore.estimate.sharing import count_planned, count_static, joined, shared_there
from featstore.pack.fingerprint import digest_bytes, digest_of, same_scores
from featstore.pack.layout import (
    LayoutOptions,
    PackedFeature,
    check_disk,
    find_layouts,
    fitting,
    layout_bytes,
    layout_rows,
)
from featstore.pack.makelayout import layout_sizes, make_layout
from featstore.pack.nodedata import carried_bytes, data_of
from featstore.pack.offline import Pack
from featstore.pack.packgraph import PackedGraph
from featstore.pack.record import RowNeeds
from featstore.storage.layout import PAGE_BYTES
from featstore.strategies.caches import room_for_caches
from featstore.strategies.context import Context
from featstore.strategies.domain import Domain
from featstore.strategies.memory import Memory

__all__ = [
    "Layouts",
    "PackLayouts",
    "PartLayouts",
    "agreed_rows",
    "layouts_on_disk",
    "packed_length",
    "rows_for_pack",
    "rows_of_size",
]

Layouts = tuple[LayoutOptions, ...]  # one for each part of a loader's features that has rows

MOST_AUTO_BATCHES = 200
TABLE_BYTES = 20  # of a row of a batch in a layout's tables, at most


def packed_length(length: int | str, n_batches: int) -> int:
    """Compute the number of batches that a planned policy plans together, at most an epoch's ``n_batches``."""
    return max(1, min(MOST_AUTO_BATCHES if isinstance(length, str) else length, n_batches))


def parts_with_rows(nodes: Domain, n_device: Sequence[int] | None = None) -> list[tuple[Domain, int | None]]:
    """List the parts of a loader's features that have rows to pack, each with its rows on the device, if they are given."""
    numbers = [None] * len(nodes.each) if n_device is None else n_device
    return [(part, n) for part, n in zip(nodes.each, numbers, strict=True) if part.stores and part.n]


def rows_of_size(nodes: Domain, size: int | float | str | None, room: int = 1 << 62) -> tuple[int, ...]:
    """Compute how many rows the caches of each part have for a ``size``: under any policy, as many as if they followed plans.

    BudgetError: the caches take more than ``room`` bytes, or none has room for a row.
    """
    sizes = {} if size is None or not nodes.n or not nodes.stores else nodes.divided(size, get_policy("belady"), room)
    return tuple(part.capacity({name: sizes[name] for name in part.stores if name in sizes}) for part in nodes.each)


def rows_for_pack(context: Context, memory: Memory, pack: Pack, beside: int = 0) -> tuple[int, ...]:
    """Choose the rows of the feature caches for a pack, for each part of the features.

    They are those of the pack's largest layouts that fit, or, without such layouts, what half of the memory that is left holds:
    the rest is for packing, and for reading extents ahead. ``beside``: bytes that other caches will take.
    """
    nodes = context.nodes
    room, claimed = room_for_caches(context)
    free_bytes, _ = memory.left_for_caches(room, context.prefetch, claimed)
    free_bytes = max(0, free_bytes - beside - sum(memory.leasts.values()))
    layouts, there = find_layouts(pack), list[list[int]]()
    for part, n_device in zip(nodes.each, context.device_rows or [0] * len(nodes.each), strict=True):
        kind = sorted(part.stores), n_device, layout_rows(part.rows)
        found = {each.capacity for each in layouts if (sorted(each.features), each.device_rows, each.rows) == kind}
        there.append(sorted(found) if part.stores and part.n else [0])
    sizes = {rows: _bytes_of(nodes, rows) for rows in product(*there)}
    fits = [rows for rows, n_bytes in sizes.items() if n_bytes <= free_bytes]
    if fits:
        return max(fits, key=sizes.__getitem__)
    return rows_of_size(nodes, free_bytes // 2) if nodes.fitting(free_bytes // 2) else (0,) * len(nodes.each)


def agreed_rows(nodes: Domain, rows: tuple[int, ...], of_first: tuple[int, ...] | None) -> tuple[int, ...]:
    """Choose the rows of rank 0's caches, so that the ranks of a machine run one layout, unless they take much more memory."""
    if of_first and 8 * _bytes_of(nodes, of_first) <= 9 * _bytes_of(nodes, rows):
        return of_first
    return rows


def _bytes_of(nodes: Domain, rows: Sequence[int]) -> int:
    """Sum the bytes of caches of as many rows for the parts' features."""
    return sum(sum(part.bytes_of(n).values()) for part, n in zip(nodes.each, rows, strict=True))


def disk_of_parts(pack: Pack, parts: Sequence[Domain], disk: int) -> list[int]:
    """Divide the disk among layouts of a static policy, which need not have an extent for each batch.

    In proportion to the bytes of the features, but to none more than it can use.
    """
    if len(parts) == 1:
        return [disk]
    wholes = []
    for part in parts:
        n_rows = int(pack.of_rows(layout_rows(part.rows)).lengths.sum()) + part.n
        wholes.append((part.width + TABLE_BYTES) * n_rows + (3 + len(part.stores)) * PAGE_BYTES * len(pack))
    return in_proportion(disk, wholes, [part.n_bytes for part in parts])


class PackLayouts:
    """The layouts of a pack for a loader's features and policy, one for each part of the features that has rows.

    Attributes
    ----------
    context : Context
        The loader's.
    planning : Planning
    pack : Pack
    parts : list of PartLayouts
    disk : int or None
        Most bytes of all layouts.
    """

    def __init__(self, context: Context, planning: Planning) -> None:
        pack = context.pack
        if pack is None:
            raise ValueError("strategy 'packed' runs the samples of a pack")
        self.context, self.planning, self.pack = context, planning, pack
        policy, parts = planning.policy, parts_with_rows(context.nodes, context.device_rows)
        self.disk = disk = planning.disk
        self._data_bytes = 0 if disk is None or len(parts) < 2 else carried_bytes(pack, context.graph, context.labels)
        disks = [disk] * len(parts)
        if disk is not None and isinstance(policy, StaticPolicy):
            disks = list(disk_of_parts(pack, [part for part, _ in parts], max(0, disk - self._data_bytes)))
        there = find_layouts(pack)
        each = zip(parts, disks, strict=True)
        self.parts = [PartLayouts(context, part, n, planning, there, room) for (part, n), room in each]

    def of_size(self, size: int | float | str | None) -> list[Layouts]:
        """Return the layouts to try for caches of ``size``, in order; an empty tuple if nothing is to be gathered."""
        if not self.parts:
            return [()]
        if size is None:
            return [self._only()]
        wanted = self.wanted(self._rows_of(size))
        found = [wanted]
        if size == "auto":
            least = tuple(part.smallest or each for part, each in zip(self.parts, wanted, strict=True))
            if self._fit(least) or not self.are_there(least):
                found.insert(0, least)
        return list(dict.fromkeys(found))

    def _rows_of(self, size: int | float | str) -> Sequence[int]:
        nodes = self.context.nodes
        if size == "auto":
            return [0] * len(nodes.each)
        return self.context.chosen.pack_rows or rows_of_size(nodes, size)

    def wanted(self, rows: Sequence[int]) -> Layouts:
        """Return the layouts for caches of ``rows`` rows: existing layouts, or those to be made.

        Existing ones may divide the disk in another way than those that would be made.
        """
        each = list(self._with_rows(rows))
        found = tuple(part.wanted(n) for part, n in each)
        if self.disk is None or self.are_there(found):
            return found
        least = tuple(part.least(n) for part, n in each)
        return least if self._fit(least) else found

    def are_there(self, layouts: Layouts) -> bool:
        """Tell whether the pack has the layouts, one for each part."""
        return all(layout in part.there for part, layout in zip(self.parts, layouts, strict=True))

    def folders(self, layouts: Layouts) -> list[str]:
        """List the layouts' folders."""
        return [self.pack.file(layout.name) for layout in layouts]

    def are_of_other_shares(self) -> bool:
        """Tell whether the pack has layouts for these features and this policy, but for other numbers of ranks alone."""
        return bool(self.parts) and all(part.of_other_shares and not part.there for part in self.parts)

    def _fit(self, layouts: tuple[LayoutOptions | None, ...]) -> TypeGuard[Layouts]:
        """Tell whether the pack has a layout for each part, and all fit the disk."""
        there = [layout for layout in layouts if layout is not None]
        if len(there) < len(layouts):
            return False
        return self.disk is None or sum(map(layout_bytes, self.folders(tuple(there)))) + self._data_bytes <= self.disk

    def _with_rows(self, rows: Sequence[int]) -> Iterator[tuple[PartLayouts, int]]:
        """Pair the parts with their number among the rows of all parts of the features."""
        each = zip(self.context.nodes.each, rows, strict=True)
        return zip(self.parts, (n for part, n in each if part.stores and part.n), strict=True)

    def _only(self) -> Layouts:
        """Return the only layouts that the pack has; ValueError if it lacks one, has several, or planned them apart."""
        found = tuple(part.only() for part in self.parts)
        lengths = sorted({each.superbatch for each in found})
        if len(lengths) > 1:
            raise ValueError(
                f"{self.pack.path} has layouts that plan {', '.join(map(str, lengths))} batches together, and a loader runs "
                "batches in one order: cache and length say which to take, or to make"
            )
        return found

    def larger(self, chosen: Layouts, rows: Sequence[int]) -> Layouts:
        """Replace layouts by those for caches of ``rows`` rows, if the pack has these, or lacks the chosen ones as well."""
        found = []
        for layout, wanted, part in zip(chosen, self.wanted(rows), self.parts, strict=True):
            found.append(wanted if wanted in part.there or layout not in part.there else layout)
        return tuple(found)

    def check_disk(self, chosen: Layouts) -> None:
        """Raise OSError (ENOSPC) if existing layouts take more than the disk."""
        for at, each in enumerate(chosen):
            check_disk(self.pack.file(each.name), self._room(at, chosen))

    def make(self, chosen: Layouts) -> list[bool]:
        """Make the layouts that the pack lacks, one after the other; return which these were."""
        with self.context.timer.time("pack"):
            return [part.make(chosen[at], self._room(at, chosen)) for at, part in enumerate(self.parts)]

    def _room(self, at: int, chosen: Layouts) -> int | None:
        """Compute the most bytes of a layout: what the others leave, and no more than its share if it is to be made smaller."""
        disk = self.disk
        if disk is None or len(chosen) == 1:
            return disk
        others = (each for number, each in enumerate(chosen) if number != at)
        taken = sum(layout_bytes(self.pack.file(each.name)) for each in others if self.is_there(each))
        left = max(0, disk - taken - self._data_bytes * (at > 0))
        share = self.parts[at].disk
        if share is None or chosen[at].superbatch or self.is_there(chosen[at]):
            return left
        return min(left, share + self._data_bytes * (at == 0))  # labels come with the first layout

    def is_there(self, layout: LayoutOptions) -> bool:
        """Tell whether the pack has a layout."""
        return os.path.exists(self.pack.file(layout.name))


class PartLayouts:
    """The layouts of a pack for features that have the same rows.

    Parameters
    ----------
    context : Context
    part : Domain
        The features.
    device_rows : int or None
        Number of their rows on the device; None: as many as an existing layout has.
    planning : Planning
    layouts : sequence of LayoutOptions
        All layouts of the pack.
    disk : int or None
        Most bytes of the layout.

    Attributes
    ----------
    sources : dict of str to PackedFeature
    there : list of LayoutOptions
        Layouts of these features by this policy, of any size.
    of_other_shares : list of LayoutOptions
        Those whose plans do not begin anew where the batches of this rank begin.
    """

    def __init__(
        self,
        context: Context,
        part: Domain,
        device_rows: int | None,
        planning: Planning,
        layouts: Sequence[LayoutOptions],
        disk: int | None,
    ) -> None:
        pack, graph, stores = context.pack, context.graph, part.stores
        assert pack is not None
        self.context, self.pack, self.part, self.disk = context, pack, part, disk
        self._policy, self._asked, self._device_rows = planning.policy, planning.superbatch, device_rows
        dtypes = {name: str(store.dtype).removeprefix("torch.") for name, store in stores.items()}
        self.sources = {name: PackedFeature(store.pages, dtypes[name], tuple(store.shape)) for name, store in stores.items()}
        self._rows = layout_rows(part.rows)
        kind = sorted(stores), self._policy.name, self._rows
        self.there = [each for each in layouts if (sorted(each.features), each.policy, each.rows) == kind]
        self._superbatch = 0
        if isinstance(self._policy, PlannedPolicy):
            self._superbatch = packed_length(planning.superbatch, len(context.batches))
        all_there = self.there
        self.there = [each for each in all_there if each.restart == self._restart(each.superbatch)]
        self.of_other_shares = [each for each in all_there if each not in self.there]
        self._digest: str | None = None  # of the policy's scores, None while it is not known
        try:
            with graph.budget.reserve("packing", digest_bytes(self._policy, part.n)):
                self._digest = digest_of(self._policy, self._scores)
        except FileNotFoundError:  # scores need a file of the dataset: the policy is then known by its name alone
            if not isinstance(graph, PackedGraph):
                raise
        if self._digest is not None:
            self.there = [each for each in self.there if each.digest == self._digest]

    @property
    def smallest(self) -> LayoutOptions | None:
        """The layout with the fewest rows in memory that is there; None if there is none."""
        kind = (self._superbatch, self._device_rows or 0)
        there = [each for each in self.there if (each.superbatch, each.device_rows) == kind]
        return min(there, key=lambda each: each.capacity, default=None)

    def only(self) -> LayoutOptions:
        """Return the only layout that the pack has; ValueError if it has none, or several."""
        lengths = [each.superbatch for each in self.there] if isinstance(self._asked, str) else [self._superbatch]
        found = [each for each in self.there if self._device_rows in (None, each.device_rows) and each.superbatch in lengths]
        n_found = len({replace(each, disk=0).name for each in found})
        if n_found != 1:
            n = len(self.context.batches)
            of_ranks = f" for {n} batches a rank" if n < self.pack.n_batches else ""
            others = ", ".join(sorted({str(each.superbatch) for each in self.of_other_shares}))
            raise ValueError(
                f"{self.pack.path} has {n_found} layouts of {list(self.part.stores)} with policy {self._policy.name!r}"
                f"{' that decides as this one' if self._digest else ''}{of_ranks}; cache says which to take, or to make, "
                "as in Packed(pack, cache='10%')"
                + f" (those for another number of ranks plan {others} batches together)"
                * bool(others)
            )
        return fitting(self.pack, found, self.disk) or found[0]

    def _restart(self, superbatch: int) -> int:
        """Compute the batches of this rank, after which planning begins anew; 0 if a superbatch ends there in any case."""
        n = len(self.context.batches)
        return n if superbatch and n < self.pack.n_batches and n % superbatch else 0

    def _named(self, capacity: int) -> tuple[LayoutOptions, list[LayoutOptions]]:
        """Return the options of a layout for ``capacity`` rows, and the layouts that are there with these, of any size."""
        names, policy, digest = tuple(self.part.stores), self._policy.name, self._digest or ""
        numbers = capacity, self._superbatch, self._device_rows or 0
        restart = self._restart(self._superbatch)
        options = LayoutOptions(names, policy, *numbers, digest, rows=self._rows, restart=restart)
        there = [each for each in self.there if replace(each, digest=options.digest, disk=0).name == options.name]
        return options, there if len({each.digest for each in there}) == 1 else []

    def least(self, capacity: int) -> LayoutOptions | None:
        """Return the layout for caches of ``capacity`` rows that takes least disk, of those that are there; None: none is."""
        return min(self._named(capacity)[1], key=lambda each: layout_bytes(self.pack.file(each.name)), default=None)

    def wanted(self, capacity: int) -> LayoutOptions:
        """Return the layout for caches of ``capacity`` rows: an existing layout, or one to be made."""
        options, there = self._named(capacity)
        if not there:
            return options
        found, disk = fitting(self.pack, there, self.disk), self.disk
        if found is None and disk is not None and not self._superbatch:  # a smaller one can be made: its segments share more rows
            found = replace(there[0], disk=disk)
        return found or there[0]

    def make(self, options: LayoutOptions, disk: int | None) -> bool:
        """Make a layout of at most ``disk`` bytes unless the pack has it; return whether this call made it."""
        context, graph = self.context, self.context.graph
        return make_layout(
            self.pack,
            options,
            self._policy,
            same_scores(self._scores, options.digest),
            self.sources,
            graph.reader,
            graph.budget,
            node_data=data_of(self.pack, graph, context.labels),
            disk=disk,
        )

    def _scores(self, policy: StaticPolicy) -> npt.NDArray[Any]:
        row_bytes = sum(source.file.row_bytes for source in self.sources.values())
        graph, rows = self.context.graph, self.part.rows
        # Counts are of all nodes, those without rows included.
        with graph.budget.reserve("packing", 8 * graph.num_nodes * bool(rows.kinds)):
            with graph.policy_inputs(row_bytes, counts=self.pack.counts, rows=rows) as inputs:
                scores: npt.NDArray[Any] = inputs.scores(policy)
            return scores


# What Auto compares: the layouts that are there, and what others would take.


def layouts_on_disk(
    each_policy: Mapping[str, PackLayouts], pack_rows: Sequence[int], width: int, gap_bytes: int
) -> tuple[dict[str, int], dict[str, OnDisk]]:
    """Return, by policy, the bytes of the layouts that the pack has for caches of ``pack_rows``, and the disk space counted.

    Space is counted for layouts that share rows, and for layouts still to be made that the disk may not hold. ``width``: bytes
    of a mean row.
    """
    layouts, counted = {}, {}
    for policy, of_policy in each_policy.items():
        wanted, pack, batches = of_policy.wanted(pack_rows), of_policy.pack, of_policy.context.batches
        needs = [pack.of_rows(options.rows) for options in wanted]
        widths = [list(part.part.row_bytes.values()) for part in of_policy.parts]
        if wanted and of_policy.are_there(wanted):
            folders = of_policy.folders(wanted)
            sizes = list(map(layout_bytes, folders))
            layouts[policy] = sum(sizes)
            each = zip(folders, needs, widths, sizes, strict=True)
            found = [(shared_there(folder, of, own, gap_bytes, size), sum(own)) for folder, of, own, size in each]
            if any(one.length > 1 for one, _ in found):
                counted[policy] = joined(found, width).of_rank(batches.world_size)
        elif of_policy.disk is not None and wanted:
            # A little is left for parts whose size is known only when a layout is made.
            disk, context = of_policy.disk, of_policy.context
            left = max(0, disk - disk // 64 - carried_bytes(pack, context.graph, context.labels))
            most = sum(_most_bytes(options, of, own) for options, of, own in zip(wanted, needs, widths, strict=True))
            if most > left:
                shares = [part.disk or 0 for part in of_policy.parts]
                rooms = [left * share // max(1, sum(shares)) for share in shares]
                each_one = zip(wanted, needs, widths, rooms, strict=True)
                try:
                    found = [
                        (_counted(context, options, of, own, gap_bytes, room), sum(own)) for options, of, own, room in each_one
                    ]
                    counted[policy] = joined(found, width).of_rank(batches.world_size)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    counted[policy] = OnDisk(most, 0, 0, fails=str(error.strerror))
    return layouts, counted


def _most_bytes(options: LayoutOptions, needs: RowNeeds, widths: Sequence[int]) -> int:
    """Bound the bytes of a layout in which each batch has a copy of its rows."""
    rows = int(needs.lengths.sum()) + options.capacity + options.device_rows
    return (sum(widths) + 20) * rows + 4 * 4096 * len(needs)


def _counted(
    context: Context, options: LayoutOptions, needs: RowNeeds, widths: Sequence[int], gap_bytes: int, disk: int
) -> OnDisk:
    """Count the disk space of a layout still to be made; OSError (ENOSPC) if it does not fit."""
    budget = context.graph.budget
    sizes = layout_sizes(options, widths, budget)
    if options.policy == PLANNED:
        return count_planned(needs, sizes, budget)
    with budget.reserve("cost model", 8 * needs.n_rows):
        return count_static(needs, sizes, needs.counts(), widths, gap_bytes, budget, disk)
