package daemon

import (
	"math"

	"golang.org/x/sys/unix"
)

// KeepFiles sees to it that no file that this process has inherited, beyond
// standard input and output, goes on to the programs it starts. Shells and
// supervisors leave such files open, and a tool that is given them may fail
// (dash knows descriptors of one digit only) or hold a pipe open for ever.
// Call it first thing in main.
func KeepFiles() error {
	return unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC)
}
