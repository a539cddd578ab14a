"""Copy rows between arrays in memory and check row ids: the hot path of a gather."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memset

from featstore._core.rowcopy cimport FS_WAYS, fs_choose_stream, fs_copy, fs_copy_range, fs_known_cost
from featstore._core.threads cimport FS_MAX_THREADS, parallel_for

cdef extern from *:
    """
    #include <errno.h>
    #include <sys/random.h>
    /* A page that cannot be written is EFAULT here, where a store to it would be a signal. */
    static int fs_probe(void *p) { return getrandom(p, 1, GRND_NONBLOCK) == 1 || errno != EFAULT; }
    """
    bint fs_probe(void *p) nogil


cdef class Index:
    """Row numbers on one side of a copy: int32 or int64, or absent for 0, 1, 2 …"""

    cdef const int32_t[::1] narrow
    cdef const int64_t[::1] wide
    cdef const int32_t *p32
    cdef const int64_t *p64
    cdef int64_t n  # -1: absent

    def __cinit__(self, rows):
        self.p32 = NULL
        self.p64 = NULL
        self.n = -1
        if rows is None:
            return
        self.n = len(rows)
        if rows.itemsize == 4:
            self.narrow = rows
            if self.n:
                self.p32 = &self.narrow[0]
        else:
            self.wide = rows
            if self.n:
                self.p64 = &self.wide[0]

    cdef bint within(self, int64_t limit):
        cdef int64_t i
        cdef bint good = True
        if self.n < 0:
            return True
        with nogil:
            if self.p32 != NULL:
                for i in range(self.n):
                    good = good & (0 <= self.p32[i] < limit)
            elif self.p64 != NULL:
                for i in range(self.n):
                    good = good & (0 <= self.p64[i] < limit)
        return good


def copy_rows(const uint8_t[:, ::1] src not None, src_rows, uint8_t[:, ::1] dst not None, dst_rows, int n_threads=1):
    """Do ``dst[dst_rows[i]] = src[src_rows[i]]`` for every i; None stands for 0, 1, 2 … Both index arrays are bounds-checked."""
    cdef fs_copy job
    cdef Index s = Index(src_rows), d = Index(dst_rows)
    cdef int64_t n = s.n if s.n >= 0 else d.n if d.n >= 0 else src.shape[0]
    memset(&job, 0, sizeof(fs_copy))
    job.row_bytes = src.shape[1]
    if dst.shape[1] != src.shape[1]:
        raise ValueError(f"rows of different widths: {src.shape[1]} and {dst.shape[1]} bytes")
    if s.n >= 0 and d.n >= 0 and s.n != d.n:
        raise ValueError(f"index arrays of different lengths: {s.n} and {d.n}")
    if n == 0 or job.row_bytes == 0:
        return
    if (s.n < 0 and n > src.shape[0]) or (d.n < 0 and n > dst.shape[0]):
        raise IndexError("fewer rows than the copy needs")
    if not s.within(src.shape[0]) or not d.within(dst.shape[0]):
        raise IndexError("row number out of range")
    job.src = &src[0, 0]
    job.dst = &dst[0, 0]
    job.src32, job.src64, job.dst32, job.dst64 = s.p32, s.p64, d.p32, d.p64
    job.stream = fs_choose_stream(job.dst, job.row_bytes, job.row_bytes * <uint64_t>n)
    n_threads = max(1, min(n_threads, FS_MAX_THREADS))
    cdef int64_t chunk = max(64, min(n // (4 * n_threads) + 1, (1 << 20) // <int64_t>job.row_bytes + 1))
    with nogil:
        if job.row_bytes * <uint64_t>n < 65536:
            n_threads = 1  # waking a thread costs more than the copy
        parallel_for(fs_copy_range, &job, n, chunk, n_threads)


def copy_costs(uint64_t row_bytes, bint past_cache=True):
    """List the costs so far of each way in which :func:`copy_rows` copies rows like these, picoseconds a byte; 0 where not tried.

    Fetched past the caches 12 rows ahead, into the second level 32 rows ahead; then both with 256-bit stores where the processor
    has wider ones. ``past_cache``: of copies large enough to be written past the caches.
    """
    cdef int way
    return [fs_known_cost(past_cache, row_bytes, way) for way in range(FS_WAYS)]


def is_writable(size_t address, size_t n_bytes):
    """Return whether the kernel may write to the first and last byte; both may hold anything afterwards."""
    if n_bytes == 0:
        return True
    return fs_probe(<void *>address) and fs_probe(<void *>(address + n_bytes - 1))


def wrap_ids(const int64_t[::1] ids not None, int64_t n, int64_t[::1] out):
    """Check that every id is in ``[-n, n)``, and write its row to ``out`` (None: only check).

    Returns (position of the first bad id or −1, whether an id was negative).
    """
    cdef int64_t i, k = ids.shape[0], bad = -1
    cdef int64_t value
    cdef bint negative = False
    cdef bint write = out is not None
    if write and out.shape[0] != k:
        raise ValueError("out must be as long as ids")
    if k == 0:
        return -1, False
    cdef const int64_t *p = &ids[0]
    cdef int64_t *q = NULL
    if write:
        q = &out[0]
    with nogil:
        for i in range(k):
            value = p[i]
            if value < 0:
                negative = True
                value += n
            if <uint64_t>value >= <uint64_t>n:
                bad = i
                break
            if write:
                q[i] = value
    return bad, negative
