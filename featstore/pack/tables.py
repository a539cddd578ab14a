"""The address tables of a layout, open: which tier holds each row of each batch, and where. :mod:`.tiers` makes them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.cache.planned import NO_ROWS
from featstore.errors import CorruptionError
from featstore.gather.plan import BatchPlan, DeviceRows, Part, Tier
from featstore.pack.record import OfflineSamples
from featstore.plan.planfile import PlanFile
from featstore.storage.sections import SectionFile

__all__ = ["DEVICE", "FILL", "PLAN", "SHARED", "SHARED_HEAD", "TABLES", "SharedRows", "TierTables"]

Ids = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]

TABLES = PLAN, FILL, DEVICE, SHARED = "plan", "fill", "device", "shared"  # files
SHARED_HEAD = 1  # sections of the file of shared rows before those of the segments


class SharedRows:
    """The rows of the segments' caches in the order in which they lie, from the file of shared rows."""

    def __init__(self, file: SectionFile, n_batches: int, n_features: int) -> None:
        self._file = file
        head = file[0]
        if len(head) != 1 + n_features or head.min() < 1:
            raise CorruptionError(f"segments of {len(head) - 1} features instead of {n_features}", file.path)
        self.length, self.group_rows = int(head[0]), head[1:].tolist()
        n_segments = -(-n_batches // self.length)
        if len(file) != SHARED_HEAD + n_segments + n_batches:
            raise CorruptionError(f"{len(file)} sections for {n_batches} batches in segments of {self.length}", file.path)
        self._sections = SHARED_HEAD + (self.length + 1) * np.arange(n_segments)
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
        return SHARED_HEAD + batch + batch // self.length + 1

    def addresses(self, batch: int, array: Callable[..., npt.NDArray[Any]] = np.empty) -> Ids:
        """Return where a batch's shared rows lie, ascending; ``array`` as for :meth:`PlanFile.plan`."""
        return self._file.read(self._section(batch), array)

    def counts(self, n_batches: int) -> Int64s:
        """Return how many shared rows each batch needs."""
        return self._file.lengths[[self._section(b) for b in range(n_batches)]]


class TierTables:
    """The tables of a layout, open; a batch's plan, by number. Thread-safe but for :meth:`close`.

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
