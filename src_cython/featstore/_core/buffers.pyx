"""Memory that is mapped: for drives to read into, for caches, and for tensors that borrow it until all their views have died."""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint8_t, uint64_t
from posix.unistd cimport getpid

cimport cython

cdef extern from "kernels/mapping.h" nogil:
    void *fs_map(uint64_t n_bytes, int forked)
    void fs_unmap(void *p, uint64_t n_bytes)
    int fs_populate(void *p, uint64_t n_bytes)
    int fs_discard(void *p, uint64_t n_bytes)
    uint64_t fs_mapped_bytes()


def mapped_bytes():
    """Count the bytes of all arenas that live in this process, whether their pages were touched or not."""
    return fs_mapped_bytes()


def populate(uint8_t[::1] memory not None):
    """Take the memory's pages now, what is in them unchanged: the first write to a page does not wait for the kernel then.

    Returns whether it could: a kernel before Linux 5.14 cannot, and pages come as they are touched.
    """
    cdef int error = 0
    cdef uint64_t n_bytes = memory.shape[0]
    if n_bytes:
        with nogil:
            error = fs_populate(&memory[0], n_bytes)
    return error == 0


def discard(uint8_t[::1] memory not None):
    """Give the whole pages of private memory back to the system; what was in them is zero from then on.

    Returns whether the kernel did so.
    """
    cdef int error = 0
    cdef uint64_t n_bytes = memory.shape[0]
    if n_bytes:
        with nogil:
            error = fs_discard(&memory[0], n_bytes)
    return error == 0


cdef class Arena:
    """Memory of fixed size, unmapped when the object dies; zeroed at first.

    Without ``forked`` a child process does not have it. Memory that drives read into must be such: a read may land while a fork
    copies pages. Fresh pages can cost more than their use, so streams and packers use one another's arenas, one at a time.
    """

    def __cinit__(self, uint64_t nbytes, bint forked=True):
        self.nbytes, self.is_forked, self.pid = nbytes, forked, getpid()
        self.data = <uint8_t *>fs_map(max(nbytes, 1), forked)
        if self.data == NULL:
            raise MemoryError(f"cannot map {nbytes} bytes")

    def __dealloc__(self):
        if self.data != NULL and (self.is_forked or self.pid == getpid()):
            fs_unmap(self.data, max(self.nbytes, 1))  # with the GIL: no thread takes the memory before it is free

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.data, <Py_ssize_t>self.nbytes, 0, flags)


cdef Arena arena_for(Arena given, uint64_t nbytes):
    """Take ``given``, where it is free and large enough, or a new one, for drives."""
    if given is None or given.in_use or given.nbytes < nbytes or given.pid != getpid():
        given = Arena(nbytes, False)
    given.in_use = True
    return given


@cython.no_gc_clear
cdef class Borrowed:
    """The first ``nbytes`` of an arena as a writable buffer; calls ``give_back(arena)`` when nobody uses it any more."""

    cdef Arena arena
    cdef object give_back
    cdef readonly uint64_t nbytes

    def __cinit__(self, Arena arena not None, uint64_t nbytes, give_back):
        if nbytes > arena.nbytes:
            raise ValueError("the arena is too small")
        self.arena = arena
        self.nbytes = nbytes
        self.give_back = give_back

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.arena.data, <Py_ssize_t>self.nbytes, 0, flags)

    def __dealloc__(self):
        if self.give_back is not None:
            self.give_back(self.arena)
