#define _GNU_SOURCE
#include "waits.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/ipc.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LONG_MS 4000   // what waits with an end take
#define LATE_MS 10000  // how much later that may be noticed

static void die(const char *what) {
  perror(what);
  _exit(3);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static struct timespec after(double ms) {
  return (struct timespec){(time_t)(ms / 1000), (long)(ms * 1e6) % 1000000000};
}

// A thread that waits. wait returns whether it was told what it should be; wake
// lets it go on, and is not needed by one that ends by itself.
typedef struct waiter {
  const char *name;
  int (*wait)(struct waiter *);
  void (*wake)(struct waiter *);
  pthread_t thread;
  atomic_int tid;
  int fd[2];
  int id;
  double begin;
  int right;
} waiter;

static atomic_int signals[65];
static void count(int sig) { signals[sig]++; }

// Linux ends some of these calls with EINTR after a stop signal, without a handler;
// see signal(7). A save may, and msgrcv too.
#define TILL_TOLD(call)                             \
  ({                                                \
    long got_;                                      \
    do got_ = (call);                               \
    while (got_ == -1 && errno == EINTR);           \
    got_;                                           \
  })

static int in_time(waiter *w) {
  double took = now() - w->begin;
  return took >= LONG_MS && took < LONG_MS + LATE_MS;
}

static void wake_by_byte(waiter *w) {
  if (write(w->fd[1], "x", 1) != 1) die("write");
}

static int wait_read(waiter *w) {
  char c = 0;
  return read(w->fd[0], &c, 1) == 1 && c == 'x';
}

static int wait_read_filtered(waiter *w) {
  struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getppid, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EXDEV),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof code / sizeof *code, code};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) return 0;
  return wait_read(w) && syscall(SYS_getppid) == -1 && errno == EXDEV;
}

static void wake_by_signal_and_byte(waiter *w) {
  int before = signals[SIGALRM];
  pthread_kill(w->thread, SIGALRM); // which the call survives
  while (signals[SIGALRM] == before) sched_yield();
  wake_by_byte(w);
}

static int wait_poll(waiter *w) {
  struct pollfd p = {w->fd[0], POLLIN, 0};
  return poll(&p, 1, -1) == 1 && p.revents & POLLIN;
}

static int wait_poll_end(waiter *w) {
  struct pollfd p = {w->fd[0], POLLIN, 0};
  return poll(&p, 1, LONG_MS) == 0 && in_time(w);
}

static int wait_select_end(waiter *w) {
  fd_set set;
  FD_ZERO(&set);
  FD_SET(w->fd[0], &set);
  struct timeval t = {LONG_MS / 1000, LONG_MS % 1000 * 1000};
  return select(w->fd[0] + 1, &set, NULL, NULL, &t) == 0 && in_time(w);
}

static int wait_receive_end(waiter *w) {
  struct timeval t = {LONG_MS / 1000, LONG_MS % 1000 * 1000};
  char c;
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, w->fd) || setsockopt(w->fd[0], SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t)) return 0;
  return recv(w->fd[0], &c, 1, 0) == -1 && errno == EAGAIN && in_time(w);
}

static int wait_sleep(waiter *w) {
  struct timespec t = after(LONG_MS);
  return nanosleep(&t, NULL) == 0 && in_time(w);
}

static int wait_sleep_until(waiter *w) {
  struct timespec t = after(w->begin + LONG_MS);
  return clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == 0 && in_time(w);
}

static int wait_sleep_broken(waiter *w) {
  struct timespec t = after(100 * LONG_MS), rest = {0, 0};
  if (nanosleep(&t, &rest) != -1 || errno != EINTR) return 0;
  double slept = 100 * LONG_MS - (rest.tv_sec * 1e3 + rest.tv_nsec / 1e6), took = now() - w->begin;
  return slept > took - LATE_MS && slept <= took + 1;
}

static void wake_by_hup(waiter *w) { pthread_kill(w->thread, SIGHUP); }

static int word;

static int wait_futex(waiter *w) {
  (void)w;
  return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0) == 0 && word == 1;
}

static void wake_futex(waiter *w) {
  (void)w;
  word = 1;
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

static int wait_futex_end(waiter *w) {
  int mine = 0;
  struct timespec t = after(LONG_MS);
  return syscall(SYS_futex, &mine, FUTEX_WAIT_PRIVATE, 0, &t, NULL, 0) == -1 && errno == ETIMEDOUT && in_time(w);
}

static int wait_epoll(waiter *w) {
  struct epoll_event e = {.events = EPOLLIN, .data.u32 = 77}, got = {0};
  int ep = epoll_create1(0);
  w->fd[1] = eventfd(0, 0);
  if (epoll_ctl(ep, EPOLL_CTL_ADD, w->fd[1], &e)) return 0;
  return TILL_TOLD(epoll_wait(ep, &got, 1, -1)) == 1 && got.data.u32 == 77;
}

static void wake_eventfd(waiter *w) {
  unsigned long long one = 1;
  if (write(w->fd[1], &one, sizeof one) != sizeof one) die("write");
}

static struct sockaddr_un at = {AF_UNIX, "/tmp/waits"};

static int wait_accept(waiter *w) {
  int s = socket(AF_UNIX, SOCK_STREAM, 0);
  (void)w;
  unlink(at.sun_path);
  if (bind(s, (struct sockaddr *)&at, sizeof at) || listen(s, 1)) return 0;
  return accept(s, NULL, NULL) >= 0;
}

static void wake_accept(waiter *w) {
  (void)w;
  int s = socket(AF_UNIX, SOCK_STREAM, 0);
  if (connect(s, (struct sockaddr *)&at, sizeof at)) die("connect");
}

static const char locked[] = "/tmp/waits-lock";

static int wait_flock(waiter *w) {
  (void)w;
  int f = open(locked, O_RDWR);
  return flock(f, LOCK_EX) == 0 && flock(f, LOCK_UN) == 0;
}

static void wake_flock(waiter *w) { flock(w->fd[0], LOCK_UN); }

static int wait_lock(waiter *w) {
  (void)w;
  struct flock l = {.l_type = F_WRLCK};
  int f = open(locked, O_RDWR);
  return fcntl(f, F_SETLKW, &l) == 0;
}

static void wake_by_killing(waiter *w) { kill(w->id, SIGKILL); }

static int wait_child(waiter *w) {
  int status = 0;
  return waitpid(w->id, &status, 0) == w->id && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

static int wait_suspend(waiter *w) {
  sigset_t set, is;
  (void)w;
  pthread_sigmask(SIG_SETMASK, NULL, &set);
  sigdelset(&set, SIGUSR1);
  int broken = sigsuspend(&set) == -1 && errno == EINTR && signals[SIGUSR1] == 1;
  pthread_sigmask(SIG_SETMASK, NULL, &is);
  return broken && sigismember(&is, SIGUSR1);
}

static void wake_by_usr1(waiter *w) { pthread_kill(w->thread, SIGUSR1); }

static int wait_signal(waiter *w) {
  sigset_t set;
  (void)w;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR2);
  struct timespec t = after(100 * LONG_MS);
  return TILL_TOLD(sigtimedwait(&set, NULL, &t)) == SIGUSR2;
}

static void wake_by_usr2(waiter *w) { pthread_kill(w->thread, SIGUSR2); }

static int wait_semaphore(waiter *w) {
  struct sembuf down = {0, -1, 0};
  return TILL_TOLD(semop(w->id, &down, 1)) == 0;
}

static void wake_semaphore(waiter *w) {
  struct sembuf up = {0, 1, 0};
  if (semop(w->id, &up, 1)) die("semop");
}

typedef struct {
  long type;
  char text[4];
} message;

static int wait_message(waiter *w) {
  message m = {0};
  return TILL_TOLD(msgrcv(w->id, &m, sizeof m.text, 0, 0)) == 4 && !memcmp(m.text, "told", 4);
}

static void wake_message(waiter *w) {
  message m = {1, "told"};
  if (msgsnd(w->id, &m, sizeof m.text, 0)) die("msgsnd");
}

static waiter waiters[] = {
    {.name = "read", .wait = wait_read, .wake = wake_by_byte},
    {.name = "read under a filter", .wait = wait_read_filtered, .wake = wake_by_byte},
    {.name = "read over a signal", .wait = wait_read, .wake = wake_by_signal_and_byte},
    {.name = "poll", .wait = wait_poll, .wake = wake_by_byte},
    {.name = "poll to its end", .wait = wait_poll_end},
    {.name = "select to its end", .wait = wait_select_end},
    {.name = "receive to its end", .wait = wait_receive_end},
    {.name = "sleep", .wait = wait_sleep},
    {.name = "sleep until", .wait = wait_sleep_until},
    {.name = "sleep that a signal ends", .wait = wait_sleep_broken, .wake = wake_by_hup},
    {.name = "futex", .wait = wait_futex, .wake = wake_futex},
    {.name = "futex to its end", .wait = wait_futex_end},
    {.name = "epoll", .wait = wait_epoll, .wake = wake_eventfd},
    {.name = "accept", .wait = wait_accept, .wake = wake_accept},
    {.name = "lock of a file", .wait = wait_flock, .wake = wake_flock},
    {.name = "lock of a range", .wait = wait_lock, .wake = wake_by_killing},
    {.name = "child", .wait = wait_child, .wake = wake_by_killing},
    {.name = "signal with a mask", .wait = wait_suspend, .wake = wake_by_usr1},
    {.name = "signal", .wait = wait_signal, .wake = wake_by_usr2},
    {.name = "semaphore", .wait = wait_semaphore, .wake = wake_semaphore},
    {.name = "message", .wait = wait_message, .wake = wake_message},
};
#define N (sizeof waiters / sizeof *waiters)

static void *run(void *arg) {
  waiter *w = arg;
  w->begin = now();
  w->tid = syscall(SYS_gettid);
  w->right = w->wait(w);
  return NULL;
}

// What each needs before it begins.
static void prepare(waiter *w) {
  if (pipe(w->fd)) die("pipe");
  if (w->wait == wait_flock) {
    w->fd[0] = open(locked, O_RDWR | O_CREAT, 0600);
    if (flock(w->fd[0], LOCK_EX)) die("flock");
  }
  if (w->wait == wait_semaphore) w->id = semget(IPC_PRIVATE, 1, 0600);
  if (w->wait == wait_message) w->id = msgget(IPC_PRIVATE, 0600);
  if (w->wait != wait_child && w->wait != wait_lock) return;
  w->id = fork();
  if (w->id == 0) {
    struct flock l = {.l_type = F_WRLCK};
    if (w->wait == wait_lock && fcntl(open(locked, O_RDWR | O_CREAT, 0600), F_SETLK, &l)) die("lock");
    if (write(w->fd[1], "r", 1) != 1) die("write");
    for (;;) pause();
  }
  char c;
  if (read(w->fd[0], &c, 1) != 1) die("read");
}

// Whether a thread waits in a call.
static int waits(waiter *w) {
  char path[64], line[256] = "";
  if (!w->tid) return 0;
  snprintf(path, sizeof path, "/proc/self/task/%d/stat", w->tid);
  FILE *f = fopen(path, "r");
  if (!f) die(path);
  if (!fgets(line, sizeof line, f)) die(path);
  fclose(f);
  return strrchr(line, ')')[2] == 'S';
}

void waits_begin(void) {
  sigset_t blocked;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGUSR1);
  sigaddset(&blocked, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &blocked, NULL);
  struct sigaction a = {.sa_handler = count};
  if (sigaction(SIGUSR1, &a, NULL) || sigaction(SIGHUP, &a, NULL)) die("sigaction");
  a.sa_flags = SA_RESTART;
  if (sigaction(SIGALRM, &a, NULL)) die("sigaction");
  for (size_t i = 0; i < N; i++) prepare(&waiters[i]);
  for (size_t i = 0; i < N; i++)
    if (pthread_create(&waiters[i].thread, NULL, run, &waiters[i])) die("thread");
  for (size_t i = 0; i < N; i++)
    while (!waits(&waiters[i])) usleep(1000);
}

void waits_end(char *said, size_t size) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += (LONG_MS + LATE_MS) / 1000;
  said[0] = 0;
  for (size_t i = 0; i < N; i++)
    if (waiters[i].wake) waiters[i].wake(&waiters[i]);
  for (size_t i = 0; i < N; i++) {
    waiter *w = &waiters[i];
    const char *wrong = pthread_timedjoin_np(w->thread, NULL, &until) ? "waits yet" : w->right ? NULL : "was told something else";
    if (wrong) snprintf(said + strlen(said), size - strlen(said), "%s %s; ", w->name, wrong);
  }
  if (!said[0]) snprintf(said, size, "ok");
}
