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

// stateTests are the part of the suite for what a backend's Features say.
var stateTests = []struct {
	name  string
	real  bool // does not apply to a backend that runs nothing
	needs func(backend.Features) bool
	run   func(*env)
}{
	{"Features", false, always, testFeatures},
	{"Pause", false, pauses, testPause},
	{"PauseAtOnce", false, pauses, testPauseAtOnce},
	{"PauseRecover", false, pauses, testPauseRecover},
	{"PauseKilled", false, pauses, testPauseKilled},
	{"PauseDestroy", false, pauses, testPauseDestroy},
	{"PauseGone", false, pauses, testPauseGone},
	{"Snapshot", false, snapshots, testSnapshot},
	{"SnapshotPaused", false, snapshotsPaused, testSnapshotPaused},
	{"SnapshotSideBySide", false, snapshots, testSnapshotSideBySide},
	{"SnapshotFullDisk", false, snapshots, testSnapshotFullDisk},
	{"SnapshotCancelled", false, snapshots, testSnapshotCancelled},
	{"SnapshotKilled", false, snapshots, testSnapshotKilled},
	{"SnapshotKilledPaused", false, snapshotsPaused, testSnapshotKilledPaused},
	{"SnapshotGone", false, snapshots, testSnapshotGone},
	{"Restore", false, snapshots, testRestore},
	{"RestoreMemory", true, snapshotsMemory, testRestoreMemory},
	{"RestoreIdentity", false, snapshotsMemory, testRestoreIdentity},
	{"RestoreClock", true, snapshotsMemory, testRestoreClock},
	{"RestoreConnections", true, snapshotsMemory, testRestoreConnections},
	{"RestoreCompatible", false, snapshotsMemory, testRestoreCompatible},
	{"RestoreFiles", true, snapshotsFiles, testRestoreFiles},
	{"RestoreSideBySide", false, snapshots, testRestoreSideBySide},
	{"RestoreGenerations", false, snapshots, testRestoreGenerations},
	{"RestoreRecover", false, snapshots, testRestoreRecover},
	{"RestoreLimits", true, snapshots, testRestoreLimits},
	{"RestoreDamaged", false, snapshots, testRestoreDamaged},
	{"RestoreFullStateDir", true, snapshots, testRestoreFullStateDir},
	{"RestoreCancelled", false, snapshots, testRestoreCancelled},
	{"RestoreCycles", false, snapshots, testRestoreCycles},
	{"Diff", false, snapshotsFiles, testDiff},
	{"DiffTree", true, snapshotsFiles, testDiffTree},
	{"DiffFullDisk", false, snapshotsFiles, testDiffFullDisk},
}

func always(backend.Features) bool            { return true }
func pauses(f backend.Features) bool          { return f.Pause }
func snapshotsMemory(f backend.Features) bool { return f.SnapshotMemory }
func snapshotsFiles(f backend.Features) bool  { return f.SnapshotFiles }
func snapshots(f backend.Features) bool       { return f.SnapshotMemory || f.SnapshotFiles }
func snapshotsPaused(f backend.Features) bool { return f.Pause && snapshots(f) }

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
	can := features(t, k, shared)
	var nothing, unable []string
	one := func(name string, real, able bool, run func(*env)) {
		switch {
		case real && k.Simulated:
			nothing = append(nothing, name)
		case !able:
			unable = append(unable, name)
		default:
			t.Run(name, func(t *testing.T) {
				e := newEnv(t, k, shared)
				e.can = can
				run(e)
			})
		}
	}
	for _, test := range tests {
		one(test.name, test.real, true, test.run)
	}
	for _, test := range stateTests {
		one(test.name, test.real, test.needs(can), test.run)
	}
	if len(nothing) > 0 {
		t.Logf("do not apply, because this backend runs nothing: %s", strings.Join(nothing, ", "))
	}
	if len(unable) > 0 {
		t.Logf("do not apply, because this backend's features are %+v: %s", can, strings.Join(unable, ", "))
	}
}

// features asks the backend what it can do.
func features(t *testing.T, k Kind, shared material) backend.Features {
	t.Helper()
	e := newEnv(t, k, shared)
	defer e.end()
	can, err := e.backend.Probe(e.ctx)
	if err != nil {
		t.Fatalf("the backend does not work here: %v", err)
	}
	return can
}
