// A wall clock that a test can set, for the processes that preload this library: seconds, as text, in the file that the variable
// TEST_CLOCK_FILE names. What the kernel derives from the wall clock moves with it: the start of the machine in /proc/stat.
// The monotonic clocks are left alone, as the kernel leaves them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset_s(void) {
  const char *path = getenv("TEST_CLOCK_FILE");
  char text[32] = {0};
  int file = path == NULL ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
  if (file < 0) return 0;
  long found = read(file, text, sizeof text - 1) > 0 ? strtol(text, NULL, 10) : 0;
  close(file);
  return found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = (int)syscall(SYS_clock_gettime, clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_s();
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec precise;
  if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
  if (now != NULL) *now = precise.tv_sec;
  return precise.tv_sec;
}

static int proc_stat(void) {
  static const char boot[] = "btime ";
  int source = (int)syscall(SYS_openat, AT_FDCWD, "/proc/stat", O_RDONLY | O_CLOEXEC, 0);
  if (source < 0) return source;
  FILE *in = fdopen(source, "r");
  int made = memfd_create("stat", MFD_CLOEXEC);
  char *line = NULL;
  size_t room = 0;
  while (getline(&line, &room, in) > 0) {
    if (strncmp(line, boot, sizeof boot - 1) == 0)
      dprintf(made, "%s%ld\n", boot, atol(line + sizeof boot - 1) + offset_s());
    else
      dprintf(made, "%s", line);
  }
  free(line);
  fclose(in);
  lseek(made, 0, SEEK_SET);
  return made;
}

static int opened(int folder, const char *path, int flags, mode_t mode) {
  if (strcmp(path, "/proc/stat") == 0) return proc_stat();
  return (int)syscall(SYS_openat, folder, path, flags, mode);
}

#define OPENS(name)                                                            \
  int name(const char *path, int flags, ...) {                                 \
    va_list rest;                                                              \
    va_start(rest, flags);                                                     \
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;  \
    va_end(rest);                                                              \
    return opened(AT_FDCWD, path, flags, mode);                                \
  }
OPENS(open)
OPENS(open64)
