/* Bits of rows and of positions: fetched ahead, counted, found. */
#ifndef FEATSTORE_BITS_H
#define FEATSTORE_BITS_H

#include <stdint.h>

/* Fetch a line that is used many accesses later, into the second-level cache: the first waits for fewer lines at a time. */
#define fs_fetch(p) __builtin_prefetch((p), 0, 2)
#define fs_touch(p) __builtin_prefetch((p), 1, 3)
#define fs_peek(p) __builtin_prefetch((p), 0, 3)
#define fs_top(x) (63 - __builtin_clzll(x))
#define fs_low(x) __builtin_ctzll(x)
/* Without a popcnt instruction the compiler calls a table look-up; these twelve operations are quicker. */
static inline int fs_popcount(uint64_t x) {
    x -= x >> 1 & 0x5555555555555555u;
    x = (x & 0x3333333333333333u) + (x >> 2 & 0x3333333333333333u);
    return (int)(((x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fu) * 0x0101010101010101u >> 56);
}

#endif
