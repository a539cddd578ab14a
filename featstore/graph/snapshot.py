"""One opened commit of a dataset: its catalog and all its files, which stay readable if the dataset changes meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from featstore.budget import Living
from featstore.config import Options, format_size
from featstore.errors import BudgetError, CommittedError, FormatError, VersionError
from featstore.gather.patchedrows import PatchedRows, patch_table_bytes
from featstore.storage.builddir import restore_moved
from featstore.storage.catalog import BLOCKS, EDGE, Catalog, FieldRecord, read_catalog
from featstore.storage.directory import OPEN_PATIENCE_S, OpenDirectory, with_directory
from featstore.storage.format import sums_seed
from featstore.storage.lock import READERS_LOCK, FileLock
from featstore.storage.pagedsums import divisor_for, table_bytes
from featstore.storage.reader import SCRATCH_STEP, Reader, least_queue_bytes
from featstore.storage.rowfile import RowFile
from featstore.storage.update import OpenFile, open_file, sweep_unused
from featstore.storage.writer import FileRecord
from featstore.topology.types import Types

__all__ = ["DatasetFiles", "Snapshot", "check_memory", "fingerprint_of", "open_files", "opening_committed", "topology_bytes"]


class DatasetFiles:
    """Every file of one commit, open, with only headers read so far; a context manager. Made by :func:`open_files`.

    ``lock`` keeps the files from being swept; it is None if the dataset has no lock file. ``files`` maps the names in the
    catalog to open files.
    """

    catalog: Catalog
    types: Types

    def __init__(self, directory: OpenDirectory) -> None:
        self.path = directory.path
        self.files: dict[str, OpenFile] = {}
        self.lock: FileLock | None = None
        try:
            # A dataset without the lock file is read without a lock: it lies on read-only media, or the file was deleted.
            with contextlib.suppress(FileNotFoundError):
                self.lock = directory.lock(READERS_LOCK, OPEN_PATIENCE_S)
            self.catalog = read_catalog(directory)
            self.types = Types.of_entry(self.catalog.dataset, self.path)
            for name, record in self.catalog.files.items():
                self.files[name] = open_file(directory, record)
        except BaseException:
            with contextlib.suppress(OSError):
                self.close()
            raise

    def close(self) -> None:
        """Close the lock and all files that were not taken over; may be called again."""
        lock, self.lock = self.lock, None
        with contextlib.ExitStack() as stack:  # runs all calls, even if one fails
            if lock is not None:
                stack.callback(lock.release)
            for file in self.files.values():
                stack.callback(file.close)

    def __enter__(self) -> DatasetFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_files(root: str) -> DatasetFiles:
    """Open the files of a dataset's last commit, all of the same commit, even if the dataset is replaced meanwhile.

    Raises as :meth:`featstore.OutOfCoreGraph.open`.
    """
    if not os.path.lexists(root):
        # Put back a dataset that a dead builder moved aside. If its builder lives, with_directory() opens it where it is.
        with contextlib.suppress(OSError):
            restore_moved(root)
    try:
        return with_directory(root, DatasetFiles)
    except FileNotFoundError as error:
        if error.filename != root:
            raise
        reason = "no such file or directory; OutOfCoreGraph.create, from_edge_index, from_pyg and featstore import make one"
        raise FileNotFoundError(errno.ENOENT, reason, root) from None


@contextlib.contextmanager
def opening_committed(what: str, path: str) -> Iterator[None]:
    """Translate an error of the block, which opens data just committed at ``path``: the data need not be made again.

    An OSError becomes a CommittedError with the message ``what``, and so does a lack of memory, with ENOMEM; a BudgetError gets
    ``what`` before its reason.
    """
    try:
        yield
    except OSError as error:
        raise CommittedError(what, path, error) from error
    except BudgetError as error:
        raise BudgetError(f"{what}: {error.reason}", error.needed) from error
    except MemoryError as error:
        raise CommittedError(what, path, OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), path)) from error


def check_memory(path: str, files: Collection[FileRecord], options: Options) -> None:
    """Check that a dataset can be opened within ``options.memory``; BudgetError, with a sufficient memory, otherwise."""
    n_blocks = {file.name: file.n_rows for file in files if file.kind == BLOCKS}
    lengths = {file: [n_blocks[each.blocks] for each in file.patches] for file in files if file.patches}
    patched = sum(patch_table_bytes(file.layout, file.total_rows, each) for file, each in lengths.items())
    divisor = divisor_for(file.n_sums_bytes for file in files)

    def needed(total: int) -> int:
        tables = [table_bytes(file.n_sums_bytes, file.layout.row_bytes, total, divisor) for file in files]
        if options.verify == "open":  # one table at a time, beside a buffer of one row or scratch for sorting
            rows = [max(file.layout.row_bytes, 16 * SCRATCH_STEP) for file in files]
            tables = [max(map(sum, zip(tables, rows, strict=True)), default=0)]
        return least_queue_bytes(total) + patched + (0 if options.verify == "off" else sum(tables))

    total = options.memory
    if needed(total) > total:
        while (more := needed(total)) > total:  # both grow with the memory
            total = more
        tables = format_size(needed(options.memory) - least_queue_bytes(options.memory))
        queue, memory = format_size(least_queue_bytes(options.memory)), format_size(options.memory)
        raise BudgetError(
            f"a budget of {memory} is too small for opening {path}: a queue of reads takes {queue}, checksums {tables}", total
        )


class Snapshot:
    """One commit of a dataset: its catalog, and every file that the catalog names, ready to be read.

    The snapshot takes over the files and the lock of ``opened``. Its files are open until it is closed, so that a writer which
    has ``lock`` may remove them, see :func:`~featstore.storage.update.sweep`.
    """

    def __init__(self, root: str, opened: DatasetFiles, reader: Reader) -> None:
        self.root = root
        self.catalog, self.types = opened.catalog, opened.types
        self.files: dict[str, RowFile] = {}
        self._patched: dict[str, tuple[FileRecord, PatchedRows]] = {}  # by the name of the base
        self._replaced: Living[RowFile] = Living()  # stores that were handed out have them
        self._old_patched: Living[PatchedRows] = Living()
        self._reader = reader
        self._is_superseded = False
        self.lock, opened.lock = opened.lock, None
        try:
            reader.expect([file.record.n_sums_bytes for file in opened.files.values()])
            for name, file in opened.files.items():
                self.files[name] = self._open(file)
        except BaseException:
            with contextlib.suppress(OSError):
                self.close()
            raise

    def _open(self, file: OpenFile) -> RowFile:
        record = file.record
        return self._reader.open(
            file.path,
            layout=record.layout,
            n_rows=record.n_rows,
            seed=record.seed,
            sums_seed=sums_seed(record.seed),
            fds=file.take(),
            fingerprint=record.file_id,
        )

    def adopt(self, catalog: Catalog, key: str, names: list[str]) -> None:
        """Add an entry or a field that this process has just committed, and its files, to the opened commit.

        Files that are open already stay so; patches over them may be new. OSError if a file cannot be opened, BudgetError if
        there is no room for the tables of patches; the snapshot is unchanged then.
        """
        with contextlib.ExitStack() as undo:
            added: dict[str, RowFile] = {}
            for name in names:
                if name in self.files and self.catalog.files[name].file_id == catalog.files[name].file_id:
                    continue
                file = undo.enter_context(contextlib.closing(open_file(self.root, catalog.files[name])))
                added[name] = self._open(file)
                undo.callback(added[name].close)
            record, patched = catalog.fields.get(key), {}
            for name in [part.file for part in record.parts] if record is not None else []:
                found = self._patched.get(name)
                if catalog.files[name].patches and (found is None or found[0] != catalog.files[name]):
                    patched[name] = catalog.files[name], self._patch(catalog.files[name], {**self.files, **added})
            undo.pop_all()
        self.committed(catalog)
        self.files |= added
        for name in patched.keys() & self._patched.keys():
            self._old_patched.add(self._patched[name][1])
        self._patched |= patched
        old, before = self.catalog, self.catalog.fields.get(key)
        self.catalog = replace(
            self.catalog,
            files={**self.catalog.files, **{name: catalog.files[name] for name in names}},
            fields={**self.catalog.fields, **{each: catalog.fields[each] for each in (key,) if each in catalog.fields}},
            extra={
                **self.catalog.extra,
                **{each: catalog.extra[each] for each in (key, f"derived/{key}") if each in catalog.extra},
            },
        )
        if before is not None:
            self._let_go(old.names_of(before))

    def forget(self, catalog: Catalog, key: str) -> None:
        """Note a commit of this process that has removed a field; its file is open while stores that were handed out have it."""
        self.committed(catalog)
        old, fields = self.catalog, {each: record for each, record in self.catalog.fields.items() if each != key}
        self.catalog = replace(old, fields=fields)
        self._let_go(old.names_of(old.fields[key]))

    def committed(self, catalog: Catalog) -> None:
        """Note a commit of this process: files of the snapshot that it no longer names are removed at closing."""
        self._is_superseded = self._is_superseded or not self.files.keys() <= catalog.files.keys()

    def _let_go(self, names: Iterable[str]) -> None:
        """Leave files that no field has any more to the stores that were handed out; a file dies with the last of these."""
        named = {name for record in self.catalog.fields.values() for name in self.catalog.names_of(record)}
        for name in (set(names) - named) & set(self.files):
            self._replaced.add(self.files.pop(name))
            if name in self._patched:
                self._old_patched.add(self._patched.pop(name)[1])

    def rows_of(self, record: FieldRecord) -> RowFile | PatchedRows:
        """Get the rows of a field that lies in one file and patches over it."""
        base, name = self.file_of(record), record.parts[0].file
        of = self.catalog.files[name]
        if not of.patches:
            return base
        if name not in self._patched:
            self._patched[name] = of, self._patch(of, self.files)
        return self._patched[name][1]

    def _patch(self, of: FileRecord, files: Mapping[str, RowFile]) -> PatchedRows:
        patches = [(files[each.file], _numbers(files[each.blocks])) for each in of.patches]
        return PatchedRows(files[of.name], patches, of.total_rows, of.rows_id, self._reader.budget)

    def blocks_of_patch(self, name: str) -> npt.NDArray[np.int64]:
        """Read the numbers of the blocks of a patch, given the name of their file."""
        return _numbers(self.files[name])

    def file_of(self, record: FieldRecord) -> RowFile:
        """Get the file of a field that lies in one file, without patches over it; VersionError for a field in several."""
        if len(record.parts) != 1:
            raise VersionError(
                f"{self.root}: {record.key} lies in {len(record.parts)} files; this release reads fields of one", self.root
            )
        return self.files[record.parts[0].file]

    def topology_file(self, name: str, n_rows: int | None = None, width: int = 1) -> tuple[RowFile, int]:
        """Get the file of an adjacency field, and the bytes of a row of ``width`` integers; FormatError if there is none."""
        record = self._topology_record(name, n_rows, width)
        return self.file_of(record), record.row_bytes

    def topology_files(self, name: str) -> tuple[list[RowFile], list[int], int]:
        """Get the files of an adjacency field, in order, how many rows of each count, and the bytes of a row of one integer."""
        record = self._topology_record(name)
        if not record.parts:
            raise FormatError(f"{self.root}: {name} lies in no file", self.root)
        return [self.files[part.file] for part in record.parts], [part.rows for part in record.parts], record.row_bytes

    def _topology_record(self, name: str, n_rows: int | None = None, width: int = 1) -> FieldRecord:
        record = self.catalog.fields.get(f"{EDGE}/{name}")
        row = () if width == 1 else (width,)
        is_right = record is not None and record.shape[1:] == row and record.dtype in ("int32", "int64")
        if record is None or not is_right or n_rows not in (None, record.n_rows):
            raise FormatError(f"{self.root}: the catalog has no {name} of {n_rows} rows", self.root)
        return record

    def close(self) -> None:
        is_superseded, self._is_superseded = self._is_superseded, False
        with contextlib.ExitStack() as stack:  # runs all calls, even if one fails
            if is_superseded:
                stack.callback(sweep_unused, self.root)
            if self.lock is not None:
                stack.callback(self.lock.release)
            for file in (*self.files.values(), *self._replaced):
                stack.callback(file.close)
            for rows in (*self._old_patched, *(found[1] for found in self._patched.values())):
                stack.callback(rows.close)


def _numbers(file: RowFile) -> npt.NDArray[np.int64]:
    return file.read(0, file.n_rows).view("<i8").reshape(-1).astype(np.int64, copy=False)


def fingerprint_of(catalog: Catalog) -> dict[str, str]:
    """Identify the file of each field by its id, by key; ids of the adjacency are those of :meth:`Catalog.adjacency`."""
    held = {
        key: " ".join(catalog.files[part.file].rows_id for part in record.parts)
        for key, record in catalog.fields.items()
        if record.role != "topology"
    }
    return dict(sorted({**held, **catalog.adjacency()}.items()))


def topology_bytes(catalog: Catalog) -> int:
    """Count the bytes that checking the adjacency's fields reports as progress: 8 for each row."""
    records = {**catalog.by_role("topology", EDGE), **catalog.by_role("edge ids", EDGE)}
    return sum(part.rows * 8 for record in records.values() for part in record.parts)
