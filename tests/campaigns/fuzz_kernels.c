/* Fuzzing of the C kernels that read what files hold: what their callers check first is checked here, and nothing more.
 *
 * With clang: -fsanitize=fuzzer,address,undefined. Anywhere: -DFUZZ_MAIN, a program that replays files and then draws inputs.
 * Every array is allocated at its exact size, so that AddressSanitizer sees the first byte beyond it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nearby.h"
#include "pairs.h"
#include "weighted.h"
#include "xxh3.h"

#define REQUIRE(condition)                                             \
    do {                                                               \
        if (!(condition)) {                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            abort();                                                   \
        }                                                              \
    } while (0)

static int is_checked = 1; /* 0: the control, in which ids are looked up that no check has seen */

typedef struct {
    const uint8_t *data;
    size_t n;
} input;

static uint64_t take(input *in, size_t n)
{
    uint64_t value = 0;
    if (n > in->n)
        n = in->n;
    memcpy(&value, in->data, n);
    in->data += n;
    in->n -= n;
    return value;
}

/* Copy n items of `width` bytes, as many as there are, into memory of just that size. */
static void *rest(input *in, size_t width, int64_t *n)
{
    if ((size_t)*n > in->n / width)
        *n = (int64_t)(in->n / width);
    void *copy = malloc(*n ? (size_t)*n * width : 1);
    memcpy(copy, in->data, (size_t)*n * width);
    in->data += (size_t)*n * width;
    in->n -= (size_t)*n * width;
    return copy;
}

static void *room(int64_t n, size_t width)
{
    return malloc(n > 0 ? (size_t)n * width : 1);
}

/* The offsets and ids of chunks, as decoded from a page: checked, then looked up. */
static void offsets(input *in)
{
    const int wide = (int)take(in, 1) & 1;
    int64_t n = (int64_t)take(in, 1), n_ids = (int64_t)take(in, 1), most = (int64_t)take(in, 2);
    int64_t *indptr = rest(in, 8, &n);
    void *ids = rest(in, wide ? 8 : 4, &n_ids);
    if (n > 1 && fs_first_bad_offset(indptr, n, 0, most) < 0) {
        const int64_t bad = is_checked ? fs_first_bad(ids, wide, n_ids, n - 1) : -1;
        for (int64_t i = 0; is_checked && bad < 0 && i < n_ids; i++)
            REQUIRE(fs_record(ids, wide, i) < n - 1);
        if (bad < 0 && wide) {
            int64_t *starts = room(n_ids, 8), *degrees = room(n_ids, 8);
            fs_offsets(indptr, ids, n_ids, starts, degrees);
            for (int64_t i = 0; i < n_ids; i++)
                REQUIRE(starts[i] >= 0 && degrees[i] >= 0 && starts[i] + degrees[i] <= most);
            free(starts);
            free(degrees);
        }
    }
    free(indptr);
    free(ids);
}

/* Pages and their sums: all forms of the checksum agree, and none reads beyond the bytes. */
static void sums(input *in)
{
    const uint64_t seed = take(in, 8);
    int64_t n = (int64_t)in->n;
    uint8_t *data = rest(in, 1, &n);
    fs_secret secret;
    fs_secret_init(&secret, seed);
    if (n > FS_XXH_SHORT) {
        const uint64_t plain = fs_xxh3_variant(0)(data, (size_t)n, &secret);
        for (int level = 1; level <= 2; level++)
            REQUIRE(!fs_xxh3_variant(level) || fs_xxh3_variant(level)(data, (size_t)n, &secret) == plain);
    } else {
        REQUIRE(fs_xxh3_short(data, (size_t)n, seed) == fs_xxh3_short(data, (size_t)n, seed));
    }
    REQUIRE(fs_poly61(data, (size_t)n, seed % FS_POLY_PRIME) < FS_POLY_PRIME);
    free(data);
}

/* Records of a saved neighbour cache: those that pass the check are looked up, and read whole. */
static void records(input *in)
{
    const int wide = (int)take(in, 1) & 1;
    int64_t n = (int64_t)take(in, 1) % 40, n_records = (int64_t)take(in, 2), n_indptr = n + 1;
    int64_t *indptr = rest(in, 8, &n_indptr), *offset_of_node = rest(in, 8, &n);
    void *held = rest(in, wide ? 8 : 4, &n_records);
    n = n < n_indptr - 1 ? n : n_indptr - 1;
    if (n > 0 && fs_first_bad_offset(indptr, n + 1, 0, 1 << 20) < 0 &&
        fs_first_bad_record(indptr, offset_of_node, n, held, wide, n_records, n) < 0) {
        int64_t *ids = room(n, 8), *place = room(n, 8), *degree = room(n, 8), *missing = room(n + 1, 8);
        for (int64_t i = 0; i < n; i++)
            ids[i] = n - 1 - i;
        const int64_t n_missing = fs_lookup(offset_of_node, held, wide, ids, n, place, degree, missing);
        REQUIRE(0 <= n_missing && n_missing <= n);
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < degree[i]; k++)
                REQUIRE((uint64_t)fs_record(held, wide, place[i] + k) < (uint64_t)n);
        free(ids);
        free(place);
        free(degree);
        free(missing);
    }
    free(indptr);
    free(offset_of_node);
    free(held);
}

/* Lists copied from a block of edges into records that have room for them, block by block. */
static void fill(input *in)
{
    const int wide = (int)take(in, 1) & 1, width = wide ? 8 : 4;
    int64_t n = (int64_t)take(in, 1) % 40, step = 1 + (int64_t)take(in, 1), n_indptr = n + 1;
    int64_t *indptr = rest(in, 8, &n_indptr);
    n = n_indptr - 1;
    if (n > 0 && fs_first_bad_offset(indptr, n_indptr, 0, 4096) < 0 && indptr[0] == 0) {
        const int64_t n_edges = indptr[n];
        int64_t *offset_of_node = room(n, 8), n_records = 0;
        for (int64_t i = 0; i < n; i++) {
            offset_of_node[i] = take(in, 1) & 1 ? n_records : -1;
            if (offset_of_node[i] >= 0)
                n_records += 1 + indptr[i + 1] - indptr[i];
        }
        char *held = calloc((size_t)n_records + 1, (size_t)width);
        held = realloc(held, n_records ? (size_t)(n_records * width) : 1);
        int64_t node = 0;
        for (int64_t first = 0; first < n_edges; first += step) {
            const int64_t here = n_edges - first < step ? n_edges - first : step;
            char *block = calloc((size_t)here, (size_t)width);
            node = fs_fill_records(block, first, here, indptr, offset_of_node, n, node, held, width);
            free(block);
        }
        REQUIRE(fs_first_bad_record(indptr, offset_of_node, n, held, wide, n_records, 1) < 0);
        free(held);
        free(offset_of_node);
    }
    free(indptr);
}

/* Weights of edges as a file has them: placed, checked, made tables of, drawn from by every form alike. */
static void weighted(input *in)
{
    const int64_t fanout = (int64_t)take(in, 1) - 1, first = (int64_t)(int16_t)take(in, 2);
    const int replace = (int)take(in, 1) & 1, wide = (int)take(in, 1) & 1;
    const uint64_t key = take(in, 8);
    int64_t n_ids = (int64_t)take(in, 1), n = 1 << 12, zeros;
    void *ids = rest(in, wide ? 8 : 4, &n_ids);
    double *weights = rest(in, 8, &n), *placed = calloc((size_t)n_ids + 1, 8);
    fs_place_weights(weights, first, n, ids, wide, n_ids, placed);
    free(placed);
    free(ids);
    const int64_t bad = n ? fs_first_bad_weight(weights, n, &zeros) : 0;
    REQUIRE(!n || bad >= 0 || !fs_make_columns(weights, n));
    if (n && bad >= 0)
        REQUIRE(fs_make_columns(weights, n) < 0); /* which is left as it was, and may name any edges as columns */
    if (n && bad < 0) {
        const fs_column *columns = (const fs_column *)weights;
        for (int64_t i = 0; i < n; i++) {
            const int64_t other = columns[i].other < 0 ? ~(int64_t)columns[i].other : columns[i].other;
            REQUIRE(columns[i].least >= 0 && columns[i].least <= 1 && other < n);
        }
        const int64_t list = 3, place = 0, begin = 0, most = fanout < 0 || fanout > n ? (fanout > n ? fanout : n) : fanout;
        int64_t *drawn[3] = {NULL, NULL, NULL}, n_drawn = 0;
        REQUIRE(fs_first_bad_column(columns, n, n) < 0);
        /* Of the second hop the columns of its first trials alone are there. */
        const int64_t n_trials = fs_sparse_trials(fanout, replace), sparse = FS_SPARSE;
        int64_t *numbers = room(n_trials + 1, 8);
        fs_column *few = room(n_trials + 1, sizeof *few);
        fs_try_columns(key, list, n, n_trials, numbers);
        for (int64_t t = 0; t < n_trials; t++) {
            REQUIRE(0 <= numbers[t] && numbers[t] < n);
            few[t] = columns[numbers[t]];
        }
        for (int level = 0; level <= fs_vectors(2); level++) {
            int64_t *dst = room(most + 1, 8), *scratch = room(most + 1, 8);
            drawn[level] = room(most + 1, 8);
            fs_weighted hop = {.columns = columns, .lists = &list, .place = &place, .degree = &n, .first = &begin, .fanout = fanout,
                               .key = key, .replace = replace, .src = drawn[level], .dst = dst, .scratch = scratch};
            fs_choose_draw_weighted(level)(&hop, 0, 1);
            REQUIRE(hop.n_edges <= most && hop.n_missing == 0);
            REQUIRE(!level || (hop.n_edges == n_drawn && !memcmp(drawn[0], drawn[level], (size_t)n_drawn * 8)));
            n_drawn = hop.n_edges;
            for (int64_t i = 0; i < n_drawn; i++) {
                REQUIRE(0 <= drawn[level][i] && drawn[level][i] < n);
                REQUIRE(!i || drawn[level][i - 1] + !replace <= drawn[level][i]);
            }
            if (n_trials && (replace || n > fanout)) {
                fs_weighted other = {.columns = few, .lists = &list, .place = &place, .degree = &n, .first = &sparse,
                                     .n_trials = n_trials, .fanout = fanout, .key = key, .replace = replace, .src = room(most + 1, 8),
                                     .dst = dst};
                if (!fs_lacks(&other, 0)) {
                    fs_choose_draw_weighted(level)(&other, 0, 1);
                    REQUIRE(other.n_edges == n_drawn && !memcmp(drawn[level], other.src, (size_t)n_drawn * 8));
                }
                free(other.src);
            }
            free(dst);
            free(scratch);
        }
        for (int level = 0; level < 3; level++)
            free(drawn[level]);
        free(numbers);
        free(few);
    }
    free(weights);
}

/* Records divided among buckets, and moved: those that no bucket has are refused. */
static void pairs(input *in)
{
    fs_pairs p = {.words = 2 + (int64_t)(take(in, 1) % 5), .wide = (int64_t)take(in, 1) & 1, .n_buckets = 1 + (int64_t)take(in, 2)};
    p.at = (int64_t)take(in, 1) % (p.words - p.wide);
    p.low = (int64_t)(int32_t)take(in, 4);
    p.width = 1 + (int64_t)take(in, 4);
    p.n = 1 << 12;
    uint32_t *held = rest(in, 4 * (size_t)p.words, &p.n), *out = room(p.n * p.words, 4);
    uint16_t *bucket = room(p.n, 2);
    int64_t *ends = room(p.n_buckets, 8);
    p.records = held;
    const int64_t bad = fs_bucket_pairs(&p, bucket, ends);
    REQUIRE(bad < p.n);
    if (bad < 0) {
        REQUIRE(ends[p.n_buckets - 1] == p.n);
        fs_move_pairs(&p, bucket, ends, out);
        REQUIRE(ends[0] == 0);
    }
    free(held);
    free(out);
    free(bucket);
    free(ends);
}

/* Lists at hand: entered once each, found, and taken. */
static void nearby(input *in)
{
    enum { MASK = 511 };
    int64_t n = (int64_t)take(in, 1), n_ids = 0, base = (int64_t)take(in, 4);
    int64_t *nodes = rest(in, 8, &n), *starts = room(n, 8), *place = room(n, 8);
    int32_t *table = room(MASK + 1, 4);
    memset(table, -1, (MASK + 1) * 4);
    for (int64_t i = 0; i < n; i++) {
        starts[i] = (int64_t)take(in, 1) & 7;
        place[i] = -1;
    }
    if (fs_enter_lists(nodes, starts, n, table, MASK, &n_ids) < 0) {
        fs_find_lists(nodes, starts, table, MASK, base, nodes, place, n);
        int64_t *positions = room(n, 8), n_far;
        int32_t *ids = calloc((size_t)n_ids + 1, 4), *out = room(n, 4);
        for (int64_t i = 0; i < n; i++) {
            REQUIRE(~place[i] >= base && ~place[i] <= base + n_ids);
            positions[i] = take(in, 1) & 1 ? (int64_t)take(in, 2) % (base + 1) : ~place[i];
        }
        if ((n_far = fs_count_far(positions, n, base, n_ids)) >= 0) {
            int64_t *far = room(n_far, 8);
            fs_take_near32(positions, n, base, ids, out, far);
            int32_t *read = calloc((size_t)n_far + 1, 4);
            fs_put_far32(positions, n, base, read, out);
            free(read);
            free(far);
        }
        free(positions);
        free(ids);
        free(out);
    }
    free(nodes);
    free(starts);
    free(place);
    free(table);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static void (*const targets[])(input *) = {offsets, sums, records, fill, weighted, pairs, nearby};
    input in = {data, n};
    targets[take(&in, 1) % (sizeof targets / sizeof *targets)](&in);
    return 0;
}

#ifdef FUZZ_MAIN
static uint64_t state = 1;

static uint64_t next(void)
{
    return fs_mix(state += FS_GOLDEN);
}

/* Items of one width: small ones, ascending ones, or of any bits. */
static size_t draw(uint8_t *out, size_t most)
{
    const size_t width = next() % 2 ? 8 : 4, head = 1 + next() % 12;
    size_t n = next() % most;
    for (size_t i = 0; i < n; i++)
        out[i] = (uint8_t)next();
    out[0] = (uint8_t)next();
    const uint64_t how = next() % 4, range = 1 + next() % 40;
    uint64_t before = 0;
    for (size_t at = head; how && at + width <= n; at += width) {
        const double real = (double)(next() % 1000) * (next() % 8 ? 1.0 : 1e-300);
        const uint64_t value = how == 1 ? next() % range : how == 2 ? (before += next() % 4) : 0;
        memcpy(out + at, how == 3 ? (const void *)&real : (const void *)&value, how == 3 && width == 8 ? 8 : width);
    }
    return n;
}

int main(int argc, char **argv)
{
    static uint8_t data[1 << 16];
    const long n = argc > 1 ? atol(argv[1]) : 0;
    is_checked = !getenv("FUZZ_WITHOUT_CHECK");
    for (int i = 2; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        REQUIRE(file);
        const size_t got = fread(data, 1, sizeof data, file);
        fclose(file);
        LLVMFuzzerTestOneInput(data, got);
    }
    for (long i = 0; i < n; i++)
        LLVMFuzzerTestOneInput(data, draw(data, i % 64 ? 600 : 9000));
    printf("%d files, %ld drawn inputs\n", argc > 2 ? argc - 2 : 0, n);
    return 0;
}
#endif
