"""Descriptors that close their file with their last reference: Ctrl-C between two bytecodes leaves none open.

In Python an interrupt may strike between ``os.open`` and the assignment of its number, which nobody can close then. Here the file
has an owner before it is open, no bytecode lies between, and what drops the owner runs no bytecode, either.
"""

import os

from posix.unistd cimport close as c_close


cdef class _Owner:
    """An open file, closed when this dies."""

    cdef int fd

    def __cinit__(self):
        self.fd = -1

    def __dealloc__(self):
        if self.fd >= 0:
            c_close(self.fd)


class Descriptor(int):
    """The number of an open file, which :func:`close` closes, or the end of the last reference to this object."""


cdef object _owned(_Owner owner):
    found = Descriptor(owner.fd)
    found._owner = owner
    return found


cdef int take(fd) except? -1:
    """Take an open file over from its descriptor, which no longer closes it; -1 if it is closed. Any other int is what it is."""
    cdef _Owner owner
    cdef int number
    if not isinstance(fd, Descriptor):
        return fd
    owner = fd._owner
    number, owner.fd = owner.fd, -1
    return number


def close(fd):
    """Close a Descriptor's file; nothing if it is closed. Any other int is closed as by ``os.close``.

    OSError, without a name, if a delayed write failed; it is closed then, too.
    """
    cdef int number = take(fd)
    if number >= 0 or not isinstance(fd, Descriptor):
        os.close(number)


def open_fd(path, int flags, int mode=0o777, *, dir_fd=None):
    """Open a file as ``os.open`` does, which see for arguments and errors; return its Descriptor."""
    cdef _Owner owner = _Owner()
    owner.fd = os.open(path, flags, mode, dir_fd=dir_fd)
    return _owned(owner)


def dup_fd(int fd):
    """Duplicate a descriptor as ``os.dup`` does; return the Descriptor of the duplicate."""
    cdef _Owner owner = _Owner()
    owner.fd = os.dup(fd)
    return _owned(owner)


def memory_fd(str name):
    """Make an anonymous file in memory, as ``os.memfd_create`` does; return its Descriptor."""
    cdef _Owner owner = _Owner()
    owner.fd = os.memfd_create(name, os.MFD_CLOEXEC)
    return _owned(owner)
