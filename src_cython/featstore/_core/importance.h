/* Kernels of layer-neighbour sampling with importance probabilities (Balin and Catalyurek, NeurIPS 2023, section 3).
 *
 * A source t has a probability p_t, and destination s of degree d, with fan-out k, takes t with probability c_s p_t. The scale
 * c_s is such that the mean over what is taken, each with weight 1 / (d c_s p_t), has the variance that k neighbours drawn
 * uniformly give:
 *
 *     1/d^2 sum_t 1/(c_s p_t) - 1/d = 1/k - 1/d,  so  c_s = k/d^2 sum_t 1/p_t;  c_s = p_t = 1 where the whole list is taken.
 *
 * A source is taken by some destination with probability max_s c_s p_t, as all of them compare the same number. A step sets p_t
 * to that. With the new p the scale 1 would do for every destination, so no scale is above 1 from then on: probabilities, and with
 * them the expected number of sources, never rise from step to step. No c_s p_t is ever above 1, so the sum has no cases.
 *
 * Kept is 1/p_t, the weight of a source. Sums are in doubles, in the order of the lists: all processors get the same.
 */
#ifndef FEATSTORE_IMPORTANCE_H
#define FEATSTORE_IMPORTANCE_H

#include "labor.h"

/* A source: its weight; and the largest scale of its destinations, or what is compared with scales. */
typedef struct {
    double weight, other;
} fs_source;

/* The scale of one destination. */
FS_INLINE double fs_scale(const void *listed, int wide, int64_t first, int64_t degree, int64_t fanout, const fs_source *sources)
{
    double sums[4] = {0, 0, 0, 0}, scale; /* additions in one sum would wait for one another */
    int64_t e = 0;
    if (!fs_compares(degree, fanout))
        return 1;
    for (; e + 4 <= degree; e += 4)
        for (int j = 0; j < 4; j++)
            sums[j] += sources[fs_record(listed, wide, first + e + j)].weight;
    for (; e < degree; e++)
        sums[0] += sources[fs_record(listed, wide, first + e)].weight;
    scale = (double)fanout * ((sums[0] + sums[1]) + (sums[2] + sums[3])) / ((double)degree * (double)degree);
    return scale < 1 ? scale : 1; /* above 1 by rounding only */
}

/* One step of the fixed-point iteration; returns the expected number of sources before it. */
static double fs_weigh(const void *listed, int wide, const int64_t *counts, int64_t n_dst, int64_t fanout, fs_source *sources,
                       int64_t n_sources)
{
    double expected = 0;
    int64_t first = 0;
    for (int64_t t = 0; t < n_sources; t++)
        sources[t].other = 0;
    for (int64_t s = 0; s < n_dst; first += counts[s], s++) {
        const double scale = fs_scale(listed, wide, first, counts[s], fanout, sources);
        for (int64_t e = first; e < first + counts[s]; e++) {
            fs_source *source = &sources[fs_record(listed, wide, e)];
            source->other = source->other < scale ? scale : source->other;
        }
    }
    for (int64_t t = 0; t < n_sources; t++) {
        sources[t].weight /= sources[t].other;
        expected += 1 / sources[t].weight;
    }
    return expected;
}

/* Keep of the sources listed what destinations take, in place, as ids; counts[] receives how many each takes. Returns all of them.
 * A source's number r stands for the share r / 2^32: it is taken where that is less than scale / weight. edge_pos, where there is
 * one, goes with the list. */
static int64_t fs_keep(void *listed, int wide, int64_t *counts, int64_t n_dst, int64_t fanout, fs_source *sources,
                       int64_t n_sources, const int64_t *ids, const fs_numbers *numbers, int64_t *edge_pos)
{
    int64_t first = 0, kept = 0;
    for (int64_t t = 0; t < n_sources; t++)
        sources[t].other = sources[t].weight * (double)fs_number_of_source(numbers, (uint64_t)ids[t]);
    for (int64_t s = 0; s < n_dst; s++) {
        const double limit = fs_scale(listed, wide, first, counts[s], fanout, sources) * 4294967296.0;
        const int64_t end = first + counts[s], before = kept;
        for (; first < end; first++) {
            const int64_t t = fs_record(listed, wide, first);
            if (wide)
                ((int64_t *)listed)[kept] = t;
            else
                ((int32_t *)listed)[kept] = (int32_t)t;
            if (edge_pos)
                edge_pos[kept] = edge_pos[first];
            kept += sources[t].other < limit;
        }
        counts[s] = kept - before;
    }
    for (int64_t e = 0; e < kept; e++)
        if (wide)
            ((int64_t *)listed)[e] = ids[fs_record(listed, wide, e)];
        else
            ((int32_t *)listed)[e] = (int32_t)ids[fs_record(listed, wide, e)];
    return kept;
}

/* Number the sources of all lists, in place; returns 1, for more room, and must then be called again. */
static int fs_number_sources(fs_hop *sources, void *listed, int wide)
{
    if (wide)
        return sources->exact ? fs_number_ids(sources, listed, 1, 1, listed, 1) : fs_number_ids(sources, listed, 1, 0, listed, 1);
    return fs_number_ids(sources, listed, 0, 1, listed, 0);
}

#endif
