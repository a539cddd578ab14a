#include "epochs.h"
#include "pairs.h"

#include <string.h>

_Static_assert(FS_DRAWN_HEAD + FS_TAKEN <= FS_LEAST_BLOCKS * FS_LEAST_BLOCK, "a record fits an empty arena");

void fs_logs_clear(fs_logs *logs)
{
    for (int64_t b = 0; b < logs->n_blocks; b++)
        logs->next[b] = b + 1 < logs->n_blocks ? (int32_t)(b + 1) : -1;
    logs->free = logs->n_blocks ? 0 : -1;
    logs->n_free = logs->n_blocks;
    for (int64_t log = 0; log < logs->n_logs; log++) {
        logs->first[log] = logs->last[log] = -1;
        logs->fill[log] = (int32_t)logs->block_words;
        logs->length[log] = 0;
    }
}

FS_INLINE char *fs_log_block(const fs_logs *logs, int wide, int32_t block)
{
    return logs->arena + (size_t)block * (size_t)logs->block_words * (wide ? 8 : 4);
}

/* Begin a new block of a log; there is a free one. */
static void fs_log_extend(fs_logs *logs, int64_t log)
{
    const int32_t block = logs->free;
    logs->free = logs->next[block];
    logs->n_free--;
    logs->next[block] = -1;
    if (logs->last[log] < 0)
        logs->first[log] = block;
    else
        logs->next[logs->last[log]] = block;
    logs->last[log] = block;
    logs->fill[log] = 0;
}

FS_INLINE void fs_word(void *words, int wide, int64_t i, int64_t value)
{
    if (wide)
        ((int64_t *)words)[i] = value;
    else
        ((int32_t *)words)[i] = (int32_t)value;
}

FS_INLINE void fs_log_put(fs_logs *logs, int wide, int64_t log, int64_t value)
{
    if (FS_RARE(logs->fill[log] == logs->block_words))
        fs_log_extend(logs, log);
    fs_word(fs_log_block(logs, wide, logs->last[log]), wide, logs->fill[log]++, value);
}

/* Room for n words of a log in one piece; NULL where its last block has not so much. */
FS_INLINE void *fs_log_room(fs_logs *logs, int wide, int64_t log, int64_t n)
{
    const int32_t fill = logs->fill[log];
    if (FS_RARE(logs->block_words - fill < n))
        return NULL;
    logs->fill[log] = fill + (int32_t)n;
    logs->length[log] += n;
    return fs_log_block(logs, wide, logs->last[log]) + (size_t)fill * (wide ? 8 : 4);
}

void fs_log_copy(const fs_logs *logs, int64_t log, char *out)
{
    const size_t width = logs->wide ? 8 : 4;
    for (int32_t block = logs->first[log]; block >= 0; block = logs->next[block]) {
        const int64_t n = block == logs->last[log] ? logs->fill[log] : logs->block_words;
        memcpy(out, fs_log_block(logs, logs->wide, block), (size_t)n * width);
        out += (size_t)n * width;
    }
}

int64_t fs_scatter(fs_logs *logs, const int64_t *lists, int64_t first, int64_t end, int64_t batch, int64_t place, int shift)
{
    for (int64_t i = first; i < end; i++) {
        const int64_t log = lists[i] >> shift;
        if (FS_RARE(!logs->n_free))
            return i;
        fs_log_put(logs, logs->wide, log, lists[i]);
        fs_log_put(logs, logs->wide, log, batch);
        fs_log_put(logs, logs->wide, log, place + i);
        logs->length[log] += FS_TARGET_WORDS;
    }
    return end;
}

int fs_sort_targets(const void *records, int wide, int64_t n, int64_t base, int64_t range, int64_t *ends, uint32_t *batch,
                    uint32_t *place)
{
    memset(ends, 0, (size_t)(range + 1) * sizeof *ends);
    for (int64_t i = 0; i < n; i++) {
        const int64_t node = fs_record(records, wide, FS_TARGET_WORDS * i) - base;
        if (FS_RARE((uint64_t)node >= (uint64_t)range))
            return 0;
        ends[node + 1]++;
    }
    for (int64_t node = 0; node < range; node++)
        ends[node + 1] += ends[node];
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = ends[fs_record(records, wide, FS_TARGET_WORDS * i) - base]++;
        batch[at] = (uint32_t)fs_record(records, wide, FS_TARGET_WORDS * i + 1);
        place[at] = (uint32_t)fs_record(records, wide, FS_TARGET_WORDS * i + 2);
    }
    return 1;
}

int64_t fs_distinct(const int64_t *ends, int64_t range, int64_t base, int64_t *nodes, int64_t *starts)
{
    int64_t n = 0, begin = 0;
    for (int64_t node = 0; node < range; node++) {
        nodes[n] = base + node;
        starts[n] = begin;
        n += ends[node] > begin;
        begin = ends[node];
    }
    starts[n] = begin;
    return n;
}

int64_t fs_sort_few(const void *records, int wide, int64_t n, int64_t base, int64_t range, uint32_t *batch, uint32_t *place,
                    int64_t *nodes, int64_t *starts)
{
    for (int64_t i = 0; i < n; i++) {
        const int64_t node = fs_record(records, wide, FS_TARGET_WORDS * i) - base;
        if (FS_RARE((uint64_t)node >= (uint64_t)range))
            return -1;
        nodes[i] = node << 32 | i;
    }
    const int bits = 64 - __builtin_clzll((uint64_t)range | 1);
    if (fs_sort_keys((uint64_t *)nodes, (uint64_t *)starts, (uint64_t)n, 32, 32 + bits) == (uint64_t *)starts)
        memcpy(nodes, starts, (size_t)n * sizeof *nodes);
    int64_t found = 0, last = -1;
    for (int64_t at = 0; at < n; at++) {
        const int64_t node = nodes[at] >> 32, i = nodes[at] & UINT32_MAX;
        batch[at] = (uint32_t)fs_record(records, wide, FS_TARGET_WORDS * i + 1);
        place[at] = (uint32_t)fs_record(records, wide, FS_TARGET_WORDS * i + 2);
        if (node != last) {
            nodes[found] = base + node;
            starts[found++] = at;
        }
        last = node;
    }
    starts[found] = n;
    return found;
}

/* Put id number `at` into word `j` of what begins at `out`. */
FS_INLINE void fs_put_id(fs_pass *pass, int wide, int logs_wide, void *out, int64_t j, int64_t at)
{
    if (wide == FS_ELSEWHERE) {
        pass->positions[pass->n_positions] = at;
        pass->holes[pass->n_positions++] = ((char *)out - pass->logs->arena) / (logs_wide ? 8 : 4) + j;
    } else
        fs_word(out, logs_wide, j, fs_record(pass->ids, wide, at));
}

/* Log what a target took at list positions x[0] … x[n-1] (ascending), or 0 … n - 1 where x is NULL, but for the first *done of those
 * that are here. Stops where no more than `keep` blocks are free, or positions that `keep_positions`: returns 1, and counts in
 * *done. */
FS_INLINE int fs_emit(fs_pass *pass, int logs_wide, int64_t log, uint32_t place, int64_t at, const int64_t *x, int64_t n,
                      int64_t keep, int64_t keep_positions, int64_t *done)
{
    fs_logs *logs = pass->logs;
    const int64_t most = (logs->block_words - FS_DRAWN_HEAD) / (pass->numbered ? 2 : 1);
    int64_t from = 0, to = n;
    if (x) {
        while (from < n && at + x[from] < 0)
            from++;
        while (to > from && at + x[to - 1] >= pass->n_ids)
            to--;
    } else {
        from = at < 0 ? -at : 0;
        to = at + n > pass->n_ids ? pass->n_ids - at : n;
    }
    for (from += *done; from < to;) {
        int64_t count = to - from < most ? to - from : most;
        if (pass->wide == FS_ELSEWHERE && count > pass->most_positions - pass->n_positions - keep_positions)
            count = pass->most_positions - pass->n_positions - keep_positions;
        if (FS_RARE(logs->n_free <= keep || count <= 0))
            return 1;
        fs_log_put(logs, logs_wide, log, place);
        fs_log_put(logs, logs_wide, log, count);
        for (int64_t j = from; j < from + count; j++) {
            if (FS_RARE(logs->fill[log] == logs->block_words))
                fs_log_extend(logs, log);
            fs_put_id(pass, pass->wide, logs_wide, fs_log_block(logs, logs_wide, logs->last[log]), logs->fill[log]++,
                      at + (x ? x[j] : j));
        }
        if (pass->numbered) {
            for (int64_t j = from; j < from + count; j++)
                fs_log_put(logs, logs_wide, log, x ? x[j] : j);
            logs->length[log] += count;
        }
        logs->length[log] += FS_DRAWN_HEAD + count;
        from += count;
        *done += count;
    }
    *done = 0;
    return 0;
}

/* Targets that draw side by side. */
typedef struct {
    int n;
    int64_t target[FS_LANES], at[FS_LANES];
    uint64_t key[FS_LANES];
    uint32_t degree[FS_LANES];
} fs_lanes;

/* Draw for them, and log it. Each takes one fresh block at most: there are so many. */
FS_INLINE void fs_draw_and_log(fs_pass *pass, int wide, int logs_wide, fs_lanes *lanes, fs_draw_lanes_fn draw_lanes,
                               uint8_t (*network)[2], int n_network)
{
    const int k = (int)pass->fanouts[pass->hop];
    fs_u32s x[FS_LANE_DRAWS];
    for (int l = lanes->n; l < FS_LANES; l++) { /* idle lanes draw something harmless */
        lanes->key[l] = 0;
        lanes->degree[l] = (uint32_t)k + 1;
    }
    draw_lanes(lanes->key, lanes->degree, k, pass->replace, network, n_network, x);
    for (int l = 0; l < lanes->n; l++) {
        const int64_t target = lanes->target[l], at = lanes->at[l];
        const int64_t log = pass->hop * pass->n_batches + pass->batch[target];
        const int is_here = at >= 0 && at + (int64_t)lanes->degree[l] <= pass->n_ids;
        void *out = is_here ? fs_log_room(pass->logs, logs_wide, log, FS_DRAWN_HEAD + k) : NULL;
        if (FS_RARE(!out)) {
            int64_t positions[FS_LANE_DRAWS], done = 0;
            for (int j = 0; j < k; j++)
                positions[j] = x[j][l];
            fs_emit(pass, logs_wide, log, pass->place[target], at, positions, k, -1, 0, &done);
            continue;
        }
        fs_word(out, logs_wide, 0, pass->place[target]);
        fs_word(out, logs_wide, 1, k);
        for (int j = 0; j < k; j++)
            fs_put_id(pass, wide, logs_wide, out, FS_DRAWN_HEAD + j, at + (int64_t)x[j][l]);
    }
    lanes->n = 0;
}

/* One hop of the pass; returns 1 where the arena or the list of positions is full. What queued lanes may need stays free. */
FS_INLINE int fs_pass_hop(fs_pass *pass, int wide, int logs_wide, fs_draw_lanes_fn draw_lanes)
{
    const int64_t hop = pass->hop, fanout = pass->fanouts[hop];
    const uint64_t *keys = pass->keys + hop * pass->n_batches;
    uint8_t network[FS_NETWORK][2];
    const int n_network = fanout > 0 && fanout <= FS_LANE_DRAWS ? fs_network((int)fanout, network) : 0;
    fs_lanes lanes;
    int full = 0;
    lanes.n = 0;
    for (; fanout && pass->node < pass->end; pass->node++) {
        const int64_t node = pass->node, at = pass->at[node - pass->first], degree = pass->degree[node - pass->first];
        const int is_drawn = fs_is_drawn(degree, fanout, pass->replace);
        const int in_lanes = is_drawn && fanout <= FS_LANE_DRAWS && degree <= UINT32_MAX;
        if (pass->target < pass->starts[node])
            pass->target = pass->starts[node];
        for (; pass->target < pass->starts[node + 1]; pass->target++) {
            const int64_t target = pass->target;
            const uint32_t batch = pass->batch[target];
            full = pass->logs->n_free <= FS_LANES ||
                   (wide == FS_ELSEWHERE && pass->most_positions - pass->n_positions < FS_LANES * FS_LANE_DRAWS);
            if (FS_RARE(full))
                goto done;
            if (in_lanes) {
                lanes.target[lanes.n] = target;
                lanes.at[lanes.n] = at;
                lanes.key[lanes.n] = fs_absorb(keys[batch], (uint64_t)pass->nodes[node]);
                lanes.degree[lanes.n++] = (uint32_t)degree;
                if (lanes.n == FS_LANES)
                    fs_draw_and_log(pass, wide, logs_wide, &lanes, draw_lanes, network, n_network);
                continue;
            }
            if (is_drawn)
                fs_draw_one(fs_absorb(keys[batch], (uint64_t)pass->nodes[node]), degree, fanout, pass->replace, pass->drawn,
                            pass->scratch);
            full = fs_emit(pass, logs_wide, hop * pass->n_batches + batch, pass->place[target], at, is_drawn ? pass->drawn : NULL,
                           is_drawn ? fanout : degree, FS_LANES, (FS_LANES - 1) * FS_LANE_DRAWS, &pass->done);
            if (FS_RARE(full))
                goto done;
        }
    }
done:
    if (lanes.n)
        fs_draw_and_log(pass, wide, logs_wide, &lanes, draw_lanes, network, n_network);
    return full;
}

/* Log n ids that a target took, FS_TAKEN words of them at the most, and their places in its list, if not NULL; returns 1, and logs
 * nothing, where there is no room. */
FS_INLINE int fs_log_taken(fs_logs *logs, int wide, int logs_wide, int64_t log, uint32_t place, const void *ids,
                           const int64_t *places, int64_t n)
{
    const int64_t n_words = FS_DRAWN_HEAD + (places ? 2 * n : n);
    void *out;
    if (!n)
        return 0;
    out = fs_log_room(logs, logs_wide, log, n_words);
    if (out) {
        fs_word(out, logs_wide, 0, place);
        fs_word(out, logs_wide, 1, n);
        for (int64_t j = 0; j < n; j++)
            fs_word(out, logs_wide, FS_DRAWN_HEAD + j, fs_record(ids, wide, j));
        for (int64_t j = 0; places && j < n; j++)
            fs_word(out, logs_wide, FS_DRAWN_HEAD + n + j, places[j]);
        return 0;
    }
    if (logs->n_free * logs->block_words < n_words)
        return 1;
    fs_log_put(logs, logs_wide, log, place);
    fs_log_put(logs, logs_wide, log, n);
    for (int64_t j = 0; j < n; j++)
        fs_log_put(logs, logs_wide, log, fs_record(ids, wide, j));
    for (int64_t j = 0; places && j < n; j++)
        fs_log_put(logs, logs_wide, log, places[j]);
    logs->length[log] += n_words;
    return 0;
}

/* One hop of a pass of layer-neighbour sampling; returns 1 where the arena is full. */
FS_INLINE int fs_take_hop(fs_pass *pass, int wide, int logs_wide)
{
    const int64_t hop = pass->hop, fanout = pass->fanouts[hop], width = wide ? 8 : 4;
    const char *ids = (const char *)pass->ids;
    char taken[8 * (FS_TAKEN + FS_SPARE)] __attribute__((aligned(64)));
    int64_t memory[FS_TAKEN + FS_SPARE], *const places = pass->numbered ? memory : NULL;
    const int64_t half = places ? FS_TAKEN / 4 : FS_TAKEN / 2; /* of a record */
    for (; fanout && pass->node < pass->end; pass->node++) {
        const int64_t node = pass->node, at = pass->at[node - pass->first], degree = pass->degree[node - pass->first];
        const int64_t first = at < 0 ? -at : 0, end = at + degree > pass->n_ids ? pass->n_ids - at : degree;
        const int compares = fs_compares(degree, fanout);
        const uint32_t last = compares ? fs_last(degree, fanout) : UINT32_MAX;
        if (pass->target < pass->starts[node])
            pass->target = pass->starts[node];
        for (; pass->target < pass->starts[node + 1]; pass->target++) {
            const uint32_t place = pass->place[pass->target];
            const int64_t log = hop * pass->n_batches + pass->batch[pass->target];
            const uint64_t *key = pass->keys + FS_KEY_WORDS * log;
            fs_numbers numbers;
            if (!compares) {
                if (FS_RARE(fs_emit(pass, logs_wide, log, place, at, NULL, degree, 0, 0, &pass->done)))
                    return 1;
                continue;
            }
            fs_set_numbers(&numbers, key[0], key[1], key[2], (uint32_t)key[3]);
            for (int64_t from = first + pass->done; from < end; pass->done = from - first) {
                int64_t n_taken = 0;
                while (from < end && n_taken <= half) {
                    const int64_t n = end - from < half ? end - from : half;
                    const char *piece = ids + (at + from) * width;
                    char *out = taken + n_taken * width;
                    if (places)
                        n_taken += pass->take_places(piece, wide, n, &numbers, last, out, from, places + n_taken);
                    else
                        n_taken += pass->take(piece, wide, n, &numbers, last, out);
                    from += n;
                }
                if (FS_RARE(fs_log_taken(pass->logs, wide, logs_wide, log, place, taken, places, n_taken)))
                    return 1;
            }
            pass->done = 0;
        }
    }
    return 0;
}

FS_INLINE int fs_one_hop(fs_pass *pass, int wide, int logs_wide, fs_draw_lanes_fn draw_lanes)
{
    return pass->take ? fs_take_hop(pass, wide, logs_wide) : fs_pass_hop(pass, wide, logs_wide, draw_lanes);
}

int fs_draw_lists(fs_pass *pass, fs_draw_lanes_fn draw_lanes)
{
    const int wide = pass->wide, logs_wide = pass->logs->wide;
    for (; pass->hop < pass->n_hops; pass->hop++, pass->node = pass->first, pass->target = 0) {
        int full;
        if (wide == FS_ELSEWHERE)
            full = logs_wide ? fs_pass_hop(pass, FS_ELSEWHERE, 1, draw_lanes) : fs_pass_hop(pass, FS_ELSEWHERE, 0, draw_lanes);
        else
            full = logs_wide ? (wide ? fs_one_hop(pass, 1, 1, draw_lanes) : fs_one_hop(pass, 0, 1, draw_lanes))
                             : fs_one_hop(pass, 0, 0, draw_lanes);
        if (full)
            return 1;
    }
    return 0;
}

void fs_fill_holes(fs_pass *pass, const void *found, int wide)
{
    for (int64_t i = 0; i < pass->n_positions; i++)
        fs_word(pass->logs->arena, pass->logs->wide, pass->holes[i], fs_record(found, wide, i));
    pass->n_positions = 0;
}

int64_t fs_count_drawn(const void *records, int wide, int each, int64_t n_words, int64_t n_dst, int64_t *counts)
{
    int64_t n_edges = 0;
    memset(counts, 0, (size_t)n_dst * sizeof *counts);
    for (int64_t i = 0; i < n_words;) {
        if (n_words - i < FS_DRAWN_HEAD)
            return -1;
        const int64_t place = fs_record(records, wide, i), n = fs_record(records, wide, i + 1);
        if ((uint64_t)place >= (uint64_t)n_dst || n < 0 || n > (n_words - i - FS_DRAWN_HEAD) / each)
            return -1;
        counts[place] += n;
        n_edges += n;
        i += FS_DRAWN_HEAD + each * n;
    }
    return n_edges;
}

int fs_are_counted(const int64_t *places, int64_t n, int64_t n_edges, int64_t *counts)
{
    int64_t found = 0;
    for (int64_t k = 0; k < n; k++) {
        found += counts[places[k]];
        counts[places[k]] = ~counts[places[k]]; /* below 0: a place that comes again is counted as less than it has */
    }
    for (int64_t k = 0; k < n; k++)
        counts[places[k]] = ~counts[places[k]];
    return found == n_edges;
}

void fs_order_drawn(const void *records, int wide, int each, int64_t n_words, const int64_t *places, const int64_t *owners,
                    int64_t n_dst, int64_t *counts, int64_t *src, int64_t *dst, const int64_t *starts, int64_t *edge_pos)
{
    int64_t edge = 0;
    for (int64_t i = 0; i < n_dst; i++) {
        int64_t *const count = counts + (places ? places[i] : i);
        const int64_t n = *count, owner = places ? owners[i] : i;
        *count = edge;
        for (int64_t j = 0; j < n; j++)
            dst[edge + j] = owner;
        edge += n;
    }
    for (int64_t i = 0; i < n_words;) {
        const int64_t place = fs_record(records, wide, i), n = fs_record(records, wide, i + 1);
        int64_t *out = src + counts[place];
        for (int64_t j = 0; j < n; j++)
            out[j] = fs_record(records, wide, i + FS_DRAWN_HEAD + j);
        if (edge_pos) {
            int64_t *numbers = edge_pos + counts[place];
            for (int64_t j = 0; j < n; j++) {
                const int64_t at = fs_record(records, wide, i + FS_DRAWN_HEAD + n + j);
                numbers[j] = starts[place] + (wide ? at : (int64_t)(uint32_t)at);
            }
        }
        counts[place] += n;
        i += FS_DRAWN_HEAD + each * n;
    }
}
