"""The catalog: an LMDB environment that names a dataset's files and fields, read and replaced whole.

LMDB commits atomically but neither checks its pages nor survives a truncated file (a fault in its mapping kills the process).
So ``catalog.lmdb/data.mdb`` is an LMDB environment followed by one trailer page with its length and XXH3-128 digest. A reader
reads the file and checks trailer, digest and the structure of every page. Only then LMDB maps a private anonymous copy, which no
process can shrink. A writer lets LMDB work on such a copy, too, and the new file replaces the old one by one rename. So no crash
can separate the digest from the bytes that it covers, and a full disk is an ordinary failed write. A catalog is small:
kilobytes, read once.

Each value is the XXH3-64 of key and text, and JSON text. Keys: ``dataset``; ``file/<name>``; ``node/<type>/<field>`` and
``edge/<source>,<relation>,<destination>/<field>``, where the only type of a graph without types is ``_``. The adjacency of all
types is one, under ``edge/_,_,_``.
"""

from __future__ import annotations

import errno
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import lmdb
import xxhash

from featstore._core.descriptor import memory_fd
from featstore.errors import CorruptionError, FormatError, VersionError
from featstore.storage.calls import close_quietly, naming, pread_exactly
from featstore.storage.catalogvalues import Entry, pack_value, unpack_value
from featstore.storage.directory import OpenDirectory, Root, open_inside, with_directory
from featstore.storage.format import DTYPES, FORMAT_VERSION, STRIPE, check_layout, resolve_inside
from featstore.storage.layout import PAGE_BYTES, RowLayout
from featstore.storage.lmdbcheck import check_environment
from featstore.storage.writer import FileRecord, Patch, write_file

__all__ = [
    "BLOCKS",
    "CATALOG_DIRECTORY",
    "CATALOG_FILE",
    "EDGE",
    "NODE",
    "PART",
    "PATCHES",
    "TOPOLOGIES",
    "Catalog",
    "FieldPart",
    "FieldRecord",
    "current_catalog",
    "read_catalog",
    "write_catalog",
]

CATALOG_DIRECTORY: Final = "catalog.lmdb"
CATALOG_FILE: Final = "catalog.lmdb/data.mdb"
NODE: Final = "node/_"
EDGE: Final = "edge/_,_,_"
BLOCKS: Final = "blocks"  # kind of the files of the numbers of a patch's blocks
PATCHES: Final = ("patch-", "blocks-")  # prefixes of the names of a patch's two files
TOPOLOGIES: Final = ("csc", "chunked")

_TRAILER_MAGIC: Final = b"FEATCTLG"
_TRAILER: Final = struct.Struct("<8sIIQ16s")
_BYTE_ORDER_MARK: Final = 0x01020304
_MAX_BYTES: Final = 1 << 28
_STRIPES: Final = "stripes"  # the reader feature that a catalog requires if files lie in stripes
_PATCHES: Final = "patches"  # and if patches lie over files
_TYPES: Final = "types"  # and if there are several types of nodes or edges
_CUT: Final = "cut"  # and if the rows of a file that follow those of a part of the chunks do not count
PART: Final = "part"  # and if it is a part of a larger graph; the key of the entry that says which
_U64: Final = struct.Struct("<Q")


@dataclass(frozen=True)
class FieldPart:
    """``rows`` consecutive rows of a field, from ``first`` on, and the file that holds them.

    ``at`` is the row of the file with which they begin, if several types of nodes share the file, or if later rows of the file
    do not count any more; None: it holds no other rows.
    """

    file: str
    first: int
    rows: int
    at: int | None = None

    def entry(self) -> dict[str, Any]:
        """Describe the part as the catalog does."""
        shared = {} if self.at is None else {"at": self.at}
        return {"file": self.file, "first": self.first, "rows": self.rows, **shared}


@dataclass(frozen=True)
class FieldRecord:
    """One field: its shape (rows first) and type, and the files that hold its rows, in row order.

    ``role`` is ``"feature"``, ``"data"`` or ``"topology"``. ``generation`` is the number of the commit that wrote or last
    extended the field.
    """

    key: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    generation: int
    parts: tuple[FieldPart, ...]

    @property
    def name(self) -> str:
        return self.key.rsplit("/", 1)[1]

    @property
    def n_rows(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Catalog:
    """The content of a catalog: the dataset's properties, its files and its fields.

    Parameters
    ----------
    dataset : dict
        ``id`` (32 hexadecimal digits), ``generation``, ``num_nodes``, ``num_edges``, ``topology`` (one of :data:`TOPOLOGIES`),
        ``chunk_bytes`` if that is ``"chunked"``, ``created_by``; ``adjacency`` if the topology was converted: see
        :meth:`adjacency`.
    files : dict of str to FileRecord
        Files by name.
    fields : dict of str to FieldRecord
        Fields by key.
    extra : dict of str to dict
        Entries under other keys, by key: data derived from the fields (``cache/…``), and entries of later releases, which are
        kept unchanged.
    """

    dataset: dict[str, Any]
    files: dict[str, FileRecord] = field(default_factory=dict)
    fields: dict[str, FieldRecord] = field(default_factory=dict)
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        return int(self.dataset["num_nodes"])

    @property
    def num_edges(self) -> int:
        return int(self.dataset["num_edges"])

    @property
    def generation(self) -> int:
        """Number of the last commit, from 1."""
        return int(self.dataset["generation"])

    @property
    def topology(self) -> str:
        """The form in which the adjacency is stored: one of :data:`TOPOLOGIES`."""
        return str(self.dataset["topology"])

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk; 0 if the adjacency is not in chunks."""
        return int(self.dataset.get("chunk_bytes", 0))

    def adjacency(self) -> dict[str, str]:
        """Identify the adjacency by the ids of the files that it was first stored in, by key.

        A conversion keeps these ids, because caches, parts and packs made of the adjacency remain valid for the same graph.
        """
        kept = self.dataset.get("adjacency")
        if kept is not None:
            return dict(kept)
        records = (record for record in self.fields.values() if record.role == "topology")
        return {record.key: " ".join(self.files[part.file].rows_id for part in record.parts) for record in records}

    def names_of(self, record: FieldRecord) -> list[str]:
        """List the names of the files that hold a field's rows, those of patches included."""
        return [name for part in record.parts for name in (part.file, *self.files[part.file].patch_names)]

    def by_role(self, role: str, prefix: str = NODE) -> dict[str, FieldRecord]:
        """List the fields of one role under a key prefix, by name."""
        return {
            record.name: record
            for key, record in sorted(self.fields.items())
            if record.role == role and key.startswith(prefix + "/")
        }

    def _entries(self) -> dict[str, dict[str, Any]]:
        requires = [_STRIPES] if any(STRIPE.match(name) for name in self.files) else []
        requires += [_PATCHES] if any(item.patches for item in self.files.values()) else []
        requires += [_CUT] if any(_is_cut(record) for record in self.fields.values()) else []
        requires += [_TYPES] if "node_types" in self.dataset else []
        requires += [PART] if PART in self.extra else []
        entries: dict[str, dict[str, Any]] = {"dataset": {"format": FORMAT_VERSION, "requires": requires, **self.dataset}}
        for name, item in self.files.items():
            entries[f"file/{name}"] = {
                "kind": item.kind,
                "id": item.file_id,
                "generation": item.generation,
                "rows": item.n_rows,
                "dtype": item.dtype,
                "row_bytes": item.layout.row_bytes,
                "group_rows": item.layout.group_rows,
                "group_bytes": item.layout.group_bytes,
                "bytes": item.n_bytes,
                "sums": item.sums_name,
                "sums_bytes": item.n_sums_bytes,
            }
            if item.patches:
                entries[f"file/{name}"]["patches"] = [
                    {"file": each.file, "blocks": each.blocks, "id": each.file_id} for each in item.patches
                ]
                entries[f"file/{name}"]["appended"] = item.n_appended
        for key, record in self.fields.items():
            entries[key] = {
                "role": record.role,
                "dtype": record.dtype,
                "shape": list(record.shape),
                "generation": record.generation,
                "parts": [part.entry() for part in record.parts],
            }
        return {**entries, **self.extra}


# --- records --------------------------------------------------------------------------------------------------------------------


def _is_cut(record: FieldRecord) -> bool:
    """Check whether a part of the adjacency has fewer rows than its file."""
    return record.role == "topology" and any(part.at is not None for part in record.parts)


def _file_record(name: str, value: dict[str, Any], path: str) -> FileRecord:
    entry = Entry(value, f"{path}: entry of file {name!r}")
    resolve_inside(os.path.dirname(os.path.dirname(path)), name)
    file_id, kind, dtype = entry.text("id"), entry.text("kind"), entry.dtype()
    if len(file_id) != 32 or not set(file_id) <= set("0123456789abcdef"):
        raise FormatError(f"{entry.where}: 'id' must be 32 hexadecimal digits, not {file_id!r}")
    if not kind.isascii() or len(kind) > 32 or entry.text("sums") != name + ".sums":
        raise FormatError(f"{entry.where}: kind {kind!r}, sums {entry.text('sums')!r}")
    layout = RowLayout(entry.number("row_bytes", 1), entry.number("group_rows", 1), entry.number("group_bytes", 1))
    n_rows = entry.number("rows")
    check_layout(layout, n_rows, DTYPES[dtype][1], entry.where)
    record = FileRecord(
        name,
        kind,
        file_id,
        entry.number("generation", 1),
        n_rows,
        dtype,
        layout,
        entry.number("bytes"),
        entry.number("sums_bytes"),
        *_patches(entry),
    )
    record.check(entry.where)
    return record


def _patches(entry: Entry) -> tuple[tuple[Patch, ...], int]:
    """Read the patches over a file, and how many rows they append."""
    if "patches" not in entry.value:
        return (), 0
    found = []
    for item in entry.list("patches"):
        if not isinstance(item, dict):
            raise FormatError(f"{entry.where}: a patch is not an object: {item!r}")
        of = Entry(item, entry.where)
        found.append(Patch(of.text("file"), of.text("blocks"), of.text("id")))
    return tuple(found), entry.number("appended")


def _check_patches(files: Mapping[str, FileRecord], path: str) -> None:
    """Check that the files of patches are there, and are such files; FormatError otherwise."""
    for record in files.values():
        for patch in record.patches:
            rows, blocks = files.get(patch.file), files.get(patch.blocks)
            like = rows is not None and (rows.file_id, rows.dtype, rows.layout) == (patch.file_id, record.dtype, record.layout)
            is_table = blocks is not None and (blocks.kind, blocks.dtype, blocks.layout.row_bytes) == (BLOCKS, "int64", 8)
            if not like or not is_table or blocks is None or blocks.patches or rows is None or rows.patches:
                raise FormatError(f"{path}: the patch {patch.file!r} over {record.name!r} is not in the catalog as one", path)


def _field_record(key: str, value: dict[str, Any], files: Mapping[str, FileRecord], path: str) -> FieldRecord:
    entry = Entry(value, f"{path}: entry {key!r}")
    parts = []
    for item in entry.list("parts"):
        if not isinstance(item, dict):
            raise FormatError(f"{entry.where}: a part is not an object: {item!r}")
        part = Entry(item, entry.where)
        at = part.number("at") if "at" in item else None
        parts.append(FieldPart(part.text("file"), part.number("first"), part.number("rows"), at))
    shape = entry.numbers("shape")
    record = FieldRecord(key, entry.text("role"), entry.dtype(), shape, entry.number("generation", 1), tuple(parts))
    if not shape:
        raise FormatError(f"{entry.where}: a field has at least one dimension")
    row = 0
    for part_of in record.parts:
        file = files.get(part_of.file)
        if file is None:
            raise FormatError(f"{entry.where}: file {part_of.file!r} is not in the catalog")
        n_rows = file.total_rows
        fits = n_rows == part_of.rows if part_of.at is None else n_rows >= part_of.at + part_of.rows
        same = file.dtype == record.dtype and file.layout.row_bytes == record.row_bytes
        if not same or not fits or part_of.first != row:
            raise FormatError(f"{entry.where}: file {part_of.file!r} does not hold rows {part_of.first} … of this field")
        row += part_of.rows
    if _is_cut(record) and (key != f"{EDGE}/chunks" or any(part.at for part in record.parts) or record.parts[-1].at is not None):
        raise FormatError(f"{entry.where}: only chunks are cut, at the end of a file that another one follows")
    if row != record.n_rows:
        raise FormatError(f"{entry.where}: its files hold {row} of {record.n_rows} rows")
    return record


# --- the LMDB environment -------------------------------------------------------------------------------------------------------


class _Environment:
    """An LMDB environment in an anonymous file of this process, filled from and drained to bytes."""

    def __init__(self, body: bytes, path: str, *, map_bytes: int | None = None) -> None:
        self._path = path
        with naming(path):
            self._fd = memory_fd("featstore-catalog")
        try:
            with naming(path), open(self._fd, "wb", closefd=False) as file:
                file.write(body)
            # Never writemap: LMDB would grow the file by truncation, and a full drive would be a fault.
            self.env = lmdb.open(
                f"/proc/self/fd/{self._fd}",
                subdir=False,
                readonly=map_bytes is None,
                lock=False,
                map_size=map_bytes or max(len(body), PAGE_BYTES),
                max_dbs=0,
            )
        except lmdb.Error as error:
            close_quietly(self._fd)
            raise _translate(error, path) from None
        except BaseException:
            close_quietly(self._fd)
            raise

    def body(self) -> bytes:
        """Copy the environment's pages; the environment must be closed before."""
        size = os.fstat(self._fd).st_size
        return bytes(pread_exactly(self._fd, size, 0, self._path))

    def __enter__(self) -> _Environment:
        return self

    def __exit__(self, *_: object) -> None:
        self.env.close()
        close_quietly(self._fd)  # a file in memory


def _translate(error: lmdb.Error, path: str) -> OSError:
    """Translate LMDB's error into an OSError; before LMDB's release 3.0 only the text of an error tells its errno."""
    damage = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.PanicError, lmdb.VersionMismatchError)
    if isinstance(error, damage):
        return CorruptionError(f"the catalog is damaged: {error}", path)
    code = next((code for code in errno.errorcode if str(error).endswith(os.strerror(code))), errno.EIO)
    return OSError(code, f"the catalog cannot be used: {error}", path)


def _seal(body: bytes) -> bytes:
    head = _TRAILER.pack(_TRAILER_MAGIC, FORMAT_VERSION, _BYTE_ORDER_MARK, len(body), xxhash.xxh3_128_digest(body))
    head = head.ljust(PAGE_BYTES - 8, b"\0")
    return body + head + _U64.pack(xxhash.xxh3_64_intdigest(head))


def _unseal(data: bytes, path: str) -> bytes:
    """Check the trailer, the digest and the structure of LMDB's pages; return these pages."""
    if len(data) < 3 * PAGE_BYTES:
        raise CorruptionError(f"the catalog ends after {len(data)} bytes", path, len(data))
    trailer = data[-PAGE_BYTES:]
    if _U64.unpack_from(trailer, PAGE_BYTES - 8)[0] != xxhash.xxh3_64_intdigest(trailer[: PAGE_BYTES - 8]):
        raise CorruptionError("the catalog is truncated or its last page damaged", path, len(data) - PAGE_BYTES)
    magic, version, mark, n_bytes, digest = _TRAILER.unpack_from(trailer)
    if magic != _TRAILER_MAGIC:
        raise FormatError(f"{path}: not a featstore catalog", path)
    if mark != _BYTE_ORDER_MARK or version != FORMAT_VERSION:
        raise VersionError(
            f"{path}: catalog format {version} (byte-order mark {mark:#010x}); this release reads {FORMAT_VERSION}"
        )
    body = data[:-PAGE_BYTES]
    if n_bytes != len(body):
        raise CorruptionError(f"the catalog has {len(body)} bytes of pages instead of {n_bytes}", path, min(n_bytes, len(body)))
    if xxhash.xxh3_128_digest(body) != digest:
        raise CorruptionError("the catalog is damaged: its digest differs", path)
    check_environment(body, path)
    return body


def read_catalog(root: Root) -> Catalog:
    """Read a dataset's catalog in one transaction; nothing stays open.

    A dataset given by its path may be replaced meanwhile; :func:`current_catalog` handles that.

    Raises
    ------
    FileNotFoundError
        There is no dataset.
    CorruptionError
        The catalog is damaged.
    FormatError
        The directory or the file has no catalog, its entries contradict each other, or it names a file outside the dataset.
    VersionError
        The catalog needs a newer release.
    """
    if isinstance(root, OpenDirectory):
        where, is_missing = root.path, not root.has(CATALOG_DIRECTORY)
    else:
        where = os.fspath(root)
        is_missing = os.path.isdir(where) and not os.path.lexists(os.path.join(where, CATALOG_DIRECTORY))
    if is_missing:
        raise FormatError(f"{where} is not a dataset: it has no catalog")
    path = os.path.join(where, CATALOG_FILE)
    fd, n_bytes = open_inside(root, CATALOG_FILE)
    try:
        if n_bytes > _MAX_BYTES:
            raise FormatError(f"{path}: a catalog of {n_bytes} bytes", path)
        data = bytes(pread_exactly(fd, n_bytes, 0, path))
    finally:
        close_quietly(fd)
    entries: dict[str, dict[str, Any]] = {}
    with _Environment(_unseal(data, path), path) as environment:
        try:
            with environment.env.begin() as transaction, transaction.cursor() as cursor:
                pairs = [(bytes(key), bytes(value)) for key, value in cursor]
        except lmdb.Error as error:
            raise _translate(error, path) from None
    for key, value in pairs:
        try:
            name = key.decode()
        except UnicodeDecodeError:
            raise FormatError(f"{path}: a key is not text: {key!r}", path) from None
        entries[name] = unpack_value(key, value, path)
    return _parse(entries, path)


def current_catalog(path: str | os.PathLike[str]) -> Catalog:
    """Read the catalog of the dataset at ``path``: the old or the new catalog if the dataset is replaced meanwhile."""
    return with_directory(path, read_catalog)


def _parse(entries: dict[str, dict[str, Any]], path: str) -> Catalog:
    if "dataset" not in entries:
        raise FormatError(f"{path}: the catalog has no entry 'dataset'", path)
    values = entries.pop("dataset")
    dataset = Entry(values, f"{path}: entry 'dataset'")
    # Checked before anything else is interpreted, because a newer release may have changed the meaning of the rest.
    if dataset.number("format", 1) > FORMAT_VERSION:
        raise VersionError(f"{path}: format version {values['format']}; this release reads up to {FORMAT_VERSION}", path)
    if missing := [each for each in dataset.list("requires") if each not in (_STRIPES, _PATCHES, _CUT, _TYPES, PART)]:
        raise VersionError(f"{path}: reading it needs features that this release lacks: {', '.join(map(str, missing))}", path)
    for name in ("num_nodes", "num_edges"):
        dataset.number(name)
    dataset.number("generation", 1)
    if dataset.text("topology") not in TOPOLOGIES:
        raise VersionError(f"{path}: topology {values['topology']!r} is not known to this release", path)
    if values["topology"] == "chunked" and dataset.number("chunk_bytes", PAGE_BYTES) % PAGE_BYTES:
        raise FormatError(f"{dataset.where}: chunks of {values['chunk_bytes']} bytes are not whole pages", path)
    adjacency = values.get("adjacency", {})
    if not isinstance(adjacency, dict) or not all(isinstance(each, str) for each in adjacency.values()):
        raise FormatError(f"{dataset.where}: 'adjacency' must name files, not {adjacency!r}", path)
    dataset.text("id")
    files = {key[5:]: _file_record(key[5:], value, path) for key, value in entries.items() if key.startswith("file/")}
    _check_patches(files, path)
    fields = {key: _field_record(key, value, files, path) for key, value in entries.items() if key.startswith(("node/", "edge/"))}
    extra = {key: value for key, value in entries.items() if not key.startswith(("file/", "node/", "edge/"))}
    return Catalog({name: value for name, value in values.items() if name not in ("format", "requires")}, files, fields, extra)


def write_catalog(root: str | os.PathLike[str], catalog: Catalog) -> None:
    """Commit a change: replace a dataset's catalog atomically and durably. The caller holds the writer's lock.

    Every file that the catalog names exists and is durable. After an OSError the old catalog is in place. If only the
    directory's fsync failed, either catalog may be.
    """
    directory = os.path.join(os.fspath(root), CATALOG_DIRECTORY)
    path = os.path.join(os.fspath(root), CATALOG_FILE)
    pairs = [(key.encode(), value) for key, value in catalog._entries().items()]
    packed = [(key, pack_value(key, value)) for key, value in sorted(pairs)]
    if any(len(key) > 511 for key, _ in packed):
        raise ValueError("a key of the catalog is at most 511 bytes long")
    need = sum(len(key) + -(-(len(value) + 64) // PAGE_BYTES) * 2 * PAGE_BYTES for key, value in packed)
    environment = _Environment(b"", path, map_bytes=(1 << 20) + 2 * need)
    with environment:
        try:
            with environment.env.begin(write=True) as transaction:
                for key, value in packed:
                    transaction.put(key, value)
        except lmdb.Error as error:
            raise _translate(error, path) from None
        environment.env.close()
        body = environment.body()
    os.makedirs(directory, exist_ok=True)
    write_file(path, _seal(body))
