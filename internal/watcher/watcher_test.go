package watcher

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/ca"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/edgetest"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// clock is a clock that the test moves.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) forward(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// bench is a watcher with a real store, small edges, and a clock that stands
// still. Reports come in by themselves; passes run when the test says so.
type bench struct {
	*Watcher
	t     *testing.T
	clock *clock
	dir   string
	edges []*edgetest.Edge
	ends  endings
}

// endings counts how often the log says that a node's reports ended.
type endings struct {
	slog.Handler
	count *atomic.Int64
}

func (e endings) Handle(_ context.Context, r slog.Record) error {
	if strings.Contains(r.Message, "reports ended") {
		e.count.Add(1)
	}
	return nil
}

func (e endings) Enabled(context.Context, slog.Level) bool { return true }

// kill ends an edge and waits until all that it has said is taken in.
func (b *bench) kill(e *edgetest.Edge) {
	b.t.Helper()
	before := b.ends.count.Load()
	e.Kill()
	b.eventually("the end of the reports is noticed", func() bool { return b.ends.count.Load() > before })
}

func newBench(t *testing.T, names ...string) *bench {
	t.Helper()
	dir := t.TempDir()
	authority, err := ca.Init(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []string{mtls.RoleWatcher, mtls.RoleEdge} {
		if err := authority.Ensure(r, []string{"127.0.0.1"}); err != nil {
			t.Fatal(err)
		}
	}
	db, err := store.Open(t.Context(), "sqlite:"+filepath.Join(dir, "records.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	if _, err := iam.Bootstrap(t.Context(), db, iam.Names{}, nil); err != nil {
		t.Fatal(err)
	}
	b := &bench{t: t, dir: dir, ends: endings{slog.DiscardHandler, &atomic.Int64{}}, clock: &clock{now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}}
	for _, name := range names {
		b.edges = append(b.edges, edgetest.Start(t, dir, name))
	}
	b.start(db)
	return b
}

// start begins to follow the edges with a new watcher.
func (b *bench) start(db *store.DB) (stop func()) {
	b.t.Helper()
	id, err := mtls.Load(b.dir, mtls.RoleWatcher)
	if err != nil {
		b.t.Fatal(err)
	}
	client := daemon.Client(id.ClientConfig(mtls.RoleEdge))
	var nodes []Node
	for _, e := range b.edges {
		nodes = append(nodes, Node{Name: e.Name, Address: e.Address()})
	}
	b.Watcher = New(Config{Nodes: nodes}, Deps{DB: db, Edge: client, Log: slog.New(b.ends), Now: b.clock.Now})
	if err := b.introduce(b.t.Context(), b.clock.Now()); err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(b.t.Context()))
	var group sync.WaitGroup
	for _, n := range b.nodes {
		group.Go(func() { b.follow(ctx, n) })
	}
	stop = sync.OnceFunc(func() { cancel(); group.Wait(); client.CloseIdleConnections() })
	b.t.Cleanup(stop)
	for _, n := range b.nodes {
		b.eventually("reports of "+n.Name, func() bool { return n.look().complete })
	}
	return stop
}

func (b *bench) eventually(what string, ok func() bool) {
	b.t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(20 * time.Second)
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline:
			b.t.Fatalf("not within 20s: %s", what)
		}
	}
}

// heard waits until all edges that are served have reported at the clock's time.
func (b *bench) heard(names ...string) {
	b.t.Helper()
	for _, n := range b.nodes {
		if len(names) > 0 && !slices.Contains(names, n.Name) {
			continue
		}
		b.eventually("a report of "+n.Name, func() bool { return n.look().heard.Equal(b.clock.Now()) })
	}
}

// pass runs a reconciliation after the nodes were heard once more.
func (b *bench) pass(after time.Duration, names ...string) {
	b.t.Helper()
	b.clock.forward(after)
	b.heard(names...)
	b.mustReconcile()
}

func (b *bench) mustReconcile() {
	b.t.Helper()
	if err := b.reconcile(b.t.Context(), b.clock.Now()); err != nil {
		b.t.Fatal(err)
	}
}

// record makes a record on a node, in a state.
func (b *bench) record(node string, state sandbox.State, change ...func(*sandbox.Sandbox)) sandbox.ID {
	b.t.Helper()
	sb := &sandbox.Sandbox{
		ID: sandbox.NewID(), Project: "root/demo", Caller: "demo", State: state, CreatedAt: b.clock.Now(),
		Spec: sandbox.Spec{
			Image: sandbox.ImageName{Project: "root", Repo: "py", Tag: "1"}, Backend: sandbox.Auto, OnIdle: sandbox.StopOnIdle,
			Limits: sandbox.Limits{CPU: 1, MemoryMB: 128, DiskMB: 128, PIDs: 100},
		},
	}
	for _, c := range change {
		c(sb)
	}
	_, err := b.db.CreateSandbox(b.t.Context(), sb, store.Idempotency{}, func(*sandbox.Sandbox, []store.NodeUsage, []store.ProjectUsage) (string, error) {
		return node, nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return sb.ID
}

// machine makes an edge know a sandbox.
func (b *bench) machine(e *edgetest.Edge, id sandbox.ID, state sandbox.State, end *sandbox.End) {
	s := &edgev1.SandboxStatus{
		Id: string(id), Project: "root/demo", Backend: "gvisor", State: fault.StateToProto(state), StartedAt: timestamppb.New(b.clock.Now()),
	}
	if end != nil {
		s.End = fault.EndToProto(*end)
	}
	e.Put(s)
}

func (b *bench) get(id sandbox.ID) *sandbox.Sandbox {
	b.t.Helper()
	sb, err := b.db.GetSandbox(b.t.Context(), id)
	if err != nil {
		b.t.Fatal(err)
	}
	return sb
}

func (b *bench) want(id sandbox.ID, state sandbox.State, reason string, domain sandbox.Domain) {
	b.t.Helper()
	sb := b.get(id)
	if sb.State != state {
		b.t.Errorf("it is recorded as %s; want %s (%+v)", sb.State, state, sb.End)
	}
	if reason == "" && sb.End != nil || reason != "" && (sb.End == nil || sb.End.Reason != reason || sb.End.Domain != domain) {
		b.t.Errorf("it ended with %+v; want %s, %s", sb.End, reason, domain)
	}
}

// report returns what the record of a node says.
func (b *bench) report(node string) (*edgev1.NodeReport, store.Node) {
	b.t.Helper()
	records, err := b.records(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	r := &edgev1.NodeReport{}
	if err := protojson.Unmarshal(records[node].Report, r); err != nil {
		b.t.Fatal(err)
	}
	return r, records[node]
}

func TestReportsAreRecorded(t *testing.T) {
	b := newBench(t, "a")
	b.eventually("a report is recorded", func() bool { _, n := b.report("a"); return !n.LastSeen.IsZero() })
	r, n := b.report("a")
	if r.GetUnhealthy() != "" || r.GetCapacity().GetCpuCores() != 32 || !n.LastSeen.Equal(b.clock.Now()) || n.Address != "https://"+b.edges[0].Address() {
		t.Errorf("got %v, %+v", r, n)
	}
	b.edges[0].SetReport(func(r *edgev1.NodeReport) { r.Warnings = []string{"no reflink"} })
	b.eventually("the warning is recorded", func() bool { r, _ := b.report("a"); return len(r.GetWarnings()) == 1 })
	b.edges[0].SetReport(func(r *edgev1.NodeReport) { r.Name = "z" })
	b.eventually("a wrong name is noticed", func() bool { r, _ := b.report("a"); return strings.Contains(r.GetUnhealthy(), "calls itself z") })
}

func TestChangesAreRecorded(t *testing.T) {
	b := newBench(t, "a")
	id := b.record("a", sandbox.Pending)
	b.machine(b.edges[0], id, sandbox.Running, nil)
	b.eventually("it runs", func() bool { return b.get(id).State == sandbox.Running })
	if sb := b.get(id); sb.Spec.Backend != sandbox.GVisor || sb.StartedAt.IsZero() {
		t.Errorf("recorded %+v", sb)
	}
	// An end that is on its way is none yet: the room is still taken.
	idle := &sandbox.End{Reason: sandbox.ReasonIdle, Domain: sandbox.Policy, Detail: "idle for 1m", Time: b.clock.Now()}
	b.machine(b.edges[0], id, sandbox.Stopping, idle)
	b.eventually("it stops", func() bool { return b.get(id).State == sandbox.Stopping })
	b.want(id, sandbox.Stopping, "", "")
	b.machine(b.edges[0], id, sandbox.Stopped, idle)
	b.eventually("it ended", func() bool { return b.get(id).End != nil })
	b.want(id, sandbox.Stopped, sandbox.ReasonIdle, sandbox.Policy)

	b.pass(0)
	if f := b.edges[0].Forgotten(); len(f) > 0 {
		t.Errorf("%v was forgotten before anybody could ask", f)
	}
	b.pass(6 * time.Second)
	if f := b.edges[0].Forgotten(); !slices.Equal(f, []sandbox.ID{id}) {
		t.Errorf("forgotten: %v; want %s", f, id)
	}
	b.pass(time.Second)
	if f := b.edges[0].Forgotten(); len(f) != 1 {
		t.Errorf("forgotten twice: %v", f)
	}
}

// What happened while the watcher was away is in the first, complete report.
func TestChangesWhileAway(t *testing.T) {
	b := newBench(t, "a")
	id := b.record("a", sandbox.Running)
	b.machine(b.edges[0], id, sandbox.Running, nil)
	b.kill(b.edges[0])
	b.machine(b.edges[0], id, sandbox.Failed, &sandbox.End{Reason: sandbox.ReasonMemory, Domain: sandbox.Quota, Time: b.clock.Now()})
	b.edges[0].Serve(t)
	b.eventually("the end is recorded", func() bool { return b.get(id).End != nil })
	b.want(id, sandbox.Failed, sandbox.ReasonMemory, sandbox.Quota)
}

func TestSilentNodeIsNotHealthy(t *testing.T) {
	b := newBench(t, "a", "b")
	b.kill(b.edges[0])
	b.clock.forward(9 * time.Second)
	b.heard("b")
	if err := b.health(t.Context(), b.clock.Now()); err != nil {
		t.Fatal(err)
	}
	if r, _ := b.report("a"); r.GetUnhealthy() != "" {
		t.Errorf("after 9s: %s", r.GetUnhealthy())
	}
	b.clock.forward(3 * time.Second)
	b.heard("b")
	if err := b.health(t.Context(), b.clock.Now()); err != nil {
		t.Fatal(err)
	}
	if r, _ := b.report("a"); r.GetUnhealthy() != "no report for 12s" || r.GetCapacity().GetCpuCores() != 32 {
		t.Errorf("after 12s: %v", r)
	}
	if r, _ := b.report("b"); r.GetUnhealthy() != "" {
		t.Errorf("the other: %s", r.GetUnhealthy())
	}
	b.edges[0].Serve(t)
	b.eventually("it is healthy again", func() bool { r, _ := b.report("a"); return r.GetUnhealthy() == "" })
}

func TestLostNodeLosesItsSandboxes(t *testing.T) {
	b := newBench(t, "a", "b")
	id, stopping, other := b.record("a", sandbox.Running), b.record("a", sandbox.Stopping), b.record("b", sandbox.Running)
	b.machine(b.edges[0], id, sandbox.Running, nil)
	b.machine(b.edges[1], other, sandbox.Running, nil)
	b.kill(b.edges[0])
	b.pass(4*time.Minute, "b")
	b.want(id, sandbox.Running, "", "")
	b.pass(2*time.Minute, "b")
	b.want(id, sandbox.Failed, sandbox.ReasonLost, sandbox.Infra)
	b.want(stopping, sandbox.Stopped, sandbox.ReasonStopped, sandbox.User)
	b.want(other, sandbox.Running, "", "")

	// The node comes back with it: nobody knows it any more, so it goes.
	b.edges[0].Serve(t)
	b.heard()
	b.mustReconcile()
	if live := b.edges[0].Live(); len(live) != 1 {
		t.Errorf("the node has %v", live)
	}
	b.pass(61 * time.Second)
	if live := b.edges[0].Live(); len(live) > 0 {
		t.Errorf("the orphan is still there: %v", live)
	}
	b.want(id, sandbox.Failed, sandbox.ReasonLost, sandbox.Infra)
}

// A watcher that was away itself does not take the nodes for lost.
func TestNewWatcherIsPatient(t *testing.T) {
	b := newBench(t, "a")
	id := b.record("a", sandbox.Running)
	b.machine(b.edges[0], id, sandbox.Running, nil)
	b.clock.forward(24 * time.Hour)
	if err := b.introduce(t.Context(), b.clock.Now()); err != nil {
		t.Fatal(err)
	}
	b.mustReconcile()
	b.want(id, sandbox.Running, "", "")
	if r, n := b.report("a"); r.GetCapacity().GetCpuCores() != 32 || n.LastSeen.IsZero() {
		t.Errorf("the node's last report was dropped: %v, %+v", r, n)
	}
}

func TestSandboxThatItsNodeDoesNotKnow(t *testing.T) {
	b := newBench(t, "a")
	running, pending := b.record("a", sandbox.Running), b.record("a", sandbox.Pending)
	b.pass(0)
	b.pass(50 * time.Second)
	b.want(running, sandbox.Running, "", "")
	b.pass(11 * time.Second)
	b.want(running, sandbox.Failed, sandbox.ReasonLost, sandbox.Infra)
	b.want(pending, sandbox.Pending, "", "")
	b.pass(2 * time.Minute)
	b.want(pending, sandbox.Failed, sandbox.ReasonLost, sandbox.Infra)
}

// That a sandbox turns up again sets the patience back.
func TestSandboxThatTurnsUpAgain(t *testing.T) {
	b := newBench(t, "a")
	id := b.record("a", sandbox.Running)
	b.pass(0)
	b.machine(b.edges[0], id, sandbox.Running, nil)
	b.eventually("it is seen", func() bool { return len(b.nodes[0].look().machines) == 1 })
	b.pass(30 * time.Second)
	b.edges[0].Lose(id)
	b.kill(b.edges[0])
	b.edges[0].Serve(t)
	b.eventually("it is gone", func() bool { return len(b.nodes[0].look().machines) == 0 })
	b.pass(31 * time.Second)
	b.want(id, sandbox.Running, "", "")
	b.pass(61 * time.Second)
	b.want(id, sandbox.Failed, sandbox.ReasonLost, sandbox.Infra)
}

func TestOrphans(t *testing.T) {
	b := newBench(t, "a", "b")
	nobodys := sandbox.NewID()
	moved := b.record("b", sandbox.Running)
	b.machine(b.edges[0], nobodys, sandbox.Running, nil)
	b.machine(b.edges[0], moved, sandbox.Running, nil)
	b.machine(b.edges[1], moved, sandbox.Running, nil)
	b.eventually("they are seen", func() bool { return len(b.nodes[0].look().machines) == 2 })
	b.pass(0)
	b.pass(59 * time.Second)
	if live := b.edges[0].Live(); len(live) != 2 {
		t.Errorf("ended before the grace: %v are left", live)
	}
	b.pass(2 * time.Second)
	if live := b.edges[0].Live(); len(live) > 0 {
		t.Errorf("left: %v", live)
	}
	// Where it belongs it goes on, whatever the other node says of it.
	b.pass(time.Second)
	b.want(moved, sandbox.Running, "", "")
	if live := b.edges[1].Live(); !slices.Equal(live, []sandbox.ID{moved}) {
		t.Errorf("on the right node: %v", live)
	}
	b.pass(6 * time.Second)
	b.eventually("the node may forget them", func() bool { return len(b.edges[0].Forgotten()) == 2 })
}

// That a node could not make a sandbox is left to the API, which may try
// another, unless the API is gone.
func TestFailedStartIsLeftToTheAPI(t *testing.T) {
	b := newBench(t, "a")
	id := b.record("a", sandbox.Pending)
	end := sandbox.End{Reason: sandbox.ReasonStart, Domain: sandbox.Infra, Detail: "a broken disk", Time: b.clock.Now()}
	b.edges[0].Put(&edgev1.SandboxStatus{Id: string(id), State: opendsecv1.State_STATE_FAILED, End: fault.EndToProto(end)})
	b.eventually("it is seen", func() bool { return len(b.nodes[0].look().machines) == 1 })
	b.pass(0)
	b.pass(time.Minute)
	b.want(id, sandbox.Pending, "", "")
	b.pass(3 * time.Minute)
	b.want(id, sandbox.Failed, sandbox.ReasonStart, sandbox.Infra)
}

func TestStopsAreFinished(t *testing.T) {
	b := newBench(t, "a")
	id := b.record("a", sandbox.Stopping)
	unknown := b.record("a", sandbox.Stopping)
	b.machine(b.edges[0], id, sandbox.Running, nil)
	b.edges[0].SetHooks(edgetest.Hooks{Destroy: func(_ context.Context, which sandbox.ID) error {
		if which == id {
			return errors.New("busy")
		}
		return nil
	}})
	b.pass(0)
	b.pass(10 * time.Second)
	b.want(id, sandbox.Stopping, "", "")
	b.clock.forward(11 * time.Second)
	b.heard()
	if err := b.reconcile(t.Context(), b.clock.Now()); err == nil || !strings.Contains(err.Error(), string(id)) {
		t.Errorf("a node that cannot end it: %v", err)
	}
	b.want(id, sandbox.Stopping, "", "")
	b.want(unknown, sandbox.Stopped, sandbox.ReasonStopped, sandbox.User)
	b.edges[0].SetHooks(edgetest.Hooks{})
	b.pass(3 * time.Second)
	b.want(id, sandbox.Stopped, sandbox.ReasonStopped, sandbox.User)
	if live := b.edges[0].Live(); len(live) > 0 {
		t.Errorf("left: %v", live)
	}
}

func TestLifetimeIsKeptWhenTheNodeDoesNot(t *testing.T) {
	b := newBench(t, "a")
	id := b.record("a", sandbox.Running, func(sb *sandbox.Sandbox) { sb.Spec.Deadlines.Lifetime = time.Minute })
	b.machine(b.edges[0], id, sandbox.Running, nil)
	b.eventually("it is seen", func() bool { return len(b.nodes[0].look().machines) == 1 })
	b.pass(80 * time.Second)
	b.want(id, sandbox.Running, "", "")
	b.pass(11 * time.Second)
	b.want(id, sandbox.Stopped, sandbox.ReasonLifetime, sandbox.Policy)
	if live := b.edges[0].Live(); len(live) > 0 {
		t.Errorf("left: %v", live)
	}
}

func TestNodeThatIsNotWatched(t *testing.T) {
	b := newBench(t, "a")
	if err := b.db.PutNode(t.Context(), store.Node{Name: "ghost", Address: "https://127.0.0.1:1", Report: []byte(`{"name":"ghost"}`)}); err != nil {
		t.Fatal(err)
	}
	id := b.record("ghost", sandbox.Running)
	if err := b.health(t.Context(), b.clock.Now()); err != nil {
		t.Fatal(err)
	}
	if r, _ := b.report("ghost"); !strings.Contains(r.GetUnhealthy(), "list of nodes") {
		t.Errorf("got %v", r)
	}
	b.pass(0)
	b.pass(4 * time.Minute)
	b.want(id, sandbox.Running, "", "")
	b.pass(2 * time.Minute)
	b.want(id, sandbox.Failed, sandbox.ReasonLost, sandbox.Infra)
}

func TestPurge(t *testing.T) {
	b := newBench(t, "a")
	id, live := b.record("a", sandbox.Running), b.record("a", sandbox.Running)
	if err := b.finish(t.Context(), id, sandbox.End{Reason: sandbox.ReasonStopped, Domain: sandbox.User, Time: b.clock.Now()}); err != nil {
		t.Fatal(err)
	}
	for after, there := range map[time.Duration]bool{23 * time.Hour: true} {
		if err := b.purge(t.Context(), b.clock.Now().Add(after)); err != nil {
			t.Fatal(err)
		}
		if _, err := b.db.GetSandbox(t.Context(), id); (err == nil) != there {
			t.Errorf("after %s: %v", after, err)
		}
	}
	if err := b.purge(t.Context(), b.clock.Now().Add(25*time.Hour)); err != nil {
		t.Fatal(err)
	}
	if _, err := b.db.GetSandbox(t.Context(), id); !fault.Is(err, fault.NotFound) {
		t.Errorf("after 25h: %v", err)
	}
	b.get(live)
}

// Run works by itself and stops when it is told to.
func TestRun(t *testing.T) {
	b := newBench(t, "a")
	ctx, cancel := context.WithCancel(t.Context())
	id, err := mtls.Load(b.dir, mtls.RoleWatcher)
	if err != nil {
		t.Fatal(err)
	}
	client := daemon.Client(id.ClientConfig(mtls.RoleEdge))
	defer client.CloseIdleConnections()
	w := New(Config{Nodes: []Node{{Name: "a", Address: b.edges[0].Address()}}, SilentAfter: time.Second},
		Deps{DB: b.db, Edge: client, Log: slog.New(slog.DiscardHandler)})
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	b.eventually("it hears the node", func() bool { return w.nodes[0].look().complete })
	b.edges[0].Kill()
	b.eventually("its passes run", func() bool { r, _ := b.report("a"); return strings.HasPrefix(r.GetUnhealthy(), "no report for") })
	b.edges[0].Serve(t)
	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("it does not stop")
	}
}

func TestValidateReportsAllFaults(t *testing.T) {
	err := Config{Nodes: []Node{{Name: "a"}, {Name: "b", Address: "b:1"}, {Name: "b", Address: "b:2"}}}.Validate()
	for _, part := range []string{"nodes[0]", "nodes[2]", "twice"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("%v does not say %s", err, part)
		}
	}
}
