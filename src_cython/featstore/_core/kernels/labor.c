#include "labor.h"

#include <string.h>

FS_INLINE fs_key fs_key_of(uint64_t word)
{
    const fs_key key = {word, (uint32_t)word, (uint32_t)(word >> 32), (uint32_t)fs_absorb(word, 0)};
    return key;
}

void fs_set_numbers(fs_numbers *numbers, uint64_t early, uint64_t late, uint64_t phase, uint32_t turn)
{
    numbers->early = fs_key_of(early);
    numbers->late = fs_key_of(late);
    numbers->phase = fs_key_of(phase);
    numbers->turn = turn;
    numbers->changes = early != late;
}

/* Arguments of a loop that is compiled twice: without places (NULL, where it is inlined), and with them. */
#define FS_TAKE                                                                                                      \
    const void *ids, int wide, int64_t n, const fs_numbers *numbers, uint32_t last, void *out, int64_t first, int64_t *places

/* Both forms of a loop. */
#define FS_TAKE_FORMS(name, loop, target)                                                                                  \
    target static int64_t name(const void *ids, int wide, int64_t n, const fs_numbers *numbers, uint32_t last, void *out)  \
    {                                                                                                                      \
        return loop(ids, wide, n, numbers, last, out, 0, NULL);                                                            \
    }                                                                                                                      \
    target static int64_t name##_places(FS_TAKE)                                                                           \
    {                                                                                                                      \
        return loop(ids, wide, n, numbers, last, out, first, places);                                                      \
    }

/* The numbers of ids, in place: lanes of uint32_t. */
#define FS_NUMBERS(x)                                                                                      \
    if (changes) {                                                                                         \
        __typeof__(x) y = x;                                                                               \
        FS_HASH(y, phase.a, phase.b, phase.c);                                                             \
        const __typeof__(x) turned = (__typeof__(x))(y >= turn);                                           \
        FS_HASH(x, early.a + (turned & more_a), early.b + (turned & more_b), early.c + (turned & more_c)); \
    } else {                                                                                               \
        FS_HASH(x, early.a, early.b, early.c);                                                             \
    }

/* What the loops keep in registers. */
#define FS_KEYS                                                                            \
    const fs_key early = numbers->early, phase = numbers->phase;                           \
    const uint32_t turn = numbers->turn, more_a = numbers->late.a - early.a;               \
    const uint32_t more_b = numbers->late.b - early.b, more_c = numbers->late.c - early.c; \
    const int changes = numbers->changes;                                                  \
    int64_t count = 0, i = 0

/* One id at a time: the ends of lists, and ids of 8 bytes. */
FS_INLINE int64_t fs_take_each(FS_TAKE, int64_t i, int64_t count)
{
    for (; i < n; i++) {
        const int64_t id = fs_record(ids, wide, i);
        if (wide)
            ((int64_t *)out)[count] = id;
        else
            ((int32_t *)out)[count] = (int32_t)id;
        if (places)
            places[count] = first + i;
        count += fs_number_of_source(numbers, (uint64_t)id) <= last;
    }
    return count;
}

FS_INLINE int64_t fs_take_lanes(FS_TAKE)
{
    FS_KEYS;
    typedef uint32_t lanes __attribute__((vector_size(16)));
    for (; !wide && i + 4 <= n; i += 4) {
        lanes id, x;
        memcpy(&id, (const int32_t *)ids + i, sizeof id);
        x = id;
        FS_NUMBERS(x)
        const lanes taken = (lanes)(x <= last);
        for (int l = 0; l < 4; l++) {
            ((uint32_t *)out)[count] = id[l];
            if (places)
                places[count] = first + i + l;
            count -= (int32_t)taken[l];
        }
    }
    return fs_take_each(ids, wide, n, numbers, last, out, first, places, i, count);
}

FS_TAKE_FORMS(fs_take_plain, fs_take_lanes, )

/* Which lanes a mask of 8 keeps, in order, a byte each. Made before the first hop. */
static uint64_t fs_kept[256];

void fs_make_kept(void)
{
    for (int mask = 0; mask < 256; mask++) {
        fs_kept[mask] = 0;
        for (int lane = 7; lane >= 0; lane--)
            if (mask >> lane & 1)
                fs_kept[mask] = fs_kept[mask] << 8 | (uint64_t)lane;
    }
}

#if defined(__x86_64__)
#define FS_LOAD8(at) _mm256_loadu_si256((const __m256i *)(at))
#define FS_MASK8(lanes) (uint32_t)_mm256_movemask_ps((__m256)(lanes))

/* Lanes of x whose number is at most `last`. */
#define FS_TAKEN8(x) _mm256_cmpeq_epi32(_mm256_min_epu32((__m256i)(x), lasts), (__m256i)(x))

/* The lesser of a source's numbers before and after it changes: one look tells most sources that are not taken. */
#define FS_LEAST8(x)                                                  \
    if (changes) {                                                    \
        lanes y = x;                                                  \
        FS_HASH(y, late.a, late.b, late.c);                           \
        FS_HASH(x, early.a, early.b, early.c);                        \
        x = (lanes)_mm256_min_epu32((__m256i)x, (__m256i)y);          \
    } else {                                                          \
        FS_HASH(x, early.a, early.b, early.c);                        \
    }

/* Write the ids of the lanes in the mask, side by side, and their places. */
#define FS_KEEP8(id, mask)                                                                                                   \
    const __m128i kept = _mm_cvtsi64_si128((int64_t)fs_kept[mask]);                                                          \
    _mm256_storeu_si256((__m256i *)((int32_t *)out + count), _mm256_permutevar8x32_epi32(id, _mm256_cvtepu8_epi32(kept)));   \
    if (places) {                                                                                                            \
        const __m256i at = _mm256_set1_epi64x(first + i);                                                                    \
        _mm256_storeu_si256((__m256i *)(places + count), _mm256_add_epi64(at, _mm256_cvtepu8_epi64(kept)));                  \
        _mm256_storeu_si256((__m256i *)(places + count + 4),                                                                 \
                            _mm256_add_epi64(at, _mm256_cvtepu8_epi64(_mm_srli_si128(kept, 4))));                            \
    }                                                                                                                        \
    count += __builtin_popcount(mask)

FS_AVX2 FS_INLINE int64_t fs_take_lanes8(FS_TAKE)
{
    FS_KEYS;
    typedef uint32_t lanes __attribute__((vector_size(32)));
    const fs_key late = numbers->late;
    const int32_t *list = (const int32_t *)ids;
    const __m256i lasts = _mm256_set1_epi32((int)last), lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    if (wide)
        return fs_take_each(ids, wide, n, numbers, last, out, first, places, 0, 0);
    for (; last < FS_RARELY && i + 32 <= n; i += 32) {
        lanes a = (lanes)FS_LOAD8(list + i), b = (lanes)FS_LOAD8(list + i + 8);
        lanes c = (lanes)FS_LOAD8(list + i + 16), d = (lanes)FS_LOAD8(list + i + 24);
        __builtin_prefetch(list + i + FS_FIRST);
        __builtin_prefetch(list + i + FS_FIRST + 16);
        FS_LEAST8(a)
        FS_LEAST8(b)
        FS_LEAST8(c)
        FS_LEAST8(d)
        a = (lanes)FS_TAKEN8(a), b = (lanes)FS_TAKEN8(b), c = (lanes)FS_TAKEN8(c), d = (lanes)FS_TAKEN8(d);
        if (_mm256_testz_si256((__m256i)(a | b | c | d), (__m256i)(a | b | c | d)))
            continue;
        for (uint32_t mask = FS_MASK8(a) | FS_MASK8(b) << 8 | FS_MASK8(c) << 16 | FS_MASK8(d) << 24; mask; mask &= mask - 1) {
            const int64_t at = i + __builtin_ctz(mask);
            const int32_t id = list[at];
            ((int32_t *)out)[count] = id;
            if (places)
                places[count] = first + at;
            count += !changes || fs_number_of_source(numbers, (uint64_t)id) <= last;
        }
    }
    for (; i + 8 <= n; i += 8) {
        const __m256i id = FS_LOAD8(list + i);
        lanes x = (lanes)id;
        FS_NUMBERS(x)
        const uint32_t mask = FS_MASK8(FS_TAKEN8(x));
        FS_KEEP8(id, mask);
    }
    if (i < n) {
        const __m256i there = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(n - i)), lane);
        const __m256i id = _mm256_maskload_epi32(list + i, there);
        lanes x = (lanes)id;
        FS_NUMBERS(x)
        const uint32_t mask = FS_MASK8(_mm256_and_si256(FS_TAKEN8(x), there));
        FS_KEEP8(id, mask);
    }
    return count;
}

FS_TAKE_FORMS(fs_take_avx2, fs_take_lanes8, FS_AVX2)

FS_AVX512 FS_INLINE int64_t fs_take_lanes16(FS_TAKE)
{
    FS_KEYS;
    typedef uint32_t lanes __attribute__((vector_size(64)));
    const int is_rare = last < UINT32_MAX / 64; /* most vectors of a long list have none: there the branch is foreseen */
    const __m512i lasts = _mm512_set1_epi32((int)last);
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if (wide)
        return fs_take_each(ids, wide, n, numbers, last, out, first, places, 0, 0);
    for (; i < n; i += 16) {
        const __mmask16 there = n - i < 16 ? (__mmask16)((1u << (n - i)) - 1) : 0xFFFF;
        const __m512i id = _mm512_maskz_loadu_epi32(there, (const int32_t *)ids + i);
        if (i + FS_FIRST < n)
            __builtin_prefetch((const int32_t *)ids + i + FS_FIRST);
        lanes x = (lanes)id;
        FS_NUMBERS(x)
        const __mmask16 taken = _mm512_mask_cmple_epu32_mask(there, (__m512i)x, lasts);
        if (is_rare && !taken)
            continue;
        _mm512_storeu_si512((int32_t *)out + count, _mm512_maskz_compress_epi32(taken, id));
        if (places) {
            const __m512i at = _mm512_set1_epi64(first + i), kept = _mm512_maskz_compress_epi32(taken, lane);
            const __m256i low = _mm512_castsi512_si256(kept), high = _mm512_extracti64x4_epi64(kept, 1);
            _mm512_storeu_si512(places + count, _mm512_add_epi64(at, _mm512_cvtepu32_epi64(low)));
            _mm512_storeu_si512(places + count + 8, _mm512_add_epi64(at, _mm512_cvtepu32_epi64(high)));
        }
        count += __builtin_popcount(taken);
    }
    return count;
}

FS_TAKE_FORMS(fs_take_avx512, fs_take_lanes16, FS_AVX512)
#endif

fs_take_fn fs_choose_take(int level)
{
#if defined(__x86_64__)
    const int vectors = fs_vectors(level);
    if (vectors)
        return vectors == 2 ? fs_take_avx512 : fs_take_avx2;
#endif
    return fs_take_plain;
}

fs_take_places_fn fs_choose_take_places(int level)
{
#if defined(__x86_64__)
    const int vectors = fs_vectors(level);
    if (vectors)
        return vectors == 2 ? fs_take_avx512_places : fs_take_avx2_places;
#endif
    return fs_take_plain_places;
}

void fs_expect(const int64_t *degree, const int64_t *place, int64_t n, int64_t fanout, int64_t *n_expected, int64_t *n_ids,
               int64_t *n_missing)
{
    int64_t expected = 0, ids = 0, missing = 0;
    for (int64_t i = 0; i < n; i++) {
        expected += fs_compares(degree[i], fanout) ? fanout : degree[i];
        ids += degree[i];
        missing += place[i] < 0 ? degree[i] : 0;
    }
    *n_expected = fanout ? expected : 0;
    *n_ids = fanout ? ids : 0;
    *n_missing = fanout ? missing : 0;
}

int64_t fs_turn(fs_layer *layer, const int64_t *degree, const int64_t *place, int64_t *positions, int64_t room)
{
    int64_t n = 0, i = layer->next_dst, position = layer->next_position;
    layer->n_used = 0;
    if (layer->fanout == 0)
        i = layer->n_dst;
    for (; i < layer->n_dst; i++, position = 0) {
        if (place[i] >= 0)
            continue;
        const int64_t first = ~place[i], left = degree[i] - position, more = left < room - n ? left : room - n;
        for (int64_t j = 0; j < more; j++)
            positions[n++] = first + position + j;
        if (more < left) {
            position += more;
            break;
        }
    }
    layer->stop_dst = i;
    layer->stop_position = i < layer->n_dst ? position : 0;
    return n;
}

int fs_choose(fs_layer *layer, const int64_t *degree, const int64_t *place, const void *found, void *chosen, int64_t room,
              int64_t *counts, fs_take_fn take, fs_take_places_fn take_places)
{
    const int wide = layer->wide, bytes = wide ? 8 : 4;
    const int64_t fanout = layer->fanout, n_dst = layer->n_dst, stop = layer->stop_dst;
    const char *records = (const char *)layer->records;
    const int64_t *starts = layer->starts;
    int64_t *edge_pos = layer->edge_pos;
    int64_t i = layer->next_dst, position = layer->next_position, n_used = layer->n_used, n_chosen = layer->n_chosen;
    int wants = 0;
    for (; i < stop || position < layer->stop_position; i++, position = 0) {
        const int64_t d = degree[i], at = place[i], end = i < stop ? d : layer->stop_position, ahead = i + FS_AHEAD;
        /* A short list that is taken whole goes the same way: a branch on its length could not be foreseen. */
        const int compares = fs_compares(d, fanout), hashes = compares || (d <= FS_SHORT && !wide);
        const uint32_t last = compares ? fs_last(d, fanout) : UINT32_MAX;
        int64_t taken = 0;
        if (ahead < n_dst && place[ahead] >= 0 && fanout)
            for (int64_t j = 0; j < degree[ahead] && j < FS_FIRST; j += wide ? 8 : 16)
                fs_prefetch_record(records, wide, place[ahead] + j);
        if (position == 0)
            counts[i] = 0;
        while (position < end && fanout) {
            const int64_t n = end - position < FS_PIECE ? end - position : FS_PIECE;
            if (FS_RARE(room - n_chosen - taken < n + (hashes ? FS_SPARE : 0))) {
                wants = 1;
                break;
            }
            const char *ids = at < 0 ? (const char *)found + n_used * bytes : records + (at + position) * bytes;
            char *out = (char *)chosen + (n_chosen + taken) * bytes;
            const int64_t first = edge_pos ? starts[i] + position : 0;
            int64_t *places = edge_pos ? edge_pos + n_chosen + taken : NULL, n_taken = n;
            if (!hashes) {
                memcpy(out, ids, (size_t)(n * bytes));
                for (int64_t k = 0; places && k < n; k++)
                    places[k] = first + k;
            } else if (places) {
                n_taken = take_places(ids, wide, n, &layer->numbers, last, out, first, places);
            } else {
                n_taken = take(ids, wide, n, &layer->numbers, last, out);
            }
            taken += n_taken;
            n_used += at < 0 ? n : 0;
            position += n;
        }
        n_chosen += taken;
        counts[i] += taken;
        if (wants || i == stop)
            break;
    }
    layer->next_dst = i;
    layer->next_position = position;
    layer->n_used = n_used;
    layer->n_chosen = n_chosen;
    return wants;
}

int fs_number_chosen(fs_hop *hop, const void *chosen, int wide, const int64_t *counts)
{
    int64_t *dst = hop->dst, e = hop->drawn;
    for (int64_t i = hop->next_dst; i < hop->n_dst; i++) {
        const int64_t end = e + counts[i];
        if (e + FS_SPARE <= hop->n_edges) { /* what is too many is overwritten */
            for (int j = 0; j < FS_SPARE; j++)
                dst[e + j] = i;
            e += FS_SPARE;
        }
        for (; e < end; e++)
            dst[e] = i;
        e = end;
    }
    hop->next_dst = hop->n_dst;
    hop->drawn = e;
    if (wide)
        return hop->exact ? fs_number_ids(hop, chosen, 1, 1, hop->src, 1) : fs_number_ids(hop, chosen, 1, 0, hop->src, 1);
    return fs_number_ids(hop, chosen, 0, 1, hop->src, 1);
}
