"""The C of reading pages (``rowio.h``, ``uring.h``) as the modules that use it see it: declared once."""

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport strerror

from featstore._core.xxh3 cimport fs_secret, fs_xxh3_fn

cdef extern from "rowio.h" nogil:
    enum:
        FS_PAGE
        FS_SUMS_PER_PAGE
        FS_INDEX_BITS
        FS_OK
        FS_ERR_OS
        FS_ERR_SHORT
        FS_ERR_SUM
        FS_ERR_SIGNAL
    ctypedef struct fs_job:
        int fd, direct
        uint64_t data_offset, row_bytes, group_rows, group_bytes
        uint64_t first, n
        const uint64_t *keys
        const int64_t *positions
        uint8_t *out
        uint64_t gap_pages, cap_pages
        uint64_t **sums
        const fs_secret *secret
        fs_xxh3_fn hash
        const char *script
        uint64_t script_at
        int error_kind, error_number
        uint64_t error_offset
        uint64_t n_reads, read_bytes
        uint64_t next, resume
    uint64_t *fs_sort_keys(uint64_t *keys, uint64_t *spare, uint64_t n, int bits)
    uint64_t fs_row_start(const fs_job *job, uint64_t row)


cdef enum:
    MAX_OP_BYTES = 1 << 30  # an io_uring length has 32 bits, a read returns less than 2 GiB


cdef inline int check_geometry(uint64_t row_bytes, uint64_t group_rows, uint64_t group_bytes) except -1:
    if row_bytes < 1 or group_rows < 1 or group_bytes // group_rows < row_bytes:
        raise ValueError("impossible row geometry")
    return 0


cdef extern from "uring.h" nogil:
    ctypedef struct fs_ring:
        int fd
        unsigned entries
    int fs_ring_open(fs_ring *ring, unsigned entries)
    void fs_ring_close(fs_ring *ring, int mapped)


cdef inline int open_ring(fs_ring *ring, unsigned entries) except -1:
    cdef int error = fs_ring_open(ring, entries)
    if error:
        raise OSError(-error, f"setting up io_uring: {strerror(-error).decode()}")
    return 0
