package edge

import (
	"io"
	"testing"
	"time"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/tunnel"
	"github.com/kernflux/opendsec/internal/tunnel/join"
)

// openRequests returns how many requests a sandbox counts as open.
func (n *node) openRequests(id sandbox.ID) int {
	b := n.find(id)
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.use.open
}

func TestATunnelIsAnOpenRequest(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, nil)
	one, other := n.mustConnect(t, id, 8000), n.mustConnect(t, id, 8000)
	roundtrip(t, one)
	roundtrip(t, other)
	if open := n.openRequests(id); open != 2 {
		t.Errorf("%d are open, want 2", open)
	}
	one.Close()
	join.Break(other)
	eventually(t, "none is open", func() bool { return n.openRequests(id) == 0 })
	if left := len(n.find(id).tunnels); left != 0 {
		t.Errorf("%d are still to be cut", left)
	}
	roundtrip(t, n.mustConnect(t, id, 8000))
}

func TestTunnelsAreRefused(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id, gone, paused := n.make(t, nil), n.make(t, nil), n.make(t, nil)
	n.kill(t, gone)
	if _, err := n.pauseID(paused); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		id    sandbox.ID
		port  string
		kind  fault.Kind
		field string
	}{
		{id, "9000", fault.NotFound, "port"},
		{id, "0", fault.InvalidArgument, "port"},
		{id, "65536", fault.InvalidArgument, "port"},
		{id, "49983", fault.InvalidArgument, "port"},
		{id, "", fault.InvalidArgument, "port"},
		{id, "8000/x", fault.InvalidArgument, "port"},
		{id, "../8000", fault.InvalidArgument, "port"},
		{gone, "8000", fault.SandboxEnded, ""},
		{paused, "8000", fault.WrongState, ""},
		{"sb-000000000000", "8000", fault.NotFound, ""},
	} {
		_, err := n.connect(t.Context(), c.id, c.port)
		if f := fault.Of(err); f == nil || f.Kind != c.kind || f.Field != c.field {
			t.Errorf("port %q of %s: got %v, want %s", c.port, c.id, err, c.kind)
		}
	}
	for path, want := range map[string]int{"/tunnel/8000": 400, "/tunnel": 404, "/connect?port=8000": 404} {
		res, err := n.http.Get(n.url + "/sandboxes/" + string(id) + path)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != want {
			t.Errorf("GET %s: got %s, want %d", path, res.Status, want)
		}
	}
	eventually(t, "none is open", func() bool { return n.openRequests(id) == 0 })
}

// A pause cuts tunnels and says so, whether the machine goes or stays; a sandbox
// that calls wake is woken by one.
func TestAPauseCutsTunnels(t *testing.T) {
	for _, backend := range []sandbox.Backend{sandbox.Container, sandbox.GVisor} {
		t.Run(string(backend), func(t *testing.T) {
			w := newWorld(t)
			w.name = backend
			n := startNode(t, w, t.TempDir(), nil)
			id := n.make(t, func(req *edgev1.CreateSandboxRequest) { req.Spec.AutoResume = true })
			c := n.mustConnect(t, id, 8000)
			roundtrip(t, c)
			if _, err := n.pauseID(id); err != nil {
				t.Fatal(err)
			}
			_, err := c.Read(make([]byte, 1))
			if f := fault.Of(err); f == nil || f.Kind != fault.WrongState || f.State != sandbox.Paused {
				t.Errorf("it was cut with %v", err)
			}
			roundtrip(t, n.mustConnect(t, id, 8000))
			if st := n.find(id).status(); st.State != sandbox.Running {
				t.Errorf("after a connection it is %s", st.State)
			}
		})
	}
}

func TestATunnelOutlivesAPauseThatFails(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, nil)
	c := n.mustConnect(t, id, 8000)
	w.onPause = func(*machine) error { return fault.New(fault.Internal, "it does not want to") }
	if _, err := n.pauseID(id); err == nil {
		t.Fatal("the pause did not fail")
	}
	roundtrip(t, c)
}

func TestTheEndCutsTunnels(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id, other := n.make(t, nil), n.make(t, nil)
	c, stays := n.mustConnect(t, id, 8000), n.mustConnect(t, other, 8000)
	roundtrip(t, c)
	roundtrip(t, stays)
	if st := n.kill(t, id); st.GetState() != opendsecv1.State_STATE_STOPPED {
		t.Errorf("it is %v", st)
	}
	_, err := c.Read(make([]byte, 1))
	if f := fault.Of(err); f == nil || f.Kind != fault.SandboxEnded || f.End == nil {
		t.Errorf("it was cut with %v", err)
	}
	roundtrip(t, stays)
}

func TestTunnelsAreBounded(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id, other := n.make(t, nil), n.make(t, nil)
	var all []*tunnel.Conn
	for range maxTunnels {
		all = append(all, n.mustConnect(t, id, 8000))
	}
	if _, err := n.connect(t.Context(), id, 8000); !fault.Is(err, fault.QuotaExceeded) {
		t.Errorf("one more: %v", err)
	}
	roundtrip(t, n.mustConnect(t, other, 8000))
	join.Break(all[0])
	eventually(t, "another has room", func() bool {
		c, err := n.connect(t.Context(), id, 8000)
		if err == nil {
			_, err = io.WriteString(c, "x")
			join.Break(c)
		}
		return err == nil
	})
}

// eventually waits until what is said becomes true.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	limit := time.After(20 * time.Second)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("it did not come true in 20 s: %s", what)
		}
	}
}
