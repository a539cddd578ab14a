"""Updates of an existing dataset: one writer at a time writes new files first, and then commits the catalog once."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from featstore.errors import BusyError, CommittedError, CorruptionError, FormatError
from featstore.storage.calls import close_quietly, pread_exactly
from featstore.storage.catalog import CATALOG_DIRECTORY, CATALOG_FILE, Catalog, FieldRecord, read_catalog, write_catalog
from featstore.storage.directory import OpenDirectory, Root, open_inside
from featstore.storage.format import HEADER_BYTES, STRIPE, Header, resolve_inside
from featstore.storage.layout import RowLayout, choose_layout
from featstore.storage.lock import READERS_LOCK, WRITER_LOCK, FileLock
from featstore.storage.stripes import make_stripe, remove_stripe, remove_stripes, stripe_directory
from featstore.storage.writer import FileRecord, RowFileWriter

__all__ = ["MAKING", "MAKING_STATE", "OpenFile", "Update", "check_file", "open_file", "sweep", "sweep_unused", "writer_lock"]

MAKING: Final = "making."  # prefix of folders in which features are made, see graph/derive/making.py
MAKING_STATE: Final = "state"  # in such a folder: the record from which a later maker resumes
_BLOCK_ROWS: Final = 1 << 20  # rows of an array that are written at once
_ROWS: Final = re.compile(r".*\.([0-9]+)\.rows(\.sums)?")  # names of row and side files, with the generation of their commit


@dataclass
class OpenFile:
    """An open catalogued file and its side file, checked by :func:`open_file`; :meth:`take` hands the descriptors on."""

    record: FileRecord
    path: str
    fd: int
    sums_fd: int

    def take(self) -> tuple[int, int]:
        """Hand both descriptors to the caller, which closes them."""
        found, self.fd, self.sums_fd = (self.fd, self.sums_fd), -1, -1
        return found

    def close(self) -> None:
        """Close descriptors that were not taken; may be called again."""
        for fd in self.take():
            if fd >= 0:
                close_quietly(fd)


def open_file(root: Root, record: FileRecord) -> OpenFile:
    """Open a catalogued file and its side file, and check that they are regular, of the right size and with the right header.

    Opening reads one page; it neither blocks nor follows links. CorruptionError for a wrong size, a damaged header, or another
    file in its place. FormatError or VersionError for a file that is no row file of this version. OSError, which names the
    stripe if that is missing.
    """
    where = root.path if isinstance(root, OpenDirectory) else root
    found = OpenFile(record, os.path.join(where, record.name), -1, -1)
    try:
        found.sums_fd, n_bytes = open_inside(root, record.sums_name)
        _check_size(n_bytes, record.n_sums_bytes, f"{found.path}.sums")
        found.fd, n_bytes = open_inside(root, record.name)
        _check_size(n_bytes, record.n_bytes, found.path)
        page = bytes(pread_exactly(found.fd, HEADER_BYTES, 0, found.path))
        if page != record.header().pack():
            header = Header.unpack(page, found.path)
            raise CorruptionError(
                f"another file, or an older copy, is in its place: {header.kind} {header.file_id.hex()}, generation "
                f"{header.generation}, not {record.kind} {record.file_id}, generation {record.generation}",
                found.path,
                0,
            )
    except FileNotFoundError:
        found.close()
        stripe = stripe_directory(os.fspath(where), record.name)
        if stripe is None or os.path.isdir(stripe):
            raise
        text = f"a stripe of the dataset {os.fspath(where)} is missing; its drive may not be mounted"
        raise FileNotFoundError(errno.ENOENT, text, stripe) from None
    except BaseException:
        found.close()
        raise
    return found


def _check_size(n_bytes: int, expected: int, path: str) -> None:
    if n_bytes != expected:
        what = "shorter" if n_bytes < expected else "longer"
        raise CorruptionError(
            f"the file is {what} than it was written: {n_bytes} instead of {expected} bytes", path, min(n_bytes, expected)
        )


def check_file(root: Root, record: FileRecord) -> str:
    """Check a catalogued file as :func:`open_file` does; return its path."""
    found = open_file(root, record)
    found.close()
    return found.path


def sweep(root: str | os.PathLike[str], catalog: Catalog, own: FileLock | None = None) -> list[str]:
    """Remove files that the catalog does not name: unfinished ones, and files that a later commit replaced; return their names.

    The caller holds the writer's lock and has written no files yet. So unfinished files, and files of a commit that never
    happened, belong to a dead writer and are removed at once. Files of earlier commits are removed only while nobody reads the
    dataset; but ``own`` is the readers' lock of the caller's handle, which has all of its files open. A stripe whose drive fails
    stays, for the next sweep.
    """
    directory = os.fspath(root)
    named = {name for record in catalog.files.values() for name in (record.name, record.sums_name)}
    removed = []
    with contextlib.ExitStack() as stack:
        if own is not None and own.is_held and own.in_place:
            is_read = not stack.enter_context(own.alone())
        else:
            try:
                stack.enter_context(FileLock(os.path.join(directory, READERS_LOCK), exclusive=True))
                is_read = False
            except BusyError:
                is_read = True

        def may_be_read(name: str) -> bool:
            rows = _ROWS.fullmatch(name)
            return is_read and rows is not None and int(rows[1]) <= catalog.generation

        for folder in (directory, os.path.join(directory, CATALOG_DIRECTORY), *_dead_makings(directory)):
            for entry in sorted(os.scandir(folder), key=lambda item: item.name):
                ours = entry.name.endswith((".tmp", ".rows", ".rows.sums"))
                if ours and entry.name not in named and not may_be_read(entry.name) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.path)
                        removed.append(entry.name)
        for folder in _dead_makings(directory):
            with contextlib.suppress(OSError):  # the folder has other files
                os.rmdir(folder)
        with contextlib.suppress(OSError):
            stripes = [entry.name for entry in os.scandir(directory) if is_read and STRIPE.fullmatch(entry.name)]
            kept = [name for name in stripes if any(map(may_be_read, os.listdir(os.path.join(directory, name))))]
            removed += remove_stripes(directory, {*named, *kept})
    return removed


def _dead_makings(directory: str) -> list[str]:
    """List the folders of features whose makers died before they recorded a state to resume from."""
    folders = [entry for entry in os.scandir(directory) if entry.name.startswith(MAKING)]
    found = sorted(entry.path for entry in folders if entry.is_dir(follow_symlinks=False))
    return [path for path in found if not os.path.lexists(os.path.join(path, MAKING_STATE))]


class Update:
    """An update of a dataset under the writer's lock; a context manager. One owner thread.

    ``catalog`` is that of the last commit. BusyError if another process, or another handle of this one, is writing. Making the
    object sweeps files that killed writers left, and files of earlier commits unless the dataset is being read, see
    :func:`sweep` for ``own``. Leaving without :meth:`commit` leaves the dataset as it was. Readers see the commit when they open
    the dataset again.
    """

    def __init__(self, root: str | os.PathLike[str], own: FileLock | None = None) -> None:
        self.root = os.fspath(root)
        self._lock = writer_lock(self.root)
        self._writers: list[RowFileWriter] = []
        self._names: list[str] = []  # of files that no commit has named yet
        self._stripes: list[str] = []
        self._before: tuple[int, int] | None = None
        self._is_committing = self._is_committed = False
        self._files: dict[str, FileRecord] = {}
        self._fields: dict[str, FieldRecord] = {}
        self._extra: dict[str, dict[str, Any]] = {}
        self._dropped: set[str] = set()
        self._dataset: dict[str, Any] = {}
        self._dropped_fields: set[str] = set()
        try:
            self.catalog = read_catalog(self.root)
            sweep(self.root, self.catalog, own)
        except BaseException:
            self._lock.release()
            raise

    @property
    def generation(self) -> int:
        """Number of the commit in preparation."""
        return self.catalog.generation + 1

    def stripe(self, directory: str) -> str:
        """Make a stripe in a directory of another drive; return its name, for :meth:`writer`."""
        self._stripes.append(make_stripe(self.root, directory))
        return self._stripes[-1]

    def writer(
        self, stem: str, layout: RowLayout, *, kind: str, dtype: str, stripe: str = "", buffer_bytes: int = 4 << 20
    ) -> RowFileWriter:
        """Open a writer of a new file ``<stem>.<generation>.rows``; its commit returns the record for :meth:`add`.

        ``stripe`` is the name that :meth:`stripe` returned, for a file in that stripe.
        """
        name = f"{stem}.{self.generation}.rows"
        if "/" in name:
            raise FormatError(f"{self.root}: a file's name has no folders: {name!r}", self.root)
        name = f"{stripe}/{name}" if stripe else name
        resolve_inside(self.root, name)
        options: dict[str, Any] = {"kind": kind, "dtype": dtype, "generation": self.generation, "buffer_bytes": buffer_bytes}
        writer = RowFileWriter(self.root, name, layout, **options)
        self._writers.append(writer)
        self._names += [name, f"{name}.sums"]
        return writer

    def write_array(self, stem: str, kind: str, dtype: np.dtype[Any], blocks: Iterable[npt.NDArray[Any]]) -> FileRecord:
        """Write one-dimensional blocks of an array as a file; return its record."""
        with self.writer(stem, choose_layout(dtype.itemsize), kind=kind, dtype=dtype.name) as writer:
            for block in blocks:
                for first in range(0, len(block), _BLOCK_ROWS):
                    rows = block[first : first + _BLOCK_ROWS].astype(dtype.newbyteorder("<"), copy=False)
                    writer.write(rows.view(np.uint8).reshape(len(rows), dtype.itemsize))
            return writer.commit()

    def add(
        self,
        files: Iterable[FileRecord],
        fields: Iterable[FieldRecord] = (),
        extra: Mapping[str, dict[str, Any]] | None = None,
        drop: Iterable[str] = (),
        *,
        dataset: Mapping[str, Any] | None = None,
        drop_fields: Iterable[str] = (),
    ) -> None:
        """Register additions and removals for the commit.

        Parameters
        ----------
        files : iterable of FileRecord
            New files, which are durable.
        fields : iterable of FieldRecord
            Fields in these files; they replace fields of the same key.
        extra : mapping of str to dict, optional
            Other entries of the catalog; they replace entries of the same key.
        drop : iterable of str
            Names of files that nothing refers to any more.
        dataset : mapping, optional
            Changed members of the catalog's entry of the dataset; a member that is None is removed.
        drop_fields : iterable of str
            Keys of fields to remove; their files are removed with them.
        """
        self._files.update({record.name: record for record in files})
        self._fields.update({record.key: record for record in fields})
        self._extra.update(extra or {})
        self._dropped.update(drop)
        self._dataset.update(dataset or {})
        self._dropped_fields.update(drop_fields)

    def commit(self) -> Catalog:
        """Commit all registered changes atomically and durably; return the new catalog.

        CommittedError if the new catalog is in place, but a power cut may bring the old one back. After other OSErrors the
        dataset is as it was.
        """
        old = self.catalog
        fields = {key: record for key, record in old.fields.items() if key not in self._dropped_fields} | self._fields
        used = {part.file for record in fields.values() for part in record.parts}
        # A file is removed with the field that it held. Other files stay: entries of later releases may refer to them.
        changed = {*self._fields, *self._dropped_fields} & set(old.fields)
        replaced = {part.file for key in changed for part in old.fields[key].parts}
        gone = (replaced | self._dropped) - used - set(self._files)
        gone |= {name for base in gone & set(old.files) for name in old.files[base].patch_names}
        catalog = Catalog(
            dataset={
                key: value
                for key, value in {**old.dataset, **self._dataset, "generation": self.generation}.items()
                if value is not None
            },
            files={name: record for name, record in {**old.files, **self._files}.items() if name not in gone},
            fields=fields,
            extra={**old.extra, **self._extra},
        )
        self._before, self._is_committing = self._catalog_id(), True
        write_catalog(self.root, catalog)
        self.catalog, self._is_committed = catalog, True
        self._names, self._stripes, self._is_committing = [], [], False
        self._files, self._fields, self._extra, self._dropped = {}, {}, {}, set()
        self._dataset, self._dropped_fields = {}, set()
        return catalog

    def _catalog_id(self) -> tuple[int, int] | None:
        """Identify the catalog's file without opening it; None if that fails."""
        with contextlib.suppress(OSError):
            found = os.stat(os.path.join(self.root, CATALOG_FILE))
            return found.st_dev, found.st_ino
        return None

    def _may_be_committed(self) -> bool:
        """Check whether a commit that an error or an interrupt ended may have replaced the catalog, which then names our files.

        A new catalog is made while the old one exists, so it is a file of another identity. If the catalog cannot be identified,
        nothing is removed: the next writer sweeps files that the catalog does not name.
        """
        return self._is_committing and (self._before is None or self._catalog_id() != self._before)

    def __enter__(self) -> Update:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            for writer in self._writers:
                writer.abort()
            if not self._may_be_committed():
                added = {name for record in self._files.values() for name in (record.name, record.sums_name)}
                named = {name for record in self.catalog.files.values() for name in (record.name, record.sums_name)}
                for name in {*self._names, *added} - named:
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(self.root, name))
                for stripe in self._stripes:
                    with contextlib.suppress(OSError):  # the next writer removes it
                        remove_stripe(self.root, stripe)
        finally:
            try:
                self._lock.release()
            except OSError as failure:
                if kind is None and self._is_committed:
                    what = f"the commit to {self.root} is in place, but its lock was not released"
                    raise CommittedError(what, self.root, failure) from failure
                raise


def sweep_unused(root: str) -> None:
    """Remove files that the catalog does not name; files that cannot be removed now are left to a later writer."""
    # Making an Update sweeps. The next reader reports damage.
    with contextlib.suppress(OSError, FormatError), Update(root):
        pass


def writer_lock(root: str) -> FileLock:
    """Take the writer's lock of the dataset, or pack, at ``root``; BusyError if another process or handle has it."""
    while True:
        try:
            lock = FileLock(os.path.join(root, WRITER_LOCK), exclusive=True)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "no such directory; it may have been renamed or removed", root) from None
        # The directory may have been replaced before the lock was taken; then the lock is that of the removed directory.
        try:
            if lock.in_place:
                return lock
        except BaseException:
            lock.release()
            raise
        lock.release()
