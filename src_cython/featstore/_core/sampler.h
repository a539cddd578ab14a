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

/* Number the edges from `first` on among all edges; they are drawn, and src[] still says where their ids lie. */
static void fs_note_positions(fs_hop *hop, int64_t first)
{
    for (int64_t e = first; e < hop->drawn; e++) {
        const int64_t i = hop->dst[e], place = hop->place[i];
        hop->edge_pos[e] = hop->starts[i] + (place < 0 ? place - hop->src[e] : hop->src[e] - place);
    }
}

/* Take the numbers of edges first … end - 1 that are kept; edge_pos[] says where, or ~position in the file. */
static void fs_take_numbers(fs_hop *hop, int64_t first, int64_t end)
{
    for (int64_t e = first; e < end; e++)
        if (hop->edge_pos[e] >= 0)
            hop->edge_pos[e] = fs_record(hop->edge_ids, hop->edge_ids_wide, hop->edge_pos[e]);
}

/* Draw alone, and take the numbers that are kept: src[] and edge_pos[], one array, are left with these, or ~position in the file. */
static void fs_draw_places(fs_hop *hop, fs_draw_lanes_fn draw_lanes)
{
    uint8_t network[FS_NETWORK][2];
    const int n_network = hop->fanout >= 0 && hop->fanout <= FS_LANE_DRAWS ? fs_network((int)hop->fanout, network) : 0;
    while (hop->gathered < hop->n_edges) {
        const int64_t drawn = hop->drawn;
        fs_draw_chunk(hop, hop->wide, draw_lanes, network, n_network);
        if (hop->edge_ids)
            fs_take_numbers(hop, hop->gathered, drawn);
        hop->gathered = drawn;
    }
}

/* Fetch the ids of edges up to `end`, all in memory; with `edge_ids` leave in edge_pos[] where they are, for fs_take_numbers. */
FS_INLINE void fs_gather(fs_hop *hop, int wide, const void *edge_ids, int64_t end)
{
    int64_t *src = hop->src, *edge_pos = hop->edge_pos;
    const void *records = hop->records;
    const uint64_t *table = hop->table;
    const fs_shape shape = hop->shape;
    const int edge_ids_wide = hop->edge_ids_wide;
    for (int64_t e = hop->gathered; e < end; e++) {
        const int64_t place = src[e], id = fs_record(records, wide, place);
        fs_fetch(&table[fs_slot(shape, id)]);
        if (edge_ids) {
            fs_prefetch_record(edge_ids, edge_ids_wide, place);
            edge_pos[e] = place;
        }
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
        if (hop->edge_ids) {
            if (place >= 0)
                fs_prefetch_record(hop->edge_ids, hop->edge_ids_wide, place);
            hop->edge_pos[e] = place >= 0 ? place : ~hop->edge_pos[e];
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
        if (drawn - gathered < FS_CHUNK_EDGES) {
            fs_draw_chunk(hop, wide, draw_lanes, network, n_network);
            if (hop->edge_pos && !hop->edge_ids)
                fs_note_positions(hop, drawn);
        }
        const int64_t end = drawn - gathered < FS_CHUNK_EDGES ? drawn : gathered + FS_CHUNK_EDGES;
        if (hop->edge_ids)
            fs_gather(hop, wide, hop->edge_ids, end);
        else
            fs_gather(hop, wide, NULL, end);
        const int wants_room = fs_number(hop, exact, gathered); /* meanwhile the numbers of the edges gathered come in */
        if (hop->edge_ids)
            fs_take_numbers(hop, gathered, end);
        if (wants_room)
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
        const int64_t drawn = hop->drawn, gathered = hop->gathered;
        if (hop->wide)
            fs_draw_chunk(hop, 1, draw_lanes, network, n_network);
        else
            fs_draw_chunk(hop, 0, draw_lanes, network, n_network);
        if (hop->edge_pos)
            fs_note_positions(hop, drawn);
        if (hop->wide)
            fs_gather_some(hop, 1, drawn);
        else
            fs_gather_some(hop, 0, drawn);
        if (hop->edge_ids)
            fs_take_numbers(hop, gathered, drawn);
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
            fs_fetch(&hop->table[fs_slot(shape, hop->src[e])]);
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
            fs_fetch(&hop->table[fs_slot(hop->shape, hop->nodes[i + 16])]);
        fs_number_of(hop->table, hop->shape, hop->base, hop->nodes, hop->exact, hop->nodes[i], (uint32_t)i, &fresh);
        if (!fresh)
            return i;
    }
    return -1;
}

#endif
