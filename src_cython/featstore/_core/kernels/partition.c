#include "partition.h"

#include <math.h>
#include <string.h>

enum { FS_PLACE_AHEAD = 48 }; /* ids fetched ahead: far enough to hide a miss of the last-level cache */

FS_INLINE double fs_power(double x, double exponent)
{
    return exponent == 0.5 ? sqrt(x) : exponent == 1.0 ? x : pow(x, exponent);
}

void fs_weigh_part(fs_placer *s, int64_t part)
{
    const int64_t group = part / s->width;
    double load = s->is_ldg ? (double)s->size[part] : s->scale[group] * fs_power((double)s->size[part], s->exponent);
    if (s->is_train && !s->is_ldg)
        load += s->train_scale[group] * fs_power((double)s->trained[part], s->exponent);
    s->load[part] = s->size[part] < s->cap[group] ? load : INFINITY;
}

/* The less loaded of two parts of a group, the lower of equals; those behind the last are never chosen. */
FS_INLINE int32_t fs_lighter(const double *load, int64_t width, int32_t a, int32_t b)
{
    return b < width && load[b] < load[a] ? b : a;
}

FS_INLINE int32_t fs_entrant(const fs_placer *s, const int32_t *winner, int64_t i)
{
    return i < s->leaves ? winner[i] : (int32_t)(i - s->leaves);
}

void fs_tournament(fs_placer *s, int64_t group)
{
    int32_t *winner = s->winner + group * s->leaves;
    const double *load = s->load + group * s->width;
    winner[0] = 0;
    for (int64_t i = s->leaves - 1; i > 0; i--)
        winner[i] = fs_lighter(load, s->width, fs_entrant(s, winner, 2 * i), fs_entrant(s, winner, 2 * i + 1));
}

/* Weigh a part anew, and play its matches. */
static void fs_reweigh(fs_placer *s, int64_t part)
{
    const int64_t group = part / s->width;
    int32_t *winner = s->winner + group * s->leaves;
    const double *load = s->load + group * s->width;
    const int32_t own = (int32_t)(part - group * s->width);
    fs_weigh_part(s, part);
    for (int64_t i = (own + s->leaves) / 2; i > 0; i /= 2) {
        const int32_t won = fs_lighter(load, s->width, fs_entrant(s, winner, 2 * i), fs_entrant(s, winner, 2 * i + 1));
        if (won == winner[i] && won != own)
            return; /* as before, and its load is as before */
        winner[i] = won;
    }
}

static void fs_put(fs_placer *s, int64_t node, int64_t part, int by)
{
    s->size[part] += by;
    if (s->is_train)
        s->trained[part] += s->is_train[node] ? by : 0;
    fs_reweigh(s, part);
}

/* Take the node out of its part, if it has one: it is no neighbour of its own, and its place is free. */
FS_INLINE void fs_open(fs_placer *s)
{
    const int32_t part = s->part[s->node];
    s->is_open = 1;
    s->n_touched = 0;
    if (part >= 0) {
        s->part[s->node] = -1;
        fs_put(s, s->node, part, -1);
    }
}

FS_INLINE double fs_score(const fs_placer *s, int64_t part, int64_t n, int64_t cap)
{
    if (s->is_ldg)
        return (double)n * (1.0 - (double)s->size[part] / (double)cap);
    return (double)n - s->load[part];
}

FS_INLINE void fs_close(fs_placer *s)
{
    const int64_t group = s->group ? s->group[s->node] : 0;
    const int64_t base = group * s->width;
    int64_t best = base + s->winner[group * s->leaves + (s->leaves > 1)];
    int64_t n_best = s->count[best + 1];
    double most = fs_score(s, best, n_best, s->cap[group]);
    for (int64_t i = 0; i < s->n_touched; i++) {
        const int64_t part = (int64_t)s->touched[i] - 1;
        const int64_t n = s->count[part + 1];
        s->count[part + 1] = 0;
        if ((uint64_t)(part - base) >= (uint64_t)s->width || s->load[part] == INFINITY)
            continue; /* not placed, of another group, or full */
        const double score = fs_score(s, part, n, s->cap[group]);
        if (score > most || (score == most && part < best)) {
            most = score;
            best = part;
            n_best = n;
        }
    }
    s->part[s->node] = (int32_t)best;
    s->inside[best] += n_best;
    fs_put(s, s->node, best, 1);
    s->is_open = 0;
    s->node++;
}

FS_INLINE void fs_place_as(fs_placer *s, const void *ids, int wide, int64_t first, int64_t n)
{
    const int64_t end = first + n;
    const int32_t *part = s->part;
    while (s->node < s->n_nodes) {
        const int64_t lo = s->indptr[s->node], hi = s->indptr[s->node + 1];
        const int64_t stop = (hi < end ? hi : end) - first;
        int64_t n_touched;
        if (!s->is_open)
            fs_open(s);
        n_touched = s->n_touched;
        for (int64_t i = (lo > first ? lo : first) - first; i < stop; i++) {
            if (i + FS_PLACE_AHEAD < n)
                __builtin_prefetch(&part[fs_record(ids, wide, i + FS_PLACE_AHEAD)]);
            const int32_t at = part[fs_record(ids, wide, i)] + 1;
            s->touched[n_touched] = at; /* no branch: whether a part was seen before is as good as random */
            n_touched += s->count[at] == 0;
            s->count[at]++;
        }
        s->n_touched = n_touched;
        if (hi > end)
            return; /* the rest of the list is in the next block */
        fs_close(s);
    }
}

void fs_place(fs_placer *s, const void *ids, int wide, int64_t first, int64_t n)
{
    if (wide)
        fs_place_as(s, ids, 1, first, n);
    else
        fs_place_as(s, ids, 0, first, n);
}

FS_INLINE int64_t fs_inside_as(const int64_t *indptr, int64_t node, const int32_t *own, const int32_t *part, const void *ids, int wide, int64_t first,
                               int64_t n, int64_t *n_inside)
{
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        if (i + FS_PLACE_AHEAD < n)
            __builtin_prefetch(&part[fs_record(ids, wide, i + FS_PLACE_AHEAD)]);
        while (indptr[node + 1] <= first + i)
            node++;
        found += part[fs_record(ids, wide, i)] == own[node];
    }
    *n_inside += found;
    return node;
}

int64_t fs_inside(const int64_t *indptr, int64_t node, const int32_t *own, const int32_t *part, const void *ids, int wide, int64_t first,
                  int64_t n, int64_t *n_inside)
{
    if (wide)
        return fs_inside_as(indptr, node, own, part, ids, 1, first, n, n_inside);
    return fs_inside_as(indptr, node, own, part, ids, 0, first, n, n_inside);
}

FS_INLINE int64_t fs_cross_as(const int64_t *indptr, int64_t node, const int32_t *own, const int32_t *part, const void *ids, int wide, int64_t first,
                              int64_t n, void *counts, int wide_counts)
{
    for (int64_t i = 0; i < n; i++) {
        if (i + FS_PLACE_AHEAD < n) {
            const int64_t next = fs_record(ids, wide, i + FS_PLACE_AHEAD);
            __builtin_prefetch(&part[next]);
            __builtin_prefetch((char *)counts + next * (wide_counts ? 8 : 4), 1);
        }
        while (indptr[node + 1] <= first + i)
            node++;
        const int64_t source = fs_record(ids, wide, i);
        const int is_cut = part[source] != own[node];
        if (wide_counts)
            ((int64_t *)counts)[source] += is_cut;
        else
            ((int32_t *)counts)[source] += is_cut;
    }
    return node;
}

int64_t fs_cross(const int64_t *indptr, int64_t node, const int32_t *own, const int32_t *part, const void *ids, int wide, int64_t first,
                 int64_t n, void *counts, int wide_counts)
{
    if (wide)
        return fs_cross_as(indptr, node, own, part, ids, 1, first, n, counts, wide_counts);
    return fs_cross_as(indptr, node, own, part, ids, 0, first, n, counts, wide_counts);
}

void fs_list_starts(const int64_t *degree, const int32_t *part, int64_t n_nodes, int64_t *next, int64_t *starts)
{
    for (int64_t v = 0; v < n_nodes; v++) {
        if (starts)
            starts[v] = next[part[v]];
        next[part[v]] += degree[v];
    }
}

int64_t fs_move_lists(const char *block, int64_t first, int64_t n, const int64_t *indptr, const int64_t *starts,
                      int64_t n_nodes, int64_t node, char *window, int64_t begin, int64_t room, int id_bytes)
{
    const int64_t end = first + n;
    for (; node < n_nodes && indptr[node] < end; node++) {
        const int64_t shift = starts[node] - indptr[node];
        int64_t from = indptr[node] > first ? indptr[node] : first;
        int64_t to = indptr[node + 1] < end ? indptr[node + 1] : end;
        if (from + shift < begin)
            from = begin - shift;
        if (to + shift > begin + room)
            to = begin + room - shift;
        if (from < to)
            memcpy(window + (from + shift - begin) * id_bytes, block + (from - first) * id_bytes,
                   (size_t)((to - from) * id_bytes));
        if (indptr[node + 1] > end)
            break;
    }
    return node;
}
