// Files for the tests of saved ones: trees with all that a file can be, random
// changes to them, and sums that tell whether they are right.
#define _GNU_SOURCE
#include "files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/xattr.h>
#include <unistd.h>

static void die(const char *what, const char *path) {
  fprintf(stderr, "%s %s: %s\n", what, path, strerror(errno));
  _exit(3);
}

static uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return (x ^ (x >> 31)) + 0x9e3779b97f4a7c15ULL;
}

static uint64_t dice;

static unsigned roll(unsigned n) {
  dice = mix(dice);
  return dice % n;
}

static void put(const char *path, size_t size, uint64_t seed) {
  int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0644);
  if (fd < 0) die("create", path);
  char buf[4096];
  for (size_t at = 0; at < size;) {
    size_t n = size - at < sizeof buf ? size - at : sizeof buf;
    for (size_t i = 0; i < n; i++) buf[i] = mix(seed + at + i);
    if (write(fd, buf, n) != (ssize_t)n) die("write", path);
    at += n;
  }
  close(fd);
}

// An access list: the owner reads and writes, user 1000 and others read.
static const unsigned char acl[] = {2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 232, 3, 0, 0,
  4, 0, 4, 0, 255, 255, 255, 255, 16, 0, 4, 0, 255, 255, 255, 255, 32, 0, 4, 0, 255, 255, 255, 255};

enum { HELD = 16 };
static int held[HELD], n_held; // descriptors of files and directories, and locks

// One of each kind of thing that is not a plain file.
static void special(const char *dir) {
  char path[PATH_MAX], other[PATH_MAX], target[300];
#define IN(name) (snprintf(path, sizeof path, "%s/%s", dir, name), path)
#define BESIDE(name) (snprintf(other, sizeof other, "%s/%s", dir, name), other)
  put(IN("empty"), 0, 0);
  put(IN("big"), 3 << 20, 1);
  put(IN("sparse"), 1, 2);
  if (truncate(path, 64 << 20)) die("truncate", path);
  int fd = open(path, O_WRONLY);
  if (pwrite(fd, "x", 1, 40 << 20) != 1) die("write", path);
  close(fd);
  if (symlink("big", IN("link"))) die("link", path);
  memset(target, 'a', sizeof target - 1);
  target[sizeof target - 1] = 0;
  if (symlink(target, IN("long link"))) die("link", path);
  if (link(BESIDE("big"), IN("hard link"))) die("link", path);
  if (mkfifo(IN("fifo"), 0620)) die("make", path);
  put(IN("setuid"), 10, 3);
  if (chown(path, 7, 8) || chmod(path, 06751)) die("change", path);
  put(IN("old name"), 5000, 4);
  if (rename(path, BESIDE("new name"))) die("rename", path);
  put(IN("attributes"), 100, 5);
  if (setxattr(path, "user.one", "1", 1, 0) || setxattr(path, "user.empty", "", 0, 0)) die("set an attribute of", path);
  if (mkdir(IN("dir with attributes"), 01777) || setxattr(path, "user.dir", "yes", 3, 0)) die("set an attribute of", path);
  put(IN("access list"), 100, 6);
  if (setxattr(path, "system.posix_acl_access", acl, sizeof acl, 0)) die("set the access list of", path);
  if (mkdir(IN("dir with access list"), 0755) || setxattr(path, "system.posix_acl_default", acl, sizeof acl, 0)) die("set the access list of", path);
  put(BESIDE("dir with access list/inherits"), 100, 7);
  struct timespec times[2] = {{1000000000, 5}, {-77, 999999999}};
  put(IN("old"), 10, 8);
  if (utimensat(AT_FDCWD, path, times, 0)) die("set the times of", path);
  struct sockaddr_un at = {.sun_family = AF_UNIX};
  snprintf(at.sun_path, sizeof at.sun_path, "%s/socket", dir);
  if (bind(socket(AF_UNIX, SOCK_STREAM, 0), (struct sockaddr *)&at, sizeof at)) die("bind", at.sun_path);
  // Files that somebody has open, has locked, has mapped, and such without a name.
  put(IN("open"), 9000, 9);
  held[n_held++] = open(path, O_RDWR | O_APPEND);
  put(IN("unlinked"), 9000, 10);
  held[n_held++] = open(path, O_RDWR);
  if (unlink(path)) die("unlink", path);
  put(IN("locked"), 10, 11);
  held[n_held++] = open(path, O_RDWR);
  if (flock(held[n_held - 1], LOCK_EX)) die("lock", path);
  put(IN("mapped"), 8192, 12);
  fd = open(path, O_RDWR);
  char *map = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) die("map", path);
  map[5000] = 1;
  close(fd);
}

// Makes a tree of so many plain files of about size bytes, a hundred in each directory.
void files_make(const char *dir, int n, int size) {
  char path[PATH_MAX];
  if (mkdir(dir, 0755) && errno != EEXIST) die("make", dir);
  special(dir);
  for (int i = 0; i < n; i++) {
    if (i % 100 == 0 && (snprintf(path, sizeof path, "%s/d%d", dir, i / 100), mkdir(path, 0755))) die("make", path);
    snprintf(path, sizeof path, "%s/d%d/f%d", dir, i / 100, (int)(mix(i) % 1000) * n + i); // in no order
    put(path, size ? mix(i + 7) % (2 * size) : 0, i);
  }
}

static uint64_t add(uint64_t h, const void *data, size_t n) {
  const unsigned char *b = data;
  for (size_t i = 0; i < n; i++) h = (h ^ b[i]) * 1099511628211ULL;
  return h;
}

static uint64_t add_file(uint64_t h, int fd) {
  static char buf[1 << 16];
  off_t size = lseek(fd, 0, SEEK_END);
  for (off_t at = 0; at < size;) { // data only: a sparse file is read quickly
    off_t data = lseek(fd, at, SEEK_DATA);
    if (data < 0) break;
    ssize_t got = pread(fd, buf, sizeof buf, data);
    if (got <= 0) break;
    for (ssize_t i = 0; i < got; i++)
      if (buf[i]) h += mix((uint64_t)(data + i) * 256 + (unsigned char)buf[i]);
    at = data + got;
  }
  return add(h, &size, sizeof size);
}

static uint64_t add_attributes(uint64_t h, const char *path) {
  char names[4096], value[4096];
  ssize_t n = llistxattr(path, names, sizeof names);
  uint64_t all = 0; // they have no order
  for (char *name = names; n > 0 && name < names + n; name += strlen(name) + 1) {
    ssize_t len = lgetxattr(path, name, value, sizeof value);
    all += add(add(1, name, strlen(name)), value, len > 0 ? len : 0);
  }
  return add(h, &all, sizeof all);
}

static int with_atime;

static uint64_t add_tree(uint64_t h, const char *path) {
  struct stat st;
  if (lstat(path, &st)) die("look at", path);
  // No device number: a file system may get another.
  uint64_t f[] = {st.st_ino, st.st_mode, st.st_nlink, st.st_uid, st.st_gid, st.st_size, st.st_blocks, st.st_rdev,
    st.st_mtim.tv_sec, st.st_mtim.tv_nsec, st.st_ctim.tv_sec, st.st_ctim.tv_nsec,
    with_atime ? st.st_atim.tv_sec : 0, with_atime ? st.st_atim.tv_nsec : 0};
  h = add_attributes(add(add(h, path, strlen(path)), f, sizeof f), path);
  char text[PATH_MAX];
  if (S_ISLNK(st.st_mode)) return add(h, text, readlink(path, text, sizeof text));
  if (S_ISREG(st.st_mode)) {
    int fd = open(path, O_RDONLY);
    if (fd < 0) die("open", path);
    h = add_file(h, fd);
    close(fd);
    return h;
  }
  if (!S_ISDIR(st.st_mode)) return h;
  DIR *d = opendir(path);
  if (!d) die("open", path);
  for (struct dirent *e; (e = readdir(d));) { // in the order in which it says them
    if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
    h = add(h, &e->d_type, sizeof e->d_type);
    snprintf(text, sizeof text, "%s/%s", path, e->d_name);
    h = add_tree(h, text);
  }
  closedir(d);
  return h;
}

// A sum of a tree, all that is to be seen of it; and of what is held open.
uint64_t files_sum(const char *dir, int atime) {
  with_atime = atime;
  uint64_t h = add_tree(14695981039346656037ULL, dir);
  for (int i = 0; i < n_held; i++) h = add_file(h, held[i]);
  return h;
}

// Whether another can lock the file that we have locked. It must not.
int files_locked(const char *dir) {
  char path[PATH_MAX];
  int fd = open(IN("locked"), O_RDWR), taken = fd < 0 || !flock(fd, LOCK_EX | LOCK_NB);
  close(fd);
  return !taken;
}

// Reads on in a directory that was opened with the first call.
uint64_t files_read_on(const char *dir, int n) {
  static DIR *d;
  if (!d && !(d = opendir(dir))) die("open", dir);
  uint64_t h = 1;
  for (struct dirent *e; n-- > 0 && (e = readdir(d));) h = add(add(h, e->d_name, strlen(e->d_name)), &e->d_ino, sizeof e->d_ino);
  return h;
}

// Random changes. Names are few, so that they meet.
void files_mess(const char *dir, uint64_t seed, int n) {
  char a[PATH_MAX], b[PATH_MAX];
  dice = seed;
  while (n-- > 0) {
    snprintf(a, sizeof a, "%s/m%u/n%u", dir, roll(6), roll(40));
    snprintf(b, sizeof b, "%s/m%u/n%u", dir, roll(6), roll(40));
    switch (roll(16)) {
      case 0: unlink(a); break;
      case 1: rename(a, b); break;
      case 2: (void)!link(a, b); break;
      case 3: (void)!symlink(b, a); break;
      case 4: (void)!truncate(a, roll(3) ? roll(20000) : roll(1 << 22)); break;
      case 5: chmod(a, 0600 + roll(0200)); break;
      case 6: (void)!lchown(a, roll(9), roll(9)); break;
      case 7: lsetxattr(a, roll(2) ? "user.a" : "user.b", &dice, roll(9), 0); break;
      case 8: lremovexattr(a, "user.a"); break;
      case 9: (void)!setxattr(a, "system.posix_acl_access", acl, sizeof acl, 0); break;
      case 10: mknod(a, S_IFIFO | 0600, 0); break;
      case 11: // a directory, or none
        *strrchr(a, '/') = 0;
        if (mkdir(a, 0755)) rmdir(a);
        break;
      case 12: { // hold another one open
        int fd = open(a, O_RDWR | O_CREAT | O_NONBLOCK, 0600), i = roll(HELD);
        struct stat st;
        if (fd < 0) break;
        if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
          close(fd);
          break;
        }
        if (i < n_held) {
          close(held[i]);
          held[i] = fd;
        } else {
          held[n_held++] = fd;
        }
        break;
      }
      default: { // write somewhere
        *strrchr(a, '/') = 0;
        mkdir(a, 0755);
        a[strlen(a)] = '/';
        int fd = open(a, O_RDWR | O_CREAT | O_NONBLOCK | O_NOFOLLOW, 0644);
        struct stat st;
        if (fd < 0) break;
        char buf[6000];
        for (size_t i = 0; i < sizeof buf; i++) buf[i] = mix(dice + i);
        if (!fstat(fd, &st) && S_ISREG(st.st_mode)) (void)!pwrite(fd, buf, roll(sizeof buf), roll(30000));
        close(fd);
      }
    }
  }
}
