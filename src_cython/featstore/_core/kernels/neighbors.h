/* Where neighbour lists are: offsets in the file, records of the neighbour cache (a degree, then that many ids). */
#ifndef FEATSTORE_NEIGHBORS_H
#define FEATSTORE_NEIGHBORS_H

#include "draws.h"

enum { FS_CHUNK = 64 }; /* destinations looked up, or drawn for, before the next stage */

FS_INLINE int64_t fs_record(const void *records, int wide, int64_t i)
{
    return wide ? ((const int64_t *)records)[i] : ((const int32_t *)records)[i];
}

FS_INLINE void fs_prefetch_record(const void *records, int wide, int64_t i)
{
    fs_fetch((const char *)records + (wide ? i * 8 : i * 4));
}

void fs_offsets(const int64_t *indptr, const int64_t *ids, int64_t n, int64_t *starts, int64_t *degrees);

/* Look nodes up in the neighbour cache; lists in `missing` (room for n + 1) those that it lacks, and returns how many. */
int64_t fs_lookup(const int64_t *offset_of_node, const void *records, int wide, const int64_t *ids, int64_t n,
                  int64_t *place, int64_t *degree, int64_t *missing);

/* First id out of [0, n_total), or -1. */
int64_t fs_first_bad(const void *ids, int wide, int64_t n, int64_t n_total);

/* Copy the lists of cached nodes node … that lie in the block of edges [first, first + n) into their records, and before a list's
 * first edge its length; a list may lie in several blocks. Returns the node that the next block goes on with. */
int64_t fs_fill_records(const char *block, int64_t first, int64_t n, const int64_t *indptr, const int64_t *offset_of_node,
                        int64_t n_nodes, int64_t node, char *records, int id_bytes);

/* First node whose record does not agree with indptr, holds an id out of [0, n_total), or leaves the array; or -1. */
int64_t fs_first_bad_record(const int64_t *indptr, const int64_t *offset_of_node, int64_t n_nodes, const void *records,
                            int wide, int64_t n_records, int64_t n_total);

int64_t fs_take_edge_ids(const void *edge_ids, int wide, int64_t n_kept, int64_t first, int64_t *positions, int64_t n);

/* First of n offsets that is below the one before, which of the first is least, or above most; or -1. */
int64_t fs_first_bad_offset(const int64_t *offsets, int64_t n, int64_t least, int64_t most);

#endif
