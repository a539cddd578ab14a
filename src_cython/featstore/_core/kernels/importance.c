#include "importance.h"

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

double fs_weigh(const void *listed, int wide, const int64_t *counts, int64_t n_dst, int64_t fanout, fs_source *sources,
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

int64_t fs_keep(void *listed, int wide, int64_t *counts, int64_t n_dst, int64_t fanout, fs_source *sources,
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

int fs_number_sources(fs_hop *sources, void *listed, int wide)
{
    if (wide)
        return sources->exact ? fs_number_ids(sources, listed, 1, 1, listed, 1) : fs_number_ids(sources, listed, 1, 0, listed, 1);
    return fs_number_ids(sources, listed, 0, 1, listed, 0);
}
