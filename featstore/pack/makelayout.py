"""Making a layout: its tables, then one sequential pass over each feature that fills extents, shared rows and tiers.

A layout is made under the pack's writer lock in ``<name>.partial``. If the process is killed or interrupted, a later call goes on
from the last checkpoint (see :mod:`featstore.storage.checkpoint`).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from featstore.budget import Budget, Reservation
from featstore.cache.base import Policy
from featstore.config import format_size
from featstore.errors import BusyError, CommittedError, CorruptionError, FormatError
from featstore.pack.layout import (
    PARTIAL,
    FeatureExtents,
    LayoutOptions,
    PackedFeature,
    check_disk,
    extent_map,
    layout_bytes,
    partial_layouts,
    rows_entry,
)
from featstore.pack.nodedata import Carrier, NodeData, is_carried
from featstore.pack.packing import fill_extents
from featstore.pack.record import OfflineSamples, RowNeeds, read_record, write_record
from featstore.pack.segments import Stored
from featstore.pack.tables import TABLES, TierTables
from featstore.pack.tiers import ScoresOf, Sizes, make_tables
from featstore.progress import Progress, note
from featstore.storage.calls import NO_SPACE, remove_tree
from featstore.storage.extents import ExtentMap, ExtentWriter, least_memory, most_memory
from featstore.storage.lock import CANNOT_CHANGE, WRITER_LOCK, FileLock
from featstore.storage.ordered import piece_layout
from featstore.storage.reader import Reader
from featstore.storage.rundir import DiskQuota
from featstore.storage.writer import free_bytes, fsync_directory, make_durable

__all__ = ["BEGUN", "layout_sizes", "make_layout"]

MOST_PIECE_BYTES, LEAST_PIECE_BYTES = 8 << 20, 64 << 10  # of shared rows that are put in order at once
PIECE_FRACTION = 1 / 32  # of the free memory, that a piece may take
PATIENCE_S = 1.0  # of waiting for another process before a note says so
BEGUN = "begun"  # the record of a layout's samples and features, written when its tables are complete
RECORD_BYTES = 2048  # of a record of a feature or of the layout, at most


@dataclass(frozen=True)
class _Job:
    pack: OfflineSamples
    needs: RowNeeds
    options: LayoutOptions
    policy: Policy
    scores_of: ScoresOf
    sources: Mapping[str, PackedFeature]
    reader: Reader
    budget: Budget
    disk: DiskQuota
    progress: bool
    folder: str


def make_layout(
    pack: OfflineSamples,
    options: LayoutOptions,
    policy: Policy,
    scores_of: ScoresOf,
    sources: Mapping[str, PackedFeature],
    reader: Reader,
    budget: Budget,
    *,
    node_data: Sequence[NodeData] = (),
    disk: int | None = None,
    progress: bool = True,
) -> bool:
    """Make a layout of a pack, or finish one that a killed process began; return whether this call made it.

    If another process or thread is making a layout of this pack, the call waits for it, and uses the same layout if it made it.

    ``policy`` is the one that ``options`` names; ``scores_of`` returns its scores if it is static. At most half of the free
    memory of ``budget`` is used, and given back afterwards. The pack is to carry ``node_data``, too; if the layout exists
    already and the pack cannot be written, the pack goes without. Layout and data may take ``disk`` bytes. If a copy of every row
    for each batch would take more, and ``policy`` is static, segments of batches share rows on disk
    (:mod:`featstore.pack.segments`).

    StaleError: another pack was made in this one's place since it was opened. CommittedError: the layout is complete and in
    place, but making its name durable failed. OSError: the disk, or ``disk``, is full, or failed, or an existing layout takes
    more than ``disk``. Pack and dataset are then as before, and the remains of an earlier call for this layout are removed. Only
    if the last step failed, which names ``node_data`` in the pack's record, the layout is in place.

    See Liu et al., DiskGNN, SIGMOD 2025, sections 4 (tiers), 5.1 (segmented disk cache) and 5.2 (batched packing).
    """
    target = pack.file(options.name)
    if os.path.exists(target):
        _use(pack, node_data, target, disk)
        return False
    with _locked(pack, progress) as lock:
        pack.check_in_place()  # otherwise a new pack would get a layout of the old samples
        if os.path.exists(target):  # another process made it meanwhile, perhaps with other node data
            lock.release()
            _use(pack, node_data, target, disk)
            return False
        accounts = DiskQuota(disk, "the layout", target)
        ordered = {name: sources[name] for name in sorted(sources)}  # the same files in every order of the features
        with Carrier(pack, accounts) as carrier:
            for data in node_data:
                if not is_carried(pack, data):
                    carrier.write(data)
            needs, folder = pack.of_rows(options.rows), target + PARTIAL
            job = _Job(pack, needs, options, policy, scores_of, ordered, reader, budget, accounts, progress, folder)
            try:
                _make_whole(job, target)
            finally:
                if os.path.exists(target):  # loaders of the layout need the node data
                    _commit(carrier, target)
    return True


def _use(pack: OfflineSamples, node_data: Sequence[NodeData], target: str, disk: int | None) -> None:
    """Check the size of an existing layout, and add missing node data to the pack."""
    check_disk(target, disk)
    if not all(is_carried(pack, data) for data in node_data):
        _carry_where_possible(pack, node_data, target, disk)


def _commit(carrier: Carrier, target: str) -> None:
    """Commit the node data of a layout that is in place; CommittedError if that fails."""
    try:
        carrier.commit()
    except CommittedError:
        raise
    except OSError as error:
        what = f"the layout {target} is in place, without the node data that it carries; they come with its next loader"
        raise CommittedError(f"{what}: {error}", target, error) from error


def _carry_where_possible(pack: OfflineSamples, node_data: Sequence[NodeData], target: str, disk: int | None) -> None:
    """Add node data to a pack with an existing layout; a pack that cannot be written, or is being written, stays without it."""
    try:
        lock = FileLock(pack.file(WRITER_LOCK), exclusive=True)
    except OSError as error:
        if isinstance(error, BusyError) or error.errno in CANNOT_CHANGE:
            return
        raise
    with lock:
        pack.check_in_place()
        accounts = DiskQuota(disk, "the layout and what copies of the pack have besides", pack.path)
        accounts.take(layout_bytes(target), target)
        with Carrier(pack, accounts) as carrier:
            for data in node_data:
                if not is_carried(pack, data):
                    carrier.write(data)
            carrier.commit()


def _locked(pack: OfflineSamples, progress: bool) -> FileLock:
    """Take the pack's writer lock; wait, interruptibly, while other processes make a layout of the pack, or replace it."""
    noted = False
    while True:
        try:
            lock = FileLock(pack.file(WRITER_LOCK), exclusive=True, patience_s=PATIENCE_S)
        except BusyError:
            if not noted:
                note(f"{pack.path}: another process makes a layout of this pack; waiting for it", progress)
            noted = True
            continue
        if lock.in_place:
            return lock
        lock.release()


def _make_whole(job: _Job, target: str) -> None:
    """Make the layout in ``job.folder``, from where an earlier call ended, and give it its name.

    An error of the disk leaves nothing. After any other end (Ctrl-C, a kill, too little memory) a later call can go on from the
    files left, until the pack is removed or replaced. Calls for other layouts do not touch these files.
    """
    pack, folder, before = job.pack, job.folder, job.disk.used
    for path in partial_layouts(pack):
        if not (_can_go_on(job) if path == folder else os.path.exists(os.path.join(path, BEGUN))):
            remove_tree(path, quiet=True)
    goes_on = os.path.isdir(folder)
    try:
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(folder):  # half-written files; of extents, the recorded part counts
            if name.endswith(".tmp") and not name.startswith("extents."):
                os.unlink(os.path.join(folder, name))
        _make(job)
        fsync_directory(folder)
        os.rename(folder, target)
    except OSError as error:
        remove_tree(folder, quiet=True)
        job.disk.give(job.disk.used - before)
        if not goes_on or error.errno not in NO_SPACE:
            raise
        _make_whole(job, target)  # the earlier call had more disk; a smaller layout may fit now
    except BaseException:
        if not _can_go_on(job):
            remove_tree(folder, quiet=True)
        raise
    make_durable(pack.path, target)


def _origin(job: _Job) -> dict[str, Any]:
    features = {name: [source.file.fingerprint, source.file.row_bytes] for name, source in job.sources.items()}
    return {"format": 1, "samples": job.pack.record["samples"], "features": features}


def _can_go_on(job: _Job) -> bool:
    """Tell whether complete tables exist, made of the same samples and features."""
    try:
        return read_record(os.path.join(job.folder, BEGUN), BEGUN) == _origin(job)
    except (FormatError, CorruptionError, FileNotFoundError):
        return False


def _make(job: _Job) -> None:
    pack, options, disk, folder = job.pack, job.options, job.disk, job.folder
    if _can_go_on(job):
        for name in (*TABLES, BEGUN):
            with contextlib.suppress(FileNotFoundError):
                disk.take(os.path.getsize(os.path.join(folder, name)), os.path.join(folder, name))
    else:
        widths = [source.file.row_bytes for source in job.sources.values()]
        make_tables(job.needs, layout_sizes(options, widths, job.budget), job.policy, job.scores_of, job.budget, folder, disk)
        write_record(os.path.join(folder, BEGUN), BEGUN, _origin(job), disk)
    tables = TierTables(folder, job.needs, len(job.sources), (options.capacity, options.device_rows))
    try:
        _check_drive(job, tables)
        record = {
            "format": 1,
            "policy": options.policy,
            "digest": options.digest,
            "capacity": options.capacity,
            "superbatch": options.superbatch,
            "device_rows": options.device_rows,
            "disk": options.disk,
            **({"restart": options.restart} if options.restart else {}),
            "samples": pack.record["samples"],
            **({} if options.rows is None else {"types": rows_entry(options.rows)}),
            "tables": tables.ids,
            "features": [_pack_feature(job, tables, number, name) for number, name in enumerate(job.sources)],
        }
        write_record(os.path.join(folder, "layout"), "layout", record, disk)
    finally:
        tables.close()


def _check_drive(job: _Job, tables: TierTables) -> None:
    """Raise OSError (ENOSPC), before any copy, if the drive has no room for the files that are not complete yet."""
    needed = 0
    names = os.listdir(job.folder)
    for number, source in enumerate(job.sources.values()):
        if f"done.{number}" not in names:
            extents = FeatureExtents(tables, number, source.file.row_bytes).extents
            mine = [os.path.join(job.folder, name) for name in names if name.startswith(f"extents.{number}.")]
            there = 512 * sum(os.stat(path).st_blocks for path in mine)  # of an earlier call
            needed += max(0, extents.disk_bytes + extents.progress_bytes - there)
    free = free_bytes(job.folder)
    if free is not None and needed > free:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: the layout takes {format_size(needed)} more, and {format_size(free)} are free",
            job.folder,
        )


def layout_sizes(options: LayoutOptions, widths: Sequence[int], budget: Budget) -> Sizes:
    """Compute the sizes of a layout's tables, for features with rows of ``widths`` bytes, within the free memory of a budget."""
    piece = min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, int(budget.available * PIECE_FRACTION)))
    group_rows = [piece_layout(row_bytes, piece).group_rows for row_bytes in widths]

    def n_bytes(n_device: int, n_host: int, stored: Stored) -> int:
        maps = [
            extent_map(int(stored.cached.sum()), rows, stored.packed, (n_host, n_device), row_bytes)
            for row_bytes, rows in zip(widths, group_rows, strict=True)
        ]
        records = RECORD_BYTES * (2 + len(maps)) + max(extents.progress_bytes for extents in maps)
        return records + sum(extents.disk_bytes for extents in maps)

    lengths = options.superbatch, options.restart
    return Sizes(options.device_rows, options.capacity, *lengths, sum(widths), n_bytes, group_rows)


def _pack_feature(job: _Job, tables: TierTables, number: int, name: str) -> dict[str, Any]:
    """Fill one feature's file of extents; return the feature's entry in the layout's record."""
    source, disk = job.sources[name], job.disk
    row_bytes = source.file.row_bytes
    plan = FeatureExtents(tables, number, row_bytes)
    path = os.path.join(job.folder, f"extents.{number}.rows")
    done_path = os.path.join(job.folder, f"done.{number}")
    if os.path.exists(done_path):
        disk.take(plan.extents.disk_bytes, path)
        record = read_record(done_path, "done")
    else:
        ordered = plan.ordered()
        with (
            _packing_memory(job.budget, plan.extents, ordered.nbytes + tables.nbytes) as memory,
            ExtentWriter(path, plan.extents, disk, resumable=True, ordered=ordered) as writer,
        ):
            total = source.file.n_rows * row_bytes + plan.extents.disk_bytes
            with Progress(f"pack {name}", total, job.progress) as bar:
                rows_of = partial(plan.rows_of, job.needs)
                fill_extents(writer, source.file, rows_of, memory, progress=bar.add)
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
        "made_of": source.file.fingerprint,
        "file": record,
    }


@contextlib.contextmanager
def _packing_memory(budget: Budget, extents: ExtentMap, beside: int) -> Iterator[Reservation]:
    """Reserve memory for filling extents, and ``beside`` it memory for the tables and for a piece that is put in order."""
    longest = int(extents.n_rows.max(initial=0))
    sums = 8 * (extents.total_pages + 1024 + len(extents.n_rows))
    most = most_memory(extents.row_bytes, longest, len(extents.n_rows)) + sums
    least = least_memory(extents.row_bytes, longest) + sums
    with budget.reserve("packing", beside), budget.reserve("packing", max(least, min(most, budget.available // 2))) as memory:
        yield memory
