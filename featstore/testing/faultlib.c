/* A preloaded library that fails the k-th call on files below one directory.
 *
 * Loaded with LD_PRELOAD it stands before the C library's file calls and, until armed, passes them on. One rule is armed at a
 * time (featstore.testing.faults does it through ctypes): operations, directory, the call to fail, how. Counts are exact across
 * threads. Calls through which only anonymous memory is asked for (malloc and its kin, mmap) count from MIN_ALLOC bytes up: those
 * are the buffers and tables of a library, not the interpreter's small objects. Those that the compiled core itself asks for are
 * another operation, of any size.
 *
 * It can also record what changes files below the directory, in order, and each flush: what a power cut may undo
 * (featstore.testing.faults.recorded).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MIN_ALLOC 32768

enum { OPEN, READ, WRITE, FSYNC, RENAME, TRUNCATE, MMAP, UNLINK, ALLOC, CLOSE, FLOCK, MKDIR, READ_DIRECT, CORE_ALLOC, N_OPS };
enum { PASS = 0, SHORT = -1, KILL = -2, END = -3, INTERRUPT = -4 }; /* what fire() says; above 0: the errno to fail with */

static char directory[PATH_MAX];
static size_t directory_len;
static atomic_uint armed_ops; /* bit per operation */
/* Shared with forks, so that a parent sees what its killed child met. */
static struct { atomic_long calls, fired, fired_ns; } *count; /* fired_ns: when, by the monotonic clock */
static long fail_at, fail_times;
static int action;
static int fired_signal; /* raised in the thread whose call fails; 0: none */
static char fired_path[PATH_MAX]; /* of the last call that failed; "" of one for memory */

__attribute__((constructor)) static void start(void) {
    count = (void *)syscall(SYS_mmap, NULL, 4096L, (long)(PROT_READ | PROT_WRITE), (long)(MAP_SHARED | MAP_ANONYMOUS), -1L, 0L);
}

/* Code of the compiled core: a malloc that returns there was asked for by it. */
#define MAX_CORE 256
static struct { uintptr_t begin, end; } core[MAX_CORE];
static int n_core;

static int add_core(struct dl_phdr_info *object, size_t size, void *unused) {
    (void)size, (void)unused;
    if (strstr(object->dlpi_name, "/featstore/_core/") == NULL) return 0;
    for (int i = 0; i < object->dlpi_phnum && n_core < MAX_CORE; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
        core[n_core].begin = object->dlpi_addr + part->p_vaddr;
        core[n_core].end = core[n_core].begin + part->p_memsz;
        n_core++;
    }
    return 0;
}

static int is_core(const void *code) {
    for (int i = 0; i < n_core; i++)
        if ((uintptr_t)code >= core[i].begin && (uintptr_t)code < core[i].end) return 1;
    return 0;
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
    if (ops >> CORE_ALLOC & 1) {
        n_core = 0;
        dl_iterate_phdr(add_core, NULL);
    }
    atomic_store(&armed_ops, ops);
    return 0;
}

/* The handler may write, which comes here and has paths on its stack: more than the 16 KiB of the interpreter's, below which its own
 * memory lies. It runs on this one, if the thread that asks is the one that fails; 0: on the one that it had. */
EXPORT void featstore_fault_signal(int number) {
    static char handlers[1 << 18];
    static stack_t before;
    stack_t larger = {.ss_sp = handlers, .ss_size = sizeof handlers};
    if (!fired_signal && number) sigaltstack(&larger, &before);
    if (fired_signal && !number) sigaltstack(&before, NULL);
    fired_signal = number;
}
EXPORT const char *featstore_fault_fired_path(void) { return fired_path; }
EXPORT void featstore_fault_disarm(void) { atomic_store(&armed_ops, 0); }
EXPORT long featstore_fault_calls(void) { return atomic_load(&count->calls); }
EXPORT long featstore_fault_fired(void) { return atomic_load(&count->fired); }
EXPORT long featstore_fault_fired_ns(void) { return atomic_load(&count->fired_ns); }

static int below(const char *path) {
    return strncmp(path, directory, directory_len) == 0 && (path[directory_len] == '/' || path[directory_len] == 0);
}

static int is_armed(int op) { return (atomic_load_explicit(&armed_ops, memory_order_acquire) >> op) & 1; }

/* Count one call of an armed operation on a file of ours and say what becomes of it. */
static int fire(const char *path) {
    long call = atomic_fetch_add(&count->calls, 1) + 1;
    if (call < fail_at || call - fail_at >= fail_times) return PASS;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    atomic_store(&count->fired_ns, now.tv_sec * 1000000000L + now.tv_nsec);
    atomic_fetch_add(&count->fired, 1);
    snprintf(fired_path, sizeof fired_path, "%s", path);
    if (fired_signal) syscall(SYS_tgkill, syscall(SYS_getpid), syscall(SYS_gettid), fired_signal);
    if (action == KILL) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    if (action == INTERRUPT) {
        syscall(SYS_kill, syscall(SYS_getpid), SIGINT);
        return PASS;
    }
    return action;
}

static int fire_fd(int op, int fd) {
    char link[64], path[PATH_MAX];
    if (!is_armed(op)) return PASS;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (n <= 0) return PASS;
    path[n] = 0;
    return below(path) ? fire(path) : PASS;
}

/* Relative names are resolved against the working directory only: the library itself opens by absolute path or by fd. */
static int fire_path(int op, int at, const char *name) {
    char path[2 * PATH_MAX], link[64];
    if (!is_armed(op) || name == NULL) return PASS;
    if (name[0] == '/') return below(name) ? fire(name) : PASS;
    snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, (size_t)PATH_MAX);
    if (n <= 0) return PASS;
    path[n++] = '/';
    snprintf(path + n, PATH_MAX, "%s", name);
    return below(path) ? fire(path) : PASS;
}

static int fire_alloc(size_t size, const void *caller) {
    if (size >= MIN_ALLOC && is_armed(ALLOC)) return fire("");
    return is_armed(CORE_ALLOC) && is_core(caller) ? fire("") : PASS;
}

#define FAIL_IF(what, result)              \
    do {                                   \
        int error_ = (what);               \
        if (error_ > 0) {                  \
            errno = error_;                \
            return result;                 \
        }                                  \
    } while (0)

/* Everything passes on by the bare system call: no other preloaded library stands behind this one. */

/* -- the record -- */

/* In the order of _RECORDS in faults.py. A record is this head, a path, another path, and bytes. */
enum { WROTE, RESIZED, FLUSHED, CREATED, MADE, RENAMED, EXCHANGED, UNLINKED, SYMLINKED, LINKED, MAPPED };
struct head {
    uint32_t kind, n_path, n_other, unused;
    uint64_t inode;
    int64_t offset, size;
};

static atomic_int record_fd = -1;
static pthread_mutex_t record_lock = PTHREAD_MUTEX_INITIALIZER; /* a change and its record are one step */

EXPORT int featstore_fault_record(const char *path, int fd) {
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof directory) return -1;
    atomic_store(&armed_ops, 0);
    memcpy(directory, path, n + 1);
    directory_len = n;
    atomic_store(&record_fd, fd);
    return 0;
}

static int is_recorded(void) { return atomic_load_explicit(&record_fd, memory_order_acquire) >= 0; }

/* Enter a step that is recorded, if one is; leave() by what this returns. */
static int enter(void) {
    if (!is_recorded()) return 0;
    pthread_mutex_lock(&record_lock);
    return 1;
}
static void leave(int entered) {
    int error = errno;
    if (entered) pthread_mutex_unlock(&record_lock);
    errno = error;
}

/* Make the name of a file absolute; its length, or 0 if it is none of ours. */
static size_t absolute(char *path, int at, const char *name) {
    char link[64];
    ssize_t n = 0;
    if (name[0] != '/') {
        snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
        n = syscall(SYS_readlinkat, AT_FDCWD, link, path, (size_t)PATH_MAX);
        if (n <= 0) return 0;
        path[n++] = '/';
    }
    snprintf(path + n, PATH_MAX, "%s", name);
    return below(path) ? strlen(path) : 0;
}

static size_t path_of(char *path, int fd) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, (size_t)PATH_MAX - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return below(path) ? (size_t)n : 0;
}

static uint64_t inode_of(int fd, const char *path, int64_t *size) {
    struct stat found;
    if ((path ? lstat(path, &found) : fstat(fd, &found)) < 0) return 0;
    if (size) *size = S_ISREG(found.st_mode) ? found.st_size : -1;
    return found.st_ino;
}

static void put(const void *data, size_t n) {
    while (n > 0) {
        ssize_t done = syscall(SYS_write, atomic_load(&record_fd), data, n);
        if (done <= 0) return; /* what is read is then cut off, which is noticed */
        data = (const char *)data + done;
        n -= (size_t)done;
    }
}

static void record(int kind, uint64_t inode, const char *path, const char *other, int64_t offset, int64_t size, const struct iovec *data) {
    struct head head = {(uint32_t)kind, path ? (uint32_t)strlen(path) : 0, other ? (uint32_t)strlen(other) : 0, 0, inode, offset, size};
    put(&head, sizeof head);
    put(path, head.n_path);
    put(other, head.n_other);
    for (int64_t left = data ? size : 0; left > 0; data++) {
        size_t n = (int64_t)data->iov_len < left ? data->iov_len : (size_t)left;
        put(data->iov_base, n);
        left -= (int64_t)n;
    }
}

static void record_write(int fd, const struct iovec *data, int64_t n, int64_t offset) {
    char path[2 * PATH_MAX];
    if (n <= 0 || !path_of(path, fd)) return;
    if (offset < 0) offset = syscall(SYS_lseek, fd, 0L, (long)SEEK_CUR) - n;
    record(WROTE, inode_of(fd, NULL, NULL), path, NULL, offset, n, data);
}

static void record_fd_of(int kind, int fd) {
    char path[2 * PATH_MAX];
    int64_t size = 0;
    if (!path_of(path, fd)) return;
    uint64_t inode = inode_of(fd, NULL, &size);
    record(kind, inode, path, NULL, 0, size, NULL);
}

/* -- names -- */

static int do_open(int at, const char *path, int flags, unsigned mode) {
    FAIL_IF(fire_path(OPEN, at, path), -1);
    char whole[2 * PATH_MAX];
    int entered = flags & (O_CREAT | O_TRUNC) ? enter() : 0;
    int ours = entered && absolute(whole, at, path);
    int is_new = ours && inode_of(0, whole, NULL) == 0;
    int fd = (int)syscall(SYS_openat, at, path, flags, mode);
    if (ours && fd >= 0 && is_new) record(CREATED, inode_of(fd, NULL, NULL), whole, NULL, 0, 0, NULL);
    if (ours && fd >= 0 && !is_new && flags & O_TRUNC) record_fd_of(RESIZED, fd);
    leave(entered);
    return fd;
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
    char source[2 * PATH_MAX], target[2 * PATH_MAX];
    int entered = enter();
    int result = (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags);
    if (entered && result == 0 && absolute(source, from_at, from) && absolute(target, to_at, to))
        record(flags & RENAME_EXCHANGE ? EXCHANGED : RENAMED, 0, source, target, 0, 0, NULL);
    leave(entered);
    return result;
}

EXPORT int rename(const char *from, const char *to) { return do_rename(AT_FDCWD, from, AT_FDCWD, to, 0); }
EXPORT int renameat(int from_at, const char *from, int to_at, const char *to) { return do_rename(from_at, from, to_at, to, 0); }
EXPORT int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
    return do_rename(from_at, from, to_at, to, flags);
}

EXPORT int unlinkat(int at, const char *path, int flags) {
    FAIL_IF(fire_path(UNLINK, at, path), -1);
    char whole[2 * PATH_MAX];
    int entered = enter();
    int ours = entered && absolute(whole, at, path);
    int result = (int)syscall(SYS_unlinkat, at, path, flags);
    if (ours && result == 0) record(UNLINKED, 0, whole, NULL, 0, 0, NULL);
    leave(entered);
    return result;
}
EXPORT int mkdirat(int at, const char *path, mode_t mode) {
    FAIL_IF(fire_path(MKDIR, at, path), -1);
    char whole[2 * PATH_MAX];
    int entered = enter();
    int result = (int)syscall(SYS_mkdirat, at, path, mode);
    if (entered && result == 0 && absolute(whole, at, path)) record(MADE, inode_of(0, whole, NULL), whole, NULL, 0, 0, NULL);
    leave(entered);
    return result;
}
EXPORT int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

EXPORT int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
EXPORT int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

static int record_name(int kind, int result, const char *text, int at, const char *path) {
    char whole[2 * PATH_MAX];
    if (is_recorded() && result == 0 && absolute(whole, at, path)) record(kind, inode_of(0, whole, NULL), whole, text, 0, 0, NULL);
    return result;
}
EXPORT int symlinkat(const char *target, int at, const char *path) {
    int entered = enter();
    int result = (int)syscall(SYS_symlinkat, target, at, path);
    record_name(SYMLINKED, result, target, at, path);
    leave(entered);
    return result;
}
EXPORT int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }
EXPORT int linkat(int from_at, const char *from, int at, const char *path, int flags) {
    int entered = enter();
    int result = (int)syscall(SYS_linkat, from_at, from, at, path, flags);
    record_name(LINKED, result, from, at, path);
    leave(entered);
    return result;
}
EXPORT int link(const char *from, const char *path) { return linkat(AT_FDCWD, from, AT_FDCWD, path, 0); }

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
    int entered = op == WRITE ? enter() : 0;
    ssize_t done = syscall(number, fd, data, cut(what, n), offset);
    if (entered) record_write(fd, &(struct iovec){(void *)data, n}, done, number == SYS_write ? -1 : offset);
    leave(entered);
    return done;
}

/* A short vector is its first element; half of that where there is no other. */
static ssize_t transfer_vector(int op, long number, int fd, const struct iovec *vector, int n, off64_t offset, int flags) {
    int what = fire_transfer(op, fd);
    FAIL_IF(what, -1);
    if (what == SHORT && n == 1) {
        const struct iovec half = {vector->iov_base, cut(what, vector->iov_len)};
        return syscall(number, fd, &half, 1, offset, 0L, (long)flags);
    }
    int entered = op == WRITE ? enter() : 0;
    ssize_t done = syscall(number, fd, vector, what == END ? 0 : what == SHORT && n > 1 ? 1 : n, offset, 0L, (long)flags);
    if (entered) record_write(fd, vector, done, number == SYS_writev ? -1 : offset);
    leave(entered);
    return done;
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

/* A write that ran beside a flush may not be flushed: the record comes when no write is under way, as of the flush's begin. */
static int do_sync(int fd, long number) {
    FAIL_IF(fire_fd(FSYNC, fd), -1);
    int entered = enter();
    int result = (int)syscall(number, fd);
    if (entered && result == 0) record_fd_of(FLUSHED, fd);
    leave(entered);
    return result;
}

EXPORT int fsync(int fd) {
    return do_sync(fd, SYS_fsync);
}
EXPORT int fdatasync(int fd) {
    return do_sync(fd, SYS_fdatasync);
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

static int resized(int fd, int result, int entered) {
    if (entered && result == 0) record_fd_of(RESIZED, fd);
    leave(entered);
    return result;
}

EXPORT int ftruncate(int fd, off64_t size) {
    FAIL_IF(fire_fd(TRUNCATE, fd), -1);
    int entered = enter();
    return resized(fd, (int)syscall(SYS_ftruncate, fd, size), entered);
}
EXPORT int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
EXPORT int posix_fallocate(int fd, off64_t offset, off64_t size) {
    int what = fire_fd(TRUNCATE, fd); /* returns its error instead of setting errno */
    if (what > 0) return what;
    int entered = enter();
    return resized(fd, (int)syscall(SYS_fallocate, fd, 0, offset, size), entered) < 0 ? errno : 0;
}
EXPORT int posix_fallocate64(int fd, off64_t offset, off64_t size) { return posix_fallocate(fd, offset, size); }
EXPORT int fallocate(int fd, int mode, off64_t offset, off64_t size) {
    FAIL_IF(fire_fd(TRUNCATE, fd), -1);
    int entered = enter();
    return resized(fd, (int)syscall(SYS_fallocate, fd, mode, offset, size), entered);
}
EXPORT int fallocate64(int fd, int mode, off64_t offset, off64_t size) { return fallocate(fd, mode, offset, size); }

/* -- memory -- */

#define CALLER __builtin_return_address(0)

EXPORT void *mmap(void *address, size_t size, int protection, int flags, int fd, off64_t offset) {
    FAIL_IF(flags & MAP_ANONYMOUS ? fire_alloc(size, CALLER) : fire_fd(MMAP, fd), MAP_FAILED);
    if (!(flags & MAP_ANONYMOUS) && flags & MAP_SHARED && protection & PROT_WRITE && is_recorded()) {
        int entered = enter();
        record_fd_of(MAPPED, fd); /* what is written through it is not seen */
        leave(entered);
    }
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
    FAIL_IF(fire_alloc(size, CALLER), NULL);
    return __libc_malloc(size);
}
EXPORT void *calloc(size_t n, size_t size) {
    FAIL_IF(fire_alloc(n * size, CALLER), NULL);
    return __libc_calloc(n, size);
}
EXPORT void *realloc(void *old, size_t size) {
    FAIL_IF(fire_alloc(size, CALLER), NULL);
    return __libc_realloc(old, size);
}
EXPORT void *memalign(size_t alignment, size_t size) {
    FAIL_IF(fire_alloc(size, CALLER), NULL);
    return __libc_memalign(alignment, size);
}
EXPORT void *aligned_alloc(size_t alignment, size_t size) {
    FAIL_IF(fire_alloc(size, CALLER), NULL);
    return __libc_memalign(alignment, size);
}
EXPORT int posix_memalign(void **result, size_t alignment, size_t size) {
    int what = fire_alloc(size, CALLER);
    if (what > 0) return what;
    void *memory = __libc_memalign(alignment, size);
    if (memory == NULL) return ENOMEM;
    *result = memory;
    return 0;
}
