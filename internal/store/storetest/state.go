package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

func testPauses(t *testing.T, db *store.DB) {
	sb := Sandbox("root/demo")
	sb.Parent, sb.State = "sb-parent000000", sandbox.Running
	create(t, db, sb)
	paused := update(t, db, sb.ID, func(sb *sandbox.Sandbox) {
		sb.Parent = "sb-another00000" // it cannot be changed
		sb.FollowRules(map[string]bool{"pypi": true}, 2)
		sb.FollowRules(nil, 1) // older
		if !sb.RevokeURL(sandbox.RevokedURL{ID: "a", Until: start.Add(time.Hour)}, start) {
			t.Error("an address cannot be revoked")
		}
		if err := sb.Follow(sandbox.Paused, start.Add(time.Minute+789), 2*time.Second+789); err != nil {
			t.Error(err)
		}
	})
	want := *sb
	want.State, want.Version = sandbox.Paused, 2
	want.Spec.NetworkRules, want.NetworkRevision = map[string]bool{"pypi": true}, 2
	want.RevokedURLs = []sandbox.RevokedURL{{ID: "a", Until: start.Add(time.Hour)}}
	want.PausedAt, want.PausedFor = start.Add(time.Minute), 2*time.Second
	diff(t, "what pausing returned", paused, &want)
	got, err := db.GetSandbox(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "a paused sandbox", got, &want)
	// The node's word again, which is more exact than the record.
	same := update(t, db, sb.ID, func(sb *sandbox.Sandbox) {
		if err := sb.Follow(sandbox.Paused, start.Add(time.Minute+789), 2*time.Second+789); err != nil {
			t.Error(err)
		}
	})
	if same.Version != 2 {
		t.Errorf("the same word again made version %d", same.Version)
	}
	end := sandbox.End{Reason: sandbox.ReasonStopped, Domain: sandbox.User, Time: start.Add(2 * time.Minute)}
	ended := update(t, db, sb.ID, func(sb *sandbox.Sandbox) {
		if err := sb.Finish(end); err != nil {
			t.Error(err)
		}
	})
	want.State, want.End, want.Version = sandbox.Stopped, &end, 3
	want.PausedAt, want.PausedFor = time.Time{}, time.Minute+2*time.Second
	diff(t, "ended while paused", ended, &want)
}

// kindsOf returns a sandbox of each kind that may count differently.
func kindsOf(project sandbox.Project) []*sandbox.Sandbox {
	var all []*sandbox.Sandbox
	for _, backend := range append([]sandbox.Backend{sandbox.Auto}, sandbox.Backends...) {
		for _, auto := range []bool{false, true} {
			sb := Sandbox(project)
			sb.Spec.Backend, sb.Spec.AutoResume = backend, auto
			// Of each a different amount, so that no two make up for each other.
			n := int64(1) << len(all)
			sb.Spec.Limits = sandbox.Limits{CPU: float64(n) / 8, MemoryMB: 64 * n, DiskMB: 1000 * n, PIDs: 100}
			all = append(all, sb)
		}
	}
	return all
}

// The database sums up exactly what Sandbox.Holds says, whatever a sandbox is
// when it is recorded and whatever becomes of it.
func testHolds(t *testing.T, db *store.DB) {
	nodes(t, db, "n1")
	check := func(what string) {
		t.Helper()
		page, err := db.ListSandboxes(t.Context(), store.SandboxFilter{Limit: 1000})
		if err != nil {
			t.Fatal(err)
		}
		var want sandbox.Resources
		for _, sb := range page.Sandboxes {
			want = want.Add(sb.Holds())
		}
		usages, err := db.NodeUsages(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		diff(t, what+": the node holds", usages[0].Used, want)
		// The project's sum is what a Place sees.
		_, err = db.CreateSandbox(t.Context(), Sandbox("root/demo"), store.Idempotency{},
			func(_ *sandbox.Sandbox, nodes []store.NodeUsage, projects []store.ProjectUsage) (string, error) {
				diff(t, what+": a place sees on the node", nodes[0].Used, want)
				for _, p := range projects {
					diff(t, what+": a place sees in "+string(p.Project.Path), p.Used, want)
				}
				return "", store.ErrLeaveOut
			})
		if err != nil {
			t.Fatal(err)
		}
	}
	all := kindsOf("root/demo")
	for _, sb := range all {
		create(t, db, sb)
	}
	check("pending")
	for _, state := range sandbox.States {
		for _, sb := range all {
			update(t, db, sb.ID, func(sb *sandbox.Sandbox) { sb.State = state })
		}
		check("moved to " + string(state))
		fresh := kindsOf("root/demo")
		for _, sb := range fresh {
			sb.State = state
			create(t, db, sb)
		}
		check("made as " + string(state))
		for _, sb := range fresh {
			update(t, db, sb.ID, func(sb *sandbox.Sandbox) { sb.State = sandbox.Stopped })
		}
	}
	// Those of one call see each other as what they hold.
	batch := kindsOf("root/demo")
	var before sandbox.Resources
	_, err := db.CreateSandboxes(t.Context(), batch, store.Idempotency{},
		func(sb *sandbox.Sandbox, nodes []store.NodeUsage, projects []store.ProjectUsage) (string, error) {
			diff(t, "held by those before it", nodes[0].Used, before)
			diff(t, "held in the project by those before it", projects[0].Used, before)
			before = before.Add(sb.Holds())
			return "n1", nil
		})
	if err != nil {
		t.Fatal(err)
	}
	// What is not the state changes what one holds too.
	for _, sb := range batch {
		update(t, db, sb.ID, func(sb *sandbox.Sandbox) {
			sb.State, sb.Spec.Backend, sb.Spec.AutoResume = sandbox.Paused, sandbox.GVisor, !sb.Spec.AutoResume
		})
	}
	check("another backend and another auto_resume")
}

func paused(sb *sandbox.Sandbox) *sandbox.Sandbox {
	sb.State, sb.StartedAt, sb.PausedAt = sandbox.Paused, start, start.Add(time.Minute)
	return sb
}

func testWake(t *testing.T, db *store.DB) {
	nodes(t, db, "n1", "n2")
	sb := create(t, db, paused(Sandbox("root/demo")))
	other := create(t, db, Sandbox("root/demo/a"))
	woken, err := db.WakeSandbox(t.Context(), sb.ID, func(got *sandbox.Sandbox, nodes []store.NodeUsage, projects []store.ProjectUsage) (string, error) {
		if got.ID != sb.ID || got.State != sandbox.Paused {
			t.Errorf("the place was asked for %+v", got)
		}
		diff(t, "on its node without it", nodes[0].Used, other.Holds())
		diff(t, "on another node", nodes[1].Used, sandbox.Resources{})
		var paths []sandbox.Project
		for _, p := range projects {
			paths = append(paths, p.Project.Path)
			diff(t, "without it in "+string(p.Project.Path), p.Used, other.Holds())
		}
		diff(t, "projects that bind it", paths, []sandbox.Project{"root/demo", "root"})
		return "n1", nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want := *sb
	want.State, want.Version = sandbox.Starting, 2
	diff(t, "woken", woken, &want)
	got, err := db.GetSandbox(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "recorded as woken", got, &want)

	never := func(*sandbox.Sandbox, []store.NodeUsage, []store.ProjectUsage) (string, error) {
		t.Error("one that need not be placed was placed")
		return "n1", nil
	}
	for _, state := range []sandbox.State{sandbox.Starting, sandbox.Running} {
		update(t, db, sb.ID, func(sb *sandbox.Sandbox) { sb.State = state })
		again, err := db.WakeSandbox(t.Context(), sb.ID, never)
		if err != nil || again.State != state {
			t.Errorf("woken while %s: %+v, %v", state, again, err)
		}
	}
	for _, state := range []sandbox.State{sandbox.Pending, sandbox.Stopping, sandbox.Stopped, sandbox.Failed} {
		update(t, db, sb.ID, func(sb *sandbox.Sandbox) { sb.State = state })
		var wrong *sandbox.WrongStateError
		if _, err := db.WakeSandbox(t.Context(), sb.ID, never); !errors.As(err, &wrong) || wrong.State != state {
			t.Errorf("woken while %s: %v", state, err)
		}
	}
	_, err = db.WakeSandbox(t.Context(), "sb-000000000000", never)
	wantKind(t, err, fault.NotFound, "")
}

func testWakeRefused(t *testing.T, db *store.DB) {
	nodes(t, db, "n1", "n2")
	sb := create(t, db, paused(Sandbox("root/demo")))
	full := fault.New(fault.Capacity, "no room")
	for _, c := range []struct {
		name  string
		place store.Place
		want  error
	}{
		{"no room", func(*sandbox.Sandbox, []store.NodeUsage, []store.ProjectUsage) (string, error) { return "", full }, full},
		{"another node", On("n2"), nil},
	} {
		_, err := db.WakeSandbox(t.Context(), sb.ID, c.place)
		if err == nil || c.want != nil && err != c.want { //nolint:errorlint // it must come through as it is
			t.Errorf("%s: got %v", c.name, err)
		}
		got, gerr := db.GetSandbox(t.Context(), sb.ID)
		if gerr != nil {
			t.Fatal(gerr)
		}
		diff(t, c.name+" leaves it", got, sb)
	}
	// What has run is where its state is.
	update(t, db, sb.ID, func(sb *sandbox.Sandbox) { sb.State = sandbox.Starting })
	var wrong *sandbox.WrongStateError
	if _, err := db.MoveSandbox(t.Context(), sb.ID, On("n2")); !errors.As(err, &wrong) {
		t.Errorf("moved while it was being woken: %v", err)
	}
}

// Sandboxes that wake side by side, and new ones with them, never get more than
// there is.
func testWakeRace(t *testing.T, db *store.DB) {
	nodes(t, db, "n1")
	room := sandbox.Resources{CPU: 10, MemoryMB: 1 << 40, DiskMB: 1 << 40, Sandboxes: 1 << 40}
	var asleep []sandbox.ID
	for range 24 {
		asleep = append(asleep, create(t, db, paused(Sandbox("root/demo"))).ID)
	}
	var awake atomic.Int64
	atOnce(48, func(i int) {
		var err error
		if i%2 == 0 {
			// Each is written to meanwhile as well.
			_, err = db.UpdateSandbox(t.Context(), asleep[i/2], func(sb *sandbox.Sandbox) error {
				sb.Spec.Metadata = map[string]string{"i": fmt.Sprint(i)}
				return nil
			})
			if err == nil {
				_, err = db.WakeSandbox(t.Context(), asleep[i/2], fitting(room))
			}
		} else {
			_, err = db.CreateSandbox(t.Context(), Sandbox("root/other"), store.Idempotency{}, fitting(room))
		}
		switch {
		case err == nil:
			awake.Add(1)
		case !fault.Is(err, fault.Capacity):
			t.Error(err)
		}
	})
	if awake.Load() != 10 {
		t.Errorf("%d are awake where 10 fit", awake.Load())
	}
	usages, err := db.NodeUsages(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if usages[0].Used.CPU != 10 {
		t.Errorf("the node holds %+v", usages[0].Used)
	}
}

// The same sandbox woken many times at once is admitted once, and a record that
// changes while it is being woken is read again.
func testWakeOne(t *testing.T, db *store.DB) {
	nodes(t, db, "n1")
	sb := create(t, db, paused(Sandbox("root/demo")))
	var placed atomic.Int64
	once := func(*sandbox.Sandbox, []store.NodeUsage, []store.ProjectUsage) (string, error) {
		placed.Add(1)
		return "n1", nil
	}
	atOnce(16, func(i int) {
		if i%2 == 0 {
			_, err := db.UpdateSandbox(context.WithoutCancel(t.Context()), sb.ID, func(sb *sandbox.Sandbox) error {
				sb.Spec.Metadata = map[string]string{"i": fmt.Sprint(i)}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			return
		}
		if got, err := db.WakeSandbox(t.Context(), sb.ID, once); err != nil || got.State != sandbox.Starting {
			t.Errorf("got %+v, %v", got, err)
		}
	})
	got, err := db.GetSandbox(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	// 8 changes and one wake; a wake that met a change was placed again.
	if got.State != sandbox.Starting || got.Version != 10 || placed.Load() < 1 || placed.Load() > 9 {
		t.Errorf("it is %s in version %d, placed %d times", got.State, got.Version, placed.Load())
	}
}
