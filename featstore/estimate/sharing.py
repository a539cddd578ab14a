"""Sizes of a pack's layouts on a small disk, and the reads of their shared rows, counted for the cost model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.estimate.cost import ADMIT_TABLE_BYTES, LOAD_TABLE_BYTES, PLANNED, ROW_TABLE_BYTES, OnDisk
from featstore.pack.record import RowNeeds
from featstore.pack.segments import Stored, segments
from featstore.pack.tables import TierTables
from featstore.pack.tiers import SECTION_BYTES, TABLE_SECTIONS, DiskRows, Sizes, assign_tiers, by_need, segmentation, windows
from featstore.plan.planmemory import planning_bytes
from featstore.plan.simulate import simulate
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.rundir import DiskQuota

__all__ = ["count_planned", "count_static", "joined", "merged_reads", "shared_there"]

Int64s = npt.NDArray[np.int64]
LOOKED_AT = 8  # batches, in whole segments, whose reads are counted


def merged_reads(places: npt.NDArray[np.integer], row_bytes: int, gap_bytes: int) -> tuple[int, int]:
    """Count the reads, and their bytes, of rows at ascending ``places``; pages at most ``gap_bytes`` apart share a read."""
    if not len(places):
        return 0, 0
    begin = places.astype(np.int64) * row_bytes
    first, last = begin // PAGE_BYTES, (begin + row_bytes - 1) // PAGE_BYTES
    starts = np.flatnonzero(np.concatenate([[True], first[1:] - last[:-1] - 1 > gap_bytes // PAGE_BYTES]))
    ends = np.concatenate([starts[1:] - 1, [len(places) - 1]])
    return len(starts), int((last[ends] - first[starts] + 1).sum()) * PAGE_BYTES


class _Counted:
    """Reads of some batches, scaled to an epoch."""

    def __init__(self, widths: Sequence[int], gap_bytes: int) -> None:
        self._widths, self._gap_bytes = widths, gap_bytes
        self._batches = self._packed = self._reads = self._n_bytes = 0

    def add(self, places: npt.NDArray[np.integer], n_packed: int) -> None:
        self._batches += 1
        self._packed += n_packed
        for row_bytes in self._widths:
            reads, n_bytes = merged_reads(places, row_bytes, self._gap_bytes)
            self._reads += reads
            self._n_bytes += n_bytes

    def on_disk(self, length: int, disk_bytes: int, rows: int, n_batches: int) -> OnDisk:
        scale = n_batches / max(1, self._batches)
        packed, reads, n_bytes = (round(scale * count) for count in (self._packed, self._reads, self._n_bytes))
        return OnDisk(disk_bytes, rows, packed, length, reads, n_bytes)


def count_static(
    needs: RowNeeds,
    sizes: Sizes,
    scores: npt.NDArray[np.generic],
    widths: Sequence[int],
    gap_bytes: int,
    budget: Budget,
    disk: int,
) -> OnDisk:
    """Count the disk space of a static policy's layout, and an epoch's reads of shared rows, before the layout is made.

    ``sizes`` are the sizes of the layout, ``widths`` the bytes of a row of each feature. The length of the segments is that of
    the layout; reads are counted on the first segments, of eight batches at least. OSError (ENOSPC): not even one segment of all
    batches fits.
    """
    n = needs.n_rows
    with budget.reserve("cost model", 16 * n):
        tier_of_row = assign_tiers(scores, sizes.device_rows, sizes.host_rows)
        batches = DiskRows(needs, tier_of_row)
        found = segmentation(needs, batches, sizes, tier_of_row, budget, DiskQuota(disk))
        counted = _Counted(widths, gap_bytes)
        if found.length == 1:
            for number in range(min(LOOKED_AT, len(needs))):
                counted.add(np.empty(0, np.int64), len(batches[number]))
        else:
            place_of_row, before = np.full(n, -1, np.int64), 0  # places in the whole file: two segments' rows may share a page
            for segment in segments(batches, n, found.length, sizes.row_bytes, budget=budget):
                place_of_row[segment.rows] = before + np.arange(len(segment.rows))
                for number in range(segment.first, segment.stop):
                    places = place_of_row.take(batches[number])
                    places = np.sort(places[places >= 0])
                    counted.add(places, len(batches[number]) - len(places))
                place_of_row[segment.rows] = -1
                before += len(segment.rows)
                if segment.stop >= LOOKED_AT:
                    break
        return counted.on_disk(found.length, found.disk_bytes, found.rows, needs.n_batches)


def count_planned(needs: RowNeeds, sizes: Sizes, budget: Budget) -> OnDisk:
    """Count the disk space of a layout by Belady's policy; all superbatches of all epochs are planned."""
    n, rows = needs.n_rows, []
    with budget.reserve("cost model", 20 * n if sizes.device_rows else 0):
        tier_of_row = assign_tiers(by_need(needs), sizes.device_rows, 0) if sizes.device_rows else None
        for window in windows(needs, sizes, tier_of_row):
            with budget.reserve("simulation", planning_bytes(n, window.n_accesses, longest=window.longest)):
                rows.append(simulate(window, sizes.host_rows, PLANNED))
    packed = np.concatenate([np.empty(0, np.int64), *rows])
    total = int(packed.sum())
    stored = sizes.n_bytes(min(sizes.device_rows, n), 0, Stored(1, packed, np.empty(0, np.int64), 0))
    tables = ROW_TABLE_BYTES * int(needs.lengths.sum()) + (LOAD_TABLE_BYTES + ADMIT_TABLE_BYTES) * total
    tables += (8 * int(needs.lengths.sum()) if sizes.device_rows else 0) + 8 * sizes.device_rows
    return OnDisk(stored + tables + SECTION_BYTES * TABLE_SECTIONS * len(needs), total, total // max(1, needs.epochs))


def shared_there(folder: str, needs: RowNeeds, widths: Sequence[int], gap_bytes: int, n_bytes: int) -> OnDisk:
    """Count an existing layout's rows on disk, and its reads of shared rows, from its tables."""
    tables = TierTables(folder, needs, len(widths))
    try:
        if tables.shared is None:
            rows = int(tables.n_packed.sum())
            return OnDisk(n_bytes, rows, rows // max(1, needs.epochs))
        counted = _Counted(widths, gap_bytes)
        whole = -(-LOOKED_AT // tables.shared.length) * tables.shared.length
        for number in range(min(whole, len(needs))):
            counted.add(tables.shared.addresses(number), int(tables.n_packed[number]))
        rows = int(tables.n_packed.sum()) + len(tables.shared)
        return counted.on_disk(tables.shared.length, n_bytes, rows, needs.n_batches)
    finally:
        tables.close()


def joined(each: Sequence[tuple[OnDisk, int]], row_bytes: int) -> OnDisk:
    """Add up what layouts of the same batches take, each with the bytes of its rows; rows count as rows of ``row_bytes``."""
    if len(each) == 1:
        return each[0][0]
    rows, packed = (
        sum(getattr(found, name) * width for found, width in each) // max(1, row_bytes) for name in ("rows", "packed")
    )
    return OnDisk(
        sum(found.disk_bytes for found, _ in each),
        rows,
        packed,
        max(found.length for found, _ in each),
        sum(found.reads for found, _ in each),
        sum(found.n_bytes for found, _ in each),
        next((found.fails for found, _ in each if found.fails), ""),
    )
