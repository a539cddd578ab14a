#include "vectors.h"

int fs_vectors(int level)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (level >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        return 2;
    return level >= 1 && __builtin_cpu_supports("avx2");
#else
    (void)level;
    return 0;
#endif
}
