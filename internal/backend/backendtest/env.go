package backendtest

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// patience bounds every wait of a test. It is much longer than anything takes
// on a busy machine, and only shows that something hangs.
const patience = 60 * time.Second

// env is what one test works with: a place of its own and a backend in it.
type env struct {
	testing.TB
	kind    Kind
	shared  material
	place   Place
	backend backend.Backend
	can     backend.Features
	slots   *netslot.Pool
	logs    *logBuffer
	ctx     context.Context
	made    []*machine
	end     func()
}

// newEnv opens a backend at a new place. At the test's end, or by end before,
// it destroys the machines that are left, closes the backend and checks that
// the host is clean.
func newEnv(t testing.TB, k Kind, shared material) *env {
	t.Helper()
	dir := t.TempDir()
	logs := &logBuffer{}
	e := &env{
		TB: t, kind: k, shared: shared, logs: logs,
		place: Place{
			Log: slog.New(slog.NewTextHandler(logs, nil)), StateDir: dir,
			Prefix: backend.Prefix(dir), Agent: shared.agent,
		},
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*patience)
	e.ctx = ctx
	e.slots = netslot.NewPool(e.place.Log, e.place.Prefix, 0, nil)
	running, stop := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- e.slots.Run(running) }()
	e.backend = k.Open(t, e.place)
	e.end = sync.OnceFunc(func() {
		for _, m := range e.made {
			m.destroy()
		}
		if err := e.backend.Close(); err != nil {
			t.Errorf("close the backend: %v", err)
		}
		stop()
		if err := <-stopped; err != nil {
			t.Errorf("stop the network slots: %v", err)
		}
		cancel()
		e.checkHost()
		if t.Failed() {
			t.Logf("log of the backend:\n%s", logs)
		}
	})
	t.Cleanup(e.end)
	return e
}

// Slots returns a pool of network slots for a backend, which runs until the
// test's end.
func Slots(t testing.TB, p Place) *netslot.Pool {
	t.Helper()
	pool := netslot.NewPool(p.Log, p.Prefix, 0, nil)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- pool.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return pool
}

// reopen closes the backend and opens it again, as a restart of an edge does.
func (e *env) reopen() {
	e.Helper()
	if err := e.backend.Close(); err != nil {
		e.Fatalf("close the backend: %v", err)
	}
	e.backend = e.kind.Open(e.TB, e.place)
}

// usual are limits that every test without a need of its own takes.
var usual = sandbox.Limits{CPU: 1, MemoryMB: 256, DiskMB: 128, PIDs: 200}

// config describes a new machine.
func (e *env) config(limits sandbox.Limits) backend.Config {
	e.Helper()
	id := sandbox.NewID()
	cfg := backend.Config{
		ID: id, Hostname: string(id), Limits: limits,
		Rootfs: e.shared.rootfs, Agent: e.shared.agent, StateDir: e.stateDir(id),
	}
	if _, itself := e.backend.(backend.Slotter); !itself && !e.kind.Simulated {
		slot, err := e.slots.Acquire(e.ctx)
		if err != nil {
			e.Fatal(err)
		}
		cfg.Slot = slot
	}
	return cfg
}

func (e *env) stateDir(id sandbox.ID) string {
	e.Helper()
	dir := filepath.Join(e.place.StateDir, "sandboxes", string(id), "machine")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		e.Fatal(err)
	}
	return dir
}

// release gives back what config took.
func (e *env) release(cfg backend.Config) {
	if cfg.Slot.Name != "" {
		e.slots.Release(cfg.Slot)
	}
}

// machine is a machine under test.
type machine struct {
	*env
	cfg      backend.Config
	instance backend.Instance
	client   *agentclient.Client
	token    string // what its agent wants to be shown
	gone     bool
}

// create makes a machine and greets its agent.
func (e *env) create(limits sandbox.Limits) *machine {
	e.Helper()
	cfg := e.config(limits)
	i, err := e.backend.Create(e.ctx, cfg)
	if err != nil {
		e.release(cfg)
		e.Fatalf("create: %v", err)
	}
	m := e.adopt(cfg, i)
	m.greet()
	return m
}

// adopt takes a machine that runs into the test, which destroys it at its end.
func (e *env) adopt(cfg backend.Config, i backend.Instance) *machine {
	if s, ok := e.backend.(backend.Slotter); ok {
		cfg.Slot = s.SlotOf(i)
	}
	m := &machine{env: e, cfg: cfg, instance: i, token: "a token of " + string(cfg.ID)}
	m.connect()
	e.made = append(e.made, m)
	return m
}

func (m *machine) connect() {
	m.client = agentclient.New(m.dialAgent, m.token)
}

func (m *machine) dialAgent(ctx context.Context) (net.Conn, error) {
	return m.instance.Dial(ctx, backend.AgentPort)
}

// greet waits for the agent and gives it its identity.
func (m *machine) greet() {
	m.Helper()
	if err := m.hello(); err != nil {
		m.Fatal(err)
	}
}

func (m *machine) hello() error {
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	if err := m.client.WaitReady(ctx); err != nil {
		return err
	}
	id := agentclient.Identity{
		Token: "a token of " + string(m.cfg.ID), SandboxID: m.cfg.ID, Hostname: m.cfg.Hostname, Generation: string(m.cfg.ID),
		Env: map[string]string{"PATH": "/bin:/usr/bin", "FROM_SANDBOX": "yes"}, Now: time.Now(),
	}
	if _, err := m.client.Hello(ctx, id); err != nil {
		return err
	}
	m.token = id.Token
	return nil
}

// shell runs a line and returns its result.
func (m *machine) shell(line string) agentclient.Result {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	res, err := m.client.Run(ctx, agentclient.Shell(line))
	if err != nil {
		m.Fatalf("run %q: %v", line, err)
	}
	return res
}

// want runs a line and compares its standard output.
func (m *machine) want(line, stdout string) {
	m.Helper()
	res := m.shell(line)
	if string(res.Stdout) != stdout || res.ExitCode != 0 {
		m.Errorf("%q: got stdout %q, stderr %q, exit code %d; want stdout %q", line, res.Stdout, res.Stderr, res.ExitCode, stdout)
	}
}

// works checks that the machine answers.
func (m *machine) works() {
	m.Helper()
	if m.kind.Simulated {
		if res := m.shell("true"); res.ExitCode != 0 {
			m.Errorf("true: exit code %d", res.ExitCode)
		}
		return
	}
	m.want("echo works", "works\n")
}

// wait waits for the machine's end.
func (m *machine) wait() backend.Exit {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	exit, err := m.instance.Wait(ctx)
	if err != nil {
		m.Fatalf("wait for the machine's end: %v", err)
	}
	return exit
}

// destroy removes the machine, once, and checks that its directory is empty.
func (m *machine) destroy() {
	m.Helper()
	if m.gone {
		return
	}
	m.gone = true
	m.client.Close()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.ctx), patience)
	defer cancel()
	if err := m.instance.Destroy(ctx); err != nil {
		m.Errorf("destroy: %v", err)
	}
	m.release(m.cfg)
	m.checkEmpty(m.cfg)
}

// checkEmpty checks that a machine that is gone left no file.
func (e *env) checkEmpty(cfg backend.Config) {
	e.Helper()
	entries, err := os.ReadDir(cfg.StateDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		e.Error(err)
	}
	for _, f := range entries {
		e.Errorf("%s was left in the state directory of %s", f.Name(), cfg.ID)
	}
}

// logBuffer keeps what a backend logs, for a test that fails.
type logBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
