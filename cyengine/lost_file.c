/* The handler may run in any thread, at any instruction: it calls nothing but what POSIX lists as
 * async-signal-safe, and learns which file it is from /proc/self/maps, so that nothing has to be
 * registered. */
#define _POSIX_C_SOURCE 200809L
#include "lost_file.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

/* A signal handler has no other place for what it needs. Set before it is installed, never after.
 */
static int log_fd;
static int status;
static struct sigaction previous;

/* Several threads meet the end of a file at once: the first to know its name says so, alone. */
static atomic_flag is_said = ATOMIC_FLAG_INIT;

enum { kMaxPath = 4096 };

/* Reads a file byte by byte through a small buffer. */
struct reader {
  int fd;
  ssize_t size, at;
  char buffer[1024];
};

static int next_byte(struct reader *in) {
  if (in->at == in->size) {
    in->at = 0;
    do {
      in->size = read(in->fd, in->buffer, sizeof in->buffer);
    } while (in->size < 0 && errno == EINTR);
    if (in->size <= 0) {
      in->size = 0;
      return -1;
    }
  }
  return (unsigned char)in->buffer[in->at++];
}

static uintptr_t read_hex(struct reader *in, int *end) {
  uintptr_t value = 0;
  for (;;) {
    const int c = next_byte(in);
    if (c >= '0' && c <= '9') {
      value = value << 4 | (uintptr_t)(c - '0');
    } else if (c >= 'a' && c <= 'f') {
      value = value << 4 | (uintptr_t)(c - 'a' + 10);
    } else {
      *end = c;
      return value;
    }
  }
}

/* The name, without its folder, of the file that is mapped at an address; 0 where none is. A line
 * of maps is "begin-end rwxp offset device inode   /path". */
static size_t find_name(uintptr_t address, char name[kMaxPath]) {
  struct reader in = {.fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC)};
  size_t length = 0;
  if (in.fd < 0) return 0;
  for (int end = 0; end >= 0;) {
    const uintptr_t first = read_hex(&in, &end);
    const uintptr_t last = end == '-' ? read_hex(&in, &end) : first;
    int is_path = 0;
    length = 0;
    for (end = next_byte(&in); end >= 0 && end != '\n'; end = next_byte(&in)) {
      if (end == '/') {
        is_path = 1;
        length = 0;
      } else if (is_path && length < kMaxPath) {
        name[length++] = (char)(end < ' ' ? '?' : end); /* no name may forge a line */
      }
    }
    if (address >= first && address < last) break;
    length = 0;
  }
  close(in.fd);
  return length;
}

static void say(const char *text, size_t size) {
  while (size > 0) {
    const ssize_t written = write(log_fd, text, size);
    if (written < 0 && errno != EINTR) return;
    if (written < 0) continue;
    text += written;
    size -= (size_t)written;
  }
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
  static const char before[] = "xllm: the mapped file ";
  static const char after[] =
      " has been shortened while it was in use, and what is gone was needed: this process ends. "
      "Put the whole file back"
      " and start again; replace model files by renaming new ones over them\n";
  char name[kMaxPath];
  const int saved_errno = errno;
  const size_t length = info->si_code == BUS_ADRERR ? find_name((uintptr_t)info->si_addr, name) : 0;
  (void)context;
  if (length > 0) {
    while (atomic_flag_test_and_set(&is_said)) pause(); /* until the first one ends the process */
    say(before, sizeof before - 1);
    say(name, length);
    say(after, sizeof after - 1);
    _exit(status);
  }
  /* Not ours: whoever had the signal before gets it, as soon as this returns. */
  (void)sigaction(number, &previous, NULL);
  (void)raise(number);
  errno = saved_errno;
}

int exit_on_lost_file(int fd, int exit_status) {
  struct sigaction action;
  struct sigaction found;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  log_fd = fd;
  status = exit_status;
  if (sigaction(SIGBUS, NULL, &found) != 0) return errno;
  if ((found.sa_flags & SA_SIGINFO) == 0 || found.sa_sigaction != on_bus_error) previous = found;
  return sigaction(SIGBUS, &action, NULL) == 0 ? 0 : errno;
}
