package backendtest

import (
	"bytes"
	"context"
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
)

// silence is how long a test watches that nothing happens.
const silence = 500 * time.Millisecond

// testFeatures holds what the backend says that it can do against what it is.
func testFeatures(e *env) {
	m := e.create(usual)
	if _, ok := m.instance.(backend.Pauser); e.can.Pause && !ok {
		e.Error("the backend can pause, and its instances are no Pausers")
	}
	if _, ok := m.instance.(backend.Snapshotter); snapshots(e.can) && !ok {
		e.Error("the backend can take snapshots, and its instances are no Snapshotters")
	}
	if _, ok := m.instance.(backend.Differ); e.can.SnapshotFiles && !ok {
		e.Error("the backend can take snapshots of files, and its instances are no Differs")
	}
	restorer, ok := e.backend.(backend.Restorer)
	if e.can.SnapshotMemory != ok {
		e.Errorf("the backend can take snapshots with memory: %t; it is a Restorer: %t", e.can.SnapshotMemory, ok)
	}
	if ok {
		restorer.Prepare(m.cfg)
		restorer.Prepare(m.cfg)
	}
	m.destroy()
	e.noLeftovers()
}

// kinds returns the kinds of snapshots that the backend takes: with memory or not.
func (e *env) kinds() []bool {
	var all []bool
	if e.can.SnapshotMemory {
		all = append(all, true)
	}
	if e.can.SnapshotFiles {
		all = append(all, false)
	}
	return all
}

// kindOf names a kind of snapshot.
func kindOf(memory bool) string {
	if memory {
		return "snapshot with memory"
	}
	return "snapshot of files"
}

// pause pauses the machine.
func (m *machine) pause() {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	if err := m.instance.(backend.Pauser).Pause(ctx); err != nil {
		m.Fatalf("pause: %v", err)
	}
}

// resume lets the machine go on.
func (m *machine) resume() {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	if err := m.instance.(backend.Pauser).Resume(ctx); err != nil {
		m.Fatalf("resume: %v", err)
	}
}

// silent checks that the agent says nothing, neither on the connection that
// there is nor on a new one.
func (m *machine) silent() {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.ctx, silence)
	defer cancel()
	fresh := agentclient.New(m.dialAgent, m.token)
	defer fresh.Close()
	answered := make(chan bool, 2)
	for _, c := range []*agentclient.Client{m.client, fresh} {
		go func() { answered <- c.Health(ctx) == nil }()
	}
	for range cap(answered) {
		if <-answered {
			m.Error("the agent of a paused machine answers")
		}
	}
}

// answers checks that the machine runs: the connection that there was and a new
// one are answered, and a command runs.
func (m *machine) answers() {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	fresh := agentclient.New(m.dialAgent, m.token)
	defer fresh.Close()
	if err := fresh.WaitReady(ctx); err != nil {
		m.Fatalf("a new connection: %v", err)
	}
	m.works()
}

// taken is a snapshot and the token of the machine that it was taken of.
type taken struct {
	backend.Snapshot
	token string
}

// snapshotDir makes an empty directory for a snapshot.
func (e *env) snapshotDir() string {
	e.Helper()
	top := filepath.Join(e.place.StateDir, "snapshots")
	if err := os.MkdirAll(top, 0o700); err != nil {
		e.Fatal(err)
	}
	dir, err := os.MkdirTemp(top, "")
	if err != nil {
		e.Fatal(err)
	}
	return dir
}

// snapshot takes a snapshot into dir.
func (m *machine) snapshot(dir string, memory bool) (backend.Snapshot, error) {
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	return m.instance.(backend.Snapshotter).Snapshot(ctx, backend.SnapshotOptions{Dir: dir, Memory: memory})
}

// take takes a snapshot, and returns it as whoever keeps it has it later: it
// was written down and read again, and is in another place.
func (m *machine) take(memory bool) taken {
	m.Helper()
	s, err := m.snapshot(m.snapshotDir(), memory)
	if err != nil {
		m.Fatalf("take a %s: %v", kindOf(memory), err)
	}
	m.checkSnapshot(s, memory)
	text, err := json.Marshal(s)
	if err != nil {
		m.Fatal(err)
	}
	if strings.Contains(string(text), s.Dir) {
		m.Errorf("a snapshot that may be moved has the place of its files in it: %s", text)
	}
	t := taken{token: m.token}
	if err := json.Unmarshal(text, &t.Snapshot); err != nil {
		m.Fatal(err)
	}
	t.Dir = s.Dir + "-moved"
	if err := os.Rename(s.Dir, t.Dir); err != nil {
		m.Fatalf("move the snapshot: %v", err)
	}
	return t
}

// checkSnapshot compares what a snapshot says with what is there.
func (m *machine) checkSnapshot(s backend.Snapshot, memory bool) {
	m.Helper()
	if s.Backend != m.backend.Name() || s.Memory != memory || s.Limits != m.cfg.Limits {
		m.Errorf("a %s of a machine with %+v: %+v", kindOf(memory), m.cfg.Limits, s)
	}
	if memory && (s.Stamp.Virtualization == "" || s.Stamp.Runtime == "" || s.Stamp.Kernel == "" || s.Stamp.Agent != m.cfg.Agent.ID) {
		m.Errorf("a %s with agent %q has stamp %+v", kindOf(memory), m.cfg.Agent.ID, s.Stamp)
	}
	var onDisk, files int64
	err := filepath.WalkDir(s.Dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			onDisk += info.Sys().(*syscall.Stat_t).Blocks * 512
			files++
		}
		return err
	})
	if err != nil {
		m.Fatal(err)
	}
	const slack = 64 << 10 // for each file: what a file system rounds up or has not placed yet
	if files == 0 || s.Size <= 0 || s.Size > 2*(onDisk+files*slack) || s.Size < (onDisk-files*slack)/2 {
		m.Errorf("a %s says that it has %d bytes; %d files have %d", kindOf(memory), s.Size, files, onDisk)
	}
}

// configFrom describes a machine of a snapshot.
func (e *env) configFrom(s taken) backend.Config {
	e.Helper()
	cfg := e.config(s.Limits)
	cfg.From, cfg.Again = &s.Snapshot, true
	return cfg
}

// restore makes a machine of a snapshot and gives it its own identity.
func (e *env) restore(s taken) *machine {
	e.Helper()
	cfg := e.configFrom(s)
	i, err := e.backend.Create(e.ctx, cfg)
	if err != nil {
		e.release(cfg)
		e.Fatalf("create from a %s: %v", kindOf(s.Memory), err)
	}
	m := e.adoptFrom(s, cfg, i)
	m.greet()
	return m
}

// adoptFrom takes a machine that was made of a snapshot into the test. With
// memory, its agent wants the token of the machine that it was taken of.
func (e *env) adoptFrom(s taken, cfg backend.Config, i backend.Instance) *machine {
	m := e.adopt(cfg, i)
	if s.Memory {
		m.token = s.token
		m.connect()
	}
	return m
}

// write writes a file.
func (m *machine) write(name, content string) {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	if err := m.client.WriteBytes(ctx, agentclient.File{Path: name}, []byte(content)); err != nil {
		m.Fatalf("write %s: %v", name, err)
	}
}

// has checks that a file has a content.
func (m *machine) has(name, content string) {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	if back, err := m.client.ReadFile(ctx, name, ""); err != nil || string(back) != content {
		m.Errorf("%s has %q, %v; want %q", name, cut(back), err, cut([]byte(content)))
	}
}

// lacks checks that a file is not there.
func (m *machine) lacks(name string) {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	if back, err := m.client.ReadFile(ctx, name, ""); err == nil {
		m.Errorf("%s is there and has %q", name, cut(back))
	}
}

// cut returns the beginning of a content, for a message.
func cut(b []byte) []byte { return b[:min(len(b), 60)] }

// tick is how long the counter waits between two numbers, at least.
const tick = 20 * time.Millisecond

// countFile is where the counter writes its number, as a whole each time.
const countFile = "/count"

// counting is a program that counts: in its memory, in a file and, over the
// API, to the test.
const counting = "n=0; while :; do n=$((n+1)); echo $n; echo $n >/count.new; mv /count.new " + countFile + "; sleep 0.02; done"

// counter is the counting program as its caller sees it. It is nil for a
// machine that runs nothing.
type counter struct {
	m      *machine
	ended  chan error
	cancel context.CancelFunc

	mu     sync.Mutex // guards what follows
	rest   []byte     // the beginning of a line
	last   int        // the last number that came
	wrong  string     // "" while each number follows the one before
	change chan struct{}
}

// startCounter starts the counting program and waits for its first number.
func (m *machine) startCounter() *counter {
	m.Helper()
	if m.kind.Simulated {
		return nil
	}
	ctx, cancel := context.WithCancel(m.ctx)
	c := &counter{m: m, ended: make(chan error, 1), cancel: cancel, change: make(chan struct{})}
	cmd := agentclient.Shell(counting)
	cmd.Stdout = c
	go func() {
		_, err := m.client.Run(ctx, cmd)
		c.ended <- err
	}()
	c.goesOn()
	return c
}

// Write takes output of the program.
func (c *counter) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rest = append(c.rest, p...)
	for {
		line, rest, whole := bytes.Cut(c.rest, []byte("\n"))
		if !whole {
			break
		}
		c.rest = rest
		n, err := strconv.Atoi(string(line))
		if (err != nil || n != c.last+1) && c.wrong == "" {
			c.wrong = strconv.Quote(string(line)) + " came after " + strconv.Itoa(c.last)
		}
		c.last = n
	}
	close(c.change)
	c.change = make(chan struct{})
	return len(p), nil
}

// now returns the last number that came, and what is closed when more comes.
func (c *counter) now() (int, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last, c.change
}

// goesOn waits until numbers come that were not on their way before.
func (c *counter) goesOn() {
	if c == nil {
		return
	}
	c.m.Helper()
	const more = 3
	first, _ := c.now()
	deadline := time.After(patience)
	for {
		n, change := c.now()
		if n >= first+more {
			return
		}
		select {
		case <-change:
		case err := <-c.ended:
			c.m.Fatalf("the counting program ended: %v", err)
		case <-deadline:
			c.m.Fatalf("the counting program stands at %d", n)
		}
	}
}

// stands checks that no number comes for a while, but what was on its way.
func (c *counter) stands() {
	if c == nil {
		return
	}
	c.m.Helper()
	n := -1
	for range 4 {
		before := n
		<-time.After(silence / 2)
		if n, _ = c.now(); n == before {
			return
		}
	}
	c.m.Errorf("the counting program of a paused machine went on to %d", n)
}

// stop ends the test's view of the program and says what was wrong with what
// came. The program goes on.
func (c *counter) stop() {
	if c == nil {
		return
	}
	c.m.Helper()
	c.cancel()
	<-c.ended
	if c.wrong != "" {
		c.m.Errorf("output was lost or came twice: %s", c.wrong)
	}
}

// counted reads the number in the counting program's file.
func (m *machine) counted() int {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	text, err := m.client.ReadFile(ctx, countFile, "")
	if err != nil {
		m.Fatalf("read %s: %v", countFile, err)
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		m.Fatalf("%s has %q", countFile, text)
	}
	return n
}

// countsOn waits until the counting program's file has a number greater than n,
// and returns it.
func (m *machine) countsOn(n int) int {
	m.Helper()
	deadline := time.Now().Add(patience)
	for {
		now := m.counted()
		if now > n {
			return now
		}
		if time.Now().After(deadline) {
			m.Fatalf("the counting program stands at %d, want more than %d", now, n)
		}
		<-time.After(tick / 2)
	}
}
