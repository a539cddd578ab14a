#include "xxh3.h"

#include <stddef.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FS_XXH_STRIPE 64
#define FS_XXH_BLOCK 1024 /* (192 - 64) / 8 stripes of 64 bytes */

static const uint8_t fs_xxh_default_secret[FS_XXH_SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
#define FS_P32_1 0x9E3779B1U
#define FS_P32_2 0x85EBCA77U
#define FS_P32_3 0xC2B2AE3DU
#define FS_P64_1 0x9E3779B185EBCA87ULL
#define FS_P64_2 0xC2B2AE3D27D4EB4FULL
#define FS_P64_3 0x165667B19E3779F9ULL
#define FS_P64_4 0x85EBCA77C2B2AE63ULL
#define FS_P64_5 0x27D4EB2F165667C5ULL

void fs_secret_init(fs_secret *secret, uint64_t seed) {
    for (int i = 0; i < FS_XXH_SECRET_BYTES; i += 16) {
        uint64_t lo = fs_read64(fs_xxh_default_secret + i) + seed;
        uint64_t hi = fs_read64(fs_xxh_default_secret + i + 8) - seed;
        for (int b = 0; b < 8; b++) {
            secret->bytes[i + b] = (uint8_t)(lo >> (8 * b));
            secret->bytes[i + 8 + b] = (uint8_t)(hi >> (8 * b));
        }
    }
}

static inline uint64_t fs_mul_fold(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint32_t fs_read32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap32(v);
#endif
    return v;
}

static inline uint64_t fs_xxh3_avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= 0x165667919E3779F9ULL;
    return h ^ (h >> 32);
}

static inline uint64_t fs_xxh64_avalanche(uint64_t h) {
    h ^= h >> 33;
    h *= FS_P64_2;
    h ^= h >> 29;
    h *= FS_P64_3;
    return h ^ (h >> 32);
}

static inline uint64_t fs_mix16(const uint8_t *data, const uint8_t *key, uint64_t seed) {
    return fs_mul_fold(fs_read64(data) ^ (fs_read64(key) + seed), fs_read64(data + 8) ^ (fs_read64(key + 8) - seed));
}

static inline uint64_t fs_rotl64(uint64_t v, int bits) { return (v << bits) | (v >> (64 - bits)); }

uint64_t fs_xxh3_short(const uint8_t *data, size_t len, uint64_t seed) {
    const uint8_t *key = fs_xxh_default_secret;
    uint64_t acc = (uint64_t)len * FS_P64_1;
    if (len > 128) {
        for (size_t i = 0; i < 8; i++) acc += fs_mix16(data + 16 * i, key + 16 * i, seed);
        acc = fs_xxh3_avalanche(acc);
        for (size_t i = 8; i < len / 16; i++) acc += fs_mix16(data + 16 * i, key + 16 * (i - 8) + 3, seed);
        return fs_xxh3_avalanche(acc + fs_mix16(data + len - 16, key + 136 - 17, seed));
    }
    if (len > 16) {
        for (size_t i = 0; i < 4 && len > 32 * i; i++) {
            acc += fs_mix16(data + 16 * i, key + 32 * i, seed);
            acc += fs_mix16(data + len - 16 * (i + 1), key + 32 * i + 16, seed);
        }
        return fs_xxh3_avalanche(acc);
    }
    if (len > 8) {
        uint64_t low = fs_read64(data) ^ ((fs_read64(key + 24) ^ fs_read64(key + 32)) + seed);
        uint64_t high = fs_read64(data + len - 8) ^ ((fs_read64(key + 40) ^ fs_read64(key + 48)) - seed);
        return fs_xxh3_avalanche(len + __builtin_bswap64(low) + high + fs_mul_fold(low, high));
    }
    if (len >= 4) {
        seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t both = fs_read32(data + len - 4) + ((uint64_t)fs_read32(data) << 32);
        uint64_t h = both ^ ((fs_read64(key + 8) ^ fs_read64(key + 16)) - seed);
        h ^= fs_rotl64(h, 49) ^ fs_rotl64(h, 24);
        h *= 0x9FB21C651E98DF25ULL;
        h ^= (h >> 35) + len;
        h *= 0x9FB21C651E98DF25ULL;
        return h ^ (h >> 28);
    }
    if (len > 0) {
        uint32_t all = ((uint32_t)data[0] << 16) | ((uint32_t)data[len >> 1] << 24) | data[len - 1] | ((uint32_t)len << 8);
        return fs_xxh64_avalanche(all ^ ((uint64_t)(fs_read32(key) ^ fs_read32(key + 4)) + seed));
    }
    return fs_xxh64_avalanche(seed ^ fs_read64(key + 56) ^ fs_read64(key + 64));
}

static inline uint64_t fs_xxh_finish(const uint64_t *acc, const uint8_t *secret, size_t len) {
    uint64_t h = (uint64_t)len * FS_P64_1;
    for (int i = 0; i < 4; i++)
        h += fs_mul_fold(acc[2 * i] ^ fs_read64(secret + 11 + 16 * i), acc[2 * i + 1] ^ fs_read64(secret + 11 + 16 * i + 8));
    return fs_xxh3_avalanche(h);
}

#define FS_XXH_ACC_INIT {FS_P32_3, FS_P64_1, FS_P64_2, FS_P64_3, FS_P64_4, FS_P32_2, FS_P64_5, FS_P32_1}

/* One body for every instruction set: STRIPE(input, key) folds in 64 bytes, SCRAMBLE(key) ends a block of 1,024. */
#define FS_XXH_BODY(STRIPE, SCRAMBLE)                                                    \
    const uint8_t *key = secret->bytes;                                                  \
    size_t n_blocks = (len - 1) / FS_XXH_BLOCK;                                          \
    for (size_t b = 0; b < n_blocks; b++) {                                              \
        for (int s = 0; s < 16; s++) STRIPE(data + b * FS_XXH_BLOCK + 64 * s, key + 8 * s) \
        SCRAMBLE(key + FS_XXH_SECRET_BYTES - FS_XXH_STRIPE)                              \
    }                                                                                    \
    size_t n_left = (len - 1 - n_blocks * FS_XXH_BLOCK) / FS_XXH_STRIPE;                 \
    for (size_t s = 0; s < n_left; s++) STRIPE(data + n_blocks * FS_XXH_BLOCK + 64 * s, key + 8 * s) \
    STRIPE(data + len - FS_XXH_STRIPE, key + FS_XXH_SECRET_BYTES - FS_XXH_STRIPE - 7)

static uint64_t fs_xxh3_plain(const uint8_t *data, size_t len, const fs_secret *secret) {
    uint64_t acc[8] = FS_XXH_ACC_INIT;
#define FS_STRIPE(in, k)                                        \
    for (int i = 0; i < 8; i++) {                               \
        uint64_t value = fs_read64((in) + 8 * i);               \
        uint64_t mixed = value ^ fs_read64((k) + 8 * i);        \
        acc[i ^ 1] += value;                                    \
        acc[i] += (uint64_t)(uint32_t)mixed * (mixed >> 32);    \
    }
#define FS_SCRAMBLE(k) \
    for (int i = 0; i < 8; i++) acc[i] = ((acc[i] ^ (acc[i] >> 47)) ^ fs_read64((k) + 8 * i)) * FS_P32_1;
    FS_XXH_BODY(FS_STRIPE, FS_SCRAMBLE)
#undef FS_STRIPE
#undef FS_SCRAMBLE
    return fs_xxh_finish(acc, key, len);
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) static uint64_t fs_xxh3_avx2(const uint8_t *data, size_t len, const fs_secret *secret) {
    static const uint64_t init[8] = FS_XXH_ACC_INIT;
    const __m256i prime = _mm256_set1_epi32((int)FS_P32_1);
    __m256i acc[2] = {_mm256_loadu_si256((const __m256i *)init), _mm256_loadu_si256((const __m256i *)(init + 4))};
#define FS_STRIPE(in, k)                                                                            \
    for (int i = 0; i < 2; i++) {                                                                   \
        __m256i value = _mm256_loadu_si256((const __m256i *)((in) + 32 * i));                       \
        __m256i mixed = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)((k) + 32 * i))); \
        __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));                    \
        acc[i] = _mm256_add_epi64(product, _mm256_add_epi64(acc[i], _mm256_shuffle_epi32(value, 0x4E))); \
    }
#define FS_SCRAMBLE(k)                                                                              \
    for (int i = 0; i < 2; i++) {                                                                   \
        __m256i x = _mm256_xor_si256(acc[i], _mm256_srli_epi64(acc[i], 47));                        \
        x = _mm256_xor_si256(x, _mm256_loadu_si256((const __m256i *)((k) + 32 * i)));               \
        __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);                           \
        acc[i] = _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));         \
    }
    FS_XXH_BODY(FS_STRIPE, FS_SCRAMBLE)
#undef FS_STRIPE
#undef FS_SCRAMBLE
    uint64_t out[8];
    _mm256_storeu_si256((__m256i *)out, acc[0]);
    _mm256_storeu_si256((__m256i *)(out + 4), acc[1]);
    return fs_xxh_finish(out, key, len);
}

__attribute__((target("avx512f"))) static uint64_t fs_xxh3_avx512(const uint8_t *data, size_t len, const fs_secret *secret) {
    static const uint64_t init[8] = FS_XXH_ACC_INIT;
    const __m512i prime = _mm512_set1_epi32((int)FS_P32_1);
    __m512i acc = _mm512_loadu_si512(init);
#define FS_STRIPE(in, k)                                                                            \
    {                                                                                               \
        __m512i value = _mm512_loadu_si512(in);                                                     \
        __m512i mixed = _mm512_xor_si512(value, _mm512_loadu_si512(k));                             \
        __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));                    \
        acc = _mm512_add_epi64(product, _mm512_add_epi64(acc, _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)0x4E))); \
    }
#define FS_SCRAMBLE(k)                                                                              \
    {                                                                                               \
        __m512i x = _mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47));                              \
        x = _mm512_xor_si512(x, _mm512_loadu_si512(k));                                             \
        __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), prime);                           \
        acc = _mm512_add_epi64(_mm512_mul_epu32(x, prime), _mm512_slli_epi64(high, 32));            \
    }
    FS_XXH_BODY(FS_STRIPE, FS_SCRAMBLE)
#undef FS_STRIPE
#undef FS_SCRAMBLE
    uint64_t out[8];
    _mm512_storeu_si512(out, acc);
    return fs_xxh_finish(out, key, len);
}
#endif

fs_xxh3_fn fs_xxh3_variant(int level) {
    if (level == 0) return fs_xxh3_plain;
#if defined(__x86_64__)
    if (level == 1 && __builtin_cpu_supports("avx2")) return fs_xxh3_avx2;
    if (level == 2 && __builtin_cpu_supports("avx512f")) return fs_xxh3_avx512;
#endif
    return NULL;
}

fs_xxh3_fn fs_xxh3_best(void) {
    for (int level = 2; level > 0; level--) {
        fs_xxh3_fn fn = fs_xxh3_variant(level);
        if (fn) return fn;
    }
    return fs_xxh3_plain;
}

static inline uint64_t fs_poly_step(uint64_t h, uint64_t point, uint64_t more) {
    unsigned __int128 product = (unsigned __int128)h * point + more;
    uint64_t folded = ((uint64_t)product & FS_POLY_PRIME) + (uint64_t)(product >> 61);
    return (folded & FS_POLY_PRIME) + (folded >> 61); /* below 2^61 + 2 */
}

uint64_t fs_poly61(const uint8_t *data, size_t len, uint64_t point) {
    uint64_t h = (uint64_t)len + 1;
    size_t at = 0;
    for (; at + 8 <= len; at += 7) h = fs_poly_step(h, point, fs_read64(data + at) & (((uint64_t)1 << 56) - 1));
    if (at < len) {
        uint8_t rest[8] = {0};
        size_t n = len - at < 7 ? len - at : 7;
        memcpy(rest, data + at, n);
        h = fs_poly_step(h, point, fs_read64(rest));
    }
    return h >= FS_POLY_PRIME ? h - FS_POLY_PRIME : h;
}
