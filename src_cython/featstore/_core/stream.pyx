"""Files as continuous streams of pages, and batched packing, which turns one stream into many extents."""

import os

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from posix.unistd cimport close as c_close, getpid

from featstore._core.rowcopy cimport fs_choose_stream, fs_stream_fn
from featstore._core.rowio cimport (
    FS_ERR_OS, FS_ERR_SHORT, FS_OK, FS_PAGE, fs_job, fs_ring, fs_ring_close, fs_ring_open, fs_row_start,
)
from featstore._core.xxh3 cimport fs_secret, fs_secret_init, fs_xxh3_best, fs_xxh3_fn
from featstore.errors import ClosedError, CorruptionError

ctypedef fused row_t:
    int32_t
    int64_t

cdef extern from "pagestream.h" nogil:
    """
    #include <sys/mman.h>
    static void *fs_stream_arena(size_t bytes) {
        void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) return NULL;
        madvise(p, bytes, MADV_DONTFORK);
        madvise(p, bytes, MADV_HUGEPAGE);
        return p;
    }
    static void fs_stream_arena_free(void *p, size_t bytes) { if (p) munmap(p, bytes); }
    """
    uint8_t *fs_stream_arena(size_t n_bytes)
    void fs_stream_arena_free(void *p, size_t n_bytes)
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *m, void *attr)
    int pthread_mutex_lock(pthread_mutex_t *m)
    int pthread_mutex_unlock(pthread_mutex_t *m)
    int pthread_cond_init(pthread_cond_t *c, void *attr)
    int pthread_cond_broadcast(pthread_cond_t *c)
    int pthread_cond_wait(pthread_cond_t *c, pthread_mutex_t *m)
    ctypedef struct fs_piece:
        pass
    ctypedef struct fs_stream:
        pthread_mutex_t lock
        pthread_cond_t landed, freed
        fs_job job
        uint8_t *arena
        uint64_t buffer_bytes
        unsigned n_buffers
        const uint64_t *pages
        const uint32_t *counts
        uint64_t n_pieces, allowed, begun, consumed, at
        fs_piece *slots
        int closed
        uint64_t waited_ns
    void fs_stream_uring(fs_stream *s, fs_ring *ring)
    void fs_stream_pread(fs_stream *s)
    int fs_stream_scatter(fs_stream *s, uint64_t row_bytes, uint64_t n, const int32_t *p32, const int64_t *p64,
                          uint8_t *out)

cdef extern from "packer.h" nogil:
    ctypedef struct fs_write:
        pass
    ctypedef struct fs_packer:
        pthread_mutex_t lock
        pthread_cond_t queued, freed
        int fd
        fs_secret secret
        fs_xxh3_fn hash
        uint64_t *sums
        uint64_t n_sums_pages
        uint64_t buffer_bytes
        uint8_t *arena
        uint8_t **idle
        unsigned n_buffers, n_idle
        fs_write *queue
        int closed, error_number
        uint64_t written_bytes
        fs_job source
        uint64_t n_batches
        const int32_t *rows32
        const int64_t *rows64
        uint64_t *cursor
        uint64_t *end
        uint64_t *offset
        uint64_t *filled
        uint8_t **buffer
        fs_stream_fn stream
    void fs_packer_write(fs_packer *p)
    void fs_packer_hand_over(fs_packer *p, uint64_t b)
    int64_t fs_packer_run(fs_packer *p, fs_stream *s, int64_t most)
    int fs_packer_append(fs_packer *p, uint64_t b, const uint8_t *src, uint64_t len)
    int fs_packer_flush(fs_packer *p)
    void fs_packer_drain(fs_packer *p)


cdef class Arena:
    """Memory that drives read into and write from: for one stream or packer at a time, perhaps one after the other.

    Fresh pages can cost more than what is done with them. A forked child does not have the memory.
    """

    cdef uint8_t *data
    cdef readonly uint64_t nbytes
    cdef bint in_use
    cdef int pid

    def __cinit__(self, uint64_t nbytes):
        self.pid = getpid()
        self.nbytes = nbytes
        self.data = fs_stream_arena(nbytes)
        if self.data == NULL:
            raise MemoryError(f"cannot map {nbytes} bytes")

    def __dealloc__(self):
        if self.pid == getpid():
            fs_stream_arena_free(self.data, self.nbytes)


cdef Arena arena_for(Arena given, uint64_t nbytes):
    """Take ``given``, where it is free and large enough, or a new one."""
    if given is None or given.in_use or given.nbytes < nbytes or given.pid != getpid():
        given = Arena(nbytes)
    given.in_use = True
    return given


def mark_pieces(const row_t[::1] rows not None, tuple geometry, uint64_t piece_bytes, uint8_t[::1] wanted not None):
    """Set ``wanted[k]`` where piece ``k`` of a rows' file, ``piece_bytes`` each, holds any part of ``rows``.

    ``geometry``: as :class:`Packer` takes it.
    """
    cdef fs_job job
    cdef int64_t i, n = rows.shape[0]
    cdef uint64_t start, piece, last, n_pieces = wanted.shape[0]
    cdef bint good = True
    job.data_offset, job.row_bytes, job.group_rows, job.group_bytes = geometry
    with nogil:
        for i in range(n):
            start = fs_row_start(&job, <uint64_t>rows[i])
            piece = start / piece_bytes
            last = (start + job.row_bytes - 1) / piece_bytes
            if rows[i] < 0 or last >= n_pieces:
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
    pages, counts : uint64 and uint32 arrays, shape (n,)
        First page and pages of each piece; counts of at most ``buffer_bytes`` / 4096.
    arena : Arena, optional
        Memory for the buffers.
    """

    cdef fs_stream s
    cdef fs_secret secret
    cdef const uint64_t[::1] pages
    cdef const uint32_t[::1] counts
    cdef readonly object path
    cdef readonly str backend
    cdef uint64_t n_sums_pages
    cdef bytes script
    cdef int pid, n_inside
    cdef Arena arena

    def __cinit__(self):
        self.s.job.fd = -1
        self.pid = getpid()

    def __init__(self, int fd, bint direct, path, str backend, const uint64_t[::1] pages not None,
                 const uint32_t[::1] counts not None, unsigned n_buffers, uint64_t buffer_bytes, Arena arena=None):
        self.s.job.fd = fd
        self.s.job.direct = direct
        self.s.job.hash = fs_xxh3_best()
        self.path = path
        self.backend = backend
        if pages.shape[0] != counts.shape[0] or n_buffers < 1 or buffer_bytes % FS_PAGE or not buffer_bytes:
            raise ValueError("impossible stream")
        for i in range(counts.shape[0]):
            if not 0 < counts[i] * FS_PAGE <= buffer_bytes:
                raise ValueError("a piece is empty or longer than a buffer")
        self.pages, self.counts = pages, counts
        self.s.n_pieces = pages.shape[0]
        if self.s.n_pieces:
            self.s.pages, self.s.counts = &pages[0], &counts[0]
        self.s.n_buffers, self.s.buffer_bytes = n_buffers, buffer_bytes
        self.s.slots = <fs_piece *>calloc(n_buffers, sizeof(fs_piece))
        self.arena = arena_for(arena, n_buffers * buffer_bytes)
        self.s.arena = self.arena.data
        if self.s.slots == NULL:
            raise MemoryError
        pthread_mutex_init(&self.s.lock, NULL)
        pthread_cond_init(&self.s.landed, NULL)
        pthread_cond_init(&self.s.freed, NULL)

    def use_sums(self, uint64_t seed, uint64_t n_sums_pages):
        """Verify pages, against pages of sums set by :meth:`set_sums_page` before their pieces are allowed."""
        fs_secret_init(&self.secret, seed)
        self.s.job.secret = &self.secret
        self.n_sums_pages = n_sums_pages
        self.s.job.sums = <uint64_t **>calloc(n_sums_pages + 1, sizeof(uint64_t *))
        if self.s.job.sums == NULL:
            raise MemoryError

    def set_sums_page(self, uint64_t number, const uint64_t[::1] page):
        """Make ``page`` (512 words, kept alive by the caller) the sums page ``number``; None takes it away."""
        if self.s.job.sums == NULL or number >= self.n_sums_pages or (page is not None and page.shape[0] != 512):
            raise ValueError("no such sums page")
        self.s.job.sums[number] = NULL if page is None else <uint64_t *>&page[0]

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
        """Read until the end, an error or :meth:`stop`; by one thread with io_uring, by several with pread."""
        cdef fs_ring ring
        cdef int error
        if self.backend == "io_uring":
            error = fs_ring_open(&ring, self.s.n_buffers)
            if error:
                pthread_mutex_lock(&self.s.lock)
                self.s.job.error_kind, self.s.job.error_number = FS_ERR_OS, -error
                pthread_cond_broadcast(&self.s.landed)
                pthread_mutex_unlock(&self.s.lock)
                return
            with nogil:
                fs_stream_uring(&self.s, &ring)
            fs_ring_close(&ring, True)
        else:
            with nogil:
                fs_stream_pread(&self.s)

    def scatter(self, uint64_t n, positions, uint8_t[:, ::1] out not None):
        """Copy the next ``n`` rows, which begin at a page, to rows ``positions`` (int32 or int64) of ``out``; None: 0 … n - 1.

        What is left of the last row's page is skipped.
        """
        if positions is not None and len(positions) != n:
            raise ValueError("one position a row")
        self.enter()
        try:
            self.copy(n, positions, out)
        finally:
            self.leave()

    cdef int enter(self) except -1:
        """Begin to use the buffers: :meth:`close` waits for whoever does."""
        cdef bint closed
        pthread_mutex_lock(&self.s.lock)
        closed = self.s.closed
        self.n_inside += not closed
        pthread_mutex_unlock(&self.s.lock)
        if closed:
            raise ClosedError(f"{self.path} is closed")
        return 0

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
        cdef fs_job *job = &self.s.job
        if job.error_kind == FS_OK:
            if self.s.closed:
                raise ClosedError(f"{self.path} is closed")
            raise IndexError(f"nothing more is read of {self.path}")
        if job.error_kind == FS_ERR_OS:
            raise OSError(job.error_number, os.strerror(job.error_number), self.path)
        if job.error_kind == FS_ERR_SHORT:
            raise CorruptionError("the file ends before its recorded size", self.path, job.error_offset)
        raise CorruptionError("checksum of a page differs", self.path, job.error_offset)

    def stop(self):
        """End readers and consumer; the readers' threads may then be joined."""
        pthread_mutex_lock(&self.s.lock)
        self.s.closed = True
        pthread_cond_broadcast(&self.s.landed)
        pthread_cond_broadcast(&self.s.freed)
        pthread_mutex_unlock(&self.s.lock)

    def close(self):
        """Give buffers and descriptor back; readers have returned. Waits for a consumer, which ends early."""
        cdef int fd = self.s.job.fd
        self.s.job.fd = -1
        if self.s.slots != NULL and self.pid == getpid():
            self.stop()
            with nogil:
                pthread_mutex_lock(&self.s.lock)
                while self.n_inside:
                    pthread_cond_wait(&self.s.landed, &self.s.lock)
                pthread_mutex_unlock(&self.s.lock)
        self.s.closed = True
        if fd >= 0:
            c_close(fd)
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


cdef class Packer:
    """Extents of many batches, filled from one stream of the rows' file; writers run :meth:`write`.

    Parameters
    ----------
    fd : int
        The file of extents; not taken over.
    seed : int
        Of its pages' sums.
    sums : uint64 array, shape (n, 512)
        Pages of its sums, filled in as pages are written; 511 entries each.
    rows : int32 or int64 array
        Rows of all batches, those of a batch together and ascending.
    bounds : int64 array, shape (n_batches + 1,)
        Batch ``b`` has rows ``bounds[b] … bounds[b + 1] - 1``.
    offsets : int64 array, shape (n_batches,)
        Where each extent begins in the file: whole pages.
    geometry : tuple of int
        ``data_offset, row_bytes, group_rows, group_bytes`` of the rows' file.
    arena : Arena, optional
        Memory for the buffers.
    """

    cdef fs_packer p
    cdef object sums_array, rows_array
    cdef Arena arena
    cdef object path

    def __init__(self, int fd, path, uint64_t seed, uint64_t[:, ::1] sums not None, rows, const int64_t[::1] bounds not None,
                 const int64_t[::1] offsets not None, tuple geometry, unsigned n_buffers, uint64_t buffer_bytes,
                 Arena arena=None):
        cdef const int32_t[::1] narrow
        cdef const int64_t[::1] wide
        cdef uint64_t n = offsets.shape[0], b
        cdef int64_t last = 0
        cdef bint good
        if (n_buffers < n + 1 or buffer_bytes % FS_PAGE or not buffer_bytes or <uint64_t>bounds.shape[0] != n + 1
                or sums.shape[1] != 512):
            raise ValueError("impossible packing")
        self.path = path
        self.sums_array, self.rows_array = sums, rows
        self.p.fd = fd
        self.p.hash = fs_xxh3_best()
        fs_secret_init(&self.p.secret, seed)
        self.p.sums, self.p.n_sums_pages = &sums[0, 0], sums.shape[0]
        self.p.n_buffers, self.p.buffer_bytes, self.p.n_batches = n_buffers, buffer_bytes, n
        self.p.source.data_offset, self.p.source.row_bytes, self.p.source.group_rows, self.p.source.group_bytes = geometry
        if len(rows) and rows.dtype == "int32":
            narrow = rows
            self.p.rows32 = &narrow[0]
        elif len(rows):
            wide = rows
            self.p.rows64 = &wide[0]
        for b in range(n + 1):
            good = last <= bounds[b] <= <int64_t>len(rows)
            if not good:
                raise ValueError("bounds do not ascend within the rows")
            last = bounds[b]
        self.p.cursor = <uint64_t *>calloc(n + 1, sizeof(uint64_t))
        self.p.end = <uint64_t *>calloc(n + 1, sizeof(uint64_t))
        self.p.offset = <uint64_t *>calloc(n + 1, sizeof(uint64_t))
        self.p.filled = <uint64_t *>calloc(n + 1, sizeof(uint64_t))
        self.p.buffer = <uint8_t **>calloc(n + 1, sizeof(uint8_t *))
        self.p.idle = <uint8_t **>calloc(n_buffers, sizeof(uint8_t *))
        self.p.queue = <fs_write *>calloc(n_buffers, sizeof(fs_write))
        self.arena = arena_for(arena, n_buffers * buffer_bytes)
        self.p.arena = self.arena.data
        if (self.p.cursor == NULL or self.p.end == NULL or self.p.offset == NULL or self.p.filled == NULL or self.p.buffer == NULL
                or self.p.idle == NULL or self.p.queue == NULL):
            raise MemoryError
        self.p.stream = fs_choose_stream(self.p.arena, self.p.source.row_bytes, n_buffers * buffer_bytes)
        for b in range(n):
            self.p.cursor[b], self.p.end[b], self.p.offset[b] = bounds[b], bounds[b + 1], offsets[b]
        for b in range(n_buffers):
            self.p.idle[self.p.n_idle] = self.p.arena + b * buffer_bytes
            self.p.n_idle += 1
        pthread_mutex_init(&self.p.lock, NULL)
        pthread_cond_init(&self.p.queued, NULL)
        pthread_cond_init(&self.p.freed, NULL)

    def write(self):
        """Write full buffers until :meth:`stop`; run by several threads."""
        with nogil:
            fs_packer_write(&self.p)

    def run(self, Stream stream not None, int64_t most):
        """Take up to ``most`` pieces of the stream; returns how many it took, fewer at its end.

        Raises
        ------
        OSError, CorruptionError
            Reading or writing failed.
        ValueError
            A batch's rows are not distinct and ascending, or a row lies in no piece.
        """
        cdef int64_t taken
        stream.enter()
        with nogil:
            taken = fs_packer_run(&self.p, &stream.s, most)
        stream.leave()
        if taken == -2:
            raise ValueError(f"{self.path}: a batch's rows do not ascend, or are not in what is streamed")
        if taken < 0:
            self.check()
            raise ClosedError(f"{self.path} is closed")
        if taken < most and stream.s.consumed < stream.s.n_pieces:
            stream.fail()
        return taken

    def finish(self):
        """Write what is left in the buffers and wait for it."""
        cdef uint64_t b
        with nogil:
            for b in range(self.p.n_batches):
                if self.p.buffer[b] != NULL:
                    fs_packer_hand_over(&self.p, b)
            fs_packer_drain(&self.p)
        self.check()
        for b in range(self.p.n_batches):
            if self.p.cursor[b] != self.p.end[b]:
                raise ValueError(f"the stream ended before a row of batch {b}")

    def flush(self):
        """Write the whole pages that are in the buffers, and wait for all that was handed over.

        Raises
        ------
        OSError
            Writing failed.
        """
        cdef bint good
        with nogil:
            good = fs_packer_flush(&self.p)
            fs_packer_drain(&self.p)
        self.check()
        if not good:
            raise ClosedError(f"{self.path} is closed")

    def append(self, uint64_t b, const uint8_t[::1] data not None):
        """Append bytes to batch ``b``'s extent, before its rows: what is there already of the page that its offset is at."""
        if b >= self.p.n_batches or <uint64_t>data.shape[0] >= self.p.buffer_bytes or data.shape[0] == 0:
            raise ValueError("impossible bytes")
        if not fs_packer_append(&self.p, b, &data[0], data.shape[0]):
            self.check()

    @property
    def offsets(self):
        """Where what comes next of each batch will be written, a list: all before it was handed over."""
        return [self.p.offset[b] for b in range(self.p.n_batches)]

    def check(self):
        """Raise the error that writing met."""
        if self.p.error_number:
            raise OSError(self.p.error_number, os.strerror(self.p.error_number), self.path)

    @property
    def written_bytes(self):
        """Bytes written so far."""
        return self.p.written_bytes

    def stop(self):
        """End the writers once the queue is empty; their threads may then be joined."""
        pthread_mutex_lock(&self.p.lock)
        self.p.closed = True
        pthread_cond_broadcast(&self.p.queued)
        pthread_cond_broadcast(&self.p.freed)
        pthread_mutex_unlock(&self.p.lock)

    def __dealloc__(self):
        if self.arena is not None:
            self.arena.in_use = False
        free(self.p.cursor)
        free(self.p.end)
        free(self.p.offset)
        free(self.p.filled)
        free(self.p.buffer)
        free(self.p.idle)
        free(self.p.queue)
