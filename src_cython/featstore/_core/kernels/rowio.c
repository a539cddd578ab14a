#include "rowio.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#define FS_INDEX_MASK ((1ULL << FS_INDEX_BITS) - 1)
#define FS_MAX_RETRIES 1000

static inline uint64_t fs_row(const fs_job *job, uint64_t k) { return job->keys ? job->keys[k] >> FS_INDEX_BITS : job->first + k; }

int fs_next_op(fs_job *job, fs_op *op) {
    uint64_t i = job->next;
    if (i >= job->n) return 0;
    uint64_t start = fs_row_start(job, fs_row(job, i));
    uint64_t p0 = start / FS_PAGE, end = (start + job->row_bytes - 1) / FS_PAGE + 1;
    if (p0 < job->resume) p0 = job->resume;
    uint64_t limit = p0 + job->cap_pages;
    uint64_t p1 = end < limit ? end : limit;
    uint64_t j = i + (end <= p1), k = i + 1; /* j: first row not finished by this read; k: first row that it does not touch */
    while (k < job->n) {
        start = fs_row_start(job, fs_row(job, k));
        uint64_t a = start / FS_PAGE;
        end = (start + job->row_bytes - 1) / FS_PAGE + 1;
        if (a >= p1) {
            if (a - p1 > job->gap_pages || end > limit || j < k) break;
            p1 = end; /* cheaper to read the gap than to start another read */
            j = k + 1;
        } else if (end > p1) {
            if (end <= limit) {
                p1 = end;
                j = k + 1;
            } else {
                p1 = limit;
            }
        } else if (j == k) {
            j = k + 1;
        }
        k++;
    }
    op->page0 = p0;
    op->page1 = p1;
    op->row0 = i;
    op->row1 = k;
    job->next = j;
    job->resume = p1;
    return 1;
}

static inline void fs_copy_small(uint8_t *dst, const uint8_t *src, uint64_t len) {
    switch (len) {
    case 1: *dst = *src; break;
    case 2: memcpy(dst, src, 2); break;
    case 4: memcpy(dst, src, 4); break;
    case 8: memcpy(dst, src, 8); break;
    default: memcpy(dst, src, len);
    }
}

int fs_finish_op(fs_job *job, const fs_op *op, const uint8_t *buf, uint64_t *bad_page) {
    const uint64_t lo = op->page0 * FS_PAGE, hi = op->page1 * FS_PAGE;
    const int dense_run = !job->keys && !job->positions && job->group_rows * job->row_bytes == job->group_bytes;
    uint64_t checked = op->page0;
    if (dense_run && job->sums)
        for (; checked < op->page1; checked++)
            if (!fs_check_page(job, checked, buf + (checked - op->page0) * FS_PAGE)) {
                *bad_page = checked;
                return FS_ERR_SUM;
            }
    if (dense_run) { /* one run of bytes */
        uint64_t base = fs_row_start(job, job->first), a = base > lo ? base : lo;
        uint64_t end = base + job->n * job->row_bytes, b = end < hi ? end : hi;
        memcpy(job->out + (a - base), buf + (a - lo), b - a);
        return FS_OK;
    }
    for (uint64_t k = op->row0; k < op->row1; k++) {
        uint64_t start = fs_row_start(job, fs_row(job, k)), end = start + job->row_bytes;
        uint64_t a = start > lo ? start : lo, b = end < hi ? end : hi;
        if (job->sums) {
            uint64_t p = a / FS_PAGE, last = (b - 1) / FS_PAGE;
            for (p = p > checked ? p : checked; p <= last; p++)
                if (!fs_check_page(job, p, buf + (p - op->page0) * FS_PAGE)) {
                    *bad_page = p;
                    return FS_ERR_SUM;
                }
            checked = last + 1 > checked ? last + 1 : checked;
        }
        uint64_t index = job->keys ? job->keys[k] & FS_INDEX_MASK : k;
        uint64_t position = job->positions ? (uint64_t)job->positions[index] : index;
        fs_copy_small(job->out + position * job->row_bytes + (a - start), buf + (a - lo), b - a);
    }
    return FS_OK;
}

void fs_job_fail(fs_job *job, int kind, int number, uint64_t offset) {
    if (job->error_kind == FS_OK) {
        job->error_kind = kind;
        job->error_number = number;
        job->error_offset = offset;
    }
    atomic_store(&job->stop, 1);
}

int64_t fs_inject(fs_job *job, int64_t res) {
    if (!job->script) return res;
    char c = job->script[job->script_at];
    if (c == 0) return res;
    job->script_at++;
    switch (c) {
    case 'E': return -EIO;
    case 's': return res > 0 ? res / 2 : res;
    case 'z': return 0;
    case 'i': return -EINTR;
    case 'a': return -EAGAIN;
    default: return res;
    }
}

int64_t fs_progress(fs_job *job, int64_t res, uint64_t wanted, uint64_t offset, unsigned *retries) {
    if (res == -EINTR || res == -EAGAIN) {
        if (++*retries < FS_MAX_RETRIES) return 0;
        fs_job_fail(job, FS_ERR_OS, (int)-res, offset);
        return -1;
    }
    if (res < 0) {
        fs_job_fail(job, FS_ERR_OS, (int)-res, offset);
        return -1;
    }
    if ((uint64_t)res >= wanted) return (int64_t)wanted;
    if (job->direct) res &= ~(int64_t)(FS_PAGE - 1); /* direct reads go on at an aligned offset */
    if (res == 0 && ++*retries >= 4) { /* nothing more comes: the file ends here */
        fs_job_fail(job, FS_ERR_SHORT, 0, offset);
        return -1;
    }
    return res;
}

uint64_t fs_sums_pages(const fs_job *job, const uint64_t *keys, uint64_t at, uint64_t n, uint64_t capacity,
                       unsigned long long *pages, uint64_t *n_pages) {
    uint64_t count = 0, beyond = 0; /* rows are sorted, so the pages before `beyond` are wanted already */
    for (; at < n && count < capacity; at++) {
        const uint64_t start = fs_row_start(job, keys[at] >> FS_INDEX_BITS);
        const uint64_t first = start / FS_PAGE / FS_SUMS_PER_PAGE;
        const uint64_t last = (start + job->row_bytes - 1) / FS_PAGE / FS_SUMS_PER_PAGE;
        for (uint64_t page = first > beyond ? first : beyond; page <= last; page++) pages[count++] = page;
        beyond = last + 1;
    }
    *n_pages = count;
    return at;
}
