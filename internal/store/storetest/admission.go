package storetest

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// fitting is a Place that keeps every node to room and every project to its
// quota, and takes the first node that fits.
func fitting(room sandbox.Resources) store.Place {
	return func(sb *sandbox.Sandbox, nodes []store.NodeUsage, projects []store.ProjectUsage) (string, error) {
		want := sb.Spec.Limits.Resources()
		for _, p := range projects {
			if q := p.Project.Quota.Sandboxes; q != nil && p.Used.Sandboxes+1 > *q {
				return "", fault.New(fault.QuotaExceeded, "project %s is at its quota of %d", p.Project.Path, *q)
			}
		}
		for _, n := range nodes {
			if n.Used.Add(want).Fits(room) {
				return n.Node.Name, nil
			}
		}
		return "", fault.New(fault.Capacity, "no node has room")
	}
}

func nodes(t *testing.T, db *store.DB, names ...string) {
	t.Helper()
	for _, n := range names {
		if err := db.PutNode(t.Context(), store.Node{Name: n, Address: "https://" + n, Report: []byte(`{}`), LastSeen: start}); err != nil {
			t.Fatal(err)
		}
	}
}

func testAdmission(t *testing.T, db *store.DB) {
	nodes(t, db, "n1", "n2")
	quota := int64(20)
	Change(t, db, func(c *store.Change) error {
		_, err := c.SetQuota(t.Context(), "root/demo", store.Quota{Sandboxes: &quota})
		return err
	})
	// Room for 15 of 0.2 cores on each node; 20 in root/demo and below it.
	place := fitting(sandbox.Resources{CPU: 3, MemoryMB: 1 << 40, DiskMB: 1 << 40, Sandboxes: 1 << 40})
	var demo, other, quotaRefused, capacityRefused atomic.Int64
	atOnce(64, func(i int) {
		project, made := sandbox.Project("root/demo/a"), &demo
		if i%2 == 1 {
			project, made = "root/other", &other
		}
		sb := Sandbox(project)
		sb.Spec.Limits.CPU = 0.2
		_, err := db.CreateSandbox(t.Context(), sb, store.Idempotency{}, place)
		switch {
		case err == nil:
			made.Add(1)
		case fault.Is(err, fault.QuotaExceeded):
			quotaRefused.Add(1)
		case fault.Is(err, fault.Capacity):
			capacityRefused.Add(1)
		default:
			t.Error(err)
		}
	})
	if got := demo.Load() + other.Load(); got != 30 {
		t.Errorf("%d sandboxes were admitted where 30 fit (%d refused for quota, %d for capacity)",
			got, quotaRefused.Load(), capacityRefused.Load())
	}
	if demo.Load() > quota {
		t.Errorf("%d sandboxes were admitted to a project with a quota of %d", demo.Load(), quota)
	}
	usages, err := db.NodeUsages(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range usages {
		if u.Used.Sandboxes != 15 || !u.Used.Fits(sandbox.Resources{CPU: 3, MemoryMB: 15 * 512, DiskMB: 15 * 1024, Sandboxes: 15}) {
			t.Errorf("node %s was given %+v, want 15 sandboxes", u.Node.Name, u.Used)
		}
	}
	freeOne(t, db, place)
}

// freeOne checks that the end of a sandbox makes room for exactly one.
func freeOne(t *testing.T, db *store.DB, place store.Place) {
	t.Helper()
	on, err := db.LiveOnNode(t.Context(), "n2")
	if err != nil {
		t.Fatal(err)
	}
	update(t, db, on[0].ID, func(sb *sandbox.Sandbox) {
		sb.State, sb.End = sandbox.Stopped, &sandbox.End{Reason: sandbox.ReasonStopped, Domain: sandbox.User, Time: start}
	})
	for i, want := range []fault.Kind{"", fault.Capacity} {
		sb := Sandbox("root/other")
		sb.Spec.Limits.CPU = 0.2
		_, err := db.CreateSandbox(t.Context(), sb, store.Idempotency{}, place)
		if i == 0 && (err != nil || sb.Node != "n2") || i == 1 && !fault.Is(err, want) {
			t.Errorf("create %d after an end: node %q, %v", i, sb.Node, err)
		}
	}
}

// Programs that share a database oversell as little as calls of one program.
func testTwoPrograms(t *testing.T, address string) {
	dbs := []*store.DB{Open(t, address), Open(t, address)}
	Projects(t, dbs[0], "root")
	nodes(t, dbs[1], "n1")
	place := fitting(sandbox.Resources{CPU: 10, MemoryMB: 1 << 40, DiskMB: 1 << 40, Sandboxes: 1 << 40})
	var made atomic.Int64
	atOnce(32, func(i int) {
		sb := Sandbox("root")
		_, err := dbs[i%2].CreateSandbox(t.Context(), sb, store.Idempotency{}, place)
		if err == nil {
			made.Add(1)
			_, err = dbs[(i+1)%2].UpdateSandbox(t.Context(), sb.ID, func(sb *sandbox.Sandbox) error { return sb.MoveTo(sandbox.Running) })
		}
		if err != nil && !fault.Is(err, fault.Capacity) {
			t.Error(err)
		}
	})
	if made.Load() != 10 {
		t.Errorf("%d sandboxes were admitted where 10 fit", made.Load())
	}
}

func testSeveral(t *testing.T, db *store.DB) {
	nodes(t, db, "n1", "n2")
	room := fitting(sandbox.Resources{CPU: 2, MemoryMB: 1 << 40, DiskMB: 1 << 40, Sandboxes: 1 << 40})
	batch := func(n int) []*sandbox.Sandbox {
		all := make([]*sandbox.Sandbox, n)
		for i := range all {
			all[i] = Sandbox("root/demo")
		}
		return all
	}
	_, err := db.CreateSandboxes(t.Context(), batch(5), store.Idempotency{}, room)
	wantKind(t, err, fault.Capacity, "")
	if n := count(t, db, store.SandboxFilter{}); n != 0 {
		t.Errorf("%d sandboxes of a refused set are recorded", n)
	}
	five := batch(5)
	_, err = db.CreateSandboxes(t.Context(), five, store.Idempotency{},
		func(sb *sandbox.Sandbox, nodes []store.NodeUsage, projects []store.ProjectUsage) (string, error) {
			node, err := room(sb, nodes, projects)
			if err != nil {
				return "", store.ErrLeaveOut
			}
			return node, nil
		})
	if err != nil {
		t.Fatal(err)
	}
	var placed []string
	for _, sb := range five {
		placed = append(placed, sb.Node)
	}
	diff(t, "where five went that wanted four places", placed, []string{"n1", "n1", "n2", "n2", ""})
	if n := count(t, db, store.SandboxFilter{}); n != 4 {
		t.Errorf("%d sandboxes are recorded, want 4", n)
	}
	mixed := []*sandbox.Sandbox{Sandbox("root/demo"), Sandbox("root/other")}
	if _, err := db.CreateSandboxes(t.Context(), mixed, store.Idempotency{}, On("n1")); err == nil {
		t.Error("sandboxes of two projects were admitted together")
	}
	if _, err := db.CreateSandboxes(t.Context(), nil, store.Idempotency{}, On("n1")); err == nil {
		t.Error("nothing at all was admitted")
	}
}

func testIdempotency(t *testing.T, db *store.DB) {
	key := store.Idempotency{Caller: "ann", Key: "k", RequestHash: "h"}
	first := []*sandbox.Sandbox{Sandbox("root/demo"), Sandbox("root/demo")}
	if existing, err := db.CreateSandboxes(t.Context(), first, key, On("n1")); err != nil || existing != nil {
		t.Fatalf("first use of a key: %v, %v", existing, err)
	}
	later := func(project sandbox.Project, d time.Duration) *sandbox.Sandbox {
		sb := Sandbox(project)
		sb.CreatedAt = start.Add(d)
		return sb
	}
	ids := func(all []*sandbox.Sandbox) []sandbox.ID {
		var out []sandbox.ID
		for _, sb := range all {
			out = append(out, sb.ID)
		}
		slices.Sort(out)
		return out
	}
	for _, c := range []struct {
		name     string
		sb       *sandbox.Sandbox
		key      store.Idempotency
		repeated bool
	}{
		{"the same again", later("root/demo", time.Minute), key, true},
		{"just within a day", later("root/demo", 24*time.Hour-time.Microsecond), key, true},
		{"another caller", later("root/demo", time.Minute), store.Idempotency{Caller: "bob", Key: "k", RequestHash: "h"}, false},
		{"another project", later("root/other", time.Minute), key, false},
		{"another key", later("root/demo", time.Minute), store.Idempotency{Caller: "ann", Key: "l", RequestHash: "h"}, false},
		{"no key", later("root/demo", time.Minute), store.Idempotency{Caller: "ann", RequestHash: "h"}, false},
		{"a day later", later("root/demo", 24*time.Hour), store.Idempotency{Caller: "ann", Key: "k", RequestHash: "other"}, false},
	} {
		existing, err := db.CreateSandboxes(t.Context(), []*sandbox.Sandbox{c.sb}, c.key, On("n1"))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if c.repeated {
			diff(t, c.name, ids(existing), ids(first))
		} else if existing != nil {
			t.Errorf("%s: got the earlier %v", c.name, ids(existing))
		}
	}
	_, err := db.CreateSandbox(t.Context(), later("root/demo", 25*time.Hour), key, On("n1"))
	wantKind(t, err, fault.InvalidArgument, "idempotency_key")

	refused := store.Idempotency{Caller: "ann", Key: "refused", RequestHash: "h"}
	leaveOut := func(*sandbox.Sandbox, []store.NodeUsage, []store.ProjectUsage) (string, error) {
		return "", store.ErrLeaveOut
	}
	for range 2 {
		if existing, err := db.CreateSandbox(t.Context(), Sandbox("root"), refused, leaveOut); existing != nil || err != nil {
			t.Errorf("a key that made nothing: %v, %v", existing, err)
		}
	}
	if existing, err := db.CreateSandbox(t.Context(), Sandbox("root"), refused, On("n1")); existing != nil || err != nil {
		t.Errorf("a key that had made nothing: %v, %v", existing, err)
	}
}

func testIdempotencyRace(t *testing.T, db *store.DB) {
	key := store.Idempotency{Caller: "ann", Key: "k", RequestHash: "h"}
	var made, repeated atomic.Int64
	atOnce(32, func(int) {
		existing, err := db.CreateSandbox(t.Context(), Sandbox("root/demo"), key, On("n1"))
		switch {
		case err != nil:
			t.Error(err)
		case existing == nil:
			made.Add(1)
		default:
			repeated.Add(1)
		}
	})
	if made.Load() != 1 || repeated.Load() != 31 {
		t.Errorf("%d made, %d repeated; want 1, 31", made.Load(), repeated.Load())
	}
}

func testFilters(t *testing.T, db *store.DB) {
	made := map[string]sandbox.ID{}
	name := map[sandbox.ID]string{}
	for i, c := range []struct {
		name    string
		project sandbox.Project
		labels  map[string]string
		state   sandbox.State
		node    string
	}{
		{"demo", "root/demo", map[string]string{"task": "1", "env": "x"}, sandbox.Running, "n1"},
		{"below", "root/demo/a", map[string]string{"task": "1"}, sandbox.Starting, "n2"},
		{"other", "root/other", map[string]string{"task": "2"}, sandbox.Running, "n1"},
		{"ended", "root/demo", map[string]string{"task": "1"}, sandbox.Stopped, "n1"},
	} {
		sb := Sandbox(c.project)
		sb.Spec.Labels, sb.State, sb.CreatedAt = c.labels, c.state, start.Add(time.Duration(i)*time.Second)
		if _, err := db.CreateSandbox(t.Context(), sb, store.Idempotency{}, On(c.node)); err != nil {
			t.Fatal(err)
		}
		made[c.name], name[sb.ID] = sb.ID, c.name
	}
	for _, c := range []struct {
		filter store.SandboxFilter
		want   []string
	}{
		{store.SandboxFilter{}, []string{"other", "below", "demo"}},
		{store.SandboxFilter{Ended: true}, []string{"ended", "other", "below", "demo"}},
		{store.SandboxFilter{Project: "root"}, []string{"other", "below", "demo"}},
		{store.SandboxFilter{Project: "root/demo"}, []string{"below", "demo"}},
		{store.SandboxFilter{Project: "root/demo/a"}, []string{"below"}},
		{store.SandboxFilter{Project: "root/dem"}, nil},
		{store.SandboxFilter{States: []sandbox.State{sandbox.Running}}, []string{"other", "demo"}},
		{store.SandboxFilter{States: []sandbox.State{sandbox.Stopped, sandbox.Starting}}, []string{"ended", "below"}},
		{store.SandboxFilter{Labels: map[string]string{"task": "1"}}, []string{"below", "demo"}},
		{store.SandboxFilter{Labels: map[string]string{"task": "1", "env": "x"}, Ended: true}, []string{"demo"}},
		{store.SandboxFilter{Labels: map[string]string{"task": ""}}, nil},
		{store.SandboxFilter{Node: "n1"}, []string{"other", "demo"}},
		{store.SandboxFilter{Node: "n2", Project: "root/demo", Labels: map[string]string{"task": "1"}}, []string{"below"}},
	} {
		page, err := db.ListSandboxes(t.Context(), c.filter)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, sb := range page.Sandboxes {
			got = append(got, name[sb.ID])
		}
		diff(t, fmt.Sprintf("%+v", c.filter), got, c.want)
	}
	_, err := db.ListSandboxes(t.Context(), store.SandboxFilter{PageToken: "junk"})
	wantKind(t, err, fault.InvalidArgument, "page_token")
}

func testPages(t *testing.T, db *store.DB) {
	want := map[sandbox.ID]bool{}
	for i := range 23 {
		sb := Sandbox("root")
		sb.CreatedAt = start.Add(time.Duration(i/5) * time.Second) // fives of the same time
		want[create(t, db, sb).ID] = true
	}
	got, pages, token := map[sandbox.ID]bool{}, 0, ""
	var last time.Time
	for {
		page, err := db.ListSandboxes(t.Context(), store.SandboxFilter{Project: "root", Limit: 4, PageToken: token})
		if err != nil {
			t.Fatal(err)
		}
		for _, sb := range page.Sandboxes {
			if got[sb.ID] {
				t.Errorf("%s came twice", sb.ID)
			}
			if !last.IsZero() && sb.CreatedAt.After(last) {
				t.Errorf("%s is newer than the one before it", sb.ID)
			}
			got[sb.ID], last = true, sb.CreatedAt
		}
		// One that is made meanwhile is newer than all and disturbs nothing.
		sb := Sandbox("root")
		sb.CreatedAt = start.Add(time.Hour)
		create(t, db, sb)
		if pages++; page.Next == "" {
			break
		}
		token = page.Next
	}
	diff(t, "all pages", got, want)
	if pages != 6 {
		t.Errorf("23 sandboxes came in %d pages of 4, want 6", pages)
	}
}
