package storetest

import (
	"errors"
	"testing"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

func testMove(t *testing.T, db *store.DB) {
	nodes(t, db, "n1", "n2")
	room := sandbox.Resources{CPU: 2, MemoryMB: 1 << 40, DiskMB: 1 << 40, Sandboxes: 1 << 40}
	sb := create(t, db, Sandbox("root/demo")) // on n1, which has room for one more
	notN1 := func(sb *sandbox.Sandbox, nodes []store.NodeUsage, projects []store.ProjectUsage) (string, error) {
		if len(projects) > 0 {
			t.Errorf("a sandbox that is admitted was given the projects %v", projects)
		}
		return fitting(room)(sb, nodes[1:], nil)
	}
	moved, err := db.MoveSandbox(t.Context(), sb.ID, notN1)
	if err != nil {
		t.Fatal(err)
	}
	got, err := db.GetSandbox(t.Context(), sb.ID)
	if err != nil {
		t.Fatal(err)
	}
	diff(t, "moved", got, moved)
	if got.Node != "n2" || got.Version != sb.Version+1 {
		t.Errorf("it is on %s in version %d", got.Node, got.Version)
	}
	usages, err := db.NodeUsages(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if usages[0].Used.Sandboxes != 0 || usages[1].Used.Sandboxes != 1 {
		t.Errorf("counted as %+v", usages)
	}
	if _, err := db.MoveSandbox(t.Context(), sb.ID, fitting(sandbox.Resources{})); !fault.Is(err, fault.Capacity) {
		t.Errorf("moved to where there is no room: %v", err)
	}
	update(t, db, sb.ID, func(sb *sandbox.Sandbox) { sb.State = sandbox.Running })
	var wrong *sandbox.WrongStateError
	if _, err := db.MoveSandbox(t.Context(), sb.ID, On("n1")); !errors.As(err, &wrong) {
		t.Errorf("moved a running sandbox: %v", err)
	}
	if _, err := db.MoveSandbox(t.Context(), sandbox.NewID(), On("n1")); !fault.Is(err, fault.NotFound) {
		t.Errorf("moved nothing: %v", err)
	}
}

func testForgetKey(t *testing.T, db *store.DB) {
	key := store.Idempotency{Caller: "ann", Key: "k", RequestHash: "1"}
	made := func() *sandbox.Sandbox {
		t.Helper()
		existing, err := db.CreateSandbox(t.Context(), Sandbox("root/demo"), key, On("n1"))
		if err != nil {
			t.Fatal(err)
		}
		return existing
	}
	made()
	first := made()
	if first == nil {
		t.Fatal("the key did not hold")
	}
	other := key
	other.RequestHash = "2" // another call's key must not be freed
	for _, k := range []store.Idempotency{{}, other} {
		if err := db.ForgetKey(t.Context(), "root/demo", k); err != nil {
			t.Fatal(err)
		}
	}
	if made() == nil {
		t.Error("another call freed the key")
	}
	if err := db.ForgetKey(t.Context(), "root/demo", key); err != nil {
		t.Fatal(err)
	}
	if made() != nil {
		t.Error("the key still holds")
	}
	if again := made(); again == nil || again.ID == first.ID {
		t.Errorf("the key stands for %v", again)
	}
}
