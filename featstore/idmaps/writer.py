"""Writing the files of a map of names to ids: names in the order of their ids, and their hashes, sorted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from featstore.idmaps.idmap import bucket_of
from featstore.idmaps.keys import IntKeys, Keys, TextKeys
from featstore.storage.writer import FileRecord, RowFileWriter

__all__ = ["IdMapWriter", "OpenWriter"]

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
OpenWriter = Callable[[str, int, str], RowFileWriter]  # of a role, bytes of a row and a dtype

_PER_BUCKET = 16  # hashes of a bucket at most, on average; the table of buckets is at most half a byte a name
_STEP = 1 << 20


class IdMapWriter:
    """Write a map; a context manager, which removes what was not finished. One owner thread.

    Writers that have rows already, as another one left them, are gone on with, behind these names.
    """

    def __init__(self, kind: str, open_writer: OpenWriter) -> None:
        self.kind = kind
        self.n = 0
        self._open = open_writer
        self._n_bytes = 0
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            self._names = undo.enter_context(open_writer("id_names", *((1, "uint8") if kind == "text" else (8, "int64"))))
            if kind == "text":
                self._offsets = undo.enter_context(open_writer("id_offsets", 8, "int64"))
                if not self._offsets.n_rows:
                    self._offsets.write(_rows(np.zeros(1, np.int64), 8))
                self.n, self._n_bytes = self._offsets.n_rows - 1, self._names.n_rows
            else:
                self.n = self._names.n_rows
            self._stack = undo.pop_all()

    @property
    def path(self) -> str:
        """Path of the unfinished file of names."""
        return self._names.path

    def names_so_far(self, step: int) -> Iterator[Keys]:
        """Yield the names that are there, about ``step`` at a time; before the first one is added."""
        if self.kind != "text":
            for rows in self._names.rows_so_far(step):
                yield IntKeys(rows.view("<i8").reshape(-1))
            return
        offsets, rest = np.empty(0, np.int64), np.empty(0, np.uint8)
        pieces = self._names.rows_so_far(16 * step)
        for rows in self._offsets.rows_so_far(step):
            offsets = np.concatenate((offsets[-1:], rows.view("<i8").reshape(-1)))
            while len(rest) < offsets[-1] - offsets[0]:
                rest = np.concatenate((rest, next(pieces).reshape(-1)))
            n_bytes = int(offsets[-1] - offsets[0])
            yield TextKeys(offsets - offsets[0], rest[:n_bytes])
            rest = rest[n_bytes:]

    def add(self, keys: Keys) -> None:
        """Append the names of the next ids."""
        if isinstance(keys, TextKeys):
            base = keys.offsets[0]
            self._names.write(keys.data[base : keys.offsets[-1]].reshape(-1, 1))
            self._offsets.write(_rows(keys.offsets[1:] + (self._n_bytes - base), 8))
            self._n_bytes += int(keys.offsets[-1] - base)
        else:
            assert isinstance(keys, IntKeys)
            self._names.write(_rows(keys.values, 8))
        self.n += len(keys)

    def finish(self, blocks: Iterable[tuple[UInt64s, Int64s]]) -> tuple[dict[str, Any], list[FileRecord]]:
        """Write the hashes, which come sorted with their ids, in blocks; return the catalog's entry, and the files.

        A hash is the first word that :meth:`Keys.hashes <featstore.idmaps.keys.TextKeys.hashes>` gives a name.
        """
        bits = (self.n // _PER_BUCKET).bit_length()
        files = {"id_names": self._names.commit()}
        if self.kind == "text":
            files["id_offsets"] = self._offsets.commit()
        with self._open("id_hashes", 16, "int64") as hashes, self._open("id_buckets", 8, "int64") as buckets:
            done = begun = 0
            for all_hashes, all_ids in blocks:
                for first in range(0, len(all_hashes), _STEP):
                    values, ids = all_hashes[first : first + _STEP], all_ids[first : first + _STEP]
                    rows = np.stack((values.view(np.int64), ids), axis=1)
                    hashes.write(_rows(rows, 16))
                    bucket = bucket_of(values, bits)
                    last = int(bucket[-1]) + 1
                    begins = np.searchsorted(bucket, np.arange(begun, last), side="left") + done
                    buckets.write(_rows(begins, 8))
                    begun, done = last, done + len(values)
            assert done == self.n, "there is a hash for each name"
            for first in range(begun, (1 << bits) + 1, _STEP):
                rest = min(_STEP, (1 << bits) + 1 - first)
                buckets.write(_rows(np.full(rest, done, np.int64), 8))
            files["id_hashes"], files["id_buckets"] = hashes.commit(), buckets.commit()
        entry = {"kind": self.kind, "names": self.n, "files": {role: file.name for role, file in files.items()}}
        return entry, list(files.values())

    def __enter__(self) -> IdMapWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _rows(values: npt.NDArray[Any], width: int) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values, dtype="<i8").view(np.uint8).reshape(-1, width)
