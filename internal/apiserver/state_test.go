package apiserver_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/edgetest"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

const (
	running = opendsecv1.State_STATE_RUNNING
	paused  = opendsecv1.State_STATE_PAUSED
)

func (u *user) pause(id string) (*opendsecv1.Sandbox, error) {
	res, err := u.sandboxes.PauseSandbox(u.c.t.Context(), connect.NewRequest(&opendsecv1.PauseSandboxRequest{Id: id}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetSandbox(), nil
}

func (u *user) resume(id string) (*opendsecv1.Sandbox, error) {
	res, err := u.sandboxes.ResumeSandbox(u.c.t.Context(), connect.NewRequest(&opendsecv1.ResumeSandboxRequest{Id: id}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetSandbox(), nil
}

func (u *user) mustPause(id string) {
	u.c.t.Helper()
	if sb, err := u.pause(id); err != nil || sb.GetState() != paused {
		u.c.t.Fatalf("got %v, %v", sb, err)
	}
}

func (u *user) mustResume(id string) {
	u.c.t.Helper()
	if sb, err := u.resume(id); err != nil || sb.GetState() != running {
		u.c.t.Fatalf("got %v, %v", sb, err)
	}
}

// is checks what a sandbox's record says.
func (u *user) is(id string, want opendsecv1.State) {
	u.c.t.Helper()
	if sb, err := u.get(id); err != nil || sb.GetState() != want {
		u.c.t.Errorf("%s is %v, %v; want %v", id, sb.GetState(), err, want)
	}
}

// failing refuses one operation.
func failing(op edgetest.Op, err error) edgetest.Hooks {
	return edgetest.Hooks{State: func(_ context.Context, which edgetest.Op, _ sandbox.ID) error {
		if which == op {
			return err
		}
		return nil
	}}
}

// mute does one operation and fails to say so.
func mute(op edgetest.Op) edgetest.Hooks {
	h := failing(op, errors.New("the connection broke"))
	return edgetest.Hooks{StateDone: h.State}
}

func TestPauseAndResume(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	other := dev.mustCreate().GetId()
	var at *timestamppb.Timestamp
	for range 3 {
		sb, err := dev.pause(id)
		if err != nil || sb.GetState() != paused || sb.GetPausedAt() == nil {
			t.Fatalf("got %v, %v", sb, err)
		}
		if at != nil && !at.AsTime().Equal(sb.GetPausedAt().AsTime()) {
			t.Errorf("paused at %v, then at %v", at, sb.GetPausedAt())
		}
		at = sb.GetPausedAt()
	}
	if got, err := dev.get(id); err != nil || got.GetState() != paused || !got.GetPausedAt().AsTime().Equal(at.AsTime()) {
		t.Errorf("got %v, %v", got, err)
	}
	for want, state := range map[string]opendsecv1.State{id: paused, other: running} {
		if ids, _, err := dev.list(&opendsecv1.ListSandboxesRequest{States: []opendsecv1.State{state}}); err != nil || !slices.Equal(ids, []string{want}) {
			t.Errorf("of those %v: %v, %v", state, ids, err)
		}
	}

	// What may be asked of a paused one, and does not wake it.
	ctx := t.Context()
	ttl, err := dev.sandboxes.SetTTL(ctx, connect.NewRequest(&opendsecv1.SetTTLRequest{Id: id, TtlRunningStop: durationpb.New(time.Minute)}))
	if err != nil || ttl.Msg.GetSandbox().GetState() != paused || c.edges[0].Deadlines(sandbox.ID(id)).GetTtlRunningStop().AsDuration() != time.Minute {
		t.Errorf("set ttl: %v, %v", ttl, err)
	}
	if _, err := dev.sandboxes.RefreshSandbox(ctx, connect.NewRequest(&opendsecv1.RefreshSandboxRequest{Id: id})); err != nil {
		t.Error(err)
	}
	if _, err := dev.sandboxes.GetMetrics(ctx, connect.NewRequest(&opendsecv1.GetMetricsRequest{Id: id})); err != nil {
		t.Error(err)
	}
	dev.is(id, paused)

	for range 3 {
		sb, err := dev.resume(id)
		if err != nil || sb.GetState() != running || sb.GetPausedAt() != nil {
			t.Fatalf("got %v, %v", sb, err)
		}
	}
	record, err := c.db.GetSandbox(ctx, sandbox.ID(id))
	if want := c.edges[0].Status(sandbox.ID(id)).GetPausedFor().AsDuration(); err != nil || record.PausedFor != want.Truncate(time.Microsecond) {
		t.Errorf("it was paused for %s, %v; the node says %s", record.PausedFor, err, want)
	}
	dev.mustPause(id)
	if sb, err := dev.stop(id); err != nil || sb.GetState() != opendsecv1.State_STATE_STOPPED || sb.GetEnd().GetReason() != "stopped" {
		t.Errorf("got %v, %v", sb, err)
	}
	for _, call := range []func(string) (*opendsecv1.Sandbox, error){dev.pause, dev.resume} {
		_, err := call(id)
		if p := wantProblem(t, err, fault.SandboxEnded, ""); p.End == nil {
			t.Errorf("got %+v", p)
		}
		_, err = call("sb-000000000000")
		wantProblem(t, err, fault.NotFound, "id")
		_, err = call("")
		wantProblem(t, err, fault.InvalidArgument, "id")
	}
}

// What has not run yet has no state that could be kept.
func TestStateOfWhatHasNotRun(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	entered, hold := make(chan string, 1), make(chan struct{})
	c.edges[0].SetHooks(edgetest.Hooks{Create: func(_ context.Context, id sandbox.ID) error {
		entered <- string(id)
		<-hold
		return nil
	}})
	made := make(chan error, 1)
	go func() {
		_, err := dev.create()
		made <- err
	}()
	id := <-entered
	for name, call := range map[string]func() error{
		"pause":    func() error { _, err := dev.pause(id); return err },
		"resume":   func() error { _, err := dev.resume(id); return err },
		"fork":     func() error { _, err := dev.fork(id); return err },
		"snapshot": func() error { _, err := dev.snapshot(id, "root/demo/a:1", false); return err },
	} {
		if p := wantProblem(t, call(), fault.WrongState, ""); p.State != sandbox.Pending {
			t.Errorf("%s: got state %q", name, p.State)
		}
	}
	close(hold)
	if err := <-made; err != nil {
		t.Error(err)
	}
}

func TestPauseThatFailsLeavesItRunning(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	full := fault.New(fault.Capacity, "the disk is full")
	c.edges[0].SetHooks(failing(edgetest.Pause, full))
	_, err := dev.pause(id)
	wantProblem(t, err, fault.Capacity, "")
	dev.is(id, running)
	c.edges[0].SetHooks(edgetest.Hooks{})
	dev.mustPause(id)

	// The word of it is lost: the watcher hears it all the same.
	dev.mustResume(id)
	c.edges[0].SetHooks(mute(edgetest.Pause))
	if _, err := dev.pause(id); err == nil {
		t.Error("no error")
	}
	eventually(t, "it is recorded as paused", func() bool {
		sb, err := dev.get(id)
		return err == nil && sb.GetState() == paused
	})
}

func TestResumeThatFailsLeavesItPaused(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	dev.mustPause(id)
	at, err := dev.get(id)
	if err != nil {
		t.Fatal(err)
	}
	c.edges[0].SetHooks(failing(edgetest.Resume, errors.New("a broken disk")))
	_, err = dev.resume(id)
	wantProblem(t, err, fault.Internal, "")
	if sb, err := dev.get(id); err != nil || sb.GetState() != paused || !sb.GetPausedAt().AsTime().Equal(at.GetPausedAt().AsTime()) {
		t.Errorf("got %v, %v", sb, err)
	}
	c.edges[0].Kill()
	_, err = dev.resume(id)
	wantProblem(t, err, fault.Unavailable, "")
	dev.is(id, paused)
	c.edges[0].Serve(t)

	c.edges[0].SetHooks(mute(edgetest.Resume))
	if _, err := dev.resume(id); err == nil {
		t.Error("no error")
	}
	eventually(t, "it is recorded as running", func() bool {
		sb, err := dev.get(id)
		return err == nil && sb.GetState() == running
	})
	c.edges[0].SetHooks(edgetest.Hooks{})
	dev.mustResume(id)
}

// A node pauses what is idle by itself; a resume is not misled by a record that
// does not say so yet.
func TestResumeOfWhatPausedByItself(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	status := c.edges[0].Status(sandbox.ID(id))
	c.edges[0].Put(&edgev1.SandboxStatus{
		Id: id, Project: status.GetProject(), Backend: status.GetBackend(), StartedAt: status.GetStartedAt(),
		State: paused, PausedAt: timestamppb.Now(),
	})
	dev.mustResume(id)
	if s := c.edges[0].Status(sandbox.ID(id)).GetState(); s != running {
		t.Errorf("on its node it is %v", s)
	}
}

func TestParallelPausesAndResumesConverge(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	var group sync.WaitGroup
	for i := range 24 {
		group.Go(func() {
			call := dev.pause
			if i%2 == 1 {
				call = dev.resume
			}
			if sb, err := call(id); err != nil || sb.GetState() != running && sb.GetState() != paused {
				t.Errorf("got %v, %v", sb, err)
			}
		})
	}
	group.Wait()
	eventually(t, "record and node say the same", func() bool {
		sb, err := dev.get(id)
		return err == nil && sb.GetState() == c.edges[0].Status(sandbox.ID(id)).GetState()
	})
	dev.mustPause(id)
	dev.mustResume(id)
}

// A caller that goes away does not leave record and node apart.
func TestPauseGoesOnWithoutItsCaller(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	entered, hold := make(chan struct{}), make(chan struct{})
	c.edges[0].SetHooks(edgetest.Hooks{State: func(ctx context.Context, _ edgetest.Op, _ sandbox.ID) error {
		close(entered)
		<-hold
		return ctx.Err()
	}})
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := dev.sandboxes.PauseSandbox(ctx, connect.NewRequest(&opendsecv1.PauseSandboxRequest{Id: id}))
		failed <- err
	}()
	<-entered
	cancel()
	if err := <-failed; connect.CodeOf(err) != connect.CodeCanceled {
		t.Errorf("got %v", err)
	}
	// The next waits for its turn, and not for longer than its caller.
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := dev.sandboxes.ResumeSandbox(short, connect.NewRequest(&opendsecv1.ResumeSandboxRequest{Id: id})); connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Errorf("got %v", err)
	}
	close(hold)
	eventually(t, "it is recorded as paused", func() bool {
		sb, err := dev.get(id)
		return err == nil && sb.GetState() == paused
	})
}

// A stop wins over a resume that is under way.
func TestStopDuringResume(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	dev.mustPause(id)
	entered, hold := make(chan struct{}), make(chan struct{})
	c.edges[0].SetHooks(edgetest.Hooks{State: func(context.Context, edgetest.Op, sandbox.ID) error {
		close(entered)
		<-hold
		return nil
	}})
	failed := make(chan error, 1)
	go func() {
		_, err := dev.resume(id)
		failed <- err
	}()
	<-entered
	if sb, err := dev.stop(id); err != nil || sb.GetState() != opendsecv1.State_STATE_STOPPED {
		t.Errorf("got %v, %v", sb, err)
	}
	close(hold)
	if err := <-failed; err == nil {
		t.Error("it was resumed")
	}
	if sb, err := dev.get(id); err != nil || sb.GetState() != opendsecv1.State_STATE_STOPPED || len(c.edges[0].Live()) > 0 {
		t.Errorf("got %v, %v; the node has %v", sb, err, c.edges[0].Live())
	}
}

// Paused, a sandbox gives back its share; it is admitted anew when it wakes.
func TestWakingIsAdmitted(t *testing.T) {
	for name, tc := range map[string]struct {
		limit func(*cluster)
		kind  fault.Kind
		text  string
	}{
		"the project's quota": {func(c *cluster) {
			most := int64(600)
			_, err := c.admin().identity.SetQuota(c.t.Context(), connect.NewRequest(&opendsecv1.SetQuotaRequest{Path: "root/demo", Quota: &opendsecv1.Quota{MemoryMb: &most}}))
			if err != nil {
				c.t.Fatal(err)
			}
		}, fault.QuotaExceeded, "memory_mb"},
		"the node's room": {func(c *cluster) {
			c.edges[0].SetReport(func(r *edgev1.NodeReport) { r.Capacity.MemoryMb = 600 })
			admin := c.admin()
			eventually(c.t, "the smaller capacity is known", func() bool {
				res, err := admin.cluster.GetStatus(c.t.Context(), connect.NewRequest(&opendsecv1.GetStatusRequest{}))
				return err == nil && res.Msg.GetNodes()[0].GetCapacity().GetMemoryMb() == 600
			})
		}, fault.Capacity, "node-1 has no room"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, 1)
			dev := c.developer()
			tc.limit(c)
			first := dev.mustCreate().GetId()
			if _, err := dev.create(); problem(err).Kind != tc.kind {
				t.Fatalf("a second one: %v", err)
			}
			dev.mustPause(first)
			second := dev.mustCreate().GetId()
			_, err := dev.resume(first)
			if p := wantProblem(t, err, tc.kind, ""); !strings.Contains(p.Message, tc.text) {
				t.Errorf("%q does not say %q", p.Message, tc.text)
			}
			dev.is(first, paused)
			if s := c.edges[0].Status(sandbox.ID(first)).GetState(); s != paused {
				t.Errorf("on its node it is %v", s)
			}
			if _, err := dev.stop(second); err != nil {
				t.Fatal(err)
			}
			dev.mustResume(first)
		})
	}
}

// One that any call may wake keeps its share, so that it always can.
func TestAutoResumeKeepsItsShare(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	most := int64(600)
	_, err := c.admin().identity.SetQuota(t.Context(), connect.NewRequest(&opendsecv1.SetQuotaRequest{Path: "root/demo", Quota: &opendsecv1.Quota{MemoryMb: &most}}))
	if err != nil {
		t.Fatal(err)
	}
	sb := dev.mustCreate(func(r *opendsecv1.CreateSandboxRequest) {
		r.Spec.AutoResume, r.Spec.OnIdle, r.Spec.TtlRunningStop = true, opendsecv1.OnIdle_ON_IDLE_PAUSE, durationpb.New(time.Hour)
	})
	if s := sb.GetSpec(); !s.GetAutoResume() || s.GetOnIdle() != opendsecv1.OnIdle_ON_IDLE_PAUSE {
		t.Errorf("got %v", s)
	}
	dev.mustPause(sb.GetId())
	_, err = dev.create()
	wantProblem(t, err, fault.QuotaExceeded, "")
	// A smaller quota does not keep it asleep: it holds nothing new.
	most = 100
	_, err = c.admin().identity.SetQuota(t.Context(), connect.NewRequest(&opendsecv1.SetQuotaRequest{Path: "root/demo", Quota: &opendsecv1.Quota{MemoryMb: &most}}))
	if err != nil {
		t.Fatal(err)
	}
	dev.mustResume(sb.GetId())
	// Its node may have woken it meanwhile; a pause asks.
	dev.mustPause(sb.GetId())
	dev.mustPause(sb.GetId())
}

// Whoever has the answer of a call that woke a sandbox sees it running, also
// while the watcher has heard nothing of it.
func TestGetAfterACallWokeIt(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate(func(r *opendsecv1.CreateSandboxRequest) { r.Spec.AutoResume = true }).GetId()
	want := func(state opendsecv1.State) {
		t.Helper()
		if got, err := dev.get(id); err != nil || got.GetState() != state || (got.GetPausedAt() != nil) != (state == paused) {
			t.Fatalf("got %v, %v, want %v", got, err, state)
		}
	}
	dev.mustPause(id)
	want(paused)
	woken := proto.CloneOf(c.edges[0].Status(sandbox.ID(id)))
	woken.State, woken.PausedAt, woken.PausedFor = running, nil, durationpb.New(time.Second)
	c.edges[0].Put(woken)
	want(running)
	dev.mustPause(id)
	c.edges[0].Kill()
	want(paused) // what is recorded, when the node says nothing
}

func TestPauseWithoutABackendThatCan(t *testing.T) {
	c := newCluster(t, 1)
	c.edges[0].SetReport(func(r *edgev1.NodeReport) { r.Backends[0].Features = nil })
	admin := c.admin()
	eventually(t, "the report is known", func() bool {
		res, err := admin.cluster.GetStatus(t.Context(), connect.NewRequest(&opendsecv1.GetStatusRequest{}))
		return err == nil && len(res.Msg.GetNodes()[0].GetBackends()[0].GetFeatures()) == 0
	})
	for field, change := range map[string]func(*opendsecv1.SandboxSpec){
		"spec.on_idle":     func(s *opendsecv1.SandboxSpec) { s.OnIdle = opendsecv1.OnIdle_ON_IDLE_PAUSE },
		"spec.auto_resume": func(s *opendsecv1.SandboxSpec) { s.AutoResume = true },
	} {
		_, err := c.developer().create(func(r *opendsecv1.CreateSandboxRequest) { r.Spec.Backend = "gvisor"; change(r.Spec) })
		if p := wantProblem(t, err, fault.Unsupported, field); !slices.Equal(p.Backends, []sandbox.Backend{sandbox.Sim}) {
			t.Errorf("%s: named %v", field, p.Backends)
		}
	}
}
