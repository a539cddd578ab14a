/* Pairs of numbers: records divided among buckets by a range of one of their numbers, and keys sorted by radix. */
#ifndef FEATSTORE_PAIRS_H
#define FEATSTORE_PAIRS_H

#include <stdint.h>

/* Where the number lies in records of 4-byte words, and what the buckets have of it: width numbers each, from low on. */
typedef struct {
    const uint32_t *records;
    int64_t n;
    int64_t words; /* of a record: 2 to 6 */
    int64_t at;    /* the number's first word */
    int64_t wide;  /* whether it has two of them */
    int64_t low;
    int64_t width;
    int64_t n_buckets; /* at most 65536 */
} fs_pairs;

/* Write each record's bucket, and where each bucket ends when records are put in their order. Returns the first record whose
 * number no bucket has, or -1. */
int64_t fs_bucket_pairs(const fs_pairs *pairs, uint16_t *bucket, int64_t *ends);

/* Write the records by their buckets, those of a bucket in their order. The ends become the begins. */
void fs_move_pairs(const fs_pairs *pairs, const uint16_t *bucket, int64_t *ends, uint32_t *out);

/* Sort keys stably by their bits from low up to high, through spare, which is as long; returns where the result is. */
uint64_t *fs_sort_keys(uint64_t *keys, uint64_t *spare, uint64_t n, int low, int high);

#endif
