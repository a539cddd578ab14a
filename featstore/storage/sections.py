"""Files of numbered arrays that are written once and read back by number: samples, plans, traces.

Arrays follow one another, and an index of offsets, lengths, dtypes and checksums ends the file. Each array is checked whenever
it is read. The checksum's seed comes from the file's kind, its id and the array's number, so that bytes of another file or
another array fail the check.
"""

from __future__ import annotations

import array as arrays
import contextlib
import os
import struct
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from featstore._core.descriptor import open_fd
from featstore.errors import ClosedError, CorruptionError, FormatError, VersionError
from featstore.storage.calls import close_fd, close_quietly, fsync_fd, naming, open_regular, pread_exactly, pread_into, pwrite_all
from featstore.storage.direct import DirectWriter, pread_direct, set_direct
from featstore.storage.directory import OpenDirectory
from featstore.storage.format import DTYPES, file_seed
from featstore.storage.rundir import DiskQuota, remove_file
from featstore.storage.writer import fsync_directory, make_durable

__all__ = ["SectionFile", "SectionWriter", "replacing"]

Array = npt.NDArray[Any]
Writer = TypeVar("Writer", bound="SectionWriter")

MAGIC: Final = b"FSSECT\0\0"
SECTIONS_VERSION: Final = 1
_TAIL: Final = struct.Struct("<8sII32s16sQQQ")  # magic, version, byte-order mark, kind, id, entries, index offset, index sum
_BYTE_ORDER_MARK: Final = 0x01020304
_ENTRY: Final = np.dtype([("offset", "<u8"), ("items", "<u8"), ("dtype", "<u8"), ("sum", "<u8")])
_CODES: Final = {np.dtype(name): code for name, (code, _) in DTYPES.items() if name != "bfloat16"} | {np.dtype(np.uint64): 64}
_DTYPES: Final = {code: dtype for dtype, code in _CODES.items()}
_MASK: Final = 2**64 - 1
_WIDTHS: Final = np.array([_DTYPES[code].itemsize if code in _DTYPES else 0 for code in range(max(_DTYPES) + 1)], np.uint64)
_VERIFY_BYTES: Final = 1 << 20


def _sum(data: memoryview | bytes, seed: int, number: int) -> int:
    return xxhash.xxh3_64_intdigest(data, (seed + number) & _MASK)


class SectionWriter:
    """Write arrays one after another; the file appears when :meth:`finish` returns. One owner thread.

    The writer is a context manager; leaving it without :meth:`finish` removes the file. ``kind`` names the kind of arrays, in
    up to 32 ASCII characters. ``disk`` pays for every byte before it is written. If ``direct`` is not 0, writes, and reads of
    the file that :meth:`finish` returns, bypass the page cache. Writes then use two buffers of ``direct`` bytes each, which the
    caller counts.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str, disk: DiskQuota | None = None, direct: int = 0) -> None:
        self.path = os.fspath(path)
        self._kind = kind.encode("ascii")
        self._id = uuid.uuid4().bytes
        self._seed = file_seed(kind, self._id, 0)
        self._disk = disk
        self._paid = 0
        self._entries = arrays.array("Q")  # four words for each array, those of _ENTRY; compact, as there may be very many
        self._offset = 0
        self._temporary = f"{self.path}.tmp"
        self._fd: int = open_fd(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            self._direct = DirectWriter(self._fd, self.path, direct) if direct else None
        except BaseException:
            self._direct = None
            self.abort()
            raise

    def append(self, array: Array) -> int:
        """Write a 1-D array of a plain numeric dtype; return its number. After an OSError the file is gone."""
        if self._fd < 0:
            raise ValueError(f"the writer of {self.path} is closed")
        data = np.ascontiguousarray(array)
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        try:
            self._write(view)
        except BaseException:
            self.abort()
            raise
        number = len(self._entries) // 4
        self._entries.extend((self._offset - len(view), len(data), _CODES[data.dtype], _sum(view, self._seed, number)))
        return number

    def read(self, number: int, array: Callable[..., Array] = np.empty) -> Array:
        """Read and check an appended array, as :meth:`SectionFile.read` does; not allowed with ``direct``."""
        assert self._direct is None, "what is not written yet cannot be read"
        if self._fd < 0:
            raise ClosedError(f"{self.path} is closed")
        if not 0 <= number < len(self._entries) // 4:
            raise IndexError(f"no array {number} of {len(self._entries) // 4}")
        offset, items, code, expected = self._entries[4 * number : 4 * number + 4]
        memory = array(items * _DTYPES[code].itemsize, np.uint8).data
        pread_into(self._fd, memory, offset, self._temporary)
        if _sum(memory, self._seed, number) != expected:
            raise CorruptionError(f"array {number} is damaged", self._temporary, offset)
        return np.frombuffer(memory, _DTYPES[code])

    def _write(self, view: memoryview | bytes) -> None:
        if self._disk is not None:
            self._disk.take(len(view), self.path)
            self._paid += len(view)
        if self._direct is None:
            pwrite_all(self._fd, view, self._offset, self.path)
        else:
            self._direct.append(view)
        self._offset += len(view)

    def finish(self, *, durable: bool = False) -> SectionFile:
        """Close the file with its index and return it open for reading; ``durable`` also flushes it to the drive."""
        if self._fd < 0:
            raise ValueError(f"the writer of {self.path} is closed")
        try:
            index = np.array(self._entries, "<u8").tobytes()
            where = self._offset
            self._write(index)
            index_sum = _sum(index, self._seed, _MASK)
            tail = (MAGIC, SECTIONS_VERSION, _BYTE_ORDER_MARK, self._kind, self._id, len(self._entries) // 4, where, index_sum)
            body = _TAIL.pack(*tail)
            self._write(body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)))
            if self._direct is not None:
                self._direct.finish()
            if durable:
                fsync_fd(self._fd, self._temporary)
            self._close()
            replaces = os.path.lexists(self.path)
            os.rename(self._temporary, self.path)
            folder = os.path.dirname(self.path) or "."
            if replaces:  # the old file is gone, so the new one stays even if a later step fails
                if durable:
                    make_durable(folder, self.path)
            else:
                self._temporary = self.path  # the file that abort() removes after an error
                if durable:
                    fsync_directory(folder)
            return SectionFile(self.path, self._kind.decode(), disk=self._disk, paid=self._paid, direct=self._direct is not None)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Close and remove the unfinished file; may be called again."""
        if self._direct is not None:
            self._direct.abort()
        try:
            with contextlib.suppress(OSError):  # a delayed write does not matter: the file is removed
                self._close()
        finally:
            if remove_file(self._temporary) and self._disk is not None:
                self._disk.give(self._paid)
                self._paid = 0

    def _close(self) -> None:
        fd, self._fd = self._fd, -1  # first: a failed close closes, too, and the number may be another file's by then
        if fd >= 0:
            close_fd(fd, self._temporary)

    def __enter__(self: Writer) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            self.abort()


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], kind: str, disk: DiskQuota | None = None) -> Iterator[SectionWriter]:
    """Replace a file of sections durably: a kill leaves either the old file or the new one."""
    remove_file(f"{os.fspath(path)}.tmp")  # left by a writer that was killed
    with SectionWriter(path, kind, disk) as writer:
        yield writer
        writer.finish(durable=True).close()


class SectionFile:
    """A file of arrays, read by number. Thread-safe, except :meth:`close`.

    ``file_id`` is the file's UUID, 32 hexadecimal digits. If ``directory`` is given, the file is looked up in it.
    CorruptionError for a damaged file, or one too short for an index. FormatError for a file of another kind, or one whose end
    is cut off. VersionError for another version or byte order.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: str,
        *,
        disk: DiskQuota | None = None,
        paid: int = 0,
        direct: bool = False,
        directory: OpenDirectory | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self._disk = disk
        self._paid = paid
        self._fd, size = open_regular(self.path) if directory is None else directory.open_regular(os.path.basename(self.path))
        try:
            self._read_index(kind, size)
            with naming(self.path):
                self._is_direct = direct and set_direct(self._fd, True)
        except BaseException:
            close_quietly(self._fd)
            raise

    def _read_index(self, kind: str, size: int) -> None:
        tail_bytes = _TAIL.size + 8
        if size < tail_bytes:
            raise CorruptionError("too short for its index", self.path, size)
        tail = pread_exactly(self._fd, tail_bytes, size - tail_bytes, self.path)
        magic, version, mark, found, file_id, n, where, index_sum = _TAIL.unpack(tail[:-8])
        if magic != MAGIC:
            raise FormatError(f"{self.path} is cut off, or is not a file of featstore: it does not end like one", self.path)
        if struct.unpack("<Q", tail[-8:])[0] != xxhash.xxh3_64_intdigest(tail[:-8]):
            raise CorruptionError("the tail is damaged", self.path, size - tail_bytes)
        if version != SECTIONS_VERSION or mark != _BYTE_ORDER_MARK:
            raise VersionError(f"{self.path} has version {version}; this release reads {SECTIONS_VERSION}", self.path)
        if found.rstrip(b"\0") != kind.encode("ascii"):
            raise FormatError(f"{self.path} holds {found.rstrip(bytes(1)).decode('ascii', 'replace')!r}, not {kind!r}", self.path)
        if where > size or n * _ENTRY.itemsize != size - tail_bytes - where:
            raise CorruptionError("the index does not fit the file", self.path, size - tail_bytes)
        self.file_id = bytes(file_id).hex()
        self._seed = file_seed(kind, file_id, 0)
        self._index_at = where
        index = bytes(pread_exactly(self._fd, n * _ENTRY.itemsize, where, self.path))
        if _sum(index, self._seed, _MASK) != index_sum:
            raise CorruptionError("the index is damaged", self.path, where)
        self._index = np.frombuffer(index, _ENTRY)
        self._check_entries()

    def _check_entries(self) -> None:
        """Check that arrays have known dtypes and fill the file, one after another, up to the index; CorruptionError otherwise.

        Else a small file could say that it holds as much as it likes, by naming the same bytes again and again.
        """
        offsets, items, codes = (self._index[name] for name in ("offset", "items", "dtype"))
        widths = _WIDTHS[np.minimum(codes, len(_WIDTHS) - 1)]
        is_good = (codes < len(_WIDTHS)) & (widths > 0) & (offsets <= self._index_at)
        is_good &= items <= (self._index_at - np.minimum(offsets, self._index_at)) // np.maximum(widths, 1)
        ends = offsets + items * widths
        is_good[:1] &= offsets[:1] == 0
        is_good[1:] &= offsets[1:] == ends[:-1]
        is_good[-1:] &= ends[-1:] == self._index_at
        if not is_good.all() or (not len(ends) and self._index_at):
            raise CorruptionError(
                f"array {int(is_good.argmin()) if len(ends) else 0} cannot be where the index says", self.path, self._index_at
            )

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return int(self._index_at + self.index_bytes)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index and the tail, which belong to no array."""
        return self._index.nbytes + _TAIL.size + 8

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of items of each array."""
        return self._index["items"].astype(np.int64)

    def __getitem__(self, number: int) -> Array:
        return self.read(number)

    def read(self, number: int, array: Callable[..., Array] = np.empty) -> Array:
        """Read and check one array, as :meth:`run` does."""
        return self.run(number, 1, array)[0]

    def run(self, first: int, count: int, array: Callable[..., Array] = np.empty) -> list[Array]:
        """Read and check arrays ``first … first + count - 1``, in one read, as they lie one after another.

        ``array(n, dtype)`` allocates the memory, of which the returned arrays are views; its exceptions propagate.
        """
        if self._fd < 0:
            raise ClosedError(f"{self.path} is closed")
        if not 0 <= first <= first + count <= len(self._index) or not count:
            raise IndexError(f"no array {first if first < 0 or count == 1 else first + count - 1} of {len(self._index)}")
        entries = [tuple(map(int, self._index[first + i])) for i in range(count)]
        ends = [offset + items * _DTYPES[code].itemsize for offset, items, code, _ in entries]
        begin = entries[0][0]
        data = self._read(ends[-1] - begin, begin, array)
        arrays: list[Array] = []
        for i, ((offset, _, code, expected), end) in enumerate(zip(entries, ends, strict=True)):
            part = data[offset - begin : end - begin]
            if _sum(part, self._seed, first + i) != expected:
                raise CorruptionError(f"array {first + i} is damaged", self.path, offset)
            found = np.frombuffer(part, _DTYPES[code])
            if not found.flags.aligned:
                unaligned, found = found, array(len(found), found.dtype)
                found[:] = unaligned
            arrays.append(found)
        return arrays

    def verify(self, progress: Callable[[int], None] = lambda n: None) -> None:
        """Check every byte of every array; takes about 1 MiB of memory.

        ``progress`` gets the number of bytes that were checked since its last call. That the arrays fill the file up to the
        index, and the index itself, were checked when the file was opened.
        """
        if self._fd < 0:
            raise ClosedError(f"{self.path} is closed")
        for number, entry in enumerate(self._index):
            offset, items, code, expected = map(int, entry)
            end = offset + items * _DTYPES[code].itemsize
            state = xxhash.xxh3_64(seed=(self._seed + number) & _MASK)
            for at in range(offset, end, _VERIFY_BYTES):
                n_bytes = min(_VERIFY_BYTES, end - at)
                state.update(self._read(n_bytes, at, np.empty))
                progress(n_bytes)
            if state.intdigest() != expected:
                raise CorruptionError(f"array {number} is damaged", self.path, offset)

    def _read(self, n_bytes: int, offset: int, array: Callable[..., Array]) -> memoryview:
        if self._is_direct:
            return pread_direct(self._fd, n_bytes, offset, self.path, array)
        memory = array(n_bytes, np.uint8).data
        pread_into(self._fd, memory, offset, self.path)
        return memory

    def close(self) -> None:
        """Close the file; may be called again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_quietly(fd)

    def remove(self) -> None:
        """Close the file and delete it; its bytes go back to the quota if it could be deleted."""
        self.close()
        if remove_file(self.path) and self._disk is not None:
            self._disk.give(self._paid)
            self._paid = 0
