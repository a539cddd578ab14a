"""Inputs of ``create`` behind one interface: a dtype, a shape, and blocks of rows as bytes, read in bounded memory."""

from __future__ import annotations

import ast
import contextlib
import math
import mmap
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from numbers import Number
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from featstore.config import user_path
from featstore.errors import CorruptionError, FormatError
from featstore.gather.arrays import as_array
from featstore.storage.calls import close_quietly, open_input, pread_exactly
from featstore.storage.format import DTYPES

__all__ = [
    "ArrayLike",
    "NpySource",
    "Source",
    "array_bytes",
    "dtype_name",
    "npy_header",
    "numpy_dtype",
    "open_source",
    "torch_dtype",
]

UInt8s = npt.NDArray[np.uint8]

# Inputs of create: an array, memmap, tensor or list; a path to a .npy file; (shape, dtype, iterable of row blocks); or a Source,
# within the library.
ArrayLike: TypeAlias = "npt.ArrayLike | torch.Tensor | str | os.PathLike[str] | tuple[Any, Any, Iterable[Any]] | Source"

_MAX_NPY_HEADER = 1 << 16
# Further integer dtypes of inputs of the topology, which is stored as int32 or int64.
_WIDER = {"uint16": 2, "uint32": 4, "uint64": 8}


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Get the little-endian NumPy dtype of a name of ``DTYPES``; uint16 for bfloat16, which NumPy lacks."""
    return np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<")


def dtype_name(dtype: object, *, wider: bool = False, of: str = "") -> str:
    """Name a torch or NumPy dtype as the format does; TypeError if the format has no such dtype.

    ``wider`` admits all unsigned integers; ``of`` names the array in the error.
    """
    if isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
    elif isinstance(dtype, str) and dtype in DTYPES:
        name = dtype
    else:
        name = np.dtype(cast(npt.DTypeLike, dtype)).name
    if name not in DTYPES and not (wider and name in _WIDER):
        raise TypeError(f"{of}{': ' if of else ''}dtype {dtype} cannot be stored; cast to one of {', '.join(DTYPES)}")
    return name


class Source(ABC):
    """Rows to be stored; ``dtype`` is a name of ``DTYPES``. A source with ``is_read_once`` yields its blocks only once."""

    is_read_once = False

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], *, may_be_empty: bool = False) -> None:
        if not shape:
            raise ValueError(f"{name} must have at least one dimension; wrap a scalar in a list")
        self.name = name
        self.dtype = dtype
        self.shape = shape
        if self.row_bytes == 0 and not may_be_empty:
            raise ValueError(f"{name} has rows without bytes: shape {shape}")

    @property
    def n_rows(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * (_WIDER.get(self.dtype) or DTYPES[self.dtype][1])

    @abstractmethod
    def blocks(self, max_bytes: int) -> Iterator[UInt8s]:
        """Yield all rows in order: uint8 ``[k, row_bytes]``, little-endian, ``k`` at least 1 and about ``max_bytes`` at most.

        A block may share memory with the input or with the next block; use it before the next one is requested.
        """

    def blocks_from(self, first: int, max_bytes: int) -> Iterator[UInt8s]:
        """Yield the rows from ``first`` on; here all rows are read. Sources that can begin anywhere have a way of their own."""
        for block in self.blocks(max_bytes):
            if first < len(block):
                yield block[first:]
            first = max(0, first - len(block))

    def values(self, max_bytes: int) -> Iterator[npt.NDArray[Any]]:
        """Yield the blocks as arrays of the source's dtype and shape ``[k, *shape[1:]]``."""
        for block in self.blocks(max_bytes):
            yield block.view(numpy_dtype(self.dtype)).reshape(-1, *self.shape[1:])

    def _step(self, max_bytes: int) -> int:
        return max(1, max_bytes // self.row_bytes)


def _will_need(array: npt.NDArray[Any]) -> None:
    """Advise the kernel to read a part of a memory map that is needed soon."""
    file: Any = array
    while isinstance(file, np.ndarray):
        file = file.base
    if isinstance(file, mmap.mmap) and array.nbytes and array.flags.c_contiguous:
        start = array.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data
        page = start - start % mmap.PAGESIZE
        with contextlib.suppress(OSError):  # without the advice, reading is only slower
            file.madvise(mmap.MADV_WILLNEED, page, start + array.nbytes - page)


def array_bytes(array: npt.NDArray[Any]) -> UInt8s:
    """View rows as little-endian bytes; copy them only if needed."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    n = len(little)
    return little.reshape(n, -1).view(np.uint8) if little.size else np.empty((n, 0), np.uint8)


def _tensor_bytes(tensor: torch.Tensor) -> UInt8s:
    flat = tensor.detach().cpu().contiguous().reshape(len(tensor), -1)
    found: UInt8s = flat.view(torch.uint8).numpy()
    return found


class _SlicedSource(Source):
    def __init__(self, name: str, rows: npt.NDArray[Any] | torch.Tensor, wider: bool) -> None:
        super().__init__(name, dtype_name(rows.dtype, wider=wider, of=name), tuple(rows.shape))
        self._rows = rows.view(np.uint16) if self.dtype == "bfloat16" and isinstance(rows, np.ndarray) else rows

    def blocks(self, max_bytes: int) -> Iterator[UInt8s]:
        step = self._step(max_bytes)
        for first in range(0, self.n_rows, step):
            rows, following = self._rows[first : first + step], self._rows[first + step : first + 2 * step]
            if isinstance(following, np.ndarray):
                _will_need(following)
            yield array_bytes(rows) if isinstance(rows, np.ndarray) else _tensor_bytes(rows)


class _BlocksSource(Source):
    """``(shape, dtype, iterable of row blocks)``."""

    is_read_once = True

    def __init__(self, name: str, shape: Any, dtype: object, blocks: Iterable[Any], wider: bool) -> None:
        try:
            sizes = tuple(int(size) for size in ((shape,) if isinstance(shape, int) else shape))
        except TypeError:
            raise TypeError(
                f"{name}: a tuple must be (shape, dtype, iterable of row blocks), but the shape is {shape!r}"
            ) from None
        if any(size < 0 for size in sizes):
            raise ValueError(f"{name}: negative size in shape {sizes}")
        super().__init__(name, dtype_name(dtype, wider=wider, of=name), sizes)
        self._blocks = iter(blocks)

    def blocks(self, max_bytes: int) -> Iterator[UInt8s]:
        done = 0
        for item in self._blocks:
            block = open_source(self.name, item if isinstance(item, torch.Tensor) else as_array(self.name, item), wider=True)
            if block.dtype != self.dtype or block.shape[1:] != self.shape[1:]:
                raise ValueError(
                    f"{self.name}: a block of {block.dtype} {list(block.shape)} at row {done}; "
                    f"expected {self.dtype} [k, {', '.join(map(str, self.shape[1:]))}]"
                )
            if done + block.n_rows > self.n_rows:
                raise ValueError(f"{self.name}: the blocks hold more than the {self.n_rows} rows announced")
            done += block.n_rows
            yield from block.blocks(max_bytes)
        if done != self.n_rows:
            raise ValueError(f"{self.name}: the blocks hold {done} rows instead of the {self.n_rows} announced")


class NpySource(Source):
    """A ``.npy`` file, versions 1 to 3, C or Fortran order; read with pread: a file cut short is an error, not a fault."""

    def __init__(self, name: str, path: str, wider: bool) -> None:
        self._path = path
        fd, n_bytes = open_input(path)
        try:
            read = partial(_pread, fd, path)
            dtype, shape, self._fortran, self._start = npy_header(read, n_bytes, path)
        finally:
            close_quietly(fd)
        self._native = dtype
        # An array of edges, [2, E], may have none.
        super().__init__(name, dtype_name(dtype, wider=wider, of=name), shape, may_be_empty=wider)
        # One-dimensional Fortran order is C order.
        self._fortran = self._fortran and len(shape) > 1

    def blocks(self, max_bytes: int) -> Iterator[UInt8s]:
        return self.blocks_from(0, max_bytes)

    def blocks_from(self, first: int, max_bytes: int) -> Iterator[UInt8s]:
        fd, _ = open_input(self._path)
        try:
            step = self._step(max_bytes)
            for at in range(first, self.n_rows, step):
                k = min(step, self.n_rows - at)
                if not self._fortran:  # the next block comes from the drive while this one is used
                    where = self._start + (at + k) * self.row_bytes
                    with contextlib.suppress(OSError):
                        os.posix_fadvise(fd, where, step * self.row_bytes, os.POSIX_FADV_WILLNEED)
                block = self._fortran_rows(fd, at, k) if self._fortran else self._rows(fd, at, k)
                yield array_bytes(block)
        finally:
            close_quietly(fd)

    def columns(self, max_bytes: int) -> Iterator[npt.NDArray[Any]]:
        """Yield a two-dimensional array in blocks of columns, ``[n_rows, k]``."""
        n_rows, n_columns = self.shape
        itemsize = self._native.itemsize
        step = max(1, max_bytes // (n_rows * itemsize))
        fd, _ = open_input(self._path)
        try:
            for first in range(0, n_columns, step):
                k = min(step, n_columns - first)
                if self._fortran:
                    data = pread_exactly(fd, k * n_rows * itemsize, self._start + first * n_rows * itemsize, self._path)
                    yield np.frombuffer(data, dtype=self._native).reshape(k, n_rows).T
                    continue
                starts = (self._start + (row * n_columns + first) * itemsize for row in range(n_rows))
                pieces = [pread_exactly(fd, k * itemsize, start, self._path) for start in starts]
                yield np.frombuffer(b"".join(pieces), dtype=self._native).reshape(n_rows, k)
        finally:
            close_quietly(fd)

    def _rows(self, fd: int, first: int, k: int) -> npt.NDArray[Any]:
        data = pread_exactly(fd, k * self.row_bytes, self._start + first * self.row_bytes, self._path)
        return np.frombuffer(data, dtype=self._native).reshape(k, -1)

    def _fortran_rows(self, fd: int, first: int, k: int) -> npt.NDArray[Any]:
        itemsize, n_columns = self._native.itemsize, math.prod(self.shape[1:])
        columns = [
            pread_exactly(fd, k * itemsize, self._start + (column * self.n_rows + first) * itemsize, self._path)
            for column in range(n_columns)
        ]
        flat = np.frombuffer(b"".join(columns), dtype=self._native)
        return flat.reshape((k, *self.shape[1:]), order="F")


def _pread(fd: int, path: str, n: int, offset: int) -> bytes:
    return bytes(pread_exactly(fd, n, offset, path))


def npy_header(read: Callable[[int, int], bytes], n_bytes: int, path: str) -> tuple[np.dtype[Any], tuple[int, ...], bool, int]:
    """Read dtype, shape, whether Fortran order, and where the data starts; nothing is executed or unpickled.

    ``read(n, offset)`` returns ``n`` of the ``n_bytes`` of the file ``path``.
    """
    head = read(min(12, n_bytes), 0)
    if head[:6] != b"\x93NUMPY":
        raise FormatError(f"{path}: not a .npy file; of bare bytes give np.memmap(path, dtype, 'r', shape=(rows, columns))", path)
    if len(head) < 12 or head[6] not in (1, 2, 3):
        raise FormatError(f"{path}: .npy version {head[6:8]!r}; versions 1 to 3 are known", path)
    start, length = (10, struct.unpack_from("<H", head, 8)[0]) if head[6] == 1 else (12, struct.unpack_from("<I", head, 8)[0])
    if length > _MAX_NPY_HEADER:
        raise FormatError(f"{path}: a .npy header cannot have {length} bytes", path)
    if start + length > n_bytes:
        raise CorruptionError("the .npy file ends within its header", path, n_bytes)
    text = read(length, start)
    try:
        header = ast.literal_eval(text.decode("utf-8" if head[6] == 3 else "latin1").strip())
        descr, fortran, shape = header["descr"], header["fortran_order"], header["shape"]
        plain = isinstance(descr, str) and isinstance(fortran, bool) and isinstance(shape, tuple)
        sizes_ok = plain and len(shape) <= 32 and all(type(size) is int and 0 <= size < 1 << 62 for size in shape)
        # Of no array, not even of an empty one, may the other sizes be more than an address holds.
        sizes_ok = sizes_ok and math.prod(max(1, size) for size in shape) < 1 << 62
        dtype = np.dtype(descr) if sizes_ok else None
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        dtype = None
    if dtype is not None and dtype.hasobject:
        why = "it has Python objects, such as None or rows of unlike lengths; store numbers, or leave the array out"
        raise FormatError(f"{path}: the .npy header does not describe an array of numbers: {why}", path)
    if dtype is None or dtype.itemsize == 0:
        raise FormatError(f"{path}: the .npy header does not describe an array of numbers: {text[:200]!r}", path)
    expected = start + length + math.prod(shape) * dtype.itemsize
    if n_bytes != expected:
        raise CorruptionError(f"the .npy file has {n_bytes} bytes instead of {expected}", path, min(n_bytes, expected))
    return dtype, shape, fortran, start + length


def open_source(name: str, value: ArrayLike, *, wider: bool = False) -> Source:
    """Make a :class:`Source` of any accepted input; ``wider`` admits uint16, uint32 and uint64, too.

    A path names a ``.npy`` file. A tuple ``(shape, dtype, iterable)`` announces rows that come block by block, each an array or
    tensor ``[k, *shape[1:]]`` of that dtype. Raises TypeError for a dtype that the format lacks, ValueError for rows of no bytes,
    and FormatError, CorruptionError or OSError for a file.
    """
    if isinstance(value, Source):
        return value
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise TypeError(f"{name} must be a dense tensor, not {value.layout}")
        return _SlicedSource(name, value, wider)
    if isinstance(value, (str, os.PathLike)):
        return NpySource(name, user_path(value), wider)
    if isinstance(value, tuple) and len(value) == 3 and not isinstance(value[2], Number):
        return _BlocksSource(name, *value, wider=wider)
    return _SlicedSource(name, as_array(name, value), wider)
