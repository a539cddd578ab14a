"""The C of reading pages (``kernels/rowio.c``, ``kernels/uring.c``) as the modules that use it see it: declared once."""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from featstore._core.xxh3 cimport fs_secret, fs_xxh3_fn

cdef extern from "kernels/rowio.h" nogil:
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
    uint64_t fs_sums_pages(const fs_job *job, const uint64_t *keys, uint64_t at, uint64_t n, uint64_t capacity,
                           unsigned long long *pages, uint64_t *n_pages)
    uint64_t fs_row_start(const fs_job *job, uint64_t row)


cdef enum:
    MAX_OP_BYTES = 1 << 30  # an io_uring length has 32 bits, a read returns less than 2 GiB


cdef extern from "kernels/uring.h" nogil:
    ctypedef struct fs_ring:
        int fd
        unsigned entries
    int fs_ring_open(fs_ring *ring, unsigned entries)
    void fs_ring_close(fs_ring *ring, int mapped)


cdef int check_geometry(uint64_t row_bytes, uint64_t group_rows, uint64_t group_bytes) except -1
cdef int open_ring(fs_ring *ring, unsigned entries) except -1
cdef int check_job(const fs_job *job, path) except -1
cdef int raise_os(int error, path=*, doing=*) except -1
