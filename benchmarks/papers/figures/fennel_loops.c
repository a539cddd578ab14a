/* The reference of partition_batches: FENNEL as plain loops over an adjacency in memory. A node's neighbours are counted by part, then
 * all parts that were met are compared with the least loaded one, which a heap has first. No blocks, no prefetching. Same parts. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

static double *load;
static int32_t *heap, *place;
static int64_t n_heap;

static int before(int32_t a, int32_t b)
{
    return load[a] < load[b] || (load[a] == load[b] && a < b);
}

static void put(int64_t at, int32_t part)
{
    heap[at] = part;
    place[part] = (int32_t)at;
}

static void sift(int32_t part)
{
    int64_t at = place[part];
    while (at > 0 && before(part, heap[(at - 1) / 2])) {
        put(at, heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= n_heap)
            break;
        if (child + 1 < n_heap && before(heap[child + 1], heap[child]))
            child++;
        if (!before(heap[child], part))
            break;
        put(at, heap[child]);
        at = child;
    }
    put(at, part);
}

/* One pass of gamma 1.5; `part` is -1 where a node has none. */
void fennel_loops(const int64_t *indptr, const int32_t *ids, int64_t n, int32_t k, double scale, int64_t cap, int32_t *part)
{
    int64_t *size = calloc(k, 8), *count = calloc(k, 8);
    int32_t *met = malloc(4 * (size_t)k);
    load = calloc(k, sizeof(double));
    heap = malloc(4 * (size_t)k);
    place = malloc(4 * (size_t)k);
    n_heap = k;
    for (int32_t p = 0; p < k; p++)
        put(p, p);
    for (int64_t v = 0; v < n; v++)
        if (part[v] >= 0)
            size[part[v]]++;
    for (int32_t p = 0; p < k; p++) {
        load[p] = size[p] < cap ? scale * sqrt((double)size[p]) : INFINITY;
        sift(p);
    }
    for (int64_t v = 0; v < n; v++) {
        int64_t n_met = 0;
        if (part[v] >= 0) {
            const int32_t old = part[v];
            part[v] = -1;
            size[old]--;
            load[old] = scale * sqrt((double)size[old]);
            sift(old);
        }
        for (int64_t i = indptr[v]; i < indptr[v + 1]; i++) {
            const int32_t p = part[ids[i]];
            if (p >= 0 && count[p]++ == 0)
                met[n_met++] = p;
        }
        int32_t best = heap[0];
        double most = (double)count[best] - load[best];
        for (int64_t i = 0; i < n_met; i++) {
            const int32_t p = met[i];
            const double score = (double)count[p] - load[p];
            if (score > most || (score == most && p < best)) {
                most = score;
                best = p;
            }
            count[p] = 0;
        }
        part[v] = best;
        size[best]++;
        load[best] = size[best] < cap ? scale * sqrt((double)size[best]) : INFINITY;
        sift(best);
    }
    free(size);
    free(count);
    free(met);
    free(load);
    free(heap);
    free(place);
}
