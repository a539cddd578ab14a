/* Self-reliant parts: training nodes, one after the other, each put into the part that scores highest by its in-neighbourhood.

   Part i with t of n training nodes and m nodes scores (1 + c) * (n - k * t) / (m + 1) of k parts, where c counts its training
   nodes in the in-neighbourhood of the node to be put. */
#ifndef FEATSTORE_TRAINPARTS_H
#define FEATSTORE_TRAINPARTS_H

#include "neighbors.h"

typedef struct {
    int64_t n_train, n_parts, hops;
    int64_t stride;    /* bytes of a node's membership: a bit a part */
    int32_t *part;     /* of each node, -1: not put, or no training node */
    uint8_t *member;   /* of each node: the parts that have it */
    int64_t *trained;  /* of each part: training nodes */
    int64_t *size;     /* of each part: nodes */
    double *count;     /* of each part: training nodes in the neighbourhood; all 0 between nodes */
    int64_t n_above;   /* parts with a training node more than n_train / n_parts, rounded down */
    uint64_t *seen;    /* a bit a node; all 0 between nodes */
    int64_t *queue;    /* the neighbourhood; an entry a node */
    int64_t n_visits;  /* edges that were followed */
} fs_trainparts;

/* Put a node, of which `count` tells the neighbourhood, into the best part; returns that part. */
int64_t fs_put_train(fs_trainparts *s, int64_t node);

/* Put n nodes by their whole in-neighbourhoods, until `most` edges were followed in all. List j lies at starts[j] … starts[j + 1]
   of `ids`, and slot[v] is the list of node v. Returns how many were put; or -1 - v where the list of node v is missing. */
int64_t fs_put_exact(fs_trainparts *s, const int64_t *nodes, int64_t n, const int32_t *slot, const int64_t *starts,
                     const void *ids, int wide, int64_t most);

/* Add, to `more` of each node whose list has edges at positions first …, the paths over these edges back to training nodes of the
   `width` parts from `begin` on. `paths` has those of a hop less, of all nodes; it is NULL at the first hop. `more`
   is that of the nodes that indptr is of. */
void fs_add_paths(const int64_t *indptr, const void *ids, int wide, int64_t first, int64_t n,
                  const int32_t *part, int64_t begin, int64_t width, const float *paths, float *more);

/* Put the sources of the edges at positions first … into the parts of their destinations; `stride` bytes of bits a node. `from` is
   that of the nodes that indptr is of, `into` that of all nodes. */
void fs_bring_neighbors(const int64_t *indptr, const void *ids, int wide, int64_t first, int64_t n,
                        int64_t stride, const uint8_t *from, uint8_t *into);

/* Add the n nodes of `bits` to the members of parts, and count them. */
void fs_join(fs_trainparts *s, const uint8_t *bits, int64_t n);

#endif
