"""Loops split over threads (``threads.h``) as the modules that have such loops see them: declared once."""

from libc.stdint cimport int64_t

cdef extern from "threads.h" nogil:
    enum:
        FS_MAX_THREADS
    ctypedef void (*fs_body_fn)(void *context, int64_t begin, int64_t end) noexcept nogil
    void fs_parallel_for(fs_body_fn body, void *context, int64_t n, int64_t chunk, int n_threads)
