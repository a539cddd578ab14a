/* Kernels of neighbour sampling: plain C over arrays, no Python, no allocation, no shared state.
 *
 * A hop runs in stages over chunks of destinations, so that every cache miss is prefetched one stage before it is needed:
 *
 *   draw    where each edge's neighbour id lies (an index into the records in memory, or ~position in the file), into src[]
 *   gather  src[e] = records[src[e]], and prefetch the table's entry for that id, and the edge's number where that is kept
 *   number  src[e] = local number of that id, numbering ids in order of first appearance; then take the edges' numbers
 *
 * src[] is the caller's output and holds the intermediate values too, so a hop needs no buffer of its own.
 */
#ifndef FEATSTORE_SAMPLER_H
#define FEATSTORE_SAMPLER_H

#include "neighbors.h"

enum {
    FS_CHUNK_EDGES = 1024, /* edges a chunk, unless one destination has more */
    FS_SLICE = 256         /* edges numbered between two checks for room */
};

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
    const int64_t *lists, *place, *degree; /* of the destinations; lists, which key the draws, are the nodes where each has one */
    const int64_t *offsets; /* what is added to the ids in a destination's list, or NULL: a node of each subgraph has its own id */
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
    int is_drawn; /* elsewhere: instead of drawing, ids are fetched ahead */
    int64_t *src, *dst, *scratch;
    /* the number of each edge among all, where that is asked for: each list's first edge is in starts[] */
    const int64_t *starts;
    int64_t *edge_pos;
    const void *edge_ids; /* beside `records` the numbers that those edges get, where they are kept */
    int edge_ids_wide;
    /* edges to read from the file: position there, and edge */
    int64_t *positions, *edges, n_missing;
    /* progress, in edges: numbered <= gathered <= drawn */
    int64_t next_dst, drawn, gathered, numbered;
} fs_hop;

/* Whether positions are drawn at random; else the whole list is taken. */
FS_INLINE int fs_is_drawn(int64_t degree, int64_t fanout, int replace)
{
    return fanout >= 0 && (replace ? degree > 0 : degree > fanout);
}

/* Edges of a hop, those of them to read, and whether any list is drawn from. */
void fs_count(const int64_t *place, const int64_t *degree, int64_t n, int64_t fanout, int replace, int64_t *n_edges,
              int64_t *n_missing, int *any_drawn);

FS_INLINE uint64_t fs_slot(fs_shape shape, int64_t id)
{
    return ((uint64_t)id * shape.multiplier) >> shape.shift & shape.mask;
}

/* Draw alone, and take the numbers that are kept: src[] and edge_pos[], one array, are left with these, or ~position in the file. */
void fs_draw_places(fs_hop *hop, fs_draw_lanes_fn draw_lanes);

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

/* Begin a hop whose neighbours are drawn elsewhere: src[] says where they lie, dst[] whose they are. Counts those that must be
 * read; returns the first edge of no destination, or -1. */
int64_t fs_begin_drawn(fs_hop *hop);

/* Its second part, where edge_pos[] is there: number its edges among all edges. */
void fs_note_drawn(fs_hop *hop);

/* A whole hop whose lists are all in memory; returns 1 when it needs more room and must be called again. */
int fs_expand(fs_hop *hop, fs_draw_lanes_fn draw_lanes);

/* First part of a hop with lists in the file: draw everything, fetch what is in memory, list the rest. */
void fs_draw(fs_hop *hop, fs_draw_lanes_fn draw_lanes);

/* Second part: put the ids that were read where they belong; returns the first id out of [0, n_total), or -1. */
int64_t fs_fill(fs_hop *hop, const void *ids, int wide, int64_t n_total);

/* Third part: number everything; returns 1 when it needs more room and must be called again. */
int fs_number_all(fs_hop *hop);

/* Enter nodes 0 … n-1 into an emptied or outdated table; returns the first that is there already, or -1. */
int64_t fs_enter(fs_hop *hop, int64_t n);

#endif
