/* A gather job: which pages hold the wanted rows, in which reads to fetch them, and what to do with a read that has landed.
 *
 * Both backends run the same job: fs_next_op() hands out reads in file order, fs_finish_op() checks and copies one that landed.
 * Reads never overlap, so no page is read twice; a row may lie across two reads, each of which delivers its share.
 */
#ifndef FEATSTORE_ROWIO_H
#define FEATSTORE_ROWIO_H

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include "xxh3.h"

#define FS_PAGE 4096ULL
#define FS_SUMS_PER_PAGE 511
#define FS_INDEX_BITS 24
enum { FS_OK = 0, FS_ERR_OS = 1, FS_ERR_SHORT = 2, FS_ERR_SUM = 3, FS_ERR_SIGNAL = 4 };
typedef struct { uint64_t page0, page1, row0, row1; } fs_op;

typedef struct {
    int fd, direct;
    uint64_t data_offset, row_bytes, group_rows, group_bytes;
    uint64_t first, n;        /* rows first … first + n - 1, or */
    const uint64_t *keys;     /* n sorted keys: row << 24 | index */
    const int64_t *positions; /* output row of each index; NULL: the index itself */
    uint8_t *out;
    uint64_t gap_pages, cap_pages;
    uint64_t **sums; /* one pointer a page of sums; NULL: no verification */
    const fs_secret *secret;
    fs_xxh3_fn hash;
    const char *script; /* fault injection: one letter a completion, see fs_inject */
    uint64_t script_at;
    uint64_t next, resume; /* generator: first row not wholly handed out; first page not yet handed out */
    _Atomic int stop;
    int error_kind, error_number;
    uint64_t error_offset;
    _Atomic uint64_t n_reads, read_bytes;
} fs_job;

static inline uint64_t fs_row_start(const fs_job *job, uint64_t row) {
    if (job->group_rows == 1) return job->data_offset + row * job->group_bytes;
    return job->data_offset + row / job->group_rows * job->group_bytes + row % job->group_rows * job->row_bytes;
}

/* Next read; 0 when all are handed out. Not thread-safe. */
int fs_next_op(fs_job *job, fs_op *op);

static inline int fs_check_page(const fs_job *job, uint64_t page, const uint8_t *data) {
    const uint64_t *sums = job->sums[page / FS_SUMS_PER_PAGE];
    if (!sums) return 0; /* whoever reads has not handed them in */
    uint64_t expected = fs_read64((const uint8_t *)(sums + page % FS_SUMS_PER_PAGE));
    return job->hash(data, FS_PAGE, job->secret) == expected;
}

/* Check the pages of a landed read that hold wanted rows and copy the rows out. Thread-safe for different reads. */
int fs_finish_op(fs_job *job, const fs_op *op, const uint8_t *buf, uint64_t *bad_page);

void fs_job_fail(fs_job *job, int kind, int number, uint64_t offset);

/* Fault injection at the place where completions arrive: 'r' as is, 'E' EIO, 's' short, 'z' end of file, 'i' EINTR, 'a' EAGAIN. */
int64_t fs_inject(fs_job *job, int64_t res);

/* What a read that returned `res` for `wanted` bytes means: bytes now usable, or -1 with the job failed; 0 = try again. */
int64_t fs_progress(fs_job *job, int64_t res, uint64_t wanted, uint64_t offset, unsigned *retries);

/* The pages of sums that rows `at` … of n sorted keys want, ascending, until there are `capacity`: a last row's may be more. Returns where
 * the rows end whose pages these are. */
uint64_t fs_sums_pages(const fs_job *job, const uint64_t *keys, uint64_t at, uint64_t n, uint64_t capacity,
                       unsigned long long *pages, uint64_t *n_pages);

#endif
