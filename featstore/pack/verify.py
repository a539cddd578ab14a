"""Check of a whole pack: every byte of every file, valid samples, and plans that find every row at its address."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.budget import Budget
from featstore.config import available_memory
from featstore.errors import CorruptionError, FormatError, PluginError, StaleError
from featstore.gather.buffers import BufferPool
from featstore.gather.plan import BatchPlan, Tier
from featstore.graph.verify import verify_file
from featstore.pack.layout import (
    FeatureExtents,
    LayoutOptions,
    file_record,
    find_layouts,
    layout_bytes,
    layout_records,
    partial_layouts,
)
from featstore.pack.makelayout import BEGUN
from featstore.pack.nodedata import NODE_DATA_KIND, carried, named
from featstore.pack.record import NODE_DATA, RECORD, SAMPLES, OfflineSamples, RowNeeds, read_record
from featstore.pack.tables import PLAN, TierTables
from featstore.pack.typedsamples import check_types, untyped
from featstore.progress import Progress
from featstore.sampling.foreign import as_sampled
from featstore.storage.lock import OPENING_LOCK, READERS_LOCK, WRITER_LOCK
from featstore.storage.sections import SectionFile

__all__ = ["verify_pack"]

Int64s = npt.NDArray[np.int64]
TEMPORARY = ".tmp"


def verify_pack(pack: OfflineSamples, progress: bool = True) -> dict[str, Any]:
    """Check a pack as it is on disk now; see :meth:`featstore.Pack.verify`."""
    before = named(pack)
    try:
        return _Check(pack, before, progress).run()
    except (CorruptionError, FormatError, FileNotFoundError):
        # The cause may be a pack, or node data, that was replaced during the check.
        if named(pack) != before:
            raise StaleError(f"{pack.path}: the node data that the pack carries was replaced meanwhile; check it again") from None
        raise


class _Check:
    """One check of a pack; counts the files and bytes checked."""

    def __init__(self, pack: OfflineSamples, node_data: dict[str, dict[str, str]], progress: bool) -> None:
        self._pack, self._node_data, self._show = pack, node_data, progress
        self._known: set[str] = {pack.file(name) for name in (WRITER_LOCK, READERS_LOCK, OPENING_LOCK)}
        self.n_files = self.n_bytes = 0
        self._bar = Progress("verify", 0, False)

    def run(self) -> dict[str, Any]:
        pack = self._pack
        names = sorted(os.listdir(pack.path))
        layouts = list(zip(find_layouts(pack), layout_records(pack), strict=True))
        folders = [pack.file(options.name) for options, _ in layouts]
        # Samples and plans are read once more, to check their meaning.
        read = [pack.path, *folders, pack.file(SAMPLES), *(os.path.join(folder, PLAN) for folder in folders)]
        with Progress("verify", sum(_size(path) for path in read), self._show) as self._bar:
            self._record(pack.file(RECORD), RECORD, {**pack.record, NODE_DATA: self._node_data})
            if self._sections(pack.file(SAMPLES), "samples") != pack.record["samples"]:
                raise CorruptionError("these are not the samples that the pack was made with", pack.file(SAMPLES))
            self._check_samples()
            for each in carried(pack).values():
                self._sections(pack.file(each["file"]), NODE_DATA_KIND)
            for options, record in layouts:
                self._layout(options, record)
        left = partial_layouts(pack) + [pack.file(name) for name in names if name.endswith(TEMPORARY)]
        there = [*(entry.path for folder in (pack.path, *folders) for entry in os.scandir(folder))]
        return {
            "files": self.n_files,
            "bytes": self.n_bytes,
            "layouts": len(layouts),
            "node_data": sorted(self._node_data),
            "unfinished_bytes": sum(layout_bytes(path) if os.path.isdir(path) else os.path.getsize(path) for path in left),
            "others": sorted(os.path.relpath(path, pack.path) for path in {*there} - {*left} - {*folders} - self._known),
        }

    def _count(self, *paths: str) -> None:
        self._known.update(paths)
        self.n_files += len(paths)
        self.n_bytes += sum(os.path.getsize(path) for path in paths)

    def _sections(self, path: str, kind: str) -> str:
        """Check every byte of a file of sections; return its id."""
        file = SectionFile(path, kind)
        try:
            file.verify(self._bar.add)
        finally:
            file.close()
        self._bar.add(file.index_bytes)
        self._count(path)
        return file.file_id

    def _check_samples(self) -> None:
        """Check that every batch is valid: distinct nodes, blocks that fit each other, in the order in which they were drawn."""
        pack, path = self._pack, self._pack.file(SAMPLES)
        pool = BufferPool(Budget(available_memory()))
        size, n = os.path.getsize(path), len(pack)
        for number in range(n):
            batch = pack.batch(number, pool)
            place = divmod(number, pack.n_batches)
            try:
                as_sampled(untyped(batch, pack.types), pack.num_nodes, *place)
                check_types(batch, pack.types)
            except PluginError as error:
                raise CorruptionError(f"batch {number} is none: {error}", path) from None
            self._bar.add(size * (number + 1) // n - size * number // n)

    def _layout(self, options: LayoutOptions, record: dict[str, Any]) -> None:
        pack, folder = self._pack, self._pack.file(options.name)
        if record["samples"] != pack.record["samples"]:
            raise CorruptionError("this is the record of a layout of other samples", os.path.join(folder, "layout"))
        self._sections(os.path.join(folder, "layout"), "layout")
        begun = {
            "format": 1,
            "samples": record["samples"],
            "features": {each["name"]: [each["made_of"], each["row_bytes"]] for each in record["features"]},
        }
        self._record(os.path.join(folder, BEGUN), BEGUN, begun)
        needs = pack.of_rows(options.rows)
        tables = TierTables(folder, needs, len(record["features"]), (options.capacity, options.device_rows))
        try:
            tables.check_ids(record["tables"])
            for name in tables.ids:
                self._sections(os.path.join(folder, name), name)
            for number, feature in enumerate(record["features"]):
                self._feature(folder, number, feature, tables)
            self._check_plans(options, needs, tables, os.path.join(folder, PLAN))
        finally:
            tables.close()

    def _record(self, path: str, kind: str, expected: dict[str, Any]) -> None:
        self._sections(path, kind)
        if read_record(path, kind) != expected:
            raise CorruptionError("this is not the record that was expected here", path)

    def _feature(self, folder: str, number: int, feature: dict[str, Any], tables: TierTables) -> None:
        record = file_record(feature["file"], os.path.join(folder, "layout"))
        self._record(os.path.join(folder, f"done.{number}"), "done", feature["file"])
        path = os.path.join(folder, record.name)
        n_pages = FeatureExtents(tables, number, feature["row_bytes"]).extents.total_pages
        if record.n_rows != n_pages:
            raise CorruptionError(f"{record.n_rows} pages instead of {n_pages}", path)
        verify_file(folder, record, self._bar.add)
        self._count(path, f"{path}.sums")
        self._bar.add(record.n_sums_bytes)

    def _check_plans(self, options: LayoutOptions, needs: RowNeeds, tables: TierTables, path: str) -> None:
        """Replay the plans of all batches: every row must be at its planned address. Takes 8 bytes a row of the host tier."""
        pack, fill = self._pack, tables.fill_rows
        held = np.full(options.capacity, -1, np.int64)  # the row in each slot of the host tier
        held[: len(fill)] = fill
        size, n = os.path.getsize(path), len(pack)
        for number in range(n):
            if options.superbatch and number % (options.restart or pack.n_batches) % options.superbatch == 0:
                held[:] = -1
            ids = needs.ids(number).astype(np.int64)
            plan = tables.plan(number, ids)
            if not _places_rows(plan, ids, held, tables, number):
                raise CorruptionError(f"the plan of batch {number} does not find its rows", path)
            self._bar.add(size * (number + 1) // n - size * number // n)


def _places_rows(plan: BatchPlan, ids: Int64s, held: Int64s, tables: TierTables, number: int) -> bool:
    """Tell whether a plan finds each of a batch's rows once, at its address; ``held``, the host cache's rows, is then updated."""
    device = plan.device
    if device is not None:
        found = _at(tables.device_rows, device.slots)
        if found is None or len(device.positions) + len(device.others) != len(ids) or (found != ids[device.positions]).any():
            return False
        ids = ids[device.others]
    times = np.zeros(len(ids), np.int64)
    for part in plan.parts:
        positions = np.arange(len(ids)) if part.positions is None else part.positions
        wanted = _at(ids, positions)
        if wanted is None or len(wanted) != len(part.addresses):
            return False
        np.add.at(times, positions, 1)
        if part.tier == Tier.PACKED:  # extents are filled ascending
            right = bool((np.diff(wanted) > 0).all())
        else:
            found = _at(held, np.asarray(part.addresses)) if part.tier == Tier.HOST else _shared(tables, part.addresses, number)
            right = found is not None and bool((found == wanted).all())
        if not right:
            return False
    if plan.changes is not None:
        rows, slots = _at(ids, plan.changes.in_positions), plan.changes.in_slots
        if rows is None or _at(held, slots) is None or len(rows) != len(slots):
            return False
        held.put(slots, rows)
    return bool((times == 1).all())


def _at(values: Int64s, places: npt.NDArray[Any]) -> Int64s | None:
    """Return ``values[places]``; None if a place is out of range."""
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(values):
        return None
    found: Int64s = values.take(places)
    return found


def _shared(tables: TierTables, addresses: Any, number: int) -> Int64s | None:
    """Read the shared rows at ``addresses``; None if an address lies outside the batch's segment."""
    if tables.shared is None:
        return None
    begin, end = tables.shared.segment(number)
    return _at(tables.shared.rows(begin, end).astype(np.int64), np.asarray(addresses) - begin)


def _size(path: str) -> int:
    if not os.path.isdir(path):
        return os.path.getsize(path)
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file(follow_symlinks=False))
