#include "sampler.h"

#include <stddef.h>

FS_INLINE int64_t fs_n_drawn(int64_t degree, int64_t fanout, int replace)
{
    if (fanout < 0 || degree == 0)
        return degree;
    return replace || degree > fanout ? fanout : degree;
}

void fs_count(const int64_t *place, const int64_t *degree, int64_t n, int64_t fanout, int replace, int64_t *n_edges,
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

/* Fetch the ids of the next chunk of edges, which are drawn. */
FS_INLINE void fs_fetch_chunk(fs_hop *hop, int wide)
{
    const int64_t end = hop->n_edges - hop->drawn < FS_CHUNK_EDGES ? hop->n_edges : hop->drawn + FS_CHUNK_EDGES;
    for (int64_t e = hop->drawn; e < end; e++)
        if (hop->src[e] >= 0)
            fs_prefetch_record(hop->records, wide, hop->src[e]);
    hop->drawn = end;
}

/* Draw for the next chunk of destinations. */
FS_INLINE void fs_draw_chunk(fs_hop *hop, int wide, fs_draw_lanes_fn draw_lanes, uint8_t (*network)[2], int n_network)
{
    if (hop->is_drawn) {
        fs_fetch_chunk(hop, wide);
        return;
    }
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
            const uint64_t key = fs_absorb(hop->key, (uint64_t)hop->lists[i]);
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

int64_t fs_begin_drawn(fs_hop *hop)
{
    hop->is_drawn = 1;
    hop->next_dst = hop->n_dst;
    hop->drawn = hop->gathered = hop->numbered = hop->n_missing = 0;
    for (int64_t e = 0; e < hop->n_edges; e++) {
        if (FS_RARE((uint64_t)hop->dst[e] >= (uint64_t)hop->n_dst))
            return e;
        hop->n_missing += hop->src[e] < 0;
    }
    return -1;
}

void fs_note_drawn(fs_hop *hop)
{
    hop->drawn = hop->n_edges;
    fs_note_positions(hop, 0);
    hop->drawn = 0;
}

void fs_draw_places(fs_hop *hop, fs_draw_lanes_fn draw_lanes)
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
FS_INLINE void fs_gather(fs_hop *hop, int wide, const void *edge_ids, const int64_t *offsets, int64_t end)
{
    int64_t *src = hop->src, *edge_pos = hop->edge_pos;
    const int64_t *dst = hop->dst;
    const void *records = hop->records;
    const uint64_t *table = hop->table;
    const fs_shape shape = hop->shape;
    const int edge_ids_wide = hop->edge_ids_wide;
    for (int64_t e = hop->gathered; e < end; e++) {
        const int64_t place = src[e], id = fs_record(records, wide, place) + (offsets ? offsets[dst[e]] : 0);
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
    const int64_t *dst = hop->dst, *offsets = hop->offsets;
    for (int64_t e = hop->gathered; e < end; e++) {
        const int64_t place = src[e];
        if (place >= 0) {
            src[e] = fs_record(hop->records, wide, place) + (offsets ? offsets[dst[e]] : 0);
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
            if (hop->edge_pos && !hop->edge_ids && !hop->is_drawn)
                fs_note_positions(hop, drawn);
        }
        const int64_t end = drawn - gathered < FS_CHUNK_EDGES ? drawn : gathered + FS_CHUNK_EDGES;
        if (hop->offsets)
            fs_gather(hop, wide, hop->edge_ids, hop->offsets, end);
        else if (hop->edge_ids)
            fs_gather(hop, wide, hop->edge_ids, NULL, end);
        else
            fs_gather(hop, wide, NULL, NULL, end);
        const int wants_room = fs_number(hop, exact, gathered); /* meanwhile the numbers of the edges gathered come in */
        if (hop->edge_ids)
            fs_take_numbers(hop, gathered, end);
        if (wants_room)
            return 1;
    }
    return 0;
}

int fs_expand(fs_hop *hop, fs_draw_lanes_fn draw_lanes)
{
    if (hop->wide)
        return hop->exact ? fs_expand_as(hop, 1, 1, draw_lanes) : fs_expand_as(hop, 1, 0, draw_lanes);
    return hop->exact ? fs_expand_as(hop, 0, 1, draw_lanes) : fs_expand_as(hop, 0, 0, draw_lanes);
}

void fs_draw(fs_hop *hop, fs_draw_lanes_fn draw_lanes)
{
    uint8_t network[FS_NETWORK][2];
    const int n_network = hop->fanout >= 0 && hop->fanout <= FS_LANE_DRAWS ? fs_network((int)hop->fanout, network) : 0;
    while (hop->gathered < hop->n_edges) {
        const int64_t drawn = hop->drawn, gathered = hop->gathered;
        if (hop->wide)
            fs_draw_chunk(hop, 1, draw_lanes, network, n_network);
        else
            fs_draw_chunk(hop, 0, draw_lanes, network, n_network);
        if (hop->edge_pos && !hop->is_drawn)
            fs_note_positions(hop, drawn);
        if (hop->wide)
            fs_gather_some(hop, 1, drawn);
        else
            fs_gather_some(hop, 0, drawn);
        if (hop->edge_ids)
            fs_take_numbers(hop, gathered, drawn);
    }
}

int64_t fs_fill(fs_hop *hop, const void *ids, int wide, int64_t n_total)
{
    for (int64_t i = 0; i < hop->n_missing; i++) {
        const int64_t id = fs_record(ids, wide, i);
        if (FS_RARE((uint64_t)id >= (uint64_t)n_total))
            return i;
        const int64_t e = hop->edges[i];
        hop->src[e] = id + (hop->offsets ? hop->offsets[hop->dst[e]] : 0);
    }
    return -1;
}

int fs_number_all(fs_hop *hop)
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

int64_t fs_enter(fs_hop *hop, int64_t n)
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
