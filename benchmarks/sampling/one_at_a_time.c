/* The reference of sampling.samplers: the sampler's own draws and numbering (featstore/sampling/rng.py), written the plain way: one
 * destination at a time, one draw at a time, a table of all nodes for the local numbers, no prefetching. Same batches, bit for bit. */

#include <stdint.h>

static uint64_t absorb(uint64_t key, uint64_t x)
{
    uint64_t z = key + 0x9E3779B97F4A7C15ull * (x + 1);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* One batch. `number` has N entries, all -1 before and after; `nodes` begins with the seeds. Edges of all hops go to src and dst one
 * hop after the other, hop h ending at n_edges[h]. Returns the number of nodes. */
int64_t one_at_a_time(const int64_t *indptr, const int32_t *indices, int64_t n_seeds, int n_hops, const int64_t *fanouts,
                      uint64_t batch_key, int32_t *number, int64_t *nodes, int64_t *src, int64_t *dst, int64_t *n_edges)
{
    int64_t n = n_seeds, edge = 0;
    for (int64_t i = 0; i < n; i++)
        number[nodes[i]] = (int32_t)i;
    for (int hop = 0; hop < n_hops; hop++) {
        const int64_t n_dst = n, k = fanouts[hop];
        const uint64_t hop_key = absorb(batch_key, (uint64_t)hop);
        for (int64_t i = 0; i < n_dst; i++) {
            const int64_t start = indptr[nodes[i]], degree = indptr[nodes[i] + 1] - start;
            const int64_t count = degree < k ? degree : k;
            int64_t position[64];
            if (degree <= k) {
                for (int64_t j = 0; j < count; j++)
                    position[j] = j;
            } else {
                const uint64_t key = absorb(hop_key, (uint64_t)nodes[i]);
                for (int64_t j = 0; j < k; j++) {
                    const int64_t last = degree - k + j;
                    int64_t t = (int64_t)(((unsigned __int128)absorb(key, (uint64_t)j) * (uint64_t)(last + 1)) >> 64), m;
                    for (m = 0; m < j && position[m] != t; m++) {
                    }
                    if (m < j)
                        t = last;
                    for (m = j; m > 0 && position[m - 1] > t; m--)
                        position[m] = position[m - 1];
                    position[m] = t;
                }
            }
            for (int64_t j = 0; j < count; j++) {
                const int32_t id = indices[start + position[j]];
                if (number[id] < 0) {
                    number[id] = (int32_t)n;
                    nodes[n++] = id;
                }
                src[edge] = number[id];
                dst[edge++] = i;
            }
        }
        n_edges[hop] = edge;
    }
    for (int64_t i = 0; i < n; i++)
        number[nodes[i]] = -1;
    return n;
}
