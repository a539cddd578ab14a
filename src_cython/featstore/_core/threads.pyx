"""The pool of threads: linked here alone, so that there is one in a process. See ``kernels/threads.h``."""

from libc.stdint cimport int64_t

cdef extern from "kernels/threads.h" nogil:
    void fs_parallel_for(fs_body_fn body, void *context, int64_t n, int64_t chunk, int n_threads)


cdef void parallel_for(fs_body_fn body, void *context, int64_t n, int64_t chunk, int n_threads) noexcept nogil:
    """Run ``body(context, begin, end)`` over ``0 … n - 1`` in chunks, on up to ``n_threads`` threads, the caller's included."""
    fs_parallel_for(body, context, n, chunk, n_threads)
