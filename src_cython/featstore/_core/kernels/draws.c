#include "draws.h"

#include <string.h>

/* floor(word * n / 2^64): uniform in [0, n) up to n / 2^64, far below what any test of a sampler can see. */
FS_INLINE uint64_t fs_below(uint64_t word, uint64_t n)
{
    return (uint64_t)(((unsigned __int128)word * n) >> 64);
}

int fs_network(int n, uint8_t (*pairs)[2])
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
        fs_u64s z = key + (uint64_t)(FS_GOLDEN * (uint64_t)(j + 1)); /* fs_mix() */
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

fs_draw_lanes_fn fs_choose_draw_lanes(int level)
{
#if defined(__x86_64__)
    const int vectors = fs_vectors(level);
    if (vectors)
        return vectors == 2 ? fs_draw_lanes_avx512 : fs_draw_lanes_avx2;
#endif
    return fs_draw_lanes_plain;
}

void fs_radix_sort(int64_t *values, int64_t *spare, int64_t n, uint64_t bound)
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

void fs_draw_one(uint64_t key, int64_t degree, int64_t k, int replace, int64_t *out, int64_t *scratch)
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
