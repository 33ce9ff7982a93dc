package watcher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/edgetest"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// says makes an edge say that a sandbox runs or, with a time, is paused.
func (b *bench) says(id sandbox.ID, pausedAt time.Time, pausedFor time.Duration) {
	b.t.Helper()
	s := &edgev1.SandboxStatus{
		Id: string(id), Project: "root/demo", Backend: "gvisor", State: fault.StateToProto(sandbox.Running),
		StartedAt: timestamppb.New(b.clock.Now()), PausedFor: durationpb.New(pausedFor),
	}
	if !pausedAt.IsZero() {
		s.State, s.PausedAt = fault.StateToProto(sandbox.Paused), timestamppb.New(pausedAt)
	}
	b.edges[0].Put(s)
	b.eventually("the edge's word is heard", func() bool {
		m := b.nodes[0].look().machines[id]
		return m.pausedFor == pausedFor && m.pausedAt.Equal(pausedAt)
	})
}

// is waits until a record says so.
func (b *bench) is(id sandbox.ID, state sandbox.State, pausedAt time.Time, pausedFor time.Duration) {
	b.t.Helper()
	b.eventually("it is "+string(state), func() bool {
		sb := b.get(id)
		return sb.State == state && sb.PausedAt.Equal(pausedAt) && sb.PausedFor == pausedFor
	})
}

// stays checks that a record still says so after the next pass.
func (b *bench) stays(id sandbox.ID, state sandbox.State, after time.Duration) {
	b.t.Helper()
	b.pass(after)
	if sb := b.get(id); sb.State != state {
		b.t.Errorf("it is recorded as %s since %v, %v before; want %s", sb.State, sb.PausedAt, sb.PausedFor, state)
	}
}

// A change of network rules that its server did not record is taken over, and one
// that is older than what is recorded is not.
func TestNetworkRulesAreFollowed(t *testing.T) {
	b := newBench(t, "a")
	id := b.record("a", sandbox.Running, func(sb *sandbox.Sandbox) {
		sb.Spec.NetworkRules, sb.NetworkRevision = map[string]bool{"first.example": true}, 3
	})
	for _, step := range []struct {
		revision int64
		want     string
	}{{2, "first.example"}, {4, "n4.example"}, {3, "n4.example"}} {
		b.edges[0].Put(&edgev1.SandboxStatus{
			Id: string(id), Project: "root/demo", Backend: "gvisor", State: fault.StateToProto(sandbox.Running), NetworkRevision: step.revision,
			NetworkRules: &opendsecv1.NetworkRules{Rules: map[string]bool{fmt.Sprintf("n%d.example", step.revision): true}},
		})
		b.eventually("the edge's word is heard", func() bool { return b.nodes[0].look().machines[id].revision == step.revision })
		b.pass(time.Second)
		if sb := b.get(id); len(sb.Spec.NetworkRules) != 1 || !sb.Spec.NetworkRules[step.want] {
			t.Errorf("after change %d the record has %v", step.revision, sb.Spec.NetworkRules)
		}
	}
}

func pausedRecord(b *bench, change ...func(*sandbox.Sandbox)) sandbox.ID {
	b.t.Helper()
	return b.record("a", sandbox.Paused, append([]func(*sandbox.Sandbox){func(sb *sandbox.Sandbox) {
		sb.Spec.Backend, sb.StartedAt, sb.PausedAt, sb.PausedFor = sandbox.GVisor, sb.CreatedAt, sb.CreatedAt, time.Minute
	}}, change...)...)
}

func TestPausesAreRecorded(t *testing.T) {
	b := newBench(t, "a")
	never := time.Time{}
	id := b.record("a", sandbox.Pending)
	b.says(id, never, 0)
	b.is(id, sandbox.Running, never, 0)
	first := b.clock.Now()
	b.says(id, first, 0)
	b.is(id, sandbox.Paused, first, 0)
	usages, err := b.db.NodeUsages(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got, want := usages[0].Used, (sandbox.Resources{DiskMB: 256, Sandboxes: 1}); got != want {
		t.Errorf("paused it holds %+v; want %+v", got, want)
	}
	b.stays(id, sandbox.Paused, time.Hour)
	b.says(id, never, time.Hour)
	b.is(id, sandbox.Running, never, time.Hour)
	// Paused and woken between two looks: only the time tells.
	b.says(id, never, 2*time.Hour)
	b.is(id, sandbox.Running, never, 2*time.Hour)
	b.stays(id, sandbox.Running, time.Second)
}

// A sandbox that was paused for being idle before the API recorded that it runs.
func TestPausedBeforeItIsRecorded(t *testing.T) {
	b := newBench(t, "a")
	for _, state := range []sandbox.State{sandbox.Pending, sandbox.Starting} {
		id := b.record("a", state)
		b.says(id, b.clock.Now(), 0)
		b.is(id, sandbox.Paused, b.clock.Now(), 0)
		if sb := b.get(id); sb.StartedAt.IsZero() {
			t.Errorf("it was %s: recorded %+v", state, sb)
		}
	}
}

// The API has recorded what a node answered before the watcher has heard it:
// what is heard late changes nothing.
func TestOldWordDoesNotLeadBack(t *testing.T) {
	b := newBench(t, "a")
	never := time.Time{}
	running := b.record("a", sandbox.Running, func(sb *sandbox.Sandbox) { sb.PausedFor = time.Minute })
	b.says(running, b.clock.Now(), 0) // before it was woken
	paused := pausedRecord(b)
	b.says(paused, never, time.Minute) // before it was paused
	b.pass(0)
	b.stays(running, sandbox.Running, 30*time.Second)
	b.stays(paused, sandbox.Paused, 0)

	// The new word comes, and all goes on.
	b.says(running, never, time.Minute)
	b.says(paused, b.clock.Now().Add(-30*time.Second), time.Minute)
	b.pass(0)
	b.stays(running, sandbox.Running, 61*time.Second)
	b.stays(paused, sandbox.Paused, 0)
}

// What a node says again and again holds in the end, however old it seems.
func TestNodeHasTheLastWord(t *testing.T) {
	b := newBench(t, "a")
	never := time.Time{}
	running := b.record("a", sandbox.Running, func(sb *sandbox.Sandbox) { sb.PausedFor = time.Minute })
	b.says(running, b.clock.Now(), time.Second)
	paused := pausedRecord(b)
	b.says(paused, never, time.Minute)
	b.pass(0)
	at := b.clock.Now()
	b.stays(running, sandbox.Running, 59*time.Second)
	b.stays(paused, sandbox.Paused, 0)
	b.pass(2 * time.Second)
	b.is(running, sandbox.Paused, at, time.Second)
	b.is(paused, sandbox.Running, never, time.Minute)
}

// A sandbox that the API is waking is left to it, until it can be waking no more.
func TestBeingWoken(t *testing.T) {
	b := newBench(t, "a")
	id := pausedRecord(b)
	at := b.clock.Now()
	b.says(id, at, time.Minute)
	woken, err := b.db.WakeSandbox(t.Context(), id, func(sb *sandbox.Sandbox, _ []store.NodeUsage, _ []store.ProjectUsage) (string, error) {
		return sb.Node, nil
	})
	if err != nil || woken.State != sandbox.Starting {
		t.Fatalf("got %+v, %v", woken, err)
	}
	b.pass(0)
	b.says(id, at, time.Minute) // once more
	b.stays(id, sandbox.Starting, 2*time.Minute)
	b.pass(61 * time.Second)
	b.is(id, sandbox.Paused, at, time.Minute)

	// The node wakes it: that is recorded at once, also without the API.
	update := func(change func(*sandbox.Sandbox) error) {
		t.Helper()
		if _, err := b.db.UpdateSandbox(t.Context(), id, change); err != nil {
			t.Fatal(err)
		}
	}
	update(func(sb *sandbox.Sandbox) error { return sb.MoveTo(sandbox.Starting) })
	b.says(id, time.Time{}, time.Hour)
	b.is(id, sandbox.Running, time.Time{}, time.Hour)

	// It is woken and at once paused again: that is another pause.
	b.says(id, b.clock.Now(), time.Hour)
	b.is(id, sandbox.Paused, b.clock.Now(), time.Hour)
	update(func(sb *sandbox.Sandbox) error { return sb.MoveTo(sandbox.Starting) })
	b.says(id, b.clock.Now(), 2*time.Hour)
	b.is(id, sandbox.Paused, b.clock.Now(), 2*time.Hour)
}

// A new wake has its own patience.
func TestWakesOneAfterTheOther(t *testing.T) {
	b := newBench(t, "a")
	id := pausedRecord(b)
	at := b.clock.Now()
	b.says(id, at, time.Minute)
	move := func(state sandbox.State) {
		t.Helper()
		if _, err := b.db.UpdateSandbox(t.Context(), id, func(sb *sandbox.Sandbox) error { return sb.MoveTo(state) }); err != nil {
			t.Fatal(err)
		}
	}
	move(sandbox.Starting)
	b.pass(0)
	b.stays(id, sandbox.Starting, 2*time.Minute)
	move(sandbox.Paused)
	b.pass(time.Second)
	move(sandbox.Starting)
	b.stays(id, sandbox.Starting, 2*time.Minute)
	b.stays(id, sandbox.Starting, 2*time.Minute)
	b.pass(61 * time.Second)
	b.want(id, sandbox.Paused, "", "")
}

func TestPausedTimeIsNoLifetime(t *testing.T) {
	b := newBench(t, "a")
	short := func(sb *sandbox.Sandbox) { sb.Spec.Deadlines.Lifetime, sb.PausedFor = time.Minute, 0 }
	id, waking := pausedRecord(b, short), pausedRecord(b, short)
	at := b.clock.Now()
	b.says(id, at, 0)
	b.says(waking, at, 0)
	b.stays(id, sandbox.Paused, time.Hour)
	if _, err := b.db.UpdateSandbox(t.Context(), waking, func(sb *sandbox.Sandbox) error { return sb.MoveTo(sandbox.Starting) }); err != nil {
		t.Fatal(err)
	}
	b.stays(waking, sandbox.Starting, time.Second)
	// Stopped while paused long after its lifetime, it was stopped by the call.
	if _, err := b.db.UpdateSandbox(t.Context(), waking, func(sb *sandbox.Sandbox) error { return sb.MoveTo(sandbox.Stopping) }); err != nil {
		t.Fatal(err)
	}
	b.pass(0)
	b.says(id, time.Time{}, time.Hour)
	b.is(id, sandbox.Running, time.Time{}, time.Hour)
	b.stays(id, sandbox.Running, 80*time.Second)
	b.want(waking, sandbox.Stopped, sandbox.ReasonStopped, sandbox.User)
	b.pass(11 * time.Second)
	b.want(id, sandbox.Stopped, sandbox.ReasonLifetime, sandbox.Policy)
}

// A paused one that its node does not know is lost like one that runs. One whose
// node is silent is not, if its state is on the disk: it is there when the node
// comes back.
func TestPausedOnesAreLost(t *testing.T) {
	b := newBench(t, "a", "b")
	unknown, frozen := pausedRecord(b), pausedRecord(b, func(sb *sandbox.Sandbox) { sb.Spec.Backend = sandbox.Container })
	far := pausedRecord(b)
	b.says(far, b.clock.Now(), time.Minute)
	b.says(frozen, b.clock.Now(), time.Minute)
	b.pass(0)
	b.pass(61 * time.Second)
	b.want(unknown, sandbox.Failed, sandbox.ReasonLost, sandbox.Infra)
	b.want(far, sandbox.Paused, "", "")
	b.kill(b.edges[0])
	b.pass(6*time.Minute, "b")
	b.want(frozen, sandbox.Failed, sandbox.ReasonLost, sandbox.Infra)
	if sb := b.get(frozen); !sb.PausedAt.IsZero() {
		t.Errorf("it ended and is still paused: %+v", sb)
	}
	b.pass(24*time.Hour, "b")
	b.want(far, sandbox.Paused, "", "")
	b.edges[0].Serve(t)
	b.heard()
	b.pass(0)
	b.pass(61 * time.Second)
	b.want(far, sandbox.Paused, "", "")
}

// Copies that were recorded by an API that died before their node heard of them
// are made by nobody: the watcher only ends them.
func TestCopiesThatWereNeverMade(t *testing.T) {
	b := newBench(t, "a")
	b.edges[0].SetHooks(edgetest.Hooks{Create: func(_ context.Context, id sandbox.ID) error {
		t.Errorf("%s was started", id)
		return errors.New("not here")
	}})
	source := b.record("a", sandbox.Running)
	b.says(source, time.Time{}, 0)
	child := b.record("a", sandbox.Pending, func(sb *sandbox.Sandbox) { sb.Parent = source })
	b.pass(0)
	b.pass(2 * time.Minute)
	b.want(child, sandbox.Pending, "", "")
	b.pass(61 * time.Second)
	b.want(child, sandbox.Failed, sandbox.ReasonLost, sandbox.Infra)
	b.want(source, sandbox.Running, "", "")
}

func TestUnusedImageContent(t *testing.T) {
	b := newBench(t, "a", "b")
	const named, used, left, late = "sha256:01", "sha256:02", "sha256:03", "sha256:04"
	name := func(digest, tag string) {
		t.Helper()
		_, err := b.db.PutImage(t.Context(), store.Image{
			Name: sandbox.ImageName{Project: "root", Repo: "py", Tag: tag}, Digest: digest, Kind: "memory", Config: []byte(`{}`),
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	pass := func(after time.Duration, names ...string) {
		t.Helper()
		b.clock.forward(after)
		b.heard(names...)
		if err := b.dropUnused(t.Context(), b.clock.Now()); err != nil {
			t.Fatal(err)
		}
	}
	name(named, "1")
	id := b.record("a", sandbox.Paused, func(sb *sandbox.Sandbox) { sb.ImageDigest = used })
	for i, e := range b.edges {
		e.SetReport(func(r *edgev1.NodeReport) { r.Images = [][]string{{named, used, left, late}, {left}}[i] })
		b.eventually("its images are heard of", func() bool { return len(b.nodes[i].look().report.GetImages()) > 0 })
	}
	deleted := func(i int, want ...string) {
		t.Helper()
		if got := b.edges[i].DeletedImages(); !slices.Equal(got, want) {
			t.Errorf("node %s was to remove %v; want %v", b.edges[i].Name, got, want)
		}
	}
	pass(0)
	pass(119 * time.Second)
	deleted(0)
	deleted(1)
	name(late, "2")    // just in time
	b.kill(b.edges[1]) // what is silent is not asked
	pass(11*time.Second, "a")
	deleted(0, left)
	deleted(1)
	b.edges[0].SetReport(func(r *edgev1.NodeReport) { r.Images = []string{named, used, late} })
	b.eventually("it is gone", func() bool { return len(b.nodes[0].look().report.GetImages()) == 3 })

	// A name goes, and the last sandbox that used one: from then on it counts.
	if _, err := b.db.DeleteImage(t.Context(), sandbox.ImageName{Project: "root", Repo: "py", Tag: "2"}); err != nil {
		t.Fatal(err)
	}
	pass(time.Hour, "a")
	deleted(0, left)
	if err := b.finish(t.Context(), id, sandbox.End{Reason: sandbox.ReasonStopped, Domain: sandbox.User, Time: b.clock.Now()}); err != nil {
		t.Fatal(err)
	}
	pass(time.Minute, "a")
	deleted(0, left)
	pass(time.Minute, "a")
	deleted(0, left, late)
	b.edges[0].SetReport(func(r *edgev1.NodeReport) { r.Images = []string{named, used} })
	b.eventually("it is gone", func() bool { return len(b.nodes[0].look().report.GetImages()) == 2 })
	pass(time.Minute, "a")
	deleted(0, left, late, used)

	// The other node comes back with what nobody needs, and has the same time.
	b.edges[1].Serve(t)
	b.heard("b")
	pass(0, "b")
	deleted(1)
	pass(2*time.Minute, "b")
	deleted(1, left)
}
