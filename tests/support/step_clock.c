/* A wall clock that a test can step, for LD_PRELOAD: the 8 bytes of the file STEP_CLOCK are seconds to add.

   Containers share the kernel's clock, so a step of that clock would be a step for the whole machine. Only the wall
   clock is changed. CLOCK_MONOTONIC stays, as it does when an administrator or NTP steps a machine's clock. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *seconds;

__attribute__((constructor)) static void map_file(void) {
    const char *path = getenv("STEP_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *found = mmap(NULL, sizeof *seconds, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED)
        seconds = found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && seconds && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *seconds;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *copy) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (copy)
        *copy = exact.tv_sec;
    return exact.tv_sec;
}
