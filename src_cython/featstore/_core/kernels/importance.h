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

/* One step of the fixed-point iteration; returns the expected number of sources before it. */
double fs_weigh(const void *listed, int wide, const int64_t *counts, int64_t n_dst, int64_t fanout, fs_source *sources,
                int64_t n_sources);

/* Keep of the sources listed what destinations take, in place, as ids; counts[] receives how many each takes. Returns all of them.
 * A source's number r stands for the share r / 2^32: it is taken where that is less than scale / weight. edge_pos, where there is
 * one, goes with the list. */
int64_t fs_keep(void *listed, int wide, int64_t *counts, int64_t n_dst, int64_t fanout, fs_source *sources,
                int64_t n_sources, const int64_t *ids, const fs_numbers *numbers, int64_t *edge_pos);

/* Number the sources of all lists, in place; returns 1, for more room, and must then be called again. */
int fs_number_sources(fs_hop *sources, void *listed, int wide);

#endif
