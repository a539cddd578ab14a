/* Kernels of layer-wise sampling (FastGCN, LADIES) and of induced subgraphs (shaDow): whole lists of a batch's nodes in pieces,
 * the importance of the sources that they name, which of these a layer takes, and the edges to them.
 *
 * Sums are in doubles, in the order of the lists: pieces of any size, and all processors, get the same.
 */
#ifndef FEATSTORE_LAYERWISE_H
#define FEATSTORE_LAYERWISE_H

#include "importance.h"

/* ---------------------------------------------------------------- lists in pieces
 * A turn reads so many ids of the file; its lists, those in memory between them too, are taken in pieces of any size. */
int64_t fs_take_lists(fs_layer *layer, const int64_t *degree, const int64_t *place, const void *found, void *listed,
                      int32_t *owners, int64_t room);

/* ---------------------------------------------------------------- what a layer takes */

/* Add each edge's importance to its source's: 1, or for means one over the squared degree of the destination. */
void fs_accumulate(const void *listed, int wide, const int32_t *owners, int64_t n, const int64_t *degree, int is_mean,
                   double *importance, int64_t *n_edges);

/* Let no source draw that the batch has already: its importance becomes minus one. */
void fs_set_certain(const fs_hop *batch, const int64_t *ids, double *importance, int64_t n);

/* Take `size` sources without replacement, each with probability min(1, scale * importance): the scale is such that these sum to
 * `size`. Ordered pivotal sampling (Deville and Tille 1998; Chauvet 2012): source after source fights the one that is undecided,
 * by its own number under `key`, and the probabilities are met exactly. importance[] receives one over the probability of what is
 * taken, and 0 for the rest. Entries below 0 are taken anyway, beside the `size`. */
void fs_draw_distinct(const int64_t *ids, double *importance, int64_t n, int64_t size, uint64_t key);

/* Draw `size` times with replacement, source t with probability q = importance / sum each time: importance[] receives the number
 * of times over size * q. Entries below 0 are taken, once, beside these. upto: n numbers; drawn: `size`. */
void fs_draw_again(double *importance, int64_t n, int64_t size, uint64_t key, double *upto, int64_t *drawn);

/* ---------------------------------------------------------------- edges */

/* Add the edges to what was taken: ids, destinations and weights, from `at` on; returns where they end. Where edge_pos is given, also
 * their numbers: `starts` has each list's first, and the first id of the piece lies at `position` of its list. */
int64_t fs_take_edges(const void *listed, int wide, const int32_t *owners, int64_t n, const int64_t *degree, int is_mean,
                      const int64_t *ids, const double *factors, int64_t at, int64_t *src, int64_t *dst, float *weights,
                      const int64_t *starts, int64_t position, int64_t *edge_pos);

/* The numbers of those ids listed that the batch has, with their owners, and their edges as in fs_take_edges; returns how many. */
int64_t fs_keep_members(const fs_hop *batch, const void *listed, int wide, int32_t *owners, int64_t n, int32_t *numbers,
                        const int64_t *starts, int64_t position, int64_t *edge_pos);

#endif
