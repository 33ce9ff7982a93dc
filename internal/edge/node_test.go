package edge

import (
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/internal/ahead"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// A node that is short of memory says so, and makes no machine: what is there
// stays as it is.
func TestLowMemory(t *testing.T) {
	w := newDiskWorld(t)
	dir := t.TempDir()
	n := startNode(t, w, dir, nil)
	runs, paused := n.make(t, nil), n.make(t, nil)
	if _, err := n.pauseID(paused); err != nil {
		t.Fatal(err)
	}
	n.rest(paused)
	n.stop()

	n = startNode(t, w, dir, func(c *Config) { c.MemoryFloorMB = 1 << 40 })
	refused := func(what string, err error) {
		t.Helper()
		if !fault.Is(err, fault.Capacity) || !strings.Contains(err.Error(), "low on memory") {
			t.Errorf("%s = %v, want a refusal for lack of memory", what, err)
		}
	}
	_, err := n.client.CreateSandbox(t.Context(), connect.NewRequest(request("sb-00000000000z")))
	refused("a create", fault.FromConnect(err))
	_, err = n.resumeID(paused)
	refused("a resume", fault.FromConnect(err))
	w.onSnapshot = func(*machine) error { t.Error("a fork that is refused took the sandbox's state"); return nil }
	_, _, err = n.forkID(runs, true, 2, nil)
	refused("a fork", err)
	if room := n.roomAhead(); room != ahead.None {
		t.Errorf("there is room %d for machines made ahead, want none", room)
	}
	for id, want := range map[sandbox.ID]sandbox.State{runs: sandbox.Running, paused: sandbox.Paused} {
		if got := n.find(id).status().State; got != want {
			t.Errorf("%s is %s, want %s", id, got, want)
		}
	}
	if _, unhealthy := n.health(); !strings.Contains(unhealthy, "low on memory") {
		t.Errorf("the node says %q of its health", unhealthy)
	}
	for _, id := range []sandbox.ID{runs, paused} {
		n.kill(t, id)
	}
	w.empty(t)
}
