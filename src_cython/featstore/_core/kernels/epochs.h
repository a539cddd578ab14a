/* Kernels of epoch-wide sampling: logs that many batches are written to at once, draws list by list, and their sorting.
 *
 * A log is a list of words, 32 or 64 bits each, in blocks of one arena; records may lie across blocks. Two kinds of records:
 *
 *   target  list, batch, place: list number `place` of the batch is to be drawn from. Where each node has one list, that is the
 *           node at `place` of the batch
 *   drawn   place, n, then n neighbour ids: what it drew, in list order; one place may have several records, in order. Numbered
 *           ones, of layer-neighbour sampling: then n places of these ids in their list, words without a sign
 */
#ifndef FEATSTORE_EPOCHS_H
#define FEATSTORE_EPOCHS_H

#include "labor.h"

enum {
    FS_TARGET_WORDS = 3,
    FS_DRAWN_HEAD = 2,
    FS_LEAST_BLOCK = FS_LANE_DRAWS + FS_DRAWN_HEAD, /* words: a record of a small fan-out takes one fresh block at most */
    FS_LEAST_BLOCKS = FS_LANES + 2,
    FS_KEY_WORDS = 4, /* of layer-neighbour sampling: early, late, phase, turn; see fs_numbers */
    FS_TAKEN = 512    /* ids in a record of what was taken, half as many where their places are: the least arena has room for it */
};

typedef struct {
    char *arena;
    int32_t *next;         /* of each block: the next one of its log, or of the free ones; -1 ends a list */
    int32_t *first, *last; /* of each log */
    int32_t *fill;         /* of each log: words in its last block */
    int64_t *length;       /* of each log: words */
    int64_t n_logs, n_blocks, block_words, n_free;
    int32_t free;
    int wide;
} fs_logs;

void fs_logs_clear(fs_logs *logs);

/* Copy a log's words to `out`, which has room for its length. */
void fs_log_copy(const fs_logs *logs, int64_t log, char *out);

/* Enter lists first … end - 1 as targets, at the places place + first … of a batch, each into the log of its range of 2^shift
 * lists; returns the one that there was no room for, or end. */
int64_t fs_scatter(fs_logs *logs, const int64_t *lists, int64_t first, int64_t end, int64_t batch, int64_t place, int shift);

/* Order n records of targets, nodes in [base, base + range), by node: `ends` (range + 1 entries) is left with the end of each
 * node's; returns 0 where a node is out of range. */
int fs_sort_targets(const void *records, int wide, int64_t n, int64_t base, int64_t range, int64_t *ends, uint32_t *batch,
                    uint32_t *place);

/* The nodes that have targets, and where those begin: of `ends` as sorting left it; `starts` gets one entry more. */
int64_t fs_distinct(const int64_t *ends, int64_t range, int64_t base, int64_t *nodes, int64_t *starts);

/* Both at once for few records, without a pass over the range; returns the nodes that have targets, -1 where one is out of range.
 * Keys, of a node and a record's number, lie in `nodes`, until what is sorted is counted there. */
int64_t fs_sort_few(const void *records, int wide, int64_t n, int64_t base, int64_t range, uint32_t *batch, uint32_t *place,
                    int64_t *nodes, int64_t *starts);

/* One pass over lists: each of the targets of node d draws, in hops hop … n_hops - 1, from ids at[d] … at[d] + degree[d] - 1, of
 * which those in [0, n_ids) are there. What is drawn goes to log hop * n_batches + batch. Where no ids are at hand (FS_ELSEWHERE),
 * their numbers are listed, and where in the logs they belong. */
enum { FS_ELSEWHERE = 2 };

typedef struct {
    fs_logs *logs;
    const uint64_t *keys; /* of (hop, batch): a word, or FS_KEY_WORDS */
    fs_take_fn take;      /* of layer-neighbour sampling, else NULL */
    fs_take_places_fn take_places;
    int numbered; /* records hold the ids' places in their lists */
    const int64_t *fanouts;
    int64_t n_hops, n_batches;
    int replace;
    /* targets by node */
    const int64_t *nodes, *starts;
    const uint32_t *batch, *place;
    int64_t first, end; /* nodes whose lists are here */
    const int64_t *at, *degree;
    const void *ids;
    int wide; /* or FS_ELSEWHERE */
    int64_t n_ids;
    int64_t *positions, *holes; /* elsewhere: ids to be read, and the word of the arena that each goes to */
    int64_t n_positions, most_positions;
    int64_t *drawn, *scratch; /* of a large fan-out */
    /* where to go on: hop, node, target, and how many of its ids are in the log already, or of its list were gone through */
    int64_t hop, node, target, done;
} fs_pass;

/* All hops; returns 1 where the arena is full: empty it and call again. */
int fs_draw_lists(fs_pass *pass, fs_draw_lanes_fn draw_lanes);

/* Put ids that were read elsewhere, one for each of the pass's positions, where they belong. */
void fs_fill_holes(fs_pass *pass, const void *found, int wide);

/* Edges of each of a hop's destinations, of the records of what they drew, with `each` words an edge; returns all of them, or -1
 * where records are damaged. */
int64_t fs_count_drawn(const void *records, int wide, int each, int64_t n_words, int64_t n_dst, int64_t *counts);

/* Whether no edges are counted but at these places, each of which is there once. */
int fs_are_counted(const int64_t *places, int64_t n, int64_t n_edges, int64_t *counts);

/* The hop's edges in the order of places[0] … places[n - 1], whose destinations are `owners`; where these are NULL, in the order of
 * the destinations 0 … n - 1. Where edge_pos is not NULL their numbers, too, of `starts`, the first edge of the list at each place.
 * `counts` is left with where each place's edges end. */
void fs_order_drawn(const void *records, int wide, int each, int64_t n_words, const int64_t *places, const int64_t *owners,
                    int64_t n, int64_t *counts, int64_t *src, int64_t *dst, const int64_t *starts, int64_t *edge_pos);

#endif
