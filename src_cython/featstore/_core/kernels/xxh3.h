/* XXH3-64 of 4 KiB pages, for checksums without a Python call a page, and of names.
 *
 * Written from the published specification of the algorithm; tests compare it with the xxhash package. The secret is derived
 * from the seed once a file. SIMD is picked at run time, so one build serves every x86-64; other machines use plain C.
 */
#ifndef FEATSTORE_XXH3_H
#define FEATSTORE_XXH3_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FS_XXH_SECRET_BYTES 192

typedef struct {
    uint8_t bytes[FS_XXH_SECRET_BYTES]; /* unaligned: it lives in Python objects, which the allocator aligns to 16 */
} fs_secret;

static inline uint64_t fs_read64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap64(v);
#endif
    return v;
}

void fs_secret_init(fs_secret *secret, uint64_t seed);

/* Of inputs over 240 bytes. */
typedef uint64_t (*fs_xxh3_fn)(const uint8_t *, size_t, const fs_secret *);

/* 0 = plain C, 1 = AVX2, 2 = AVX-512; NULL where this machine lacks it. */
fs_xxh3_fn fs_xxh3_variant(int level);

fs_xxh3_fn fs_xxh3_best(void);

#define FS_XXH_SHORT 240

/* Of inputs of at most FS_XXH_SHORT bytes, whose secret is the default one whatever the seed. */
uint64_t fs_xxh3_short(const uint8_t *data, size_t len, uint64_t seed);

#define FS_POLY_PRIME (((uint64_t)1 << 61) - 1)

/* The value at a point, below the prime 2^61 - 1, of the polynomial modulo it of len + 1 and the data, 7 bytes a coefficient. */
uint64_t fs_poly61(const uint8_t *data, size_t len, uint64_t point);

#endif
