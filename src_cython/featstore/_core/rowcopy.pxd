"""The C of copying rows (``kernels/rowcopy.c``) as the modules that use it see it: declared once."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "kernels/rowcopy.h" nogil:
    ctypedef void (*fs_stream_fn)(uint8_t *dst, const uint8_t *src, uint64_t row_bytes) noexcept nogil
    ctypedef struct fs_copy:
        const uint8_t *src
        uint8_t *dst
        const int32_t *src32
        const int64_t *src64
        const int32_t *dst32
        const int64_t *dst64
        uint64_t row_bytes
        fs_stream_fn stream
    fs_stream_fn fs_choose_stream(const uint8_t *dst, uint64_t row_bytes, uint64_t n_bytes)
    void fs_copy_range(void *context, int64_t begin, int64_t end)
    enum:
        FS_WAYS
    uint32_t fs_known_cost(int past_cache, uint64_t row_bytes, int way)
