/* Batched packing: rows of a streamed file are appended to the extents of the batches that want them, through a buffer a batch;
 * full buffers are checksummed and written by threads of their own, so that the file is written in large pieces, in any order.
 */
#ifndef FEATSTORE_PACKER_H
#define FEATSTORE_PACKER_H

#include "pagestream.h"

typedef struct {
    uint8_t *data;
    uint64_t offset, len; /* place in the file, bytes in whole pages */
} fs_write;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t queued, freed;
    int fd;
    fs_secret secret;
    fs_xxh3_fn hash;
    uint64_t *sums; /* pages of 511 sums and a word that is not ours */
    uint64_t n_sums_pages;
    uint64_t buffer_bytes;
    uint8_t *arena;
    uint8_t **idle; /* buffers nobody uses */
    unsigned n_buffers, n_idle;
    fs_write *queue; /* circular, as long as there are buffers */
    unsigned q_head, q_len, writing;
    int closed, error_number;
    uint64_t written_bytes;
    /* where the rows are in the streamed file */
    fs_job source;
    /* a batch: its rows, ascending; how many are whole in the extent; its place in the file; its buffer */
    uint64_t n_batches;
    const int32_t *rows32;
    const int64_t *rows64;
    uint64_t *cursor, *end, *offset, *filled;
    uint8_t **buffer;
    fs_stream_fn stream; /* NULL: copies go through the cache */
    /* rows that are wanted in memory, ascending; how many are there */
    const int64_t *kept_rows;
    uint64_t n_kept, kept;
    uint8_t *kept_at;
} fs_packer;

/* Write queued buffers until closed; several threads. */
void fs_packer_write(fs_packer *p);

/* Hand batch b's buffer to the writers, its last page filled up with zeros. */
void fs_packer_hand_over(fs_packer *p, uint64_t b);

/* Append bytes to batch b's extent; 0 where writing failed. */
int fs_packer_append(fs_packer *p, uint64_t b, const uint8_t *src, uint64_t len);

/* Take up to `most` pieces of the stream; how many were taken, -1 where writing failed, -2 where a batch's rows do not ascend or lie
 * in no piece (the stream's errors are its own). */
int64_t fs_packer_run(fs_packer *p, fs_stream *s, int64_t most);

/* Hand the whole pages of all buffers to the writers; the bytes behind them go on in buffers of their own. 0 where writing failed. */
int fs_packer_flush(fs_packer *p);

/* Wait a twentieth of a second, or until everything that was handed over is written; whether it is. */
int fs_packer_drain(fs_packer *p);

#endif
