/* Neighbour lists at hand: those of some nodes, in memory, beside the file that has all. */
#ifndef FEATSTORE_NEARBY_H
#define FEATSTORE_NEARBY_H

#include <stdint.h>

/* Replace degrees by where lists begin, one after the other, and enter all nodes in a table of their numbers, filled with -1.
   Returns the number of the first node that occurs before, or -1; `end` receives where the last list ends. */
int64_t fs_enter_lists(const int64_t *nodes, int64_t *starts, int64_t n, int32_t *table, int64_t mask, int64_t *end);

/* Give nodes whose list is at hand, and not in memory otherwise, places from `base` on: above all those in the file. */
void fs_find_lists(const int64_t *nodes, const int64_t *starts, const int32_t *table, int64_t mask, int64_t base,
                   const int64_t *ids, int64_t *place, int64_t n);

/* How many positions are in the file; -1 where one is beyond the lists at hand. */
int64_t fs_count_far(const int64_t *positions, int64_t n, int64_t base, int64_t n_ids);

/* Copy ids at hand to their places in `out`, and list the positions that are in the file. */
void fs_take_near32(const int64_t *positions, int64_t n, int64_t base, const int32_t *ids, int32_t *out, int64_t *far);
void fs_take_near64(const int64_t *positions, int64_t n, int64_t base, const int64_t *ids, int64_t *out, int64_t *far);

/* Copy ids that were read from the file to their places in `out`. */
void fs_put_far32(const int64_t *positions, int64_t n, int64_t base, const int32_t *read, int32_t *out);
void fs_put_far64(const int64_t *positions, int64_t n, int64_t base, const int64_t *read, int64_t *out);

#endif
