"""The byte formats of row files and their side files of checksums; byte tables in docs/format.md.

A row file is one header page and then fixed-width rows laid out by :class:`~featstore.storage.layout.RowLayout`, zero-padded to
whole pages. Its side file ``<name>.sums`` holds one checksum for each page, the header page included. The pages of the side file
have checksums, too.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from featstore.errors import CorruptionError, FormatError, VersionError
from featstore.storage.layout import PAGE_BYTES, RowLayout

__all__ = [
    "DTYPES",
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "MAX_ROW_BYTES",
    "STRIPE",
    "STRIPE_PREFIX",
    "SUMS_PER_PAGE",
    "Header",
    "check_layout",
    "file_bytes",
    "file_seed",
    "page_sum",
    "resolve_inside",
    "sums_bytes",
    "sums_page",
    "sums_seed",
]

FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = PAGE_BYTES
MAGIC: Final = b"FEATSTOR"
BYTE_ORDER_MARK: Final = 0x01020304
SUMS_PER_PAGE: Final = PAGE_BYTES // 8 - 1
MAX_ROW_BYTES: Final = 1 << 30  # the limit of one read operation
MAX_FILE_BYTES: Final = 1 << 62
STRIPE_PREFIX: Final = "featstore-stripe-"  # see stripes.py
STRIPE: Final = re.compile(f"{STRIPE_PREFIX}[0-9a-f]{{32}}")

# Name -> (code in the header, bytes an item). Codes are never reused.
DTYPES: Final[dict[str, tuple[int, int]]] = {
    "bool": (1, 1),
    "uint8": (2, 1),
    "int8": (3, 1),
    "int16": (4, 2),
    "int32": (5, 4),
    "int64": (6, 8),
    "float16": (7, 2),
    "bfloat16": (8, 2),
    "float32": (9, 4),
    "float64": (10, 8),
}
_DTYPE_NAMES: Final = {code: name for name, (code, _) in DTYPES.items()}

# magic, version, byte-order mark, kind, file id, generation, n_rows, row_bytes, group_rows, group_bytes, dtype code, itemsize
_HEADER: Final = struct.Struct("<8sII32s16sQQQQQHH")
_U64: Final = struct.Struct("<Q")
_MASK: Final = (1 << 64) - 1


def file_seed(kind: str, file_id: str | bytes, generation: int) -> int:
    """Compute the seed of a file's page checksums, so that pages of another file or an older copy fail the check."""
    identity = bytes.fromhex(file_id) if isinstance(file_id, str) else bytes(file_id)
    return xxhash.xxh3_64_intdigest(kind.encode("ascii").ljust(32, b"\0") + identity + _U64.pack(generation))


def sums_seed(seed: int) -> int:
    """Compute the seed of a side file's own page checksums from that of :func:`file_seed`; page ``i`` adds ``i`` modulo 2⁶⁴."""
    return xxhash.xxh3_64_intdigest(b"sums", seed)


def page_sum(page: bytes | memoryview, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(page, seed)


def file_bytes(layout: RowLayout, n_rows: int) -> int:
    """Count the bytes of a row file: its header page and its rows in whole pages."""
    return HEADER_BYTES + layout.data_bytes(n_rows)


def sums_bytes(n_file_bytes: int) -> int:
    """Count the bytes of the side file of a row file of ``n_file_bytes`` bytes."""
    return -(-(n_file_bytes // PAGE_BYTES) // SUMS_PER_PAGE) * PAGE_BYTES


def sums_page(sums: npt.NDArray[np.uint64], index: int, seed: int) -> bytes:
    """Build page ``index`` of a side file from up to 511 page checksums; ``seed`` is the row file's."""
    entries = np.zeros(SUMS_PER_PAGE, dtype="<u8")
    entries[: len(sums)] = sums
    body = entries.tobytes()
    return body + _U64.pack(xxhash.xxh3_64_intdigest(body, (sums_seed(seed) + index) & _MASK))


@dataclass(frozen=True)
class Header:
    """The header page of a row file.

    ``kind`` names the kind of rows, such as ``"feature"`` or ``"indptr"``: ASCII, at most 32 bytes. ``file_id`` is the file's
    UUID, 16 bytes. ``generation`` is the number of the commit that wrote the file. ``dtype`` is a name of :data:`DTYPES`.
    """

    kind: str
    file_id: bytes
    generation: int
    layout: RowLayout
    n_rows: int
    dtype: str

    @property
    def seed(self) -> int:
        """Seed of the file's page checksums."""
        return file_seed(self.kind, self.file_id, self.generation)

    @property
    def file_bytes(self) -> int:
        return file_bytes(self.layout, self.n_rows)

    def pack(self) -> bytes:
        code, itemsize = DTYPES[self.dtype]
        layout = self.layout
        fields = _HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            BYTE_ORDER_MARK,
            self.kind.encode("ascii"),
            self.file_id,
            self.generation,
            self.n_rows,
            layout.row_bytes,
            layout.group_rows,
            layout.group_bytes,
            code,
            itemsize,
        )
        body = fields.ljust(HEADER_BYTES - 8, b"\0")
        return body + _U64.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, page: bytes, path: str | os.PathLike[str]) -> Header:
        """Decode and check a header page: the file's first 4096 bytes, or fewer if the file is shorter.

        FormatError if the file is no row file or its header has impossible values. VersionError if it is of another format
        version or byte order. CorruptionError if the header is damaged or cut short.
        """
        name = os.fspath(path)
        if len(page) < HEADER_BYTES:
            raise CorruptionError(f"the file ends within its header, after {len(page)} of {HEADER_BYTES} bytes", name, len(page))
        body, total = page[: HEADER_BYTES - 8], _U64.unpack_from(page, HEADER_BYTES - 8)[0]
        magic, version, mark, kind, file_id, generation, n_rows, row_bytes, group_rows, group_bytes, code, itemsize = (
            _HEADER.unpack_from(body)
        )
        intact = xxhash.xxh3_64_intdigest(body) == total
        if magic != MAGIC:
            # A header of ours with a few wrong bytes is damaged; any other file was never a row file.
            if not intact and sum(a == b for a, b in zip(magic, MAGIC, strict=True)) >= 4:
                raise CorruptionError("the header is damaged: its checksum differs", name, 0)
            raise FormatError(f"{name}: not a featstore row file (it starts with {magic!r})", name)
        if not intact:
            raise CorruptionError("the header is damaged: its checksum differs", name, 0)
        if mark != BYTE_ORDER_MARK:
            raise VersionError(
                f"{name}: written in another byte order (mark {mark:#010x}, expected {BYTE_ORDER_MARK:#010x})", name
            )
        if version != FORMAT_VERSION:
            raise VersionError(f"{name}: format version {version}; this release reads version {FORMAT_VERSION}", name)
        text = kind.rstrip(b"\0")
        if not text or not text.isascii() or b"\0" in text:
            raise FormatError(f"{name}: the header's kind is not text: {kind!r}", name)
        dtype = _DTYPE_NAMES.get(code)
        if dtype is None or DTYPES[dtype][1] != itemsize:
            raise FormatError(f"{name}: the header names no known dtype (code {code}, {itemsize} bytes an item)", name)
        layout = RowLayout(row_bytes, group_rows, group_bytes)
        check_layout(layout, n_rows, itemsize, name)
        if any(body[_HEADER.size :]):
            raise FormatError(f"{name}: reserved bytes of the header are not zero", name)
        return cls(text.decode("ascii"), file_id, generation, layout, n_rows, dtype)


def check_layout(layout: RowLayout, n_rows: int, itemsize: int, name: str) -> None:
    """Check a layout read from a file; FormatError unless the library could write it and ``n_rows`` rows of it fit a file."""
    row_bytes, group_rows, group_bytes = layout.row_bytes, layout.group_rows, layout.group_bytes
    if not 1 <= row_bytes <= MAX_ROW_BYTES or row_bytes % itemsize:
        raise FormatError(f"{name}: rows of {row_bytes} bytes of items of {itemsize}", name)
    if group_rows < 1 or group_rows > PAGE_BYTES or group_bytes < group_rows * row_bytes or group_bytes > 2 * MAX_ROW_BYTES:
        raise FormatError(f"{name}: {group_rows} rows of {row_bytes} bytes do not fit groups of {group_bytes}", name)
    if not layout.is_dense and group_bytes % PAGE_BYTES:
        raise FormatError(f"{name}: groups of {group_bytes} bytes are not whole pages", name)
    if n_rows < 0 or (n_rows // group_rows + 1) * group_bytes > MAX_FILE_BYTES:
        raise FormatError(f"{name}: {n_rows} rows of {row_bytes} bytes are more than a file can hold", name)


def resolve_inside(root: str | os.PathLike[str], name: str, dir_fd: int | None = None) -> str:
    """Resolve the path of the file that a catalog calls ``name``; FormatError unless it lies inside ``root``.

    The folders on the path must not be symbolic links, except the link of a stripe. If ``dir_fd``, a descriptor of ``root``, is
    given, the folders are looked up in it.
    """
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise FormatError(f"{os.fspath(root)}: the catalog names a file outside the dataset: {name!r}")
    path = os.fspath(root)
    for depth in range(1, len(parts)):
        folder = "/".join(parts[:depth])
        target = _link_target(os.path.join(path, folder) if dir_fd is None else folder, dir_fd)
        is_stripe = STRIPE.fullmatch(folder) is not None  # so it lies directly within the dataset
        if target is not None and not (is_stripe and os.path.isabs(target) and os.path.basename(target) == folder):
            raise FormatError(f"{os.path.join(path, folder)}: a symbolic link within a dataset")
    return os.path.join(path, name)


def _link_target(path: str, dir_fd: int | None) -> str | None:
    """Read the target of a symbolic link; None if ``path`` is no link."""
    try:
        return os.readlink(path, dir_fd=dir_fd) if stat.S_ISLNK(os.lstat(path, dir_fd=dir_fd).st_mode) else None
    except (OSError, ValueError):
        return None  # opening the file reports the error
