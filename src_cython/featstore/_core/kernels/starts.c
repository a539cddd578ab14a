#include "starts.h"

#include <signal.h>

int fs_start_threads(int n, void *(*run)(void *), void *argument, pthread_t *threads, int *error) {
    pthread_attr_t attr;
    sigset_t all, before;
    int started = 0;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 128 << 10);
    if (!threads) pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (*error = 0; started < n; started++) {
        pthread_t thread;
        *error = pthread_create(&thread, &attr, run, argument);
        if (*error) break;
        if (threads) threads[started] = thread;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    return started;
}
