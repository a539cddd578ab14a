/* Copy rows between two arrays of rows, each side direct or through an index. */
#ifndef FEATSTORE_ROWCOPY_H
#define FEATSTORE_ROWCOPY_H

#include <stdint.h>
#include <string.h>

/* Measured: the C library's memcpy behind a prefetch of a row's first lines is as fast as non-temporal stores, and simpler. */
#define FS_AHEAD 12
#define FS_AHEAD_BYTES 512

typedef struct {
    const uint8_t *src;
    uint8_t *dst;
    const int32_t *src32; /* source rows: 32-bit, or */
    const int64_t *src64; /* 64-bit, or both NULL: in order */
    const int32_t *dst32;
    const int64_t *dst64;
    uint64_t row_bytes;
} fs_copy;

static inline uint64_t fs_index(const int32_t *i32, const int64_t *i64, int64_t i) {
    return i32 ? (uint64_t)i32[i] : i64 ? (uint64_t)i64[i] : (uint64_t)i;
}

static inline void fs_prefetch_row(const uint8_t *row, uint64_t row_bytes) {
    uint64_t ahead = row_bytes < FS_AHEAD_BYTES ? row_bytes : FS_AHEAD_BYTES; /* the hardware follows a long row by itself */
    for (uint64_t b = 0; b < ahead; b += 64) __builtin_prefetch(row + b, 0, 0);
}

static void fs_copy_range(void *context, int64_t begin, int64_t end) {
    const fs_copy *c = (const fs_copy *)context;
    const uint64_t r = c->row_bytes;
    for (int64_t i = begin; i < end && i < begin + FS_AHEAD; i++) fs_prefetch_row(c->src + fs_index(c->src32, c->src64, i) * r, r);
    for (int64_t i = begin; i < end; i++) {
        if (i + FS_AHEAD < end) fs_prefetch_row(c->src + fs_index(c->src32, c->src64, i + FS_AHEAD) * r, r);
        const uint8_t *src = c->src + fs_index(c->src32, c->src64, i) * r;
        uint8_t *dst = c->dst + fs_index(c->dst32, c->dst64, i) * r;
        switch (r) {
        case 1: *dst = *src; break;
        case 2: memcpy(dst, src, 2); break;
        case 4: memcpy(dst, src, 4); break;
        case 8: memcpy(dst, src, 8); break;
        case 256: memcpy(dst, src, 256); break;
        case 512: memcpy(dst, src, 512); break;
        default: memcpy(dst, src, r);
        }
    }
}

#endif
