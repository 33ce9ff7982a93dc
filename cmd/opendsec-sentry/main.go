// Command opendsec-sentry is gVisor's sentry, the user-space kernel of one
// sandbox. The gvisor backend starts it with flags of gVisor's own "runsc
// boot"; it is of no use by hand. It differs from runsc in two things that make
// it start sooner: its seccomp program is compiled ahead, and it collects no
// garbage before it has some. It gives memory back soon after a snapshot, which
// makes much garbage at once. Its version, which a snapshot must share with the
// sentry that it is restored in, names gVisor's module.
//
// It must be built without cgo: it runs itself again inside an empty root.
package main

import (
	"math"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
	_ "unsafe" // for go:linkname

	"github.com/google/subcommands"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/gvisorbinaries"

	"github.com/kernflux/opendsec/cmd/opendsec-sentry/filters"
)

func main() {
	delayGC()
	go tidy() // as long as the process
	filters.Register()
	runtimeVersion = fullVersion(runtimeVersion)
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

// How often tidy looks, and from how many bytes on it does something.
const (
	tidyEvery = 10 * time.Second
	tidyFrom  = 16 << 20
)

// tidy gives the host memory back that is garbage or free. A sentry that is
// idle would keep it for ever: the runtime collects when there is more to do.
func tidy() {
	samples := []metrics.Sample{
		{Name: "/memory/classes/heap/objects:bytes"}, // live and garbage
		{Name: "/memory/classes/heap/free:bytes"},
		{Name: "/gc/heap/live:bytes"}, // after the last collection
	}
	for range time.Tick(tidyEvery) {
		metrics.Read(samples)
		have := samples[0].Value.Uint64() + samples[1].Value.Uint64()
		if have > samples[2].Value.Uint64()+tidyFrom {
			debug.FreeOSMemory()
		}
	}
}

// revision is part of the version. It changes when the sentry does so that it
// cannot take up what an earlier one wrote down.
const revision = "opendsec.1"

// gVisor writes this string into a snapshot and refuses one with another.
//
//go:linkname runtimeVersion gvisor.dev/gvisor/runsc/version.version
var runtimeVersion string

// unnamed is gVisor's own word for a version that the linker was not told.
const unnamed = "VERSION_MISSING"

// module is gVisor's.
const module = "gvisor.dev/gvisor"

// fullVersion returns the version of a program that the linker was told the
// version linked. The build's record of modules says it too.
func fullVersion(linked string) string {
	if linked == "" || linked == unnamed {
		linked = recorded()
	}
	return linked + "+" + revision
}

// recorded returns the version of gVisor's module in this program.
func recorded() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return unnamed
	}
	for _, m := range info.Deps {
		if m.Path == module && m.Replace != nil {
			return m.Version + "=" + m.Replace.Path + "@" + m.Replace.Version
		}
		if m.Path == module {
			return m.Version
		}
	}
	return unnamed
}
