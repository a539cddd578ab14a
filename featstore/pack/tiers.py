"""Making of a frozen layout's address tables (DiskGNN's four levels): the tier and address of each row of each batch.

Rows go to the device first, then to the host's cache, the rest to the disk. There they go into the batch's own extent, or into a
cache that a segment of consecutive batches shares, if the extents of all batches would take too much. Tables are made once, in
files of sections, and read batch by batch (:mod:`.tables`): no row is looked up while batches run.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.cache.base import Policy, PolicyContext, StaticPolicy
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.planned import NO_ROWS, PlannedBatch, PlannedPolicy
from featstore.cache.select import top_rows
from featstore.config import format_size
from featstore.gather.plan import NO_CHANGES
from featstore.pack.record import RowNeeds
from featstore.pack.segments import Segment, Segmentation, Stored, segments, shortest_segments
from featstore.pack.tables import DEVICE, FILL, PLAN, SHARED, SHARED_HEAD, TABLES
from featstore.plan.planfile import Append, write_plan
from featstore.plan.planmemory import planning_bytes
from featstore.plan.trace import Trace
from featstore.storage.rundir import DiskQuota
from featstore.storage.sections import SectionWriter

__all__ = [
    "SECTION_BYTES",
    "TABLE_SECTIONS",
    "DiskRows",
    "ScoresOf",
    "Sizes",
    "assign_tiers",
    "by_need",
    "make_tables",
    "segmentation",
    "windows",
    "write_static",
]

Ids = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
ScoresOf: TypeAlias = Callable[[StaticPolicy], npt.NDArray[Any]]

SECTION_BYTES, TAIL_BYTES = 32, 96  # of a file of sections: an array's entry in the index, the end
TABLE_SECTIONS = 7  # sections of a batch, at most: its plan, and two arrays of the device's rows


def _narrow(rows: Ids) -> Ids:
    return rows.astype(np.int32) if not len(rows) or int(rows.max()) < 2**31 else rows


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layout: the rows of its tiers, and the bytes of its rows on disk.

    A planned policy plans ``superbatch`` batches together, from an empty cache, and begins anew after every ``restart`` batches
    of an epoch (0: after all). ``row_bytes`` is the sum over all features.
    ``n_bytes(n_device, n_host, stored)`` returns the bytes on disk of all rows, those that fill the two tiers in memory included.
    ``group_rows`` has the rows of a piece of shared rows for each feature, and is kept with the tables.
    """

    device_rows: int
    host_rows: int
    superbatch: int
    restart: int
    row_bytes: int
    n_bytes: Callable[[int, int, Stored], int]
    group_rows: Sequence[int]


class DiskRows(Sequence[Ids]):
    """For each batch, the rows that neither device nor host holds."""

    def __init__(self, needs: RowNeeds, tier_of_row: npt.NDArray[np.int32]) -> None:
        self._needs, self._tier_of_row = needs, tier_of_row

    def __len__(self) -> int:
        return len(self._needs)

    def __getitem__(self, number: Any) -> Any:
        ids = self._needs.ids(number)
        return ids[self._tier_of_row.take(ids) == -1]


class _Table:
    """A file of tables in the making: its bytes are counted and, with a writer, written."""

    def __init__(self, writer: SectionWriter | None) -> None:
        self.writer = writer
        self.n_bytes = TAIL_BYTES

    def append(self, array: Ids) -> int:
        self.n_bytes += SECTION_BYTES + array.nbytes
        return 0 if self.writer is None else self.writer.append(array)


class _Writers:
    """The files of tables in the making; ``plan`` is finished last, as a sign that all are complete. No folder: only counted."""

    def __init__(self, stack: contextlib.ExitStack, folder: str | None, disk: DiskQuota) -> None:
        self._stack, self._folder, self._disk = stack, folder, disk
        self._open: dict[str, _Table] = {}
        for name in TABLES if folder is not None else ():  # remains of a process that was killed before its plan was complete
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(str(folder), name))

    def __getitem__(self, name: str) -> _Table:
        if name not in self._open:
            writer = None
            if self._folder is not None:
                writer = self._stack.enter_context(SectionWriter(os.path.join(self._folder, name), name, self._disk))
            self._open[name] = _Table(writer)
        return self._open[name]

    @property
    def n_bytes(self) -> int:
        return sum(table.n_bytes for table in self._open.values())

    def finish(self) -> None:
        _ = self[PLAN]  # exists even without batches
        for name in sorted(self._open, key=lambda name: name == PLAN):
            writer = self._open[name].writer
            if writer is not None:
                writer.finish(durable=True).close()


def make_tables(
    needs: RowNeeds, sizes: Sizes, policy: Policy, scores_of: ScoresOf, budget: Budget, folder: str, disk: DiskQuota
) -> None:
    """Assign each row of a pack's batches a tier and an address, and write the tables to ``folder``.

    A static ``policy`` chooses the rows of both device and host; with a planned one the device holds the rows that most batches
    need. ``scores_of`` returns a static policy's checked scores. If copies of all rows for all batches do not fit the rest of
    ``disk``, a static policy's batches share caches on disk. OSError (ENOSPC): ``disk`` is too small even so; the message has the
    least that suffices.

    Takes 16 bytes a row besides the policy's scores. Liu et al., DiskGNN, SIGMOD 2025, sections 4 and 5.1.
    """
    n = needs.n_rows
    with contextlib.ExitStack() as stack:
        files = _Writers(stack, folder, disk)
        if isinstance(policy, StaticPolicy):
            with budget.reserve("packing", (16 + policy.score_bytes) * n):
                scores = scores_of(policy)
                fixed = assign_tiers(scores, sizes.device_rows, sizes.host_rows)
                del scores
                _plan_static(needs, sizes, fixed, files, budget, disk)
        elif isinstance(policy, PlannedPolicy):
            with budget.reserve("packing", 24 * n if sizes.device_rows else 0):
                tier_of_row = assign_tiers(by_need(needs), sizes.device_rows, 0) if sizes.device_rows else None
                _plan_planned(needs, sizes, policy, tier_of_row, files, budget, disk)
        else:
            raise ValueError(f"policy {policy.name!r} is neither static nor planned")
        files.finish()


def by_need(needs: RowNeeds) -> npt.NDArray[np.float64]:
    """Score each row by the number of batches that need it; -inf: none does."""
    counts = needs.counts().astype(np.float64)
    counts[counts == 0] = -np.inf
    return counts


def assign_tiers(scores: npt.NDArray[Any], n_device: int, n_host: int) -> npt.NDArray[np.int32]:
    """Assign the rows of highest score to the device, the next ones to the host.

    Returns for each row its slot in the host's cache, -2 - its slot on the device, or -1 for the disk.
    """
    n = len(scores)
    device = top_rows(scores, n_device)
    tier_of_row = np.full(n, -1, np.int32)
    tier_of_row[top_rows(scores, n_device + n_host)] = 0
    tier_of_row[device] = -2 - np.arange(len(device), dtype=np.int32)
    host = np.flatnonzero(tier_of_row == 0)
    tier_of_row[host] = np.arange(len(host), dtype=np.int32)
    return tier_of_row


def _fill(files: _Writers, tier_of_row: npt.NDArray[np.int32] | None) -> None:
    """Write the first rows of host and device, each ascending: the i-th in slot i."""
    files[FILL].append(NO_ROWS if tier_of_row is None else np.flatnonzero(tier_of_row >= 0))
    files[FILL].append(NO_ROWS if tier_of_row is None else np.flatnonzero(tier_of_row <= -2))


def _leave_device(ids: Ids, tier_of_row: npt.NDArray[np.int32] | None, sizes: Sizes, files: _Writers) -> Ids:
    """Write the positions and slots of a batch's rows on the device, if any; return the other rows."""
    if tier_of_row is None or not sizes.device_rows:
        return ids
    tier = tier_of_row.take(ids)
    on_device = tier <= -2
    files[DEVICE].append(np.flatnonzero(on_device).astype(np.int32))
    files[DEVICE].append(-2 - tier[on_device])
    return ids[~on_device]


def write_static(
    append: Append, ids: Ids, tier_of_row: npt.NDArray[np.int32], place_of_row: npt.NDArray[np.int32] | None = None
) -> Int64s:
    """Write the plan of a batch for a cache that does not change; return the places of its shared rows, ascending.

    ``place_of_row`` has the place of each row in the segment's cache, or -1; None: batches share no rows.
    """
    slots = tier_of_row.take(ids)
    missed = np.flatnonzero(slots < 0)
    order, shared = np.argsort(ids[missed]), NO_ROWS
    if place_of_row is not None:
        places = place_of_row.take(ids[missed])
        order = np.concatenate([order[places[order] < 0], np.argsort(places)[np.count_nonzero(places < 0) :]])
        shared = np.sort(places[places >= 0]).astype(np.int64)
    write_plan(append, PlannedBatch(slots, NO_CHANGES), missed=missed[order])
    return shared


def _plan_static(
    needs: RowNeeds, sizes: Sizes, tier_of_row: npt.NDArray[np.int32], files: _Writers, budget: Budget, disk: DiskQuota
) -> None:
    """Write the tables for a static policy: rows in memory stay; others go to extents or, if too many, to segments' caches."""
    batches, n = DiskRows(needs, tier_of_row), needs.n_rows
    length = 1
    if disk.total is not None and len(needs):
        length = segmentation(needs, batches, sizes, tier_of_row, budget, disk).length
    _fill(files, tier_of_row)
    place_of_row = np.full(n if length > 1 else 0, -1, np.int32)
    if length > 1:
        files[SHARED].append(np.array([length, *sizes.group_rows], np.int64))
    before = 0
    for segment in _segments(batches, n, length, sizes.row_bytes, budget):
        if length > 1:
            files[SHARED].append(_narrow(segment.rows))
            place_of_row[segment.rows] = np.arange(len(segment.rows), dtype=np.int32)
        for number in range(segment.first, segment.stop):
            ids = _leave_device(needs.ids(number), tier_of_row, sizes, files)
            shared = write_static(files[PLAN].append, ids, tier_of_row, place_of_row if length > 1 else None)
            if length > 1:
                files[SHARED].append(_narrow(shared + before))
        place_of_row[segment.rows] = -1
        before += len(segment.rows)


def _segments(batches: Sequence[Ids], n: int, length: int, row_bytes: int, budget: Budget) -> Iterator[Segment]:
    if length > 1:
        yield from segments(batches, n, length, row_bytes, budget=budget)
    else:
        yield Segment(0, len(batches), NO_ROWS, 0, NO_ROWS, NO_ROWS, NO_ROWS)


def segmentation(
    needs: RowNeeds,
    batches: Sequence[Ids],
    sizes: Sizes,
    tier_of_row: npt.NDArray[np.int32],
    budget: Budget,
    disk: DiskQuota,
) -> Segmentation:
    """Find the shortest segments of batches that share a cache, so that a layout fits the rest of ``disk``; 1: no sharing.

    OSError (ENOSPC): no length fits; the message has the bytes needed.
    """
    assert disk.total is not None
    n = len(needs)
    n_device, n_host = int(np.count_nonzero(tier_of_row <= -2)), int(np.count_nonzero(tier_of_row >= 0))
    accesses = int(needs.lengths.sum())
    on_device = sum(int(np.count_nonzero(tier_of_row.take(needs.ids(b)) <= -2)) for b in range(n)) if n_device else 0
    on_disk = sum(len(ids) for ids in batches)
    tables = disk.used + 4 * (accesses - on_device + on_disk) + 5 * SECTION_BYTES * n + TAIL_BYTES
    tables += 8 * (n_device + n_host) + 2 * SECTION_BYTES + TAIL_BYTES
    if sizes.device_rows:
        tables += 8 * on_device + 2 * SECTION_BYTES * n + TAIL_BYTES
    width = 4 if needs.n_rows < 2**31 else 8

    def takes(stored: Stored) -> int:
        n_cached = int(stored.cached.sum())
        found = tables + sizes.n_bytes(n_device, n_host, stored)
        if stored.length > 1:
            wide = 4 if n_cached < 2**31 else 8
            found += 8 * (1 + len(sizes.group_rows)) + width * n_cached + wide * stored.shared
            found += SECTION_BYTES * (SHARED_HEAD + len(stored.cached) + n) + TAIL_BYTES
        return found

    return shortest_segments(batches, needs.n_rows, sizes.row_bytes, disk.total, takes=takes, budget=budget)


def windows(needs: RowNeeds, sizes: Sizes, tier_of_row: npt.NDArray[np.int32] | None) -> Iterator[Trace]:
    """Yield the trace of each superbatch of each epoch, in order, without the rows on the device."""
    n = max(1, sizes.restart or needs.n_batches)

    def rest(begin: int, batch: int) -> Ids:
        ids = needs.ids(begin + batch)
        return ids if tier_of_row is None else ids[tier_of_row.take(ids) == -1]

    for start in range(0, len(needs), n):
        for begin in range(start, start + n, sizes.superbatch):
            count = min(sizes.superbatch, start + n - begin)
            lengths = needs.lengths[begin : begin + count]
            if tier_of_row is not None:
                lengths = np.array([len(rest(begin, b)) for b in range(count)], np.int64)
            yield Trace.reading(partial(rest, begin), lengths, needs.n_rows)


def _plan_planned(
    needs: RowNeeds,
    sizes: Sizes,
    policy: PlannedPolicy,
    tier_of_row: npt.NDArray[np.int32] | None,
    files: _Writers,
    budget: Budget,
    disk: DiskQuota,
) -> None:
    """Write the tables for a planned policy; OSError (ENOSPC), with the bytes needed, if ``disk`` is too small for the rows."""
    before = disk.used
    try:
        n_missed = _plan_windows(needs, sizes, policy, tier_of_row, files, budget)
    except OSError as error:
        if disk.total is None or error.errno != errno.ENOSPC:
            raise
        files = _Writers(contextlib.ExitStack(), None, disk)
        n_missed = _plan_windows(needs, sizes, policy, tier_of_row, files, budget)
        if before + files.n_bytes <= disk.total:
            raise  # the drive is full
    n_device = 0 if tier_of_row is None else int(np.count_nonzero(tier_of_row <= -2))
    needed = before + files.n_bytes + sizes.n_bytes(n_device, 0, Stored(1, n_missed, np.empty(0, np.int64), 0))
    if disk.total is not None and needed > disk.total:
        raise OSError(
            errno.ENOSPC,
            f"the batches' rows and tables take {format_size(needed)} ({needed} bytes) on disk, of which "
            f"{format_size(disk.total)} may be used: with policy {policy.name!r} each batch has a copy of its own rows; give "
            "more disk, a larger cache, or a static policy such as 'frequency', whose batches share rows",
        )


def _plan_windows(
    needs: RowNeeds,
    sizes: Sizes,
    policy: PlannedPolicy,
    tier_of_row: npt.NDArray[np.int32] | None,
    files: _Writers,
    budget: Budget,
) -> Int64s:
    """Plan a cache window by window, each from an empty cache, and write the plans; return each batch's number of misses."""
    _fill(files, tier_of_row)
    n_missed, number, checked = np.zeros(len(needs), np.int64), 0, CheckedPolicy(policy)
    for trace in windows(needs, sizes, tier_of_row):
        n_bytes = planning_bytes(needs.n_rows, trace.n_accesses, longest=trace.longest, checked=checked.is_checked)
        with budget.reserve("planner", n_bytes):
            checked.start(sizes.host_rows, PolicyContext(needs.n_rows, 1))
            for planned in checked.plan(trace.horizon(), first=number):
                left = _leave_device(needs.ids(number), tier_of_row, sizes, files)
                n_missed[number] = len(write_plan(files[PLAN].append, planned, left))
                number += 1
    return n_missed
