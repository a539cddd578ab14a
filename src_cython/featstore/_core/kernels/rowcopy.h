/* Copy rows between two arrays of rows, each side direct or through an index. */
#ifndef FEATSTORE_ROWCOPY_H
#define FEATSTORE_ROWCOPY_H

#include <stdint.h>
#include <string.h>
#include <time.h>

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

/* How to write rows past the cache; NULL where the rows, the destination or the processor are not fit for it. */
fs_stream_fn fs_choose_stream(const uint8_t *dst, uint64_t row_bytes, uint64_t n_bytes);

/* Ways to copy that differ from processor to processor: how far ahead rows are fetched and into which caches, and how wide stores
 * are. On an AMD EPYC fetching past the caches, 12 rows ahead, was best; on an Intel Xeon fetching into the second level, 32 ahead,
 * copies twice as fast. So pieces of large copies are timed as they are done: each way a few times at first, later the best one,
 * with another one now and then. Costs are kept by the width of rows; a race loses a sample, no more. */
enum { FS_WAYS = 4 };

/* What a way is known to cost, in picoseconds a byte; 0: not known. */
uint32_t fs_known_cost(int past_cache, uint64_t row_bytes, int way);

static inline uint64_t fs_nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void fs_copy_range(void *context, int64_t begin, int64_t end);

#endif
