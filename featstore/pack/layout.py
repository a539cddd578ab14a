"""Frozen layouts of a pack (DiskGNN): the place of each row of the pack's batches, decided once, and the copied rows.

A layout is a directory in the pack. It has the address tables of all batches (:mod:`featstore.pack.tiers`), a file of extents for
each feature, which begins with the rows that segments of batches share, and the record ``layout``, written last.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.cache.table import FILL_BYTES
from featstore.config import format_size
from featstore.errors import CorruptionError, FormatError, StaleError
from featstore.gather.plan import Tier
from featstore.gather.sources import ExtentSource
from featstore.pack.record import OfflineSamples, RowNeeds, is_file_name, read_record
from featstore.pack.tables import TierTables
from featstore.plan.superbatchextents import open_extents
from featstore.storage.extents import KIND, PAGES, ExtentMap
from featstore.storage.format import DTYPES, MAX_ROW_BYTES, sums_seed
from featstore.storage.layout import PAGE_BYTES, RowLayout
from featstore.storage.ordered import Ordered
from featstore.storage.pagestream import PagedRows
from featstore.storage.reader import Reader
from featstore.storage.rowfile import RowFile
from featstore.storage.update import check_file
from featstore.storage.writer import FileRecord
from featstore.topology.noderows import NodeRows, RowsOfTypes

__all__ = [
    "LAYOUT_PREFIX",
    "PARTIAL",
    "FeatureExtents",
    "Layout",
    "LayoutOptions",
    "PackedFeature",
    "check_disk",
    "extent_map",
    "file_record",
    "fill_step",
    "find_layouts",
    "fitting",
    "layout_bytes",
    "layout_records",
    "layout_rows",
    "partial_layouts",
    "rows_entry",
    "rows_of_record",
    "unfinished_bytes",
]

Int64s = npt.NDArray[np.int64]
_ANOTHER = "this is the record of another layout, or of another pack"
LAYOUT_PREFIX, PARTIAL = "layout-", ".partial"
FILE_ID = re.compile("[0-9a-f]{32}")
DEVICE_FILL_BYTES = 4 << 20  # of one read of the device's rows, which pass through host memory


@dataclass(frozen=True)
class LayoutOptions:
    """Options of a layout.

    The host tier holds ``capacity`` rows by ``policy``. A static policy keeps the same rows for all batches; a planned one plans
    ``superbatch`` batches together, from an empty cache (0 for static ones). The device holds ``device_rows``. ``digest`` is the
    policy's digest (:func:`featstore.pack.fingerprint.digest_of`). ``disk`` is the limit in bytes of a layout that was made
    beside a larger one; otherwise 0, whatever the limit. ``rows`` are those of the types whose features are packed, of the column
    that holds them; None if nodes have no types. If it is not 0, planning begins anew after every ``restart`` batches of an
    epoch, where a rank's share of them ends.
    """

    features: tuple[str, ...]
    policy: str
    capacity: int
    superbatch: int
    device_rows: int = 0
    digest: str = ""
    disk: int = 0
    rows: RowsOfTypes | None = None
    restart: int = 0

    @property
    def name(self) -> str:
        """Name of the layout's directory."""
        text = repr((sorted(self.features), self.policy, self.capacity, self.superbatch, self.device_rows)) + self.digest
        text += f" {self.disk}" if self.disk else ""
        text += "" if self.rows is None else f" {self.rows.n} {rows_entry(self.rows)}"
        text += f" restart {self.restart}" if self.restart else ""
        return LAYOUT_PREFIX + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class PackedFeature:
    """A feature to pack: its file, and its dtype and shape."""

    file: PagedRows
    dtype: str
    shape: tuple[int, ...]


def layout_rows(rows: NodeRows) -> RowsOfTypes | None:
    """Get the rows of a loader's features as the options of a layout name them."""
    return rows if isinstance(rows, RowsOfTypes) else None


def rows_entry(rows: RowsOfTypes) -> list[list[Any]]:
    """Describe rows as a layout's record does: each type, and the row of its first node."""
    return [[kind.name, first] for kind, first in rows.parts]


def rows_of_record(pack: OfflineSamples, record: Mapping[str, Any], path: str) -> RowsOfTypes | None:
    """Read the rows that a layout's record describes; CorruptionError if they are none of a column of the pack's types."""
    kinds = pack.types.nodes
    if pack.types.is_one:
        return None
    try:
        parts = tuple((kinds[str(name)], int(first)) for name, first in record["types"])
        n = int(record["features"][0]["shape"][0])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CorruptionError(f"the record's types are {record.get('types')!r:.100}: {error!r}", path) from None
    ends = sorted((first, first + kind.n) for kind, first in parts)
    before = [0, *(stop for _, stop in ends)]
    is_right = all(first >= stop for (first, _), stop in zip(ends, before, strict=False)) and before[-1] <= n
    if not parts or not is_right or len({kind.name for kind, _ in parts}) < len(parts):
        raise CorruptionError(f"the record's types {record['types']!r:.100} are not parts of {n} rows", path)
    return RowsOfTypes(n, parts)


def find_layouts(pack: OfflineSamples) -> list[LayoutOptions]:
    """List the options of every layout of a pack."""
    return [_options(record, rows_of_record(pack, record, pack.path)) for record in layout_records(pack)]


def fitting(pack: OfflineSamples, layouts: Iterable[LayoutOptions], disk: int | None) -> LayoutOptions | None:
    """Choose the largest of a pack's layouts that takes at most ``disk`` bytes; None if all take more."""
    sizes = {each: layout_bytes(pack.file(each.name)) for each in layouts}
    return max((each for each in sizes if disk is None or sizes[each] <= disk), key=sizes.__getitem__, default=None)


def layout_bytes(folder: str) -> int:
    """Sum the bytes of all files of the layout in ``folder``."""
    return sum(entry.stat().st_size for entry in os.scandir(folder))


def unfinished_bytes(pack: OfflineSamples) -> int:
    """Sum the bytes of interrupted layouts; a later request for such a layout finishes it."""
    return sum(map(layout_bytes, partial_layouts(pack)))


def partial_layouts(pack: OfflineSamples) -> list[str]:
    """List the folders of interrupted layouts."""
    names = sorted(os.listdir(pack.path))
    return [pack.file(name) for name in names if name.startswith(LAYOUT_PREFIX) and name.endswith(PARTIAL)]


def check_disk(folder: str, disk: int | None) -> None:
    """Raise OSError (ENOSPC), with advice, if the layout in ``folder`` takes more than ``disk`` bytes."""
    n_bytes = layout_bytes(folder)
    if disk is not None and n_bytes > disk:
        raise OSError(
            errno.ENOSPC,
            f"the layout was made with more disk: it takes {format_size(n_bytes)} ({n_bytes} bytes) of a disk of "
            f"{format_size(disk)}; give it as much, or with a static policy say cache=, and a smaller one is made beside it",
            folder,
        )


def layout_records(pack: OfflineSamples) -> list[dict[str, Any]]:
    """Read the record of every layout of a pack."""
    names = [name for name in sorted(os.listdir(pack.path)) if name.startswith(LAYOUT_PREFIX) and not name.endswith(PARTIAL)]
    return [_read(pack, name) for name in names]


def _read(pack: OfflineSamples, name: str) -> dict[str, Any]:
    folder = pack.file(name)
    if os.path.islink(folder):
        raise FormatError(f"{folder}: a symbolic link within a pack", folder)
    path = os.path.join(folder, "layout")
    record = read_record(path, "layout")
    rows = rows_of_record(pack, record, path)
    if _options(record, rows).name != name:
        raise CorruptionError(_ANOTHER, path)
    n = pack.num_nodes if rows is None else rows.n
    for feature in record["features"]:
        dtype, shape, row_bytes = feature["dtype"], feature["shape"], feature["row_bytes"]
        if dtype not in DTYPES or not shape or shape[0] != n:
            raise CorruptionError(
                f"feature {feature['name']!r} of {dtype} {shape}, for {n} {'nodes' if rows is None else 'rows'}", path
            )
        if not 1 <= row_bytes == math.prod(shape[1:]) * DTYPES[dtype][1] <= MAX_ROW_BYTES:
            raise CorruptionError(f"rows of {row_bytes} bytes of {dtype} {shape}", path)
        file_record(feature["file"], path)
    return record


def _options(record: Mapping[str, Any], rows: RowsOfTypes | None) -> LayoutOptions:
    return LayoutOptions(
        tuple(feature["name"] for feature in record["features"]),
        record["policy"],
        record["capacity"],
        record["superbatch"],
        record["device_rows"],
        record["digest"],
        record.get("disk", 0),
        rows,
        record.get("restart", 0),
    )


class Layout:
    """An open layout.

    ``tables`` has the tier and address of each row of the pack's batches. ``group`` consecutive batches must run in their order,
    from an empty cache; 1: batches may run in any order. FileNotFoundError: the pack has no such layout. StaleError: another pack
    was made in this one's place.
    """

    def __init__(self, pack: OfflineSamples, options: LayoutOptions, reader: Reader) -> None:
        self.options = options
        self.folder = pack.file(options.name)
        self.record = _read(pack, options.name)
        path = os.path.join(self.folder, "layout")
        if self.record["samples"] != pack.record["samples"]:
            pack.check_in_place()
            raise CorruptionError(_ANOTHER, path)
        self.group = options.superbatch or 1
        self._files: dict[str, RowFile] = {}
        self._extents: dict[str, FeatureExtents] = {}
        self._shared: dict[str, RowFile] = {}
        features = self.record["features"]
        needs, sizes = pack.of_rows(options.rows), (options.capacity, options.device_rows)
        self.tables = TierTables(self.folder, needs, len(features), sizes)
        try:
            self.tables.check_ids(self.record["tables"])
            reader.expect([feature["file"]["sums_bytes"] for feature in features])
            for number, feature in enumerate(features):
                plan = FeatureExtents(self.tables, number, feature["row_bytes"])
                record = file_record(feature["file"], path)
                if record.n_rows != plan.extents.total_pages:
                    raise CorruptionError(f"{record.n_rows} pages instead of {plan.extents.total_pages}", path)
                file = check_file(self.folder, record)
                name = feature["name"]
                self._extents[name] = plan
                self._files[name] = open_extents(reader, self.folder, record)
                if plan.n_shared:
                    self._shared[name] = reader.open(
                        file,
                        layout=plan.layout,
                        n_rows=plan.n_shared,
                        seed=record.seed,
                        sums_seed=sums_seed(record.seed),
                        n_bytes=record.n_bytes,
                    )
        except BaseException:
            self.close()
            raise

    def batches(self, name: str, order: Int64s, window_bytes: int) -> ExtentSource:
        """Make the source of a feature's tier ``PACKED``, for batches that run in ``order``."""
        plan = self._extents[name]
        return ExtentSource(self._files[name], plan.extents, plan.n_pieces + order, window_bytes)

    def fill(self, name: str, tier: Tier, window_bytes: int) -> ExtentSource:
        """Make the source of the rows that fill a feature's tier ``HOST`` or ``DEVICE`` at first, in pieces, ascending."""
        plan = self._extents[name]
        return ExtentSource(self._files[name], plan.extents, plan.fill(tier), window_bytes)

    def shared(self, name: str) -> RowFile | None:
        """Get the source of a feature's tier ``DISK_CACHE``; None if batches share no rows."""
        return self._shared.get(name)

    def check(self, sources: Mapping[str, PackedFeature]) -> None:
        """Raise StaleError unless ``sources`` are the features that were packed."""
        for feature in self.record["features"]:
            source = sources[feature["name"]]
            if feature["made_of"] != source.file.fingerprint:
                raise StaleError(
                    f"{self.folder} holds rows of another feature {feature['name']!r}, or of an earlier one; "
                    "remove this directory, and the layout is made anew",
                    os.path.join(self.folder, "layout"),
                )

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files of the layout."""
        return layout_bytes(self.folder)

    def close(self) -> None:
        """Close the layout's files; may be called again."""
        self.tables.close()
        for file in (*self._files.values(), *self._shared.values()):
            file.close()


def fill_step(row_bytes: int, tier: Tier) -> int:
    """Compute the rows of one read that fills a tier in memory."""
    return max(1, (FILL_BYTES if tier == Tier.HOST else DEVICE_FILL_BYTES) // row_bytes)


class FeatureExtents:
    """The extents of one feature's file: pieces of shared rows, an extent for every batch, extents to fill tiers in memory."""

    def __init__(self, tables: TierTables, number: int, row_bytes: int) -> None:
        self._tables = tables
        shared = tables.shared
        self.n_shared = 0 if shared is None else len(shared)
        group_rows = 1 if shared is None else shared.group_rows[number]
        self.layout = RowLayout(row_bytes, group_rows, -(-group_rows * row_bytes // PAGE_BYTES) * PAGE_BYTES)
        self.n_batches = len(tables.n_packed)
        fills = (len(tables.fill_rows), len(tables.device_rows))
        self.extents = extent_map(self.n_shared, group_rows, tables.n_packed, fills, row_bytes)
        self.n_pieces = -(-self.n_shared // group_rows)
        self._row_bytes = row_bytes

    def fill(self, tier: Tier) -> Int64s:
        """Get the numbers of the extents that fill a tier at first."""
        n_host = -(-len(self._tables.fill_rows) // fill_step(self._row_bytes, Tier.HOST))
        first = self.n_pieces + self.n_batches
        return np.arange(first, first + n_host) if tier == Tier.HOST else np.arange(first + n_host, len(self.extents.n_rows))

    def ordered(self) -> Ordered:
        """Make the object that puts shared rows in their order."""
        size = self.layout.group_rows

        def rows_of(piece: int) -> npt.NDArray[Any]:
            assert self._tables.shared is not None
            return self._tables.shared.rows(piece * size, min((piece + 1) * size, self.n_shared))

        return Ordered(self.n_pieces, rows_of, self.layout)

    def rows_of(self, needs: RowNeeds, extent: int) -> npt.NDArray[Any]:
        """Get the rows of an extent that is no piece of shared rows."""
        number = extent - self.n_pieces
        if number < self.n_batches:
            return self._tables.packed(number, needs.ids(number))
        for tier, rows in ((Tier.HOST, self._tables.fill_rows), (Tier.DEVICE, self._tables.device_rows)):
            mine, step = self.fill(tier), fill_step(self._row_bytes, tier)
            if extent in mine:
                first = (extent - int(mine[0])) * step
                return rows[first : first + step]
        raise IndexError(f"extent {extent} does not exist")


def extent_map(n_shared: int, group_rows: int, n_packed: Int64s, fills: Sequence[int], row_bytes: int) -> ExtentMap:
    """Make the map of every extent's rows; tiers in memory are filled in the same pieces as caches (:func:`fill_step`)."""
    pieces = [min(group_rows, n_shared - first) for first in range(0, n_shared, group_rows)]
    fill = [
        min(step, n - first)
        for n, step in zip(fills, (fill_step(row_bytes, Tier.HOST), fill_step(row_bytes, Tier.DEVICE)), strict=True)
        for first in range(0, n, step)
    ]
    return ExtentMap(np.concatenate([np.array(pieces, np.int64), n_packed, np.array(fill, np.int64)]), row_bytes)


def file_record(record: Mapping[str, Any], where: str) -> FileRecord:
    """Read the description of a file of extents from a layout's record; FormatError, which names ``where``, if it is none."""
    name, file_id = record["name"], record["id"]
    if not is_file_name(name) or not FILE_ID.fullmatch(file_id):
        raise FormatError(f"{where}: {name!r} with the id {file_id!r} is no file of extents", where)
    found = FileRecord(name, KIND, file_id, 1, record["pages"], "uint8", PAGES, record["bytes"], record["sums_bytes"])
    try:
        found.check(where)
    except FormatError as error:
        raise FormatError(str(error), where) from None
    return found
