package gvisor

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/backendtest"
	"github.com/kernflux/opendsec/internal/cgroup"
	"github.com/kernflux/opendsec/internal/sandbox"
)

func place(t testing.TB) backendtest.Place {
	dir := t.TempDir()
	prefix := backend.Prefix(dir)
	t.Cleanup(func() {
		if err := cgroup.RemoveParent(prefix); err != nil {
			t.Error(err)
		}
	})
	return backendtest.Place{
		Log:      slog.New(slog.NewTextHandler(t.Output(), nil)),
		StateDir: dir, Prefix: prefix,
	}
}

// The sentry finds the seccomp program that was compiled for it. If this fails
// after an upgrade of gVisor, its way to register programs has changed.
func TestSentryUsesItsCompiledFilter(t *testing.T) {
	logs := t.TempDir()
	t.Setenv("OPENDSEC_TEST_SENTRY_LOGS", logs)
	b := open(t, place(t), 0)
	if _, err := b.Probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(logs, "*.log"))
	if err != nil || len(files) != 1 {
		t.Fatalf("the sentry's logs: %v, %v", files, err)
	}
	text, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), "Loaded precompiled seccomp instructions") {
		t.Error("the sentry compiled its seccomp program itself")
	}
}

func TestProbeSaysWhyNot(t *testing.T) {
	p := place(t)
	for what, path := range map[string]string{
		"/none/such":    "/none/such",
		"cannot run":    filepath.Join(p.StateDir, "text"),
		"kernel was up": "/bin/false",
	} {
		if err := os.WriteFile(filepath.Join(p.StateDir, "text"), []byte("no program"), 0o600); err != nil {
			t.Fatal(err)
		}
		b, err := New(Options{Log: p.Log, StateDir: filepath.Join(p.StateDir, "gvisor"), Prefix: p.Prefix, SentryPath: path, Slots: backendtest.Slots(t, p)})
		if err != nil {
			t.Fatal(err)
		}
		_, err = b.Probe(t.Context())
		if err == nil || !strings.Contains(err.Error(), "gVisor does not work here") {
			t.Errorf("%s: %v", what, err)
		}
		t.Log(err)
		left, err := b.Audit(t.Context(), nil)
		if err != nil || len(left) > 0 {
			t.Errorf("%s left %v, %v", what, left, err)
		}
	}
}

// A sentry that crashes leaves its last words in Exit.
func TestCrashIsTold(t *testing.T) {
	b := open(t, place(t), 0)
	image, err := probeImage(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s, err := b.boot(t.Context(), probeKey(image), beginning{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := b.discard(s); err != nil {
			t.Error(err)
		}
	}()
	if err := unix.Kill(s.PID, unix.SIGQUIT); err != nil { // to which Go says where it was
		t.Fatal(err)
	}
	if err := s.wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if exit := s.exit(); exit.OutOfMemory || !strings.Contains(exit.Detail, "SIGQUIT") {
		t.Errorf("exit: %+v", exit)
	}
}

// Nothing of this process but what is meant for it reaches the sentry.
func TestSentryInheritsNothing(t *testing.T) {
	secret, err := os.CreateTemp(t.TempDir(), "secret")
	if err != nil {
		t.Fatal(err)
	}
	defer secret.Close()
	t.Setenv("SECRET", "in the environment")
	b := open(t, place(t), 0)
	image, err := probeImage(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s, err := b.boot(t.Context(), probeKey(image), beginning{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.discard(s)
	fds, err := os.ReadDir("/proc/" + strconv.Itoa(s.PID) + "/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		to, err := os.Readlink("/proc/" + strconv.Itoa(s.PID) + "/fd/" + fd.Name())
		if err == nil && strings.Contains(to, "secret") {
			t.Errorf("descriptor %s is %s", fd.Name(), to)
		}
	}
	environ, err := os.ReadFile("/proc/" + strconv.Itoa(s.PID) + "/environ")
	if err != nil || len(environ) > 0 {
		t.Errorf("environment: %q, %v", environ, err)
	}
	for _, ns := range []string{"mnt", "net", "pid", "ipc", "uts", "user"} {
		own, err1 := os.Readlink("/proc/self/ns/" + ns)
		its, err2 := os.Readlink("/proc/" + strconv.Itoa(s.PID) + "/ns/" + ns)
		if err := errors.Join(err1, err2); err != nil || own == its {
			t.Errorf("the %s namespace is this process's: %v", ns, err)
		}
	}
}

func TestSpec(t *testing.T) {
	s := key{rootfs: "/r", agent: "/a", cpus: 2, memoryMB: 512, diskMB: 100}.spec()
	if !slices.Contains(s.Process.Capabilities.Bounding, "CAP_SYS_ADMIN") {
		t.Error("the agent cannot set the hostname")
	}
	if s.Process.Args[0] != backend.AgentDir+"/agent" || s.Hostname != "" {
		t.Errorf("process 1 is %v, hostname %q", s.Process.Args, s.Hostname)
	}
	got := key{diskMB: 100}.mountConfs()
	if got != "erofs:anon:size=100m,erofs:none" {
		t.Errorf("mounts: %s", got)
	}
}

func TestKeysRoundUp(t *testing.T) {
	for cpu, want := range map[float64]int{0.1: 1, 1: 1, 1.5: 2, 2: 2} {
		if got := keyOf(backend.Config{Limits: sandbox.Limits{CPU: cpu}}).cpus; got != want {
			t.Errorf("%v cores: the sandbox sees %d", cpu, got)
		}
	}
}

func TestConnsBreak(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dial := func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
	}
	set := newConns()
	kept, err := set.dial(t.Context(), dial)
	if err != nil {
		t.Fatal(err)
	}
	closed, err := set.dial(t.Context(), dial)
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	if len(set.open) != 1 {
		t.Errorf("%d open; a closed connection is still known", len(set.open))
	}
	read := make(chan error, 1)
	go func() {
		_, err := kept.Read(make([]byte, 1))
		read <- err
	}()
	pending := make(chan error, 1)
	begun := make(chan struct{})
	go func() {
		_, err := set.dial(context.Background(), func(ctx context.Context) (net.Conn, error) {
			close(begun)
			<-ctx.Done()
			return nil, ctx.Err()
		})
		pending <- err
	}()
	<-begun
	set.end()
	set.end()
	if err := <-read; err == nil || errors.Is(err, io.EOF) {
		t.Errorf("read from a machine that ended: %v", err)
	}
	if err := <-pending; !errors.Is(err, errEnded) {
		t.Errorf("a dial that was under way: %v", err)
	}
	if _, err := set.dial(t.Context(), dial); !errors.Is(err, errEnded) {
		t.Errorf("a dial after the end: %v", err)
	}
}

// A killed process's pool is ended by the next run, and nothing else is.
func TestSweep(t *testing.T) {
	p := place(t)
	image, err := probeImage(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	cfg := backend.Config{ID: sandbox.NewID(), StateDir: t.TempDir()}
	first := open(t, p, 0)
	pooled, err := first.boot(t.Context(), probeKey(image), beginning{})
	if err != nil {
		t.Fatal(err)
	}
	used, err := first.boot(t.Context(), probeKey(image), beginning{})
	if err != nil {
		t.Fatal(err)
	}
	if err := first.adopt(used, cfg); err != nil {
		t.Fatal(err)
	}
	second := open(t, p, 0)
	second.sweepOnce.Do(second.sweep)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := pooled.wait(ctx); err != nil {
		t.Errorf("what the first run held ready still runs: %v", err)
	}
	if used.exited() {
		t.Error("the machine of a sandbox was ended")
	}
	left, err := second.Audit(ctx, []sandbox.ID{cfg.ID})
	if err != nil || len(left) > 0 {
		t.Errorf("audit: %v, %v", left, err)
	}
	left, err = second.Audit(ctx, nil)
	if err != nil || len(left) == 0 {
		t.Errorf("audit that knows of no sandbox: %v, %v", left, err)
	}
	for _, l := range left {
		if l.ID != cfg.ID {
			t.Errorf("%+v is not said to be of %s", l, cfg.ID)
		}
	}
	if err := first.discard(used); err != nil {
		t.Error(err)
	}
	pooled.release()
}
