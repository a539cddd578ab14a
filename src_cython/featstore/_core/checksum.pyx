"""XXH3-64 of 4 KiB pages, a buffer at a time."""

from libc.stdint cimport uint8_t, uint64_t

from featstore._core.xxh3 cimport fs_secret, fs_secret_init, fs_xxh3_best, fs_xxh3_fn, fs_xxh3_variant

cdef size_t PAGE_BYTES = 4096


def page_sums(const uint8_t[::1] data not None, uint64_t seed, uint64_t[::1] out not None, int level=-1):
    """Write the xxh3_64 of every 4 KiB page of ``data`` to ``out``; ``level`` picks an instruction set (tests)."""
    cdef size_t n = data.shape[0] // PAGE_BYTES
    cdef size_t i
    cdef fs_secret secret
    cdef fs_xxh3_fn fn = fs_xxh3_best() if level < 0 else fs_xxh3_variant(level)
    if fn == NULL:
        raise ValueError(f"this machine has no instruction set {level}")
    if <size_t>data.shape[0] != n * PAGE_BYTES or <size_t>out.shape[0] != n:
        raise ValueError("data must be whole pages of 4096 bytes, and out one sum a page")
    if n == 0:
        return
    cdef const uint8_t *base = &data[0]
    cdef uint64_t *sums = &out[0]
    with nogil:
        fs_secret_init(&secret, seed)
        for i in range(n):
            sums[i] = fn(base + i * PAGE_BYTES, PAGE_BYTES, &secret)
