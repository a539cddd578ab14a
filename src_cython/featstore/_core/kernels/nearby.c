#include "nearby.h"

/* First entry of a node in a table of `mask + 1` entries. */
static inline int64_t fs_entry_of(int64_t node, int64_t mask)
{
    return (int64_t)(((uint64_t)node * 0x9E3779B97F4A7C15u) >> 32) & mask;
}

int64_t fs_enter_lists(const int64_t *nodes, int64_t *starts, int64_t n, int32_t *table, int64_t mask, int64_t *end)
{
    int64_t next = 0;
    for (int64_t k = 0; k < n; k++) {
        int64_t at = fs_entry_of(nodes[k], mask);
        while (table[at] >= 0) {
            if (nodes[table[at]] == nodes[k])
                return k;
            at = (at + 1) & mask;
        }
        table[at] = (int32_t)k;
        const int64_t degree = starts[k];
        starts[k] = next;
        next += degree;
    }
    *end = next;
    return -1;
}

void fs_find_lists(const int64_t *nodes, const int64_t *starts, const int32_t *table, int64_t mask, int64_t base,
                   const int64_t *ids, int64_t *place, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        if (place[i] >= 0)
            continue;
        int64_t at = fs_entry_of(ids[i], mask);
        while (table[at] >= 0 && nodes[table[at]] != ids[i])
            at = (at + 1) & mask;
        if (table[at] >= 0)
            place[i] = ~(base + starts[table[at]]);
    }
}

int64_t fs_count_far(const int64_t *positions, int64_t n, int64_t base, int64_t n_ids)
{
    int64_t far = 0, most = 0;
    for (int64_t i = 0; i < n; i++) {
        far += positions[i] < base;
        most = positions[i] > most ? positions[i] : most;
    }
    return most >= base + n_ids && most >= base ? -1 : far;
}

#define FS_TAKE(name, type)                                                                                                       \
    void name(const int64_t *positions, int64_t n, int64_t base, const type *ids, type *out, int64_t *far)                        \
    {                                                                                                                             \
        for (int64_t i = 0; i < n; i++) {                                                                                         \
            if (positions[i] >= base)                                                                                             \
                out[i] = ids[positions[i] - base];                                                                                \
            else                                                                                                                  \
                *far++ = positions[i];                                                                                            \
        }                                                                                                                         \
    }

#define FS_PUT(name, type)                                                                                                        \
    void name(const int64_t *positions, int64_t n, int64_t base, const type *read, type *out)                                     \
    {                                                                                                                             \
        for (int64_t i = 0; i < n; i++)                                                                                           \
            if (positions[i] < base)                                                                                              \
                out[i] = *read++;                                                                                                 \
    }

FS_TAKE(fs_take_near32, int32_t)
FS_TAKE(fs_take_near64, int64_t)
FS_PUT(fs_put_far32, int32_t)
FS_PUT(fs_put_far64, int64_t)
