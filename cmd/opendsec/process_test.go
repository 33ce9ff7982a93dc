package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/gvisor/patch"
	"github.com/kernflux/opendsec/internal/ctl"
	"github.com/kernflux/opendsec/internal/image/imagetest"
	"github.com/kernflux/opendsec/internal/program/install"
	"github.com/kernflux/opendsec/internal/testenv"
)

// programs is the directory of the built programs.
var programs string

func TestMain(m *testing.M) { os.Exit(buildAndRun(m)) }

func buildAndRun(m *testing.M) int {
	if programs = os.Getenv("OPENDSEC_BIN"); programs != "" {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "opendsec-cmd-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	programs = dir
	build := exec.Command("go", "build", "-o", dir+"/", ".", "../opendsec-agent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build: %v\n%s", err, out)
		return 1
	}
	if err := patch.Build(filepath.Join(dir, "opendsec-sentry"), ""); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// host is an installation of the test's, run by the real program.
type host struct {
	t          *testing.T
	ops, state string
	port       int
}

func newHost(t *testing.T) *host {
	dir, err := os.MkdirTemp("/var/tmp", "opendsec-cmd-") // t.TempDir may be on a file system that cannot hold machines
	if err != nil {
		t.Fatal(err)
	}
	m := &host{t: t, ops: filepath.Join(dir, "ops"), state: filepath.Join(dir, "state"), port: testenv.FreePorts(t, 3)}
	t.Cleanup(func() {
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(m.state, "opendsec.log"))
			t.Logf("the log:\n%s", log[max(0, len(log)-6000):])
		}
		if _, err := install.Load(m.ops); err == nil {
			m.ok("down", "--ops", m.ops, "--remove-all")
			m.nothingLeft()
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return m
}

// run runs opendsec and returns what it printed and its exit code.
func (m *host) run(args ...string) (string, int) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(programs, "opendsec"), args...)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		m.t.Fatalf("opendsec %v: %v", args, err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

func (m *host) ok(args ...string) string {
	m.t.Helper()
	out, code := m.run(args...)
	if code != 0 {
		m.t.Fatalf("opendsec %v: exit code %d: %s", args, code, out)
	}
	return out
}

// fails runs opendsec, which must fail with one line that has all the words.
func (m *host) fails(args []string, words ...string) {
	m.t.Helper()
	out, code := m.run(args...)
	if code != 1 || strings.Count(out, "\n") != 1 || !strings.HasPrefix(out, "opendsec: ") {
		m.t.Errorf("opendsec %v: exit code %d, %q; want 1 and one line", args, code, out)
	}
	for _, w := range words {
		if !strings.Contains(out, w) {
			m.t.Errorf("opendsec %v: %q; want %q in it", args, out, w)
		}
	}
}

func (m *host) up() []string {
	return []string{"up", "--detach", "--ops", m.ops, "--state", m.state, "--listen", net.JoinHostPort("127.0.0.1", strconv.Itoa(m.port))}
}

func (m *host) pid() int {
	m.t.Helper()
	b, err := os.ReadFile(filepath.Join(m.state, "opendsec.pid"))
	if err != nil {
		m.t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		m.t.Fatal(err)
	}
	return pid
}

// kill ends the servers as a crash would, and returns when they are gone.
func (m *host) kill() {
	m.t.Helper()
	p, err := os.FindProcess(m.pid())
	if err == nil {
		err = p.Kill()
	}
	if err != nil {
		m.t.Fatal(err)
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(time.Minute); ; <-tick.C {
		// It is a child of the machine's init, which may take a moment to reap it.
		stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(p.Pid), "stat"))
		if err != nil || bytes.Contains(stat, []byte(") Z ")) {
			return
		}
		if time.Now().After(end) {
			m.t.Fatal("it does not die")
		}
	}
}

// ctl runs opendsecctl as the admin and returns what it printed.
func (m *host) ctl(args ...string) (string, int) {
	m.t.Helper()
	vars, err := install.ReadEnv(filepath.Join(m.ops, "env"))
	if err != nil {
		m.t.Fatal(err)
	}
	env := func(name string) string {
		for _, v := range vars {
			if v[0] == name {
				return v[1]
			}
		}
		return ""
	}
	var out bytes.Buffer
	ctx, cancel := context.WithTimeout(m.t.Context(), time.Minute)
	defer cancel()
	code := (&ctl.App{Env: env, Stdin: strings.NewReader(""), Stdout: &out, Stderr: &out}).Main(ctx, args)
	return strings.TrimSpace(out.String()), code
}

func (m *host) mustCtl(args ...string) string {
	m.t.Helper()
	out, code := m.ctl(args...)
	if code != 0 {
		m.t.Fatalf("opendsecctl %v: exit code %d: %s", args, code, out)
	}
	return out
}

// sandboxes makes one of each kind that works.
func (m *host) sandboxes() []string {
	m.t.Helper()
	archive := filepath.Join(m.state, "small.tar")
	imagetest.Busybox(m.t, archive, "sh", "echo", "sleep")
	m.mustCtl("-q", "image", "import", "docker-archive:"+archive, "root/small")
	var ids []string
	for _, kind := range []string{"container", "gvisor", "sim"} {
		ids = append(ids, m.mustCtl("sandbox", "run", "--backend", kind, "root/small"))
	}
	return ids
}

// nothingLeft fails the test with what is left of the installation on the host.
func (m *host) nothingLeft() {
	m.t.Helper()
	testenv.NothingLeft(m.t, m.state, backend.Prefix(filepath.Join(m.state, "edge")))
}
