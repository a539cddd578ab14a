"""Buffers of node ids, which have 4 or 8 bytes each, as the modules that work on them hold them."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

cimport cython


@cython.final
cdef class Ids:
    """A buffer of ids, or of other words as wide, that is held as long as this lives.

    Its C sees ``data``, ``n`` (how many ids) and ``wide`` (whether they have 8 bytes).

    Parameters
    ----------
    buffer : contiguous buffer of such ids, or of their bytes
    id_bytes : {4, 8, 0}
        0: as many as an item of the buffer has.
    writable : bool
        It is to be written to.
    """

    def __cinit__(self, buffer, int id_bytes, bint writable=False):
        PyObject_GetBuffer(buffer, &self.view, PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        id_bytes = id_bytes or self.view.itemsize
        check_width(id_bytes)
        if self.view.itemsize != id_bytes and self.view.itemsize != 1:
            raise ValueError(f"ids of {id_bytes} bytes expected, not of {self.view.itemsize}")
        if self.view.len % id_bytes:
            raise ValueError(f"{self.view.len} bytes are no whole number of ids of {id_bytes} bytes")
        self.data, self.n, self.wide = self.view.buf, self.view.len // id_bytes, id_bytes == 8

    def __dealloc__(self):
        PyBuffer_Release(&self.view)  # does nothing where none was acquired
