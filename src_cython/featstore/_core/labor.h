/* Kernels of layer-neighbour sampling: a number a source, which all destinations of a hop compare with what they take.
 *
 * A source's number is a word of 64 bits, its share of 2^64 what the literature calls r_t. A destination of degree d takes with
 * fan-out k every source whose word is below floor(k * 2^64 / d); all of them where d <= k.
 *
 * A hop runs in two passes. The first goes through the lists, whole ones, and lists what is taken; lists in the file come in
 * turns, each as long as the caller has room for. The second numbers the nodes that were taken.
 */
#ifndef FEATSTORE_LABOR_H
#define FEATSTORE_LABOR_H

#include "sampler.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    FS_PIECE = 1024, /* ids compared between two checks for room */
    FS_SPARE = 8     /* ids written beyond what was taken */
};

/* The numbers of one hop. Where a number stays for several batches, some sources have turned to their next one: those whose word
 * under `phase` is `turn` or more. Else both keys are the same. */
typedef struct {
    uint64_t early, late, phase, turn;
} fs_numbers;

typedef struct {
    const void *records;
    int wide;
    int64_t n_dst, fanout;
    fs_numbers numbers;
    /* the list that comes next, and from where in it; where the lists that are there now end */
    int64_t next_dst, next_position, stop_dst, stop_position;
    int64_t n_used;   /* of the ids that were read for this turn */
    int64_t n_chosen; /* by all destinations so far */
} fs_layer;

FS_INLINE uint64_t fs_word(const fs_numbers *numbers, uint64_t id)
{
    if (numbers->early == numbers->late)
        return fs_absorb(numbers->early, id);
    return fs_absorb(fs_absorb(numbers->phase, id) >= numbers->turn ? numbers->late : numbers->early, id);
}

/* Whether a destination compares numbers; else it takes its whole list, or nothing. */
FS_INLINE int fs_compares(int64_t degree, int64_t fanout)
{
    return fanout > 0 && degree > fanout;
}

FS_INLINE uint64_t fs_bound(int64_t degree, int64_t fanout)
{
    return (uint64_t)(((unsigned __int128)fanout << 64) / (uint64_t)degree);
}

/* ---------------------------------------------------------------- comparing
 * The ids among `n` whose word is below `bound`, in order, into out[]; returns how many. Writes up to FS_SPARE more. */

typedef int64_t (*fs_take_fn)(const void *ids, int wide, int64_t n, const fs_numbers *numbers, uint64_t bound, int64_t *out);

typedef int32_t fs_i32s __attribute__((vector_size(4 * FS_LANES)));
typedef int64_t fs_i64s __attribute__((vector_size(8 * FS_LANES)));

#define FS_MIX_LANES(z)                              \
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;     \
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;     \
    z = z ^ (z >> 31)

#define FS_TAKE(APPEND)                                                                               \
    int64_t count = 0, i = 0;                                                                         \
    const int changes = numbers->early != numbers->late;                                              \
    for (; i + FS_LANES <= n; i += FS_LANES) {                                                        \
        fs_i64s id;                                                                                   \
        if (wide) {                                                                                   \
            memcpy(&id, (const int64_t *)ids + i, sizeof id);                                         \
        } else {                                                                                      \
            fs_i32s narrow;                                                                           \
            memcpy(&narrow, (const int32_t *)ids + i, sizeof narrow);                                 \
            id = __builtin_convertvector(narrow, fs_i64s);                                            \
        }                                                                                             \
        const fs_u64s step = FS_GOLDEN * ((fs_u64s)id + 1);                                           \
        fs_u64s z = step + numbers->early;                                                            \
        if (changes) {                                                                                \
            fs_u64s phase = step + numbers->phase;                                                    \
            FS_MIX_LANES(phase);                                                                      \
            z += (fs_u64s)(phase >= numbers->turn) & (numbers->late - numbers->early);                \
        }                                                                                             \
        FS_MIX_LANES(z);                                                                              \
        const fs_i64s taken = z < bound;                                                              \
        APPEND                                                                                        \
    }                                                                                                 \
    for (; i < n; i++) {                                                                              \
        const int64_t id = fs_record(ids, wide, i);                                                   \
        out[count] = id;                                                                              \
        count += fs_word(numbers, (uint64_t)id) < bound;                                              \
    }                                                                                                 \
    return count;

#define FS_APPEND_EACH                     \
    for (int l = 0; l < FS_LANES; l++) {   \
        out[count] = id[l];                \
        count -= taken[l];                 \
    }

#define FS_APPEND_COMPRESSED                                                                          \
    const __mmask8 mask = _mm512_movepi64_mask((__m512i)taken);                                       \
    _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi64(mask, (__m512i)id));                 \
    count += __builtin_popcount(mask);

static int64_t fs_take_plain(const void *ids, int wide, int64_t n, const fs_numbers *numbers, uint64_t bound, int64_t *out)
{
    FS_TAKE(FS_APPEND_EACH)
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static int64_t fs_take_avx2(const void *ids, int wide, int64_t n, const fs_numbers *numbers,
                                                            uint64_t bound, int64_t *out)
{
    FS_TAKE(FS_APPEND_EACH)
}

__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512"))) static int64_t fs_take_avx512(
    const void *ids, int wide, int64_t n, const fs_numbers *numbers, uint64_t bound, int64_t *out)
{
    FS_TAKE(FS_APPEND_COMPRESSED)
}
#endif

/* The widest form up to `level` (0 plain, 1 AVX2, 2 AVX-512) that this processor has; all take the same. */
static fs_take_fn fs_choose_take(int level)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (level >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        return fs_take_avx512;
    if (level >= 1 && __builtin_cpu_supports("avx2"))
        return fs_take_avx2;
#else
    (void)level;
#endif
    return fs_take_plain;
}

/* ---------------------------------------------------------------- a hop
 * Edges that are expected, ids of all lists, and those of them that must be read. */
static void fs_expect(const int64_t *degree, const int64_t *place, int64_t n, int64_t fanout, int64_t *n_expected, int64_t *n_ids,
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

/* Begin a turn: the places of ids to read, as many as there is room for, which may end within a list. Returns how many. */
static int64_t fs_turn(fs_layer *layer, const int64_t *degree, const int64_t *place, int64_t *positions, int64_t room)
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

/* Go through the lists of a turn; returns 1 where there is no room for what comes next: the caller gives more and calls again. */
static int fs_choose(fs_layer *layer, const int64_t *degree, const int64_t *place, const void *found, int64_t *chosen, int64_t room,
                     int64_t *counts, fs_take_fn take)
{
    const int wide = layer->wide, bytes = wide ? 8 : 4;
    const int64_t fanout = layer->fanout, n_dst = layer->n_dst;
    for (; layer->next_dst < layer->stop_dst || layer->next_position < layer->stop_position;) {
        const int64_t i = layer->next_dst, d = degree[i], end = i < layer->stop_dst ? d : layer->stop_position;
        const int compares = fs_compares(d, fanout);
        const uint64_t bound = compares ? fs_bound(d, fanout) : 0;
        if (layer->next_position == 0)
            counts[i] = 0;
        if (i + 8 < n_dst && place[i + 8] >= 0 && fanout)
            fs_prefetch_record(layer->records, wide, place[i + 8]);
        while (layer->next_position < end && fanout) {
            const int64_t left = end - layer->next_position, n = left < FS_PIECE ? left : FS_PIECE;
            if (FS_RARE(room - layer->n_chosen < n + (compares ? FS_SPARE : 0)))
                return 1;
            const char *ids = place[i] < 0 ? (const char *)found + layer->n_used * bytes
                                           : (const char *)layer->records + (place[i] + layer->next_position) * bytes;
            int64_t *out = chosen + layer->n_chosen, taken = n;
            if (compares)
                taken = take(ids, wide, n, &layer->numbers, bound, out);
            else
                for (int64_t j = 0; j < n; j++)
                    out[j] = fs_record(ids, wide, j);
            layer->n_used += place[i] < 0 ? n : 0;
            layer->next_position += n;
            layer->n_chosen += taken;
            counts[i] += taken;
        }
        if (i == layer->stop_dst)
            break;
        layer->next_dst++;
        layer->next_position = 0;
    }
    return 0;
}

/* Number what was taken, and name each edge's destination; returns 1, for more room, and must then be called again. */
static int fs_number_chosen(fs_hop *hop, const int64_t *chosen, const int64_t *counts)
{
    for (; hop->next_dst < hop->n_dst; hop->next_dst++)
        for (int64_t j = 0; j < counts[hop->next_dst]; j++)
            hop->dst[hop->drawn++] = hop->next_dst;
    while (hop->numbered < hop->n_edges) {
        const int64_t end = hop->n_edges - hop->numbered < FS_SLICE ? hop->n_edges : hop->numbered + FS_SLICE;
        const int64_t ahead = hop->n_edges - end < FS_SLICE ? hop->n_edges : end + FS_SLICE;
        for (; hop->gathered < ahead; hop->gathered++) {
            const int64_t id = chosen[hop->gathered];
            __builtin_prefetch(&hop->table[fs_slot(hop->shape, id)], 1);
            hop->src[hop->gathered] = id;
        }
        if (hop->exact ? fs_number(hop, 1, end) : fs_number(hop, 0, end))
            return 1;
    }
    return 0;
}

#endif
