#include "weighted.h"

#include <float.h>
#include <string.h>

enum { LANES = FS_WEIGHTED_LANES, SEEN_BITS = 1024, SEEN_SHIFT = 22 };

typedef uint64_t fs_words __attribute__((vector_size(8 * LANES)));
typedef int64_t fs_signed __attribute__((vector_size(8 * LANES)));
typedef double fs_doubles __attribute__((vector_size(8 * LANES)));
typedef uint32_t fs_halves __attribute__((vector_size(4 * LANES)));
typedef float fs_floats __attribute__((vector_size(4 * LANES)));

#define FS_ONE 0x3FF0000000000000ull
#define FS_FRACTION 0x000FFFFFFFFFFFFFull
#define FS_KEYED UINT64_MAX /* in place of a trial: the key of the edges' own words */
#define FS_MARGIN (1 + 1e-9) /* of a bound that only spares logarithms: more than its rounding */

static const fs_words fs_lanes = {0, 1, 2, 3, 4, 5, 6, 7};

/* ---------------------------------------------------------------- words and exponentials */

FS_INLINE fs_words fs_mix_lanes(fs_words z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* fs_absorb() of lanes. */
FS_INLINE fs_words fs_absorb_lanes(uint64_t key, fs_words x)
{
    return fs_mix_lanes(key + FS_GOLDEN * (x + 1));
}

/* In [0, 1), multiples of 2^-52. */
FS_INLINE fs_doubles fs_uniform_lanes(fs_words z)
{
    return (fs_doubles)(z >> 12 | FS_ONE) - 1;
}

/* -log(1 - v): the fraction of 1 - v, scaled to [sqrt(1/2), sqrt(2)), through the series of the inverse hyperbolic tangent. */
FS_INLINE fs_doubles fs_exponential_lanes(fs_doubles v)
{
    const fs_words bits = (fs_words)(1 - v);
    fs_words exponent = bits >> 52, fraction = (bits & FS_FRACTION) | FS_ONE;
    const fs_words above = (fs_words)((fs_doubles)fraction > 1.4142135623730951);
    fraction -= above & 0x0010000000000000ull; /* half of it */
    exponent -= above;                         /* a lane of ones is -1 */
    /* The exponent, of -52 to 0, as a double: no conversion of 64 bits is needed. */
    const fs_doubles e = (fs_doubles)(exponent | 0x4330000000000000ull) - (4503599627370496.0 + 1023.0);
    const fs_doubles s = ((fs_doubles)fraction - 1) / ((fs_doubles)fraction + 1), z = s * s;
    fs_doubles p = z * (1.0 / 21) + (1.0 / 19);
    p = p * z + (1.0 / 17);
    p = p * z + (1.0 / 15);
    p = p * z + (1.0 / 13);
    p = p * z + (1.0 / 11);
    p = p * z + (1.0 / 9);
    p = p * z + (1.0 / 7);
    p = p * z + (1.0 / 5);
    p = p * z + (1.0 / 3);
    p = p * z + 1;
    return -(e * 0.6931471805599453 + 2 * s * p);
}

/* ---------------------------------------------------------------- keys: the smallest of a list
 * A heap of keys and positions with the largest on top, where position decides between equal keys. */

typedef struct {
    double *keys;
    int64_t *positions;
    int64_t n, room;
    double bound; /* no larger key is drawn, but for FS_MARGIN */
} fs_heap;

FS_INLINE int fs_after(const fs_heap *heap, int64_t a, int64_t b)
{
    return heap->keys[a] > heap->keys[b] || (heap->keys[a] == heap->keys[b] && heap->positions[a] > heap->positions[b]);
}

FS_INLINE void fs_sift(fs_heap *heap, int64_t i)
{
    for (;;) {
        const int64_t left = 2 * i + 1;
        if (left >= heap->n)
            return;
        const int64_t child = left + 1 < heap->n && fs_after(heap, left + 1, left) ? left + 1 : left;
        if (!fs_after(heap, child, i))
            return;
        const double key = heap->keys[i];
        const int64_t position = heap->positions[i];
        heap->keys[i] = heap->keys[child];
        heap->positions[i] = heap->positions[child];
        heap->keys[child] = key;
        heap->positions[child] = position;
        i = child;
    }
}

FS_INLINE void fs_consider(fs_heap *heap, double key, int64_t position)
{
    key = key < DBL_MAX ? key : DBL_MAX;
    if (heap->n < heap->room) {
        heap->keys[heap->n] = key;
        heap->positions[heap->n++] = position;
        if (heap->n < heap->room)
            return;
        for (int64_t i = heap->room / 2 - 1; i >= 0; i--)
            fs_sift(heap, i);
    } else if (key < heap->keys[0] || (key == heap->keys[0] && position < heap->positions[0])) {
        heap->keys[0] = key;
        heap->positions[0] = position;
        fs_sift(heap, 0);
    } else {
        return;
    }
    heap->bound = heap->keys[0] * FS_MARGIN;
}

FS_INLINE int fs_is_in(const int64_t *positions, int64_t n, int64_t position)
{
    int found = 0;
    for (int64_t i = 0; i < n; i++)
        found |= positions[i] == position;
    return found;
}

/* Draw by keys into out[n …] up to `fanout` positions in all, none of the n that are there; returns how many there are then. */
FS_INLINE int64_t fs_draw_by_keys(uint64_t key, const fs_column *columns, int64_t degree, int64_t fanout, int64_t *out, int64_t n,
                                  int64_t *scratch)
{
    fs_heap heap = {(double *)scratch, out + n, 0, fanout - n, __builtin_inf()};
    for (int64_t i = 0; i < degree; i += LANES) { /* light edges, of which `least` is the weight */
        const int left = degree - i < LANES ? (int)(degree - i) : LANES;
        fs_words entries = {0};
        memcpy(&entries, columns + i, (size_t)left * sizeof *columns);
        fs_doubles w = __builtin_convertvector((fs_floats)__builtin_convertvector(entries, fs_halves), fs_doubles);
        w = (fs_doubles)((fs_signed)w & ~((fs_signed)entries >> 63));
        const fs_doubles v = fs_uniform_lanes(fs_absorb_lanes(key, fs_lanes + (uint64_t)i));
        const fs_signed may = v < heap.bound * w; /* -log(1 - v) >= v; false for a weight of 0, and infinity times 0 */
        int64_t any = 0;
        for (int j = 0; j < LANES; j++)
            any |= may[j];
        if (!any)
            continue;
        const fs_doubles keys = fs_exponential_lanes(v) / w;
        for (int j = 0; j < left; j++)
            if (may[j] && !fs_is_in(out, n, i + j))
                fs_consider(&heap, keys[j], i + j);
    }
    double rest = 0; /* of the column of the heavy edge before */
    for (int64_t j = 0, i = 0; j < degree; j++) {
        if (columns[j].other >= 0)
            continue;
        double w = columns[j].least + rest;
        for (; i < degree && (columns[i].other < 0 || columns[i].other == j); i++)
            if (columns[i].other >= 0)
                w += 1 - (double)columns[i].least;
        rest = 1 - (double)columns[j].least;
        const fs_doubles v = fs_uniform_lanes(fs_absorb_lanes(key, fs_lanes + (uint64_t)j));
        if (v[0] < heap.bound * w && !fs_is_in(out, n, j))
            fs_consider(&heap, (fs_exponential_lanes(v) / w)[0], j);
    }
    return n + heap.n;
}

/* ---------------------------------------------------------------- trials */

/* Trials by their words: the column of each, and the share of the column that it is above. */
FS_INLINE void fs_try_lanes(fs_words z, fs_words degree, int64_t *numbers, double *shares)
{
    /* Word times degree, 96 bits, in halves, which vectors can multiply: a column, and 64 bits behind the point. */
    const fs_words low = (z & 0xFFFFFFFFu) * degree, high = (z >> 32) * degree + (low >> 32);
    const fs_words number = high >> 32;
    const fs_doubles share = fs_uniform_lanes(high << 32 | (low & 0xFFFFFFFFu));
    memcpy(numbers, &number, sizeof number);
    memcpy(shares, &share, sizeof share);
}

/* Trials of one list, from a number on. */
FS_INLINE void fs_try_list(uint64_t key, int64_t trial, int64_t degree, int64_t *numbers, double *shares)
{
    fs_try_lanes(fs_absorb_lanes(key, fs_lanes + (uint64_t)trial), (uint64_t)degree + (fs_words){0}, numbers, shares);
}

/* The edge that a trial draws; arithmetic, not branches, which could not be foreseen. */
FS_INLINE int64_t fs_edge_of(fs_column column, int64_t number, double share)
{
    const int64_t is_own = -(int64_t)(share < (double)column.least), other = column.other ^ (column.other >> 31);
    return (number & is_own) | (other & ~is_own);
}

/* Bits of what is drawn: one a position in lists of at most SEEN_BITS, else one a hash. */
typedef struct {
    uint64_t bits[SEEN_BITS / 64];
    int is_hashed;
} fs_seen;

FS_INLINE int fs_see(fs_seen *seen, int64_t edge, const int64_t *drawn, int64_t n)
{
    const uint32_t bit = seen->is_hashed ? (uint32_t)edge * 0x9E3779B1u >> SEEN_SHIFT : (uint32_t)edge;
    int is_drawn = (int)(seen->bits[bit / 64] >> (bit % 64) & 1);
    if (seen->is_hashed && FS_RARE(is_drawn))
        is_drawn = fs_is_in(drawn, n, edge);
    seen->bits[bit / 64] |= 1ull << (bit % 64);
    return is_drawn;
}

/* Draw the rest of a list, of which `n_tried` trials have drawn n edges: by trials, and then by keys. Of a sparse list there are the
 * columns of its first trials alone, in their order, and no keys. Returns how many are drawn then; `drawn` has room for one more. */
FS_INLINE int64_t fs_draw_rest(const fs_weighted *hop, uint64_t key, const fs_column *columns, int64_t degree, int is_sparse,
                               int64_t n_tried, int64_t *drawn, int64_t n)
{
    const int64_t fanout = hop->fanout, n_trials = is_sparse ? hop->n_trials : fs_most_trials(degree, fanout);
    fs_seen seen = {{0}, degree > SEEN_BITS};
    for (int64_t i = 0; i < n; i++)
        fs_see(&seen, drawn[i], drawn, i);
    for (int64_t t = n_tried; n < fanout && t < n_trials; t += LANES) {
        int64_t numbers[LANES];
        double shares[LANES];
        fs_try_list(key, t, degree, numbers, shares);
        for (int64_t j = 0; j < LANES && t + j < n_trials && n < fanout; j++) {
            drawn[n] = fs_edge_of(columns[is_sparse ? t + j : numbers[j]], numbers[j], shares[j]);
            n += !fs_see(&seen, drawn[n], drawn, n);
        }
    }
    if (n < fanout && !is_sparse)
        n = fs_draw_by_keys(fs_absorb(key, FS_KEYED), columns, degree, fanout, drawn, n, hop->scratch);
    return n;
}

void fs_try_columns(uint64_t key, int64_t list, int64_t degree, int64_t n, int64_t *numbers)
{
    for (int64_t t = 0; t < n; t += LANES) {
        int64_t found[LANES];
        double shares[LANES];
        fs_try_list(fs_absorb(key, (uint64_t)list), t, degree, found, shares);
        memcpy(numbers + t, found, (size_t)(n - t < LANES ? n - t : LANES) * sizeof *found);
    }
}

FS_INLINE int fs_is_of_zeros(fs_column column, int64_t number)
{
    return column.least == 0 && column.other == number;
}

int fs_lacks(const fs_weighted *hop, int64_t i)
{
    int64_t number, drawn[FS_LANE_DRAWS + 1];
    if (hop->replace || hop->first[i] > FS_SPARSE)
        return 0;
    const fs_column *columns = hop->columns + (FS_SPARSE - hop->first[i]);
    fs_try_columns(hop->key, hop->lists[i], hop->degree[i], 1, &number);
    if (fs_is_of_zeros(*columns, number))
        return 0;
    const uint64_t key = fs_absorb(hop->key, (uint64_t)hop->lists[i]);
    return fs_draw_rest(hop, key, columns, hop->degree[i], 1, 0, drawn, 0) < hop->fanout;
}

/* ---------------------------------------------------------------- lists, several at a time */

static const fs_column fs_no_column = {0, 0}; /* of a list that draws nothing */

/* Lists that are drawn from, with their first trials; those of a group of LANES lie side by side. */
typedef struct {
    uint64_t key[FS_WEIGHTED_CHUNK], degree[FS_WEIGHTED_CHUNK];
    const fs_column *columns[FS_WEIGHTED_CHUNK];
    int is_sparse[FS_WEIGHTED_CHUNK];
    int64_t numbers[FS_WEIGHTED_CHUNK * FS_LANE_DRAWS];
    double shares[FS_WEIGHTED_CHUNK * FS_LANE_DRAWS];
} fs_trials;

/* What is drawn from a group: in rows, of which a list has a lane; its first n[lane] are edges, ascending. */
typedef struct {
    fs_halves rows[FS_LANE_DRAWS], n;
} fs_drawn;

/* Whether a list is drawn from; else what has a weight is taken whole. */
FS_INLINE int fs_is_weighed(const fs_weighted *hop, int64_t i)
{
    return hop->fanout > 0 && (hop->replace ? hop->degree[i] > 0 : hop->degree[i] > hop->fanout);
}

/* Trials that are made of each list at once. Without replacement some more than draws, as some draw what is drawn already. */
FS_INLINE int fs_n_rows(const fs_weighted *hop)
{
    const int64_t n = hop->fanout + (hop->replace ? 0 : 2 * hop->fanout / 5);
    return (int)(n < 0 || hop->fanout > FS_LANE_DRAWS ? 0 : n < FS_LANE_DRAWS ? n : FS_LANE_DRAWS);
}

/* Where the column of a trial is. */
FS_INLINE const fs_column *fs_column_of(const fs_trials *trials, int any_sparse, int64_t list, int t, int64_t number)
{
    return trials->columns[list] + (any_sparse && trials->is_sparse[list] ? t : number);
}

/* Make the first trials of lists i … stop - 1 that are drawn from, and fetch their columns; of the others fetch the first. */
FS_INLINE void fs_prepare(const fs_weighted *hop, int64_t i, int64_t stop, int any_sparse, int n_rows, fs_trials *trials)
{
    int64_t n = 0;
    for (; i < stop; i++) {
        const int is_sparse = any_sparse && hop->first[i] <= FS_SPARSE;
        const int64_t first = is_sparse ? FS_SPARSE - hop->first[i] : hop->first[i];
        const fs_column *columns = first < 0 ? NULL : hop->columns + first;
        if (fs_is_weighed(hop, i)) {
            trials->is_sparse[n] = is_sparse;
            trials->key[n] = fs_absorb(hop->key, (uint64_t)hop->lists[i]);
            trials->degree[n] = (uint64_t)hop->degree[i];
            trials->columns[n++] = columns;
        } else {
            for (int64_t j = 0; columns && hop->fanout && j < hop->degree[i] && j < 64; j += 8)
                fs_fetch(columns + j);
        }
    }
    for (; n % LANES; n++)
        trials->key[n] = trials->degree[n] = 0, trials->columns[n] = &fs_no_column, trials->is_sparse[n] = 0;
    for (int64_t first = 0; first < n; first += LANES) {
        int64_t *numbers = trials->numbers + first * n_rows;
        double *shares = trials->shares + first * n_rows;
        fs_words key, degree;
        memcpy(&key, trials->key + first, sizeof key);
        memcpy(&degree, trials->degree + first, sizeof degree);
        for (int t = 0; t < n_rows; t++)
            fs_try_lanes(fs_mix_lanes(key + FS_GOLDEN * ((uint64_t)t + 1)), degree, numbers + t * LANES, shares + t * LANES);
        for (int t = 0; t < n_rows; t++)
            for (int j = 0; j < LANES; j++)
                fs_fetch(fs_column_of(trials, any_sparse, first + j, t, numbers[t * LANES + j]));
    }
}

/* Sort rows that lie side by side. */
FS_INLINE void fs_sort_rows(fs_halves *rows, uint8_t (*network)[2], int n_network)
{
    for (int c = 0; c < n_network; c++) {
        const fs_halves a = rows[network[c][0]], b = rows[network[c][1]], swap = (fs_halves)(a > b) & (a ^ b);
        rows[network[c][0]] = a ^ swap;
        rows[network[c][1]] = b ^ swap;
    }
}

/* Draw from the LANES lists from `first` on. No branch depends on what is drawn, but where the trials do not suffice. */
FS_INLINE void fs_draw_group(const fs_weighted *hop, const fs_trials *trials, int any_sparse, int64_t first, int n_rows,
                             uint8_t (*network)[2], int n_network, fs_drawn *out)
{
    const int64_t *numbers = trials->numbers + first * n_rows;
    const double *shares = trials->shares + first * n_rows;
    uint64_t entries[LANES * FS_LANE_DRAWS];
    const fs_halves fanout = (uint32_t)hop->fanout + (fs_halves){0};
    fs_halves n = {0}, nothing = {0};
    for (int t = 0; t < n_rows; t++)
        for (int j = 0; j < LANES; j++)
            memcpy(&entries[t * LANES + j], fs_column_of(trials, any_sparse, first + j, t, numbers[t * LANES + j]), sizeof *entries);
    for (int t = 0; t < n_rows; t++) {
        fs_words entry, number;
        fs_doubles share;
        memcpy(&entry, entries + t * LANES, sizeof entry);
        memcpy(&number, numbers + t * LANES, sizeof number);
        memcpy(&share, shares + t * LANES, sizeof share);
        const fs_halves bits = __builtin_convertvector(entry, fs_halves);
        const fs_words is_own = (fs_words)(share < __builtin_convertvector((fs_floats)bits, fs_doubles));
        const fs_words other = (fs_words)((fs_signed)entry >> 32);
        const fs_words others = other ^ (fs_words)((fs_signed)other >> 63); /* as fs_edge_of() */
        fs_halves edge = __builtin_convertvector((number & is_own) | (others & ~is_own), fs_halves);
        if (t == 0) {
            nothing = __builtin_convertvector((fs_words)(entry == number << 32), fs_halves); /* as fs_is_of_zeros() */
            n = nothing & fanout;
        }
        if (!hop->replace) {
            fs_halves is_drawn = (fs_halves)(n >= fanout);
            for (int i = 0; i < t; i++)
                is_drawn |= (fs_halves)(out->rows[i] == edge);
            edge |= is_drawn; /* behind all edges */
            n += 1 + is_drawn;
        }
        out->rows[t] = edge;
    }
    if (hop->replace)
        n = fanout;
    out->n = n & ~nothing;
    for (int j = 0; j < LANES; j++) {
        if (n[j] >= (uint32_t)hop->fanout)
            continue;
        int64_t drawn[FS_LANE_DRAWS + 1], m = 0;
        for (int t = 0; t < n_rows; t++) {
            drawn[m] = out->rows[t][j];
            m += drawn[m] != UINT32_MAX;
        }
        const int64_t k = first + j;
        m = fs_draw_rest(hop, trials->key[k], trials->columns[k], (int64_t)trials->degree[k], trials->is_sparse[k], n_rows, drawn, m);
        for (int t = 0; t < n_rows; t++)
            out->rows[t][j] = t < m ? (uint32_t)drawn[t] : UINT32_MAX;
        out->n[j] = (uint32_t)m;
    }
    fs_sort_rows(out->rows, network, n_network);
}

/* ---------------------------------------------------------------- lists, one at a time */

FS_INLINE int64_t fs_take_positive(const fs_column *columns, int64_t degree, int64_t *out)
{
    int64_t n = 0;
    for (int64_t j = 0; j < degree; j++) {
        out[n] = j;
        n += !columns || columns[j].other < 0 || columns[j].least > 0;
    }
    return n;
}

/* Draw more than FS_LANE_DRAWS from a list. */
FS_INLINE int64_t fs_draw_many(const fs_weighted *hop, int64_t i, int64_t *out)
{
    const int64_t degree = hop->degree[i], fanout = hop->fanout;
    const fs_column *columns = hop->columns + hop->first[i];
    const uint64_t key = fs_absorb(hop->key, (uint64_t)hop->lists[i]);
    int64_t n = fanout;
    if (columns->other == 0 && columns->least == 0) /* all weights are 0 */
        return 0;
    if (!hop->replace)
        n = fs_draw_by_keys(fs_absorb(key, FS_KEYED), columns, degree, fanout, out, 0, hop->scratch);
    else
        for (int64_t t = 0; t < fanout; t += LANES) {
            int64_t numbers[LANES];
            double shares[LANES];
            fs_try_list(key, t, degree, numbers, shares);
            for (int64_t j = 0; j < LANES && t + j < fanout; j++)
                out[t + j] = fs_edge_of(columns[numbers[j]], numbers[j], shares[j]);
        }
    fs_radix_sort(out, hop->scratch, n, (uint64_t)degree);
    return n;
}

FS_INLINE void fs_draw_lists(fs_weighted *hop, int any_sparse, int64_t i, int64_t end)
{
    fs_trials trials;
    fs_drawn drawn;
    uint8_t network[FS_NETWORK][2];
    const int n_rows = fs_n_rows(hop), n_network = fs_network(n_rows, network);
    int64_t e = hop->n_edges, missing = hop->n_missing;
    for (; i < end; i += FS_WEIGHTED_CHUNK) {
        const int64_t stop = end - i < FS_WEIGHTED_CHUNK ? end : i + FS_WEIGHTED_CHUNK;
        int64_t weighed = 0;
        fs_prepare(hop, i, stop, any_sparse, n_rows, &trials);
        for (int64_t k = i; k < stop; k++) {
            const int64_t place = hop->place[k], sign = place >> 63;
            int64_t *src = hop->src + e, *dst = hop->dst + e, n = 0;
            if (fs_is_weighed(hop, k) && n_rows) {
                const int lane = (int)(weighed % LANES);
                if (lane == 0)
                    fs_draw_group(hop, &trials, any_sparse, weighed, n_rows, network, n_network, &drawn);
                weighed++;
                n = drawn.n[lane];
                for (int64_t j = 0; j < n; j++) {
                    src[j] = place + (((int64_t)drawn.rows[j][lane] ^ sign) - sign);
                    dst[j] = k;
                }
            } else {
                if (fs_is_weighed(hop, k))
                    n = fs_draw_many(hop, k, src);
                else if (hop->fanout)
                    n = fs_take_positive(hop->first[k] < 0 ? NULL : hop->columns + hop->first[k], hop->degree[k], src);
                for (int64_t j = 0; j < n; j++) {
                    src[j] = place + ((src[j] ^ sign) - sign);
                    dst[j] = k;
                }
            }
            e += n;
            missing += place < 0 ? n : 0;
        }
    }
    hop->n_edges = e;
    hop->n_missing = missing;
}

FS_INLINE void fs_draw_weighted(fs_weighted *hop, int64_t i, int64_t end)
{
    if (hop->n_trials)
        fs_draw_lists(hop, 1, i, end);
    else
        fs_draw_lists(hop, 0, i, end);
}

static void fs_draw_weighted_plain(fs_weighted *hop, int64_t i, int64_t end)
{
    fs_draw_weighted(hop, i, end);
}

#if defined(__x86_64__)
FS_AVX2 static void fs_draw_weighted_avx2(fs_weighted *hop, int64_t i, int64_t end)
{
    fs_draw_weighted(hop, i, end);
}

FS_AVX512 static void fs_draw_weighted_avx512(fs_weighted *hop, int64_t i, int64_t end)
{
    fs_draw_weighted(hop, i, end);
}
#endif

fs_draw_weighted_fn fs_choose_draw_weighted(int level)
{
#if defined(__x86_64__)
    const int vectors = fs_vectors(level);
    if (vectors)
        return vectors == 2 ? fs_draw_weighted_avx512 : fs_draw_weighted_avx2;
#endif
    return fs_draw_weighted_plain;
}

/* ---------------------------------------------------------------- weights and tables */

int64_t fs_first_bad_weight(const double *weights, int64_t n, int64_t *zeros)
{
    int64_t n_zeros = 0;
    for (int64_t i = 0; i < n; i++) {
        if (FS_RARE(!(weights[i] >= 0 && weights[i] <= DBL_MAX)))
            return i;
        n_zeros += weights[i] == 0;
    }
    *zeros = n_zeros;
    return -1;
}

void fs_place_weights(const double *weights, int64_t first, int64_t n, const void *ids, int wide, int64_t n_ids, double *out)
{
    for (int64_t i = 0; i < n_ids; i++) {
        const uint64_t at = (uint64_t)fs_record(ids, wide, i) - (uint64_t)first; /* of any number that a file may hold */
        if (at < (uint64_t)n)
            out[i] = weights[at];
    }
}

FS_INLINE void fs_put_column(double *entry, double least, int64_t other)
{
    const fs_column column = {(float)least, (int32_t)other};
    memcpy(entry, &column, sizeof column);
}

/* A heavy edge's column that is made is a negative number; a light edge's is one below 1, as `other` has its exponent. */
FS_INLINE int64_t fs_next_light(const double *shares, int64_t i, int64_t n)
{
    while (i < n && !(shares[i] >= 0 && shares[i] <= 1))
        i++;
    return i;
}

FS_INLINE int64_t fs_next_heavy(const double *shares, int64_t j, int64_t n)
{
    while (j < n && !(shares[j] > 1))
        j++;
    return j;
}

int64_t fs_first_bad_column(const fs_column *columns, int64_t n, int64_t degree)
{
    for (int64_t i = 0; i < n; i++)
        if (FS_RARE((columns[i].other ^ (columns[i].other >> 31)) >= degree))
            return i;
    return -1;
}

int fs_make_columns(double *weights, int64_t n)
{
    double most = 0, total = 0;
    int64_t zeros;
    if (fs_first_bad_weight(weights, n, &zeros) >= 0)
        return -1;
    for (int64_t i = 0; i < n; i++)
        most = weights[i] > most ? weights[i] : most;
    if (!(most > 0)) {
        for (int64_t i = 0; i < n; i++)
            fs_put_column(&weights[i], 0, i);
        return 0;
    }
    for (int64_t i = 0; i < n; i++)
        total += weights[i] / most; /* a sum of weights might be infinite */
    for (int64_t i = 0; i < n; i++) {
        const double share = weights[i] / most * ((double)n / total);
        weights[i] = weights[i] > 0 && share < FLT_MIN ? FLT_MIN : share;
    }
    int64_t i = fs_next_light(weights, 0, n), j = fs_next_heavy(weights, 0, n), last = 0;
    double rest = j < n ? weights[j] : 0; /* of the heavy edge */
    while (j < n) {
        last = j;
        if (rest > 1 && i < n) {
            rest -= 1 - weights[i];
            fs_put_column(&weights[i], weights[i], j);
            i = fs_next_light(weights, i + 1, n);
            continue;
        }
        j = fs_next_heavy(weights, j + 1, n);
        if (rest > 1 || j == n) { /* by rounding alone */
            fs_put_column(&weights[last], 1, ~last);
            rest = j < n ? weights[j] : 0;
        } else {
            fs_put_column(&weights[last], rest, ~j);
            rest = weights[j] - (1 - rest);
        }
    }
    for (; i < n; i = fs_next_light(weights, i + 1, n)) /* by rounding they are not quite 1 */
        fs_put_column(&weights[i], weights[i] > 0, last);
    return 0;
}
