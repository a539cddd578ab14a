"""Open row files and gather rows from them: io_uring or a pool of pread threads, direct or buffered."""

import errno
import os
import stat

from cpython.array cimport array, clone
from cpython.exc cimport PyErr_Occurred
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset
from posix.unistd cimport close as c_close, getpid

from featstore._core.buffers cimport Arena
from featstore._core.descriptor cimport take
from featstore._core.pairs cimport fs_sort_keys
from featstore._core.rowio cimport (
    FS_INDEX_BITS, FS_OK, FS_PAGE, FS_SUMS_PER_PAGE, MAX_OP_BYTES, check_geometry, check_job, fs_job, fs_ring, fs_ring_close,
    fs_sums_pages, open_ring, raise_os,
)
from featstore._core.xxh3 cimport fs_secret, fs_secret_init, fs_xxh3_best
from featstore.errors import CorruptionError, FormatError

cdef extern from *:
    """
    #include <fcntl.h>
    #include <linux/magic.h>
    #include <sys/syscall.h>
    #include <sys/vfs.h>
    #include <unistd.h>

    /* Direct-I/O offset alignment of an open file: 0 = not possible, -1 = the kernel does not say (before Linux 6.1). */
    static long fs_dio_align(int fd) {
        uint8_t buf[256] = {0};
        uint32_t mask = 0, align = 0;
        if (syscall(SYS_statx, fd, "", 0x1000, 0x2000U, buf) < 0) return -1; /* AT_EMPTY_PATH, STATX_DIOALIGN */
        memcpy(&mask, buf, 4);
        if (!(mask & 0x2000U)) { /* tmpfs takes O_DIRECT and ignores it */
            struct statfs info;
            return fstatfs(fd, &info) == 0 && info.f_type == TMPFS_MAGIC ? 0 : -1;
        }
        memcpy(&align, buf + 156, 4);
        return (long)align;
    }

    /* With O_NONBLOCK some kernels end each read of io_uring with EAGAIN: of a device that cannot say that it would wait. */
    static int fs_set_blocking(int fd) {
        int flags = fcntl(fd, F_GETFL);
        return flags < 0 || fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) < 0 ? -errno : 0;
    }

    /* A file system may take the flag and refuse every read (overlayfs over squashfs): then it is taken off, and the error is in
     * `read_error`, as is any other of the first page. A file that is only written, or an interrupted read, says nothing. */
    static int fs_set_direct(int fd, int *read_error) {
        int flags = fcntl(fd, F_GETFL);
        if (fcntl(fd, F_SETFL, flags | O_DIRECT) < 0) return -errno;
        _Alignas(4096) uint8_t page[4096];
        if (pread(fd, page, sizeof page, 0) >= 0 || errno == EBADF || errno == EINTR || errno == EAGAIN) return 0;
        *read_error = errno;
        return fcntl(fd, F_SETFL, flags) < 0 ? -errno : 0;
    }
    """
    long fs_dio_align(int fd) nogil
    int fs_set_direct(int fd, int *read_error) nogil
    int fs_set_blocking(int fd) nogil

cdef extern from "Python.h":
    # Declared here without `except -1`: the pending exception is raised later, when nothing is in flight any more.
    int PyErr_CheckSignals()

cdef extern from "kernels/backends.h" nogil:
    ctypedef int (*fs_poll_fn)() noexcept nogil
    ctypedef struct fs_uring:
        fs_ring ring
        unsigned depth
        uint8_t *arena
        uint64_t arena_bytes
    void fs_uring_run(fs_uring *u, fs_job *job, fs_poll_fn poll)
    ctypedef struct fs_pool:
        unsigned n_threads
    int fs_pool_open(fs_pool *pool, unsigned n_threads, uint8_t *arena, uint64_t buffer_bytes)
    void fs_pool_close(fs_pool *pool)
    void fs_pool_run(fs_pool *pool, fs_job *job, fs_poll_fn poll)

PAGE_BYTES = FS_PAGE
SUMS_PER_PAGE = FS_SUMS_PER_PAGE
MAX_SORTED_ROWS = 1 << 21  # rows sorted at once: 16 bytes of scratch each

MAX_ROWS = 1 << 40  # sort keys hold a row in 40 bits


cdef int poll_signals() noexcept nogil:
    with gil:
        return PyErr_CheckSignals()


cdef int raise_pending() except -1:
    return -1 if PyErr_Occurred() != NULL else 0


def direct_mode(int fd):
    """Make reads and writes of ``fd`` bypass the page cache where they can; returns ``"direct"`` or ``"buffered: why"``.

    Raises OSError, without a file's name, where the first page cannot be read for another reason.
    """
    cdef int error, read_error = 0
    cdef long align = fs_dio_align(fd)
    if align == 0:
        return "buffered: the file system has no direct I/O"
    if align > <long>FS_PAGE:
        return f"buffered: direct I/O would need {align}-byte alignment"
    with nogil:
        error = fs_set_direct(fd, &read_error)
    if error:
        return f"buffered: O_DIRECT refused ({os.strerror(-error)})"
    if read_error in (errno.EINVAL, errno.EOPNOTSUPP):
        return f"buffered: the file system takes O_DIRECT and refuses to read ({os.strerror(read_error)})"
    if read_error:
        raise_os(read_error)
    return "direct" if align > 0 else "direct: the kernel does not report its alignment"


def direct_alignment(int fd):
    """Find the bytes to which direct I/O of ``fd`` must be aligned: 0 where there is none, None where the kernel does not say."""
    cdef long align = fs_dio_align(fd)
    return None if align < 0 else align


cdef class File:
    """An open row file: descriptor, geometry and, where pages are verified, their sums. Thread-safe but for ``close``."""

    cdef int fd
    cdef bint has_fd  # a half-made object has descriptor 0, which is another's
    cdef readonly bint direct
    cdef readonly str mode
    cdef readonly object path
    cdef readonly uint64_t data_offset, row_bytes, group_rows, group_bytes, n_rows, size
    cdef uint64_t **sums
    cdef readonly uint64_t n_sums_pages
    cdef fs_secret secret

    def __cinit__(self, path, uint64_t row_bytes, uint64_t group_rows, uint64_t group_bytes, uint64_t n_rows,
                  uint64_t data_offset, uint64_t expected_bytes, bint direct=True, fd=-1, str mode=None):
        """Open ``path``, or take over ``fd``, which is open; ``expected_bytes`` is what its size must be.

        ``mode`` is that of a File of the same open file: neither is looked at again.
        """
        cdef object group, within, end
        self.fd, self.has_fd = take(fd), True
        check_geometry(row_bytes, group_rows, group_bytes)
        if n_rows > MAX_ROWS:
            raise FormatError(f"{os.fspath(path)} claims {n_rows} rows; a file has at most {MAX_ROWS}")
        if n_rows:  # a row beyond the end would have no checksum to look up
            # Python's integers: products may need more than 64 bits.
            group, within = divmod(<object>(n_rows - 1), <object>group_rows)
            end = data_offset + group * <object>group_bytes + (within + 1) * <object>row_bytes
            if end > expected_bytes:
                raise FormatError(f"{os.fspath(path)} claims {n_rows} rows, which end beyond its {expected_bytes} bytes")
        self.path = os.fspath(path)
        self.row_bytes = row_bytes
        self.group_rows = group_rows
        self.group_bytes = group_bytes
        self.n_rows = n_rows
        self.data_offset = data_offset
        self.size = expected_bytes
        if mode is not None:
            self.mode, self.direct = mode, direct
            return
        try:
            if self.fd < 0:
                # O_NONBLOCK: a FIFO in the file's place must not block the open.
                self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise FormatError(f"{self.path} is a symbolic link; data files must be regular files") from None
            raise
        info = os.fstat(self.fd)
        if not stat.S_ISREG(info.st_mode):
            raise FormatError(f"{self.path} is not a regular file")
        refused = fs_set_blocking(self.fd)
        if refused:
            raise_os(-refused, self.path)
        if <uint64_t>info.st_size != expected_bytes:
            raise CorruptionError(
                f"has {info.st_size} bytes, the catalog says {expected_bytes}", self.path, min(info.st_size, expected_bytes)
            )
        self._choose_mode(direct)

    def _choose_mode(self, bint direct):
        try:
            self.mode = direct_mode(self.fd) if direct else "buffered: asked for"
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from None
        self.direct = self.mode.startswith("direct")
        if not self.direct:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)

    def pages(self):
        """Return the same open file seen as rows of one page each, nothing verified; whatever is at its path by now."""
        try:
            fd = os.dup(self.fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from None
        return File(self.path, FS_PAGE, 1, FS_PAGE, self.size // FS_PAGE, 0, self.size, self.direct, fd, self.mode)

    def use_sums(self, uint64_t seed):
        """Verify pages from now on, against sums pages handed in with :meth:`set_sums_page`."""
        self.n_sums_pages = (self.size // FS_PAGE + FS_SUMS_PER_PAGE - 1) // FS_SUMS_PER_PAGE
        fs_secret_init(&self.secret, seed)
        self.sums = <uint64_t **>calloc(self.n_sums_pages + 1, sizeof(uint64_t *))
        if self.sums == NULL:
            raise MemoryError

    def set_sums_page(self, uint64_t number, const uint64_t[::1] page):
        """Make ``page`` (512 words, kept alive by the caller) the sums page ``number``; None takes it away."""
        if self.sums == NULL or number >= self.n_sums_pages or (page is not None and page.shape[0] != 512):
            raise ValueError("no such sums page")
        self.sums[number] = NULL if page is None else <uint64_t *>&page[0]

    def drop_sums(self):
        """Verify no longer; no gather may be under way."""
        free(self.sums)
        self.sums = NULL

    @property
    def fd_number(self):
        """The descriptor, −1 when closed."""
        return self.fd

    def close(self):
        """Close the descriptor; no gather may be under way."""
        cdef int fd = self.fd
        self.fd = -1  # first: a close that failed has closed, and the number may be another file's by then
        if fd >= 0:
            try:
                os.close(fd)
            except OSError:
                pass  # of writes, and it was only read

    def __dealloc__(self):
        free(self.sums)
        if self.has_fd and self.fd >= 0:
            c_close(self.fd)  # at the interpreter's exit the os module may be gone


cdef class Engine:
    """One queue of reads with its buffers. One owner thread at a time; belongs to the process that made it."""

    cdef fs_uring *uring
    cdef fs_pool *pool
    cdef Arena arena
    cdef readonly uint64_t arena_bytes
    cdef uint64_t cap_pages
    cdef uint64_t *scratch
    cdef uint64_t scratch_rows
    cdef readonly int pid
    cdef readonly str backend
    cdef bytes script
    cdef uint64_t script_at

    def __cinit__(self, str backend, unsigned depth, uint64_t arena_bytes):
        """Create a queue of ``depth`` reads; ``backend`` is ``"io_uring"`` or ``"pread"`` (``depth`` threads).

        Raises OSError where the kernel refuses.
        """
        cdef int error
        cdef uint64_t buffer_bytes
        self.pid = os.getpid()
        self.backend = backend
        self.script = None
        if depth < 1 or arena_bytes < depth * FS_PAGE:
            raise ValueError("the buffers need at least a page for each read in flight")
        self.arena_bytes = arena_bytes // FS_PAGE * FS_PAGE
        self.arena = Arena(self.arena_bytes, False)
        if backend == "io_uring":
            self.uring = <fs_uring *>calloc(1, sizeof(fs_uring))
            if self.uring == NULL:
                raise MemoryError
            self.uring.ring.fd = -1
            open_ring(&self.uring.ring, depth)
            self.uring.depth = min(depth, self.uring.ring.entries)
            self.uring.arena = self.arena.data
            self.uring.arena_bytes = self.arena_bytes
            self.cap_pages = max(1, self.arena_bytes // 16 // FS_PAGE)
        elif backend == "pread":
            buffer_bytes = self.arena_bytes // depth // FS_PAGE * FS_PAGE
            self.pool = <fs_pool *>calloc(1, sizeof(fs_pool))
            if self.pool == NULL:
                raise MemoryError
            with nogil:
                error = fs_pool_open(self.pool, depth, self.arena.data, buffer_bytes)
            if error:
                free(self.pool)
                self.pool = NULL
                raise_os(-error, None, "starting reader threads")
            self.cap_pages = buffer_bytes // FS_PAGE
        else:
            raise ValueError(f"no backend {backend!r}")
        self.cap_pages = min(self.cap_pages, MAX_OP_BYTES // FS_PAGE)

    def inject(self, bytes script):
        """Distort the results of coming reads, a letter each (tests): see ``fs_inject``; None ends it."""
        self.script = script
        self.script_at = 0

    def set_scratch(self, uint64_t n_rows):
        """Hold scratch for sorting ``n_rows`` at once, 16 bytes each; for ``MAX_SORTED_ROWS`` at the most."""
        n_rows = min(n_rows, <uint64_t>MAX_SORTED_ROWS)  # a sort key has few bits for a row's place
        if n_rows > self.scratch_rows:
            free(self.scratch)
            self.scratch_rows = 0
            self.scratch = <uint64_t *>calloc(2 * n_rows, sizeof(uint64_t))
            if self.scratch == NULL:
                raise MemoryError
            self.scratch_rows = n_rows

    def drop_scratch(self):
        """Hold no scratch, until some is set; nobody gathers."""
        free(self.scratch)
        self.scratch = NULL
        self.scratch_rows = 0

    @property
    def nbytes(self):
        """Bytes held: buffers and scratch."""
        return self.arena_bytes + 16 * self.scratch_rows

    cdef int run(self, fs_job *job, File file) except -1:
        job.n_reads = job.read_bytes = 0
        if self.script is not None:
            job.script = self.script
            job.script_at = self.script_at
        with nogil:
            if self.uring != NULL:
                fs_uring_run(self.uring, job, poll_signals)
            else:
                fs_pool_run(self.pool, job, poll_signals)
        self.script_at = job.script_at
        if job.error_kind == FS_OK:
            return 0
        raise_pending()  # Ctrl-C, also where a read failed while its handler ran: raising that error would lose it
        return check_job(job, file.path)

    cdef int prepare(self, fs_job *job, File file, uint8_t[:, ::1] out, int64_t gap_bytes) except -1:
        memset(job, 0, sizeof(fs_job))
        if file.fd < 0:
            raise ValueError("the file is closed")
        if <uint64_t>out.shape[1] != file.row_bytes:
            raise ValueError("out has rows of another width")
        job.fd = file.fd
        job.direct = file.direct
        job.data_offset = file.data_offset
        job.row_bytes = file.row_bytes
        job.group_rows = file.group_rows
        job.group_bytes = file.group_bytes
        job.gap_pages = max(gap_bytes, 0) // <int64_t>FS_PAGE
        job.cap_pages = self.cap_pages
        job.sums = file.sums
        job.secret = &file.secret
        job.hash = fs_xxh3_best()
        return 0

    def read(self, File file not None, uint64_t first, uint64_t n, uint8_t[:, ::1] out not None):
        """Read rows ``first … first + n - 1`` into ``out``; returns (reads, bytes read). Sums pages must be set."""
        cdef fs_job job
        self.prepare(&job, file, out, 0)
        if n > file.n_rows or first > file.n_rows - n or <uint64_t>out.shape[0] != n:
            raise IndexError("rows out of range")
        if n == 0:
            return 0, 0
        job.first = first
        job.n = n
        job.out = &out[0, 0]
        self.run(&job, file)
        return job.n_reads, job.read_bytes

    def gather(self, File file not None, const int64_t[::1] rows not None, uint8_t[:, ::1] out not None,
               const int64_t[::1] positions, int64_t gap_bytes, sums_loader=None):
        """Read ``rows`` (each checked to be in range) to rows ``positions`` of ``out``; returns (reads, bytes read).

        ``sums_loader(first_page, last_page)`` is given where sums pages are cached: see :meth:`_run_paged`.
        """
        cdef fs_job job
        cdef uint64_t n = rows.shape[0], start, m, i, reads = 0, n_bytes = 0
        cdef uint64_t row, previous, all_rows = file.n_rows
        cdef bint is_sorted
        cdef int bits = FS_INDEX_BITS
        cdef uint64_t n_out = out.shape[0]
        cdef const int64_t *ids
        cdef const int64_t *places = NULL
        cdef uint64_t *keys
        cdef int64_t bad = -1
        cdef bint misplaced = False
        self.prepare(&job, file, out, gap_bytes)
        if n == 0:
            return 0, 0
        if positions is not None and positions.shape[0] != rows.shape[0]:
            raise ValueError("one position a row")
        if positions is None and n > <uint64_t>out.shape[0]:
            raise ValueError("out is too short")
        if positions is not None:
            places = &positions[0]
        if self.scratch_rows == 0:
            self.set_scratch(min(n, MAX_SORTED_ROWS))
        while bits < 64 and (all_rows - 1) >> (bits - FS_INDEX_BITS):
            bits += 1
        job.out = &out[0, 0] if n_out else NULL
        start = 0
        while start < n:
            m = min(n - start, self.scratch_rows)
            ids = &rows[start]
            keys = self.scratch
            with nogil:
                is_sorted = True
                previous = 0
                for i in range(m):
                    row = <uint64_t>ids[i]
                    if row >= all_rows:
                        bad = <int64_t>(start + i)
                        break
                    is_sorted = is_sorted and row >= previous
                    previous = row
                    keys[i] = row << FS_INDEX_BITS | i
                if places != NULL:
                    for i in range(m):
                        if <uint64_t>places[start + i] >= n_out:
                            misplaced = True
                            break
                if bad < 0 and not misplaced and not is_sorted:
                    keys = fs_sort_keys(keys, keys + m, m, FS_INDEX_BITS, bits)
            if bad >= 0:
                raise IndexError(f"row {rows[bad]} at position {bad} is out of range for {all_rows} rows")
            if misplaced:
                raise IndexError(f"a position is out of range for {n_out} rows of out")
            job.keys = keys
            job.positions = NULL
            if positions is not None:
                job.positions = &positions[start]
            else:
                job.out = &out[start, 0]
            job.n = m
            if sums_loader is None:
                job.next = job.resume = 0
                self.run(&job, file)
                reads += job.n_reads
                n_bytes += job.read_bytes
            else:
                more = self._run_paged(file, &job, sums_loader)
                reads += more[0]
                n_bytes += more[1]
            start += m
        return reads, n_bytes

    cdef tuple _run_paged(self, File file, fs_job *job, object sums_loader):
        """Run a sorted job in stretches whose pages of sums fit the loader's cache."""
        cdef uint64_t n = job.n, at = 0, end, reads = 0, n_bytes = 0, capacity = sums_loader.capacity, n_pages
        cdef const uint64_t *keys = job.keys
        # The last row may want some beyond the capacity.
        cdef array pages = clone(array("Q"), capacity + job.row_bytes // (FS_PAGE * FS_SUMS_PER_PAGE) + 2, False)
        while at < n:
            with nogil:
                end = fs_sums_pages(job, keys, at, n, capacity, pages.data.as_ulonglongs, &n_pages)
            wanted = pages[:n_pages].tolist()
            sums_loader.load(wanted)
            job.keys = keys + at
            job.n = end - at
            job.next = job.resume = 0
            self.run(job, file)
            reads += job.n_reads
            n_bytes += job.read_bytes
            at = end
        return reads, n_bytes

    def close(self):
        """Stop threads and give the buffers back; no gather may be under way. In a forked child only memory is dropped."""
        cdef bint mine = self.pid == getpid()
        if self.uring != NULL:
            fs_ring_close(&self.uring.ring, mine)
            free(self.uring)
            self.uring = NULL
        if self.pool != NULL:
            if mine:
                with nogil:
                    fs_pool_close(self.pool)
            free(self.pool)
            self.pool = NULL
        self.arena = None
        free(self.scratch)
        self.scratch = NULL
        self.scratch_rows = 0

    def __dealloc__(self):
        self.close()
