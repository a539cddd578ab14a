"""Extents: copies of a row file's rows in one file; the rows of a batch lie together, on pages of their own.

The file is a row file of pages (kind ``extents``). One extent follows the other: dense rows from a page's start, then zeros to
the end of the extent's last page. *Batched packing* fills the file. One sequential pass over the blocks of the base file that
hold any wanted row fills all extents, each through its own write buffer. If the buffers exceed the memory, several passes
(episodes) fill fewer extents each.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from featstore._core.descriptor import open_fd
from featstore._core.io import direct_mode
from featstore._core.packer import Packer
from featstore.config import format_size
from featstore.storage.calls import NO_SPACE, close_fd, close_quietly, fsync_fd, naming, pwrite_all
from featstore.storage.checkpoint import forget_checkpoint, read_checkpoint, write_checkpoint
from featstore.storage.extentmap import (
    PAGES,
    SPARE_BUFFERS,
    WINDOW_BYTES,
    Episode,
    ExtentMap,
    episodes,
    least_memory,
    most_memory,
    needed_runs,
)
from featstore.storage.format import SUMS_PER_PAGE, Header, file_bytes, page_sum, sums_bytes, sums_seed
from featstore.storage.layout import PAGE_BYTES
from featstore.storage.ordered import Ordered
from featstore.storage.pagestream import Arenas, PagedRows, arena_bytes, file_of, least_window, rows_in_file
from featstore.storage.reuse import FileReuse
from featstore.storage.rowfile import ReadStats
from featstore.storage.rundir import DiskQuota
from featstore.storage.writer import FileRecord, free_bytes, fsync_directory

__all__ = ["KIND", "PAGES", "WRITERS", "Episode", "ExtentMap", "ExtentWriter", "Kept", "episodes", "least_memory", "most_memory"]

Int64s = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Kept: TypeAlias = "tuple[Int64s, npt.NDArray[np.uint8]]"

KIND = "extents"
CHECKPOINT_S = 30.0  # least seconds between two checkpoints of a pass
CHECKPOINT_COST = 100.0  # the least pause before the next checkpoint, in durations of the last one
WRITERS = 6  # writes in flight; with three the drive idled between them
_STEP = 16  # pieces between two checks of signals and the progress bar


class ExtentWriter:
    """Write a file of extents, which appears when :meth:`finish` returns. One owner thread. The writer holds 8 bytes a page.

    The writer is a context manager; leaving it without :meth:`finish` removes the file. A resumable file with a checkpoint is
    kept if an exception other than OSError is the cause.

    Parameters
    ----------
    path : path-like
    extents : ExtentMap
    disk : DiskQuota, optional
        Pays for the whole file before it is made; OSError (ENOSPC) if the quota or the disk is too small.
    resumable : bool
        Keep a durable checkpoint beside the file: after every episode, and every half minute within one. A later writer of the
        same file and extents resumes from it.
    ordered : Ordered, optional
        The first extents, whose rows lie in an order of their own.
    reuse : FileReuse, optional
        Old files, of which one is overwritten if there is any.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        extents: ExtentMap,
        disk: DiskQuota | None = None,
        *,
        resumable: bool = False,
        ordered: Ordered | None = None,
        reuse: FileReuse | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.extents = extents
        self._ordered = ordered
        self.n_filled = 0  # extents that are filled
        self._rows: Int64s = np.zeros(len(extents.n_rows), np.int64)  # of each other extent, the rows in the checkpoint
        self._progress = f"{self.path}.progress" if resumable else None
        self._disk = disk
        self._paid = 0
        self.read = ReadStats()  # of the base file, while filling
        self.n_episodes = 0  # passes over the base file so far
        self._fd = -1
        resumed = self._resume()
        file_id = uuid.uuid4().bytes if resumed is None else resumed
        header = Header(KIND, file_id, 1, PAGES, extents.total_pages, "uint8")
        n_bytes = header.file_bytes
        self.record = FileRecord(
            os.path.basename(self.path),
            KIND,
            header.file_id.hex(),
            1,
            header.n_rows,
            "uint8",
            PAGES,
            n_bytes,
            sums_bytes(n_bytes),
        )
        self._temporary = [f"{self.path}.tmp", f"{self.path}.sums.tmp"]
        if resumed is None:
            self._sums = np.zeros((self.record.n_sums_bytes // PAGE_BYTES, 512), np.uint64)
        try:
            is_spare = resumed is None and reuse is not None and reuse.take(n_bytes, self._temporary[0])
            if disk is not None:
                needed = extents.disk_bytes + (extents.progress_bytes if resumable else 0)
                disk.take(needed, self.path)
                self._paid = needed
            self._fd = open_fd(self._temporary[0], os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            if resumed is None:
                with naming(self._temporary[0]):
                    os.ftruncate(self._fd, n_bytes if is_spare else 0)
                page = header.pack()
                pwrite_all(self._fd, page, 0, self._temporary[0])
                self._sums[0, 0] = page_sum(page, header.seed)
                self._allocate(header.file_bytes)
            with naming(self._temporary[0]):
                direct_mode(self._fd)
        except BaseException:
            self.abort()
            raise

    def _resume(self) -> bytes | None:
        """Resume from the checkpoint of a killed writer; return the id of its file, or None if there is no valid checkpoint."""
        if self._progress is None:
            return None
        n_bytes = file_bytes(PAGES, self.extents.total_pages)
        state = read_checkpoint(self._progress, len(self.extents.n_rows), sums_bytes(n_bytes))
        try:
            if state is None or os.path.getsize(f"{self.path}.tmp") != n_bytes:
                return None
        except FileNotFoundError:
            return None
        self.n_filled, self._rows, file_id, self._sums = state
        return file_id

    def _record(self, end: int) -> None:
        """Flush the file, then record that the extents before ``end`` are filled, and the rows of the others."""
        if self._progress is None or end == len(self.extents.n_rows):
            return
        fsync_fd(self._fd, self._temporary[0])
        write_checkpoint(self._progress, end, self._rows, bytes.fromhex(self.record.file_id), self._sums)

    def _checkpoint(self, packer: Packer, episode: Episode) -> None:
        """Record how many rows each extent of an episode has. Buffers are written first, so that no row is read again."""
        packer.flush()
        which = slice(episode.begin, episode.end)
        n_bytes = np.array(packer.offsets, np.int64) - self.extents.first_page[which] * PAGE_BYTES
        rows = np.minimum(self.extents.n_rows[which], n_bytes // self.extents.row_bytes)
        self._rows[which] = np.maximum(self._rows[which], rows)
        self._record(episode.begin)

    def _begun(self, extent: int) -> bytes:
        """Read the written bytes of the page in which an extent's next row begins; a damaged page resets the extent to 0 rows."""
        n_bytes = int(self._rows[extent]) * self.extents.row_bytes
        page = int(self.extents.first_page[extent]) + n_bytes // PAGE_BYTES
        if n_bytes % PAGE_BYTES == 0 or self._rows[extent] == self.extents.n_rows[extent]:
            return b""
        with open(self._temporary[0], "rb") as file:
            file.seek(page * PAGE_BYTES)
            data = file.read(PAGE_BYTES)
        if page_sum(data, self.record.seed) != self._sums[page // SUMS_PER_PAGE, page % SUMS_PER_PAGE]:
            self._rows[extent] = 0
            return b""
        return data[: n_bytes % PAGE_BYTES]

    def _allocate(self, n_bytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, n_bytes)  # detects a full disk now, and keeps the extents together
        except OSError as error:
            if error.errno in NO_SPACE:
                with naming(self._temporary[0]):
                    os.ftruncate(self._fd, 0)  # a part may have been allocated
                text = f"{error.strerror}: the extents take {format_size(n_bytes)}"
                free = free_bytes(self._temporary[0])
                text += "" if free is None else f", {format_size(free)} are free"
                raise OSError(error.errno, text, self._temporary[0]) from None
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise OSError(error.errno, error.strerror, self._temporary[0]) from None
            with naming(self._temporary[0]):
                os.ftruncate(self._fd, n_bytes)

    @property
    def nbytes(self) -> int:
        return self._sums.nbytes + self._rows.nbytes

    def fill(
        self,
        base: PagedRows,
        rows_of: Callable[[int], Ids],
        n_bytes: int,
        id_bytes: int = 8,
        progress: Callable[[int], None] = lambda n: None,
        check: Callable[[], None] = lambda: None,
        done: Callable[[int], None] = lambda end: None,
        arenas: Arenas | None = None,
        kept: Kept | None = None,
    ) -> None:
        """Fill the extents, starting after those that a killed writer filled.

        Parameters
        ----------
        base : PagedRows
            The file that holds the rows.
        rows_of : callable
            ``rows_of(extent)`` returns the extent's rows, distinct and ascending, int32 or int64; called once an extent.
        n_bytes : int
            Memory for filling, which the caller has reserved; BudgetError if it does not suffice for one extent.
        id_bytes : int
            Bytes of an id that ``rows_of`` returns.
        progress : callable
            Gets the number of bytes that were scanned and written since its last call.
        check : callable
            Called regularly; an exception that it raises ends the filling.
        done : callable
            ``done(end)`` is called after every episode: the extents before ``end`` are filled.
        arenas : Arenas, optional
            Keeps the memory for another filling; it counts in ``n_bytes``.
        kept : tuple of array, optional
            Further rows, int64 [k], ascending, and the array uint8 [k, row_bytes] to which the first pass copies them. Neither
            counts in ``n_bytes``.
        """
        for episode in episodes(self.extents, n_bytes, id_bytes, self.n_filled):
            self._fill(base, episode, rows_of, n_bytes, progress, check, arenas or Arenas(0), kept)
            kept = None
            self.n_episodes += 1
            self._settle(episode, check)
            self.n_filled = episode.end
            self._record(episode.end)
            done(episode.end)

    def _fill(
        self,
        base: PagedRows,
        episode: Episode,
        rows_of: Callable[[int], Ids],
        n_bytes: int,
        progress: Callable[[int], None],
        check: Callable[[], None],
        arenas: Arenas,
        kept: Kept | None,
    ) -> None:
        which = slice(episode.begin, episode.end)
        kept = None if kept is None else (rows_in_file(base, kept[0]), kept[1])
        n_ordered = 0 if self._ordered is None else self._ordered.n
        begun = [self._begun(extent) for extent in range(episode.begin, episode.end)]
        n_before = self._rows[which] * self.extents.row_bytes // PAGE_BYTES
        ordered = (
            [] if self._ordered is None else [*map(self._ordered.ascending, range(episode.begin, min(episode.end, n_ordered)))]
        )
        n_rows = self.extents.n_rows[which].copy()
        n_rows[: len(ordered)] = [len(ids) for ids in ordered]
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(n_rows - self._rows[which])])
        if not bounds[-1] and kept is None:
            return
        flat = np.empty(0, np.int32)
        for extent, at in zip(range(episode.begin, episode.end), bounds, strict=False):
            ids = ordered.pop(0) if ordered else rows_of(extent)
            if len(ids) != n_rows[extent - episode.begin]:
                raise ValueError(f"{len(ids)} rows for an extent of {self.extents.n_rows[extent]}")
            if not len(flat):
                flat = np.empty(int(bounds[-1]), ids.dtype)  # the largest array, so never beside a list of all ids
            flat[at : at + len(ids) - self._rows[extent]] = rows_in_file(base, ids[int(self._rows[extent]) :])
        base = file_of(base)
        more = [] if kept is None else [kept[0]]
        runs = needed_runs(base, [*(flat[first:end] for first, end in itertools.pairwise(bounds)), *more])
        n = episode.end - episode.begin
        n_spare = max(1, min(n, SPARE_BUFFERS))
        held = flat.nbytes + (n + n_spare) * episode.buffer_bytes
        window = min(2 * WINDOW_BYTES, max(least_window(), n_bytes - held))
        layout = base.layout
        geometry = (PAGE_BYTES, layout.row_bytes, layout.group_rows, layout.group_bytes)
        for_packer, for_stream = arenas.of((n + n_spare) * episode.buffer_bytes, arena_bytes(window))
        packer = Packer(
            self._fd,
            self._temporary[0],
            self.record.seed,
            self._sums,
            flat,
            bounds,
            (self.extents.first_page[which] + n_before) * PAGE_BYTES,
            geometry,
            n + n_spare,
            episode.buffer_bytes,
            for_packer,
        )
        if kept is not None:
            packer.keep(*kept)
        for b, data in enumerate(begun):
            if data:
                packer.append(b, data)
        with _running(packer), base.stream(runs, window, for_stream) as stream:
            taken = written = 0
            due = time.monotonic() + CHECKPOINT_S
            while taken < stream.n_pieces:
                stream.feed(taken + _STEP)
                k = packer.run(stream.core, _STEP)
                taken += k
                now = packer.written_bytes
                progress(k * stream.total_bytes // stream.n_pieces + now - written)
                written = now
                if self._progress is not None and time.monotonic() >= due:
                    begin = time.monotonic()
                    self._checkpoint(packer, episode)
                    end = time.monotonic()
                    due = end + max(CHECKPOINT_S, CHECKPOINT_COST * (end - begin))
                check()
            packer.finish()
            progress(packer.written_bytes - written)
            self.read.add(ReadStats(0, stream.core.n_reads, 0, stream.core.read_bytes))

    def _settle(self, episode: Episode, check: Callable[[], None]) -> None:
        """Put the rows of the episode's ordered extents in order, once the packer's buffers are freed."""
        pieces = slice(episode.begin, min(episode.end, 0 if self._ordered is None else self._ordered.n))
        if self._rows[pieces].any():  # reordering makes a checkpoint's counts of these extents invalid
            self._rows[episode.begin : episode.end] = self.extents.n_rows[episode.begin : episode.end]
            self._rows[pieces] = 0
            self._record(episode.begin)
        for piece in range(pieces.start, pieces.stop):
            assert self._ordered is not None
            first_page = int(self.extents.first_page[piece])
            self._ordered.settle(piece, self._fd, self._temporary[0], first_page, self.record.seed, self._sums)
            check()

    def finish(self, *, durable: bool = False) -> FileRecord:
        """Write the checksums and give the file its name; return its record. ``durable`` also flushes both files to the drive."""
        seed = sums_seed(self.record.seed)
        for number, page in enumerate(self._sums):
            page[511] = xxhash.xxh3_64_intdigest(page[:511].tobytes(), (seed + number) % 2**64)
        try:
            side = open_fd(self._temporary[1], os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                pwrite_all(side, memoryview(self._sums).cast("B"), 0, self._temporary[1])
                if durable:
                    for fd, path in ((self._fd, self._temporary[0]), (side, self._temporary[1])):
                        fsync_fd(fd, path)
            except BaseException:
                close_quietly(side)
                raise
            close_fd(side, self._temporary[1])
            fd, self._fd = self._fd, -1
            close_fd(fd, self._temporary[0])
            for temporary, name in zip(self._temporary, (self.path, f"{self.path}.sums"), strict=True):
                os.rename(temporary, name)
            if durable:
                fsync_directory(os.path.dirname(self.path) or ".")
        except BaseException:
            self.abort()
            raise
        self._temporary = []
        self._forget_progress()
        if self._disk is not None and self._progress is not None:
            self._disk.give(self.extents.progress_bytes)
            self._paid -= self.extents.progress_bytes
        return self.record

    def _forget_progress(self) -> None:
        if self._progress is not None:
            forget_checkpoint(self._progress)

    def abort(self) -> None:
        """Remove the unfinished files and the checkpoint; may be called again, and does nothing after :meth:`finish`."""
        if not self._temporary:
            return
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_quietly(fd)  # a delayed write does not matter: the file is removed
        for temporary, name in zip(self._temporary, (self.path, f"{self.path}.sums"), strict=True):
            for path in (temporary, name):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        self._temporary = []
        self._forget_progress()
        if self._disk is not None:
            self._disk.give(self._paid)
            self._paid = 0

    def suspend(self) -> None:
        """Keep the file and its checkpoint for a later writer; :meth:`abort` if there is no checkpoint. May be called again."""
        if not self._temporary or self._progress is None or not os.path.exists(self._progress):
            self.abort()
            return
        fd, self._fd = self._fd, -1
        close_fd(fd, self._temporary[0])
        self._temporary = []
        if self._disk is not None:
            self._disk.give(self._paid)
            self._paid = 0

    def __enter__(self) -> ExtentWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, OSError):
            self.abort()
        else:
            self.suspend()


@contextlib.contextmanager
def _running(packer: Packer) -> Iterator[None]:
    """Run a packer's writers while the context lasts."""
    threads = [threading.Thread(target=packer.write, name=f"featstore-write-{k}", daemon=True) for k in range(WRITERS)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        yield
    finally:
        packer.stop()
        for thread in started:
            thread.join()
