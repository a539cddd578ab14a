"""The address tables of a frozen layout (DiskGNN's four levels): which tier holds each row of each batch, and where.

Rows go to the device first, then to the host's cache, the rest to the disk: into the batch's own extent, or, where those of all
batches would be too much, into the cache that a segment of consecutive batches shares. Tables are made once, in files of
sections, and read batch by batch: nothing is looked up while batches run.
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

from featstore.cache.base import Policy, PolicyContext, StaticPolicy
from featstore.cache.checkedplans import CheckedPolicy
from featstore.cache.planned import NO_ROWS, PlannedBatch, PlannedPolicy
from featstore.cache.select import top_rows
from featstore.config import Budget, format_size
from featstore.errors import CorruptionError
from featstore.gather.plan import NO_CHANGES, BatchPlan, DeviceRows, Part, Tier
from featstore.pack.record import OfflineSamples
from featstore.pack.segments import Segment, Segmentation, Stored, segments, shortest_segments
from featstore.plan.planfile import PlanFile, write_plan
from featstore.plan.planmemory import planning_bytes
from featstore.plan.trace import Trace
from featstore.storage.rundir import DiskBudget
from featstore.storage.sections import SectionFile, SectionWriter

__all__ = [
    "TABLES",
    "DiskRows",
    "ScoresOf",
    "SharedRows",
    "Sizes",
    "TierTables",
    "assign_tiers",
    "make_tables",
    "segmentation",
    "windows",
]

Ids = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
ScoresOf: TypeAlias = Callable[[StaticPolicy], npt.NDArray[Any]]

TABLES = PLAN, FILL, DEVICE, SHARED = "plan", "fill", "device", "shared"  # files
SECTION_BYTES, TAIL_BYTES = 32, 96  # of a file of sections: an array's entry in the index, the end
_HEAD = 1  # sections of the file of shared rows before those of the segments


def _narrow(rows: Ids) -> Ids:
    return rows.astype(np.int32) if not len(rows) or int(rows.max()) < 2**31 else rows


@dataclass(frozen=True)
class Sizes:
    """What a layout's tables are made for, and what the rows will take.

    Parameters
    ----------
    device_rows, host_rows : int
        Rows of these tiers.
    superbatch : int
        Batches that a planned policy plans together, from an empty cache.
    row_bytes : int
        Of all features together.
    n_bytes : callable
        ``n_bytes(n_device, n_host, stored)``: bytes on disk of all rows, those of the two tiers in memory among them.
    group_rows : sequence of int
        Kept with the tables: rows of a piece of shared rows, a feature.
    """

    device_rows: int
    host_rows: int
    superbatch: int
    row_bytes: int
    n_bytes: Callable[[int, int, Stored], int]
    group_rows: Sequence[int]


class DiskRows(Sequence[Ids]):
    """The rows of each batch that neither device nor host holds."""

    def __init__(self, pack: OfflineSamples, tier_of_row: npt.NDArray[np.int32]) -> None:
        self._pack, self._tier_of_row = pack, tier_of_row

    def __len__(self) -> int:
        return len(self._pack)

    def __getitem__(self, number: Any) -> Any:
        ids = self._pack.ids(number)
        return ids[self._tier_of_row[ids] == -1]


class _Table:
    """A file of tables under way: counted and, with a writer, written."""

    def __init__(self, writer: SectionWriter | None) -> None:
        self.writer = writer
        self.n_bytes = TAIL_BYTES

    def append(self, array: Ids) -> int:
        self.n_bytes += SECTION_BYTES + array.nbytes
        return 0 if self.writer is None else self.writer.append(array)


class _Writers:
    """The files of tables under way; ``plan`` is finished last, so that it says that all are there. No folder: only counted."""

    def __init__(self, stack: contextlib.ExitStack, folder: str | None, disk: DiskBudget) -> None:
        self._stack, self._folder, self._disk = stack, folder, disk
        self._open: dict[str, _Table] = {}
        for name in TABLES if folder is not None else ():  # of a maker that was killed before its plan was whole
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
        _ = self[PLAN]  # also of no batches
        for name in sorted(self._open, key=lambda name: name == PLAN):
            writer = self._open[name].writer
            if writer is not None:
                writer.finish(durable=True).close()


def make_tables(
    pack: OfflineSamples, sizes: Sizes, policy: Policy, scores_of: ScoresOf, budget: Budget, folder: str, disk: DiskBudget
) -> None:
    """Decide where each row of a pack's batches is, and write it to ``folder``.

    Parameters
    ----------
    pack : OfflineSamples
    sizes : Sizes
    policy : Policy
        Of the host's rows: a static one, which also says which rows the device holds, or a planned one; the device then holds
        the rows that most batches need.
    scores_of : callable
        Returns a static policy's scores, checked.
    budget : Budget
    folder : str
    disk : DiskBudget
        Where all rows of all batches do not fit beside each other into what is left of it, a static policy's batches share
        caches on disk.

    Raises
    ------
    BudgetError
        Not enough memory.
    PluginError
        The policy failed.
    OSError
        ENOSPC: the disk, or ``disk``, is too small; names the least that would do.

    Notes
    -----
    Holds, beside what the policy's scores take, 16 bytes a node.

    References
    ----------
    Liu et al., DiskGNN, SIGMOD 2025, sections 4 (levels) and 5.1 (segmented disk cache).
    """
    n = pack.num_nodes
    with contextlib.ExitStack() as stack:
        files = _Writers(stack, folder, disk)
        if isinstance(policy, StaticPolicy):
            with budget.reserve("packing", (16 + policy.score_bytes) * n):
                scores = scores_of(policy)
                fixed = assign_tiers(scores, sizes.device_rows, sizes.host_rows)
                del scores
                _plan_static(pack, sizes, fixed, files, budget, disk)
        elif isinstance(policy, PlannedPolicy):
            with budget.reserve("packing", 16 * n if sizes.device_rows else 0):
                tier_of_row = assign_tiers(pack.counts(), sizes.device_rows, 0) if sizes.device_rows else None
                _plan_planned(pack, sizes, policy, tier_of_row, files, budget, disk)
        else:
            raise ValueError(f"policy {policy.name!r} is neither static nor planned")
        files.finish()


def assign_tiers(scores: npt.NDArray[Any], n_device: int, n_host: int) -> npt.NDArray[np.int32]:
    """Return for each row its slot in the host's cache, -2 - its slot on the device, or -1."""
    n = len(scores)
    device = top_rows(scores, n_device)
    tier_of_row = np.full(n, -1, np.int32)
    tier_of_row[top_rows(scores, n_device + n_host)] = 0
    tier_of_row[device] = -2 - np.arange(len(device), dtype=np.int32)
    host = np.flatnonzero(tier_of_row == 0)
    tier_of_row[host] = np.arange(len(host), dtype=np.int32)
    return tier_of_row


def _fill(files: _Writers, tier_of_row: npt.NDArray[np.int32] | None) -> None:
    """Write the rows that host and device start with, each ascending: the i-th in slot i."""
    files[FILL].append(NO_ROWS if tier_of_row is None else np.flatnonzero(tier_of_row >= 0))
    files[FILL].append(NO_ROWS if tier_of_row is None else np.flatnonzero(tier_of_row <= -2))


def _leave_device(ids: Ids, tier_of_row: npt.NDArray[np.int32] | None, sizes: Sizes, files: _Writers) -> Ids:
    """Write which of a batch's rows the device holds, where there is one; return the others."""
    if tier_of_row is None or not sizes.device_rows:
        return ids
    tier = tier_of_row[ids]
    on_device = tier <= -2
    files[DEVICE].append(np.flatnonzero(on_device).astype(np.int32))
    files[DEVICE].append(-2 - tier[on_device])
    return ids[~on_device]


def _plan_static(
    pack: OfflineSamples, sizes: Sizes, tier_of_row: npt.NDArray[np.int32], files: _Writers, budget: Budget, disk: DiskBudget
) -> None:
    """The same rows in memory for all batches; the others to extents and, where that is too much, to segments' caches."""
    batches, n = DiskRows(pack, tier_of_row), pack.num_nodes
    length = 1
    if disk.total is not None and len(pack):
        length = segmentation(pack, batches, sizes, tier_of_row, budget, disk).length
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
            ids = _leave_device(pack.ids(number), tier_of_row, sizes, files)
            slots = tier_of_row[ids]
            missed = np.flatnonzero(slots < 0)
            order = np.argsort(ids[missed])
            if length > 1:
                places = place_of_row[ids[missed]]
                order = np.concatenate([order[places[order] < 0], np.argsort(places)[np.count_nonzero(places < 0) :]])
                files[SHARED].append(_narrow(np.sort(places[places >= 0]).astype(np.int64) + before))
            write_plan(files[PLAN], PlannedBatch(slots, NO_CHANGES), missed=missed[order])
        place_of_row[segment.rows] = -1
        before += len(segment.rows)


def _segments(batches: Sequence[Ids], n: int, length: int, row_bytes: int, budget: Budget) -> Iterator[Segment]:
    if length > 1:
        yield from segments(batches, n, length, row_bytes, budget=budget)
    else:
        yield Segment(0, len(batches), NO_ROWS, 0, NO_ROWS, NO_ROWS, NO_ROWS)


def segmentation(
    pack: OfflineSamples,
    batches: Sequence[Ids],
    sizes: Sizes,
    tier_of_row: npt.NDArray[np.int32],
    budget: Budget,
    disk: DiskBudget,
) -> Segmentation:
    """Find how many batches share a cache on disk, 1 where none need, so that a layout fits what is left of ``disk``.

    Raises
    ------
    OSError
        ENOSPC: none do; says what would.
    """
    assert disk.total is not None
    n = len(pack)
    n_device, n_host = int(np.count_nonzero(tier_of_row <= -2)), int(np.count_nonzero(tier_of_row >= 0))
    accesses = int(pack.lengths.sum())
    on_device = sum(int(np.count_nonzero(tier_of_row[pack.ids(b)] <= -2)) for b in range(n)) if n_device else 0
    on_disk = sum(len(ids) for ids in batches)
    tables = disk.used + 4 * (accesses - on_device + on_disk) + 5 * SECTION_BYTES * n + TAIL_BYTES
    tables += 8 * (n_device + n_host) + 2 * SECTION_BYTES + TAIL_BYTES
    if sizes.device_rows:
        tables += 8 * on_device + 2 * SECTION_BYTES * n + TAIL_BYTES
    width = 4 if pack.num_nodes < 2**31 else 8

    def takes(stored: Stored) -> int:
        n_cached = int(stored.cached.sum())
        found = tables + sizes.n_bytes(n_device, n_host, stored)
        if stored.length > 1:
            wide = 4 if n_cached < 2**31 else 8
            found += 8 * (1 + len(sizes.group_rows)) + width * n_cached + wide * stored.shared
            found += SECTION_BYTES * (_HEAD + len(stored.cached) + n) + TAIL_BYTES
        return found

    return shortest_segments(batches, pack.num_nodes, sizes.row_bytes, disk.total, takes=takes, budget=budget)


def windows(pack: OfflineSamples, superbatch: int, tier_of_row: npt.NDArray[np.int32] | None) -> Iterator[Trace]:
    """Yield what is planned together, in order: of each superbatch of each epoch the rows that the device leaves."""

    def rest(begin: int, batch: int) -> Ids:
        ids = pack.ids(begin + batch)
        return ids if tier_of_row is None else ids[tier_of_row[ids] == -1]

    for epoch in range(pack.epochs):
        for first in range(0, pack.n_batches, superbatch):
            begin = epoch * pack.n_batches + first
            count = min(superbatch, pack.n_batches - first)
            lengths = pack.lengths[begin : begin + count]
            if tier_of_row is not None:
                lengths = np.array([len(rest(begin, b)) for b in range(count)], np.int64)
            yield Trace.reading(partial(rest, begin), lengths, pack.num_nodes)


def _plan_planned(
    pack: OfflineSamples,
    sizes: Sizes,
    policy: PlannedPolicy,
    tier_of_row: npt.NDArray[np.int32] | None,
    files: _Writers,
    budget: Budget,
    disk: DiskBudget,
) -> None:
    """Other rows in memory from batch to batch; where ``disk`` has no room for the others, say how much would do."""
    before = disk.used
    try:
        n_missed = _plan_windows(pack, sizes, policy, tier_of_row, files, budget)
    except OSError as error:
        if disk.total is None or error.errno != errno.ENOSPC:
            raise
        files = _Writers(contextlib.ExitStack(), None, disk)
        n_missed = _plan_windows(pack, sizes, policy, tier_of_row, files, budget)
        if before + files.n_bytes <= disk.total:
            raise  # the drive is full
    n_device = 0 if tier_of_row is None else int(np.count_nonzero(tier_of_row <= -2))
    needed = before + files.n_bytes + sizes.n_bytes(n_device, 0, Stored(1, n_missed, np.empty(0, np.int64), 0))
    if disk.total is not None and needed > disk.total:
        raise OSError(
            errno.ENOSPC,
            f"the batches' rows and tables take {format_size(needed)} ({needed} bytes) on disk, of which "
            f"{format_size(disk.total)} may be used",
        )


def _plan_windows(
    pack: OfflineSamples,
    sizes: Sizes,
    policy: PlannedPolicy,
    tier_of_row: npt.NDArray[np.int32] | None,
    files: _Writers,
    budget: Budget,
) -> Int64s:
    """A cache that changes batch by batch, planned window by window, each from an empty one; return how many rows each lacks."""
    _fill(files, tier_of_row)
    n_missed, number, checked = np.zeros(len(pack), np.int64), 0, CheckedPolicy(policy)
    for trace in windows(pack, sizes.superbatch, tier_of_row):
        n_bytes = planning_bytes(pack.num_nodes, trace.n_accesses, longest=trace.longest, checked=checked.is_checked)
        with budget.reserve("planner", n_bytes):
            checked.start(sizes.host_rows, PolicyContext(pack.num_nodes, 1))
            for planned in checked.plan(trace.window(), first=number):
                left = _leave_device(pack.ids(number), tier_of_row, sizes, files)
                n_missed[number] = len(write_plan(files[PLAN], planned, left))
                number += 1
    return n_missed


class SharedRows:
    """The rows of the segments' caches in the order in which they lie, from the file of shared rows."""

    def __init__(self, file: SectionFile, n_batches: int, n_features: int) -> None:
        self._file = file
        head = file[0]
        if len(head) != 1 + n_features or head.min() < 1:
            raise CorruptionError(f"segments of {len(head) - 1} features instead of {n_features}", file.path)
        self.length, self.group_rows = int(head[0]), head[1:].tolist()
        n_segments = -(-n_batches // self.length)
        if len(file) != _HEAD + n_segments + n_batches:
            raise CorruptionError(f"{len(file)} sections for {n_batches} batches in segments of {self.length}", file.path)
        self._sections = _HEAD + (self.length + 1) * np.arange(n_segments)
        self._ends: Int64s = np.cumsum(file.lengths[self._sections])
        self._last: tuple[int, Ids] = (-1, NO_ROWS)

    @property
    def nbytes(self) -> int:
        """Bytes held by :meth:`rows`: those of a segment, and of another that takes its place."""
        return 16 * int(self._file.lengths[self._sections].max(initial=0))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, first: int, stop: int) -> Ids:
        """Return the rows at places ``first … stop - 1``; keeps the segment that it read last. For one thread."""
        found: list[Ids] = []
        segment = int(np.searchsorted(self._ends, first, side="right"))
        while first < stop:
            end = int(self._ends[segment])
            if self._last[0] != segment:
                self._last = (segment, self._file[int(self._sections[segment])])
            rows = self._last[1]
            begin = end - len(rows)
            found.append(rows[first - begin : stop - begin])
            first, segment = min(stop, end), segment + 1
        return np.concatenate([NO_ROWS, *found])

    def segment(self, batch: int) -> tuple[int, int]:
        """Return the places of the rows of a batch's segment: the first, and the one after the last."""
        number = batch // self.length
        return int(self._ends[number - 1]) if number else 0, int(self._ends[number])

    def _section(self, batch: int) -> int:
        return _HEAD + batch + batch // self.length + 1

    def addresses(self, batch: int, array: Callable[..., npt.NDArray[Any]] = np.empty) -> Ids:
        """Return where a batch's shared rows lie, ascending; ``array`` as for :meth:`PlanFile.plan`."""
        return self._file.read(self._section(batch), array)

    def counts(self, n_batches: int) -> Int64s:
        """Return how many shared rows each batch needs."""
        return self._file.lengths[[self._section(b) for b in range(n_batches)]]


class TierTables:
    """The tables of a layout, open; a batch's plan, by number. Thread-safe but for :meth:`close`.

    Parameters
    ----------
    folder : str
    pack : OfflineSamples
    n_features : int

    Attributes
    ----------
    fill_rows, device_rows : int64 array
        Rows that the host's cache starts with, and those of the device: the i-th in slot i.
    shared : SharedRows or None
        Of the segments' caches, where there are any.
    n_packed : int64 array, shape (n_batches,)
        Rows of each batch's extent.
    ids : dict of str to str
        The id of each file.

    Raises
    ------
    CorruptionError, FormatError, VersionError
    """

    def __init__(self, folder: str, pack: OfflineSamples, n_features: int) -> None:
        self._files: list[SectionFile] = []
        self.ids: dict[str, str] = {}
        n = len(pack)
        try:
            file = self._open(folder, PLAN)
            self._plans = PlanFile(file, Tier.PACKED)
            if len(self._plans) != n:
                raise CorruptionError(f"plans of {len(self._plans)} batches for {n}", file.path)
            fill = self._open(folder, FILL)
            self.fill_rows: Int64s = fill[0].astype(np.int64)
            self.device_rows: Int64s = fill[1].astype(np.int64)
            self._device = self._open(folder, DEVICE) if os.path.exists(os.path.join(folder, DEVICE)) else None
            if self._device is not None and len(self._device) != 2 * n:
                raise CorruptionError(f"{len(self._device)} sections for {n} batches", self._device.path)
            self.shared: SharedRows | None = None
            self.n_packed = self._plans.n_missed
            if os.path.exists(os.path.join(folder, SHARED)):
                self.shared = SharedRows(self._open(folder, SHARED), n, n_features)
                self.n_packed = self.n_packed - self.shared.counts(n)
                if self.n_packed.min(initial=0) < 0:
                    raise CorruptionError("more rows are shared than are on disk", file.path)
        except BaseException:
            self.close()
            raise

    def _open(self, folder: str, name: str) -> SectionFile:
        file = SectionFile(os.path.join(folder, name), name)
        self._files.append(file)
        self.ids[name] = file.file_id
        return file

    @property
    def nbytes(self) -> int:
        """Bytes that making the rows' files holds of them."""
        fills = 16 * (len(self.fill_rows) + len(self.device_rows))
        return fills + (0 if self.shared is None else self.shared.nbytes)

    def packed(self, number: int, ids: Ids) -> Ids:
        """Return the rows of a batch's extent; ``ids`` are the batch's."""
        positions = self._plans.missed(number)[: int(self.n_packed[number])]
        if self._device is not None:
            ids = np.delete(ids, self._device[2 * number])
        rows: Ids = ids[positions]
        return rows

    def plan(self, number: int, ids: Int64s, array: Callable[..., npt.NDArray[Any]] = np.empty) -> BatchPlan:
        """Return the plan of a batch whose input ids are ``ids``; ``array`` as for :meth:`PlanFile.plan`.

        Raises
        ------
        CorruptionError, OSError
            The tables are damaged, or of other batches.
        """
        device = None
        if self._device is not None:
            slots = self._device.read(2 * number + 1, array)
            narrow = self._device.read(2 * number, array)
            positions = array(len(narrow), np.int64)
            positions[:] = narrow
            if len(slots) != len(positions) or len(positions) > len(ids) or positions.max(initial=0) > max(0, len(ids) - 1):
                raise CorruptionError(f"the device's rows of batch {number} are not {len(ids)} rows", self._device.path)
            on_host = np.ones(len(ids), bool)
            on_host[positions] = False
            device = DeviceRows(slots, positions, np.flatnonzero(on_host))
            ids = ids[on_host]
        plan = self._plans.plan(number, ids, array)
        if device is None and self.shared is None:
            return plan
        parts = plan.parts
        if self.shared is not None:
            others = parts[-1]
            k, narrow = int(self.n_packed[number]), self.shared.addresses(number, array)
            addresses = array(len(narrow), np.int64)
            addresses[:] = narrow
            assert others.positions is not None
            parts = (
                *parts[:-1],
                Part(Tier.DISK_CACHE, addresses, others.positions[k:]),
                Part(Tier.PACKED, others.addresses[:k], others.positions[:k]),
            )
        return BatchPlan(plan.n_rows, parts, plan.changes, device)

    def close(self) -> None:
        """Close the files; may be called again."""
        for file in self._files:
            file.close()
