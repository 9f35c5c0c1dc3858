/* A slower disk, and a count of what is made durable: preloaded into every process of a measured system.
 *
 * Each write to a file on the measured device is counted and, if a rate is given, held back until a disk of that
 * rate would have taken it; all processes share one disk.  That is a parallel file system seen from one client:
 * no page cache hides it.  Calls of fsync and its like are counted, so that who makes data durable is measured.
 *
 * BENCH_DISK: a file of four zeroed 64-bit numbers, shared.  BENCH_DISK_DEVICE: st_dev.  BENCH_DISK_RATE: bytes/s.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct shared {
    _Atomic uint64_t bytes, file_syncs, directory_syncs;
    _Atomic int64_t free_at_ns; /* when the disk has taken all that was written so far */
};

static struct shared *shared;
static dev_t device;
static double ns_per_byte;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("BENCH_DISK"), *rate = getenv("BENCH_DISK_RATE"), *dev = getenv("BENCH_DISK_DEVICE");
    if (!path || !dev) return;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *page = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (page == MAP_FAILED) return;
    device = (dev_t)strtoull(dev, NULL, 10);
    ns_per_byte = rate ? 1e9 / atof(rate) : 0;
    shared = page;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static int kind_of(int fd) { /* 0: not ours */
    struct stat status;
    if (!shared || fstat(fd, &status) || status.st_dev != device) return 0;
    return status.st_mode & S_IFMT;
}

/* `began`: when the call was made, so that the time which the real disk took is part of the emulated one's. */
static ssize_t pay(int fd, ssize_t count, int64_t began) {
    if (count <= 0 || kind_of(fd) != S_IFREG) return count;
    atomic_fetch_add(&shared->bytes, (uint64_t)count);
    if (ns_per_byte == 0) return count;
    int64_t cost = (int64_t)(count * ns_per_byte), free_at = atomic_load(&shared->free_at_ns), done;
    do {
        done = (free_at > began ? free_at : began) + cost;
    } while (!atomic_compare_exchange_weak(&shared->free_at_ns, &free_at, done));
    struct timespec until = {done / 1000000000, done % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL)) {}
    return count;
}

#define REAL(name, ...) \
    static ssize_t (*real)(__VA_ARGS__); \
    if (!real) real = (ssize_t (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

ssize_t write(int fd, const void *data, size_t count) {
    REAL("write", int, const void *, size_t);
    int64_t began = now_ns();
    return pay(fd, real(fd, data, count), began);
}
ssize_t pwrite(int fd, const void *data, size_t count, off_t at) {
    REAL("pwrite", int, const void *, size_t, off_t);
    int64_t began = now_ns();
    return pay(fd, real(fd, data, count, at), began);
}
ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) {
    REAL("pwrite64", int, const void *, size_t, off64_t);
    int64_t began = now_ns();
    return pay(fd, real(fd, data, count, at), began);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL("writev", int, const struct iovec *, int);
    int64_t began = now_ns();
    return pay(fd, real(fd, parts, count), began);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    REAL("pwritev", int, const struct iovec *, int, off_t);
    int64_t began = now_ns();
    return pay(fd, real(fd, parts, count, at), began);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) {
    REAL("pwritev64", int, const struct iovec *, int, off64_t);
    int64_t began = now_ns();
    return pay(fd, real(fd, parts, count, at), began);
}

static void note_sync(int fd) {
    int kind = kind_of(fd);
    if (kind == S_IFREG) atomic_fetch_add(&shared->file_syncs, 1);
    if (kind == S_IFDIR) atomic_fetch_add(&shared->directory_syncs, 1);
}

int fsync(int fd) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    note_sync(fd);
    return real(fd);
}
int fdatasync(int fd) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    note_sync(fd);
    return real(fd);
}
