/* Shifts the wall clock of the programs that load it: LD_PRELOAD.
 *
 * A time namespace shifts other clocks only. The shift is in a file that programs map, so that
 * it can change while they run. Waits until a time of the wall clock are shifted back: the kernel
 * knows nothing of this.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift_s;

__attribute__((constructor)) static void map_shift(void) {
    int file = open(SHIFT_FILE, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) shift_s = mapped;
    close(file);
}

static int64_t shift(void) { return shift_s ? *shift_s : 0; }

/* Seconds since 1970, and not since the machine's start. */
static int is_wall(const struct timespec *time) { return time && time->tv_sec > 1000000000; }

static struct timespec back(const struct timespec *time) {
    struct timespec real = *time;
    real.tv_sec -= shift();
    return real;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    long result = syscall(SYS_clock_gettime, clock, time);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        time->tv_sec += shift();
    return (int)result;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *time, int base) {
    return base == TIME_UTC && clock_gettime(CLOCK_REALTIME, time) == 0 ? base : 0;
}

/* The newest version of a function: of two, dlsym may find the older one. */
static void *next(const char *name, const char *version) {
    void *found = dlvsym(RTLD_NEXT, name, version);
    return found ? found : dlsym(RTLD_NEXT, name);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!wait) wait = next("pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec real = is_wall(until) ? back(until) : *until;
    return wait(condition, mutex, &real);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*wait)(sem_t *, const struct timespec *);
    if (!wait) wait = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec real = back(until);
    return wait(semaphore, &real);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    static int (*lock)(pthread_mutex_t *, const struct timespec *);
    if (!lock) lock = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    struct timespec real = back(until);
    return lock(mutex, &real);
}

/* Abseil, and so gRPC and Ray, wait by futexes that they call by number. */
long syscall(long number, ...) {
    static long (*call)(long, ...);
    if (!call) call = dlsym(RTLD_NEXT, "syscall");
    va_list arguments;
    va_start(arguments, number);
    long a[6];
    for (int i = 0; i < 6; i++) a[i] = va_arg(arguments, long);
    va_end(arguments);
    struct timespec real;
    if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) &&
        is_wall((const struct timespec *)a[3])) {
        real = back((const struct timespec *)a[3]);
        a[3] = (long)&real;
    }
    return call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
