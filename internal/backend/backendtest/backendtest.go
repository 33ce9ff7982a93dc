// Package backendtest is what every backend must do: a suite that makes real
// machines with the real agent in them, uses, kills, loses and finds them
// again, and looks after each test whether anything is left on the host. It
// needs root, and says so instead of passing without.
//
// A backend's own test calls Run with a Kind. What a kind cannot do is said in
// its traits and shows in the log; no test is left out for another reason.
package backendtest

import (
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/kernflux/opendsec/internal/backend"
)

// Kind is a kind of backend under test.
type Kind struct {
	// Open opens the backend at a place, as an edge does when it starts. It is
	// called again for the same place after the one before was closed or its
	// process was killed. The suite closes what it returns.
	Open func(t testing.TB, p Place) backend.Backend
	// Crash ends a machine from outside as if it had died by itself, such as by
	// a kill of its first process.
	Crash func(t testing.TB, h backend.Handle)
	// Simulated says that the backend runs nothing: commands end at once with
	// no output, and no limit is enforced.
	Simulated bool
	// OutOfMemoryEnds says that a command that goes over the memory limit takes
	// the machine with it. Otherwise the kernel ends the command alone.
	OutOfMemoryEnds bool
}

// Place is where a backend works.
type Place struct {
	Log      *slog.Logger `json:"-"`
	StateDir string       // of the edge; absolute
	Prefix   string       // of names on the host
	Agent    backend.Agent
}

// tests are the suite in the order in which they run.
var tests = []struct {
	name string
	real bool // does not apply to a backend that runs nothing
	run  func(*env)
}{
	{"Probe", false, testProbe},
	{"Life", false, testLife},
	{"Commands", true, testCommands},
	{"Identity", true, testIdentity},
	{"ExactOutput", true, testExactOutput},
	{"Files", false, testFiles},
	{"Closed", true, testClosed},
	{"LimitsVisible", true, testLimitsVisible},
	{"MemoryLimit", true, testMemoryLimit},
	{"DiskLimit", true, testDiskLimit},
	{"PIDsLimit", true, testPIDsLimit},
	{"CPULimit", true, testCPULimit},
	{"Usage", false, testUsage},
	{"Death", false, testDeath},
	{"DestroyAnyTime", false, testDestroyAnyTime},
	{"SideBySide", false, testSideBySide},
	{"Recover", false, testRecover},
	{"RecoverAfterKill", false, testRecoverAfterKill},
	{"RecoverGone", false, testRecoverGone},
	{"RecoverForeign", false, testRecoverForeign},
	{"Cancelled", false, testCancelled},
	{"BadRootfs", true, testBadRootfs},
	{"FullStateDir", true, testFullStateDir},
	{"CreatorKilled", false, testCreatorKilled},
	{"Audit", false, testAudit},
	{"Cycles", false, testCycles},
}

// Run runs the suite.
func Run(t *testing.T, k Kind) {
	if job := os.Getenv(jobVariable); job != "" {
		create(t, k, job) // this process is a creator that a test started
		return
	}
	if os.Getuid() != 0 {
		t.Fatal("the tests of a backend make machines, which needs root")
	}
	shared := newMaterial(t, k)
	var not []string
	for _, test := range tests {
		if test.real && k.Simulated {
			not = append(not, test.name)
			continue
		}
		t.Run(test.name, func(t *testing.T) { test.run(newEnv(t, k, shared)) })
	}
	if len(not) > 0 {
		t.Logf("do not apply, because this backend runs nothing: %s", strings.Join(not, ", "))
	}
}
