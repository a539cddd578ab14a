"""Streams of pages as the modules that use them see them: their C (``kernels/pagestream.c``), and what is in the types."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from featstore._core.buffers cimport Arena
from featstore._core.pthread cimport pthread_cond_t, pthread_mutex_t
from featstore._core.rowio cimport fs_job, fs_ring
from featstore._core.xxh3 cimport fs_secret

cdef extern from "kernels/pagestream.h" nogil:
    ctypedef struct fs_piece:
        pass
    ctypedef struct fs_stream_file:
        int fd
        uint64_t **sums
        fs_secret secret
    ctypedef struct fs_stream:
        pthread_mutex_t lock
        pthread_cond_t landed, freed
        fs_job job
        uint8_t *arena
        uint64_t buffer_bytes
        unsigned n_buffers
        const uint64_t *pages
        const uint32_t *counts
        const uint64_t *at
        const uint32_t *files
        fs_stream_file *parts
        uint32_t error_file
        uint64_t n_pieces, allowed, begun, consumed
        fs_piece *slots
        int closed
        uint64_t waited_ns
    void fs_stream_uring(fs_stream *s, fs_ring *ring)
    void fs_stream_pread(fs_stream *s)
    int fs_stream_scatter(fs_stream *s, uint64_t row_bytes, uint64_t n, const int32_t *p32, const int64_t *p64,
                          uint8_t *out)


cdef class Stream:
    cdef fs_stream s
    cdef fs_ring ring
    cdef fs_secret secret
    cdef const uint64_t[::1] pages
    cdef const uint32_t[::1] counts
    cdef const uint64_t[::1] at
    cdef const uint32_t[::1] files
    cdef list paths
    cdef uint32_t n_parts
    cdef readonly object path
    cdef readonly str backend
    cdef uint64_t n_sums_pages
    cdef bytes script
    cdef int pid, n_inside
    cdef bint has_fd
    cdef Arena arena

    cdef int enter(self) except -1
    cdef bint is_in(self) noexcept
    cdef void leave(self) noexcept
    cdef int copy(self, uint64_t n, positions, uint8_t[:, ::1] out) except -1
