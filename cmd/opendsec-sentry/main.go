// Command opendsec-sentry is gVisor's sentry, the user-space kernel of one
// sandbox. The gvisor backend starts it with flags of gVisor's own "runsc
// boot"; it is of no use by hand. It differs from runsc in two things that make
// it start sooner: its seccomp program is compiled ahead, and it collects no
// garbage before it has some.
//
// It must be built without cgo: it runs itself again inside an empty root.
package main

import (
	"math"
	"runtime"
	"runtime/debug"

	"github.com/google/subcommands"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/gvisorbinaries"

	"github.com/kernflux/opendsec/cmd/opendsec-sentry/filters"
)

func main() {
	delayGC()
	filters.Register()
	cli.Run(&gvisorbinaries.GvisorSentry, map[util.SubCommand]string{
		new(sentrycmd.Boot):   "",
		new(sentrycmd.Umount): "",
	}, []subcommands.Command{})
}

const (
	firstGC  = 64 << 20 // bytes of heap at which garbage is collected first
	usualGC  = 200      // percent, from then on
	noLimit  = math.MaxInt64
	disabled = -1
)

// delayGC keeps the garbage collector away from the start, which it makes a
// tenth slower, until the first 64 MiB are in use. Then it works as usual: a
// low limit for good would make it run without end in a large sandbox.
func delayGC() {
	debug.SetGCPercent(disabled)
	debug.SetMemoryLimit(firstGC)
	// The collector finds this object unreachable in its first run.
	runtime.AddCleanup(new([64]byte), func(struct{}) {
		debug.SetGCPercent(usualGC)
		debug.SetMemoryLimit(noLimit)
	}, struct{}{})
}
