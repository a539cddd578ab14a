#include "threads.h"
#include "starts.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/prctl.h>

static struct {
    pthread_mutex_t owner; /* held by the caller whose loop runs */
    pthread_mutex_t lock;
    pthread_cond_t work, idle;
    int n_started, tickets, active, registered;
    fs_body_fn body;
    void *context;
    int64_t n, chunk;
    _Atomic int64_t next;
} fs_team = {.owner = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .idle = PTHREAD_COND_INITIALIZER};

static void fs_team_child(void) {
    pthread_mutex_init(&fs_team.owner, NULL);
    pthread_mutex_init(&fs_team.lock, NULL);
    pthread_cond_init(&fs_team.work, NULL);
    pthread_cond_init(&fs_team.idle, NULL);
    fs_team.n_started = fs_team.tickets = fs_team.active = 0;
}

static void fs_team_share(void) {
    for (;;) {
        int64_t begin = atomic_fetch_add_explicit(&fs_team.next, fs_team.chunk, memory_order_relaxed);
        if (begin >= fs_team.n) return;
        int64_t end = begin + fs_team.chunk;
        fs_team.body(fs_team.context, begin, end < fs_team.n ? end : fs_team.n);
    }
}

static void *fs_team_main(void *unused) {
    prctl(PR_SET_NAME, "fs-copy");
    pthread_mutex_lock(&fs_team.lock);
    for (;;) {
        while (!fs_team.tickets) pthread_cond_wait(&fs_team.work, &fs_team.lock);
        fs_team.tickets--;
        fs_team.active++;
        pthread_mutex_unlock(&fs_team.lock);
        fs_team_share();
        pthread_mutex_lock(&fs_team.lock);
        if (--fs_team.active == 0) pthread_cond_signal(&fs_team.idle);
    }
    return unused;
}

static void fs_team_grow(int wanted) {
    int error;
    if (!fs_team.registered) {
        pthread_atfork(NULL, NULL, fs_team_child);
        fs_team.registered = 1;
    }
    if (fs_team.n_started < wanted)
        fs_team.n_started += fs_start_threads(wanted - fs_team.n_started, fs_team_main, NULL, NULL, &error);
}

void fs_parallel_for(fs_body_fn body, void *context, int64_t n, int64_t chunk, int n_threads) {
    int64_t n_chunks = (n + chunk - 1) / chunk;
    if (n_threads > FS_MAX_THREADS) n_threads = FS_MAX_THREADS;
    if (n_threads > n_chunks) n_threads = (int)n_chunks;
    if (n_threads < 2 || pthread_mutex_trylock(&fs_team.owner)) {
        if (n) body(context, 0, n);
        return;
    }
    pthread_mutex_lock(&fs_team.lock);
    fs_team_grow(n_threads - 1);
    fs_team.body = body;
    fs_team.context = context;
    fs_team.n = n;
    fs_team.chunk = chunk;
    atomic_store(&fs_team.next, 0);
    fs_team.tickets = n_threads - 1 < fs_team.n_started ? n_threads - 1 : fs_team.n_started;
    if (fs_team.tickets) pthread_cond_broadcast(&fs_team.work);
    pthread_mutex_unlock(&fs_team.lock);
    fs_team_share();
    pthread_mutex_lock(&fs_team.lock);
    fs_team.tickets = 0; /* who has not come yet need not */
    while (fs_team.active) pthread_cond_wait(&fs_team.idle, &fs_team.lock);
    pthread_mutex_unlock(&fs_team.lock);
    pthread_mutex_unlock(&fs_team.owner);
}
