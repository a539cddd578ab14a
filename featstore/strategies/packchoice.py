"""The layouts of a pack that ``Auto`` compares: those that are there, and what others would take."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import replace

from featstore.estimate.cost import PLANNED, STATIC, OnDisk
from featstore.estimate.length import Planning
from featstore.estimate.sharing import count_planned, count_static, joined, shared_there
from featstore.pack.layout import LayoutOptions, find_layouts, fitting, layout_bytes, layout_rows
from featstore.pack.makelayout import layout_sizes
from featstore.pack.nodedata import carried_bytes
from featstore.pack.record import RowNeeds
from featstore.strategies.context import Context
from featstore.strategies.domain import Domain
from featstore.strategies.packlayouts import disk_of_parts, packed_length

__all__ = ["existing_layouts", "layouts_on_disk"]


def _layouts(context: Context, planning: Planning, policy: str, pack_rows: Sequence[int]) -> list[tuple[Domain, LayoutOptions]]:
    """Make the options of the layouts that strategy ``"packed"`` would run, each with the features that it is of."""
    pack, nodes = context.pack, context.nodes
    assert pack is not None
    superbatch = packed_length(planning.superbatch, pack.n_batches) if policy == PLANNED else 0
    n_device = context.device_rows or (0,) * len(nodes.each)
    return [
        (part, LayoutOptions(tuple(part.stores), policy, n, superbatch, n_on_device, rows=layout_rows(part.rows)))
        for part, n, n_on_device in zip(nodes.each, pack_rows, n_device, strict=True)
        if part.stores and part.n
    ]


def _disks(context: Context, parts: Sequence[Domain], policy: str, disk: int | None) -> list[int | None]:
    """Compute the most bytes of each part's layout: under a static policy its share, else what all together may have."""
    assert context.pack is not None
    if disk is None or policy != STATIC:
        return [disk] * len(parts)
    return list(disk_of_parts(context.pack, parts, disk))


def existing_layouts(context: Context, planning: Planning, pack_rows: Sequence[int]) -> dict[str, list[str]]:
    """Return the folders of the layouts that a pack has for a loader's features and tiers, by policy, if none lacks.

    A static policy's layout that takes too much disk does not count: a smaller one is made beside it.
    """
    pack = context.pack
    assert pack is not None
    there, found = find_layouts(pack), dict[str, list[str]]()
    for policy in (STATIC, PLANNED):
        asked = _layouts(context, planning, policy, pack_rows)
        disks = _disks(context, [part for part, _ in asked], policy, planning.disk if policy == STATIC else None)
        layouts = [
            fitting(pack, (each for each in there if replace(each, disk=0).name == options.name), disk)
            for (_, options), disk in zip(asked, disks, strict=True)
        ]
        if layouts and None not in layouts:
            found[policy] = [pack.file(layout.name) for layout in layouts if layout is not None]
    return found


def layouts_on_disk(
    context: Context, planning: Planning, pack_rows: Sequence[int], width: int, gap_bytes: int
) -> tuple[dict[str, int], dict[str, OnDisk]]:
    """Return, by policy, the bytes of the layouts that the pack has for these features and tiers, and the disk space counted.

    Space is counted for layouts that share rows, and for layouts still to be made that the disk may not hold. ``width``: bytes
    of a mean row.
    """
    pack = context.pack
    assert pack is not None
    layouts, counted = {}, {}
    there = existing_layouts(context, planning, pack_rows)
    # A little is left for parts whose size is known only when a layout is made.
    disk = (
        None
        if planning.disk is None
        else planning.disk - planning.disk // 64 - carried_bytes(pack, context.graph, context.labels)
    )
    for policy in (STATIC, PLANNED):
        asked = _layouts(context, planning, policy, pack_rows)
        needs = [pack.of_rows(options.rows) for _, options in asked]
        widths = [list(part.row_bytes.values()) for part, _ in asked]
        if policy in there:
            sizes = [layout_bytes(folder) for folder in there[policy]]
            layouts[policy] = sum(sizes)
            each = zip(there[policy], needs, widths, sizes, strict=True)
            found = [(shared_there(folder, of, own, gap_bytes, size), sum(own)) for folder, of, own, size in each]
            if any(one.length > 1 for one, _ in found):
                counted[policy] = joined(found, width)
        elif disk is not None and asked:
            most = sum(_most_bytes(options, of, own) for (_, options), of, own in zip(asked, needs, widths, strict=True))
            if most > disk:
                rooms = _disks(context, [part for part, _ in asked], policy, disk)
                each_one = zip(asked, needs, widths, rooms, strict=True)
                try:
                    found = [
                        (_counted(context, options, of, own, gap_bytes, room or 0), sum(own))
                        for (_, options), of, own, room in each_one
                    ]
                    counted[policy] = joined(found, width)
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
