package container

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/backendtest"
	"github.com/kernflux/opendsec/internal/ocispec"
)

// kindOf describes the backend with a runtime, "" for the one that it chooses,
// and a pool.
func kindOf(runtime string, pool int) backendtest.Kind {
	return backendtest.Kind{
		Open: func(t testing.TB, p backendtest.Place) backend.Backend {
			t.Helper()
			b, err := Open(Options{
				Log: p.Log, StateDir: p.StateDir, Prefix: p.Prefix, Agent: p.Agent, Runtime: runtime, Slots: backendtest.Slots(t, p), Ready: pool,
			})
			if err != nil {
				t.Fatal(err)
			}
			return b
		},
		Crash: crash,
	}
}

// crash kills a container's first process.
func crash(t testing.TB, h backend.Handle) {
	t.Helper()
	var r record
	if err := json.Unmarshal(h.Data, &r); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(r.Process.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

func TestBackend(t *testing.T) { backendtest.Run(t, kindOf("", 0)) }

// TestBackendOnRunc runs the suite on the runtime that is there on most
// machines, and that TestBackend may not have chosen, with containers made ahead.
func TestBackendOnRunc(t *testing.T) { backendtest.Run(t, kindOf("runc", 2)) }

// machine makes a container that is destroyed at the test's end, and returns
// the host's number of its first process, which is the agent by then.
func machine(t *testing.T) (*instance, int) {
	t.Helper()
	h := newHost(t, t.TempDir())
	i := h.create(trialLimits, nil)
	if err := i.answers(t.Context()); err != nil {
		t.Fatal(err)
	}
	return i, i.process.PID
}

// TestConfinement looks from outside at what holds a container in.
func TestConfinement(t *testing.T) {
	_, pid := machine(t)
	proc := fmt.Sprintf("/proc/%d/", pid)
	status, err := os.ReadFile(proc + "status")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"Seccomp:\t2\n", // filtered
		"CapBnd:\t00000000a80425fb\n", "CapEff:\t00000000a80425fb\n", "CapInh:\t0000000000000000\n", "CapAmb:\t0000000000000000\n",
	} {
		if !strings.Contains(string(status), want) {
			t.Errorf("the agent's status has no %q:\n%s", want, status)
		}
	}
	for _, ns := range []string{"cgroup", "ipc", "mnt", "net", "pid", "uts"} {
		inside, err := os.Readlink(proc + "ns/" + ns)
		host, herr := os.Readlink("/proc/self/ns/" + ns)
		if err != nil || herr != nil || inside == host {
			t.Errorf("the %s namespace is %s inside and %s on the host; %v, %v", ns, inside, host, err, herr)
		}
	}
	mounts, err := os.ReadFile(proc + "mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	options := map[string]string{}
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		options[f[4]] = f[5] + ","
	}
	for _, at := range []string{"/sys", "/proc/sys", backend.AgentDir} {
		if !strings.HasPrefix(options[at], "ro,") {
			t.Errorf("%s is mounted with %q", at, options[at])
		}
	}
	for at, o := range options {
		// On v1 the directory above the hierarchies is a small tmpfs.
		if strings.HasPrefix(at, "/sys/fs/cgroup/") && !strings.HasPrefix(o, "ro,") {
			t.Errorf("limits can be changed: %s is mounted with %q", at, o)
		}
	}
	for _, at := range ocispec.Build(ocispec.Options{}).Linux.MaskedPaths {
		if _, err := os.Stat(at); err == nil && options[at] == "" {
			t.Errorf("%s is not hidden", at)
		}
	}
	for at := range options {
		for _, open := range []string{"/", "/proc", "/dev", "/sys", "/proc/", "/dev/", "/sys/", backend.AgentDir} {
			if at == open || strings.HasSuffix(open, "/") && strings.HasPrefix(at, open) && open != "/" {
				delete(options, at)
			}
		}
	}
	if len(options) > 0 {
		t.Errorf("the container has mounts that it should not have: %v", options)
	}
	if to, err := os.Readlink(proc + "fd/1"); err != nil || to != "/dev/null" {
		t.Errorf("the agent's output goes to %s, %v", to, err)
	}
	files, err := os.ReadDir(proc + "fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		to, err := os.Readlink(proc + "fd/" + f.Name())
		if err == nil && to != "/dev/null" && !strings.HasPrefix(to, "socket:") && !strings.HasPrefix(to, "anon_inode:") && !strings.HasPrefix(to, "pipe:") && !strings.HasPrefix(to, "/sys/fs/cgroup/") && !strings.HasPrefix(to, "/proc/") {
			t.Errorf("the agent has %s open", to)
		}
	}
}
