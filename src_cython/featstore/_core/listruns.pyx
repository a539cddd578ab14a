"""Runs of pages that hold the neighbour lists of some nodes, in one pass over their offsets."""

from libc.stdint cimport int64_t


cdef int64_t _log_page_ids(int id_bytes) except -1:
    """Return the binary logarithm of the ids in a page."""
    if id_bytes == 4:
        return 10
    if id_bytes == 8:
        return 9
    raise ValueError(f"ids have 4 or 8 bytes, not {id_bytes}")


def find_runs(const int64_t[::1] indptr not None, const int64_t[::1] nodes not None, int id_bytes, int64_t gap_pages,
              int64_t[::1] where not None, int64_t[::1] begins not None, int64_t[::1] degrees not None,
              int64_t[:, ::1] runs not None, int64_t[::1] first_lists not None):
    """Find the lists that are not empty, and the pages to be read for them.

    Parameters
    ----------
    indptr : int64 array, shape (N + 1,)
    nodes : int64 array, shape (k,)
        Ascending, in ``[0, N)``; the caller has checked them.
    id_bytes : int
        4 or 8; the ids of the first edge begin a page.
    gap_pages : int
        Pages that are read over between two lists rather than to begin another run.
    where, begins, degrees : int64 array, shape (k,)
        Output, of each list that is not empty: its node's position in ``nodes``, its first edge, and its length.
    runs : int64 array, shape (k, 2)
        Output: first page of each run, and the one after its last.
    first_lists : int64 array, shape (k,)
        Output: the first list of each run, by its place in ``where``.

    Returns
    -------
    tuple of int
        How many lists, and how many runs.
    """
    cdef int64_t log_ids = _log_page_ids(id_bytes), k = nodes.shape[0], n = 0, n_runs = 0, i, begin, end, page
    cdef int64_t stop = 0, more = (1 << log_ids) - 1
    if min(where.shape[0], begins.shape[0], degrees.shape[0], runs.shape[0], first_lists.shape[0]) < k or runs.shape[1] != 2:
        raise ValueError(f"outputs of {k} nodes have {k} rows, those of runs two columns")
    with nogil:
        for i in range(k):
            begin = indptr[nodes[i]]
            end = indptr[nodes[i] + 1]
            if begin == end:
                continue
            page = begin >> log_ids
            if n_runs == 0 or page > stop + gap_pages:
                if n_runs:
                    runs[n_runs - 1, 1] = stop
                runs[n_runs, 0] = page
                first_lists[n_runs] = n
                n_runs += 1
            stop = (end + more) >> log_ids
            where[n] = i
            begins[n] = begin
            degrees[n] = end - begin
            n += 1
        if n_runs:
            runs[n_runs - 1, 1] = stop
    return n, n_runs


def count_runs(const int64_t[::1] indptr not None, const int64_t[::1] nodes not None, int id_bytes, int64_t gap_pages):
    """Return how many pages :func:`find_runs` finds, and in how many runs."""
    cdef int64_t log_ids = _log_page_ids(id_bytes), n_runs = 0, n_pages = 0, i, begin, end, page
    cdef int64_t stop = 0, more = (1 << log_ids) - 1
    with nogil:
        for i in range(nodes.shape[0]):
            begin = indptr[nodes[i]]
            end = indptr[nodes[i] + 1]
            if begin == end:
                continue
            page = begin >> log_ids
            if n_runs == 0 or page > stop + gap_pages:
                n_runs += 1
                stop = page
            n_pages -= stop
            stop = (end + more) >> log_ids
            n_pages += stop
    return n_pages, n_runs
