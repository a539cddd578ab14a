#include "rowcopy.h"

#include <stdatomic.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FS_STREAM_MIN_BYTES (4 << 20) /* a smaller destination stays in cache, where its reader wants it */
#define FS_AHEAD_BYTES 512

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

fs_stream_fn fs_choose_stream(const uint8_t *dst, uint64_t row_bytes, uint64_t n_bytes) {
#if defined(__x86_64__)
    if (n_bytes >= FS_STREAM_MIN_BYTES && row_bytes % 64 == 0 && (uintptr_t)dst % 64 == 0) {
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f")) return fs_stream_row_avx512;
        if (__builtin_cpu_supports("avx2")) return fs_stream_row_avx2;
    }
#endif
    return NULL;
}

#define FS_PIECE_BYTES (1 << 20)
#define FS_LEAST_TIMED (256 << 10)
#define FS_WIDTHS 24 /* widths that costs are kept for: powers of two */
#define FS_TRIALS 4  /* of each way at first */
#define FS_RETRY 64  /* pieces until another way is tried */
static _Atomic uint32_t fs_way_cost[2][FS_WIDTHS][FS_WAYS]; /* picoseconds a byte; 0: not known */
static _Atomic uint32_t fs_way_turn[2][FS_WIDTHS];

static inline int fs_width_class(uint64_t row_bytes) {
    int bits = row_bytes ? 63 - __builtin_clzll(row_bytes) : 0;
    return bits < FS_WIDTHS ? bits : FS_WIDTHS - 1;
}

uint32_t fs_known_cost(int past_cache, uint64_t row_bytes, int way) {
    return fs_way_cost[past_cache][fs_width_class(row_bytes)][way];
}

static inline int fs_n_ways(fs_stream_fn stream) {
#if defined(__x86_64__)
    if (stream == fs_stream_row_avx512) return 4;
#endif
    (void)stream;
    return 2;
}

static inline int fs_best_way(const _Atomic uint32_t *costs, int n_ways) {
    int best = 0;
    uint32_t least = UINT32_MAX;
    for (int way = 0; way < n_ways; way++) {
        uint32_t cost = atomic_load_explicit(&costs[way], memory_order_relaxed);
        if (cost && cost < least) least = cost, best = way;
    }
    return best;
}

static inline int fs_next_way(const _Atomic uint32_t *costs, _Atomic uint32_t *turns, int n_ways) {
    uint32_t turn = atomic_fetch_add_explicit(turns, 1, memory_order_relaxed);
    if (turn < FS_TRIALS * (uint32_t)n_ways) return (int)(turn % (uint32_t)n_ways);
    if (turn % FS_RETRY == 0) return (int)(turn / FS_RETRY % (uint32_t)n_ways);
    return fs_best_way(costs, n_ways);
}

/* Quick to believe a better cost, slow to believe a worse one: a piece during which the thread was put aside says nothing. */
static inline void fs_way_took(_Atomic uint32_t *cost, uint64_t nanoseconds, uint64_t n_bytes) {
    uint64_t found = nanoseconds * 1000 / n_bytes + 1;
    uint32_t known = atomic_load_explicit(cost, memory_order_relaxed);
    if (found > UINT32_MAX / 2) found = UINT32_MAX / 2;
    if (known && found > known) found = known + (found - known) / 16;
    atomic_store_explicit(cost, (uint32_t)found, memory_order_relaxed);
}

__attribute__((always_inline)) static inline void fs_prefetch_row(const uint8_t *row, uint64_t row_bytes, const int into_second) {
    uint64_t ahead = row_bytes < FS_AHEAD_BYTES ? row_bytes : FS_AHEAD_BYTES; /* the hardware follows a long row by itself */
    for (uint64_t b = 0; b < ahead; b += 64) {
        if (into_second) __builtin_prefetch(row + b, 0, 2);
        else __builtin_prefetch(row + b, 0, 0);
    }
}

__attribute__((always_inline)) static inline void fs_copy_rows(const fs_copy *c, int64_t begin, int64_t end, fs_stream_fn stream,
                                                               const int into_second, const int64_t ahead) {
    const uint64_t r = c->row_bytes;
    for (int64_t i = begin; i < end && i < begin + ahead; i++) fs_prefetch_row(c->src + fs_index(c->src32, c->src64, i) * r, r, into_second);
    for (int64_t i = begin; i < end; i++) {
        if (i + ahead < end) fs_prefetch_row(c->src + fs_index(c->src32, c->src64, i + ahead) * r, r, into_second);
        const uint8_t *src = c->src + fs_index(c->src32, c->src64, i) * r;
        uint8_t *dst = c->dst + fs_index(c->dst32, c->dst64, i) * r;
        if (stream) {
            stream(dst, src, r);
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
    if (stream) _mm_sfence();
#endif
}

static void fs_copy_way(const fs_copy *c, int64_t begin, int64_t end, int way) {
    fs_stream_fn stream = c->stream;
#if defined(__x86_64__)
    if (way & 2) stream = fs_stream_row_avx2;
#endif
    if (way & 1) fs_copy_rows(c, begin, end, stream, 1, 32);
    else fs_copy_rows(c, begin, end, stream, 0, 12);
}

void fs_copy_range(void *context, int64_t begin, int64_t end) {
    const fs_copy *c = (const fs_copy *)context;
    const int streams = c->stream != NULL, width = fs_width_class(c->row_bytes), n_ways = fs_n_ways(c->stream);
    _Atomic uint32_t *costs = fs_way_cost[streams][width];
    const int64_t piece = FS_PIECE_BYTES / (int64_t)c->row_bytes + 1;
    while (begin < end) {
        const int64_t stop = end - begin < piece + piece / 2 ? end : begin + piece;
        const uint64_t n_bytes = (uint64_t)(stop - begin) * c->row_bytes;
        if (n_bytes < FS_LEAST_TIMED) {
            fs_copy_way(c, begin, stop, fs_best_way(costs, n_ways));
        } else {
            const int way = fs_next_way(costs, &fs_way_turn[streams][width], n_ways);
            const uint64_t before = fs_nanoseconds();
            fs_copy_way(c, begin, stop, way);
            fs_way_took(&costs[way], fs_nanoseconds() - before, n_bytes);
        }
        begin = stop;
    }
}
