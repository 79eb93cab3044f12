/* Ends this process when its parent has ended, also while a thread that waits for the parent holds Python's lock; see
   lifeline.py. */
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

static void *watch(void *parent)
{
    const struct timespec period = {0, 250000000};
    while (getppid() == (pid_t)(intptr_t)parent)
        nanosleep(&period, NULL);
    _exit(1);
}

/* 0, or an error's number. The thread takes no signals: handlers run where they ran before. */
int end_with(int parent)
{
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, NULL, watch, (void *)(intptr_t)parent);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error ? error : pthread_detach(thread);
}
