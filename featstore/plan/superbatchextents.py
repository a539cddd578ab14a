"""Files of extents: those of one superbatch, from which its batches read their missed rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np

from featstore.gather.sources import ExtentSource
from featstore.storage.extents import ExtentMap
from featstore.storage.format import sums_seed
from featstore.storage.pagestream import Arenas
from featstore.storage.reader import Reader
from featstore.storage.reuse import FileReuse
from featstore.storage.rowfile import ReadStats, RowFile
from featstore.storage.rundir import DiskQuota, remove_file
from featstore.storage.writer import FileRecord

__all__ = ["SuperbatchExtents", "open_extents"]


def open_extents(reader: Reader, folder: str, record: FileRecord) -> RowFile:
    """Open a file of extents that an :class:`ExtentWriter` finished."""
    path, seed = os.path.join(folder, record.name), record.seed
    return reader.open(path, layout=record.layout, n_rows=record.n_rows, seed=seed, sums_seed=sums_seed(seed))


class SuperbatchExtents:
    """The extents of one superbatch in run files, one file for each feature."""

    def __init__(
        self,
        reader: Reader,
        disk: DiskQuota,
        window_bytes: int,
        reuse: FileReuse,
        arenas: Mapping[str, Arenas],
        reads: Callable[[ReadStats], None],
    ) -> None:
        self._reader, self._disk, self._window_bytes, self._reuse = reader, disk, window_bytes, reuse
        self._arenas, self._reads = arenas, reads
        self._files: dict[str, tuple[RowFile, ExtentMap]] = {}
        self._made: list[tuple[str, FileRecord]] = []
        self._sources: dict[str, ExtentSource] = {}

    def add(self, name: str, folder: str, record: FileRecord, extents: ExtentMap) -> None:
        """Open the extents of a feature, which are written."""
        path = os.path.join(folder, record.name)
        self._made.append((path, record))
        self._files[name] = open_extents(self._reader, folder, record), extents

    def source(self, name: str) -> ExtentSource:
        """Return the tier ``PACKED`` of a feature. Gathers ask for extents in the order of the batches."""
        if name not in self._sources:
            file, extents = self._files[name]
            order = np.arange(len(extents.n_rows))
            self._sources[name] = ExtentSource(file, extents, order, self._window_bytes, self._arenas[name])
        return self._sources[name]

    def stop(self) -> None:
        """Stop reading."""
        while self._sources:
            self._reads(self._sources.popitem()[1].close())

    def remove(self) -> None:
        """Delete the files."""
        self.stop()
        while self._files:
            self._files.popitem()[1][0].close()
        while self._made:
            path, record = self._made.pop()
            if remove_file(f"{path}.sums"):
                self._disk.give(record.n_sums_bytes)
            self._reuse.keep(path, record.n_bytes)
