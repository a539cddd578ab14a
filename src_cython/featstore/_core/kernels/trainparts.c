#include "trainparts.h"

enum { FS_PATHS_AHEAD = 16 }; /* edges; each has a line or more of counts */

int64_t fs_put_train(fs_trainparts *s, int64_t node)
{
    const int64_t k = s->n_parts, least = s->n_train / k;
    const int are_full = s->n_above == s->n_train % k; /* no further part may have more than `least` */
    int64_t best = -1;
    double most = 0;
    for (int64_t i = 0; i < k; i++) {
        const int64_t t = s->trained[i];
        if (t > least || (t == least && are_full))
            continue;
        const double score = (1.0 + s->count[i]) * (double)(s->n_train - k * t) / (double)(s->size[i] + 1);
        if (best < 0 || score > most || (score == most && t < s->trained[best])) {
            most = score;
            best = i;
        }
    }
    s->part[node] = (int32_t)best;
    s->n_above += s->trained[best]++ == least;
    return best;
}

FS_INLINE void fs_admit(fs_trainparts *s, int64_t node, int64_t part)
{
    uint8_t *byte = &s->member[node * s->stride + part / 8];
    const uint8_t bit = (uint8_t)(1u << part % 8);
    s->size[part] += !(*byte & bit);
    *byte |= bit;
}

FS_INLINE int64_t fs_put_exact_as(fs_trainparts *s, const int64_t *nodes, int64_t n, const int32_t *slot, const int64_t *starts,
                                  const void *ids, int wide, int64_t most)
{
    for (int64_t at = 0; at < n; at++) {
        int64_t begin = 0, end = 1, missing = -1;
        if (s->n_visits >= most)
            return at;
        s->queue[0] = nodes[at];
        s->seen[nodes[at] / 64] |= (uint64_t)1 << nodes[at] % 64;
        for (int64_t hop = 0; hop < s->hops && missing < 0; hop++) {
            const int64_t stop = end;
            for (; begin < stop; begin++) {
                const int32_t j = slot[s->queue[begin]];
                if (j < 0) {
                    missing = s->queue[begin];
                    break;
                }
                for (int64_t i = starts[j]; i < starts[j + 1]; i++) {
                    const int64_t source = fs_record(ids, wide, i);
                    const uint64_t bit = (uint64_t)1 << source % 64;
                    if (s->seen[source / 64] & bit)
                        continue;
                    s->seen[source / 64] |= bit;
                    s->queue[end++] = source;
                }
                s->n_visits += starts[j + 1] - starts[j];
            }
        }
        for (int64_t i = 0; i < end; i++)
            s->seen[s->queue[i] / 64] = 0;
        if (missing >= 0)
            return -1 - missing;
        for (int64_t i = 0; i < end; i++)
            if (s->part[s->queue[i]] >= 0)
                s->count[s->part[s->queue[i]]] += 1;
        const int64_t best = fs_put_train(s, nodes[at]);
        for (int64_t i = 0; i < s->n_parts; i++)
            s->count[i] = 0;
        for (int64_t i = 0; i < end; i++)
            fs_admit(s, s->queue[i], best);
    }
    return n;
}

int64_t fs_put_exact(fs_trainparts *s, const int64_t *nodes, int64_t n, const int32_t *slot, const int64_t *starts,
                     const void *ids, int wide, int64_t most)
{
    if (wide)
        return fs_put_exact_as(s, nodes, n, slot, starts, ids, 1, most);
    return fs_put_exact_as(s, nodes, n, slot, starts, ids, 0, most);
}

FS_INLINE void fs_add_paths_as(const int64_t *indptr, const void *ids, int wide, int64_t first, int64_t n,
                               const int32_t *part, int64_t begin, int64_t width, const float *paths, float *more)
{
    int64_t node = 0;
    for (int64_t i = 0; i < n; i++) {
        if (i + FS_PATHS_AHEAD < n) {
            const int64_t next = fs_record(ids, wide, i + FS_PATHS_AHEAD);
            fs_peek(&part[next]);
            if (paths)
                fs_peek(&paths[next * width]);
        }
        while (indptr[node + 1] <= first + i)
            node++;
        const int64_t source = fs_record(ids, wide, i), own = (int64_t)part[source] - begin;
        float *row = &more[node * width];
        if (part[source] >= 0 && (uint64_t)own < (uint64_t)width)
            row[own] += 1;
        if (paths)
            for (int64_t p = 0; p < width; p++)
                row[p] += paths[source * width + p];
    }
}

void fs_add_paths(const int64_t *indptr, const void *ids, int wide, int64_t first, int64_t n,
                  const int32_t *part, int64_t begin, int64_t width, const float *paths, float *more)
{
    if (wide)
        fs_add_paths_as(indptr, ids, 1, first, n, part, begin, width, paths, more);
    else
        fs_add_paths_as(indptr, ids, 0, first, n, part, begin, width, paths, more);
}

FS_INLINE void fs_bring_as(const int64_t *indptr, const void *ids, int wide, int64_t first, int64_t n,
                           int64_t stride, const uint8_t *from, uint8_t *into)
{
    int64_t node = 0;
    for (int64_t i = 0; i < n; i++) {
        while (indptr[node + 1] <= first + i)
            node++;
        const uint8_t *own = &from[node * stride];
        uint8_t *other = &into[fs_record(ids, wide, i) * stride];
        for (int64_t b = 0; b < stride; b++)
            if (own[b]) /* few nodes are in a part when it begins: other lines are not touched */
                other[b] |= own[b];
    }
}

void fs_bring_neighbors(const int64_t *indptr, const void *ids, int wide, int64_t first, int64_t n,
                        int64_t stride, const uint8_t *from, uint8_t *into)
{
    if (wide)
        fs_bring_as(indptr, ids, 1, first, n, stride, from, into);
    else
        fs_bring_as(indptr, ids, 0, first, n, stride, from, into);
}

void fs_join(fs_trainparts *s, const uint8_t *bits, int64_t n)
{
    for (int64_t v = 0; v < n; v++)
        for (int64_t b = 0; b < s->stride; b++) {
            const int64_t at = v * s->stride + b;
            for (unsigned joined = bits[at] & ~s->member[at]; joined; joined &= joined - 1)
                s->size[b * 8 + fs_low(joined)]++;
            s->member[at] |= bits[at];
        }
}
