// A disk that forgets and fills up, under a server that is started with this library in LD_PRELOAD.
//
// CHAOS_SYNCS   file to which every completed fsync appends "path bytes": bytes of the file when the sync began. Power loss is
//               a kill, and cutting every file to what was synced.
// CHAOS_SLOW    while this file exists, a sync takes half a second longer
// CHAOS_FULL    while this file exists, writes to regular files fail with ENOSPC
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int exists(const char *variable) {
  const char *path = getenv(variable);
  return path && access(path, F_OK) == 0;
}

static int sync_and_note(int (*real)(int), int fd) {
  struct stat status;
  char link[64], path[4096];
  ssize_t length = -1;
  if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof path - 1);
  }
  if (exists("CHAOS_SLOW")) usleep(500000);
  int result = real(fd);
  if (result == 0 && length > 0 && getenv("CHAOS_SYNCS")) {
    char line[4200];
    path[length] = 0;
    int bytes = snprintf(line, sizeof line, "%s %lld\n", path, (long long)status.st_size);
    int notes = open(getenv("CHAOS_SYNCS"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (notes >= 0) {
      if (syscall(SYS_write, notes, line, bytes) != bytes) abort(); // not the full disk's
      close(notes);
    }
  }
  return result;
}

int fsync(int fd) { return sync_and_note((int (*)(int))dlsym(RTLD_NEXT, "fsync"), fd); }
int fdatasync(int fd) { return sync_and_note((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"), fd); }

ssize_t write(int fd, const void *data, size_t bytes) {
  static ssize_t (*real)(int, const void *, size_t);
  if (!real) real = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
  struct stat status;
  if (exists("CHAOS_FULL") && fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) {
    errno = ENOSPC;
    return -1;
  }
  return real(fd, data, bytes);
}
