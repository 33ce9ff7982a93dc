// Threads that wait in all kinds of system calls, to see that a save, a restore
// and a fork in the middle are not noticed.
#include <stddef.h>

// Starts them, and returns when each waits.
void waits_begin(void);

// Lets each go on. Writes "ok", or which of them were not told what they should.
void waits_end(char *said, size_t size);
