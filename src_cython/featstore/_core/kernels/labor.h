/* Kernels of layer-neighbour sampling: a number a source, which all destinations of a hop compare with what they take.
 *
 * A source's number has 32 bits; its share of 2^32 is what the literature calls r_t. A destination of degree d takes with
 * fan-out k every source whose number is below floor(k * 2^32 / d); all of them where d <= k.
 *
 * A hop runs in two passes. The first goes through the lists, whole ones, and lists what is taken; lists in the file come in
 * turns, each as long as the caller has room for. The second numbers the nodes that were taken.
 */
#ifndef FEATSTORE_LABOR_H
#define FEATSTORE_LABOR_H

#include "sampler.h"

enum {
    FS_PIECE = 1024, /* ids compared between two checks for room */
    FS_AHEAD = 4,   /* destinations between asking for the first ids of a list, and comparing them */
    FS_FORE = 64,    /* ids between asking for an entry of the table, and reading it */
    FS_FIRST = 256,   /* so many are asked for: processors foresee the rest of a long list themselves */
    FS_SPARE = 16,   /* ids written beyond what was taken */
    FS_SHORT = 16,   /* ids of a list that is copied in one vector */
    FS_RARELY = 1 << 26 /* where fewer of 2^32 numbers are taken, most vectors have none: there a branch is foreseen */
};

/* ---------------------------------------------------------------- numbers
 * A hash of 32 bits keyed by one word of 64: three rounds on the low half of the id, a bijection of it, in arithmetic that vectors
 * have (multiplications of 64 bits cost them four times as much). Shifts and factors are those of triple32 (Wellons). */
typedef struct {
    uint64_t word;
    uint32_t a, b, c;
} fs_key;

/* The numbers of one hop. Where a number stays for several batches, some sources have turned to their next one: those whose
 * number under `phase` is `turn` or more. */
typedef struct {
    fs_key early, late, phase;
    uint32_t turn;
    int changes;
} fs_numbers;

void fs_set_numbers(fs_numbers *numbers, uint64_t early, uint64_t late, uint64_t phase, uint32_t turn);

/* x, a, b, c: scalars or vectors of uint32_t. */
#define FS_HASH(x, a, b, c) \
    x += a;                 \
    x ^= x >> 17;           \
    x *= 0xed5ad4bbu;       \
    x += b;                 \
    x ^= x >> 11;           \
    x *= 0xac4c1b51u;       \
    x += c;                 \
    x ^= x >> 15;           \
    x *= 0x31848babu;       \
    x ^= x >> 14

FS_INLINE uint32_t fs_hash(const fs_key *key, uint64_t id)
{
    uint32_t x = (uint32_t)id;
    if (FS_RARE(id >> 32)) /* in graphs of more than 2^32 nodes */
        x ^= (uint32_t)fs_absorb(key->word, id >> 32);
    FS_HASH(x, key->a, key->b, key->c);
    return x;
}

FS_INLINE uint32_t fs_number_of_source(const fs_numbers *numbers, uint64_t id)
{
    const int has_turned = numbers->changes && fs_hash(&numbers->phase, id) >= numbers->turn;
    return fs_hash(has_turned ? &numbers->late : &numbers->early, id);
}

typedef struct {
    const void *records;
    int wide;
    int64_t n_dst, fanout;
    fs_numbers numbers;
    /* the list that comes next, and from where in it; where the lists that are there now end */
    int64_t next_dst, next_position, stop_dst, stop_position;
    const int64_t *starts; /* first edge of each list, and the number of each edge that is taken, where that is asked for */
    int64_t *edge_pos;
    int64_t n_used;   /* of the ids that were read for this turn */
    int64_t n_chosen; /* by all destinations so far */
} fs_layer;

/* Whether a destination compares numbers; else it takes its whole list, or nothing. */
FS_INLINE int fs_compares(int64_t degree, int64_t fanout)
{
    return fanout > 0 && degree > fanout;
}

/* The largest number that is taken. */
FS_INLINE uint32_t fs_last(int64_t degree, int64_t fanout)
{
    const uint64_t bound = ((uint64_t)fanout << 32) / (uint64_t)degree;
    return (uint32_t)(bound ? bound - 1 : 0);
}

/* ---------------------------------------------------------------- comparing
 * The ids among `n` whose number is at most `last`, in order, into out[], of the ids' width; returns how many. Writes up to FS_SPARE
 * more. The second form also writes the place of each among the ids, from `first` on, into places[]: as many, and as many more. */

typedef int64_t (*fs_take_fn)(const void *ids, int wide, int64_t n, const fs_numbers *numbers, uint32_t last, void *out);

typedef int64_t (*fs_take_places_fn)(const void *ids, int wide, int64_t n, const fs_numbers *numbers, uint32_t last, void *out,
                                     int64_t first, int64_t *places);

void fs_make_kept(void);

/* The widest form up to `level` (0 plain, 1 AVX2, 2 AVX-512) that this processor has; all take the same. */
fs_take_fn fs_choose_take(int level);

/* The same, with places. */
fs_take_places_fn fs_choose_take_places(int level);

/* ---------------------------------------------------------------- a hop
 * Edges that are expected, ids of all lists, and those of them that must be read. */
void fs_expect(const int64_t *degree, const int64_t *place, int64_t n, int64_t fanout, int64_t *n_expected, int64_t *n_ids,
               int64_t *n_missing);

/* Begin a turn: the places of ids to read, as many as there is room for, which may end within a list. Returns how many. */
int64_t fs_turn(fs_layer *layer, const int64_t *degree, const int64_t *place, int64_t *positions, int64_t room);

/* Go through the lists of a turn; returns 1 where there is no room for what comes next: the caller gives more and calls again. */
int fs_choose(fs_layer *layer, const int64_t *degree, const int64_t *place, const void *found, void *chosen, int64_t room,
              int64_t *counts, fs_take_fn take, fs_take_places_fn take_places);

/* Number the ids of a hop, each entry of the table asked for some ids ahead, into numbers[], which may be ids[] where both have
 * the same width; returns 1, for more room. */
FS_INLINE int fs_number_ids(fs_hop *hop, const void *ids, int wide, int exact, void *numbers, int wide_numbers)
{
    int64_t *nodes = hop->nodes;
    uint64_t *table = hop->table;
    const uint32_t base = hop->base;
    const fs_shape shape = hop->shape;
    const int64_t limit = hop->limit, n_edges = hop->n_edges;
    int64_t e = hop->numbered;
    uint32_t n = (uint32_t)hop->n_nodes;
    for (int64_t i = e; i < n_edges && i < e + FS_FORE; i++)
        __builtin_prefetch(&table[fs_slot(shape, fs_record(ids, wide, i))], 1);
    while (e < n_edges) {
        const int64_t end = n_edges - e < FS_SLICE ? n_edges : e + FS_SLICE;
        if (FS_RARE((int64_t)n + (end - e) > limit))
            break;
        for (; e < end; e++) {
            const int64_t id = fs_record(ids, wide, e), ahead = e + FS_FORE < n_edges ? e + FS_FORE : e;
            uint32_t fresh;
            __builtin_prefetch(&table[fs_slot(shape, fs_record(ids, wide, ahead))], 1);
            const uint32_t number = fs_number_of(table, shape, base, nodes, exact, id, n, &fresh);
            if (wide_numbers)
                ((int64_t *)numbers)[e] = number;
            else
                ((int32_t *)numbers)[e] = (int32_t)number;
            nodes[n] = id;
            n += fresh;
        }
    }
    hop->numbered = e;
    hop->n_nodes = n;
    return e < n_edges;
}

/* Number what was taken, and name each edge's destination; returns 1, for more room, and must then be called again. */
int fs_number_chosen(fs_hop *hop, const void *chosen, int wide, const int64_t *counts);

#endif
