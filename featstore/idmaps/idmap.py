"""A map of names to ids, read from its files: only the pages that a call needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from featstore.budget import Budget
from featstore.distinct import distinct
from featstore.errors import CorruptionError, FormatError, UnknownNameError
from featstore.idmaps.keys import KINDS, IntKeys, TextKeys, keys_of, ranges
from featstore.storage.catalog import Catalog
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.rowfile import RowFile
from featstore.storage.writer import FileRecord

__all__ = ["IDS_KEY", "IdMap", "IdMapFiles", "bucket_of", "map_of", "maps_of"]

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

IDS_KEY = "ids/"  # of entries of the catalog, before the name of the type of nodes
_BLOCK_NAMES = 1 << 14
_BLOCK_BYTES = 1 << 20  # of text, read together; a longer name is read alone
_SCRATCH_BYTES = 16 << 20  # what blocks of such sizes take
_SHOWN = 3  # unknown names that an error lists


@dataclass(frozen=True)
class IdMapFiles:
    """The map of a type as a catalog records it: its kind, the number of names, and its files by role."""

    kind: str
    n: int
    names: FileRecord
    offsets: FileRecord | None
    hashes: FileRecord
    buckets: FileRecord

    @property
    def records(self) -> list[FileRecord]:
        return [each for each in (self.names, self.offsets, self.hashes, self.buckets) if each is not None]

    @property
    def n_bytes(self) -> int:
        return sum(record.n_bytes for record in self.records)

    @property
    def bits(self) -> int:
        """Bits of a hash that name its bucket."""
        return (self.buckets.n_rows - 1).bit_length() - 1


def maps_of(catalog: Catalog) -> list[str]:
    """List the types of nodes that have a map."""
    return [key.removeprefix(IDS_KEY) for key in catalog.extra if key.startswith(IDS_KEY)]


def map_of(catalog: Catalog, of: str, n_nodes: int, root: str) -> IdMapFiles | None:
    """Read the catalog's entry of the map of a type of ``n_nodes`` nodes; None without one, FormatError if it is unusable."""
    entry = catalog.extra.get(IDS_KEY + of)
    if entry is None:
        return None
    kind, n, files = entry.get("kind"), entry.get("names"), entry.get("files")
    what = f"{root}: the catalog's map of ids cannot be used: {entry!r:.200}"
    # Nodes that were appended since have no names.
    if kind not in KINDS or not isinstance(n, int) or not 0 <= n <= n_nodes or not isinstance(files, Mapping):
        raise FormatError(what, root)

    def file(role: str, dtype: str, row_bytes: int, n_rows: int | None) -> FileRecord:
        record = catalog.files.get(str(files.get(role)))
        if record is None or (record.kind, record.dtype, record.layout.row_bytes) != (role, dtype, row_bytes):
            raise FormatError(what, root)
        if not record.layout.is_dense or n_rows not in (None, record.n_rows):
            raise FormatError(what, root)
        return record

    is_text = kind == "text"
    names = file("id_names", "uint8", 1, None) if is_text else file("id_names", "int64", 8, n)
    offsets = file("id_offsets", "int64", 8, n + 1) if is_text else None
    found = IdMapFiles(str(kind), n, names, offsets, file("id_hashes", "int64", 16, n), file("id_buckets", "int64", 8, None))
    n_buckets = found.buckets.n_rows - 1
    if n_buckets < 1 or n_buckets & (n_buckets - 1):
        raise FormatError(what, root)
    return found


def bucket_of(hashes: UInt64s, bits: int) -> Int64s:
    """Compute the bucket of each hash: its first ``bits`` bits."""
    return (hashes >> np.uint64(64 - bits)).astype(np.int64) if bits else np.zeros(len(hashes), np.int64)


class IdMap:
    """The names of the nodes of a type: ``g.ids("paper")``, of a graph of one type ``g.ids()``.

    Ids are given in order of first appearance, see :func:`featstore.adapters.datasets.tables.import_tables`.

    Attributes
    ----------
    kind : {"text", "int64"}
        What names are.

    Notes
    -----
    ``len(ids)`` is the number of names: that of the nodes, but for those that were appended later. The map stays on disk: a call
    reads the pages that it needs, sorted and checked, in blocks of 16,384 names, in 4 to 16 MiB of the graph's budget.
    Thread-safe. It can be used until the graph is closed.
    """

    def __init__(self, of: str, found: IdMapFiles, files: Mapping[str, RowFile], budget: Budget) -> None:
        self.kind = found.kind
        self._of = of
        self._found = found
        self._files = files
        self._budget = budget

    def __len__(self) -> int:
        return self._found.n

    def __repr__(self) -> str:
        return f"IdMap({len(self):,} names, {self.kind})"

    # -- names to ids ------------------------------------------------------------------------------------------------------------

    def encode(self, names: Any, *, strict: bool = True) -> torch.Tensor:
        """Find the ids of names.

        Parameters
        ----------
        names : sequence of str, or of integers
            As ``kind`` says; lists, NumPy arrays, tensors of integers; any order, repeats allowed.
        strict : bool
            With False, a name that no node has gets the id -1.

        Returns
        -------
        Tensor, int64 [len(names)]

        Raises
        ------
        UnknownNameError
            A name belongs to no node. The error lists the first such names and says how many there are.
        TypeError
            Names are of another kind.
        ClosedError, BudgetError, CorruptionError, OSError
            The graph is closed; memory is short; a file is damaged or cannot be read.

        Notes
        -----
        Of a name it reads a row of a table of begins and about 16 rows of a table of hashes, and the name that it finds, which is
        compared: equal hashes do not suffice.
        """
        keys = keys_of(names, self.kind)
        found = torch.full((len(keys),), -1, dtype=torch.int64, device="cpu")
        ids = found.numpy()
        with self._budget.reserve("names of nodes", _scratch_bytes(len(keys))):
            for first in range(0, len(keys), _BLOCK_NAMES):
                at = np.arange(first, min(first + _BLOCK_NAMES, len(keys)))
                self._find(keys.take(at), ids[first : first + len(at)])
        missing = np.flatnonzero(ids < 0)
        if strict and len(missing):
            shown = ", ".join(keys.show(int(at)) for at in missing[:_SHOWN])
            of = "" if self._of == "_" else f" of type {self._of!r}"
            raise UnknownNameError(
                f"{len(missing)} of {len(keys)} names belong to no node{of}: {shown}{', …' * (len(missing) > _SHOWN)}; "
                "encode(names, strict=False) gives them the id -1"
            )
        return found

    def _find(self, keys: IntKeys | TextKeys, ids: Int64s) -> None:
        hashes = keys.hashes()[:, 0]
        bucket = bucket_of(hashes, self._found.bits)
        begins = self._int64s(self._found.buckets, np.concatenate((bucket, bucket + 1)))
        begins, ends = begins[: len(bucket)], begins[len(bucket) :]
        lengths = ends - begins
        if len(bucket) and (int(lengths.min()) < 0 or int(begins.min()) < 0 or int(ends.max()) > self._found.n):
            raise CorruptionError("buckets of hashes do not ascend", self._path(self._found.buckets))
        owner = np.arange(len(lengths))
        while len(owner):  # a bucket has about ten hashes; of damaged ones no more are read at a time than that makes
            step = max(1, int(np.searchsorted(np.cumsum(lengths[owner]), 24 * _BLOCK_NAMES, side="right")))
            now, owner = owner[:step], owner[step:]
            self._compare(keys, hashes, now, begins[now], lengths[now], ids)

    def _compare(self, keys: IntKeys | TextKeys, hashes: UInt64s, owner: Int64s, begins: Int64s, n: Int64s, ids: Int64s) -> None:
        """Set the ids of those of ``owner``, positions of keys, whose names are in their buckets."""
        rows = self._int64s(self._found.hashes, ranges(begins, n), 2)
        of = np.repeat(owner, n)
        is_same = rows[:, 0].view(np.uint64) == hashes[of] if len(rows) else np.zeros(0, bool)
        of, found = of[is_same], rows[is_same, 1]
        if isinstance(keys, TextKeys):
            lengths = keys.lengths()
            stored, stored_lengths = self._extents(found)
            of_same = lengths[of] == stored_lengths
            of, found, stored = of[of_same], found[of_same], stored[of_same]
            for piece in _pieces(lengths[of]):
                wanted, here = keys.take(of[piece]), self._text(stored[piece], lengths[of[piece]])
                differ = np.zeros(len(here.data) + 1, np.int64)
                np.cumsum(wanted.data != here.data, out=differ[1:])
                equal = differ[here.offsets[1:]] == differ[here.offsets[:-1]]
                ids[of[piece][equal]] = found[piece][equal]
        else:
            ids[of] = found

    # -- ids to names ------------------------------------------------------------------------------------------------------------

    def decode(self, ids: Any) -> Any:
        """Find the names of ids.

        Parameters
        ----------
        ids : sequence of integers
            Lists, NumPy arrays or tensors, in ``[0, len(self))``; any order, repeats allowed.

        Returns
        -------
        list of str, or Tensor, int64 [len(ids)]
            As ``kind`` says.

        Raises
        ------
        IndexError
            An id is out of range; -1, which :meth:`encode` gives unknown names, is so, too.
        TypeError
            Ids are no integers.
        ClosedError, BudgetError, CorruptionError, OSError
            See :meth:`encode`.
        """
        wanted = keys_of(ids, "int64")
        assert isinstance(wanted, IntKeys)
        rows = wanted.values
        bad = np.flatnonzero((rows < 0) | (rows >= len(self)))
        if len(bad):
            raise IndexError(f"ids[{bad[0]}] is {rows[bad[0]]}, which has no name: ids are 0 … {len(self) - 1}")
        with self._budget.reserve("names of nodes", _scratch_bytes(len(rows))):
            if self.kind == "int64":
                return torch.from_numpy(self._int64s(self._found.names, rows))
            return [text for texts in self._texts(rows) for text in texts]

    def blocks(self) -> Iterator[Any]:
        """Iterate over all names in the order of their ids, in blocks of about a megabyte, or one longer name.

        Yields
        ------
        list of str, or int64 array
            As ``kind`` says. The budget holds what reading a block takes, not the block.
        """
        for first in range(0, len(self), _BLOCK_NAMES):
            rows = np.arange(first, min(len(self), first + _BLOCK_NAMES))
            with self._budget.reserve("names of nodes", _scratch_bytes(len(rows))):
                if self.kind == "int64":
                    yield self._int64s(self._found.names, rows)
                else:
                    yield from self._texts(rows)

    def _texts(self, rows: Int64s) -> Iterator[list[str]]:
        """Yield the texts of ids, piece by piece."""
        for first in range(0, len(rows), _BLOCK_NAMES):
            begins, lengths = self._extents(rows[first : first + _BLOCK_NAMES])
            for piece in _pieces(lengths):
                try:
                    yield self._text(begins[piece], lengths[piece]).texts()
                except UnicodeDecodeError as error:
                    raise CorruptionError(f"a name is not UTF-8: {error}", self._path(self._found.names)) from None

    # -- files -------------------------------------------------------------------------------------------------------------------

    def _path(self, record: FileRecord) -> str:
        return self._files[record.name].path

    def _int64s(self, record: FileRecord, rows: Int64s, width: int = 1) -> Int64s:
        out = np.empty((len(rows), width), "<i8")
        if len(rows):
            self._files[record.name].gather(rows, out.view(np.uint8))
        return out.astype(np.int64, copy=False) if width > 1 else out[:, 0].astype(np.int64, copy=False)

    def _extents(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """Read where the text of each id begins, and its length."""
        assert self._found.offsets is not None
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self._found.n):
            raise CorruptionError("a hash leads to an id that is no node", self._path(self._found.hashes))
        both = self._int64s(self._found.offsets, np.concatenate((ids, ids + 1)))
        begins, ends = both[: len(ids)], both[len(ids) :]
        if len(ids) and (int(begins.min()) < 0 or (ends < begins).any() or int(ends.max()) > self._found.names.n_rows):
            raise CorruptionError("offsets of names do not ascend", self._path(self._found.offsets))
        return begins, ends - begins

    def _text(self, begins: Int64s, lengths: Int64s) -> TextKeys:
        """Read texts, each page once."""
        n_bytes = int(lengths.sum())
        begins = begins + PAGE_BYTES  # behind the header page
        first_page = begins // PAGE_BYTES
        n_pages = np.where(lengths > 0, (begins + lengths - 1) // PAGE_BYTES - first_page + 1, 0)
        pages = distinct(ranges(first_page, n_pages))
        more = 0 if n_bytes <= _BLOCK_BYTES else 4 * n_bytes  # of a name that is longer than a block
        with self._budget.reserve("names of nodes", more):
            held = np.empty((len(pages), PAGE_BYTES), np.uint8)
            if len(pages):
                self._files[self._found.names.name].read_pages(pages, held)
            # The pages of a text follow one another in ``pages``.
            at = np.searchsorted(pages, first_page) * PAGE_BYTES + begins % PAGE_BYTES
            return TextKeys.copied(np.where(lengths > 0, at, 0), lengths, held.reshape(-1))


def _scratch_bytes(n: int) -> int:
    """Compute what a call with ``n`` names takes, block by block: the text of a block four times, and a page a name."""
    return min(_SCRATCH_BYTES, 4 * _BLOCK_BYTES + n * PAGE_BYTES)


def _pieces(lengths: Int64s) -> list[Int64s]:
    """Divide positions so that the texts of each piece have about ``_BLOCK_BYTES``; a longer one is alone."""
    ends = np.cumsum(lengths)
    found, first = [], 0
    while first < len(lengths):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + _BLOCK_BYTES, side="right")))
        found.append(np.arange(first, last))
        first = last
    return found
