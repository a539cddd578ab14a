cdef int take(fd) except? -1
