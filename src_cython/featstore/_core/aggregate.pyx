"""Sums of neighbours' rows, for a block of destinations and a run of sources at a time."""

from libc.stdint cimport int64_t, uint8_t

from featstore._core.threads cimport FS_MAX_THREADS, parallel_for

cdef extern from "kernels/aggregate.h" nogil:
    ctypedef struct fs_aggregate:
        const void *rows
        int64_t first
        int64_t stop
        int64_t width
        const void *ids
        int64_t id_bytes
        int64_t n_ids
        int64_t *cursor
        const int64_t *ends
        int64_t *nexts
        void *sums
        const double *scale
        int64_t self
        const int64_t *bounds
        int64_t bad
        int is_beyond
    int64_t FS_NO_MORE
    int64_t fs_list_id(const void *ids, int64_t id_bytes, int64_t at)
    bint fs_lists_fit(const int64_t *cursor, const int64_t *ends, int64_t n_ids, int64_t lo, int64_t hi)
    void fs_begin_accumulating(fs_aggregate *job, int kind, int level)
    void fs_accumulate_parts(void *job, int64_t begin, int64_t end)

LEVELS = 3  # of vectors, see :func:`accumulate`
NO_MORE = FS_NO_MORE

cdef int64_t MAX_WIDTH = 1 << 40  # numbers in a row, so that its bytes are a number of 64 bits


cdef int check_lists(const uint8_t[::1] ids, int64_t id_bytes, const int64_t[::1] cursor, const int64_t[::1] ends) except -1:
    if id_bytes not in (4, 8) or ids.shape[0] % id_bytes:
        raise ValueError(f"ids have 4 or 8 bytes, not {id_bytes}")
    if cursor.shape[0] != ends.shape[0]:
        raise ValueError("a begin and an end a list")
    return 0


cdef int check_each(const uint8_t[::1] ids, int64_t id_bytes, const int64_t[::1] cursor, const int64_t[::1] ends,
                    const int64_t[::1] out) except -1:
    """Check lists, all of them within the ids, and an array of a number a list."""
    cdef bint good
    check_lists(ids, id_bytes, cursor, ends)
    if out.shape[0] != cursor.shape[0]:
        raise ValueError("a number a list")
    if cursor.shape[0] == 0:
        return 0
    with nogil:
        good = fs_lists_fit(&cursor[0], &ends[0], ids.shape[0] // id_bytes, 0, cursor.shape[0])
    if not good:
        raise ValueError("lists beyond the ids")
    return 0


def begin(const uint8_t[::1] ids not None, int64_t id_bytes, const int64_t[::1] cursor not None,
          const int64_t[::1] ends not None, int64_t[::1] nexts not None):
    """Write the first id of each list, ``NO_MORE`` of an empty one; lists are ``ids[cursor:ends]``."""
    cdef int64_t v
    check_each(ids, id_bytes, cursor, ends, nexts)
    cdef const uint8_t *at = &ids[0] if ids.shape[0] else NULL
    with nogil:
        for v in range(cursor.shape[0]):
            nexts[v] = fs_list_id(at, id_bytes, cursor[v]) if cursor[v] < ends[v] else FS_NO_MORE


def accumulate(const uint8_t[::1] rows not None, int64_t row_item, int64_t first, int64_t width,
               const uint8_t[::1] ids not None, int64_t id_bytes, int64_t[::1] cursor not None,
               const int64_t[::1] ends not None, int64_t[::1] nexts not None, uint8_t[::1] sums not None, int64_t sum_item,
               const double[::1] scale, int64_t self_first, const int64_t[::1] bounds not None, int n_threads,
               int level=LEVELS - 1):
    """Add the rows of sources ``first …`` to the sums of the destinations whose lists name them, in their order.

    ``rows`` and ``sums`` hold ``width`` numbers each, of 4 (float32) or 8 bytes (float64); ``scale``, one a source, multiplies
    the rows. With ``self_first`` of 0 or more, destination ``v`` has ``self_first + v`` as a source exactly once, whatever its
    list says. Destinations ``bounds[k] … bounds[k + 1] - 1`` are part ``k``; up to ``n_threads`` threads take parts. ``level``
    bounds the vectors: 2 all, 1 AVX2, 0 none. The sums are the same, whatever the parts, the threads and the level. Returns the
    first destination whose list does not ascend, or −1.
    """
    cdef fs_aggregate job
    cdef int64_t k, n_rows, n = cursor.shape[0], n_parts = bounds.shape[0] - 1
    cdef int kind
    if (row_item, sum_item) not in ((4, 4), (4, 8), (8, 8)) or not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"rows of {row_item} bytes a number, {width} each, and sums of {sum_item}")
    check_lists(ids, id_bytes, cursor, ends)
    n_rows = rows.shape[0] // (row_item * width)
    if n_rows * row_item * width != rows.shape[0] or first < 0:
        raise ValueError("rows that are not whole")
    if nexts.shape[0] != n or sums.shape[0] // (width * sum_item) < n:
        raise ValueError("arrays shorter than the destinations")
    if n_parts < 0 or bounds[0] != 0 or bounds[n_parts] != n:
        raise ValueError("parts of other destinations")
    for k in range(n_parts):
        if bounds[k] > bounds[k + 1]:
            raise ValueError("parts that overlap")
    if scale is not None and scale.shape[0] < n_rows:
        raise ValueError("a factor a row")
    if n == 0 or n_rows == 0:
        return -1
    kind = 0 if sum_item == 4 else 1 if row_item == 4 else 2
    job.rows, job.first, job.stop, job.width = &rows[0], first, first + n_rows, width
    job.ids, job.id_bytes, job.n_ids = &ids[0] if ids.shape[0] else NULL, id_bytes, ids.shape[0] // id_bytes
    job.cursor, job.ends, job.nexts, job.sums = &cursor[0], &ends[0], &nexts[0], &sums[0]
    job.scale = NULL
    if scale is not None:
        job.scale = &scale[0]
    job.self, job.bounds = self_first, &bounds[0]
    with nogil:
        fs_begin_accumulating(&job, kind, level)
        parallel_for(fs_accumulate_parts, &job, n_parts, 1, n_threads)
    if job.is_beyond:
        raise ValueError("lists beyond the ids")
    return job.bad if job.bad < FS_NO_MORE else -1


def count_self(const uint8_t[::1] ids not None, int64_t id_bytes, const int64_t[::1] begins not None,
               const int64_t[::1] ends not None, int64_t first, int64_t[::1] counts not None):
    """Write how often the list of destination ``first + v`` names itself."""
    cdef int64_t v, at
    check_each(ids, id_bytes, begins, ends, counts)
    cdef const uint8_t *data = &ids[0] if ids.shape[0] else NULL
    with nogil:
        for v in range(begins.shape[0]):
            counts[v] = 0
            for at in range(begins[v], ends[v]):
                counts[v] += fs_list_id(data, id_bytes, at) == first + v


def mark_runs(const uint8_t[::1] ids not None, int64_t id_bytes, int64_t run, uint8_t[::1] wanted not None):
    """Set ``wanted[id // run]`` for every id; returns whether all of them are there."""
    cdef int64_t i, number, n = ids.shape[0] // id_bytes if id_bytes in (4, 8) else -1
    cdef bint good = True
    if n < 0 or run < 1:
        raise ValueError(f"ids have 4 or 8 bytes, not {id_bytes}, and a run 1 at least")
    if n == 0:
        return True
    cdef const uint8_t *data = &ids[0]
    with nogil:
        for i in range(n):
            number = fs_list_id(data, id_bytes, i) // run
            if not 0 <= number < wanted.shape[0]:
                good = False
                break
            wanted[number] = 1
    return good


cdef struct Finish:
    void *sums
    const double *factors
    int64_t sum_item
    int64_t width
    bint divides


cdef void finish_range(void *context, int64_t lo, int64_t hi) noexcept nogil:
    cdef Finish *job = <Finish *>context
    cdef int64_t v, j, width = job.width
    cdef float *f
    cdef double *d
    cdef float by_f
    cdef double by
    for v in range(lo, hi):
        by = job.factors[v]
        if job.sum_item == 4:
            f, by_f = <float *>job.sums + v * width, <float>by
            if job.divides:
                for j in range(width):
                    f[j] = f[j] / by_f
            else:
                for j in range(width):
                    f[j] = f[j] * by_f
        else:
            d = <double *>job.sums + v * width
            if job.divides:
                for j in range(width):
                    d[j] = d[j] / by
            else:
                for j in range(width):
                    d[j] = d[j] * by


def finish(uint8_t[::1] sums not None, int64_t sum_item, int64_t width, const double[::1] factors not None, bint divides,
           int n_threads):
    """Divide the sums of each destination by its factor, or multiply them, on up to ``n_threads`` threads."""
    cdef Finish job
    cdef int64_t n = factors.shape[0]
    if sum_item not in (4, 8) or not 1 <= width <= MAX_WIDTH or sums.shape[0] // (width * sum_item) < n:
        raise ValueError("arrays shorter than the destinations")
    if n == 0:
        return
    job.sums, job.factors, job.sum_item, job.width, job.divides = &sums[0], &factors[0], sum_item, width, divides
    n_threads = max(1, min(n_threads, FS_MAX_THREADS))
    with nogil:
        parallel_for(finish_range, &job, n, n // (4 * n_threads) + 1, n_threads)
