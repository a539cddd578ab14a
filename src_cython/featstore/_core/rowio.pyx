"""Errors of reading and writing pages: the C's codes and errno as exceptions, for all modules that read or write."""

import os

from libc.stdint cimport uint64_t

from featstore.errors import CorruptionError


cdef int raise_os(int error, path=None, doing=None) except -1:
    """Raise the OSError of an errno, with the file that it is about, or after what was being done."""
    text = os.strerror(error)
    raise OSError(error, text if doing is None else f"{doing}: {text}", *(() if path is None else (path,)))


cdef int check_job(const fs_job *job, path) except -1:
    """Raise what ended a job early."""
    if job.error_kind == FS_OK:
        return 0
    if job.error_kind == FS_ERR_OS:
        raise_os(job.error_number, path)
    if job.error_kind == FS_ERR_SHORT:
        raise CorruptionError("the file ends before its recorded size", path, job.error_offset)
    raise CorruptionError("checksum of a page differs", path, job.error_offset)


cdef int check_geometry(uint64_t row_bytes, uint64_t group_rows, uint64_t group_bytes) except -1:
    """Refuse rows that do not lie one after the other in their groups."""
    if row_bytes < 1 or group_rows < 1 or group_bytes // group_rows < row_bytes:
        raise ValueError("impossible row geometry")
    return 0


cdef int open_ring(fs_ring *ring, unsigned entries) except -1:
    """Create a ring."""
    cdef int error = fs_ring_open(ring, entries)
    if error:
        raise_os(-error, None, "setting up io_uring")
    return 0
