/* Randomness and draws of neighbour sampling: k positions of a list, keyed by who draws them, several lists at once. */
#ifndef FEATSTORE_DRAWS_H
#define FEATSTORE_DRAWS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "bits.h"
#include "vectors.h"

#define FS_INLINE static inline __attribute__((always_inline))
#define FS_RARE(condition) __builtin_expect(!!(condition), 0)

/* ---------------------------------------------------------------- randomness
 * fs_absorb(key, x) is output number x of the SplitMix64 generator whose state is key: a bijection in either argument. Keys are
 * chained: seed, epoch, batch, hop, node, draw. */

#define FS_GOLDEN 0x9E3779B97F4A7C15ull

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

/* floor(word * n / 2^64): uniform in [0, n) up to n / 2^64, far below what any test of a sampler can see. */
FS_INLINE uint64_t fs_below(uint64_t word, uint64_t n)
{
    return (uint64_t)(((unsigned __int128)word * n) >> 64);
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
static int fs_network(int n, uint8_t (*pairs)[2])
{
    int count = 0, top = 1;
    if (n < 2)
        return 0;
    while (2 * top < n)
        top *= 2;
    for (int p = top; p > 0; p /= 2) {
        int q = top, r = 0, d = p;
        for (;;) {
            for (int i = 0; i + d < n; i++)
                if ((i & p) == r) {
                    pairs[count][0] = (uint8_t)i;
                    pairs[count++][1] = (uint8_t)(i + d);
                }
            if (q == p)
                break;
            d = q - p;
            q /= 2;
            r = p;
        }
    }
    return count;
}

typedef uint32_t fs_u32s __attribute__((vector_size(4 * FS_LANES)));
typedef uint64_t fs_u64s __attribute__((vector_size(8 * FS_LANES)));

/* k <= FS_LANE_DRAWS draws for each of FS_LANES destinations of degree > k (any degree > 0 with replacement), into x[draw][lane].
 * In vectors, which the compiler splits where the processor's are shorter; no branch depends on what is drawn. */
FS_INLINE void fs_draw_lanes(const uint64_t *key_of, const uint32_t *degree_of, int k, int replace, uint8_t (*network)[2],
                             int n_network, fs_u32s *x)
{
    fs_u64s key;
    fs_u32s degree;
    memcpy(&key, key_of, sizeof key);
    memcpy(&degree, degree_of, sizeof degree);
    for (int j = 0; j < k; j++) {
        const fs_u32s last = degree - (replace ? 1 : (uint32_t)(k - j));
        const fs_u64s n = __builtin_convertvector(last, fs_u64s) + 1;
        fs_u64s z = key + FS_GOLDEN * (uint64_t)(j + 1); /* fs_mix() */
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        z = z ^ (z >> 31);
        /* fs_below() in halves, which vectors can multiply */
        z = ((z >> 32) * n + (((z & 0xFFFFFFFFu) * n) >> 32)) >> 32;
        fs_u32s t = __builtin_convertvector(z, fs_u32s);
        if (!replace) {
            fs_u32s seen = t ^ t;
            for (int i = 0; i < j; i++)
                seen |= (fs_u32s)(x[i] == t);
            t = (seen & last) | (~seen & t);
        }
        x[j] = t;
    }
    for (int c = 0; c < n_network; c++) {
        const fs_u32s a = x[network[c][0]], b = x[network[c][1]];
        const fs_u32s swap = (fs_u32s)(a > b) & (a ^ b);
        x[network[c][0]] = a ^ swap;
        x[network[c][1]] = b ^ swap;
    }
}

typedef void (*fs_draw_lanes_fn)(const uint64_t *, const uint32_t *, int, int, uint8_t (*)[2], int, fs_u32s *);

static void fs_draw_lanes_plain(const uint64_t *key, const uint32_t *degree, int k, int replace, uint8_t (*network)[2],
                                int n_network, fs_u32s *x)
{
    fs_draw_lanes(key, degree, k, replace, network, n_network, x);
}

#if defined(__x86_64__)
FS_AVX2 static void fs_draw_lanes_avx2(const uint64_t *key, const uint32_t *degree, int k, int replace, uint8_t (*network)[2],
                                       int n_network, fs_u32s *x)
{
    fs_draw_lanes(key, degree, k, replace, network, n_network, x);
}

FS_AVX512 static void fs_draw_lanes_avx512(const uint64_t *key, const uint32_t *degree, int k, int replace,
                                           uint8_t (*network)[2], int n_network, fs_u32s *x)
{
    fs_draw_lanes(key, degree, k, replace, network, n_network, x);
}
#endif

/* The widest form up to `level` (0 plain, 1 AVX2, 2 AVX-512) that this processor has; all draw the same. */
static fs_draw_lanes_fn fs_choose_draw_lanes(int level)
{
#if defined(__x86_64__)
    const int vectors = fs_vectors(level);
    if (vectors)
        return vectors == 2 ? fs_draw_lanes_avx512 : fs_draw_lanes_avx2;
#endif
    return fs_draw_lanes_plain;
}

/* Sort n values below `bound` by bytes, lowest first; `spare` has room for n. */
static void fs_radix_sort(int64_t *values, int64_t *spare, int64_t n, uint64_t bound)
{
    int64_t *from = values, *to = spare, *other;
    for (int shift = 0; shift < 64 && (bound - 1) >> shift; shift += 8) {
        int64_t start[257] = {0};
        for (int64_t i = 0; i < n; i++)
            start[((uint64_t)from[i] >> shift & 255) + 1]++;
        for (int b = 0; b < 255; b++)
            start[b + 1] += start[b];
        for (int64_t i = 0; i < n; i++)
            to[start[(uint64_t)from[i] >> shift & 255]++] = from[i];
        other = from;
        from = to;
        to = other;
    }
    if (from != values)
        memcpy(values, from, (size_t)n * sizeof *values);
}

/* int64 words of scratch that fs_draw_one needs for k draws: a hash set of 2k … 4k entries, or k words to sort by. */
FS_INLINE int64_t fs_draw_scratch(int64_t k)
{
    int64_t size = 1;
    while (size < 2 * k)
        size *= 2;
    return size;
}

/* k draws for one destination, of any degree and any k. Needs scratch only where k > FS_LANE_DRAWS. */
static void fs_draw_one(uint64_t key, int64_t degree, int64_t k, int replace, int64_t *out, int64_t *scratch)
{
    if (replace) {
        for (int64_t i = 0; i < k; i++)
            out[i] = (int64_t)fs_below(fs_absorb(key, (uint64_t)i), (uint64_t)degree);
    } else if (k <= FS_LANE_DRAWS) {
        for (int64_t i = 0; i < k; i++) {
            const int64_t last = degree - k + i;
            int64_t t = (int64_t)fs_below(fs_absorb(key, (uint64_t)i), (uint64_t)last + 1);
            int seen = 0;
            for (int64_t m = 0; m < i; m++)
                seen |= out[m] == t;
            out[i] = seen ? last : t;
        }
    } else if (degree / 64 < 2 * k) { /* a bitmap, which also sorts */
        uint64_t *bits = (uint64_t *)scratch;
        int64_t filled = 0;
        const int64_t n_words = degree / 64 + 1;
        memset(bits, 0, (size_t)n_words * sizeof *bits);
        for (int64_t i = 0; i < k; i++) {
            const int64_t last = degree - k + i;
            int64_t t = (int64_t)fs_below(fs_absorb(key, (uint64_t)i), (uint64_t)last + 1);
            if (bits[t / 64] >> (t % 64) & 1)
                t = last;
            bits[t / 64] |= 1ull << (t % 64);
        }
        for (int64_t w = 0; w < n_words; w++)
            for (uint64_t word = bits[w]; word; word &= word - 1)
                out[filled++] = w * 64 + __builtin_ctzll(word);
        return;
    } else { /* a hash set of position + 1 */
        const int64_t size = fs_draw_scratch(k);
        memset(scratch, 0, (size_t)size * sizeof *scratch);
        for (int64_t i = 0; i < k; i++) {
            const int64_t last = degree - k + i;
            int64_t t = (int64_t)fs_below(fs_absorb(key, (uint64_t)i), (uint64_t)last + 1);
            for (;;) {
                uint64_t h = ((uint64_t)t * FS_GOLDEN) >> 20 & (uint64_t)(size - 1);
                while (scratch[h] && scratch[h] != t + 1)
                    h = (h + 1) & (uint64_t)(size - 1);
                if (!scratch[h]) {
                    scratch[h] = t + 1;
                    break;
                }
                t = last; /* never drawn before: all earlier draws are below it */
            }
            out[i] = t;
        }
    }
    if (k > FS_LANE_DRAWS) {
        fs_radix_sort(out, scratch, k, (uint64_t)degree);
        return;
    }
    for (int64_t i = 1; i < k; i++) {
        const int64_t value = out[i];
        int64_t m = i;
        for (; m > 0 && out[m - 1] > value; m--)
            out[m] = out[m - 1];
        out[m] = value;
    }
}

#endif
