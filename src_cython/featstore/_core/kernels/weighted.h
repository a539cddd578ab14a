/* Draws in proportion to weights, without replacement or with it: positions of a list, keyed by the list.
 *
 * Without replacement the draws are those of Efraimidis and Spirakis (A-Res, 2006): edge i of weight w_i gets the key E_i / w_i,
 * where E_i = -log(u_i) is exponential, and the k smallest keys are drawn. That is the same as drawing one edge after the other,
 * each in proportion to its weight among the edges that are left. So draws can begin in another way, which looks at few entries
 * of a long list: a trial draws among all edges, and what is drawn already is passed over. If trials do not suffice, because few
 * edges have most of the weight, keys draw the rest among the edges that are left. What is drawn so far says nothing about the
 * order of the others, so each set has its exact probability, whichever way it came about.
 *
 * A trial reads a column of the list's alias table (Walker 1977; made in one sweep: Hübschle-Schneider, Sanders 2022). The table
 * takes the place of the weights, 8 bytes an edge, and has them up to a factor.
 *
 * All words are keyed by the list: trial t uses word t, and key i is of word i of the list's last key. So the draws are a
 * function of the key and of the list's weights alone.
 */
#ifndef FEATSTORE_WEIGHTED_H
#define FEATSTORE_WEIGHTED_H

#include "neighbors.h"

enum {
    FS_WEIGHTED_LANES = 8,   /* lists, edges of a list, or trials of one, at once */
    FS_WEIGHTED_CHUNK = 32,  /* lists whose first trials are made, and their columns fetched, before they are gone through */
    FS_LONGEST = 1 << 29,    /* edges that a list with weights may have */
    FS_SPARSE = -2,          /* see fs_weighted */
    FS_LEAST_SPARSE = 4      /* times as many edges as columns that are read has a sparse list */
};

/* Column i of a list of n: a share `least` of 1/n is edge i's, the rest is another's. A light edge, of the mean weight or less, has
 * no share elsewhere, and `other` is a heavy edge. A heavy edge has the rest of other columns; its `other` is ~ of the next heavy
 * edge, or of itself. If all weights are 0, the columns are 0 and `other` their own number. */
typedef struct {
    float least;
    int32_t other;
} fs_column;

/* Trials without replacement of a list, for fan-outs up to FS_LANE_DRAWS: so many that keys, which go through the whole list, cost
 * as much. */
FS_INLINE int64_t fs_most_trials(int64_t degree, int64_t fanout)
{
    return (4 * fanout + degree / 8 + FS_WEIGHTED_LANES - 1) / FS_WEIGHTED_LANES * FS_WEIGHTED_LANES;
}

typedef struct {
    const fs_column *columns;
    /* of each list: its number, which keys it; where its neighbours begin (an index, or ~position in the file); its length; and
     * the index of its first column, or -1: the columns are not there, as all edges are taken, or FS_SPARSE - the index: those of
     * its first `n_trials` trials are there, in their order */
    const int64_t *lists, *place, *degree, *first;
    int64_t n_trials; /* 0: no list is sparse */
    int64_t fanout;   /* -1: all */
    uint64_t key;
    int replace;
    int64_t *src, *dst; /* where each drawn neighbour lies, as place does; the position of its list */
    int64_t *scratch;   /* a word a draw of a list */
    int64_t n_edges, n_missing; /* drawn so far, and those of them in the file */
} fs_weighted;

/* Draws from lists i … end - 1. */
typedef void (*fs_draw_weighted_fn)(fs_weighted *hop, int64_t i, int64_t end);

/* The widest form up to `level` (0 plain, 1 AVX2, 2 AVX-512) that this processor has; all draw the same. */
fs_draw_weighted_fn fs_choose_draw_weighted(int level);

/* Trials of a sparse list: nearly always enough, without replacement; at least as many as are made of each list at once. */
FS_INLINE int64_t fs_sparse_trials(int64_t fanout, int replace)
{
    return fanout < 1 || fanout > FS_LANE_DRAWS ? 0 : replace ? fanout : fanout + fanout / 2 + 1;
}

/* The columns, by number, that the first n trials of a list look at. */
void fs_try_columns(uint64_t key, int64_t list, int64_t degree, int64_t n, int64_t *numbers);

/* Whether the trials of list i, if it is sparse, do not suffice. */
int fs_lacks(const fs_weighted *hop, int64_t i);

/* First weight that is negative, infinite or no number, or -1; *zeros receives how many are zero. */
int64_t fs_first_bad_weight(const double *weights, int64_t n, int64_t *zeros);

/* Put the weights of edges first … first + n - 1, by number, where they belong: out[i] is that of edge ids[i]. */
void fs_place_weights(const double *weights, int64_t first, int64_t n, const void *ids, int wide, int64_t n_ids, double *out);

/* Make the table of a list of at most FS_LONGEST edges in the place of its weights; -1 if one is negative, infinite or no number. */
int fs_make_columns(double *weights, int64_t n);

/* First of n columns that names no edge of a list, or -1. */
int64_t fs_first_bad_column(const fs_column *columns, int64_t n, int64_t degree);

#endif
