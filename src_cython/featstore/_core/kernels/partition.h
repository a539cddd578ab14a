/* Streaming partitioning: nodes in the order of their ids, each put into the part that scores highest when its list was read.

   Of parts that hold no neighbour only the least loaded can win, so a node is compared with the parts of its neighbours and with
   that one. Time follows edges, whatever the number of parts. */
#ifndef FEATSTORE_PARTITION_H
#define FEATSTORE_PARTITION_H

#include "neighbors.h"

typedef struct {
    const int64_t *indptr;
    int64_t n_nodes;
    int32_t *part;           /* of each node, -1: not placed */
    const uint8_t *is_train; /* a byte a node, or NULL */
    const int32_t *group;    /* of each node, or NULL: one group */
    int64_t width;           /* parts of a group */
    int64_t leaves;          /* the next power of two */
    double exponent;         /* gamma - 1 */
    int is_ldg;
    const double *scale;       /* of a group: load of a part of one node */
    const double *train_scale; /* of a group: load of a part of one training node */
    const int64_t *cap;        /* of a group: most nodes of a part */
    int64_t *size, *trained;   /* of each part */
    double *load;              /* of each part; infinite where it is full */
    int64_t *count;            /* of each part, from entry 1 on: neighbours of the node whose list is read; entry 0: not placed */
    int32_t *touched;          /* entries of `count` that are not 0, and one that is being counted */
    int64_t *inside;           /* of each part: neighbours that were in it when its nodes were put there */
    int32_t *winner;           /* of each group: a tournament of its parts, the least loaded first; `leaves` entries a group */
    int64_t node;              /* whose list is read */
    int is_open;
    int64_t n_touched;
} fs_placer;

void fs_weigh_part(fs_placer *s, int64_t part);

void fs_tournament(fs_placer *s, int64_t group);

/* Read the ids at positions `first` … of the file; every node whose list ends there is placed. */
void fs_place(fs_placer *s, const void *ids, int wide, int64_t first, int64_t n);

/* Count the edges at positions `first` … whose ends are in one part, `own` being the parts of the nodes that indptr is of; returns
 * the node that the last is of. */
int64_t fs_inside(const int64_t *indptr, int64_t node, const int32_t *own, const int32_t *part, const void *ids, int wide, int64_t first,
                  int64_t n, int64_t *n_inside);

/* Count the edges at positions `first` … whose ends are in two parts, by their source; returns the node that the last is of. */
int64_t fs_cross(const int64_t *indptr, int64_t node, const int32_t *own, const int32_t *part, const void *ids, int wide, int64_t first,
                 int64_t n, void *counts, int wide_counts);

/* Where each node's list begins if lists lie by part, by node within each: `next` says for every part where its next list begins,
   and goes on with every list. Without `starts` it is only counted. Parts are in range. */
void fs_list_starts(const int64_t *degree, const int32_t *part, int64_t n_nodes, int64_t *next, int64_t *starts);

/* Copy what of the lists of nodes node … lies in the block of ids [first, first + n) and, moved to their starts, in the window of
   ids [begin, begin + room); a list may lie in several of either. Returns the node that the next block goes on with. */
int64_t fs_move_lists(const char *block, int64_t first, int64_t n, const int64_t *indptr, const int64_t *starts,
                      int64_t n_nodes, int64_t node, char *window, int64_t begin, int64_t room, int id_bytes);

#endif
