"""Open address tables of a layout: the tier and address of each row of each batch. :mod:`.tiers` makes them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.cache.planned import NO_ROWS
from featstore.errors import CorruptionError
from featstore.gather.plan import BatchPlan, DeviceRows, Tier, TierRows
from featstore.pack.record import RowNeeds
from featstore.plan.planfile import PlanFile
from featstore.storage.sections import SectionFile

__all__ = ["DEVICE", "FILL", "PLAN", "SHARED", "SHARED_HEAD", "TABLES", "SharedRows", "TierTables"]

Ids = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]

TABLES = PLAN, FILL, DEVICE, SHARED = "plan", "fill", "device", "shared"  # files
SHARED_HEAD = 1  # number of sections in the file of shared rows before those of the segments


def checked_ids(ids: Ids, first: int, stop: int, what: str, path: str, *, ascend: bool = False) -> Ids:
    """Check integers of a file; CorruptionError unless all are in ``[first, stop)`` and, with ``ascend``, ascend."""
    if ids.dtype.kind != "i":
        raise CorruptionError(f"the {what} are {ids.dtype}", path)
    if len(ids) and not first <= int(ids.min()) <= int(ids.max()) < stop:
        raise CorruptionError(f"the {what} are not all from {first} to {stop - 1}", path)
    if ascend and not (ids[1:] > ids[:-1]).all():
        raise CorruptionError(f"the {what} do not ascend", path)
    return ids


class SharedRows:
    """The rows of the segments' caches, in their order on disk, from the file of shared rows."""

    def __init__(self, file: SectionFile, n_batches: int, n_features: int, n_rows: int) -> None:
        self._n_rows = n_rows
        self._file = file
        if not len(file):
            raise CorruptionError("no segments", file.path)
        head = file[0]
        if head.dtype.kind != "i" or len(head) != 1 + n_features or head.min() < 1:
            raise CorruptionError(f"segments of {len(head) - 1} features instead of {n_features}", file.path)
        self.length, self.group_rows = int(head[0]), head[1:].tolist()
        n_segments = -(-n_batches // self.length)
        if len(file) != SHARED_HEAD + n_segments + n_batches:  # checked before arrays of that size are made
            raise CorruptionError(f"{len(file)} sections for {n_batches} batches in segments of {self.length}", file.path)
        self._sections = SHARED_HEAD + (self.length + 1) * np.arange(n_segments)
        self._ends: Int64s = np.cumsum(file.lengths[self._sections])
        self._last: tuple[int, Ids] = (-1, NO_ROWS)

    @property
    def nbytes(self) -> int:
        """Bytes held by :meth:`rows`: one segment, and the next one that replaces it."""
        return 16 * int(self._file.lengths[self._sections].max(initial=0))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def rows(self, first: int, stop: int) -> Ids:
        """Read the rows at places ``first … stop - 1``, and keep the last segment read. For one thread."""
        found: list[Ids] = []
        segment = int(np.searchsorted(self._ends, first, side="right"))
        while first < stop:
            end = int(self._ends[segment])
            if self._last[0] != segment:
                found_rows = self._file[int(self._sections[segment])]
                self._last = (segment, checked_ids(found_rows, 0, self._n_rows, f"rows of segment {segment}", self._file.path))
            rows = self._last[1]
            begin = end - len(rows)
            found.append(rows[first - begin : stop - begin])
            first, segment = min(stop, end), segment + 1
        return np.concatenate([NO_ROWS, *found])

    def segment(self, batch: int) -> tuple[int, int]:
        """Find the places of the rows of a batch's segment: the first, and the one after the last."""
        number = batch // self.length
        return int(self._ends[number - 1]) if number else 0, int(self._ends[number])

    def _section(self, batch: int) -> int:
        return SHARED_HEAD + batch + batch // self.length + 1

    def addresses(self, batch: int, array: Callable[..., npt.NDArray[Any]] = np.empty) -> Ids:
        """Read the places of a batch's shared rows, ascending; ``array`` as for :meth:`PlanFile.plan`."""
        found = self._file.read(self._section(batch), array)
        return checked_ids(found, *self.segment(batch), f"places of batch {batch}", self._file.path)

    def counts(self, n_batches: int) -> Int64s:
        """Count the shared rows that each batch needs."""
        return self._file.lengths[[self._section(b) for b in range(n_batches)]]


class TierTables:
    """The open tables of a layout, which give each batch's plan. Thread-safe except for :meth:`close`.

    ``sizes`` bounds the slots: the rows of the host's cache and of the device. ``fill_rows``, int64, are the first rows of the
    host's cache; ``device_rows`` are the device's rows. The i-th of them is in slot i. ``shared`` has the segments' caches, if
    any. ``n_packed``, int64 [n_batches], counts the rows of each batch's extent. ``ids`` has the id of each file.
    """

    def __init__(self, folder: str, needs: RowNeeds, n_features: int, sizes: tuple[int, int] | None = None) -> None:
        self._files: list[SectionFile] = []
        self.ids: dict[str, str] = {}
        self._folder = folder
        n = len(needs)
        try:
            file = self._open(folder, PLAN)
            n_host, n_device = (needs.n_rows,) * 2 if sizes is None else sizes
            self._plans = PlanFile(file, Tier.PACKED, n_host)
            if len(self._plans) != n:
                raise CorruptionError(f"plans of {len(self._plans)} batches for {n}", file.path)
            fill = self._open(folder, FILL)
            if len(fill) != 2:
                raise CorruptionError(f"{len(fill)} sections instead of 2", fill.path)
            self.fill_rows: Int64s
            self.device_rows: Int64s
            self.fill_rows, self.device_rows = (
                checked_ids(fill[k], 0, needs.n_rows, f"rows of the {what}", fill.path, ascend=True).astype(np.int64)
                for k, what in enumerate(("host", "device"))
            )
            if len(self.fill_rows) > n_host or len(self.device_rows) > n_device:
                raise CorruptionError(
                    f"{len(self.fill_rows)} and {len(self.device_rows)} rows for {n_host} and {n_device}", fill.path
                )
            self._device = self._open(folder, DEVICE) if os.path.exists(os.path.join(folder, DEVICE)) else None
            if self._device is not None and len(self._device) != 2 * n:
                raise CorruptionError(f"{len(self._device)} sections for {n} batches", self._device.path)
            self.shared: SharedRows | None = None
            self.n_packed = self._plans.n_missed
            if os.path.exists(os.path.join(folder, SHARED)):
                self.shared = SharedRows(self._open(folder, SHARED), n, n_features, needs.n_rows)
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

    def check_ids(self, expected: Mapping[str, str]) -> None:
        """Raise CorruptionError or FileNotFoundError, naming the file, unless these are the tables of a layout's record."""
        for name in sorted({*self.ids, *expected}):
            path = os.path.join(self._folder, name)
            if name not in TABLES:
                raise CorruptionError(f"the record names a table {name!r}", os.path.join(self._folder, "layout"))
            if name not in self.ids:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if self.ids[name] != expected.get(name):
                raise CorruptionError("this is not the table that the layout was made with", path)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables that are held while the files of extents are made."""
        fills = 16 * (len(self.fill_rows) + len(self.device_rows))
        return fills + (0 if self.shared is None else self.shared.nbytes)

    def packed(self, number: int, ids: Ids) -> Ids:
        """Find the rows of a batch's extent; ``ids`` are the batch's input ids."""
        positions = self._plans.missed(number)[: int(self.n_packed[number])]
        if self._device is not None:
            ids = ids[self._on_host(number, self._device[2 * number], len(ids))]
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(ids):
            raise CorruptionError(f"the plan of batch {number} does not place its {len(ids)} rows", self._files[0].path)
        rows: Ids = ids.take(positions)
        return rows

    def _on_host(self, number: int, positions: Ids, n: int) -> npt.NDArray[np.bool_]:
        """Mark the rows of a batch of ``n`` that are not on the device; ``positions`` are those of the device's rows."""
        assert self._device is not None
        on_host = np.ones(n, bool)
        on_host.put(checked_ids(positions, 0, n, f"positions of batch {number}", self._device.path, ascend=True), False)
        return on_host

    def plan(self, number: int, ids: Int64s, array: Callable[..., npt.NDArray[Any]] = np.empty) -> BatchPlan:
        """Make the plan of a batch with the input ids ``ids``; ``array`` as for :meth:`PlanFile.plan`."""
        device = None
        if self._device is not None:
            slots = self._device.read(2 * number + 1, array)
            narrow = self._device.read(2 * number, array)
            on_host = self._on_host(number, narrow, len(ids))
            checked_ids(slots, 0, len(self.device_rows), f"slots of batch {number}", self._device.path)
            if len(slots) != len(narrow):
                raise CorruptionError(f"{len(slots)} slots of batch {number} for {len(narrow)} rows", self._device.path)
            positions = array(len(narrow), np.int64)
            positions[:] = narrow
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
                TierRows(Tier.DISK_CACHE, addresses, others.positions[k:]),
                TierRows(Tier.PACKED, others.addresses[:k], others.positions[:k]),
            )
        return BatchPlan(plan.n_rows, parts, plan.changes, device)

    def close(self) -> None:
        """Close the files; may be called again."""
        for file in self._files:
            file.close()
