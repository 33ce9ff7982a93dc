package storetest

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// start is the time at which the suite's sandboxes are made.
var start = time.Date(2026, 3, 1, 12, 0, 0, 123456000, time.UTC)

// Run runs the suite. newDatabase returns the address of an empty database for
// each test.
func Run(t *testing.T, newDatabase func(t testing.TB) (address string)) {
	open := func(t *testing.T) *store.DB {
		t.Helper()
		db := Open(t, newDatabase(t))
		Projects(t, db, "root", "root/demo", "root/demo/a", "root/other")
		return db
	}
	for name, test := range map[string]func(*testing.T, *store.DB){
		"SandboxKeepsAll":       testRoundTrip,
		"SandboxIsRefused":      testRefusals,
		"Update":                testUpdate,
		"UpdateSideBySide":      testUpdateRace,
		"AdmissionIsExact":      testAdmission,
		"AdmissionOfSeveral":    testSeveral,
		"Idempotency":           testIdempotency,
		"IdempotencySideBySide": testIdempotencyRace,
		"ForgetKey":             testForgetKey,
		"Move":                  testMove,
		"Pauses":                testPauses,
		"SumsAreWhatIsHeld":     testHolds,
		"Wake":                  testWake,
		"WakeIsRefused":         testWakeRefused,
		"WakeSideBySide":        testWakeRace,
		"WakeOneSideBySide":     testWakeOne,
		"ListFilters":           testFilters,
		"ListPages":             testPages,
		"Purge":                 testPurge,
		"Nodes":                 testNodes,
		"Images":                testImages,
		"Projects":              testProjects,
		"Callers":               testCallers,
		"LastAdmin":             testLastAdmin,
		"Tokens":                testTokens,
		"ChangeAndAudit":        testChange,
		"Secret":                testSecret,
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t)) })
	}
	t.Run("AdmissionByTwoPrograms", func(t *testing.T) { testTwoPrograms(t, newDatabase(t)) })
	t.Run("OpenSideBySide", func(t *testing.T) { testOpenRace(t, newDatabase(t)) })
}

// Open opens a database that is closed at the test's end.
func Open(t testing.TB, address string) *store.DB {
	t.Helper()
	db, err := store.Open(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

// Sandbox returns a new sandbox to be recorded, of one core and 512 MiB.
func Sandbox(project sandbox.Project) *sandbox.Sandbox {
	return &sandbox.Sandbox{
		ID: sandbox.NewID(), Project: project, Caller: "ann", State: sandbox.Pending, ImageDigest: "sha256:aa", CreatedAt: start,
		Spec: sandbox.Spec{
			Image:   sandbox.ImageName{Project: "root", Repo: "py", Tag: "latest"},
			Backend: sandbox.GVisor, Limits: sandbox.Limits{CPU: 1, MemoryMB: 512, DiskMB: 1024, PIDs: 100},
		},
	}
}

// On returns a Place that takes a node whatever is on it.
func On(node string) store.Place {
	return func(*sandbox.Sandbox, []store.NodeUsage, []store.ProjectUsage) (string, error) { return node, nil }
}

func create(t *testing.T, db *store.DB, sb *sandbox.Sandbox) *sandbox.Sandbox {
	t.Helper()
	if _, err := db.CreateSandbox(t.Context(), sb, store.Idempotency{}, On("n1")); err != nil {
		t.Fatal(err)
	}
	return sb
}

func update(t *testing.T, db *store.DB, id sandbox.ID, change func(*sandbox.Sandbox)) *sandbox.Sandbox {
	t.Helper()
	sb, err := db.UpdateSandbox(t.Context(), id, func(sb *sandbox.Sandbox) error { change(sb); return nil })
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

func wantKind(t *testing.T, err error, kind fault.Kind, field string) {
	t.Helper()
	if !fault.Is(err, kind) || fault.Of(err).Field != field {
		t.Errorf("got error %v (%+v), want kind %s and field %q", err, fault.Of(err), kind, field)
	}
}

func diff(t *testing.T, what string, got, want any) {
	t.Helper()
	if d := cmp.Diff(want, got, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("%s (-want +got):\n%s", what, d)
	}
}

// atOnce runs f n times side by side and waits.
func atOnce(n int, f func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { f(i) })
	}
	wg.Wait()
}

func testRoundTrip(t *testing.T, db *store.DB) {
	sb := Sandbox("root/demo")
	sb.CreatedAt = start.In(time.FixedZone("east", 3600)).Add(789) // less than a microsecond
	sb.Spec.Deadlines = sandbox.Deadlines{Idle: 90 * time.Second, Lifetime: time.Hour}
	sb.Spec.Labels = map[string]string{"task": "42", "x/y": "ü"}
	sb.Spec.Metadata = map[string]string{"k": "line\nline \x01 ☃"}
	sb.Spec.NetworkRules = map[string]bool{"pypi": true, "*": false}
	sb.Spec.Env = map[string]string{"A": "'; DROP TABLE sandboxes; --"}
	sb.Spec.Limits.CPU = 0.1
	create(t, db, sb)
	if sb.Node != "n1" || sb.Version != 1 {
		t.Errorf("got node %q, version %d; want n1, 1", sb.Node, sb.Version)
	}
	got, err := db.GetSandbox(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	want := *sb
	want.CreatedAt = start
	diff(t, "a new sandbox", got, &want)

	updated := update(t, db, sb.ID, func(sb *sandbox.Sandbox) {
		sb.State, sb.StartedAt = sandbox.Failed, start.Add(time.Second)
		sb.End = &sandbox.End{Reason: sandbox.ReasonMemory, Domain: sandbox.User, Detail: "over 512 MiB", Time: start.Add(time.Minute)}
		sb.Spec.Labels = map[string]string{"task": "43"}
	})
	want.State, want.StartedAt, want.Version = sandbox.Failed, start.Add(time.Second), 2
	want.End = &sandbox.End{Reason: sandbox.ReasonMemory, Domain: sandbox.User, Detail: "over 512 MiB", Time: start.Add(time.Minute)}
	want.Spec.Labels = map[string]string{"task": "43"}
	diff(t, "what the update returned", updated, &want)
	if got, err = db.GetSandbox(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	diff(t, "an ended sandbox", got, &want)
	if got.CreatedAt.Location() != time.UTC {
		t.Errorf("times come in %v, want UTC", got.CreatedAt.Location())
	}
}

func testRefusals(t *testing.T, db *store.DB) {
	_, err := db.GetSandbox(t.Context(), "sb-000000000000")
	wantKind(t, err, fault.NotFound, "")
	_, err = db.UpdateSandbox(t.Context(), "sb-000000000000", func(*sandbox.Sandbox) error { return nil })
	wantKind(t, err, fault.NotFound, "")
	_, err = db.CreateSandbox(t.Context(), Sandbox("root/nobody"), store.Idempotency{}, On("n1"))
	wantKind(t, err, fault.NotFound, "project")
	sb := create(t, db, Sandbox("root"))
	_, err = db.CreateSandbox(t.Context(), sb, store.Idempotency{}, On("n1"))
	wantKind(t, err, fault.AlreadyExists, "")
	full := fault.New(fault.Capacity, "no room")
	_, err = db.CreateSandbox(t.Context(), Sandbox("root"), store.Idempotency{},
		func(*sandbox.Sandbox, []store.NodeUsage, []store.ProjectUsage) (string, error) { return "", full })
	if err != full { //nolint:errorlint // it must come through as it is
		t.Errorf("got %v, want the error of place itself", err)
	}
	if n := count(t, db, store.SandboxFilter{Ended: true}); n != 1 {
		t.Errorf("%d sandboxes are recorded, want 1", n)
	}
}

func testUpdate(t *testing.T, db *store.DB) {
	sb := create(t, db, Sandbox("root/demo"))
	same := update(t, db, sb.ID, func(*sandbox.Sandbox) {})
	if same.Version != 1 {
		t.Errorf("an update of nothing made version %d, want 1", same.Version)
	}
	refused := fault.New(fault.WrongState, "no")
	_, err := db.UpdateSandbox(t.Context(), sb.ID, func(sb *sandbox.Sandbox) error {
		sb.State = sandbox.Running
		return refused
	})
	if err != refused { //nolint:errorlint // it must come through as it is
		t.Errorf("got %v, want the error of change itself", err)
	}
	got := update(t, db, sb.ID, func(sb *sandbox.Sandbox) {
		sb.ID, sb.Project, sb.Caller, sb.CreatedAt, sb.Version = "sb-aaaaaaaaaaaa", "root", "eve", start.Add(1e9), 77
		sb.Spec.Backend = sandbox.Container
	})
	want := *sb
	want.Spec.Backend, want.Version = sandbox.Container, 2
	diff(t, "after an update", got, &want)
}

func testUpdateRace(t *testing.T, db *store.DB) {
	sb := create(t, db, Sandbox("root/demo"))
	const n = 24
	atOnce(n, func(i int) {
		_, err := db.UpdateSandbox(t.Context(), sb.ID, func(sb *sandbox.Sandbox) error {
			if sb.Spec.Labels == nil {
				sb.Spec.Labels = map[string]string{}
			}
			sb.Spec.Labels[fmt.Sprint(i)] = "x"
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	got, err := db.GetSandbox(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Spec.Labels) != n || got.Version != n+1 {
		t.Errorf("got %d labels, version %d; want %d, %d: updates were lost", len(got.Spec.Labels), got.Version, n, n+1)
	}
	if found := count(t, db, store.SandboxFilter{Labels: got.Spec.Labels}); found != 1 {
		t.Errorf("%d sandboxes found by all their labels, want 1", found)
	}
}

func count(t *testing.T, db *store.DB, f store.SandboxFilter) int {
	t.Helper()
	page, err := db.ListSandboxes(t.Context(), f)
	if err != nil {
		t.Fatal(err)
	}
	return len(page.Sandboxes)
}

func testPurge(t *testing.T, db *store.DB) {
	old, recent, alive := create(t, db, Sandbox("root")), create(t, db, Sandbox("root")), create(t, db, Sandbox("root"))
	for sb, at := range map[*sandbox.Sandbox]time.Time{old: start.Add(time.Hour), recent: start.Add(3 * time.Hour)} {
		update(t, db, sb.ID, func(sb *sandbox.Sandbox) {
			sb.State, sb.End = sandbox.Stopped, &sandbox.End{Reason: sandbox.ReasonStopped, Domain: sandbox.User, Time: at}
		})
	}
	n, err := db.PurgeEnded(t.Context(), start.Add(2*time.Hour))
	if err != nil || n != 1 {
		t.Errorf("purged %d, %v; want 1", n, err)
	}
	page, err := db.ListSandboxes(t.Context(), store.SandboxFilter{Ended: true})
	if err != nil {
		t.Fatal(err)
	}
	got := map[sandbox.ID]bool{}
	for _, sb := range page.Sandboxes {
		got[sb.ID] = true
	}
	diff(t, "what is left", got, map[sandbox.ID]bool{recent.ID: true, alive.ID: true})
	onNode, err := db.LiveOnNode(t.Context(), "n1")
	if err != nil || len(onNode) != 1 || onNode[0].ID != alive.ID {
		t.Errorf("live on n1: %v, %v; want %s", onNode, err, alive.ID)
	}
}

func testOpenRace(t *testing.T, address string) {
	const n = 6
	dbs := make([]*store.DB, n)
	atOnce(n, func(i int) {
		db, err := store.Open(t.Context(), address)
		if err != nil {
			t.Errorf("open while others do: %v", err)
			return
		}
		dbs[i] = db
	})
	for i, db := range dbs {
		if db == nil {
			continue
		}
		if i == 0 {
			Projects(t, db, "root")
		}
		if err := db.Ping(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := db.GetProject(t.Context(), "root"); err != nil {
			t.Errorf("database %d: %v", i, err)
		}
	}
	for _, db := range dbs {
		if db != nil {
			if err := db.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}
