"""The C of checksums (``kernels/xxh3.c``) as the modules that use it see it: declared once."""

from libc.stdint cimport uint8_t, uint64_t

cdef extern from "kernels/xxh3.h" nogil:
    ctypedef struct fs_secret:
        pass
    ctypedef uint64_t (*fs_xxh3_fn)(const uint8_t *, size_t, const fs_secret *) noexcept nogil
    void fs_secret_init(fs_secret *secret, uint64_t seed)
    fs_xxh3_fn fs_xxh3_variant(int level)
    fs_xxh3_fn fs_xxh3_best()
    uint64_t fs_xxh3_short(const uint8_t *data, size_t len, uint64_t seed)
    uint64_t fs_poly61(const uint8_t *data, size_t len, uint64_t point)
    const uint64_t FS_POLY_PRIME
    enum:
        FS_XXH_SHORT
