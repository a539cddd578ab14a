"""Writing of files: streamed row files with their checksums, and small files that are replaced atomically.

Every commit of a file has this order: write ``*.tmp``, fsync it, rename it, fsync the directory. A failed fsync is never tried
again, because the kernel may have dropped the pages, and a second fsync would succeed. Instead, the temporary file is removed and
the error raised.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from featstore._core.checksum import page_sums
from featstore._core.descriptor import open_fd
from featstore.errors import CommittedError, FormatError
from featstore.storage.calls import NO_SPACE, close_fd, close_quietly, fsync_fd, open_regular, pread_exactly, pwrite_all
from featstore.storage.direct import DirectWriter
from featstore.storage.format import HEADER_BYTES, SUMS_PER_PAGE, Header, file_bytes, file_seed, page_sum, sums_bytes, sums_page
from featstore.storage.layout import PAGE_BYTES, RowLayout

__all__ = [
    "FileRecord",
    "Patch",
    "RowFileWriter",
    "WriterState",
    "free_bytes",
    "fsync_directory",
    "is_drive_full",
    "make_durable",
    "write_file",
]

UInt8s = npt.NDArray[np.uint8]


def is_drive_full(error: OSError) -> bool:
    """Decide whether an error means that the drive is full, or the user's quota of it, rather than the user's disk budget."""
    is_full = error.errno in NO_SPACE
    return is_full and str(error.strerror).startswith(os.strerror(error.errno or 0))


def free_bytes(path: str) -> int | None:
    """Count the free bytes on the drive of ``path``, or of its nearest parent that exists; None if unknown."""
    while path:
        with contextlib.suppress(OSError):
            found = os.statvfs(path)
            return found.f_bavail * found.f_frsize
        parent = os.path.dirname(path)
        path = "" if parent == path else parent
    return None


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable."""
    name = os.fspath(path)
    fd = open_fd(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fsync_fd(fd, name)
    except BaseException:
        close_quietly(fd)
        raise
    close_quietly(fd)  # nothing was written through it, and its names are durable


def _create(path: str) -> int:
    return open_fd(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a small file atomically and durably.

    CommittedError if the new file is in place, but a power cut may bring the old one back. After any other OSError the old file
    is in place, and the temporary file is removed.
    """
    name = os.fspath(path)
    temporary = f"{name}.{uuid.uuid4().hex}.tmp"
    fd = _create(temporary)
    try:
        try:
            pwrite_all(fd, data, 0, temporary)
            fsync_fd(fd, temporary)
        except BaseException:
            close_quietly(fd)
            raise
        close_fd(fd, temporary)
        os.rename(temporary, name)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    make_durable(os.path.dirname(name) or ".", name)


def make_durable(directory: str, path: str) -> None:
    """Make the name ``path``, which a rename has just given, durable; CommittedError if that fails."""
    try:
        fsync_directory(directory)
    except OSError as error:
        raise CommittedError(f"{path} is in place, but a power cut may undo that, as flushing it failed", path, error) from error


@dataclass(frozen=True)
class Patch:
    """A patch over a row file: the names of the files of its rows and of the numbers of its blocks, and the former's id."""

    file: str
    blocks: str
    file_id: str


@dataclass(frozen=True)
class FileRecord:
    """A catalog's record of one row file: the values of its header, its size, and the size of its side file ``<name>.sums``.

    ``name`` is relative to the dataset; ``file_id`` has 32 hexadecimal digits. ``patches`` lie over the file, the last one on
    top; they have ``n_appended`` rows behind the file's own.
    """

    name: str
    kind: str
    file_id: str
    generation: int
    n_rows: int
    dtype: str
    layout: RowLayout
    n_bytes: int
    n_sums_bytes: int
    patches: tuple[Patch, ...] = ()
    n_appended: int = 0

    @property
    def total_rows(self) -> int:
        """Number of rows, those of patches included."""
        return self.n_rows + self.n_appended

    @property
    def rows_id(self) -> str:
        """Identity of the rows: the file's id, or if there are patches a sum of all ids; 32 hexadecimal digits."""
        if not self.patches:
            return self.file_id
        return xxhash.xxh3_128_hexdigest(" ".join([self.file_id, *(each.file_id for each in self.patches)]).encode())

    @property
    def patch_names(self) -> list[str]:
        """Names of the files of all patches."""
        return [name for each in self.patches for name in (each.file, each.blocks)]

    @property
    def seed(self) -> int:
        """Seed of the file's page checksums."""
        return file_seed(self.kind, self.file_id, self.generation)

    @property
    def sums_name(self) -> str:
        return self.name + ".sums"

    def header(self) -> Header:
        return Header(self.kind, bytes.fromhex(self.file_id), self.generation, self.layout, self.n_rows, self.dtype)

    def check(self, where: str) -> None:
        """Check the recorded sizes against the layout; FormatError, which names ``where``, if they differ."""
        expected = file_bytes(self.layout, self.n_rows)
        if (self.n_bytes, self.n_sums_bytes) != (expected, sums_bytes(expected)):
            raise FormatError(f"{where}: sizes {self.n_bytes} and {self.n_sums_bytes}, but its rows need {expected}")


@dataclass(frozen=True)
class WriterState:
    """The state of an unfinished row file, from which a later writer resumes.

    ``offset`` is the number of bytes in whole pages on the drive; ``tail`` are the bytes behind them, less than a page.
    ``first_sums`` are the checksums of the first page of sums. ``sums`` are later checksums that are not in the side file yet,
    which has ``n_sums_pages`` pages, the first one included.
    """

    file_id: bytes
    generation: int
    n_rows: int
    offset: int
    tail: UInt8s
    first_sums: npt.NDArray[np.uint64]
    sums: npt.NDArray[np.uint64]
    n_sums_pages: int


class RowFileWriter:
    """Stream rows into a row file and its side file of checksums, in bounded memory. One owner thread.

    The writer is a context manager; leaving it without :meth:`commit` or :meth:`leave` removes the temporary files. A later call
    raises the error of a failed write. The writer holds ``buffer_bytes``, and 1 MiB more for rows in groups.

    Parameters
    ----------
    directory : path-like
    name : str
        Final name of the file, which may lead through a stripe's link. The file is complete and durable under this name when
        :meth:`commit` returns.
    layout : RowLayout
    kind, dtype : str
        See :class:`~featstore.storage.format.Header`.
    generation : int
        Number of the commit for which the file is written.
    buffer_bytes : int
        Bytes of two buffers together: a thread writes one, past the page cache, while the other is filled.
    resume : WriterState, optional
        State of an unfinished file of another writer, which this writer resumes, with the state's ``generation``. FormatError
        if a file is shorter than the state says; nothing is changed then. FileNotFoundError if it is gone.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        name: str,
        layout: RowLayout,
        *,
        kind: str,
        dtype: str,
        generation: int = 1,
        buffer_bytes: int = 4 << 20,
        resume: WriterState | None = None,
    ) -> None:
        self.layout = layout
        self.n_rows = 0
        self._directory = os.fspath(directory)
        self._name = name
        self._kind = kind
        self._dtype = dtype
        self._generation = generation if resume is None else resume.generation
        self._id = uuid.uuid4().bytes if resume is None else resume.file_id
        self._seed = file_seed(kind, self._id, self._generation)
        # Sums not yet written. Entry 0 of page 0 is that of the header, which is known last, so page 0 is kept until then.
        self._first_sums: list[npt.NDArray[np.uint64]] = [np.zeros(1, dtype=np.uint64)]
        self._n_first = 1
        self._sums: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._n_sums_pages = 1
        self._path = os.path.join(self._directory, name)
        self._temporary = [f"{path}.{self._id.hex()}.tmp" for path in (self._path, f"{self._path}.sums")]
        self._fds: list[int] = []
        self._out: DirectWriter | None = None
        self._is_recorded = resume is not None  # somewhere, so that the files are not this writer's to remove
        half = max(1, buffer_bytes // 2 // PAGE_BYTES) * PAGE_BYTES
        if resume is not None:
            self._go_on(resume, half)
            return
        try:
            for path in self._temporary:
                self._fds.append(_create(path))
            self._out = DirectWriter(self._fds[0], self._temporary[0], half, HEADER_BYTES, self._add_sums)
        except BaseException:
            self._temporary = self._temporary[: len(self._fds)]  # a file that was not created here is not ours to remove
            self.abort()
            raise

    def _go_on(self, state: WriterState, half: int) -> None:
        """Open the files that another writer left, and cut off bytes that it wrote after its state was recorded.

        A file may have its final name already, if the other writer was ended before its commit was recorded.
        """
        for path, final in zip(self._temporary, (self._path, f"{self._path}.sums"), strict=True):
            if not os.path.lexists(path) and os.path.lexists(final):
                os.rename(final, path)
        ends = state.offset, state.n_sums_pages * PAGE_BYTES
        sizes = [end if end > PAGE_BYTES else 0 for end in ends]  # the first page of either is written last
        try:
            for path, n_bytes in zip(self._temporary, sizes, strict=True):
                self._fds.append(open_fd(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
                if os.fstat(self._fds[-1]).st_size < n_bytes:
                    raise FormatError(f"{path} is shorter than what was recorded of it: {n_bytes} bytes", path)
            for fd, n_bytes in zip(self._fds, sizes, strict=True):
                os.ftruncate(fd, n_bytes)
            self._out = DirectWriter(self._fds[0], self._temporary[0], half, state.offset, self._add_sums)
        except BaseException:
            self.leave()
            raise
        self._out.append(state.tail)  # less than a page
        self.n_rows = state.n_rows
        self._first_sums, self._n_first = [state.first_sums], len(state.first_sums)
        self._sums, self._n_sums_pages = state.sums, state.n_sums_pages

    def checkpoint(self) -> WriterState:
        """Make the rows so far durable; return the state from which a later writer resumes.

        After an OSError the writer is closed, and the temporary files are gone unless there was a checkpoint before.
        """
        out = self._opened()
        try:
            out.flush()
            for number, fd in enumerate(self._fds):  # before the caller records the state
                fsync_fd(fd, self._temporary[number])
        except BaseException:
            self._give_up()
            raise
        self._is_recorded = True
        tail, first = out.tail.copy(), np.concatenate(self._first_sums)
        sums, n_pages = self._sums.copy(), self._n_sums_pages
        return WriterState(self._id, self._generation, self.n_rows, out.offset, tail, first, sums, n_pages)

    def rows_so_far(self, step: int) -> Iterator[UInt8s]:
        """Yield the rows that another writer left, ``step`` at a time; before the first one is written. Without padding only."""
        out, width = self._opened(), self.layout.row_bytes
        assert self.layout.is_dense
        tail, end = out.tail.copy(), out.offset
        fd, _ = open_regular(self._temporary[0])
        try:
            for first in range(0, self.n_rows, step):
                begin = HEADER_BYTES + first * width
                n_bytes = min(step, self.n_rows - first) * width
                n_stored = max(0, min(n_bytes, end - begin))
                stored = np.frombuffer(pread_exactly(fd, n_stored, begin, self._temporary[0]), np.uint8) if n_stored else tail[:0]
                skip = max(0, begin - end)
                rows = np.concatenate((stored, tail[skip : skip + n_bytes - n_stored]))
                yield rows.reshape(-1, width)
        finally:
            close_quietly(fd)

    @property
    def path(self) -> str:
        """Path of the unfinished file, in which rows of a checkpoint can be read."""
        return self._temporary[0]

    def _opened(self) -> DirectWriter:
        if self._out is None:
            raise ValueError(f"the writer of {self._path} is closed")
        return self._out

    def leave(self) -> None:
        """Close the temporary files and keep them, for a writer that resumes from the last checkpoint."""
        self._close_fds()
        self._temporary = []

    def _give_up(self) -> None:
        """Close the temporary files after an error; remove them, unless a later writer may resume."""
        if self._is_recorded:
            with contextlib.suppress(OSError):
                self._close_fds()
            self._temporary = []
        else:
            self.abort()

    def write(self, rows: UInt8s) -> None:
        """Append rows, uint8 ``[k, row_bytes]``; after an OSError the writer is closed, as by :meth:`checkpoint`."""
        layout = self.layout
        if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != layout.row_bytes:
            raise ValueError(f"rows must be uint8 of shape (k, {layout.row_bytes}), not {rows.dtype} {rows.shape}")
        out = self._opened()
        rows = np.ascontiguousarray(rows)
        try:
            if layout.is_dense:
                out.append(rows.reshape(-1))
            else:
                self._append_grouped(rows, out)
            self.n_rows += len(rows)
        except BaseException:
            self._give_up()
            raise

    def _append_grouped(self, rows: UInt8s, out: DirectWriter) -> None:
        layout = self.layout
        start, n, phase = 0, len(rows), self.n_rows % layout.group_rows
        padding = np.zeros(layout.group_bytes - layout.group_rows * layout.row_bytes, dtype=np.uint8)
        if phase and n:
            start = min(n, layout.group_rows - phase)
            out.append(rows[:start].reshape(-1))
            if phase + start == layout.group_rows:
                out.append(padding)
        per_step = max(1, (1 << 20) // layout.group_bytes)
        n_whole = (n - start) // layout.group_rows
        groups = np.zeros((min(per_step, n_whole), layout.group_bytes), dtype=np.uint8)
        width = layout.group_rows * layout.row_bytes
        for first in range(0, n_whole, per_step):
            k = min(per_step, n_whole - first)
            begin = start + first * layout.group_rows
            groups[:k, :width] = rows[begin : begin + k * layout.group_rows].reshape(k, width)
            out.append(groups[:k].reshape(-1))
        rest = start + n_whole * layout.group_rows
        if rest < n:
            out.append(rows[rest:].reshape(-1))

    def _add_sums(self, pages: UInt8s) -> None:
        sums = np.empty(len(pages) // PAGE_BYTES, dtype=np.uint64)
        page_sums(pages, self._seed, sums)
        if self._n_first < SUMS_PER_PAGE:
            head = sums[: SUMS_PER_PAGE - self._n_first]
            self._first_sums.append(head)
            self._n_first += len(head)
            sums = sums[len(head) :]
        self._sums = np.concatenate((self._sums, sums)) if len(self._sums) else sums
        if len(self._sums) >= 64 * SUMS_PER_PAGE:
            self._write_sums(len(self._sums) // SUMS_PER_PAGE * SUMS_PER_PAGE)

    def _write_sums(self, n: int) -> None:
        pages = [
            sums_page(self._sums[first : first + SUMS_PER_PAGE], self._n_sums_pages + i, self._seed)
            for i, first in enumerate(range(0, n, SUMS_PER_PAGE))
        ]
        pwrite_all(self._fds[1], b"".join(pages), self._n_sums_pages * PAGE_BYTES, self._temporary[1])
        self._n_sums_pages += len(pages)
        self._sums = self._sums[n:].copy()

    def commit(self) -> FileRecord:
        """Finish the file and its side file, and make them durable under their final names; return the file's record.

        After an OSError this writer leaves no file under either name, unless there was a checkpoint before.
        """
        out = self._opened()
        final = [self._path, f"{self._path}.sums"]
        renamed: list[str] = []
        try:
            out.append(bytes(-len(out.tail) % PAGE_BYTES))
            written, expected = out.offset + len(out.tail), HEADER_BYTES + self.layout.data_bytes(self.n_rows)
            assert written == expected, (written, expected)
            out.finish()
            header = Header(self._kind, self._id, self._generation, self.layout, self.n_rows, self._dtype)
            page = header.pack()
            pwrite_all(self._fds[0], page, 0, self._temporary[0])
            self._write_sums(len(self._sums))
            first = np.concatenate(self._first_sums)
            first[0] = page_sum(page, self._seed)
            pwrite_all(self._fds[1], sums_page(first, 0, self._seed), 0, self._temporary[1])
            for fd, path in zip(self._fds, self._temporary, strict=True):
                fsync_fd(fd, path)
            self._close_fds()
            for source, target in zip(self._temporary, final, strict=True):
                os.rename(source, target)
                renamed.append(target)
            fsync_directory(os.path.dirname(self._path))
        except BaseException:
            self._temporary = self._temporary[len(renamed) :] + renamed
            self._give_up()
            raise
        self._temporary = []
        return FileRecord(
            name=self._name,
            kind=self._kind,
            file_id=self._id.hex(),
            generation=self._generation,
            n_rows=self.n_rows,
            dtype=self._dtype,
            layout=self.layout,
            n_bytes=expected,
            n_sums_bytes=sums_bytes(expected),
        )

    def _close_fds(self) -> None:
        out, self._out = self._out, None
        if out is not None:
            out.abort()
        with contextlib.ExitStack() as stack:  # closes all descriptors, even if one close fails
            for fd, path in zip(self._fds, self._temporary, strict=False):
                stack.callback(close_fd, fd, path)
            self._fds = []

    def abort(self) -> None:
        """Close and remove the temporary files; may be called again, and does nothing after :meth:`commit`."""
        with contextlib.suppress(OSError):
            self._close_fds()
        paths, self._temporary = self._temporary, []
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def __enter__(self) -> RowFileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()
