/* Preloaded into a process, writes down every change that it makes below TRACE_ROOT, in order, into the file TRACE_LOG.
 *
 * One record: op (1 byte) | length of path (4) | path | length of second path (4) | path | number (8) | length of data (8) | data
 *   c create or truncate, number 1: truncated    w write at `number`       t truncate to `number`     f fsync
 *   m mkdir    u unlink    d rmdir    r rename to the second path
 *
 * Each record is one append, so that several processes may write the same log: with TRACE_CHILDREN whoever is started is traced too.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int log_fd = -1;
static const char *root;

__attribute__((constructor)) static void begin(void) {
    root = getenv("TRACE_ROOT");
    const char *log = getenv("TRACE_LOG");
    if (root && log) log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (!getenv("TRACE_CHILDREN")) unsetenv("LD_PRELOAD");
}

static int below_root(const char *path) {
    return log_fd >= 0 && root && !strncmp(path, root, strlen(root)) && (path[strlen(root)] == '/' || !path[strlen(root)]);
}

static int is_deleted(const char *path) { /* nobody finds it any more */
    size_t length = strlen(path);
    return length > 10 && !strcmp(path + length - 10, " (deleted)");
}

static void record(char op, const char *path, const char *other, int64_t number, const void *data, int64_t size) {
    if (!below_root(path) || is_deleted(path) || is_deleted(other)) return;
    uint32_t length = strlen(path), second = strlen(other);
    struct iovec parts[] = {{&op, 1}, {&length, 4}, {(void *)path, length}, {&second, 4}, {(void *)other, second},
                            {&number, 8}, {&size, 8}, {(void *)data, size}};
    ssize_t whole = 25 + length + second + size;
    if (syscall(SYS_writev, log_fd, parts, 8) != whole) abort(); /* a trace with a hole proves nothing */
}

static const char *path_of(int fd, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, buffer, PATH_MAX - 1);
    buffer[length > 0 ? length : 0] = 0;
    return buffer;
}

static const char *path_at(int dir, const char *path, char *buffer) {
    if (path[0] == '/') return path;
    if (dir == AT_FDCWD) { if (!getcwd(buffer, PATH_MAX)) buffer[0] = 0; }
    else path_of(dir, buffer);
    size_t length = strlen(buffer);
    snprintf(buffer + length, PATH_MAX - length, "/%s", path);
    return buffer;
}

static void written(int fd, int64_t at, const void *data, ssize_t size) {
    char buffer[PATH_MAX];
    if (size > 0 && log_fd >= 0) record('w', path_of(fd, buffer), "", at, data, size);
}

static void copied(int fd, int64_t at, ssize_t size) { /* what the kernel moved by itself is read back */
    char buffer[PATH_MAX];
    if (size <= 0 || !below_root(path_of(fd, buffer))) return;
    char *data = malloc(size);
    int back = syscall(SYS_openat, AT_FDCWD, buffer, O_RDONLY | O_CLOEXEC, 0);
    if (back < 0 || pread(back, data, size, at) != size) abort();
    syscall(SYS_close, back);
    written(fd, at, data, size);
    free(data);
}

static int64_t position(int fd) {
    if (log_fd < 0) return 0;
    if (fcntl(fd, F_GETFL) & O_APPEND) { struct stat s; return fstat(fd, &s) ? 0 : s.st_size; }
    return lseek(fd, 0, SEEK_CUR);
}

int fflush(FILE *file) { /* what went through a buffer of the C library is read back: it is little */
    int failed = REAL(fflush)(file);
    char buffer[PATH_MAX];
    struct stat s;
    if (!failed && file && below_root(path_of(fileno(file), buffer)) && !fstat(fileno(file), &s)) copied(fileno(file), 0, s.st_size);
    return failed;
}

#define FILES 4096
static char *open_path[FILES]; /* of files that were created and are still open */

static void created(int fd, int dir, const char *path, int flags) {
    char buffer[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || !below_root(path = path_at(dir, path, buffer))) return;
    record('c', path, "", !!(flags & O_TRUNC), "", 0);
    if (fd >= 0 && fd < FILES) free(open_path[fd]), open_path[fd] = strdup(path);
}

int close(int fd) {
    char buffer[PATH_MAX];
    if (fd >= 0 && fd < FILES && open_path[fd]) { /* safetensors renames with a bare system call, before it closes */
        if (strcmp(open_path[fd], path_of(fd, buffer))) record('r', open_path[fd], buffer, 0, "", 0);
        free(open_path[fd]), open_path[fd] = NULL;
    }
    return REAL(close)(fd);
}

#define OPEN(name)                                                                                  \
    int name(const char *path, int flags, ...) {                                                    \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest);      \
        int fd = REAL(name)(path, flags, mode);                                                     \
        if (fd >= 0) created(fd, AT_FDCWD, path, flags);                                                \
        return fd;                                                                                  \
    }
#define OPENAT(name)                                                                                \
    int name(int dir, const char *path, int flags, ...) {                                           \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest);      \
        int fd = REAL(name)(dir, path, flags, mode);                                                \
        if (fd >= 0) created(fd, dir, path, flags);                                                     \
        return fd;                                                                                  \
    }
#define FOPEN(name)                                                                                 \
    FILE *name(const char *path, const char *mode) {                                                \
        FILE *file = REAL(name)(path, mode);                                                        \
        if (file && mode[0] != 'r') created(-1, AT_FDCWD, path, O_CREAT | (mode[0] == 'w' ? O_TRUNC : 0)); \
        return file;                                                                                \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) FOPEN(fopen) FOPEN(fopen64)

ssize_t write(int fd, const void *data, size_t size) {
    int64_t at = position(fd);
    ssize_t done = REAL(write)(fd, data, size);
    written(fd, at, data, done);
    return done;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    ssize_t done = REAL(pwrite)(fd, data, size, at);
    written(fd, at, data, done);
    return done;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    ssize_t done = REAL(pwrite64)(fd, data, size, at);
    written(fd, at, data, done);
    return done;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    int64_t at = position(fd);
    ssize_t done = REAL(writev)(fd, parts, count), left = done;
    for (int i = 0; i < count && left > 0; i++) {
        ssize_t size = left < (ssize_t)parts[i].iov_len ? left : (ssize_t)parts[i].iov_len;
        written(fd, at, parts[i].iov_base, size);
        at += size, left -= size;
    }
    return done;
}

ssize_t sendfile64(int out, int in, off64_t *from, size_t size) {
    int64_t at = position(out);
    ssize_t done = REAL(sendfile64)(out, in, from, size);
    copied(out, at, done);
    return done;
}

ssize_t sendfile(int out, int in, off_t *from, size_t size) { return sendfile64(out, in, from, size); }

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    int64_t at = to ? *to : position(out);
    ssize_t done = REAL(copy_file_range)(in, from, out, to, size, flags);
    copied(out, at, done);
    return done;
}

static int synced(int fd, int failed) {
    char buffer[PATH_MAX];
    if (!failed) record('f', path_of(fd, buffer), "", 0, "", 0);
    return failed;
}
int fsync(int fd) { return synced(fd, REAL(fsync)(fd)); }
int fdatasync(int fd) { return synced(fd, REAL(fdatasync)(fd)); }

static int truncated(int fd, int64_t size, int failed) {
    char buffer[PATH_MAX];
    if (!failed) record('t', path_of(fd, buffer), "", size, "", 0);
    return failed;
}
int ftruncate(int fd, off_t size) { return truncated(fd, size, REAL(ftruncate)(fd, size)); }
int ftruncate64(int fd, off64_t size) { return truncated(fd, size, REAL(ftruncate64)(fd, size)); }

static int changed(char op, int dir, const char *path, int failed) {
    char buffer[PATH_MAX];
    if (!failed) record(op, path_at(dir, path, buffer), "", 0, "", 0);
    return failed;
}
int mkdir(const char *path, mode_t mode) { return changed('m', AT_FDCWD, path, REAL(mkdir)(path, mode)); }
int mkdirat(int dir, const char *path, mode_t mode) { return changed('m', dir, path, REAL(mkdirat)(dir, path, mode)); }
int unlink(const char *path) { return changed('u', AT_FDCWD, path, REAL(unlink)(path)); }
int rmdir(const char *path) { return changed('d', AT_FDCWD, path, REAL(rmdir)(path)); }
int unlinkat(int dir, const char *path, int flags) {
    return changed(flags & AT_REMOVEDIR ? 'd' : 'u', dir, path, REAL(unlinkat)(dir, path, flags));
}

static int renamed(int from_dir, const char *from, int to_dir, const char *to, int failed) {
    char first[PATH_MAX], second[PATH_MAX];
    if (failed) return failed;
    const char *old = path_at(from_dir, from, first), *new = path_at(to_dir, to, second);
    record('r', old, new, 0, "", 0);
    for (int fd = 0; fd < FILES; fd++)
        if (open_path[fd] && !strcmp(open_path[fd], old)) free(open_path[fd]), open_path[fd] = strdup(new);
    return 0;
}
int rename(const char *from, const char *to) { return renamed(AT_FDCWD, from, AT_FDCWD, to, REAL(rename)(from, to)); }
int renameat(int from_dir, const char *from, int to_dir, const char *to) {
    return renamed(from_dir, from, to_dir, to, REAL(renameat)(from_dir, from, to_dir, to));
}
