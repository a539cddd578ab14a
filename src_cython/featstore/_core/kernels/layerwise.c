#include "layerwise.h"

#include <math.h>
#include <string.h>

int64_t fs_take_lists(fs_layer *layer, const int64_t *degree, const int64_t *place, const void *found, void *listed,
                      int32_t *owners, int64_t room)
{
    const int64_t bytes = layer->wide ? 8 : 4, stop = layer->stop_dst;
    const char *records = (const char *)layer->records;
    int64_t i = layer->next_dst, position = layer->next_position, n_used = layer->n_used, taken = 0;
    for (; i < stop || position < layer->stop_position; i++, position = 0) {
        const int64_t end = i < stop ? degree[i] : layer->stop_position, left = end - position;
        const int64_t n = left < room - taken ? left : room - taken, at = place[i];
        if (i + FS_AHEAD < layer->n_dst && place[i + FS_AHEAD] >= 0)
            fs_prefetch_record(records, layer->wide, place[i + FS_AHEAD]);
        if (n > 0)
            memcpy((char *)listed + taken * bytes, at < 0 ? (const char *)found + n_used * bytes : records + (at + position) * bytes,
                   (size_t)(n * bytes));
        for (int64_t e = taken; e < taken + n; e++)
            owners[e] = (int32_t)i;
        n_used += at < 0 ? n : 0;
        taken += n;
        position += n;
        if (n < left || i == stop) /* no room for more, or the turn ends within a list */
            break;
    }
    layer->next_dst = i;
    layer->next_position = position;
    layer->n_used = n_used;
    return taken;
}

void fs_accumulate(const void *listed, int wide, const int32_t *owners, int64_t n, const int64_t *degree, int is_mean,
                   double *importance, int64_t *n_edges)
{
    for (int64_t e = 0; e < n; e++) {
        const int64_t t = fs_record(listed, wide, e);
        if (is_mean) {
            const double share = 1 / (double)degree[owners[e]];
            importance[t] += share * share;
        } else {
            importance[t] += 1;
        }
        n_edges[t]++;
    }
}

/* Number of a node, or -1 where it has none. */
FS_INLINE int64_t fs_find(const fs_hop *hop, int64_t id)
{
    uint64_t slot = fs_slot(hop->shape, id);
    for (;;) {
        const uint64_t entry = hop->table[slot];
        const uint32_t number = (uint32_t)entry - hop->base;
        if (number >= (uint64_t)hop->n_nodes)
            return -1;
        if (entry >> 32 == (uint32_t)id && (hop->exact || hop->nodes[number] == id))
            return number;
        slot = (slot + 1) & hop->shape.mask;
    }
}

/* A number in [0, 1): 53 bits of a word. */
FS_INLINE double fs_unit(uint64_t word)
{
    return (double)(word >> 11) * 0x1p-53;
}

void fs_set_certain(const fs_hop *batch, const int64_t *ids, double *importance, int64_t n)
{
    for (int64_t t = 0; t < n; t++) {
        if (t + FS_FORE < n)
            __builtin_prefetch(&batch->table[fs_slot(batch->shape, ids[t + FS_FORE])]);
        if (fs_find(batch, ids[t]) >= 0)
            importance[t] = -1;
    }
}

void fs_draw_distinct(const int64_t *ids, double *importance, int64_t n, int64_t size, uint64_t key)
{
    double limit = INFINITY, scale = 0, carried = 0; /* what is above `limit` is certain */
    int64_t left = size, held = -1, n_open = 0;
    double held_factor = 0;
    for (int64_t t = 0; t < n; t++)
        n_open += importance[t] >= 0;
    if (n_open <= size) {
        for (int64_t t = 0; t < n; t++)
            importance[t] = 1;
        return;
    }
    for (;;) {
        double sum = 0, next;
        int64_t n_above = 0;
        for (int64_t t = 0; t < n; t++)
            sum += importance[t] >= 0 && importance[t] < limit ? importance[t] : 0;
        scale = (double)left / sum;
        next = 1 / scale;
        for (int64_t t = 0; t < n; t++)
            n_above += importance[t] >= next && importance[t] < limit;
        if (!n_above)
            break;
        limit = next;
        left -= n_above;
        if (left <= 0)
            break;
    }
    for (int64_t t = 0; t < n; t++) {
        const double own = importance[t], p = scale * own, sum = carried + p;
        if (own < 0 || own >= limit) {
            importance[t] = 1;
            continue;
        }
        importance[t] = 0;
        if (left <= 0)
            continue;
        if (held < 0) {
            held = t, carried = p, held_factor = 1 / p;
            continue;
        }
        const double u = fs_unit(fs_absorb(key, (uint64_t)ids[t]));
        if (sum < 1) { /* one of the two is out, and the other goes on with the chances of both */
            if (u * sum >= carried)
                held = t, held_factor = 1 / p;
            carried = sum;
        } else { /* one of the two is taken, and the other goes on with what is left */
            if (u * (2 - sum) < 1 - p) {
                importance[held] = held_factor;
                held = t, held_factor = 1 / p;
            } else {
                importance[t] = 1 / p;
            }
            carried = sum - 1;
        }
    }
    if (held >= 0 && carried >= 0.5) /* 0 or 1, but for rounding */
        importance[held] = held_factor;
}

void fs_draw_again(double *importance, int64_t n, int64_t size, uint64_t key, double *upto, int64_t *drawn)
{
    double sum = 0;
    int64_t last = -1;
    for (int64_t t = 0; t < n; t++) {
        if (importance[t] > 0) {
            sum += importance[t];
            last = t;
        }
        upto[t] = sum;
    }
    if (last >= 0)
        for (int64_t i = 0; i < size; i++) {
            const double at = fs_unit(fs_absorb(key, (uint64_t)i)) * sum;
            int64_t low = 0, high = last; /* the first whose sum is above */
            while (low < high) {
                const int64_t middle = low + (high - low) / 2;
                if (upto[middle] > at)
                    high = middle;
                else
                    low = middle + 1;
            }
            drawn[i] = low;
        }
    for (int64_t t = 0; t < n; t++)
        upto[t] = 0;
    if (last >= 0)
        for (int64_t i = 0; i < size; i++)
            upto[drawn[i]]++;
    for (int64_t t = 0; t < n; t++)
        importance[t] = importance[t] < 0 ? 1 : upto[t] > 0 ? upto[t] / ((double)size * importance[t] / sum) : 0;
}

/* Go from an id of a piece to the next: `position` is that in its list, which begins anew with another owner. */
#define FS_NEXT_POSITION                                   \
    position = owners[e] == owner ? position + (e > 0) : 0; \
    owner = owners[e]

int64_t fs_take_edges(const void *listed, int wide, const int32_t *owners, int64_t n, const int64_t *degree, int is_mean,
                      const int64_t *ids, const double *factors, int64_t at, int64_t *src, int64_t *dst, float *weights,
                      const int64_t *starts, int64_t position, int64_t *edge_pos)
{
    int32_t owner = n ? owners[0] : 0;
    for (int64_t e = 0; e < n; e++) {
        const int64_t t = fs_record(listed, wide, e);
        FS_NEXT_POSITION;
        const double factor = factors[t];
        if (factor > 0) {
            src[at] = ids[t];
            dst[at] = owner;
            if (edge_pos)
                edge_pos[at] = starts[owner] + position;
            weights[at++] = (float)(is_mean ? factor / (double)degree[owner] : factor);
        }
    }
    return at;
}

int64_t fs_keep_members(const fs_hop *batch, const void *listed, int wide, int32_t *owners, int64_t n, int32_t *numbers,
                        const int64_t *starts, int64_t position, int64_t *edge_pos)
{
    int64_t kept = 0;
    int32_t owner = n ? owners[0] : 0;
    for (int64_t e = 0; e < n && e < FS_FORE; e++)
        __builtin_prefetch(&batch->table[fs_slot(batch->shape, fs_record(listed, wide, e))]);
    for (int64_t e = 0; e < n; e++) {
        if (e + FS_FORE < n)
            __builtin_prefetch(&batch->table[fs_slot(batch->shape, fs_record(listed, wide, e + FS_FORE))]);
        const int64_t number = fs_find(batch, fs_record(listed, wide, e));
        FS_NEXT_POSITION;
        numbers[kept] = (int32_t)number;
        owners[kept] = owner;
        if (edge_pos)
            edge_pos[kept] = starts[owner] + position;
        kept += number >= 0;
    }
    return kept;
}
