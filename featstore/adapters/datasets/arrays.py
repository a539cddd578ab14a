"""Arrays in files as rows that are read in order: members of ``.npz`` archives, and raw arrays without a header."""

from __future__ import annotations

import contextlib
import errno
import io
import lzma
import math
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from featstore.adapters.datasets.prefetch import prefetch
from featstore.config import format_size, user_path
from featstore.creation.source import NpySource, Source, array_bytes, dtype_name, npy_header, numpy_dtype
from featstore.errors import CorruptionError, FormatError
from featstore.storage.calls import close_quietly, naming, open_input, pread_exactly

__all__ = ["Archive", "MemberSource", "RawSource", "check_rows", "open_array", "small_ints"]

UInt8s = npt.NDArray[np.uint8]

_MAGIC: Final = b"\x93NUMPY"
_SMALL_BYTES: Final = 1 << 20
_COPY_BYTES: Final = 4 << 20
# What reading a damaged archive may raise, beside OSError.
_DAMAGE: Final = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OverflowError, UnicodeDecodeError, struct.error)


class _NamedFile(io.FileIO):
    """A file whose errors name it. ``failed`` is the last one of a read: zipfile calls an archive damaged if that fails."""

    failed: OSError | None = None

    def readinto(self, buffer: Any) -> int:
        with self._noting():
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with self._noting():
            return super().readall()

    def close(self) -> None:
        with naming(str(self.name)):
            super().close()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            with naming(str(self.name)):
                yield
        except OSError as error:
            self.failed = error
            raise


class Archive:
    """A ``.npz`` file, whose members are read one by one, and never whole; members may be stored or deflated.

    FormatError if it is no archive; CorruptionError, from here or from the rows, if it ends early or a checksum differs;
    OSError with the path if a read fails.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = user_path(path)
        fd, n_bytes = open_input(self.path)
        close_quietly(fd)
        with self._open() as opened:
            self._members = {each.filename.removesuffix(".npy"): each for each in opened.infolist()}
        if not n_bytes or not self._members:
            raise FormatError(f"{self.path}: the archive has no arrays", self.path)

    @contextlib.contextmanager
    def _open(self) -> Iterator[zipfile.ZipFile]:
        raw = _NamedFile(self.path)
        with io.BufferedReader(raw) as file:
            try:
                opened = zipfile.ZipFile(file)
            except (*_DAMAGE, NotImplementedError, ValueError, OSError) as error:
                if raw.failed is not None:
                    raise raw.failed from None
                raise FormatError(f"{self.path}: not a .npz archive, or cut short ({error})", self.path) from None
            with opened:
                yield opened

    @property
    def names(self) -> list[str]:
        """Names of the arrays, in order."""
        return list(self._members)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def rows(self, name: str, *, wider: bool = False) -> MemberSource:
        """Make the rows of an array; FormatError if the archive has no such array. ``wider`` as of :func:`open_source`."""
        if name not in self._members:
            there = ", ".join(self._members)
            raise FormatError(f"{self.path}: the archive has no array {name!r}; it has {there}", self.path)
        return MemberSource(self, name, self._members[name], wider)

    def small(self, name: str) -> npt.NDArray[Any]:
        """Read an array of at most 1 MiB whole."""
        info = self._members.get(name)
        if info is None or info.file_size > _SMALL_BYTES:
            raise FormatError(f"{self.path}: {name!r} should be a small array, and is missing or larger", self.path)
        with self._open() as opened, naming_damage(self.path, name), opened.open(info) as file:
            data = file.read()
        where = f"{self.path}: {name}"
        dtype, shape, fortran, start = npy_header(lambda n, offset: data[offset : offset + n], len(data), where)
        return np.ndarray(shape, dtype, data, start, order="F" if fortran else "C")


def check_memory(error: BaseException | None) -> None:
    """Raise MemoryError if this error says that decompressing lacked memory, which zlib and pyarrow say in words alone."""
    if str(error).startswith("Error -4 ") or "insufficient memory" in str(error):
        raise MemoryError(str(error)) from None


class naming_damage:
    """Turn the errors of a damaged archive into a CorruptionError that names the member; a context manager."""

    def __init__(self, path: str, name: str) -> None:
        self._path, self._name = path, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A seek to where no byte can be, and damage that bzip2 finds, are OSErrors of no file.
        is_nowhere = type(error) is OSError and error.filename is None and error.errno in (None, errno.EINVAL)
        if is_nowhere or isinstance(error, _DAMAGE):
            check_memory(error)
            text = " ".join(str(error).split()) or "the member ends early"
            raise CorruptionError(f"{self._name}: {text}", self._path) from None
        if isinstance(error, (NotImplementedError, RuntimeError)):
            raise FormatError(f"{self._path}: {self._name}: {error}", self._path) from None


class _Stream:
    """A member's bytes in order, from any begin onwards."""

    def __init__(self, file: Any, path: str, name: str) -> None:
        self._file, self._path, self._name = file, path, name
        self.head = bytearray()

    def peek(self, n: int, offset: int) -> bytes:
        """Read bytes of the beginning, which stay there for the next call."""
        while len(self.head) < offset + n:
            more = self._file.read(offset + n - len(self.head))
            if not more:
                raise EOFError
            self.head += more
        return bytes(self.head[offset : offset + n])

    def skip(self, n: int) -> None:
        while n:
            n -= len(self.read(min(n, _COPY_BYTES)))

    def read(self, n: int) -> UInt8s:
        """Read exactly ``n`` bytes."""
        found = np.empty(n, np.uint8)
        done = 0
        while done < n:
            more = self._file.read(n - done)
            if not more:
                raise EOFError
            found[done : done + len(more)] = np.frombuffer(more, np.uint8)
            done += len(more)
        return found

    def end(self) -> None:
        """Check that nothing follows, which also checks the member's checksum."""
        if self._file.read(1):
            raise zipfile.BadZipFile("bytes follow the array")


class MemberSource(Source):
    """The rows of an array in a ``.npz`` archive, in bounded memory; a reading goes through the member from its beginning."""

    def __init__(self, archive: Archive, name: str, info: zipfile.ZipInfo, wider: bool) -> None:
        self._archive, self._info, self._member = archive, info, name
        with archive._open() as opened, naming_damage(archive.path, name), opened.open(info) as file:
            stream = _Stream(file, archive.path, name)
            where = f"{archive.path}, member {name}"
            self._native, shape, fortran, self._start = npy_header(stream.peek, info.file_size, where)
        label = f"{archive.path}: {name}"
        super().__init__(label, dtype_name(self._native, wider=wider, of=label), shape, may_be_empty=wider)
        self.is_fortran = fortran and len(shape) > 1

    def blocks(self, max_bytes: int) -> Iterator[UInt8s]:
        if self.is_fortran:
            yield from self._unpacked(max_bytes)
        else:
            yield from prefetch(self._in_order(min(max_bytes, _COPY_BYTES)))

    def _in_order(self, max_bytes: int) -> Iterator[UInt8s]:
        step = self._step(max_bytes)
        with self._archive._open() as opened, naming_damage(self._archive.path, self._member), opened.open(self._info) as file:
            stream = _Stream(file, self._archive.path, self._member)
            stream.skip(self._start)
            for first in range(0, self.n_rows, step):
                yield self._decoded(stream.read(min(step, self.n_rows - first) * self.row_bytes))
            stream.end()

    def _decoded(self, data: UInt8s) -> UInt8s:
        return array_bytes(data.view(self._native).reshape(-1, *self.shape[1:]))

    def _unpacked(self, max_bytes: int) -> Iterator[UInt8s]:
        """Yield rows that are stored column after column: from a temporary copy, which can be read in any order."""
        # The copy has no name, so that a killed process leaves nothing.
        with naming(tempfile.gettempdir()), tempfile.TemporaryFile() as out:
            with self._archive._open() as opened, naming_damage(self._archive.path, self._member):
                with opened.open(self._info) as file:
                    while piece := file.read(_COPY_BYTES):
                        out.write(piece)
            out.flush()
            if not self.n_rows or not self.row_bytes:
                return
            rows = np.memmap(out, self._native, "r", self._start, self.shape, "F")
            step = self._step(max_bytes)
            for first in range(0, self.n_rows, step):
                yield array_bytes(np.ascontiguousarray(rows[first : first + step]))

    def columns(self, max_bytes: int) -> Iterator[npt.NDArray[Any]]:
        """Yield an array ``[2, n]`` in blocks of columns, ``[2, k]``."""
        n, itemsize = self.shape[1], self._native.itemsize
        step = max(1, max_bytes // (2 * itemsize))
        if self.is_fortran:
            for block in prefetch(self._run(0, 2 * n, 2 * step)):
                yield block.reshape(-1, 2).T
        else:
            rows = (prefetch(self._run(first, n, step)) for first in (0, n))
            for pair in zip(*rows, strict=True):
                yield np.stack(pair)

    def _run(self, first: int, n: int, step: int) -> Iterator[npt.NDArray[Any]]:
        """Yield ``n`` numbers, from number ``first`` of the member on."""
        itemsize = self._native.itemsize
        with self._archive._open() as opened, naming_damage(self._archive.path, self._member), opened.open(self._info) as file:
            stream = _Stream(file, self._archive.path, self._member)
            stream.skip(self._start + first * itemsize)
            for at in range(0, n, step):
                yield stream.read(min(step, n - at) * itemsize).view(self._native)
            if first + n == math.prod(self.shape):
                stream.end()


class RawSource(Source):
    """The rows of a raw array, which has no header and whose shape is known otherwise; read with pread."""

    def __init__(self, name: str, path: str, shape: tuple[int, ...], dtype: str) -> None:
        super().__init__(name, dtype, shape)
        self._path = path
        fd, n_bytes = open_input(path)
        close_quietly(fd)
        expected = self.n_rows * self.row_bytes
        if n_bytes != expected:
            text = f"{path}: a raw array of {dtype} {list(shape)} has {expected} bytes, and the file has {n_bytes}"
            raise FormatError(f"{text}; give the numbers that it was made with", path)

    def blocks(self, max_bytes: int) -> Iterator[UInt8s]:
        return self.blocks_from(0, max_bytes)

    def blocks_from(self, first: int, max_bytes: int) -> Iterator[UInt8s]:
        fd, _ = open_input(self._path)
        try:
            step, size = self._step(max_bytes), self.row_bytes
            for at in range(first, self.n_rows, step):
                k = min(step, self.n_rows - at)
                os.posix_fadvise(fd, (at + k) * size, step * size, os.POSIX_FADV_WILLNEED)
                data = pread_exactly(fd, k * size, at * size, self._path)
                yield np.frombuffer(data, np.uint8).reshape(k, size)
        finally:
            close_quietly(fd)


def open_array(
    name: str,
    path: str | os.PathLike[str],
    n_rows: int | None = None,
    *,
    raw: tuple[str, tuple[int, ...] | None] | None = None,
    wider: bool = False,
) -> Source:
    """Open an array file: one with NumPy's header, or a raw one, which is recognised by what it begins with.

    Parameters
    ----------
    name : str
        What the array is, in messages.
    path : path-like
    n_rows : int, optional
        Number of rows that it must have: FormatError otherwise.
    raw : tuple of dtype and row shape, optional
        Of a raw array; without a row shape it is found from the file's size and ``n_rows``. FormatError if the file has no header
        and this, or ``n_rows``, is missing.
    wider : bool
        Whether unsigned integers of more than 8 bits are taken, too.
    """
    where = user_path(path)
    label = f"{where}: {name}"
    fd, n_bytes = open_input(where)
    try:
        head = bytes(pread_exactly(fd, min(len(_MAGIC), n_bytes), 0, where))
    finally:
        close_quietly(fd)
    if not n_bytes:
        raise FormatError(f"{where}: the file is empty", where)
    if head == _MAGIC:
        found: Source = NpySource(label, where, wider)
        check_rows(found, n_rows)
        return found
    if raw is None or n_rows is None:
        raise FormatError(
            f"{where}: the file has no .npy header, so it is a raw array of unknown size; give the numbers of nodes",
            where,
        )
    dtype, row_shape = raw
    if row_shape is None:
        size = numpy_dtype(dtype).itemsize * max(1, n_rows)
        if not n_rows or n_bytes % size:
            text = f"{where}: a raw array of {format_size(n_bytes)} cannot have {n_rows} rows of {dtype}"
            raise FormatError(f"{text}; give the number of rows that it has", where)
        row_shape = (n_bytes // size,)
    return RawSource(label, where, (n_rows, *row_shape), dtype)


def check_rows(source: Source, n_rows: int | None) -> None:
    """Raise FormatError unless an array has ``n_rows`` rows."""
    if n_rows is not None and source.n_rows != n_rows:
        raise FormatError(f"{source.name} has {source.n_rows} rows; expected {n_rows}")


def small_ints(archive: Archive, name: str) -> list[int]:
    """Read a small array of whole numbers."""
    array = archive.small(name)
    if array.dtype.kind not in "iu":
        raise FormatError(f"{archive.path}: {name} must hold whole numbers, not {array.dtype}", archive.path)
    return [int(each) for each in array.reshape(-1)]
