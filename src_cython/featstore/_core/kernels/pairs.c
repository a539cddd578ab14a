#include "pairs.h"

#include <string.h>

static inline int64_t number_at(const uint32_t *record, int64_t wide) {
    int64_t number;
    if (!wide)
        return *(const int32_t *)record;
    memcpy(&number, record, sizeof number);
    return number;
}

int64_t fs_bucket_pairs(const fs_pairs *pairs, uint16_t *bucket, int64_t *ends) {
    const uint32_t *at = pairs->records + pairs->at;
    memset(ends, 0, (size_t)pairs->n_buckets * sizeof *ends);
    for (int64_t i = 0; i < pairs->n; i++, at += pairs->words) {
        uint64_t number = (uint64_t)number_at(at, pairs->wide) - (uint64_t)pairs->low, found;
        /* Dividing 32 bits takes less than half the time of 64. */
        if ((number | (uint64_t)pairs->width) >> 32)
            found = number / (uint64_t)pairs->width;
        else
            found = (uint32_t)number / (uint32_t)pairs->width;
        if (found >= (uint64_t)pairs->n_buckets)
            return i;
        bucket[i] = (uint16_t)found;
        ends[found]++;
    }
    for (int64_t b = 1; b < pairs->n_buckets; b++)
        ends[b] += ends[b - 1];
    return -1;
}

static inline void move(const fs_pairs *pairs, const uint16_t *bucket, int64_t *ends, uint32_t *out, int64_t words) {
    for (int64_t i = pairs->n; i-- > 0;)
        memcpy(out + --ends[bucket[i]] * words, pairs->records + i * words, (size_t)words * sizeof *out);
}

void fs_move_pairs(const fs_pairs *pairs, const uint16_t *bucket, int64_t *ends, uint32_t *out) {
    switch (pairs->words) { /* copies of a constant length are no calls */
    case 2:
        move(pairs, bucket, ends, out, 2);
        break;
    case 3:
        move(pairs, bucket, ends, out, 3);
        break;
    case 4:
        move(pairs, bucket, ends, out, 4);
        break;
    case 5:
        move(pairs, bucket, ends, out, 5);
        break;
    default:
        move(pairs, bucket, ends, out, 6);
    }
}

uint64_t *fs_sort_keys(uint64_t *keys, uint64_t *spare, uint64_t n, int low, int high) {
    enum { DIGIT = 11 }; /* bits: the next places of 2048 digits lie in the first-level cache */
    uint64_t next[1 << DIGIT];
    for (int shift = low; shift < high; shift += DIGIT) {
        const uint64_t mask = (1u << (high - shift < DIGIT ? high - shift : DIGIT)) - 1;
        memset(next, 0, sizeof next);
        for (uint64_t i = 0; i < n; i++) next[keys[i] >> shift & mask]++;
        uint64_t total = 0;
        for (int d = 0; d < 1 << DIGIT; d++) {
            uint64_t count = next[d];
            next[d] = total;
            total += count;
        }
        for (uint64_t i = 0; i < n; i++) spare[next[keys[i] >> shift & mask]++] = keys[i];
        uint64_t *sorted = spare;
        spare = keys;
        keys = sorted;
    }
    return keys;
}
