"""Frozen layouts of a pack (DiskGNN): where each row of its batches is, decided once, and the copies that this takes.

A layout is a directory in the pack: ``plan``, the address tables of all batches; a file of extents a feature; ``layout``, its
record, written last. It is made under the pack's writer lock in ``<name>.partial``; a killed maker is followed by one that goes
on after the last episode (see :mod:`featstore.storage.extents`) that was finished.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.cache.base import Policy, PolicyContext, StaticPolicy
from featstore.cache.planned import NO_ROWS, PlannedBatch, PlannedPolicy, Window
from featstore.cache.select import top_rows
from featstore.cache.table import FILL_BYTES
from featstore.config import Budget, Reservation
from featstore.errors import CorruptionError, FormatError, StaleError
from featstore.gather.plan import Changeset, Tier
from featstore.graph.progress import Progress
from featstore.plan.offline import Pack, read_record, write_record
from featstore.plan.packing import ExtentFile, fill_extents
from featstore.plan.superbatch import PlanFile, planning_bytes, write_plan
from featstore.storage.extents import KIND, PAGES, ExtentMap, ExtentWriter, least_memory, most_memory
from featstore.storage.lock import WRITER_LOCK, FileLock
from featstore.storage.reader import Reader, RowFile
from featstore.storage.rundir import DiskBudget
from featstore.storage.sections import SectionFile, SectionWriter
from featstore.storage.update import check_file
from featstore.storage.writer import FileRecord, fsync_directory

__all__ = ["Layout", "LayoutOptions", "Source", "find_layouts", "layout_records", "make_layout"]

Int64s = npt.NDArray[np.int64]
PREFIX, PARTIAL = "layout-", ".partial"
NO_CHANGES = Changeset(NO_ROWS, NO_ROWS, np.empty(0, np.int32), NO_ROWS)


@dataclass(frozen=True)
class LayoutOptions:
    """What a layout is made for.

    Parameters
    ----------
    features : tuple of str
    policy : str
        Name of the host tier's policy: a static one, which keeps the same rows for all batches, or a planned one.
    capacity : int
        Rows of the host tier.
    superbatch : int
        Batches that are planned together, from an empty cache; 0 for static policies.
    """

    features: tuple[str, ...]
    policy: str
    capacity: int
    superbatch: int

    @property
    def name(self) -> str:
        """The directory's name."""
        text = repr((sorted(self.features), self.policy, self.capacity, self.superbatch))
        return PREFIX + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Source:
    """A feature to pack: its file, that file's id, and what its rows are."""

    file: RowFile
    file_id: str
    dtype: str
    shape: tuple[int, ...]


def find_layouts(pack: Pack) -> list[LayoutOptions]:
    """Return the options of every layout that the pack has."""
    return [_options(record) for record in layout_records(pack)]


def layout_records(pack: Pack) -> list[dict[str, Any]]:
    """Return the record of every layout that the pack has."""
    names = [name for name in sorted(os.listdir(pack.path)) if name.startswith(PREFIX) and not name.endswith(PARTIAL)]
    return [read_record(os.path.join(pack.path, name, "layout"), "layout") for name in names]


def _options(record: Mapping[str, Any]) -> LayoutOptions:
    return LayoutOptions(
        tuple(feature["name"] for feature in record["features"]),
        str(record["policy"]),
        int(record["capacity"]),
        int(record["superbatch"]),
    )


class Layout:
    """A layout, open.

    Parameters
    ----------
    pack : Pack
    options : LayoutOptions
    reader : Reader

    Attributes
    ----------
    plans : PlanFile
        Of the pack's batches, by number.
    fill_rows : int64 array
        Rows that the host tier holds from the start, the i-th in slot i.
    group : int
        Batches that run in their order, after each other, from an empty cache; 1: batches run in any order.

    Raises
    ------
    FileNotFoundError
        The pack has no such layout.
    CorruptionError, FormatError, VersionError
        It is damaged; not a layout; of a newer release.
    """

    def __init__(self, pack: Pack, options: LayoutOptions, reader: Reader) -> None:
        self.options = options
        self.folder = pack.file(options.name)
        path = os.path.join(self.folder, "layout")
        self.record = read_record(path, "layout")
        if _options(self.record) != options or self.record["samples"] != pack.record["samples"]:
            raise CorruptionError("this is the record of another layout, or of another pack", path)
        self.group = options.superbatch or 1
        self._files: dict[str, ExtentFile] = {}
        file = SectionFile(os.path.join(self.folder, "plan"), "plan")
        self.plans = PlanFile(file, Tier.PACKED)
        try:
            if file.file_id != self.record["plan"]:
                raise CorruptionError("this is not the plan that the layout was made with", file.path)
            n = len(pack)
            if len(self.plans) != n:
                raise CorruptionError(f"plans of {len(self.plans)} batches for {n}", file.path)
            fill = SectionFile(os.path.join(self.folder, "fill"), "fill")
            try:
                self.fill_rows: Int64s = fill[0].astype(np.int64)
                if fill.file_id != self.record["fill"]:
                    raise CorruptionError("these are not the rows that the layout was made with", fill.path)
            finally:
                fill.close()
            for feature in self.record["features"]:
                extents = _extent_map(self.plans.n_missed, len(self.fill_rows), int(feature["row_bytes"]))
                record = _file_record(feature["file"], self.folder)
                if record.n_rows != extents.total_pages:
                    raise CorruptionError(f"{record.n_rows} pages instead of {extents.total_pages}", self.folder)
                check_file(self.folder, record)
                self._files[str(feature["name"])] = ExtentFile.open(reader, self.folder, record, extents)
        except BaseException:
            self.close()
            raise

    def file(self, name: str) -> ExtentFile:
        """Return the extents of a feature: of every batch, then of the rows that the host tier starts with."""
        return self._files[name]

    def check(self, sources: Mapping[str, Source]) -> None:
        """Raise StaleError unless the features are those that were packed."""
        for feature in self.record["features"]:
            source = sources[feature["name"]]
            if feature["made_of"] != source.file_id:
                raise StaleError(f"{self.folder} holds rows of another feature {feature['name']!r}, or of an earlier one")

    @property
    def disk_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(entry.stat().st_size for entry in os.scandir(self.folder))

    def close(self) -> None:
        """Close its files; may be called again."""
        self.plans.close()
        for file in self._files.values():
            file.file.close()


def _fill_step(row_bytes: int) -> int:
    return max(1, FILL_BYTES // row_bytes)


def _extent_map(n_missed: Int64s, n_fill: int, row_bytes: int) -> ExtentMap:
    """Extents of the batches, then those of the host tier's rows, in the pieces in which a cache is filled."""
    step = _fill_step(row_bytes)
    fill = [min(step, n_fill - first) for first in range(0, n_fill, step)]
    return ExtentMap(np.concatenate([n_missed, np.array(fill, np.int64)]), row_bytes)


def _file_record(record: Mapping[str, Any], where: str) -> FileRecord:
    try:
        found = FileRecord(
            str(record["name"]),
            KIND,
            str(record["id"]),
            1,
            int(record["pages"]),
            "uint8",
            PAGES,
            int(record["bytes"]),
            int(record["sums_bytes"]),
        )
    except (KeyError, TypeError) as error:
        raise FormatError(f"{where}: a record of extents without {error}") from None
    found.check(where)
    return found


def make_layout(
    pack: Pack,
    options: LayoutOptions,
    policy: Policy,
    sources: Mapping[str, Source],
    reader: Reader,
    budget: Budget,
    *,
    disk: int | None = None,
    progress: bool = True,
) -> None:
    """Make a layout, or finish one that a killed process began; nothing happens where it is there.

    Parameters
    ----------
    pack : Pack
    options : LayoutOptions
    policy : Policy
        The one that ``options`` names.
    sources : mapping of str to Source
        The features of ``options``.
    reader : Reader
    budget : Budget
        Half of what it has left is used at most, given back afterwards.
    disk : int, optional
        Most bytes that the layout may take.
    progress : bool
        Show a progress bar, of bytes read and written, where stderr is a terminal.

    Raises
    ------
    BusyError
        Another process is making a layout of the pack.
    BudgetError
        Not enough memory.
    OSError
        The disk, or ``disk``, is full, or failed; the pack and the dataset are as they were.

    References
    ----------
    Liu et al., DiskGNN, SIGMOD 2025, sections 4 and 5.2 (tiers, batched packing).
    """
    target = pack.file(options.name)
    if os.path.exists(target):
        return
    with FileLock(pack.file(WRITER_LOCK), exclusive=True):
        if os.path.exists(target):
            return
        partial = target + PARTIAL
        for name in os.listdir(pack.path):  # of other makers that were killed, whose layouts nobody asks for now
            if name.startswith(PREFIX) and name.endswith(PARTIAL) and pack.file(name) != partial:
                shutil.rmtree(pack.file(name), ignore_errors=True)
        os.makedirs(partial, exist_ok=True)
        for name in os.listdir(partial):  # half-written files of a killed maker; of extents the finished episodes count
            if name.endswith(".tmp") and not name.startswith("extents."):
                os.unlink(os.path.join(partial, name))
        try:
            _make(pack, options, policy, sources, reader, budget, partial, DiskBudget(disk), progress)
            fsync_directory(partial)
            os.rename(partial, target)
            fsync_directory(pack.path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _make(
    pack: Pack,
    options: LayoutOptions,
    policy: Policy,
    sources: Mapping[str, Source],
    reader: Reader,
    budget: Budget,
    folder: str,
    disk: DiskBudget,
    progress: bool,
) -> None:
    plan_path, fill_path = os.path.join(folder, "plan"), os.path.join(folder, "fill")
    if not os.path.exists(plan_path):  # written last of the two
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fill_path)
            writer = stack.enter_context(SectionWriter(plan_path, "plan", disk))
            if isinstance(policy, StaticPolicy):
                rows = _plan_static(pack, options, policy, budget, writer)
            elif isinstance(policy, PlannedPolicy):
                rows = _plan_windows(pack, options, policy, budget, writer)
            else:
                raise ValueError(f"policy {policy.name!r} is neither static nor planned")
            with SectionWriter(fill_path, "fill", disk) as fills:
                fills.append(rows)
                fills.finish(durable=True).close()
            writer.finish(durable=True).close()
    else:
        disk.take(os.path.getsize(plan_path) + os.path.getsize(fill_path), plan_path)
    plan_file = SectionFile(plan_path, "plan")
    try:
        fill_file = SectionFile(fill_path, "fill")
        fill_rows, fill_id = fill_file[0], fill_file.file_id
        fill_file.close()
        plans = PlanFile(plan_file, Tier.PACKED)
        features = [
            _pack_feature(pack, plans, fill_rows, name, source, number, reader, budget, folder, disk, progress)
            for number, (name, source) in enumerate(sources.items())
        ]
        record = {
            "format": 1,
            "policy": options.policy,
            "capacity": options.capacity,
            "superbatch": options.superbatch,
            "samples": pack.record["samples"],
            "plan": plan_file.file_id,
            "fill": fill_id,
            "features": features,
        }
        write_record(os.path.join(folder, "layout"), "layout", record, disk)
    finally:
        plan_file.close()


def _pack_feature(
    pack: Pack,
    plans: PlanFile,
    fill_rows: npt.NDArray[Any],
    name: str,
    source: Source,
    number: int,
    reader: Reader,
    budget: Budget,
    folder: str,
    disk: DiskBudget,
    progress: bool,
) -> dict[str, Any]:
    """Fill one feature's extents; return what the record says of it."""
    row_bytes, n = source.file.row_bytes, len(pack)
    extents = _extent_map(plans.n_missed, len(fill_rows), row_bytes)
    step = _fill_step(row_bytes)

    def rows_of(extent: int) -> npt.NDArray[Any]:
        if extent >= n:
            return fill_rows[(extent - n) * step : (extent - n + 1) * step]
        rows: npt.NDArray[Any] = pack.ids(extent)[plans.missed(extent)]
        return rows

    path = os.path.join(folder, f"extents.{number}.rows")
    done_path = os.path.join(folder, f"done.{number}")
    if os.path.exists(done_path):
        disk.take(extents.disk_bytes, path)
        record = read_record(done_path, "done")
    else:
        with _packing_memory(budget, extents) as memory, ExtentWriter(path, extents, disk, resumable=True) as writer:
            total = source.file.n_rows * row_bytes + extents.disk_bytes
            with Progress(f"pack {name}", total, progress) as bar:
                fill_extents(writer, reader, source.file, rows_of, memory, progress=bar.add)
            made = writer.finish(durable=True)
        record = {
            "format": 1,
            "name": made.name,
            "id": made.file_id,
            "pages": made.n_rows,
            "bytes": made.n_bytes,
            "sums_bytes": made.n_sums_bytes,
        }
        write_record(done_path, "done", record, disk)
    return {
        "name": name,
        "dtype": source.dtype,
        "shape": list(source.shape),
        "row_bytes": row_bytes,
        "made_of": source.file_id,
        "file": record,
    }


@contextlib.contextmanager
def _packing_memory(budget: Budget, extents: ExtentMap) -> Iterator[Reservation]:
    longest = int(extents.n_rows.max(initial=0))
    sums = 8 * (extents.total_pages + 1024)
    most = most_memory(extents.row_bytes, longest, len(extents.n_rows)) + sums
    least = least_memory(extents.row_bytes, longest) + sums
    with budget.reserve("packing", max(least, min(most, budget.available // 2))) as memory:
        yield memory


def _plan_static(pack: Pack, options: LayoutOptions, policy: StaticPolicy, budget: Budget, writer: SectionWriter) -> Int64s:
    """One cache for all batches: the rows of the highest scores. Returns them, ascending."""
    n = pack.num_nodes
    with budget.reserve("packing", (12 + policy.score_bytes) * n):
        rows = top_rows(np.asarray(policy.scores(PolicyContext(n, 1, counts_of=pack.counts))), options.capacity)
        slot_of_row = np.full(n, -1, np.int32)
        slot_of_row[rows] = np.arange(len(rows), dtype=np.int32)
        for number in range(len(pack)):
            ids = pack.ids(number)
            write_plan(writer, PlannedBatch(slot_of_row[ids], NO_CHANGES), ids)
    return rows


def _plan_windows(pack: Pack, options: LayoutOptions, policy: PlannedPolicy, budget: Budget, writer: SectionWriter) -> Int64s:
    """A cache that changes batch by batch, planned window by window, each from an empty one."""
    for epoch in range(pack.epochs):
        for first in range(0, pack.n_batches, options.superbatch):
            begin = epoch * pack.n_batches + first
            count = min(options.superbatch, pack.n_batches - first)
            lengths = pack.lengths[begin : begin + count]
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

            def ids(b: int, begin: int = begin) -> npt.NDArray[Any]:
                return pack.ids(begin + b)

            needed = planning_bytes(pack.num_nodes, int(offsets[-1]), longest=int(lengths.max(initial=0)))
            with budget.reserve("planner", needed):
                policy.start(options.capacity, PolicyContext(pack.num_nodes, 1))
                for b, planned in enumerate(policy.plan(Window(pack.num_nodes, offsets, ids, count))):
                    write_plan(writer, planned, ids(b))
    return NO_ROWS
