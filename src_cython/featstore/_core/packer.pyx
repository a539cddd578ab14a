"""Batched packing: one stream of a file's rows is turned into the extents of many batches."""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free

from featstore._core.buffers cimport Arena, arena_for
from featstore._core.pthread cimport (
    pthread_cond_broadcast, pthread_cond_init, pthread_cond_t, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_t,
    pthread_mutex_unlock,
)
from featstore._core.rowcopy cimport fs_choose_stream, fs_stream_fn
from featstore._core.rowio cimport FS_PAGE, MAX_OP_BYTES, check_geometry, fs_job, raise_os
from featstore._core.stream cimport Stream, fs_stream
from featstore._core.xxh3 cimport fs_secret, fs_secret_init, fs_xxh3_best, fs_xxh3_fn
from featstore.errors import ClosedError

cdef extern from "kernels/packer.h" nogil:
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
        const int64_t *kept_rows
        uint64_t n_kept, kept
        uint8_t *kept_at
    void fs_packer_write(fs_packer *p)
    void fs_packer_hand_over(fs_packer *p, uint64_t b)
    int64_t fs_packer_run(fs_packer *p, fs_stream *s, int64_t most)
    int fs_packer_append(fs_packer *p, uint64_t b, const uint8_t *src, uint64_t len)
    int fs_packer_flush(fs_packer *p)
    int fs_packer_drain(fs_packer *p)


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
    cdef object sums_array, rows_array, kept_arrays
    cdef Arena arena
    cdef object path

    def __cinit__(self, int fd, path, uint64_t seed, uint64_t[:, ::1] sums not None, rows, const int64_t[::1] bounds not None,
                  const int64_t[::1] offsets not None, tuple geometry, unsigned n_buffers, uint64_t buffer_bytes,
                  Arena arena=None):
        cdef const int32_t[::1] narrow
        cdef const int64_t[::1] wide
        cdef uint64_t n = offsets.shape[0], b
        cdef int64_t last = 0
        cdef bint good
        if (n_buffers < n + 1 or buffer_bytes % FS_PAGE or not 0 < buffer_bytes <= MAX_OP_BYTES
                or <uint64_t>bounds.shape[0] != n + 1 or sums.shape[1] != 512):
            raise ValueError("impossible packing")
        for b in range(n):
            if offsets[b] < 0 or offsets[b] % <int64_t>FS_PAGE:
                raise ValueError(f"an extent cannot begin at byte {offsets[b]}")
        self.path = path
        self.sums_array, self.rows_array = sums, rows
        self.p.fd = fd
        self.p.hash = fs_xxh3_best()
        fs_secret_init(&self.p.secret, seed)
        self.p.sums, self.p.n_sums_pages = &sums[0, 0], sums.shape[0]
        self.p.n_buffers, self.p.buffer_bytes, self.p.n_batches = n_buffers, buffer_bytes, n
        self.p.source.data_offset, self.p.source.row_bytes, self.p.source.group_rows, self.p.source.group_bytes = geometry
        check_geometry(self.p.source.row_bytes, self.p.source.group_rows, self.p.source.group_bytes)
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

    def keep(self, const int64_t[::1] rows not None, uint8_t[:, ::1] out not None):
        """Copy these rows, too, the i-th into ``out[i]``, as they come by; before :meth:`run`.

        Parameters
        ----------
        rows : int64 array, shape (n,)
            Distinct, ascending.
        out : uint8 array, shape (n, row_bytes) or more rows
        """
        if <uint64_t>out.shape[1] != self.p.source.row_bytes or out.shape[0] < rows.shape[0]:
            raise ValueError("no room for the rows that are kept")
        if rows.shape[0]:
            self.kept_arrays = rows, out
            self.p.kept_rows, self.p.n_kept, self.p.kept = &rows[0], rows.shape[0], 0
            self.p.kept_at = &out[0, 0]

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
        self.drain()
        self.check()
        for b in range(self.p.n_batches):
            if self.p.cursor[b] != self.p.end[b]:
                raise ValueError(f"the stream ended before a row of batch {b}")
        if self.p.kept != self.p.n_kept:
            raise ValueError("the stream ended before a row that is kept")

    cdef drain(self):
        """Wait for all that was handed over, and look for signals meanwhile."""
        cdef bint drained = False
        while not drained:
            with nogil:
                drained = fs_packer_drain(&self.p)
            PyErr_CheckSignals()

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
        self.drain()
        self.check()
        if not good:
            raise ClosedError(f"{self.path} is closed")

    def append(self, uint64_t b, const uint8_t[::1] data not None):
        """Append bytes to batch ``b``'s extent, before its rows: what is there already of the page that its offset is at."""
        cdef bint good
        if b >= self.p.n_batches or <uint64_t>data.shape[0] >= self.p.buffer_bytes or data.shape[0] == 0:
            raise ValueError("impossible bytes")
        with nogil:
            good = fs_packer_append(&self.p, b, &data[0], data.shape[0])
        self.check()
        if not good:
            raise ClosedError(f"{self.path} is closed")

    @property
    def offsets(self):
        """Offsets in the file of the next bytes of each batch, a list: all before them was handed over."""
        return [self.p.offset[b] for b in range(self.p.n_batches)]

    def check(self):
        """Raise the error that writing met."""
        if self.p.error_number:
            raise_os(self.p.error_number, self.path)

    @property
    def written_bytes(self):
        """Bytes written so far."""
        pthread_mutex_lock(&self.p.lock)  # writers may be at work
        cdef uint64_t n_bytes = self.p.written_bytes
        pthread_mutex_unlock(&self.p.lock)
        return n_bytes

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
