/* Start threads of the core: with a small stack, and no signals, which belong to the interpreter's threads. */
#ifndef FEATSTORE_STARTS_H
#define FEATSTORE_STARTS_H

#include <pthread.h>

/* Start up to n threads; returns how many there are. `threads` receives them, to be joined; NULL: they are detached. *error is 0, or
 * why one could not be started: a positive errno. */
int fs_start_threads(int n, void *(*run)(void *), void *argument, pthread_t *threads, int *error);

#endif
