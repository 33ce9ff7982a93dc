#include <stdint.h>

void files_make(const char *dir, int n, int size);
uint64_t files_sum(const char *dir, int atime);
int files_locked(const char *dir);
uint64_t files_read_on(const char *dir, int n);
void files_mess(const char *dir, uint64_t seed, int n);
