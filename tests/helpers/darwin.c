/* What macOS's C library takes and answers, as xnu's headers say, for tests on Linux. Each call is a
 * line of the file $DARWIN_LOG. What macOS would refuse is refused, and its line says so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int level = 1; /* of memory pressure */
int fails = 0; /* 1: msync and host_statistics64 fail */
int free_pages = 2000000;
int newer = 0; /* host_statistics64 has 104 words, as on macOS 27 */

static void note(const char *format, ...) {
    FILE *log = getenv("DARWIN_LOG") ? fopen(getenv("DARWIN_LOG"), "a") : NULL;
    va_list rest;
    va_start(rest, format);
    if (log) {
        vfprintf(log, format, rest);
        fclose(log);
    }
    va_end(rest);
}

static int refuse(int error, const char *what) {
    note("refused %s: %s\n", what, strerror(error));
    errno = error;
    return -1;
}

static const char *name_of(int fd) {
    static __thread char path[4096];
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n < 0 ? 0 : n] = 0;
    return strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
}

/* <sys/fcntl.h> */
enum { F_RDADVISE = 44, F_RDAHEAD, F_NOCACHE = 48 };
struct radvisory {
    int64_t ra_offset;
    int ra_count;
};

int fcntl64(int fd, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    struct stat s;
    if (command != F_RDADVISE && command != F_RDAHEAD && command != F_NOCACHE)
        return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl64"))(fd, command, argument);
    if (fstat(fd, &s) || !S_ISREG(s.st_mode))
        return refuse(EBADF, "fcntl");
    if (command == F_RDADVISE) {
        struct radvisory *r = argument;
        if (r->ra_offset < 0 || r->ra_count <= 0 || r->ra_offset + r->ra_count > s.st_size)
            return refuse(EINVAL, "F_RDADVISE");
        note("F_RDADVISE %s\n", name_of(fd));
    } else
        note("%s %d %s\n", command == F_RDAHEAD ? "F_RDAHEAD" : "F_NOCACHE", (int)(intptr_t)argument,
             name_of(fd));
    return 0;
}

int fcntl(int fd, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    return fcntl64(fd, command, argument);
}

/* <sys/mman.h>. kern_mman.c refuses an odd address, a hole, and no bytes. */
int msync(void *address, size_t nbytes, int flags) {
    uintptr_t first = (uintptr_t)address, begin, end;
    char line[4352], path[4096] = "", rights[5];
    if (flags != MS_INVALIDATE)
        return ((int (*)(void *, size_t, int))dlsym(RTLD_NEXT, "msync"))(address, nbytes, flags);
    if (fails || !nbytes || first % sysconf(_SC_PAGESIZE))
        return refuse(fails ? EIO : EINVAL, "msync");
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps)) {
        *path = 0;
        sscanf(line, "%lx-%lx %4s %*s %*s %*s %4095s", &begin, &end, rights, path);
        if (begin <= first && first + nbytes <= end && rights[3] == 's')
            break;
        *path = 0;
    }
    fclose(maps);
    if (!*path)
        return refuse(ENOMEM, "msync");
    note("msync MS_INVALIDATE %zu %s\n", nbytes, strrchr(path, '/') + 1);
    return 0;
}

/* <sys/sysctl.h>. kern_newsysctl.c refuses memory that is too small. */
int sysctlbyname(const char *name, void *into, size_t *nbytes, void *new, size_t new_nbytes) {
    const void *value = strcmp(name, "machdep.cpu.brand_string") ? (void *)&level : "Apple M4";
    size_t n = value == &level ? sizeof level : sizeof "Apple M4";
    if (value == &level && strcmp(name, "kern.memorystatus_vm_pressure_level"))
        return refuse(ENOENT, name);
    if (new || new_nbytes || *nbytes < n)
        return refuse(new || new_nbytes ? EPERM : ENOMEM, name);
    note("sysctlbyname %s\n", name);
    memcpy(into, value, n);
    *nbytes = n;
    return 0;
}

/* <mach/vm_statistics.h>, revision 1 */
struct vm_statistics64 {
    uint32_t free_count, active_count, inactive_count, wire_count;
    uint64_t zero_fill_count, reactivations, pageins, pageouts, faults, cow_faults;
    uint64_t lookups, hits, purges;
    uint32_t purgeable_count, speculative_count;
    uint64_t decompressions, compressions, swapins, swapouts;
    uint32_t compressor_page_count, throttled_count, external_page_count, internal_page_count;
    uint64_t total_uncompressed_pages_in_compressor;
} __attribute__((aligned(8)));

uint32_t mach_host_self(void) {
    note("mach_host_self\n");
    return 0x1803;
}

int host_statistics64(uint32_t host, int flavor, void *into, uint32_t *words) {
    struct vm_statistics64 found = {.free_count = free_pages, .inactive_count = 500,
                                    .decompressions = 500, .compressions = 8000};
    if (newer && *words < 104)
        return *words = 104, -307; /* MIG_ARRAY_TOO_LARGE */
    if (host != 0x1803 || flavor != 4 || fails || *words < sizeof found / 4)
        return refuse(EINVAL, "host_statistics64"), fails ? 5 : 4; /* KERN_FAILURE, or an argument */
    note("host_statistics64 HOST_VM_INFO64\n");
    memcpy(into, &found, sizeof found);
    *words = newer ? 104 : sizeof found / 4;
    return 0;
}

/* <sys/proc_info.h> */
struct proc_threadinfo {
    uint64_t user_time, system_time;
    int32_t cpu_usage, policy, run_state, flags, sleep_time, priority, curpri, maxpriority;
    char name[64];
};

int proc_pidinfo(int pid, int flavor, uint64_t thread, void *into, int nbytes) {
    char task[64];
    if (pid != getpid() || flavor != 15 || nbytes < (int)sizeof(struct proc_threadinfo))
        return refuse(EINVAL, "proc_pidinfo"), 0;
    snprintf(task, sizeof task, "/proc/self/task/%llu", (unsigned long long)thread);
    note("proc_pidinfo PROC_PIDTHREADID64INFO\n");
    if (access(task, F_OK))
        return errno = ESRCH, 0;
    memset(into, 1, sizeof(struct proc_threadinfo));
    return sizeof(struct proc_threadinfo);
}

/* What only Linux has. */
int posix_fadvise64(int fd, off_t offset, off_t nbytes, int advice) {
    return refuse(ENOSYS, "posix_fadvise"), ENOSYS;
}

int posix_fadvise(int fd, off_t offset, off_t nbytes, int advice) {
    return posix_fadvise64(fd, offset, nbytes, advice);
}
