package edge

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// newDiskWorld is a world whose paused sandboxes have no machine.
func newDiskWorld(t *testing.T) *world {
	w := newWorld(t)
	w.name = sandbox.GVisor
	return w
}

func (n *node) pauseID(id sandbox.ID) (*edgev1.SandboxStatus, error) {
	res, err := n.client.PauseSandbox(context.Background(), connect.NewRequest(&edgev1.PauseSandboxRequest{Id: string(id)}))
	if err != nil {
		return nil, fault.FromConnect(err)
	}
	return res.Msg.GetStatus(), nil
}

func (n *node) resumeID(id sandbox.ID) (*edgev1.SandboxStatus, error) {
	res, err := n.client.ResumeSandbox(context.Background(), connect.NewRequest(&edgev1.ResumeSandboxRequest{Id: string(id)}))
	if err != nil {
		return nil, fault.FromConnect(err)
	}
	return res.Msg.GetStatus(), nil
}

func (n *node) forkID(id sandbox.ID, memory bool, count int, adapt func(*edgev1.CreateSandboxRequest)) ([]sandbox.ID, []*edgev1.ForkResult, error) {
	req := &edgev1.ForkSandboxRequest{Id: string(id), FilesOnly: !memory}
	var ids []sandbox.ID
	for range count {
		child := sandbox.NewID()
		c := request(child)
		c.Spec.Backend = string(n.find(id).spec().Backend)
		if adapt != nil {
			adapt(c)
		}
		ids = append(ids, child)
		req.Children = append(req.Children, c)
	}
	res, err := n.client.ForkSandbox(context.Background(), connect.NewRequest(req))
	if err != nil {
		return nil, nil, fault.FromConnect(err)
	}
	return ids, res.Msg.GetResults(), nil
}

// rest waits until what comes after a state operation's answer is done.
func (n *node) rest(id sandbox.ID) {
	b := n.find(id)
	b.op <- struct{}{}
	<-b.op
}

// tidy reports files that should not lie about in a sandbox's directory.
func (n *node) tidy(t *testing.T, id sandbox.ID, saved bool) {
	t.Helper()
	n.rest(id)
	if left, _ := filepath.Glob(filepath.Join(n.journal.Dir(id), "new-*", "*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	_, err := os.Stat(n.journal.SavedDir(id))
	if (err == nil) != saved {
		t.Errorf("the saved state is there: %v, want %v", err == nil, saved)
	}
}

// call asks the sandbox's agent for something.
func (n *node) call(id sandbox.ID) error {
	stream, err := n.start(context.Background(), id, "token")
	if err != nil {
		return err
	}
	for stream.Receive() {
	}
	return fault.FromConnect(stream.Err())
}

// until waits for the node's report of a sandbox in a state.
func (n *node) until(t *testing.T, id sandbox.ID, want opendsecv1.State) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	stream, err := n.client.Watch(ctx, connect.NewRequest(&edgev1.WatchRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	for stream.Receive() {
		for _, sb := range stream.Msg().GetSandboxes() {
			if sb.GetId() == string(id) && sb.GetState() == want {
				return
			}
		}
	}
	t.Fatalf("sandbox %s did not become %s: %v", id, want, stream.Err())
}

func TestPauseAndResume(t *testing.T) {
	for _, name := range []sandbox.Backend{sandbox.GVisor, sandbox.Container} {
		t.Run(string(name), func(t *testing.T) {
			w := newWorld(t)
			w.name = name
			n := startNode(t, w, t.TempDir(), nil)
			id := n.make(t, nil)
			m := w.machine(id)
			m.memory = "kept"
			first := m.hello
			full := n.used
			for range 50 {
				for range 2 { // it may be repeated
					st, err := n.pauseID(id)
					if err != nil || st.GetState() != opendsecv1.State_STATE_PAUSED || st.GetPausedAt() == nil {
						t.Fatalf("pause gave %v, %v", st, err)
					}
				}
				n.whilePaused(t, w, id)
				for range 2 {
					st, err := n.resumeID(id)
					if err != nil || st.GetState() != opendsecv1.State_STATE_RUNNING || st.GetPausedAt() != nil || st.GetPausedFor().AsDuration() <= 0 {
						t.Fatalf("resume gave %v, %v", st, err)
					}
				}
				m = w.machine(id)
				if m.memory != "kept" || m.paused || n.used != full {
					t.Fatalf("after the resume: memory %q, paused %v, counted %+v, want %+v", m.memory, m.paused, n.used, full)
				}
				n.tidy(t, id, false)
			}
			h := m.hello
			if name.PausesToDisk() && (h.GetToken() != first.GetToken() || h.GetHostname() != first.GetHostname() || h.GetGeneration() == first.GetGeneration() || len(h.GetEntropy()) != 64) {
				t.Errorf("identity after the resume: %v, before: %v", h, first)
			}
			n.kill(t, id)
			w.empty(t)
		})
	}
}

// whilePaused checks what holds for a paused sandbox.
func (n *node) whilePaused(t *testing.T, w *world, id sandbox.ID) {
	t.Helper()
	disk := w.name.PausesToDisk()
	n.tidy(t, id, disk)
	m := w.machine(id)
	if (m == nil) != disk || m != nil && !m.paused || (len(w.slots) == 0) != disk {
		t.Errorf("machine %v, slots %v", m, w.slots)
	}
	if want := n.find(id).spec().Holds(true); n.used != want {
		t.Errorf("counted %+v, want %+v", n.used, want)
	}
	if f := fault.Of(n.call(id)); f == nil || f.Kind != fault.WrongState || f.State != sandbox.Paused {
		t.Errorf("a call gave %+v", f)
	}
	metrics, err := n.client.GetMetrics(t.Context(), connect.NewRequest(&edgev1.GetMetricsRequest{Id: string(id)}))
	if err != nil || disk && metrics.Msg.GetMetrics().GetMemoryBytes() != 0 {
		t.Errorf("metrics: %v, %v", metrics, err)
	}
}

func TestPauseThatFailsLeavesItRunning(t *testing.T) {
	for what, c := range map[string]struct {
		break_ func(*world)
		kind   fault.Kind
	}{
		"pause":     {func(w *world) { w.onPause = func(*machine) error { return errors.New("no") } }, fault.Internal},
		"snapshot":  {func(w *world) { w.onSnapshot = func(*machine) error { return errors.New("no") } }, fault.Internal},
		"full disk": {func(w *world) { w.onSnapshot = func(*machine) error { return fmt.Errorf("write: %w", unix.ENOSPC) } }, fault.Capacity},
	} {
		t.Run(what, func(t *testing.T) {
			w := newDiskWorld(t)
			n := startNode(t, w, t.TempDir(), nil)
			id := n.make(t, nil)
			full := n.used
			c.break_(w)
			_, err := n.pauseID(id)
			if f := fault.Of(err); f == nil || f.Kind != c.kind {
				t.Errorf("got %+v", f)
			}
			m := w.machine(id)
			if m == nil || m.paused || n.find(id).status().State != sandbox.Running || n.used != full {
				t.Errorf("machine %v, status %v, counted %+v", m, n.find(id).status(), n.used)
			}
			if err := n.call(id); err != nil {
				t.Errorf("a call gave %v", err)
			}
			n.tidy(t, id, false)
			w.onPause, w.onSnapshot = nil, nil
			if _, err := n.pauseID(id); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestResumeThatFailsLeavesItPaused(t *testing.T) {
	w := newDiskWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, nil)
	w.machine(id).memory = "kept"
	if _, err := n.pauseID(id); err != nil {
		t.Fatal(err)
	}
	check := func(what string) {
		t.Helper()
		if _, err := n.resumeID(id); err == nil {
			t.Errorf("%s: the resume did not fail", what)
		}
		w.onCreate, w.onHello = nil, nil
		if st := n.find(id).status(); st.State != sandbox.Paused || w.machine(id) != nil || len(w.slots) != 0 {
			t.Errorf("%s: %v, machines %v, slots %v", what, st, w.machines, w.slots)
		}
		n.tidy(t, id, true)
		if want := n.find(id).spec().Holds(true); n.used != want {
			t.Errorf("%s: counted %+v, want %+v", what, n.used, want)
		}
	}
	w.onCreate = func(context.Context, *machine) error { return errors.New("no") }
	check("create")
	w.onHello = func(*machine) error { return errors.New("no") }
	check("hello")
	n.mu.Lock()
	n.capacity.MemoryMB = 1
	n.mu.Unlock()
	_, err := n.resumeID(id)
	if f := fault.Of(err); f == nil || f.Kind != fault.Capacity {
		t.Errorf("without room: %+v", f)
	}
	check("room")
	n.mu.Lock()
	n.capacity.MemoryMB = 1 << 20
	n.mu.Unlock()
	if _, err := n.resumeID(id); err != nil || w.machine(id).memory != "kept" {
		t.Errorf("got %v", err)
	}
}

func TestPausesAndResumesConverge(t *testing.T) {
	w := newDiskWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, nil)
	w.machine(id).memory = "kept"
	for round := range 20 {
		var wg sync.WaitGroup
		for i := range 10 {
			wg.Go(func() {
				do := n.pauseID
				if (i+round)%2 == 0 {
					do = n.resumeID
				}
				if _, err := do(id); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	if _, err := n.resumeID(id); err != nil {
		t.Fatal(err)
	}
	if m := w.machine(id); m.memory != "kept" || len(w.slots) != 1 {
		t.Errorf("memory %q, slots %v", m.memory, w.slots)
	}
}

// A stop may come at any moment of a pause or a resume.
func TestDestroyDuringStateOperations(t *testing.T) {
	w := newDiskWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	for range 50 {
		id := n.make(t, nil)
		var wg sync.WaitGroup
		for _, do := range []func(sandbox.ID) (*edgev1.SandboxStatus, error){n.pauseID, n.resumeID, n.pauseID} {
			wg.Go(func() {
				if _, err := do(id); err != nil && !fault.Is(err, fault.SandboxEnded) {
					t.Error(err)
				}
			})
		}
		wg.Go(func() {
			ids, _, err := n.forkID(id, true, 2, nil)
			if err != nil && !fault.Is(err, fault.SandboxEnded) {
				t.Error(err)
			}
			for _, child := range ids {
				n.kill(t, child)
			}
		})
		<-time.After(time.Duration(rand.IntN(8000)) * time.Microsecond)
		if st := n.kill(t, id); st.GetState() != opendsecv1.State_STATE_STOPPED {
			t.Errorf("stop gave %v", st)
		}
		wg.Wait()
	}
	w.empty(t)
	if n.used != (sandbox.Resources{}) {
		t.Errorf("still counted: %+v", n.used)
	}
}

// What a paused sandbox has on the disk goes with its stop, not when its end is
// forgotten.
func TestDestroyOfAPausedOneGivesItsRoomBack(t *testing.T) {
	w := newDiskWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, nil)
	if _, err := n.pauseID(id); err != nil {
		t.Fatal(err)
	}
	n.tidy(t, id, true)
	n.kill(t, id)
	left, err := os.ReadDir(n.journal.Dir(id))
	if err != nil || len(left) != 1 {
		t.Errorf("beside its entry there is %v, %v", left, err)
	}
}

// A pause that hangs does not keep a sandbox from being deleted.
func TestDestroyEndsAHangingPause(t *testing.T) {
	w := newDiskWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, nil)
	inside := make(chan struct{})
	w.onSnapshot = func(m *machine) error {
		close(inside)
		<-m.done // as a call to a machine that hangs ends with it
		return errors.New("the machine has ended")
	}
	go func() { _, _ = n.pauseID(id) }()
	<-inside
	if st := n.kill(t, id); st.GetState() != opendsecv1.State_STATE_STOPPED {
		t.Errorf("stop gave %v", st)
	}
	w.empty(t)
}

func TestOpenRequestsEndWithThePause(t *testing.T) {
	w := newDiskWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, nil)
	stream, err := n.start(t.Context(), id, "hang")
	if err != nil || !stream.Receive() {
		t.Fatal(err, stream.Err())
	}
	if _, err := n.pauseID(id); err != nil {
		t.Fatal(err)
	}
	for stream.Receive() {
	}
	f := fault.Of(fault.FromConnect(stream.Err()))
	if f == nil || f.Kind != fault.WrongState || f.State != sandbox.Paused {
		t.Errorf("got %+v", f)
	}
}

// A call that a pause cuts off before its answer is not one that was refused.
func TestAPauseOfACallWithoutAnAnswer(t *testing.T) {
	w := newDiskWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, nil)
	ended := make(chan error, 1)
	go func() {
		stream, err := n.start(t.Context(), id, "silent")
		if err == nil {
			for stream.Receive() {
			}
			err = stream.Err()
		}
		ended <- err
	}()
	for b := n.find(id); ; runtime.Gosched() {
		if _, _, u := b.deadlines(); u.open == 1 {
			break
		}
	}
	if _, err := n.pauseID(id); err != nil {
		t.Fatal(err)
	}
	if err := fault.FromConnect(<-ended); !fault.Is(err, fault.Unavailable) {
		t.Errorf("got %v", err)
	}
	if err := n.call(id); !fault.Is(err, fault.WrongState) {
		t.Errorf("a call after the pause: %v", err)
	}
}

func TestCallsWakeASandbox(t *testing.T) {
	w := newDiskWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, func(r *edgev1.CreateSandboxRequest) { r.Spec.AutoResume = true })
	full := n.used
	for range 10 {
		if _, err := n.pauseID(id); err != nil {
			t.Fatal(err)
		}
		if n.used != full {
			t.Errorf("one that any call may wake gave up its place: %+v", n.used)
		}
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				if err := n.call(id); err != nil {
					t.Errorf("a call gave %v", err)
				}
			})
		}
		wg.Wait()
		if st := n.find(id).status(); st.State != sandbox.Running {
			t.Errorf("got %v", st)
		}
	}
}

func TestIdleSandboxesArePaused(t *testing.T) {
	w := newDiskWorld(t)
	var late atomic.Int64 // by how much the clock is ahead
	n := startNodeAt(t, w, t.TempDir(), nil, func() time.Time { return time.Now().Add(time.Duration(late.Load())) })
	id := n.make(t, func(r *edgev1.CreateSandboxRequest) {
		r.Spec.OnIdle = opendsecv1.OnIdle_ON_IDLE_PAUSE
		r.Spec.TtlRunningStop = durationpb.New(time.Hour)
		r.Spec.TtlLifetime = durationpb.New(3 * time.Hour)
	})
	hour := func() {
		late.Add(int64(time.Hour + time.Second))
		n.find(id).poke()
	}
	m := w.machine(id)
	m.mu.Lock()
	m.running = 1 // a command that nobody listens to
	m.mu.Unlock()
	hour()
	if _, err := n.client.Touch(t.Context(), connect.NewRequest(&edgev1.TouchRequest{Id: string(id)})); err != nil {
		t.Fatal(err)
	}
	if st := n.find(id).status(); st.State != sandbox.Running {
		t.Fatalf("with a running command: %v", st)
	}
	m.mu.Lock()
	m.running = 0
	m.mu.Unlock()
	hour()
	n.until(t, id, opendsecv1.State_STATE_PAUSED)
	for range 10 {
		hour() // does not count
	}
	if _, err := n.resumeID(id); err != nil {
		t.Fatal(err)
	}
	hour()
	n.until(t, id, opendsecv1.State_STATE_STOPPED) // three hours in which it ran
	if end := n.find(id).end(); end.Reason != sandbox.ReasonLifetime {
		t.Errorf("got %+v", end)
	}
}

func TestRestartFindsPausedSandboxes(t *testing.T) {
	for _, name := range []sandbox.Backend{sandbox.GVisor, sandbox.Container} {
		t.Run(string(name), func(t *testing.T) {
			w := newWorld(t)
			w.name = name
			dir := t.TempDir()
			n := startNode(t, w, dir, nil)
			id := n.make(t, nil)
			w.machine(id).memory = "kept"
			if _, err := n.pauseID(id); err != nil {
				t.Fatal(err)
			}
			used := n.used
			for range 3 {
				n.stop()
				n = startNode(t, w, dir, nil)
				if st := n.find(id).status(); st.State != sandbox.Paused || st.PausedAt.IsZero() || n.used != used {
					t.Fatalf("found %v, counted %+v, want %+v", st, n.used, used)
				}
			}
			if _, err := n.resumeID(id); err != nil {
				t.Fatal(err)
			}
			if m := w.machine(id); m.memory != "kept" || m.paused {
				t.Errorf("memory %q, paused %v", m.memory, m.paused)
			}
			n.kill(t, id)
			w.empty(t)
		})
	}
}

// What an edge that was killed in the middle of a pause or a resume leaves.
func TestRestartAfterACut(t *testing.T) {
	w := newDiskWorld(t)
	dir := t.TempDir()
	n := startNode(t, w, dir, nil)
	begun, paused := n.make(t, nil), n.make(t, nil)
	for _, id := range []sandbox.ID{begun, paused} {
		w.machine(id).memory = "kept"
	}
	// Cut before the journal said so: it goes on.
	if _, err := n.journal.MakeTemp(begun); err != nil {
		t.Fatal(err)
	}
	w.machine(begun).paused = true
	// Cut after that: its machine goes.
	handle, slot := *n.find(paused).entry.Handle, *n.find(paused).entry.Slot
	former := w.machine(paused)
	w.onDestroy = func(*machine) error { return errors.New("not yet") }
	if _, err := n.pauseID(paused); err != nil {
		t.Fatal(err)
	}
	n.rest(paused)
	n.stop()
	w.onDestroy = nil
	if e := n.find(paused).entry; e.Handle == nil || e.Slot.Name != slot.Name || string(e.Handle.Data) != string(handle.Data) {
		t.Fatalf("the journal has forgotten a machine: %+v", e)
	}
	n = startNode(t, w, dir, nil)
	if m := w.machine(begun); m.paused || n.find(begun).status().State != sandbox.Running {
		t.Errorf("paused %v, %v", m.paused, n.find(begun).status())
	}
	n.tidy(t, begun, false)
	select {
	case <-former.done:
	default:
		t.Error("the machine of a paused sandbox lives")
	}
	if st, err := n.resumeID(paused); err != nil || w.machine(paused).memory != "kept" {
		t.Errorf("resume gave %v, %v", st, err)
	}
	for _, id := range []sandbox.ID{begun, paused} {
		n.kill(t, id)
	}
	w.empty(t)
}

func TestFork(t *testing.T) {
	w := newDiskWorld(t)
	n := startNode(t, w, t.TempDir(), func(c *Config) { c.CPUOvercommit = 100 })
	id := n.make(t, nil)
	w.machine(id).memory = "kept"
	source := w.machine(id).hello
	seen := map[string]bool{source.GetToken(): true, source.GetHostname(): true, source.GetGeneration(): true}
	for _, paused := range []bool{false, true} {
		if paused {
			if _, err := n.pauseID(id); err != nil {
				t.Fatal(err)
			}
		}
		ids, results, err := n.forkID(id, true, 16, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i, r := range results {
			m := w.machine(ids[i])
			if r.GetStatus().GetState() != opendsecv1.State_STATE_RUNNING || r.GetStatus().GetId() != string(ids[i]) || m.memory != "kept" {
				t.Fatalf("copy %d: %v", i, r)
			}
			for _, own := range []string{m.hello.GetToken(), m.hello.GetHostname(), m.hello.GetGeneration()} {
				if own == "" || seen[own] {
					t.Errorf("%q is empty or came twice", own)
				}
				seen[own] = true
			}
		}
		n.tidy(t, id, paused)
		// A copy of a copy.
		if _, results, err = n.forkID(ids[0], true, 1, nil); err != nil || results[0].GetStatus() == nil {
			t.Errorf("got %v, %v", results, err)
		}
	}
	if _, _, err := n.forkID(id, false, 1, nil); !fault.Is(err, fault.WrongState) || !strings.Contains(err.Error(), "resume it first") || strings.Contains(err.Error(), "auto_resume") {
		t.Errorf("the files of a paused one: %v", err)
	}
}

func TestForkSaysHowEachCopyWent(t *testing.T) {
	w := newDiskWorld(t)
	n := startNode(t, w, t.TempDir(), func(c *Config) { c.MaxSandboxes = 4 })
	id := n.make(t, nil)
	_, results, err := n.forkID(id, true, 8, nil)
	if err != nil {
		t.Fatal(err)
	}
	made := 0
	for _, r := range results {
		if r.GetStatus() != nil {
			made++
		} else if r.GetError().GetKind() != string(fault.Capacity) {
			t.Errorf("got %v", r)
		}
	}
	if made != 3 {
		t.Errorf("made %d copies, want 3", made)
	}
	_, _, err = n.forkID(id, true, 1, func(r *edgev1.CreateSandboxRequest) { r.Spec.MemoryLimitMb *= 2 })
	if !fault.Is(err, fault.InvalidArgument) {
		t.Errorf("other limits: %v", err)
	}
}

func TestForkWithMemoryIsRefusedByName(t *testing.T) {
	w := newWorld(t) // containers
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, nil)
	_, _, err := n.forkID(id, true, 1, nil)
	if f := fault.Of(err); f == nil || f.Kind != fault.Unsupported {
		t.Errorf("got %+v", f)
	}
	w.machine(id).memory = "a file"
	ids, results, err := n.forkID(id, false, 2, nil)
	if err != nil || results[1].GetStatus() == nil || w.machine(ids[1]).memory != "a file" {
		t.Errorf("got %v, %v", results, err)
	}
}
