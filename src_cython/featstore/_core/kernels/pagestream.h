/* A file's pages in a given order as one continuous stream: reads run ahead into a ring of buffers, pages are verified as they
 * land, a consumer takes the pieces in order. Reads go on across whatever the consumer calls a batch; nothing is drained between.
 */
#ifndef FEATSTORE_PAGESTREAM_H
#define FEATSTORE_PAGESTREAM_H

#include <pthread.h>
#include "rowcopy.h"
#include "rowio.h"
#include "uring.h"

typedef struct {
    uint64_t page, done, len;
    unsigned retries;
    int landed;
    uint32_t file;
} fs_piece;

/* One of several files that a stream's pieces lie in. */
typedef struct {
    int fd;
    uint64_t **sums;
    fs_secret secret;
} fs_stream_file;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t landed, freed; /* for the consumer; for readers */
    fs_job job;                   /* descriptor, sums, errors, fault injection */
    uint8_t *arena;
    uint64_t buffer_bytes;
    unsigned n_buffers;
    const uint64_t *pages;  /* first page of every piece */
    const uint32_t *counts; /* its pages, never more than a buffer holds */
    const uint64_t *at;     /* of pieces in several files: the first page of every piece in its file, and the file's number; else NULL */
    const uint32_t *files;
    fs_stream_file *parts;
    uint32_t error_file; /* of the page or the read that failed */
    uint64_t n_pieces, allowed, begun, consumed;
    uint64_t taken; /* bytes taken of the piece that is being consumed */
    fs_piece *slots;
    int closed;
    uint64_t waited_ns; /* the consumer waited for a piece */
} fs_stream;

/* Read until the end, an error or close; one thread. Never returns while a read is in flight. */
void fs_stream_uring(fs_stream *s, fs_ring *ring);

/* The same by pread; several threads. */
void fs_stream_pread(fs_stream *s);

/* The consumer: wait for the piece that comes next; its bytes not yet taken, NULL where it will not come. */
const uint8_t *fs_stream_next(fs_stream *s, uint64_t *n_bytes);

/* The consumer has taken `n_bytes` more of the piece. */
void fs_stream_took(fs_stream *s, uint64_t n_bytes);

/* Copy the next n rows to rows p32[i], p64[i] or i of out; what is left of the last page is skipped. 0 where the stream ends. */
int fs_stream_scatter(fs_stream *s, uint64_t row_bytes, uint64_t n, const int32_t *p32, const int64_t *p64, uint8_t *out);

#endif
