#include "aggregate.h"

#include <stdatomic.h>
#include <stddef.h>

#define FS_DESTINATIONS_AHEAD 6
#define FS_LINES_AHEAD 4 /* of a row; the processor's own prefetching goes on from there */

int fs_lists_fit(const int64_t *cursor, const int64_t *ends, int64_t n_ids, int64_t lo, int64_t hi)
{
    for (int64_t v = lo; v < hi; v++)
        if (cursor[v] < 0 || cursor[v] > ends[v] || ends[v] > n_ids)
            return 0;
    return 1;
}

static inline void fs_touch_row(const char *row, int64_t n_bytes)
{
    for (int64_t at = 0; at < n_bytes && at < 64 * FS_LINES_AHEAD; at += 64)
        __builtin_prefetch(row + at);
}

/* Adds to destinations lo … hi - 1. Returns the first whose list descends, or has no such source; -1 where all is well. */
#define FS_DEFINE_ACCUMULATE(NAME, TARGET, ROW, SUM)                                                                            \
    TARGET static int64_t NAME(const fs_aggregate *job, int64_t lo, int64_t hi)                                                \
    {                                                                                                                          \
        const int64_t width = job->width, first = job->first, stop = job->stop;                                                \
        const ROW *rows = (const ROW *)job->rows;                                                                              \
        for (int64_t v = lo; v < hi; v++) {                                                                                    \
            int64_t ahead = v + FS_DESTINATIONS_AHEAD;                                                                         \
            if (ahead < hi && job->nexts[ahead] < stop && job->nexts[ahead] >= first) {                                        \
                fs_touch_row((const char *)(rows + (job->nexts[ahead] - first) * width), width * (int64_t)sizeof(ROW));        \
                fs_touch_row((const char *)((SUM *)job->sums + ahead * width), width * (int64_t)sizeof(SUM));                  \
            }                                                                                                                  \
            int64_t next = job->nexts[v], own = job->self < 0 ? FS_NO_MORE : job->self + v;                                     \
            if (own < first || own >= stop)                                                                                    \
                own = FS_NO_MORE;                                                                                              \
            if (next >= stop && own == FS_NO_MORE)                                                                             \
                continue;                                                                                                      \
            SUM *restrict sum = (SUM *)job->sums + v * width;                                                                  \
            int64_t at = job->cursor[v];                                                                                       \
            const int64_t end = job->ends[v], myself = job->self < 0 ? -1 : job->self + v;                                     \
            for (;;) {                                                                                                         \
                int64_t source = next;                                                                                         \
                if (own < stop && own <= next) {                                                                                         \
                    source = own;                                                                                              \
                    own = FS_NO_MORE;                                                                                          \
                } else if (next >= stop) {                                                                                     \
                    break;                                                                                                     \
                } else {                                                                                                       \
                    if (next < first)                                                                                          \
                        return v;                                                                                              \
                    next = ++at < end ? fs_list_id(job->ids, job->id_bytes, at) : FS_NO_MORE;                                  \
                    if (next < source)                                                                                         \
                        return v;                                                                                              \
                    if (next < stop)                                                                                           \
                        fs_touch_row((const char *)(rows + (next - first) * width), width * (int64_t)sizeof(ROW));             \
                    if (source == myself)                                                                                      \
                        continue; /* it counts once, where own says */                                                         \
                }                                                                                                              \
                const ROW *restrict row = rows + (source - first) * width;                                                     \
                if (job->scale == NULL) {                                                                                      \
                    for (int64_t j = 0; j < width; j++)                                                                        \
                        sum[j] += (SUM)row[j];                                                                                 \
                } else {                                                                                                       \
                    const SUM factor = (SUM)job->scale[source - first];                                                        \
                    for (int64_t j = 0; j < width; j++)                                                                        \
                        sum[j] += factor * (SUM)row[j];                                                                        \
                }                                                                                                              \
            }                                                                                                                  \
            job->cursor[v] = at;                                                                                               \
            job->nexts[v] = next;                                                                                              \
        }                                                                                                                      \
        return -1;                                                                                                             \
    }

#define FS_DEFINE_ACCUMULATES(SUFFIX, TARGET)                                                                                   \
    FS_DEFINE_ACCUMULATE(fs_add_ff##SUFFIX, TARGET, float, float)                                                              \
    FS_DEFINE_ACCUMULATE(fs_add_fd##SUFFIX, TARGET, float, double)                                                             \
    FS_DEFINE_ACCUMULATE(fs_add_dd##SUFFIX, TARGET, double, double)

FS_DEFINE_ACCUMULATES(_0, )
#if defined(__x86_64__)
FS_DEFINE_ACCUMULATES(_1, FS_AVX2)
FS_DEFINE_ACCUMULATES(_2, FS_AVX512)
#endif

void fs_accumulate_parts(void *context, int64_t begin, int64_t end)
{
    fs_aggregate *job = context;
    for (int64_t k = begin; k < end; k++) {
        if (!fs_lists_fit(job->cursor, job->ends, job->n_ids, job->bounds[k], job->bounds[k + 1])) {
            job->is_beyond = 1;
            continue;
        }
        int64_t bad = job->add(job, job->bounds[k], job->bounds[k + 1]), lowest = job->bad;
        while (bad >= 0 && bad < lowest && !atomic_compare_exchange_weak(&job->bad, &lowest, bad)) {}
    }
}

void fs_begin_accumulating(fs_aggregate *job, int kind, int level)
{
#if defined(__x86_64__)
    static const fs_accumulate_fn all[3][3] = {{fs_add_ff_0, fs_add_fd_0, fs_add_dd_0},
                                               {fs_add_ff_1, fs_add_fd_1, fs_add_dd_1},
                                               {fs_add_ff_2, fs_add_fd_2, fs_add_dd_2}};
#else
    static const fs_accumulate_fn all[1][3] = {{fs_add_ff_0, fs_add_fd_0, fs_add_dd_0}};
#endif
    job->add = all[fs_vectors(level)][kind];
    job->bad = FS_NO_MORE;
    job->is_beyond = 0;
}
