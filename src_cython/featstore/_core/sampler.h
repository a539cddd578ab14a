/* Kernels of neighbour sampling: plain C over arrays, no Python, no allocation, no shared state.
 *
 * A hop runs in stages over chunks of destinations, so that every cache miss is prefetched one stage before it is needed:
 *
 *   draw    where each edge's neighbour id lies (an index into the records in memory, or ~position in the file), into src[]
 *   gather  src[e] = records[src[e]], and prefetch the table's entry for that id
 *   number  src[e] = local number of that id, numbering ids in order of first appearance
 *
 * src[] is the caller's output and holds the intermediate values too, so a hop needs no buffer of its own.
 */
#ifndef FEATSTORE_SAMPLER_H
#define FEATSTORE_SAMPLER_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

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
    FS_NETWORK = 543,     /* comparators that sort FS_LANE_DRAWS values */
    FS_CHUNK = 64,        /* destinations a chunk */
    FS_CHUNK_EDGES = 1024, /* edges a chunk, unless one destination has more */
    FS_SLICE = 256        /* edges numbered between two checks for room */
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
__attribute__((target("avx2"))) static void fs_draw_lanes_avx2(const uint64_t *key, const uint32_t *degree, int k, int replace,
                                                               uint8_t (*network)[2], int n_network, fs_u32s *x)
{
    fs_draw_lanes(key, degree, k, replace, network, n_network, x);
}

__attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512"))) static void fs_draw_lanes_avx512(
    const uint64_t *key, const uint32_t *degree, int k, int replace, uint8_t (*network)[2], int n_network, fs_u32s *x)
{
    fs_draw_lanes(key, degree, k, replace, network, n_network, x);
}
#endif

/* The widest form up to `level` (0 plain, 1 AVX2, 2 AVX-512) that this processor has; all draw the same. */
static fs_draw_lanes_fn fs_choose_draw_lanes(int level)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (level >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        return fs_draw_lanes_avx512;
    if (level >= 1 && __builtin_cpu_supports("avx2"))
        return fs_draw_lanes_avx2;
#else
    (void)level;
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

/* ---------------------------------------------------------------- a hop */

/* The table's shape, apart from the rest so that loops keep it in registers. */
typedef struct {
    uint64_t multiplier, mask;
    int shift;
} fs_shape;

typedef struct {
    /* where neighbour ids in memory lie: int32 or int64 */
    const void *records;
    int wide;
    /* the batch's nodes: id, place of the first neighbour (index into records, or ~position in the file) and degree */
    int64_t *nodes;
    const int64_t *place, *degree;
    int64_t n_nodes, limit; /* numbered so far; how many may be */
    /* the table of numbers: open addressing, entry = low half of the id << 32 | (base + number); entries below base are of
     * earlier batches and count as empty, so that a new batch clears nothing */
    uint64_t *table;
    fs_shape shape;
    int exact; /* ids are below 2^32, so that the entry names them fully */
    uint32_t base;
    /* the hop */
    int64_t n_dst, fanout, n_edges;
    uint64_t key;
    int replace;
    int64_t *src, *dst, *scratch;
    /* edges to read from the file: position there, and edge */
    int64_t *positions, *edges, n_missing;
    /* progress, in edges: numbered <= gathered <= drawn */
    int64_t next_dst, drawn, gathered, numbered;
} fs_hop;

FS_INLINE int64_t fs_n_drawn(int64_t degree, int64_t fanout, int replace)
{
    if (fanout < 0 || degree == 0)
        return degree;
    return replace || degree > fanout ? fanout : degree;
}

/* Whether positions are drawn at random; else the whole list is taken. */
FS_INLINE int fs_is_drawn(int64_t degree, int64_t fanout, int replace)
{
    return fanout >= 0 && (replace ? degree > 0 : degree > fanout);
}

/* Edges of a hop, those of them to read, and whether any list is drawn from. */
static void fs_count(const int64_t *place, const int64_t *degree, int64_t n, int64_t fanout, int replace, int64_t *n_edges,
                     int64_t *n_missing, int *any_drawn)
{
    int64_t edges = 0, missing = 0;
    int any = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t count = fs_n_drawn(degree[i], fanout, replace);
        edges += count;
        missing += place[i] < 0 ? count : 0;
        any |= fs_is_drawn(degree[i], fanout, replace);
    }
    *n_edges = edges;
    *n_missing = missing;
    *any_drawn = any;
}

FS_INLINE int64_t fs_record(const void *records, int wide, int64_t i)
{
    return wide ? ((const int64_t *)records)[i] : ((const int32_t *)records)[i];
}

FS_INLINE void fs_prefetch_record(const void *records, int wide, int64_t i)
{
    __builtin_prefetch((const char *)records + (wide ? i * 8 : i * 4));
}

/* Where edge `position` of a list lies: place counts down for lists in the file. */
FS_INLINE int64_t fs_at(int64_t place, int64_t position)
{
    return place < 0 ? place - position : place + position;
}

FS_INLINE uint64_t fs_slot(fs_shape shape, int64_t id)
{
    return ((uint64_t)id * shape.multiplier) >> shape.shift & shape.mask;
}

/* Draw for the next chunk of destinations. */
FS_INLINE void fs_draw_chunk(fs_hop *hop, int wide, fs_draw_lanes_fn draw_lanes, uint8_t (*network)[2], int n_network)
{
    int64_t edge_of[FS_LANES], place_of[FS_LANES];
    uint64_t key_of[FS_LANES];
    uint32_t degree_of[FS_LANES];
    fs_u32s x[FS_LANE_DRAWS];
    const int64_t fanout = hop->fanout, first_edge = hop->drawn;
    int64_t edge = first_edge, i = hop->next_dst;
    const int64_t end = hop->n_dst - i < FS_CHUNK ? hop->n_dst : i + FS_CHUNK;
    int lanes = 0;
    for (;; i++) {
        const int done = i == end || edge - first_edge >= FS_CHUNK_EDGES;
        if (lanes == FS_LANES || (done && lanes)) {
            for (int l = lanes; l < FS_LANES; l++) { /* idle lanes draw something harmless */
                key_of[l] = 0;
                degree_of[l] = (uint32_t)fanout + 1;
            }
            draw_lanes(key_of, degree_of, (int)fanout, hop->replace, network, n_network, x);
            for (int l = 0; l < lanes; l++) {
                int64_t *out = hop->src + edge_of[l];
                const int64_t place = place_of[l];
                if (place < 0) {
                    for (int64_t j = 0; j < fanout; j++)
                        out[j] = place - (int64_t)x[j][l];
                    continue;
                }
                for (int64_t j = 0; j < fanout; j++) {
                    out[j] = place + (int64_t)x[j][l];
                    fs_prefetch_record(hop->records, wide, out[j]);
                }
            }
            lanes = 0;
        }
        if (done)
            break;
        const int64_t degree = hop->degree[i], place = hop->place[i], count = fs_n_drawn(degree, fanout, hop->replace);
        if (!fs_is_drawn(degree, fanout, hop->replace)) {
            for (int64_t j = 0; j < count; j++)
                hop->src[edge + j] = fs_at(place, j);
            if (place >= 0)
                for (int64_t j = 0; j < count && j < FS_CHUNK_EDGES; j += wide ? 8 : 16)
                    fs_prefetch_record(hop->records, wide, place + j);
            if (place >= 0 && count)
                fs_prefetch_record(hop->records, wide, place + count - 1);
        } else if (count > 0) {
            const uint64_t key = fs_absorb(hop->key, (uint64_t)hop->nodes[i]);
            if (fanout <= FS_LANE_DRAWS && degree <= UINT32_MAX) {
                edge_of[lanes] = edge;
                place_of[lanes] = place;
                key_of[lanes] = key;
                degree_of[lanes++] = (uint32_t)degree;
            } else {
                fs_draw_one(key, degree, count, hop->replace, hop->src + edge, hop->scratch);
                for (int64_t j = 0; j < count; j++) {
                    hop->src[edge + j] = fs_at(place, hop->src[edge + j]);
                    if (place >= 0 && j < FS_CHUNK_EDGES)
                        fs_prefetch_record(hop->records, wide, hop->src[edge + j]);
                }
            }
        }
        for (int64_t j = 0; j < count; j++)
            hop->dst[edge + j] = i;
        edge += count;
    }
    hop->next_dst = i;
    hop->drawn = edge;
}

/* Fetch the ids of edges up to `end`, all in memory. */
FS_INLINE void fs_gather(fs_hop *hop, int wide, int64_t end)
{
    int64_t *src = hop->src;
    const void *records = hop->records;
    const uint64_t *table = hop->table;
    const fs_shape shape = hop->shape;
    for (int64_t e = hop->gathered; e < end; e++) {
        const int64_t id = fs_record(records, wide, src[e]);
        __builtin_prefetch(&table[fs_slot(shape, id)], 1);
        src[e] = id;
    }
    hop->gathered = end;
}

/* The same, listing the edges that must be read. */
FS_INLINE void fs_gather_some(fs_hop *hop, int wide, int64_t end)
{
    int64_t *src = hop->src, missing = hop->n_missing;
    for (int64_t e = hop->gathered; e < end; e++) {
        const int64_t place = src[e];
        if (place >= 0) {
            src[e] = fs_record(hop->records, wide, place);
        } else {
            hop->positions[missing] = ~place;
            hop->edges[missing++] = e;
        }
    }
    hop->gathered = end;
    hop->n_missing = missing;
}

/* Number of `id`, `n` and *fresh = 1 where it has none yet; enters it. */
FS_INLINE uint32_t fs_number_of(uint64_t *table, fs_shape shape, uint32_t base, const int64_t *nodes, int exact, int64_t id,
                                uint32_t n, uint32_t *fresh)
{
    uint64_t slot = fs_slot(shape, id);
    for (;;) {
        const uint64_t entry = table[slot];
        const uint32_t number = (uint32_t)entry - base;
        uint64_t differ = entry >> 32 ^ (uint32_t)id;
        *fresh = number >= n;
        if (!exact && !*fresh && !differ)
            differ = nodes[number] != id;
        /* Arithmetic, not branches, on new or known: which of them comes next cannot be predicted. */
        if (FS_RARE(differ & ((uint64_t)*fresh - 1))) {
            slot = (slot + 1) & shape.mask;
            continue;
        }
        const uint32_t local = number ^ ((number ^ n) & (0 - *fresh));
        table[slot] = (uint64_t)(uint32_t)id << 32 | (uint32_t)(base + local);
        return local;
    }
}

/* Number the ids of edges up to `end`; returns 1, for more room, when the table or the list of nodes is nearly full. */
FS_INLINE int fs_number(fs_hop *hop, int exact, int64_t end)
{
    int64_t *src = hop->src, *nodes = hop->nodes;
    uint64_t *table = hop->table;
    const uint32_t base = hop->base;
    const fs_shape shape = hop->shape;
    const int64_t limit = hop->limit;
    int64_t e = hop->numbered;
    uint32_t n = (uint32_t)hop->n_nodes;
    while (e < end) {
        const int64_t slice = end - e < FS_SLICE ? end : e + FS_SLICE;
        if (FS_RARE((int64_t)n + (slice - e) > limit))
            break;
        for (; e < slice; e++) {
            const int64_t id = src[e];
            uint32_t fresh;
            src[e] = fs_number_of(table, shape, base, nodes, exact, id, n, &fresh);
            nodes[n] = id;
            n += fresh;
        }
    }
    hop->numbered = e;
    hop->n_nodes = n;
    return e < end;
}

FS_INLINE int fs_expand_as(fs_hop *hop, int wide, int exact, fs_draw_lanes_fn draw_lanes)
{
    uint8_t network[FS_NETWORK][2];
    const int n_network = hop->fanout >= 0 && hop->fanout <= FS_LANE_DRAWS ? fs_network((int)hop->fanout, network) : 0;
    while (hop->numbered < hop->n_edges) {
        const int64_t gathered = hop->gathered, drawn = hop->drawn;
        if (drawn - gathered < FS_CHUNK_EDGES)
            fs_draw_chunk(hop, wide, draw_lanes, network, n_network);
        fs_gather(hop, wide, drawn - gathered < FS_CHUNK_EDGES ? drawn : gathered + FS_CHUNK_EDGES);
        if (fs_number(hop, exact, gathered))
            return 1;
    }
    return 0;
}

/* A whole hop whose lists are all in memory; returns 1 when it needs more room and must be called again. */
static int fs_expand(fs_hop *hop, fs_draw_lanes_fn draw_lanes)
{
    if (hop->wide)
        return hop->exact ? fs_expand_as(hop, 1, 1, draw_lanes) : fs_expand_as(hop, 1, 0, draw_lanes);
    return fs_expand_as(hop, 0, 1, draw_lanes);
}

/* First part of a hop with lists in the file: draw everything, fetch what is in memory, list the rest. */
static void fs_draw(fs_hop *hop, fs_draw_lanes_fn draw_lanes)
{
    uint8_t network[FS_NETWORK][2];
    const int n_network = hop->fanout >= 0 && hop->fanout <= FS_LANE_DRAWS ? fs_network((int)hop->fanout, network) : 0;
    while (hop->gathered < hop->n_edges) {
        const int64_t drawn = hop->drawn;
        if (hop->wide) {
            fs_draw_chunk(hop, 1, draw_lanes, network, n_network);
            fs_gather_some(hop, 1, drawn);
        } else {
            fs_draw_chunk(hop, 0, draw_lanes, network, n_network);
            fs_gather_some(hop, 0, drawn);
        }
    }
}

/* Second part: put the ids that were read where they belong; returns the first id out of [0, n_total), or -1. */
static int64_t fs_fill(fs_hop *hop, const void *ids, int wide, int64_t n_total)
{
    for (int64_t i = 0; i < hop->n_missing; i++) {
        const int64_t id = fs_record(ids, wide, i);
        if (FS_RARE((uint64_t)id >= (uint64_t)n_total))
            return i;
        hop->src[hop->edges[i]] = id;
    }
    return -1;
}

/* Third part: number everything; returns 1 when it needs more room and must be called again. */
static int fs_number_all(fs_hop *hop)
{
    while (hop->numbered < hop->n_edges) {
        const int64_t end = hop->n_edges - hop->numbered < FS_SLICE ? hop->n_edges : hop->numbered + FS_SLICE;
        const fs_shape shape = hop->shape;
        for (int64_t e = hop->numbered; e < end; e++)
            __builtin_prefetch(&hop->table[fs_slot(shape, hop->src[e])], 1);
        if (hop->exact ? fs_number(hop, 1, end) : fs_number(hop, 0, end))
            return 1;
    }
    return 0;
}

/* Enter nodes 0 … n-1 into an emptied or outdated table; returns the first that is there already, or -1. */
static int64_t fs_enter(fs_hop *hop, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t fresh;
        if (i + 16 < n)
            __builtin_prefetch(&hop->table[fs_slot(hop->shape, hop->nodes[i + 16])], 1);
        fs_number_of(hop->table, hop->shape, hop->base, hop->nodes, hop->exact, hop->nodes[i], (uint32_t)i, &fresh);
        if (!fresh)
            return i;
    }
    return -1;
}

/* ---------------------------------------------------------------- offsets, the neighbour cache */

static void fs_offsets(const int64_t *indptr, const int64_t *ids, int64_t n, int64_t *starts, int64_t *degrees)
{
    for (int64_t i = 0; i < n; i++) {
        if (i + 32 < n)
            __builtin_prefetch(&indptr[ids[i + 32]]);
        starts[i] = indptr[ids[i]];
        degrees[i] = indptr[ids[i] + 1] - starts[i];
    }
}

FS_INLINE int64_t fs_lookup_as(const int64_t *offset_of_node, const void *records, int wide, const int64_t *ids, int64_t n,
                               int64_t *place, int64_t *degree, int64_t *missing)
{
    int64_t n_missing = 0;
    for (int64_t first = 0; first < n; first += FS_CHUNK) {
        const int64_t end = n - first < FS_CHUNK ? n : first + FS_CHUNK;
        for (int64_t i = end; i < n && i < end + FS_CHUNK; i++)
            __builtin_prefetch(&offset_of_node[ids[i]]);
        for (int64_t i = first; i < end; i++) {
            place[i] = offset_of_node[ids[i]];
            if (place[i] >= 0)
                fs_prefetch_record(records, wide, place[i]);
        }
        for (int64_t i = first; i < end; i++) {
            missing[n_missing] = i;
            n_missing += place[i] < 0;
            degree[i] = place[i] < 0 ? 0 : fs_record(records, wide, place[i]);
            place[i] += 1; /* behind the degree */
        }
    }
    return n_missing;
}

/* Look nodes up in the neighbour cache; lists in `missing` (room for n + 1) those that it lacks, and returns how many. */
static int64_t fs_lookup(const int64_t *offset_of_node, const void *records, int wide, const int64_t *ids, int64_t n,
                         int64_t *place, int64_t *degree, int64_t *missing)
{
    if (wide)
        return fs_lookup_as(offset_of_node, records, 1, ids, n, place, degree, missing);
    return fs_lookup_as(offset_of_node, records, 0, ids, n, place, degree, missing);
}

/* First id out of [0, n_total), or -1. */
static int64_t fs_first_bad(const void *ids, int wide, int64_t n, int64_t n_total)
{
    for (int64_t first = 0; first < n; first += 4096) {
        const int64_t end = n - first < 4096 ? n : first + 4096;
        uint64_t bad = 0;
        if (wide)
            for (int64_t i = first; i < end; i++)
                bad |= (uint64_t)((const int64_t *)ids)[i] >= (uint64_t)n_total;
        else
            for (int64_t i = first; i < end; i++)
                bad |= (uint64_t)(int64_t)((const int32_t *)ids)[i] >= (uint64_t)n_total;
        if (FS_RARE(bad))
            for (int64_t i = first; i < end; i++)
                if ((uint64_t)fs_record(ids, wide, i) >= (uint64_t)n_total)
                    return i;
    }
    return -1;
}

/* Copy the lists of cached nodes node … that lie in the block of edges [first, first + n) into their records; a list may lie in
 * several blocks. Returns the node that the next block goes on with. */
static int64_t fs_fill_records(const char *block, int64_t first, int64_t n, const int64_t *indptr, const int64_t *offset_of_node,
                               int64_t n_nodes, int64_t node, char *records, int id_bytes)
{
    const int64_t end = first + n;
    for (; node < n_nodes && indptr[node] < end; node++) {
        const int64_t offset = offset_of_node[node];
        int64_t from = indptr[node], to = indptr[node + 1];
        if (offset >= 0) {
            const int64_t skipped = from < first ? first - from : 0;
            from += skipped;
            to = to < end ? to : end;
            if (from < to)
                memcpy(records + (offset + 1 + skipped) * id_bytes, block + (from - first) * id_bytes,
                       (size_t)((to - from) * id_bytes));
        }
        if (indptr[node + 1] > end)
            break;
    }
    return node;
}

/* First node whose record does not agree with indptr or leaves the array, or -1. */
static int64_t fs_first_bad_record(const int64_t *indptr, const int64_t *offset_of_node, int64_t n_nodes, const void *records,
                                   int wide, int64_t n_records)
{
    for (int64_t node = 0; node < n_nodes; node++) {
        const int64_t offset = offset_of_node[node], degree = indptr[node + 1] - indptr[node];
        if (offset == -1)
            continue;
        if (offset < 0 || offset >= n_records || degree > n_records - offset - 1 || fs_record(records, wide, offset) != degree ||
            fs_first_bad((const char *)records + (offset + 1) * (wide ? 8 : 4), wide, degree, n_nodes) >= 0)
            return node;
    }
    return -1;
}

/* First place where indptr does not ascend from 0 to n_edges, or -1. */
static int64_t fs_first_bad_offset(const int64_t *indptr, int64_t n_nodes, int64_t n_edges)
{
    if (indptr[0] != 0)
        return 0;
    for (int64_t i = 0; i < n_nodes; i++)
        if (FS_RARE(indptr[i + 1] < indptr[i] || indptr[i + 1] > n_edges))
            return i + 1;
    return indptr[n_nodes] == n_edges ? -1 : n_nodes;
}

#endif
