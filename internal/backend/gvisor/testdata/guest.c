// What the tests of shared memory run inside: it listens on a TCP port, and
// answers each line with a line. Its memory is filled from seeds, so that a sum
// of it tells whether it is right.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "files.h"
#include "waits.h"

#define PAGE 4096
#define PER_PAGE (PAGE / 8)

static void die(const char *what) {
  perror(what);
  _exit(3);
}

static uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

// An area of memory.
typedef struct {
  const char *name;
  uint64_t *at;
  size_t words;
} area;

static area areas[8];
static int n_areas;

static area *find(const char *name) {
  for (int i = 0; i < n_areas; i++)
    if (!strcmp(areas[i].name, name)) return &areas[i];
  return NULL;
}

static void fill(area *a, uint64_t seed) {
  for (size_t i = 0; i < a->words; i++) a->at[i] = mix(seed + i);
}

static uint64_t sum(area *a) {
  uint64_t h = 1469598103934665603ULL, s = 0;
  for (size_t i = 0; i < a->words; i++) {
    s += a->at[i] * (2 * i + 1);
    h ^= a->at[i] + i;
  }
  return h ^ mix(s);
}

// Writes to a part of the pages in percent: the first ones, or spread ones.
static void change(area *a, uint64_t seed, int percent, int spread) {
  size_t pages = a->words / PER_PAGE, n = pages * percent / 100;
  for (size_t k = 0; k < n; k++) {
    size_t p = spread ? k * pages / n : k;
    for (int j = 0; j < PER_PAGE; j += 64) a->at[p * PER_PAGE + j] = mix(seed + p * PER_PAGE + j);
  }
}

static void add(const char *name, void *at, size_t bytes, uint64_t seed) {
  if (at == MAP_FAILED) die(name);
  areas[n_areas] = (area){name, at, bytes / 8};
  if (seed) fill(&areas[n_areas], seed);
  n_areas++;
}

// Areas of all kinds: "anon" of so many MiB, for 0 of a few pages, "huge", "shared", a memfd that is
// mapped in both ways, and a file of which a part was written to privately.
static void make(int mb) {
  size_t some = 2 << 20, all = mb ? (size_t)mb << 20 : 16 * PAGE;
  add("anon", mmap(0, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), all, 1);
  char *huge = mmap(0, 6 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (huge == MAP_FAILED) die("huge");
  huge = (char *)(((uintptr_t)huge + some - 1) & ~(some - 1));
  madvise(huge, 2 * some, MADV_HUGEPAGE);
  add("huge", huge, 2 * some, 2);
  add("shared", mmap(0, some, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), some, 3);
  int fd = memfd_create("guest", 0);
  if (fd < 0 || ftruncate(fd, some)) die("memfd");
  add("memfd", mmap(0, some, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), some, 4);
  add("memfdprivate", mmap(0, some, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0), some, 0);
  change(find("memfdprivate"), 5, 50, 1);
  fd = open("/tmp/guest-file", O_RDWR | O_CREAT | O_TRUNC, 0600);
  if (fd < 0) die("file");
  for (size_t i = 0; i < some / 8; i++) {
    uint64_t w = mix(6 + i);
    if (write(fd, &w, 8) != 8) die("write file");
  }
  add("file", mmap(0, some, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0), some, 0);
  change(find("file"), 7, 30, 1);
}

// Memory that nobody has touched.
static void reserve(int mb) {
  size_t all = (size_t)mb << 20;
  add("bare", mmap(0, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), all, 0);
}

// Takes more memory, and writes to all of it.
static void grow(int mb) {
  size_t all = (size_t)mb << 20;
  char *at = mmap(0, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) die("grow");
  memset(at, 1, all);
}

// A second process that has our memory as it was when it was forked.
static int ask_kid[2], kid_says[2];

static void fork_kid(void) {
  if (pipe(ask_kid) || pipe(kid_says)) die("pipe");
  if (fork()) return;
  char c;
  while (read(ask_kid[0], &c, 1) == 1) {
    if (c == 'w') change(find("anon"), 777, 30, 1);
    uint64_t v = sum(find("anon")) ^ mix(sum(find("huge")));
    if (write(kid_says[1], &v, 8) != 8) break;
  }
  _exit(0);
}

static uint64_t kid(char c) {
  uint64_t v = 0;
  if (write(ask_kid[1], &c, 1) != 1 || read(kid_says[0], &v, 8) != 8) die("kid");
  return v;
}

// Forks here: both must see what was, and each then only its own changes.
static int fork_once(uint64_t seed, int percent) {
  area *a = find("anon");
  uint64_t before = sum(a), said[2] = {0, 0};
  int p[2];
  if (pipe(p)) die("pipe");
  pid_t pid = fork();
  if (pid == 0) {
    said[0] = sum(a);
    change(a, seed, percent, 1);
    said[1] = sum(a);
    if (write(p[1], said, sizeof said) != sizeof said) _exit(4);
    _exit(0);
  }
  if (read(p[0], said, sizeof said) != sizeof said) said[0] = 0;
  int status;
  waitpid(pid, &status, 0);
  close(p[0]);
  close(p[1]);
  return status == 0 && said[0] == before && said[1] != before && sum(a) == before;
}

// Threads that write all the time and check what they wrote.
static uint64_t *busy_mem, *busy_tab;
static size_t busy_pages;
static int busy_threads;
static volatile long busy_errors, busy_ops;
static volatile int busy_stop, busy_idle;

static void *busy(void *arg) {
  size_t mine = (size_t)arg, n = busy_pages / busy_threads, base = mine * n;
  uint64_t r = mine + 1;
  for (;;) {
    if (busy_stop) {
      __sync_fetch_and_add(&busy_idle, 1);
      while (busy_stop) usleep(1000);
      __sync_fetch_and_sub(&busy_idle, 1);
    }
    r = mix(r);
    size_t p = base + r % n;
    uint64_t *w = busy_mem + p * PER_PAGE;
    for (int j = 0; j < PER_PAGE; j += 73)
      if (w[j] != mix(busy_tab[p] * 131 + p + j)) __sync_fetch_and_add(&busy_errors, 1);
    busy_tab[p] += 1 + (r >> 60);
    for (int j = 0; j < PER_PAGE; j += 73) w[j] = mix(busy_tab[p] * 131 + p + j);
    if ((__sync_fetch_and_add(&busy_ops, 1) & 255) == 0) usleep(500);
  }
  return NULL;
}

static void start_busy(int threads, int mb) {
  busy_threads = threads;
  busy_pages = (size_t)mb << 8;
  busy_mem = mmap(0, busy_pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  busy_tab = mmap(0, busy_pages * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  for (size_t p = 0; p < busy_pages; p++)
    for (int j = 0; j < PER_PAGE; j += 73) busy_mem[p * PER_PAGE + j] = mix(p + j);
  for (int i = 0; i < threads; i++) {
    pthread_t t;
    pthread_attr_t at;
    pthread_attr_init(&at);
    pthread_attr_setstacksize(&at, 64 << 10);
    if (pthread_create(&t, &at, busy, (void *)(size_t)i)) die("thread");
  }
}

static long check_busy(void) {
  long bad = 0;
  busy_stop = 1;
  while (busy_idle < busy_threads) usleep(500);
  for (size_t p = 0; p < busy_pages; p++)
    for (int j = 0; j < PER_PAGE; j += 73) bad += busy_mem[p * PER_PAGE + j] != mix(busy_tab[p] * 131 + p + j);
  busy_stop = 0;
  return bad + busy_errors;
}

// A thread that reads a file by asynchronous I/O without end and checks it.
static volatile long aio_errors, aio_reads;

static void *aio(void *arg) {
  (void)arg;
  int fd = open("/tmp/guest-file", O_RDONLY);
  aio_context_t ctx = 0;
  if (fd < 0 || syscall(SYS_io_setup, 16, &ctx)) die("aio");
  char *buf = mmap(0, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  for (uint64_t round = 0;; round++) {
    struct iocb cb[8], *list[8];
    for (int i = 0; i < 8; i++) {
      memset(&cb[i], 0, sizeof cb[i]);
      cb[i].aio_lio_opcode = IOCB_CMD_PREAD;
      cb[i].aio_fildes = fd;
      cb[i].aio_buf = (uintptr_t)(buf + i * PAGE);
      cb[i].aio_nbytes = PAGE;
      cb[i].aio_offset = (mix(round * 8 + i) % 512) * PAGE;
      list[i] = &cb[i];
    }
    if (syscall(SYS_io_submit, ctx, 8, list) != 8) {
      aio_errors++;
      continue;
    }
    struct io_event ev[8];
    for (int got = 0; got < 8;) {
      int n = syscall(SYS_io_getevents, ctx, 1, 8 - got, ev, NULL);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) {
        aio_errors++;
        break;
      }
      for (int i = 0; i < n; i++) aio_errors += ev[i].res != PAGE;
      got += n;
    }
    for (int i = 0; i < 8; i++) {
      uint64_t *w = (uint64_t *)(buf + i * PAGE);
      for (int j = 0; j < PER_PAGE; j++)
        if (w[j] != mix(6 + cb[i].aio_offset / 8 + j)) {
          aio_errors++;
          break;
        }
    }
    aio_reads++;
    if (round % 16 == 0) usleep(200);
  }
  return NULL;
}

// How many pages of an area mincore says are there.
static size_t resident(area *a) {
  size_t pages = a->words / PER_PAGE, n = 0;
  unsigned char *v = malloc(pages);
  if (mincore(a->at, a->words * 8, v)) die("mincore");
  for (size_t i = 0; i < pages; i++) n += v[i] & 1;
  free(v);
  return n;
}

static long status_of(const char *field) {
  FILE *f = fopen("/proc/self/status", "r");
  char line[200];
  long v = -1;
  while (f && fgets(line, sizeof line, f))
    if (!strncmp(line, field, strlen(field))) sscanf(line + strlen(field) + 1, "%ld", &v);
  if (f) fclose(f);
  return v;
}

// Trees of files.
static char trees[4][64];
static int n_trees;

static void remember(const char *dir) {
  for (int i = 0; i < n_trees; i++)
    if (!strcmp(trees[i], dir)) return;
  snprintf(trees[n_trees++], sizeof trees[0], "%s", dir);
}

static double clock_of(clockid_t id) {
  struct timespec t;
  return clock_gettime(id, &t) ? -1 : t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static double clock_by_call(clockid_t id) {
  struct timespec t;
  return syscall(SYS_clock_gettime, id, &t) ? -1 : t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

// In a process that is refused the system call: how often a clock is not there
// without it, of 100 times, or is wrong.
static int clocks_missed(void) {
  static const clockid_t ids[] = {CLOCK_MONOTONIC, CLOCK_REALTIME};
  struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clock_gettime, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EXDEV),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof code / sizeof *code, code};
  pid_t pid = fork();
  if (pid) {
    int status;
    if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status)) die("wait");
    return WEXITSTATUS(status);
  }
  double before[2], missed = 0;
  for (int i = 0; i < 2; i++) before[i] = clock_by_call(ids[i]);
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) _exit(200);
  if (clock_by_call(CLOCK_MONOTONIC) != -1) _exit(201);
  for (int n = 0; n < 100; n++) {
    double t = clock_of(ids[n % 2]) - before[n % 2];
    if (t < -0.1 || t > 10000) missed++;
  }
  _exit(missed);
}

static void answer(const char *line, char *r, size_t size) {
  char op[32] = "", name[32] = "";
  unsigned long long seed = 0;
  int x = 0, y = 0;
  double begin = now();
  sscanf(line, "%31s", op);
  if (!strcmp(op, "make")) {
    sscanf(line, "%*s %d", &x);
    make(x);
    snprintf(r, size, "ok");
  } else if (!strcmp(op, "sums")) {
    size_t n = 0;
    for (int i = 0; i < n_areas; i++)
      n += snprintf(r + n, size - n, "%s=%016llx ", areas[i].name, (unsigned long long)sum(&areas[i]));
    for (int i = 0; i < n_trees; i++)
      n += snprintf(r + n, size - n, "%s=%016llx ", trees[i], (unsigned long long)files_sum(trees[i], 0));
    if (ask_kid[1]) snprintf(r + n, size - n, "kid=%016llx", (unsigned long long)kid('s'));
  } else if (!strcmp(op, "sum")) {
    sscanf(line, "%*s %31s", name);
    snprintf(r, size, "%016llx", (unsigned long long)sum(find(name)));
  } else if (!strcmp(op, "seen")) {
    size_t n = 0;
    for (int i = 0; i < n_areas; i++) n += snprintf(r + n, size - n, "%s=%zu ", areas[i].name, resident(&areas[i]));
    snprintf(r + n, size - n, "size=%ld rss=%ld", status_of("VmSize"), status_of("VmRSS"));
  } else if (!strcmp(op, "change")) {
    sscanf(line, "%*s %31s %llu %d %d", name, &seed, &x, &y);
    change(find(name), seed, x, y);
    snprintf(r, size, "%.2f", now() - begin);
  } else if (!strcmp(op, "random")) {
    sscanf(line, "%*s %llu %d", &seed, &x);
    area *a = find("anon");
    for (int i = 0; i < x; i++) {
      seed = mix(seed);
      a->at[seed % (a->words / PER_PAGE) * PER_PAGE] = seed;
    }
    snprintf(r, size, "%.2f", now() - begin);
  } else if (!strcmp(op, "read")) {
    sscanf(line, "%*s %31s", name);
    area *a = find(name);
    volatile uint64_t v = 0;
    for (size_t i = 0; i < a->words; i += PER_PAGE) v += a->at[i];
    snprintf(r, size, "%.2f", now() - begin);
  } else if (!strcmp(op, "reserve")) {
    sscanf(line, "%*s %d", &x);
    reserve(x);
    snprintf(r, size, "ok");
  } else if (!strcmp(op, "grow")) {
    sscanf(line, "%*s %d", &x);
    grow(x);
    snprintf(r, size, "ok");
  } else if (!strcmp(op, "dot")) { // every so many pages
    sscanf(line, "%*s %31s %llu %d", name, &seed, &x);
    area *a = find(name);
    for (size_t i = 0; i < a->words; i += (size_t)x * PER_PAGE) a->at[i] = mix(seed + i);
    snprintf(r, size, "%.2f", now() - begin);
  } else if (!strcmp(op, "kid")) {
    fork_kid();
    snprintf(r, size, "ok");
  } else if (!strcmp(op, "kidchange")) {
    snprintf(r, size, "%016llx", (unsigned long long)kid('w'));
  } else if (!strcmp(op, "fork")) {
    sscanf(line, "%*s %llu %d", &seed, &x);
    snprintf(r, size, fork_once(seed, x) ? "ok" : "bad");
  } else if (!strcmp(op, "drop")) { // a part in percent, and look that it is zero
    sscanf(line, "%*s %31s %d", name, &x);
    area *a = find(name);
    size_t words = a->words / PER_PAGE * x / 100 * PER_PAGE;
    long bad = madvise(a->at, words * 8, MADV_DONTNEED);
    for (size_t i = 0; i < words; i++) bad += a->at[i] != 0;
    snprintf(r, size, bad ? "bad" : "ok");
  } else if (!strcmp(op, "protect")) {
    area *a = find("anon");
    int bad = mprotect(a->at, a->words * 8, PROT_READ) | mprotect(a->at, a->words * 4, PROT_NONE) |
              mprotect(a->at, a->words * 8, PROT_READ | PROT_WRITE);
    snprintf(r, size, bad ? "bad" : "ok");
  } else if (!strcmp(op, "move")) { // to another address
    area *a = find("anon");
    void *to = mmap(0, a->words * 8, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    to = mremap(a->at, a->words * 8, a->words * 8, MREMAP_MAYMOVE | MREMAP_FIXED, to);
    if (to == MAP_FAILED) die("mremap");
    a->at = to;
    snprintf(r, size, "ok");
  } else if (!strcmp(op, "busy")) {
    sscanf(line, "%*s %d %d", &x, &y);
    start_busy(x, y);
    snprintf(r, size, "ok");
  } else if (!strcmp(op, "aio")) {
    pthread_t t;
    if (pthread_create(&t, NULL, aio, NULL)) die("thread");
    snprintf(r, size, "ok");
  } else if (!strcmp(op, "files")) { // makes so many, of about that size
    sscanf(line, "%*s %31s %d %d", name, &x, &y);
    files_make(name, x, y);
    remember(name);
    snprintf(r, size, "ok");
  } else if (!strcmp(op, "mess")) {
    sscanf(line, "%*s %31s %llu %d", name, &seed, &x);
    files_mess(name, seed, x);
    snprintf(r, size, "ok");
  } else if (!strcmp(op, "filesum")) { // with the times of access
    sscanf(line, "%*s %31s", name);
    snprintf(r, size, "%016llx", (unsigned long long)files_sum(name, 1));
  } else if (!strcmp(op, "readon")) {
    sscanf(line, "%*s %31s %d", name, &x);
    snprintf(r, size, "%016llx", (unsigned long long)files_read_on(name, x));
  } else if (!strcmp(op, "locked")) {
    sscanf(line, "%*s %31s", name);
    snprintf(r, size, "%s", files_locked(name) ? "ok" : "bad");
  } else if (!strcmp(op, "clocks")) {
    snprintf(r, size, "%d", clocks_missed());
  } else if (!strcmp(op, "wait")) {
    waits_begin();
    snprintf(r, size, "ok");
  } else if (!strcmp(op, "wake")) {
    waits_end(r, size);
  } else if (!strcmp(op, "errors")) {
    long reads = aio_reads;
    while (reads && aio_reads < reads + 20 && now() - begin < 20000) usleep(1000);
    snprintf(r, size, "%ld", (busy_threads ? check_busy() : 0) + aio_errors + (reads && aio_reads == reads));
  } else {
    snprintf(r, size, "no such request");
  }
}

int main(int argc, char **argv) {
  signal(SIGPIPE, SIG_IGN);
  int s = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(argc > 1 ? atoi(argv[1]) : 7000)};
  setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (bind(s, (struct sockaddr *)&at, sizeof at) || listen(s, 16)) die("listen");
  for (;;) {
    int c = accept(s, NULL, NULL);
    if (c < 0) continue;
    char line[512], reply[1024];
    int n = 0, got;
    while ((got = read(c, line + n, sizeof line - 1 - n)) > 0) {
      n += got;
      line[n] = 0;
      char *end = strchr(line, '\n');
      if (!end) continue;
      *end = 0;
      reply[0] = 0;
      answer(line, reply, sizeof reply - 1);
      strcat(reply, "\n");
      if (write(c, reply, strlen(reply)) < 0) break;
      n = 0;
    }
    close(c);
  }
}
