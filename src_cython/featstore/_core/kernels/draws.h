/* Randomness and draws of neighbour sampling: k positions of a list, keyed by who draws them, several lists at once. */
#ifndef FEATSTORE_DRAWS_H
#define FEATSTORE_DRAWS_H

#include <stdint.h>
#include "bits.h"
#include "vectors.h"

#define FS_INLINE static inline __attribute__((always_inline))
#define FS_RARE(condition) __builtin_expect(!!(condition), 0)

/* ---------------------------------------------------------------- randomness
 * fs_absorb(key, x) is output number x of the SplitMix64 generator whose state is key: a bijection in either argument. Keys are
 * chained: seed, epoch, batch, hop, node, draw. */

#define FS_GOLDEN ((uint64_t)0x9E3779B97F4A7C15)

FS_INLINE uint64_t fs_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

FS_INLINE uint64_t fs_absorb(uint64_t key, uint64_t x)
{
    return fs_mix(key + FS_GOLDEN * (x + 1));
}

/* ---------------------------------------------------------------- draws
 * Floyd's method: draw i (0 … k-1) takes t in [0, d-k+i], or d-k+i itself if t is already drawn; every subset of size k is
 * equally likely. With replacement, draw i takes t in [0, d). Drawn positions come out ascending. */

enum {
    FS_LANES = 8,         /* destinations drawn for at once */
    FS_LANE_DRAWS = 64,   /* largest fan-out drawn in lanes */
    FS_NETWORK = 543      /* comparators that sort FS_LANE_DRAWS values */
};

/* Batcher's merge exchange (Knuth, TAOCP 3, 5.2.2 M): the comparators that sort n values, n <= FS_LANE_DRAWS. */
int fs_network(int n, uint8_t (*pairs)[2]);

typedef uint32_t fs_u32s __attribute__((vector_size(4 * FS_LANES)));
typedef void (*fs_draw_lanes_fn)(const uint64_t *, const uint32_t *, int, int, uint8_t (*)[2], int, fs_u32s *);

/* The widest form up to `level` (0 plain, 1 AVX2, 2 AVX-512) that this processor has; all draw the same. */
fs_draw_lanes_fn fs_choose_draw_lanes(int level);

/* int64 words of scratch that fs_draw_one needs for k draws: a hash set of 2k … 4k entries, or k words to sort by. */
FS_INLINE int64_t fs_draw_scratch(int64_t k)
{
    int64_t size = 1;
    while (size < 2 * k)
        size *= 2;
    return size;
}

/* k draws for one destination, of any degree and any k. Needs scratch only where k > FS_LANE_DRAWS. */
void fs_draw_one(uint64_t key, int64_t degree, int64_t k, int replace, int64_t *out, int64_t *scratch);

/* Sort n values below `bound` by bytes, lowest first; `spare` has room for n. */
void fs_radix_sort(int64_t *values, int64_t *spare, int64_t n, uint64_t bound);

#endif
