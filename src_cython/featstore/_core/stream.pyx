"""Files as continuous streams of pages."""

from array import array

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.unistd cimport close as c_close, getpid

from featstore._core.bits cimport row_t
from featstore._core.buffers cimport Arena, arena_for
from featstore._core.descriptor cimport take
from featstore._core.pthread cimport (
    pthread_cond_broadcast, pthread_cond_init, pthread_cond_wait, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
)
from featstore._core.rowio cimport (
    FS_PAGE, FS_SUMS_PER_PAGE, MAX_OP_BYTES, check_geometry, check_job, fs_job, fs_ring_close, fs_row_start, open_ring,
)
from featstore._core.xxh3 cimport fs_secret_init, fs_xxh3_best
from featstore.errors import ClosedError


def mark_pieces(const row_t[::1] rows not None, tuple geometry, uint64_t piece_bytes, uint8_t[::1] wanted not None):
    """Set ``wanted[k]`` where piece ``k`` of a rows' file, ``piece_bytes`` each, holds any part of ``rows``.

    ``geometry``: as :class:`Packer` takes it.
    """
    cdef fs_job job
    cdef int64_t i, n = rows.shape[0]
    cdef uint64_t start, piece, last, n_pieces = wanted.shape[0], beyond
    cdef bint good = True
    job.data_offset, job.row_bytes, job.group_rows, job.group_bytes = geometry
    check_geometry(job.row_bytes, job.group_rows, job.group_bytes)
    if not 0 < piece_bytes <= <uint64_t>MAX_OP_BYTES:
        raise ValueError(f"pieces of {piece_bytes} bytes")
    beyond = (n_pieces * piece_bytes // job.group_bytes + 1) * job.group_rows  # rows from there on would wrap around
    with nogil:
        for i in range(n):
            start = fs_row_start(&job, <uint64_t>rows[i])
            piece = start / piece_bytes
            last = (start + job.row_bytes - 1) / piece_bytes
            if <uint64_t>rows[i] >= beyond or last >= n_pieces:
                good = False
                break
            while piece <= last:
                wanted[piece] = 1
                piece += 1
    if not good:
        raise IndexError(f"row {rows[i]} at position {i} lies outside the file")


cdef class Stream:
    """Pages of an open file, piece after piece; readers run :meth:`read`, one consumer takes what they bring.

    Parameters
    ----------
    fd : int
        Taken over: closed with the stream.
    direct : bool
        Whether reads bypass the page cache.
    path : str
    backend : str
        ``"io_uring"``, for one thread that reads, or ``"pread"``.
    pages, counts : uint64 and uint32 arrays, shape (n,)
        First page and pages of each piece; counts of at most ``buffer_bytes`` / 4096.
    arena : Arena, optional
        Memory for the buffers.

    Raises
    ------
    OSError
        The kernel refuses a ring.
    """

    def __cinit__(self, fd, bint direct, path, str backend, const uint64_t[::1] pages not None,
                  const uint32_t[::1] counts not None, unsigned n_buffers, uint64_t buffer_bytes, Arena arena=None):
        cdef Py_ssize_t i
        cdef bint good = True
        self.pid = getpid()
        self.ring.fd = -1
        self.s.job.fd, self.has_fd = take(fd), True
        self.s.job.direct = direct
        self.s.job.hash = fs_xxh3_best()
        self.path = path
        self.backend = backend
        if (pages.shape[0] != counts.shape[0] or n_buffers < 1 or buffer_bytes % FS_PAGE
                or not 0 < buffer_bytes <= MAX_OP_BYTES):
            raise ValueError("impossible stream")
        with nogil:
            for i in range(counts.shape[0]):
                good = good and 0 < counts[i] <= buffer_bytes // FS_PAGE
        if not good:
            raise ValueError("a piece is empty or longer than a buffer")
        if backend == "io_uring":
            open_ring(&self.ring, n_buffers)
        self.pages, self.counts = pages, counts
        self.s.n_pieces = pages.shape[0]
        if self.s.n_pieces:
            self.s.pages, self.s.counts = &pages[0], &counts[0]
        self.s.n_buffers, self.s.buffer_bytes = n_buffers, buffer_bytes
        pthread_mutex_init(&self.s.lock, NULL)
        pthread_cond_init(&self.s.landed, NULL)
        pthread_cond_init(&self.s.freed, NULL)
        self.s.slots = <fs_piece *>calloc(n_buffers, sizeof(fs_piece))  # from here on close() takes the lock
        if self.s.slots == NULL:
            raise MemoryError
        self.arena = arena_for(arena, n_buffers * buffer_bytes)
        self.s.arena = self.arena.data

    def use_sums(self, uint64_t seed, uint64_t n_sums_pages):
        """Verify pages, against pages of sums set by :meth:`set_sums_pages` before their pieces are allowed."""
        cdef uint64_t n_pages = n_sums_pages * FS_SUMS_PER_PAGE
        cdef Py_ssize_t i, bad = -1
        with nogil:
            for i in range(self.pages.shape[0]):
                if self.pages[i] > n_pages or self.pages[i] + self.counts[i] > n_pages:
                    bad = i
                    break
        if bad >= 0:
            raise ValueError(f"page {self.pages[bad]} has no sum among {n_sums_pages} pages of them")
        fs_secret_init(&self.secret, seed)
        self.s.job.secret = &self.secret
        self.n_sums_pages = n_sums_pages
        self.s.job.sums = <uint64_t **>calloc(n_sums_pages + 1, sizeof(uint64_t *))
        if self.s.job.sums == NULL:
            raise MemoryError

    def over(self, list fds not None, list paths not None, const uint64_t[::1] at not None,
             const uint32_t[::1] files not None, list seeds=None, list n_sums_pages=None):
        """Read pieces from several files: the stream's own one, number 0, and those of ``fds``, from number 1 on.

        Called before anything is allowed, in place of :meth:`use_sums`. ``pages`` are then only the pieces' places in the order
        of the rows: the piece ``i`` begins with page ``at[i]`` of file ``files[i]``. The descriptors are taken over. ``paths``,
        ``seeds`` and ``n_sums_pages`` are those of all files; without seeds nothing is verified. Pages of sums are numbered
        through all files.
        """
        cdef uint32_t k, n = len(fds) + 1
        cdef uint64_t first = 0
        cdef Py_ssize_t i, bad = -1, without = -1
        cdef uint64_t[::1] ends
        if self.s.parts != NULL or self.s.job.sums != NULL or self.s.allowed:
            raise ValueError("the stream has its files already")
        if (len(paths) != n or at.shape[0] != self.pages.shape[0] or files.shape[0] != at.shape[0]
                or (seeds is not None and (len(seeds) != n or len(n_sums_pages) != n))):
            raise ValueError("one file a piece, one path a file")
        ends = array("Q", [0] * n if seeds is None else n_sums_pages)
        with nogil:
            for i in range(files.shape[0]):
                if files[i] >= n:
                    bad = i
                    break
                if without < 0 and at[i] + self.counts[i] > ends[files[i]] * FS_SUMS_PER_PAGE:
                    without = i
        if bad >= 0:
            raise ValueError(f"piece {bad} is in file {files[bad]} of {n}")
        if seeds is not None:
            if without >= 0:
                raise ValueError(f"page {at[without]} of {paths[files[without]]} has no sum")
            self.n_sums_pages = sum(n_sums_pages)
            self.s.job.sums = <uint64_t **>calloc(self.n_sums_pages + 1, sizeof(uint64_t *))
            if self.s.job.sums == NULL:
                raise MemoryError
        self.s.parts = <fs_stream_file *>calloc(n, sizeof(fs_stream_file))
        if self.s.parts == NULL:
            raise MemoryError
        for k in range(n):
            self.s.parts[k].fd = -1
        self.n_parts = n
        for k in range(n):
            self.s.parts[k].fd = self.s.job.fd if k == 0 else take(fds[k - 1])
            if seeds is not None:
                self.s.parts[k].sums = self.s.job.sums + first
                fs_secret_init(&self.s.parts[k].secret, seeds[k])
                first += n_sums_pages[k]
        self.at, self.files, self.paths = at, files, paths
        if self.s.n_pieces:
            self.s.at, self.s.files = &at[0], &files[0]

    def set_sums_pages(self, uint64_t first, const uint64_t[:, ::1] pages not None):
        """Make ``pages`` (512 words each, kept alive by the caller) the sums pages from number ``first`` on."""
        cdef uint64_t i, n = pages.shape[0]
        if (self.s.job.sums == NULL or first > self.n_sums_pages or n > self.n_sums_pages - first or pages.shape[1] != 512):
            raise ValueError("no such sums page")
        with nogil:
            for i in range(n):
                self.s.job.sums[first + i] = <uint64_t *>&pages[i, 0]

    def drop_sums_page(self, uint64_t number):
        """Take the sums page ``number`` away."""
        if self.s.job.sums == NULL or number >= self.n_sums_pages:
            raise ValueError("no such sums page")
        self.s.job.sums[number] = NULL

    def inject(self, bytes script):
        """Distort the results of reads, a letter each (tests): see ``fs_inject``."""
        self.script = script
        self.s.job.script = self.script

    def allow(self, uint64_t n):
        """Let the first ``n`` pieces be read, those that were allowed before included."""
        pthread_mutex_lock(&self.s.lock)
        self.s.allowed = min(max(self.s.allowed, n), self.s.n_pieces)
        pthread_cond_broadcast(&self.s.freed)
        pthread_mutex_unlock(&self.s.lock)

    @property
    def consumed(self):
        """Pieces that were taken."""
        return self.s.consumed

    @property
    def n_reads(self):
        """Reads so far."""
        return self.s.job.n_reads

    @property
    def read_bytes(self):
        """Bytes read so far."""
        return self.s.job.read_bytes

    @property
    def waited_s(self):
        """Seconds that the consumer waited for pieces."""
        return self.s.waited_ns / 1e9

    def read(self):
        """Read until the end, an error or :meth:`stop`; by one thread with io_uring, by several with pread.

        Nothing is read once the stream is closed: Ctrl-C may leave a thread that begins only then.
        """
        if not self.is_in():
            return
        with nogil:
            if self.ring.fd >= 0:
                fs_stream_uring(&self.s, &self.ring)
            else:
                fs_stream_pread(&self.s)
        self.leave()

    def scatter(self, uint64_t n, positions, uint8_t[:, ::1] out not None):
        """Copy the next ``n`` rows, which begin at a page, to rows ``positions`` (int32 or int64) of ``out``; None: 0 … n - 1.

        What is left of the last row's page is skipped.
        """
        if positions is not None and len(positions) != n:
            raise ValueError("one position a row")
        if out.shape[1] < 1:
            raise ValueError("rows without bytes")
        self.enter()
        try:
            self.copy(n, positions, out)
        finally:
            self.leave()

    cdef int enter(self) except -1:
        if not self.is_in():
            raise ClosedError(f"{self.path} is closed")
        return 0

    cdef bint is_in(self) noexcept:
        """Begin to use the buffers, unless they are closed: :meth:`close` waits for whoever does."""
        cdef bint closed
        pthread_mutex_lock(&self.s.lock)
        closed = self.s.closed
        self.n_inside += not closed
        pthread_mutex_unlock(&self.s.lock)
        return not closed

    cdef void leave(self) noexcept:
        pthread_mutex_lock(&self.s.lock)
        self.n_inside -= 1
        pthread_cond_broadcast(&self.s.landed)
        pthread_mutex_unlock(&self.s.lock)

    cdef int copy(self, uint64_t n, positions, uint8_t[:, ::1] out) except -1:
        cdef const int32_t[::1] narrow
        cdef const int64_t[::1] wide
        cdef const int32_t *p32 = NULL
        cdef const int64_t *p64 = NULL
        cdef uint64_t i, n_out = out.shape[0], row_bytes = out.shape[1]
        cdef bint good = True
        cdef int done
        if n == 0:
            return 0
        if positions is None:
            good = n <= n_out
        elif positions.dtype == "int32":
            narrow = positions
            p32 = &narrow[0]
        else:
            wide = positions
            p64 = &wide[0]
        with nogil:
            if p32 != NULL:
                for i in range(n):
                    good = good & (<uint64_t>p32[i] < n_out)
            elif p64 != NULL:
                for i in range(n):
                    good = good & (<uint64_t>p64[i] < n_out)
        if not good:
            raise IndexError(f"a position is out of range for {n_out} rows of out")
        with nogil:
            done = fs_stream_scatter(&self.s, row_bytes, n, p32, p64, &out[0, 0])
        if not done:
            self.fail()
        return 0

    def fail(self):
        """Raise what ended the stream early."""
        check_job(&self.s.job, self.path if self.paths is None else self.paths[self.s.error_file])
        if self.s.closed:
            raise ClosedError(f"{self.path} is closed")
        raise IndexError(f"nothing more is read of {self.path}")

    def stop(self):
        """End readers and consumer; the readers' threads may then be joined. In a forked child there are none."""
        if self.pid != getpid():
            return
        pthread_mutex_lock(&self.s.lock)
        self.s.closed = True
        pthread_cond_broadcast(&self.s.landed)
        pthread_cond_broadcast(&self.s.freed)
        pthread_mutex_unlock(&self.s.lock)

    def close(self):
        """Give buffers and descriptor back. Waits for readers and a consumer, which end early."""
        cdef int fd = self.s.job.fd
        cdef uint32_t k
        if not self.has_fd:  # a half-made object has descriptor 0, which is another's
            return
        self.s.job.fd = -1
        if self.s.slots != NULL and self.pid == getpid():
            self.stop()
            with nogil:
                pthread_mutex_lock(&self.s.lock)
                while self.n_inside:
                    pthread_cond_wait(&self.s.landed, &self.s.lock)
                pthread_mutex_unlock(&self.s.lock)
        self.s.closed = True
        fs_ring_close(&self.ring, self.pid == getpid())
        if fd >= 0:
            c_close(fd)
        for k in range(1, self.n_parts):
            if self.s.parts[k].fd >= 0:
                c_close(self.s.parts[k].fd)
        self.n_parts = 0
        free(self.s.parts)
        self.s.parts = NULL
        if self.arena is not None:
            self.arena.in_use = False
            self.arena = None
        self.s.arena = NULL
        free(self.s.slots)
        self.s.slots = NULL
        free(self.s.job.sums)
        self.s.job.sums = NULL

    def __dealloc__(self):
        self.close()
