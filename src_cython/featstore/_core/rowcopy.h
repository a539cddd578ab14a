/* Copy rows between two arrays of rows, each side direct or through an index. */
#ifndef FEATSTORE_ROWCOPY_H
#define FEATSTORE_ROWCOPY_H

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FS_STREAM_MIN_BYTES (4 << 20) /* a smaller destination stays in cache, where its reader wants it */
#define FS_AHEAD 12
#define FS_AHEAD_BYTES 512

typedef void (*fs_stream_fn)(uint8_t *dst, const uint8_t *src, uint64_t row_bytes);

typedef struct {
    const uint8_t *src;
    uint8_t *dst;
    const int32_t *src32; /* source rows: 32-bit, or */
    const int64_t *src64; /* 64-bit, or both NULL: in order */
    const int32_t *dst32;
    const int64_t *dst64;
    uint64_t row_bytes;
    fs_stream_fn stream; /* NULL: rows go through the cache */
} fs_copy;

static inline uint64_t fs_index(const int32_t *i32, const int64_t *i64, int64_t i) {
    return i32 ? (uint64_t)i32[i] : i64 ? (uint64_t)i64[i] : (uint64_t)i;
}

static inline void fs_prefetch_row(const uint8_t *row, uint64_t row_bytes) {
    uint64_t ahead = row_bytes < FS_AHEAD_BYTES ? row_bytes : FS_AHEAD_BYTES; /* the hardware follows a long row by itself */
    for (uint64_t b = 0; b < ahead; b += 64) __builtin_prefetch(row + b, 0, 0);
}

#if defined(__x86_64__)
/* Past the cache: the destination is not read first, and what the caller keeps warm is not driven out. Wide stores matter: a line
 * that leaves in four pieces was measured up to a third slower than one that leaves in two or in one. */
__attribute__((target("avx512f"))) static void fs_stream_row_avx512(uint8_t *dst, const uint8_t *src, uint64_t row_bytes) {
    for (uint64_t b = 0; b < row_bytes; b += 64) _mm512_stream_si512((void *)(dst + b), _mm512_loadu_si512((const void *)(src + b)));
}

__attribute__((target("avx2"))) static void fs_stream_row_avx2(uint8_t *dst, const uint8_t *src, uint64_t row_bytes) {
    for (uint64_t b = 0; b < row_bytes; b += 64) {
        __m256i v0 = _mm256_loadu_si256((const __m256i *)(src + b)), v1 = _mm256_loadu_si256((const __m256i *)(src + b + 32));
        _mm256_stream_si256((__m256i *)(dst + b), v0);
        _mm256_stream_si256((__m256i *)(dst + b + 32), v1);
    }
}
#endif

/* How to write rows past the cache; NULL where the rows, the destination or the processor are not fit for it. */
static inline fs_stream_fn fs_choose_stream(const uint8_t *dst, uint64_t row_bytes, uint64_t n_bytes) {
#if defined(__x86_64__)
    if (n_bytes >= FS_STREAM_MIN_BYTES && row_bytes % 64 == 0 && (uintptr_t)dst % 64 == 0) {
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f")) return fs_stream_row_avx512;
        if (__builtin_cpu_supports("avx2")) return fs_stream_row_avx2;
    }
#endif
    return NULL;
}

static void fs_copy_range(void *context, int64_t begin, int64_t end) {
    const fs_copy *c = (const fs_copy *)context;
    const uint64_t r = c->row_bytes;
    for (int64_t i = begin; i < end && i < begin + FS_AHEAD; i++) fs_prefetch_row(c->src + fs_index(c->src32, c->src64, i) * r, r);
    for (int64_t i = begin; i < end; i++) {
        if (i + FS_AHEAD < end) fs_prefetch_row(c->src + fs_index(c->src32, c->src64, i + FS_AHEAD) * r, r);
        const uint8_t *src = c->src + fs_index(c->src32, c->src64, i) * r;
        uint8_t *dst = c->dst + fs_index(c->dst32, c->dst64, i) * r;
        if (c->stream) {
            c->stream(dst, src, r);
            continue;
        }
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
#if defined(__x86_64__)
    if (c->stream) _mm_sfence();
#endif
}

#endif
