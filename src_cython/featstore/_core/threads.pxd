"""The pool of threads (``kernels/threads.c``) that all modules with loops over it share."""

from libc.stdint cimport int64_t

cdef extern from "kernels/threads.h" nogil:
    enum:
        FS_MAX_THREADS
    ctypedef void (*fs_body_fn)(void *context, int64_t begin, int64_t end) noexcept nogil

cdef void parallel_for(fs_body_fn body, void *context, int64_t n, int64_t chunk, int n_threads) noexcept nogil
