"""Check of the structure of maps of names to ids, in bounded memory; the pages are checked with those of all files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from featstore.errors import CorruptionError
from featstore.idmaps.idmap import IdMapFiles, bucket_of
from featstore.idmaps.keys import IntKeys, TextKeys, mixed
from featstore.storage.calls import pread_exactly
from featstore.storage.format import HEADER_BYTES
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.update import OpenFile
from featstore.storage.writer import FileRecord

__all__ = ["map_bytes", "verify_map"]

Int64s = npt.NDArray[np.int64]

_BLOCK = 1 << 17  # names, hashes and buckets checked together
_BLOCK_BYTES = 8 << 20  # of text


def verify_map(found: IdMapFiles, files: Mapping[str, OpenFile], progress: Callable[[int], None]) -> None:
    """Check that offsets ascend, that hashes are sorted, in their buckets and those of the names, and that each id occurs once.

    Reads each file once. Raises CorruptionError. ``progress`` gets the bytes that were read.
    """
    check = _Check(files, progress)
    names = total = 0
    for keys in check.names(found):
        names += _digest(keys.hashes()[:, 0], np.arange(total, total + len(keys)))
        total += len(keys)
    previous, begun, done, table = 0, 0, 0, 0
    bucket_rows = check.rows(found.buckets)
    pending = np.empty(0, np.int64)
    for block in check.rows(found.hashes, 2):
        hashes, ids = block[:, 0].copy().view(np.uint64), block[:, 1]
        if (ids < 0).any() or (ids >= found.n).any():
            raise check.damage(found.hashes, "an id is no node's", done)
        if int(hashes[0]) < previous or (hashes[1:] < hashes[:-1]).any():
            raise check.damage(found.hashes, "the hashes of names do not ascend", done)
        table += _digest(hashes, ids)
        bucket = bucket_of(hashes, found.bits)
        while begun <= int(bucket[-1]):  # begins of the buckets up to the last one that is here
            if not len(pending):
                pending = next(bucket_rows, pending)
            some = pending[: int(bucket[-1]) + 1 - begun]
            wanted = np.searchsorted(bucket, np.arange(begun, begun + len(some)), side="left") + done
            if not len(some) or (some != wanted).any():
                raise check.damage(found.buckets, "a bucket of hashes begins at a wrong place", begun)
            begun, pending = begun + len(some), pending[len(some) :]
        previous, done = int(hashes[-1]), done + len(hashes)
    while True:
        if (pending != done).any():
            raise check.damage(found.buckets, "a bucket of hashes begins at a wrong place", begun)
        begun += len(pending)
        if (more := next(bucket_rows, None)) is None:
            break
        pending = more
    if names % 2**64 != table % 2**64:
        raise check.damage(found.hashes, "the hashes are not those of the names, so names would get ids of others", 0)


def _digest(hashes: npt.NDArray[np.uint64], ids: Int64s) -> int:
    """Sum hashes of pairs of a hash and an id: the same in any order."""
    return int(mixed(hashes ^ mixed(ids)).sum(dtype=np.uint64))


class _Check:
    def __init__(self, files: Mapping[str, OpenFile], progress: Callable[[int], None]) -> None:
        self._files, self._progress = files, progress

    def _read(self, record: FileRecord, first: int, n: int) -> bytes:
        file = self._files[record.name]
        self._progress(n)
        return bytes(pread_exactly(file.fd, n, HEADER_BYTES + first, file.path))

    def rows(self, record: FileRecord, width: int = 1) -> Iterator[Int64s]:
        """Yield the rows of a file of integers."""
        for first in range(0, record.n_rows, _BLOCK):
            n = min(_BLOCK, record.n_rows - first)
            found = np.frombuffer(self._read(record, first * 8 * width, n * 8 * width), "<i8").astype(np.int64)
            yield found if width == 1 else found.reshape(n, width)

    def names(self, found: IdMapFiles) -> Iterator[IntKeys | TextKeys]:
        if found.offsets is None:
            for values in self.rows(found.names):
                yield IntKeys(values)
            return
        last, row = 0, 0
        for block in self.rows(found.offsets):
            if row == 0:
                if int(block[0]) != 0:
                    raise self.damage(found.offsets, "the first name does not begin with the first byte", 0)
            else:
                block = np.concatenate(([last], block))
            if (np.diff(block) < 0).any() or int(block[-1]) > found.names.n_rows:
                raise self.damage(found.offsets, "offsets of names do not ascend", row)
            first = 0
            while first < len(block) - 1:  # as many names as a block of bytes has, or one longer name
                end = max(first + 1, int(np.searchsorted(block, block[first] + _BLOCK_BYTES, side="right")) - 1)
                begin, length = int(block[first]), int(block[end] - block[first])
                data = np.frombuffer(self._read(found.names, begin, length), np.uint8)
                yield TextKeys(block[first : end + 1] - begin, data)
                first = end
            last, row = int(block[-1]), row + len(block)
        if last != found.names.n_rows:
            raise self.damage(found.offsets, f"the names end at byte {last} of {found.names.n_rows}", found.n)

    def damage(self, record: FileRecord, message: str, row: int) -> CorruptionError:
        at = HEADER_BYTES + row * record.layout.row_bytes
        return CorruptionError(message, self._files[record.name].path, at // PAGE_BYTES * PAGE_BYTES)


def map_bytes(found: IdMapFiles) -> int:
    """Count the bytes that :func:`verify_map` reports as progress."""
    return sum(record.n_rows * record.layout.row_bytes for record in found.records)
