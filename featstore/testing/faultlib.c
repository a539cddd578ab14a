/* A preloaded library that fails the k-th call on files below one directory.
 *
 * Loaded with LD_PRELOAD it stands before the C library's file calls and, until armed, passes them on. One rule is armed at a
 * time (featstore.testing.faults does it through ctypes): operations, directory, the call to fail, how. Counts are exact across
 * threads. Calls through which only anonymous memory is asked for (malloc and its kin, mmap) count from MIN_ALLOC bytes up: those
 * are the buffers and tables of a library, not the interpreter's small objects.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MIN_ALLOC 32768

enum { OPEN, READ, WRITE, FSYNC, RENAME, TRUNCATE, MMAP, UNLINK, ALLOC, CLOSE, FLOCK, MKDIR, READ_DIRECT, N_OPS };
enum { PASS = 0, SHORT = -1, KILL = -2, END = -3 }; /* what fire() says; above 0: the errno to fail with */

static char directory[PATH_MAX];
static size_t directory_len;
static atomic_uint armed_ops; /* bit per operation */
/* Shared with forks, so that a parent sees what its killed child met. */
static struct { atomic_long calls, fired; } *count;
static long fail_at, fail_times;
static int action;

__attribute__((constructor)) static void start(void) {
    count = (void *)syscall(SYS_mmap, NULL, 4096L, (long)(PROT_READ | PROT_WRITE), (long)(MAP_SHARED | MAP_ANONYMOUS), -1L, 0L);
}

EXPORT int featstore_fault_arm(const char *path, unsigned ops, long k, long times, int what) {
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof directory || k < 1 || times < 1) return -1;
    atomic_store(&armed_ops, 0);
    memcpy(directory, path, n + 1);
    directory_len = n;
    fail_at = k;
    fail_times = times;
    action = what;
    atomic_store(&count->calls, 0);
    atomic_store(&count->fired, 0);
    atomic_store(&armed_ops, ops);
    return 0;
}

EXPORT void featstore_fault_disarm(void) { atomic_store(&armed_ops, 0); }
EXPORT long featstore_fault_calls(void) { return atomic_load(&count->calls); }
EXPORT long featstore_fault_fired(void) { return atomic_load(&count->fired); }

static int below(const char *path) {
    return strncmp(path, directory, directory_len) == 0 && (path[directory_len] == '/' || path[directory_len] == 0);
}

static int is_armed(int op) { return (atomic_load_explicit(&armed_ops, memory_order_acquire) >> op) & 1; }

/* Count one call of an armed operation on a file of ours and say what becomes of it. */
static int fire(void) {
    long call = atomic_fetch_add(&count->calls, 1) + 1;
    if (call < fail_at || call - fail_at >= fail_times) return PASS;
    atomic_fetch_add(&count->fired, 1);
    if (action == KILL) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    return action;
}

static int fire_fd(int op, int fd) {
    char link[64], path[PATH_MAX];
    if (!is_armed(op)) return PASS;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (n <= 0) return PASS;
    path[n] = 0;
    return below(path) ? fire() : PASS;
}

/* Relative names are resolved against the working directory only: the library itself opens by absolute path or by fd. */
static int fire_path(int op, int at, const char *name) {
    char path[2 * PATH_MAX], link[64];
    if (!is_armed(op) || name == NULL) return PASS;
    if (name[0] == '/') return below(name) ? fire() : PASS;
    snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, (size_t)PATH_MAX);
    if (n <= 0) return PASS;
    path[n++] = '/';
    snprintf(path + n, PATH_MAX, "%s", name);
    return below(path) ? fire() : PASS;
}

static int fire_alloc(size_t size) { return size >= MIN_ALLOC && is_armed(ALLOC) ? fire() : PASS; }

#define FAIL_IF(what, result)              \
    do {                                   \
        int error_ = (what);               \
        if (error_ > 0) {                  \
            errno = error_;                \
            return result;                 \
        }                                  \
    } while (0)

/* Everything passes on by the bare system call: no other preloaded library stands behind this one. */

/* -- names -- */

static int do_open(int at, const char *path, int flags, unsigned mode) {
    FAIL_IF(fire_path(OPEN, at, path), -1);
    return (int)syscall(SYS_openat, at, path, flags, mode);
}

#define OPEN_MODE(flags)                                            \
    unsigned mode = 0;                                              \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {                        \
        va_list list;                                               \
        va_start(list, flags);                                      \
        mode = va_arg(list, unsigned);                              \
        va_end(list);                                               \
    }

EXPORT int open(const char *path, int flags, ...) { OPEN_MODE(flags) return do_open(AT_FDCWD, path, flags, mode); }
EXPORT int open64(const char *path, int flags, ...) { OPEN_MODE(flags) return do_open(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
EXPORT int openat(int at, const char *path, int flags, ...) { OPEN_MODE(flags) return do_open(at, path, flags, mode); }
EXPORT int openat64(int at, const char *path, int flags, ...) { OPEN_MODE(flags) return do_open(at, path, flags | O_LARGEFILE, mode); }

static int do_rename(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    FAIL_IF(fire_path(RENAME, to_at, to), -1);
    return (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags);
}

EXPORT int rename(const char *from, const char *to) { return do_rename(AT_FDCWD, from, AT_FDCWD, to, 0); }
EXPORT int renameat(int from_at, const char *from, int to_at, const char *to) { return do_rename(from_at, from, to_at, to, 0); }
EXPORT int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    return do_rename(from_at, from, to_at, to, flags);
}

EXPORT int unlinkat(int at, const char *path, int flags) {
    FAIL_IF(fire_path(UNLINK, at, path), -1);
    return (int)syscall(SYS_unlinkat, at, path, flags);
}
EXPORT int mkdirat(int at, const char *path, mode_t mode) {
    FAIL_IF(fire_path(MKDIR, at, path), -1);
    return (int)syscall(SYS_mkdirat, at, path, mode);
}
EXPORT int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

EXPORT int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
EXPORT int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

/* -- reading and writing -- */

/* A read of a descriptor with O_DIRECT is one call, also where both operations are armed. */
static int fire_transfer(int op, int fd) {
    if (op == READ && !is_armed(READ) && is_armed(READ_DIRECT) && syscall(SYS_fcntl, fd, F_GETFL) & O_DIRECT) op = READ_DIRECT;
    return fire_fd(op, fd);
}

static size_t cut(int what, size_t n) { return what == END ? 0 : what == SHORT && n > 1 ? n / 2 : n; }

static ssize_t transfer(int op, long number, int fd, uintptr_t data, size_t n, off64_t offset) {
    int what = fire_transfer(op, fd);
    FAIL_IF(what, -1);
    return syscall(number, fd, data, cut(what, n), offset);
}

/* A short vector is its first element; half of that where there is no other. */
static ssize_t transfer_vector(int op, long number, int fd, const struct iovec *vector, int n, off64_t offset, int flags) {
    int what = fire_transfer(op, fd);
    FAIL_IF(what, -1);
    if (what == SHORT && n == 1) {
        const struct iovec half = {vector->iov_base, cut(what, vector->iov_len)};
        return syscall(number, fd, &half, 1, offset, 0L, (long)flags);
    }
    return syscall(number, fd, vector, what == END ? 0 : what == SHORT && n > 1 ? 1 : n, offset, 0L, (long)flags);
}

EXPORT ssize_t read(int fd, void *data, size_t n) { return transfer(READ, SYS_read, fd, (uintptr_t)data, n, 0); }
EXPORT ssize_t write(int fd, const void *data, size_t n) { return transfer(WRITE, SYS_write, fd, (uintptr_t)data, n, 0); }
EXPORT ssize_t pread(int fd, void *data, size_t n, off64_t at) { return transfer(READ, SYS_pread64, fd, (uintptr_t)data, n, at); }
EXPORT ssize_t pread64(int fd, void *data, size_t n, off64_t at) { return transfer(READ, SYS_pread64, fd, (uintptr_t)data, n, at); }
EXPORT ssize_t pwrite(int fd, const void *data, size_t n, off64_t at) { return transfer(WRITE, SYS_pwrite64, fd, (uintptr_t)data, n, at); }
EXPORT ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) { return transfer(WRITE, SYS_pwrite64, fd, (uintptr_t)data, n, at); }

typedef const struct iovec *vec;
EXPORT ssize_t readv(int fd, vec v, int n) { return transfer_vector(READ, SYS_readv, fd, v, n, 0, 0); }
EXPORT ssize_t writev(int fd, vec v, int n) { return transfer_vector(WRITE, SYS_writev, fd, v, n, 0, 0); }
EXPORT ssize_t preadv(int fd, vec v, int n, off64_t at) { return transfer_vector(READ, SYS_preadv, fd, v, n, at, 0); }
EXPORT ssize_t preadv64(int fd, vec v, int n, off64_t at) { return transfer_vector(READ, SYS_preadv, fd, v, n, at, 0); }
EXPORT ssize_t pwritev(int fd, vec v, int n, off64_t at) { return transfer_vector(WRITE, SYS_pwritev, fd, v, n, at, 0); }
EXPORT ssize_t pwritev64(int fd, vec v, int n, off64_t at) { return transfer_vector(WRITE, SYS_pwritev, fd, v, n, at, 0); }

/* Python's os.preadv and os.pwritev come here. */
#define VECTOR2(name, op, number)                                                      \
    EXPORT ssize_t name(int fd, vec v, int n, off64_t at, int flags) {                 \
        return transfer_vector(op, number, fd, v, n, at, flags);                       \
    }
VECTOR2(preadv2, READ, SYS_preadv2)
VECTOR2(preadv64v2, READ, SYS_preadv2)
VECTOR2(pwritev2, WRITE, SYS_pwritev2)
VECTOR2(pwritev64v2, WRITE, SYS_pwritev2)

EXPORT int fsync(int fd) {
    FAIL_IF(fire_fd(FSYNC, fd), -1);
    return (int)syscall(SYS_fsync, fd);
}
EXPORT int fdatasync(int fd) {
    FAIL_IF(fire_fd(FSYNC, fd), -1);
    return (int)syscall(SYS_fdatasync, fd);
}

/* As the kernel does, a close that fails closes all the same. */
EXPORT int close(int fd) {
    int what = fire_fd(CLOSE, fd);
    int result = (int)syscall(SYS_close, fd);
    FAIL_IF(what, -1);
    return result;
}
EXPORT int flock(int fd, int how) {
    FAIL_IF(fire_fd(FLOCK, fd), -1);
    return (int)syscall(SYS_flock, fd, how);
}

EXPORT int ftruncate(int fd, off64_t size) {
    FAIL_IF(fire_fd(TRUNCATE, fd), -1);
    return (int)syscall(SYS_ftruncate, fd, size);
}
EXPORT int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
EXPORT int posix_fallocate(int fd, off64_t offset, off64_t size) {
    int what = fire_fd(TRUNCATE, fd); /* returns its error instead of setting errno */
    if (what > 0) return what;
    return syscall(SYS_fallocate, fd, 0, offset, size) < 0 ? errno : 0;
}
EXPORT int posix_fallocate64(int fd, off64_t offset, off64_t size) { return posix_fallocate(fd, offset, size); }
EXPORT int fallocate(int fd, int mode, off64_t offset, off64_t size) {
    FAIL_IF(fire_fd(TRUNCATE, fd), -1);
    return (int)syscall(SYS_fallocate, fd, mode, offset, size);
}
EXPORT int fallocate64(int fd, int mode, off64_t offset, off64_t size) { return fallocate(fd, mode, offset, size); }

/* -- memory -- */

EXPORT void *mmap(void *address, size_t size, int protection, int flags, int fd, off64_t offset) {
    FAIL_IF(flags & MAP_ANONYMOUS ? fire_alloc(size) : fire_fd(MMAP, fd), MAP_FAILED);
    return (void *)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
}
EXPORT void *mmap64(void *address, size_t size, int protection, int flags, int fd, off64_t offset) {
    return mmap(address, size, protection, flags, fd, offset);
}

/* glibc's own entries. */
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

EXPORT void *malloc(size_t size) {
    FAIL_IF(fire_alloc(size), NULL);
    return __libc_malloc(size);
}
EXPORT void *calloc(size_t n, size_t size) {
    FAIL_IF(fire_alloc(n * size), NULL);
    return __libc_calloc(n, size);
}
EXPORT void *realloc(void *old, size_t size) {
    FAIL_IF(fire_alloc(size), NULL);
    return __libc_realloc(old, size);
}
EXPORT void *memalign(size_t alignment, size_t size) {
    FAIL_IF(fire_alloc(size), NULL);
    return __libc_memalign(alignment, size);
}
EXPORT void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
EXPORT int posix_memalign(void **result, size_t alignment, size_t size) {
    int what = fire_alloc(size);
    if (what > 0) return what;
    void *memory = __libc_memalign(alignment, size);
    if (memory == NULL) return ENOMEM;
    *result = memory;
    return 0;
}
