"""Adding to a dataset that exists: one writer at a time, new files first, then one commit of the catalog."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from featstore.errors import BusyError, CorruptionError, FormatError
from featstore.storage.catalog import CATALOG_DIRECTORY, Catalog, FieldRecord, read_catalog, write_catalog
from featstore.storage.format import HEADER_BYTES, Header, open_regular, pread_exactly, resolve_inside
from featstore.storage.layout import RowLayout
from featstore.storage.lock import READERS_LOCK, WRITER_LOCK, FileLock
from featstore.storage.writer import FileRecord, RowFileWriter

__all__ = ["Update", "check_file", "sweep"]


def check_file(root: str | os.PathLike[str], record: FileRecord) -> str:
    """Check that a catalogued file and its side file are there, regular, of the right size, and that the header is this file's.

    Parameters
    ----------
    root : path-like
        The dataset's directory.
    record : FileRecord

    Returns
    -------
    str
        The file's path.

    Raises
    ------
    CorruptionError
        Wrong size, a damaged header, or another file or an older copy in this one's place.
    FormatError, VersionError
        No row file, a link, a directory, a device; a path that leads outside.
    OSError
        Missing, or no permission.

    Notes
    -----
    Reads one page; neither blocks nor follows links.
    """
    path = resolve_inside(root, record.name)
    for name, expected in ((path + ".sums", record.n_sums_bytes), (path, record.n_bytes)):
        fd, n_bytes = open_regular(name)
        try:
            if n_bytes != expected:
                what = "shorter" if n_bytes < expected else "longer"
                raise CorruptionError(
                    f"the file is {what} than it was written: {n_bytes} instead of {expected} bytes",
                    name,
                    min(n_bytes, expected),
                )
            page = bytes(pread_exactly(fd, HEADER_BYTES, 0, name)) if name == path else b""
        finally:
            os.close(fd)
    if page != record.header().pack():
        found = Header.unpack(page, path)
        raise CorruptionError(
            f"another file, or an older copy, is in its place: {found.kind} {found.file_id.hex()}, generation {found.generation},"
            f" not {record.kind} {record.file_id}, generation {record.generation}",
            path,
            0,
        )
    return path


def sweep(root: str | os.PathLike[str], catalog: Catalog) -> list[str]:
    """Remove files that no catalog names, left by a killed or superseding writer; only while nobody reads the dataset.

    The caller holds the writer's lock.

    Returns
    -------
    list of str
        What was removed; nothing where a reader has the dataset open.
    """
    directory = os.fspath(root)
    try:
        lock = FileLock(os.path.join(directory, READERS_LOCK), exclusive=True)
    except BusyError:
        return []
    named = {name for record in catalog.files.values() for name in (record.name, record.sums_name)}
    removed = []
    with lock:
        for folder in (directory, os.path.join(directory, CATALOG_DIRECTORY)):
            for entry in sorted(os.scandir(folder), key=lambda item: item.name):
                ours = entry.name.endswith((".tmp", ".rows", ".rows.sums"))
                if ours and entry.name not in named and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.path)
                        removed.append(entry.name)
    return removed


class Update:
    """The right to add to a dataset; a context manager. One owner thread.

    Parameters
    ----------
    root : path-like
        The dataset's directory.

    Attributes
    ----------
    catalog : Catalog
        As of the last commit.

    Raises
    ------
    BusyError
        Another process, or another handle of this one, is writing.

    Notes
    -----
    Entering sweeps what killed writers left, unless the dataset is being read. Leaving without :meth:`commit` leaves the dataset
    as it was. Readers see the commit when they open the dataset again.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        self._lock = FileLock(os.path.join(self.root, WRITER_LOCK), exclusive=True)
        self._writers: list[RowFileWriter] = []
        self._files: dict[str, FileRecord] = {}
        self._fields: dict[str, FieldRecord] = {}
        self._extra: dict[str, dict[str, Any]] = {}
        self._dropped: set[str] = set()
        try:
            self.catalog = read_catalog(self.root)
            sweep(self.root, self.catalog)
        except BaseException:
            self._lock.release()
            raise

    @property
    def generation(self) -> int:
        """Number of the commit in preparation."""
        return self.catalog.generation + 1

    def writer(self, stem: str, layout: RowLayout, *, kind: str, dtype: str) -> RowFileWriter:
        """Open a writer of a new file ``<stem>.<generation>.rows``; hand what its commit returns to :meth:`add`."""
        name = f"{stem}.{self.generation}.rows"
        resolve_inside(self.root, name)
        if "/" in name:
            raise FormatError(f"{self.root}: a file's name has no folders: {name!r}")
        writer = RowFileWriter(self.root, name, layout, kind=kind, dtype=dtype, generation=self.generation)
        self._writers.append(writer)
        return writer

    def add(
        self,
        files: Iterable[FileRecord],
        fields: Iterable[FieldRecord] = (),
        extra: Mapping[str, dict[str, Any]] | None = None,
        drop: Iterable[str] = (),
    ) -> None:
        """Note what the commit shall add.

        Parameters
        ----------
        files : iterable of FileRecord
            Files, which are durable.
        fields : iterable of FieldRecord
            The fields that they hold; they replace those of the same key.
        extra : mapping of str to dict, optional
            Other entries of the catalog; they replace those of the same key.
        drop : iterable of str
            Names of files that nothing refers to any more.
        """
        self._files.update({record.name: record for record in files})
        self._fields.update({record.key: record for record in fields})
        self._extra.update(extra or {})
        self._dropped.update(drop)

    def commit(self) -> Catalog:
        """Make what was added part of the dataset, at once and durably; return the new catalog.

        Raises
        ------
        OSError
            The dataset is as it was.
        """
        old = self.catalog
        fields = {**old.fields, **self._fields}
        used = {part.file for record in fields.values() for part in record.parts}
        # A file goes with the field that it held. Others stay: entries of later releases may refer to them.
        replaced = {part.file for key in self._fields if key in old.fields for part in old.fields[key].parts}
        gone = (replaced | self._dropped) - used - set(self._files)
        catalog = Catalog(
            dataset={**old.dataset, "generation": self.generation},
            files={name: record for name, record in {**old.files, **self._files}.items() if name not in gone},
            fields=fields,
            extra={**old.extra, **self._extra},
        )
        write_catalog(self.root, catalog)
        self.catalog = catalog
        self._files, self._fields, self._extra, self._dropped = {}, {}, {}, set()
        return catalog

    def __enter__(self) -> Update:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            for writer in self._writers:
                writer.abort()
            # Files that were finished but not committed.
            for record in self._files.values():
                for name in (record.name, record.sums_name):
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(self.root, name))
        finally:
            self._lock.release()
