"""One commit of a dataset, opened: its catalog and all its files, whatever is committed or put in its place meanwhile."""

from __future__ import annotations

import contextlib
import os
import stat

from featstore.errors import FormatError, VersionError
from featstore.storage.builddir import restore_moved
from featstore.storage.catalog import EDGE, FieldRecord, read_catalog
from featstore.storage.format import sums_seed
from featstore.storage.lock import READERS_LOCK, FileLock
from featstore.storage.reader import Reader
from featstore.storage.rowfile import RowFile
from featstore.storage.update import check_file

__all__ = ["Snapshot", "open_snapshot"]

SWEEP_PATIENCE_S = 2.0  # a writer that removes leftovers keeps readers out for a moment
OPEN_ATTEMPTS = 5  # a dataset that is replaced while it is being opened is opened again


class Snapshot:
    """One commit of a dataset: its catalog, and every file that it names, open."""

    def __init__(self, root: str, reader: Reader) -> None:
        self.root = root
        self.files: dict[str, RowFile] = {}
        self.lock: FileLock | None = None
        try:
            # A dataset without the lock file can be read, but not swept: its media are read-only, or somebody tidied up.
            with contextlib.suppress(FileNotFoundError):
                self.lock = FileLock(os.path.join(root, READERS_LOCK), exclusive=False, patience_s=SWEEP_PATIENCE_S)
            self.catalog = read_catalog(root)
            for name, record in self.catalog.files.items():
                self.files[name] = reader.open(
                    check_file(root, record),
                    layout=record.layout,
                    n_rows=record.n_rows,
                    seed=record.seed,
                    sums_seed=sums_seed(record.seed),
                )
        except BaseException:
            self.close()
            raise

    def file_of(self, record: FieldRecord) -> RowFile:
        """Return the file of a field that lies in one."""
        if len(record.parts) != 1:
            raise VersionError(f"{self.root}: {record.key} lies in {len(record.parts)} files; this release reads fields of one")
        return self.files[record.parts[0].file]

    def topology_file(self, name: str, n_rows: int) -> tuple[RowFile, int]:
        """Return the file of ``indptr``, ``indices`` or ``out_degree``, and the bytes of an entry."""
        record = self.catalog.fields.get(f"{EDGE}/{name}")
        if record is None or record.shape != (n_rows,) or record.dtype not in ("int32", "int64"):
            raise FormatError(f"{self.root}: the catalog has no {name} of {n_rows} rows")
        return self.file_of(record), record.row_bytes

    def close(self) -> None:
        for file in self.files.values():
            file.close()
        if self.lock is not None:
            self.lock.release()


def open_snapshot(root: str, reader: Reader) -> Snapshot:
    """Open a dataset's last commit, all of it from the same directory though another may be put in its place meanwhile."""
    for attempt in range(OPEN_ATTEMPTS):
        if attempt == 0 and not os.path.lexists(root):
            restore_moved(root)
        before = os.stat(root)
        if not stat.S_ISDIR(before.st_mode):
            raise FormatError(f"{root} is no dataset: it is not a directory")
        snapshot, failure = None, None
        try:
            snapshot = Snapshot(root, reader)
        except (OSError, ValueError) as error:
            failure = error
        try:
            after = os.stat(root)
        except BaseException:
            if snapshot is not None:
                snapshot.close()
            raise
        if (before.st_dev, before.st_ino) == (after.st_dev, after.st_ino) or attempt == OPEN_ATTEMPTS - 1:
            if snapshot is None:
                assert failure is not None
                raise failure
            return snapshot
        if snapshot is not None:
            snapshot.close()
    raise AssertionError("the last attempt returns or raises")
