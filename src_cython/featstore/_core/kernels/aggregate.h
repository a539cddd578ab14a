/* Sums of neighbours' rows: rows of a run of sources are added to the accumulators of the destinations whose lists name them.

A destination's list ascends, and so do the runs: each sum is made in the order of its list, whatever the runs, the blocks, the
threads and the processor's vectors. Products and sums round one by one. */
#ifndef FEATSTORE_AGGREGATE_H
#define FEATSTORE_AGGREGATE_H

#include <stdatomic.h>
#include <stdint.h>
#include "vectors.h"

#define FS_NO_MORE INT64_MAX
typedef struct fs_aggregate fs_aggregate;
typedef int64_t (*fs_accumulate_fn)(const fs_aggregate *, int64_t, int64_t);

struct fs_aggregate {
    const void *rows;     /* of sources first … stop - 1, width numbers each */
    int64_t first, stop, width;
    const void *ids;      /* lists one after the other */
    int64_t id_bytes, n_ids;
    int64_t *cursor;      /* of each destination: what of its list was not added yet begins here */
    const int64_t *ends;
    int64_t *nexts;       /* of each destination: the id at its cursor, FS_NO_MORE at the end of the list */
    void *sums;           /* width numbers a destination */
    const double *scale;  /* of sources first … stop - 1, or NULL: what a row is multiplied by */
    int64_t self;         /* destination 0's id where every destination is a source of itself once, whatever its list says; or -1 */
    const int64_t *bounds; /* where the destinations are cut into parts, each of them one thread's */
    fs_accumulate_fn add;
    _Atomic int64_t bad;   /* the first destination whose list descends, FS_NO_MORE while none is known */
    atomic_int is_beyond;  /* a list goes beyond the ids: nothing was added to its part */
};

static inline int64_t fs_list_id(const void *ids, int64_t id_bytes, int64_t at)
{
    return id_bytes == 4 ? (int64_t)((const int32_t *)ids)[at] : ((const int64_t *)ids)[at];
}

/* Whether the lists of destinations lo … hi - 1 lie within the ids. */
int fs_lists_fit(const int64_t *cursor, const int64_t *ends, int64_t n_ids, int64_t lo, int64_t hi);

/* Prepare for adding. `kind`: 0 float rows and sums, 1 float rows and double sums, 2 double rows and sums. */
void fs_begin_accumulating(fs_aggregate *job, int kind, int level);

/* Add to the destinations of parts begin … end - 1; `job` is a fs_aggregate. For several threads. */
void fs_accumulate_parts(void *job, int64_t begin, int64_t end);

#endif
