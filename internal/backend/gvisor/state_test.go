package gvisor

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/boot"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/backendtest"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// world is a backend with an image and an agent for it.
type world struct {
	testing.TB
	p      backendtest.Place
	b      *Backend
	rootfs backend.Rootfs
	agent  backend.Agent
	limits sandbox.Limits
}

func newWorld(t testing.TB, pool int) *world {
	t.Helper()
	w := &world{TB: t, p: place(t), limits: sandbox.Limits{CPU: 1, MemoryMB: 128, DiskMB: 256, PIDs: 100}}
	w.rootfs, w.agent = backendtest.Rootfs(t)
	w.b = open(t, w.p, pool)
	t.Cleanup(func() {
		if err := w.b.Close(); err != nil {
			t.Error(err)
		}
		left, err := w.b.Audit(context.Background(), nil)
		if err != nil || len(left) > 0 {
			t.Errorf("left on the host: %v, %v", left, err)
		}
	})
	return w
}

// being is one machine with a client of its agent.
type being struct {
	*world
	cfg backend.Config
	i   *instance
	c   *agentclient.Client
}

// create makes a machine of a state, nil for a fresh one.
func (w *world) create(from *backend.Snapshot) *being {
	w.Helper()
	cfg := w.config(from)
	i, err := w.b.Create(w.Context(), cfg)
	if err != nil {
		w.Fatal(err)
	}
	return w.adopt(cfg, i)
}

func (w *world) config(from *backend.Snapshot) backend.Config {
	w.Helper()
	id := sandbox.NewID()
	dir := filepath.Join(w.p.StateDir, string(id))
	if err := os.Mkdir(dir, 0o700); err != nil {
		w.Fatal(err)
	}
	return backend.Config{ID: id, Hostname: string(id), Limits: w.limits, Rootfs: w.rootfs, Agent: w.agent, StateDir: dir, From: from}
}

func (w *world) adopt(cfg backend.Config, i backend.Instance) *being {
	w.Helper()
	m := &being{world: w, cfg: cfg, i: i.(*instance)}
	m.c = agentclient.New(func(ctx context.Context) (net.Conn, error) { return i.Dial(ctx, backend.AgentPort) }, "token")
	w.Cleanup(func() {
		m.c.Close()
		if err := i.Destroy(context.Background()); err != nil {
			w.Error(err)
		}
		if m.i.s.lent || m.i.s.Slot.Name != "" {
			w.b.opts.Slots.Release(m.i.s.Slot)
		}
	})
	if err := m.c.WaitReady(w.Context()); err != nil {
		w.Fatal(err)
	}
	_, err := m.c.Hello(w.Context(), agentclient.Identity{
		Token: "token", SandboxID: cfg.ID, Hostname: cfg.Hostname, Env: map[string]string{"PATH": "/bin"}, Now: time.Now(),
	})
	if err != nil {
		w.Fatal(err)
	}
	return m
}

// run runs a line and returns its output.
func (m *being) run(line string) string {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.Context(), time.Minute)
	defer cancel()
	res, err := m.c.Run(ctx, agentclient.Shell(line))
	if err != nil || res.ExitCode != 0 {
		m.Fatalf("%s: %+v, %v", line, res, err)
	}
	return string(res.Stdout)
}

// snapshot takes a snapshot.
func (m *being) snapshot(memory bool) *backend.Snapshot {
	m.Helper()
	s, err := m.i.Snapshot(m.Context(), backend.SnapshotOptions{Dir: m.TempDir(), Memory: memory})
	if err != nil {
		m.Fatal(err)
	}
	return &s
}

// recover finds the machine again as a later run does.
func (m *being) recover() *instance {
	m.Helper()
	i, err := m.b.Recover(m.Context(), m.i.Handle())
	if err != nil {
		m.Fatal(err)
	}
	return i.(*instance)
}

// waitLimit waits until the limit of the machine's group is so many MiB.
func (m *being) waitLimit(want int64) {
	m.Helper()
	deadline := time.Now().Add(time.Minute)
	for m.memoryLimit() != want {
		if time.Now().After(deadline) {
			m.Fatalf("the memory limit is %d MiB yet; want %d", m.memoryLimit(), want)
		}
		<-time.After(100 * time.Millisecond)
	}
}

// memoryLimit returns the limit of the machine's group, in MiB.
func (m *being) memoryLimit() int64 {
	m.Helper()
	for _, dir := range m.i.s.group.Paths() {
		for _, name := range []string{"memory.limit_in_bytes", "memory.max"} {
			text, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				continue
			}
			var n int64
			if _, err := fmt.Sscan(string(text), &n); err != nil {
				m.Fatal(err)
			}
			return n >> 20
		}
	}
	m.Fatal("the group has no limit of memory")
	return 0
}

// With this many files a sentry needs more to write its state down than its
// limit leaves. The limit is back when it does not any more.
func TestSnapshotHasMemoryOfItsOwn(t *testing.T) {
	w := newWorld(t, 0)
	w.limits.MemoryMB = 64
	m := w.create(nil)
	m.run("mkdir /many && cd /many && for d in $(seq 100); do mkdir $d && (cd $d && seq 100 | xargs touch); done")
	want := m.memoryLimit()
	for range 3 {
		m.snapshot(true)
	}
	s := m.snapshot(true)
	child := w.create(s)
	for _, x := range []*being{m, child} {
		if got := x.run("find /many -type f | wc -l"); got != "10000\n" {
			t.Errorf("%q files", got)
		}
	}
	for _, x := range []*being{m, child} {
		x.waitLimit(want)
	}
}

// A run that was killed in a call to the sentry leaves it uncertain whether
// that came through; the next one looks.
func TestRecoverLooksWhetherACallCameThrough(t *testing.T) {
	w := newWorld(t, 0)
	m := w.create(nil)
	for name, test := range map[string]struct {
		mark  string
		still bool
	}{
		"a pause that did not come through":  {markPausing, false},
		"a pause that came through":          {markPausing, true},
		"a resume that did not come through": {markResuming, true},
		"a resume that came through":         {markResuming, false},
	} {
		if test.still {
			if err := m.i.s.call(boot.ContMgrPause, nil, nil); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(m.i.s.file(test.mark), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		found := m.recover()
		if found.paused != test.still {
			t.Errorf("%s: found paused %t; want %t", name, found.paused, test.still)
		}
		if again := m.recover(); again.paused != test.still {
			t.Errorf("%s: found paused %t the second time; want %t", name, again.paused, test.still)
		}
		for range 2 {
			if err := found.Resume(t.Context()); err != nil {
				t.Errorf("%s: resume: %v", name, err)
			}
		}
		if m.run("echo runs") != "runs\n" || m.recover().paused {
			t.Errorf("%s: it does not run after a resume", name)
		}
	}
}

// A program's output over a pause is whole.
func TestOutputOverPause(t *testing.T) {
	w := newWorld(t, 0)
	m := w.create(nil)
	var out string
	done := make(chan error, 1)
	go func() {
		res, err := m.c.Run(t.Context(), agentclient.Shell("touch /begun; for n in $(seq 300); do echo line $n; usleep 5000; done"))
		out = string(res.Stdout)
		done <- err
	}()
	m.run("until test -e /begun; do usleep 1000; done")
	for range 3 {
		if err := m.i.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		m.snapshot(true)
		if err := m.i.Resume(t.Context()); err != nil {
			t.Fatal(err)
		}
		m.snapshot(true)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	for n := range 300 {
		fmt.Fprintf(&want, "line %d\n", n+1)
	}
	if out != want.String() {
		t.Errorf("the output over pauses is %d bytes; want %d", len(out), want.Len())
	}
}

// Snapshots of one machine do not grow, and the machine is as before.
func TestManySnapshots(t *testing.T) {
	w := newWorld(t, 0)
	m := w.create(nil)
	m.run("(n=0; while :; do n=$((n+1)); echo $n >/n.new; mv /n.new /n; usleep 2000; done) >/dev/null 2>&1 &")
	m.run("until test -s /n; do usleep 1000; done")
	first := m.snapshot(true)
	var last *backend.Snapshot
	for range 19 {
		last = m.snapshot(true)
	}
	if last.Size > first.Size*3/2 {
		t.Errorf("the 20th snapshot has %d bytes, the first %d", last.Size, first.Size)
	}
	for _, x := range []*being{m, w.create(first), w.create(last)} {
		x.run("a=$(cat /n); until test $(cat /n) -gt $a; do usleep 1000; done")
	}
}

// A snapshot of a restored machine needs what the first machine was made with,
// not what this host has.
func TestStampStays(t *testing.T) {
	w := newWorld(t, 0)
	s := w.create(nil).snapshot(true)
	if !slices.Equal(s.Stamp.CPUFeatures, hostFeatures()) {
		t.Errorf("a machine made here has %q", s.Stamp.CPUFeatures)
	}
	s.Stamp.CPUFeatures = s.Stamp.CPUFeatures[:3]
	m := w.create(s)
	if got := m.snapshot(true).Stamp.CPUFeatures; !slices.Equal(got, s.Stamp.CPUFeatures) {
		t.Errorf("a restored machine has %q; want %q", got, s.Stamp.CPUFeatures)
	}
	m.i = m.recover()
	if got := m.snapshot(true).Stamp.CPUFeatures; !slices.Equal(got, s.Stamp.CPUFeatures) {
		t.Errorf("a restored machine that was found again has %q; want %q", got, s.Stamp.CPUFeatures)
	}
}

// What a state was taken of must be what it becomes.
func TestCreateRefusesAnotherMachinesState(t *testing.T) {
	w := newWorld(t, 0)
	s := w.create(nil).snapshot(true)
	for what, change := range map[string]func(*backend.Config){
		"limits are": func(c *backend.Config) { c.Limits.MemoryMB++ },
		"agent":      func(c *backend.Config) { c.Agent.ID = "agent-0000000000000000" },
		"consists":   func(c *backend.Config) { from := *s; from.Data = []byte(`{"files":["/etc/passwd"]}`); c.From = &from },
		"gVisor v0":  func(c *backend.Config) { from := *s; from.Stamp.Runtime = "v0"; c.From = &from },
		"backend":    func(c *backend.Config) { from := *s; from.Backend = sandbox.Container; c.From = &from },
	} {
		cfg := w.config(s)
		change(&cfg)
		if _, err := w.b.Create(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("create with another %s: %v", what, err)
		}
	}
}

// Prepare has sentries booted, a restore takes one, and Forget ends them.
func TestRestoresTakeFromThePool(t *testing.T) {
	w := newWorld(t, 2)
	s := w.create(nil).snapshot(true)
	k := keyOf(w.config(nil))
	ready := func(n int) []*sentry {
		t.Helper()
		deadline := time.Now().Add(time.Minute)
		for {
			have := w.b.booted.Ready(k)
			if len(have) == n {
				return have
			}
			if time.Now().After(deadline) {
				t.Fatalf("%d sentries are booted; want %d", len(have), n)
			}
			<-time.After(10 * time.Millisecond)
		}
	}
	w.b.Prepare(w.config(nil))
	waiting := ready(2)
	m := w.create(s)
	if m.i.s != waiting[0] {
		t.Error("a restore did not take what was booted")
	}
	if m.run("echo works") != "works\n" {
		t.Error("it does not work")
	}
	left, err := w.b.Audit(t.Context(), []sandbox.ID{m.cfg.ID})
	for _, l := range left {
		if l.ID == "" {
			t.Errorf("what is booted counts as left: %+v", l)
		}
	}
	if err != nil {
		t.Error(err)
	}
	ready(2)
	w.b.Forget(filepath.Dir(w.rootfs.EROFS))
	ready(0)
}

// A file with holes is one in the layer too: the layer takes no more of the
// disk than the file, and the sentry no memory for it.
func TestDiffOfHoles(t *testing.T) {
	w := newWorld(t, 0)
	m := w.create(nil)
	m.run("truncate -s 3G /holes && echo end >>/holes && (head -c 200000 /dev/zero; echo x) >/zeros && echo kept >/.wh.kept && rm /etc/motd")
	out, err := os.Create(filepath.Join(t.TempDir(), "layer.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if err := m.i.Diff(t.Context(), out); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(out.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	if st.Size < 3<<30 || st.Blocks*512 > 8<<20 {
		t.Errorf("the layer has %d bytes and takes %d", st.Size, st.Blocks*512)
	}
	got := map[string]int64{}
	if _, err := out.Seek(0, io.SeekStart); err != nil {
		t.Fatal(err)
	}
	r := tar.NewReader(out)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got[h.Name] = h.Size
		if h.Name == "zeros" {
			data, err := io.ReadAll(r)
			if err != nil || !bytes.Equal(data, append(make([]byte, 200000), "x\n"...)) {
				t.Errorf("%d bytes of zeros with an end came back wrong, %v", len(data), err)
			}
		}
	}
	if got["holes"] != 3<<30+4 {
		t.Errorf("the file with holes has %d bytes", got["holes"])
	}
	if _, ok := got["etc/.wh.motd"]; !ok {
		t.Error("the deleted file is not named")
	}
	if _, ok := got[".wh.kept"]; ok {
		t.Error("a file whose name means that another is deleted is in the layer")
	}
	child := w.create(m.snapshot(false))
	if got := child.run("stat -c %s /holes; tail -c 4 /holes; cat /.wh.kept; test ! -e /etc/motd && echo gone"); got != "3221225476\nend\nkept\ngone\n" {
		t.Errorf("a machine of its files has %q", got)
	}
}

// The version is asked of the binary, again when it is another.
func TestRuntimeVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sentry")
	var v runtimeVersion
	if _, err := v.get(path); err == nil {
		t.Error("a sentry that does not exist has a version")
	}
	for n, test := range []struct{ says, want string }{
		{"runsc version one", "one"}, {"runsc version another", "another"}, {"something else", ""},
	} {
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte("#!/bin/sh\necho "+test.says+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		stamp := time.Unix(int64(n+1), 0)
		if err := os.Chtimes(path, stamp, stamp); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if got, err := v.get(path); got != test.want || (err == nil) != (test.want != "") {
				t.Errorf("%s: %q, %v", test.says, got, err)
			}
		}
	}
}
