/* Memory that is mapped for one owner each, and counted. */
#ifndef FEATSTORE_MAPPING_H
#define FEATSTORE_MAPPING_H

#include <stdint.h>

/* Zeroed memory; from 2 MiB on aligned to, and asked to be of, huge pages. Where it is not `forked`, a child lacks it: a kernel that
 * reads into it may do so while a fork copies pages. NULL where there is none. */
void *fs_map(uint64_t bytes, int forked);

void fs_unmap(void *p, uint64_t bytes);

/* Bytes of all that is mapped, whether its pages were touched or not. */
uint64_t fs_mapped_bytes(void);

/* Take the pages of a range now; 0, or -1 where the kernel cannot (before Linux 5.14) or has no memory. */
int fs_populate(void *p, uint64_t bytes);

/* Give the whole pages of a range back; what is read there afterwards is zero. 0, or -1. */
int fs_discard(void *p, uint64_t bytes);

#endif
