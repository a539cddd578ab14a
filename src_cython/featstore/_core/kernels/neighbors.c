#include "neighbors.h"

#include <string.h>

FS_INLINE void fs_set_record(void *records, int wide, int64_t i, int64_t value)
{
    if (wide)
        ((int64_t *)records)[i] = value;
    else
        ((int32_t *)records)[i] = (int32_t)value;
}

void fs_offsets(const int64_t *indptr, const int64_t *ids, int64_t n, int64_t *starts, int64_t *degrees)
{
    for (int64_t i = 0; i < n; i++) {
        if (i + 32 < n)
            fs_fetch(&indptr[ids[i + 32]]);
        starts[i] = indptr[ids[i]];
        degrees[i] = indptr[ids[i] + 1] - starts[i];
    }
}

FS_INLINE int64_t fs_lookup_as(const int64_t *offset_of_node, const void *records, int wide, const int64_t *ids, int64_t n,
                               int64_t *place, int64_t *degree, int64_t *missing)
{
    int64_t n_missing = 0;
    for (int64_t first = 0; first < n; first += FS_CHUNK) {
        const int64_t end = n - first < FS_CHUNK ? n : first + FS_CHUNK;
        for (int64_t i = end; i < n && i < end + FS_CHUNK; i++)
            fs_fetch(&offset_of_node[ids[i]]);
        for (int64_t i = first; i < end; i++) {
            place[i] = offset_of_node[ids[i]];
            if (place[i] >= 0)
                fs_prefetch_record(records, wide, place[i]);
        }
        for (int64_t i = first; i < end; i++) {
            missing[n_missing] = i;
            n_missing += place[i] < 0;
            degree[i] = place[i] < 0 ? 0 : fs_record(records, wide, place[i]);
            place[i] += 1; /* behind the degree */
        }
    }
    return n_missing;
}

int64_t fs_lookup(const int64_t *offset_of_node, const void *records, int wide, const int64_t *ids, int64_t n,
                  int64_t *place, int64_t *degree, int64_t *missing)
{
    if (wide)
        return fs_lookup_as(offset_of_node, records, 1, ids, n, place, degree, missing);
    return fs_lookup_as(offset_of_node, records, 0, ids, n, place, degree, missing);
}

int64_t fs_first_bad(const void *ids, int wide, int64_t n, int64_t n_total)
{
    const int32_t last = n_total > INT32_MAX ? INT32_MAX : (int32_t)(n_total - 1);
    for (int64_t first = 0; first < n; first += 4096) {
        const int64_t end = n - first < 4096 ? n : first + 4096;
        uint64_t bad = 0;
        int32_t narrow = 0; /* compared as they are: that has vectors on every processor */
        if (wide)
            for (int64_t i = first; i < end; i++)
                bad |= (uint64_t)((const int64_t *)ids)[i] >= (uint64_t)n_total;
        else
            for (int64_t i = first; i < end; i++)
                narrow |= (((const int32_t *)ids)[i] < 0) | (((const int32_t *)ids)[i] > last);
        if (FS_RARE(bad | (uint64_t)narrow))
            for (int64_t i = first; i < end; i++)
                if ((uint64_t)fs_record(ids, wide, i) >= (uint64_t)n_total)
                    return i;
    }
    return -1;
}

int64_t fs_fill_records(const char *block, int64_t first, int64_t n, const int64_t *indptr, const int64_t *offset_of_node,
                        int64_t n_nodes, int64_t node, char *records, int id_bytes)
{
    const int64_t end = first + n;
    for (; node < n_nodes && indptr[node] < end; node++) {
        const int64_t offset = offset_of_node[node];
        int64_t from = indptr[node], to = indptr[node + 1];
        if (offset >= 0) {
            const int64_t skipped = from < first ? first - from : 0;
            from += skipped;
            to = to < end ? to : end;
            if (from < to) {
                if (!skipped)
                    fs_set_record(records, id_bytes == 8, offset, indptr[node + 1] - from);
                memcpy(records + (offset + 1 + skipped) * id_bytes, block + (from - first) * id_bytes,
                       (size_t)((to - from) * id_bytes));
            }
        }
        if (indptr[node + 1] > end)
            break;
    }
    return node;
}

int64_t fs_first_bad_record(const int64_t *indptr, const int64_t *offset_of_node, int64_t n_nodes, const void *records,
                            int wide, int64_t n_records, int64_t n_total)
{
    for (int64_t node = 0; node < n_nodes; node++) {
        const int64_t offset = offset_of_node[node], degree = indptr[node + 1] - indptr[node];
        if (offset == -1)
            continue;
        if (offset < 0 || offset >= n_records || degree > n_records - offset - 1 || fs_record(records, wide, offset) != degree ||
            fs_first_bad((const char *)records + (offset + 1) * (wide ? 8 : 4), wide, degree, n_total) >= 0)
            return node;
    }
    return -1;
}

/* Put numbers of edges in memory in the place of where they are: `first` and the index in the `n_kept` of `edge_ids`. What is below
 * `first`, the place of a number that is elsewhere, is inverted. Returns how many those are, or ~i of a position i beyond. */
FS_INLINE int64_t fs_take_edge_ids_as(const void *edge_ids, int wide, int64_t n_kept, int64_t first, int64_t *positions,
                                      int64_t n)
{
    int64_t n_missing = 0;
    for (int64_t begin = 0; begin < n; begin += FS_CHUNK) {
        const int64_t end = n - begin < FS_CHUNK ? n : begin + FS_CHUNK;
        for (int64_t i = end; i < n && i < end + FS_CHUNK; i++)
            fs_prefetch_record(edge_ids, wide, positions[i] - first);
        for (int64_t i = begin; i < end; i++) {
            const int64_t at = positions[i] - first;
            if (FS_RARE(at >= n_kept))
                return ~i;
            if (at >= 0) {
                positions[i] = fs_record(edge_ids, wide, at);
            } else {
                positions[i] = ~positions[i];
                n_missing++;
            }
        }
    }
    return n_missing;
}

int64_t fs_take_edge_ids(const void *edge_ids, int wide, int64_t n_kept, int64_t first, int64_t *positions, int64_t n)
{
    if (wide)
        return fs_take_edge_ids_as(edge_ids, 1, n_kept, first, positions, n);
    return fs_take_edge_ids_as(edge_ids, 0, n_kept, first, positions, n);
}

int64_t fs_first_bad_offset(const int64_t *offsets, int64_t n, int64_t least, int64_t most)
{
    for (int64_t i = 0; i < n; i++) {
        if (FS_RARE(offsets[i] < least || offsets[i] > most))
            return i;
        least = offsets[i];
    }
    return -1;
}
