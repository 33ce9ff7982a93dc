package edge

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/api/gen/process"
	"github.com/kernflux/opendsec/api/gen/process/processconnect"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/rpc"
	"github.com/kernflux/opendsec/internal/sandbox"
)

func replaceOnce(t *testing.T, s, from, to string) string {
	t.Helper()
	if strings.Count(s, from) != 1 {
		t.Fatalf("%q is not once in %q", from, s)
	}
	return strings.Replace(s, from, to, 1)
}

func (n *node) start(ctx context.Context, id sandbox.ID, cmd string) (*connect.ServerStreamForClient[process.StartResponse], error) {
	client := processClient(n.http, n.url, id)
	req := connect.NewRequest(&process.StartRequest{Process: &process.ProcessConfig{Cmd: cmd}})
	req.Header().Set("Authorization", "Bearer secret")
	req.Header().Set("Cookie", "secret")
	return client.Start(ctx, req)
}

// run runs a command of the fake agent and returns its output.
func (n *node) run(t *testing.T, id sandbox.ID, cmd string) string {
	t.Helper()
	stream, err := n.start(t.Context(), id, cmd)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	for stream.Receive() {
		out.Write(stream.Msg().GetEvent().GetData().GetStdout())
	}
	if stream.Err() != nil {
		t.Fatal(stream.Err())
	}
	return out.String()
}

func TestProxyShowsTheTokenAndNothingElse(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, nil)
	if got, want := n.run(t, id, "token"), w.machine(id).hello.GetToken()+"  "; got != want {
		t.Errorf("the agent saw %q, want %q", got, want)
	}
}

func TestProxyRefuses(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, nil)
	gone := n.make(t, nil)
	n.kill(t, gone)
	for path, want := range map[string]int{
		"/sandboxes/" + string(id) + "/health":                       http.StatusNoContent,
		"/sandboxes/" + string(id) + "/agent.v1.Agent/Hello":         http.StatusNotFound,
		"/sandboxes/" + string(id) + "/agent.v1.Agent/%48ello":       http.StatusNotFound,
		"/sandboxes/" + string(id) + "/init":                         http.StatusNotFound,
		"/sandboxes/" + string(id) + "/files/../init":                http.StatusNotFound,
		"/sandboxes/" + string(id) + "//init":                        http.StatusNotFound,
		"/sandboxes/" + string(id) + "/process.Process/x/../../init": http.StatusNotFound,
		"/sandboxes/" + string(id):                                   http.StatusNotFound,
		"/sandboxes/sb-000000000000/health":                          http.StatusNotFound,
		"/sandboxes/../../etc/passwd":                                http.StatusBadRequest,
		"/sandboxes/" + string(gone) + "/health":                     http.StatusBadRequest,
	} {
		req, err := http.NewRequest(http.MethodGet, n.url+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := n.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if res.StatusCode != want {
			t.Errorf("%s: got %s %s, want %d", path, res.Status, body, want)
		}
	}
	stream, err := n.start(t.Context(), gone, "token")
	if err != nil {
		t.Fatal(err)
	}
	stream.Receive()
	if f := fault.Of(fault.FromConnect(stream.Err())); f == nil || f.Kind != fault.SandboxEnded || f.End == nil {
		t.Errorf("a command in a sandbox that has ended gave %+v", f)
	}
}

// A call that is open when its sandbox ends is told so.
func TestStreamsEndWithTheReason(t *testing.T) {
	for name, end := range map[string]func(*node, *machine){
		"stopped": func(n *node, m *machine) {
			n.finishByCall(m.cfg.ID)
		},
		"out_of_memory": func(_ *node, m *machine) { m.end(backend.Exit{OutOfMemory: true}) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			n := startNode(t, w, t.TempDir(), nil)
			id := n.make(t, nil)
			stream, err := n.start(t.Context(), id, "hang")
			if err != nil || !stream.Receive() {
				t.Fatal(err, stream.Err())
			}
			end(n, w.machine(id))
			for stream.Receive() {
			}
			f := fault.Of(fault.FromConnect(stream.Err()))
			if f == nil || f.Kind != fault.SandboxEnded || f.End == nil || f.End.Reason != name {
				t.Errorf("got %+v", f)
			}
		})
	}
}

func (n *node) finishByCall(id sandbox.ID) {
	n.find(id).finish(sandbox.End{Reason: sandbox.ReasonStopped, Domain: sandbox.User, Time: n.now()})
}

func TestStreamsEndWhenTheEdgeStops(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, nil)
	stream, err := n.start(t.Context(), id, "hang")
	if err != nil || !stream.Receive() {
		t.Fatal(err, stream.Err())
	}
	go n.stop()
	for stream.Receive() {
	}
	if !fault.Is(fault.FromConnect(stream.Err()), fault.Unavailable) {
		t.Errorf("got %v", stream.Err())
	}
}

func TestOpenRequestsCountAsUse(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, nil)
	b := n.find(id)
	_, _, before := b.deadlines()
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := n.start(ctx, id, "hang")
	if err != nil || !stream.Receive() {
		t.Fatal(err, stream.Err())
	}
	if _, _, u := b.deadlines(); u.open != 1 {
		t.Errorf("open requests: %d", u.open)
	}
	cancel()
	for stream.Receive() {
	}
	// The edge sees the end of the request a moment after the client.
	for {
		if _, _, u := b.deadlines(); u.open == 0 {
			if !u.last.After(before.last) {
				t.Error("a request did not count as a use")
			}
			return
		}
		runtime.Gosched()
	}
}

// Bytes go through in both directions without being kept.
func TestProxyStreamsFlat(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, nil)
	const size = 256 << 20
	url := n.url + "/sandboxes/" + string(id) + "/files"
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)

	res, err := n.http.Get(url + "?size=268435456")
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.Copy(io.Discard, res.Body)
	res.Body.Close()
	if err != nil || got != size {
		t.Errorf("down: %d bytes, %v", got, err)
	}
	res, err = n.http.Post(url+"?a=%2F&b;c", "application/octet-stream", io.LimitReader(zeros{}, size))
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(res.Body)
	res.Body.Close()
	if err != nil || string(body) != "268435456 a=%2F&b;c" {
		t.Errorf("up: %s, %v", body, err)
	}
	runtime.ReadMemStats(&after)
	if grown := int64(after.Sys) - int64(before.Sys); grown > 128<<20 {
		t.Errorf("memory grew by %d MiB", grown>>20)
	}
}

func envelope(flags byte, data string) []byte {
	head := binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(data)))
	return append(head, data...)
}

// pieces gives its parts one by one and then err.
type pieces struct {
	parts [][]byte
	err   error
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.parts) == 0 {
		return 0, p.err
	}
	n := copy(b, p.parts[0])
	if p.parts[0] = p.parts[0][n:]; len(p.parts[0]) == 0 {
		p.parts = p.parts[1:]
	}
	return n, nil
}

func (p *pieces) Close() error { return nil }

func TestEnvelopes(t *testing.T) {
	ended := fault.New(fault.SandboxEnded, "gone")
	whole := append(envelope(0, "one"), envelope(0, "two")...)
	closing := envelope(endFlag, "{}")
	large := envelope(0, strings.Repeat("x", 3*mostHeld))
	tail := endEnvelope(ended)
	broke := errors.New("connection reset")
	cat := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	for name, c := range map[string]struct {
		in   []byte
		err  error
		want []byte
		fail bool
	}{
		"whole":                     {cat(whole, closing), io.EOF, cat(whole, closing), false},
		"broken between":            {whole, broke, cat(whole, tail), false},
		"broken in a head":          {cat(whole, []byte{0, 0}), broke, cat(whole, tail), false},
		"broken in a message":       {cat(whole, envelope(0, "three")[:7]), broke, cat(whole, tail), false},
		"ended without an end":      {whole, io.EOF, cat(whole, tail), false},
		"large":                     {cat(large, whole, closing), io.EOF, cat(large, whole, closing), false},
		"broken in a large message": {large[:2*mostHeld], broke, large[:2*mostHeld], true},
		"broken after a large one":  {cat(large, []byte{0}), broke, cat(large, tail), false},
		"broken in the last":        {cat(whole, closing[:6]), broke, cat(whole, tail), false},
		"nothing":                   {nil, broke, tail, false},
	} {
		for _, step := range []int{1, 3, 7, 1000, 1 << 20} {
			if step == 1 && len(c.in) > 1000 {
				continue
			}
			var parts [][]byte
			for rest := c.in; len(rest) > 0; {
				n := min(step, len(rest))
				parts, rest = append(parts, rest[:n]), rest[n:]
			}
			s := &envelopes{from: &pieces{parts, c.err}, why: func(error) *fault.Error { return ended }}
			var got bytes.Buffer
			_, err := io.CopyBuffer(struct{ io.Writer }{&got}, s, make([]byte, rpc.BufferSize))
			if (err != nil) != c.fail || !bytes.Equal(got.Bytes(), c.want) {
				t.Errorf("%s in steps of %d: got %d bytes, want %d, error %v", name, step, got.Len(), len(c.want), err)
			}
		}
	}
}

func processClient(c *http.Client, url string, id sandbox.ID) processconnect.ProcessClient {
	return processconnect.NewProcessClient(c, url+"/sandboxes/"+string(id))
}
