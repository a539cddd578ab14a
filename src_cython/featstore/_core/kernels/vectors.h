/* Which vectors this processor has: level 1 is AVX2, level 2 AVX-512 with what its common forms need, level 0 neither. */
#ifndef FEATSTORE_VECTORS_H
#define FEATSTORE_VECTORS_H

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Functions that run on processors of that level only. */
#define FS_AVX2 __attribute__((target("avx2")))

#define FS_AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512")))

/* The highest level up to `level` that this processor has. */
int fs_vectors(int level);

#endif
