package edge

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/edge/journal"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/tunnel"
	"github.com/kernflux/opendsec/internal/tunnel/join"
)

// eachReal runs a test on a node, once for each backend.
func eachReal(t *testing.T, test func(t *testing.T, n *realNode)) {
	for _, name := range []sandbox.Backend{sandbox.GVisor, sandbox.Container} {
		t.Run(string(name), func(t *testing.T) {
			n := newRealNode(t)
			n.backend = name
			test(t, n)
		})
	}
}

// peer puts the program of testdata/peer into a sandbox.
func (n *realNode) peer(id sandbox.ID) {
	n.t.Helper()
	program := filepath.Join(n.dir, "peer")
	if _, err := os.Stat(program); err != nil {
		build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", program, "./testdata/peer")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			n.t.Fatalf("build the peer: %v\n%s", err, out)
		}
	}
	data, err := os.ReadFile(program)
	if err != nil {
		n.t.Fatal(err)
	}
	req, err := http.NewRequest(http.MethodPost, n.url+"/sandboxes/"+string(id)+"/files?path=/tmp/peer", bytes.NewReader(data))
	if err != nil {
		n.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/octet-stream")
	res, err := n.http.Do(req)
	if err != nil {
		n.t.Fatal(err)
	}
	defer res.Body.Close()
	if said, _ := io.ReadAll(res.Body); res.StatusCode != http.StatusOK {
		n.t.Fatalf("upload the peer: %s %s", res.Status, said)
	}
	n.shell(id, "busybox chmod 755 /tmp/peer", io.Discard)
}

// listen has a peer serve in a sandbox, and returns when it does.
func (n *realNode) listen(id sandbox.ID, mode, address string) {
	n.t.Helper()
	var out bytes.Buffer
	line := fmt.Sprintf("/tmp/peer %s '%s' >'/tmp/%[2]s' 2>&1 & while [ ! -s '/tmp/%[2]s' ]; do sleep 0.01; done; cat '/tmp/%[2]s'", mode, address)
	n.shell(id, line, &out)
	if !strings.HasPrefix(out.String(), "listens") {
		n.t.Fatalf("a peer on %s: %s", address, out.String())
	}
}

// connect opens a tunnel to a port of a sandbox.
func (n *node) connect(ctx context.Context, id sandbox.ID, port any) (*tunnel.Conn, error) {
	return tunnel.Dial(ctx, n.http.Transport, fmt.Sprintf("%s/sandboxes/%s/tunnel/%v", n.url, id, port), nil)
}

func (n *node) mustConnect(t *testing.T, id sandbox.ID, port any) *tunnel.Conn {
	t.Helper()
	c, err := n.connect(t.Context(), id, port)
	if err != nil {
		t.Fatalf("connect to port %v: %v", port, err)
	}
	t.Cleanup(func() { join.Break(c) })
	return c
}

// echoed sends data, then no more, and checks that the same comes back.
func echoed(t *testing.T, c *tunnel.Conn, data []byte) {
	t.Helper()
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(data)
		sent <- errors.Join(err, c.CloseWrite())
	}()
	got, err := io.ReadAll(c)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("got %d bytes back of %d, %v", len(got), len(data), err)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}

func TestRealTunnel(t *testing.T) {
	eachReal(t, func(t *testing.T, n *realNode) {
		id := n.create()
		n.peer(id)
		t.Run("whichever address it listens on", func(t *testing.T) {
			for port, host := range map[int]string{8001: "127.0.0.1", 8002: "[::1]", 8003: "192.0.0.2", 8004: "0.0.0.0", 8005: "[::]"} {
				n.listen(id, "echo", fmt.Sprintf("%s:%d", host, port))
				echoed(t, n.mustConnect(t, id, port), []byte("by "+host))
			}
		})
		t.Run("many at once", func(t *testing.T) {
			var all sync.WaitGroup
			for i := range 50 {
				all.Go(func() {
					c, err := n.connect(t.Context(), id, 8001)
					if err != nil {
						t.Error(err)
						return
					}
					echoed(t, c, bytes.Repeat([]byte{byte(i)}, 100_000+i))
				})
			}
			all.Wait()
		})
		t.Run("the server sends no more first", func(t *testing.T) {
			n.listen(id, "first", "127.0.0.1:8010")
			c := n.mustConnect(t, id, 8010)
			if got, err := io.ReadAll(c); err != nil || string(got) != "hello" {
				t.Fatalf("got %q, %v", got, err)
			}
			if _, err := io.WriteString(c, "still here"); err != nil {
				t.Fatal(err)
			}
			c.Close()
			var out bytes.Buffer
			n.shell(id, "while [ ! -s /tmp/first ]; do sleep 0.01; done; cat /tmp/first", &out)
			if out.String() != "still here <nil>" {
				t.Errorf("the server got %q", out.String())
			}
		})
		t.Run("a break is no end", func(t *testing.T) {
			n.listen(id, "gone", "127.0.0.1:8011")
			c := n.mustConnect(t, id, 8011)
			_, _ = io.WriteString(c, "x")
			if got, err := io.ReadAll(c); !fault.Is(err, fault.Unavailable) {
				t.Errorf("the server broke off, and we got %q, %v", got, err)
			}
			n.listen(id, "count", "127.0.0.1:8012")
			c = n.mustConnect(t, id, 8012)
			if _, err := c.Write(make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
			join.Break(c)
			var out bytes.Buffer
			n.shell(id, "while [ ! -s /tmp/count ]; do sleep 0.01; done; cat /tmp/count", &out)
			if !strings.Contains(out.String(), "reset") {
				t.Errorf("we broke off, and the server got %q", out.String())
			}
		})
		t.Run("a gigabyte", func(t *testing.T) { n.gigabyte(t, id) })
		t.Run("refusals", func(t *testing.T) { n.refusals(t, id) })
	})
}

// gigabyte sends and takes much, and takes slowly, without anything growing.
func (n *realNode) gigabyte(t *testing.T, id sandbox.ID) {
	n.listen(id, "zeros", "0.0.0.0:8020")
	direct, err := netslot.Dial(t.Context(), n.slot(id), 8020)
	if err != nil {
		t.Fatal(err)
	}
	defer direct.Close()
	begin := time.Now()
	if _, err := io.CopyN(onlyWrites{io.Discard}, direct, 1<<30); err != nil {
		t.Fatal(err)
	}
	t.Logf("out of the sandbox, by a connection to its address: %.0f MB/s", (1<<30)/1e6/time.Since(begin).Seconds())
	direct.Close()
	before := n.peakMemory()
	c := n.mustConnect(t, id, 8020)
	begin = time.Now()
	if got, err := io.CopyN(io.Discard, c, 1<<30); err != nil {
		t.Fatalf("got %d bytes, then %v", got, err)
	}
	t.Logf("out of the sandbox: %.0f MB/s", (1<<30)/1e6/time.Since(begin).Seconds())
	join.Break(c)
	c = n.mustConnect(t, id, 8012)
	begin = time.Now()
	if _, err := io.CopyN(onlyWrites{c}, zeros{}, 1<<30); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); err != nil || string(got) != "1073741824" {
		t.Errorf("the server got %q, %v", got, err)
	}
	t.Logf("into the sandbox: %.0f MB/s", (1<<30)/1e6/time.Since(begin).Seconds())
	if grown := n.peakMemory() - before; grown > 48<<20 {
		t.Errorf("the edge's memory grew by %d MiB", grown>>20)
	}
}

// slot returns a sandbox's network slot.
func (n *realNode) slot(id sandbox.ID) backend.Slot {
	n.t.Helper()
	j, err := journal.Open(filepath.Join(n.dir, "state", "sandboxes"))
	if err != nil {
		n.t.Fatal(err)
	}
	entries, _, err := j.Load()
	if err != nil {
		n.t.Fatal(err)
	}
	for _, e := range entries {
		if e.ID == id && e.Slot != nil {
			return *e.Slot
		}
	}
	n.t.Fatalf("sandbox %s has no slot", id)
	return backend.Slot{}
}

type onlyWrites struct{ io.Writer }

// refusals checks what cannot be reached, a server of the host above all.
func (n *realNode) refusals(t *testing.T, id sandbox.ID) {
	host, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	go func() {
		for {
			c, err := host.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "the host's secret")
			c.Close()
		}
	}()
	other := n.create()
	n.peer(other)
	n.listen(other, "echo", "0.0.0.0:8030")
	nothing := func(port any) {
		t.Helper()
		c, err := n.connect(t.Context(), id, port)
		if err == nil {
			got, _ := io.ReadAll(c)
			t.Fatalf("port %v led to %q", port, got)
		}
		if f := fault.Of(err); f.Kind != fault.NotFound || f.Field != "port" || !strings.Contains(f.Message, string(id)) {
			t.Errorf("port %v: got %+v", port, f)
		}
	}
	nothing(host.Addr().(*net.TCPAddr).Port)
	nothing(8030) // it is the other's
	nothing(9)
	for _, port := range []string{"0", "65536", "-1", "x", "", "8001/x", "127.0.0.1:8001", "49983", "99999999999999999999"} {
		_, err := n.connect(t.Context(), id, port)
		if f := fault.Of(err); err == nil || f.Kind != fault.InvalidArgument || f.Field != "port" {
			t.Errorf("port %q: got %+v", port, f)
		}
	}
	n.kill(t, other)
	if _, err := n.connect(t.Context(), other, 8030); !fault.Is(err, fault.SandboxEnded) {
		t.Errorf("a sandbox that ended: %v", err)
	}
}

func TestRealTunnelAndTheSandboxesLife(t *testing.T) {
	eachReal(t, func(t *testing.T, n *realNode) {
		id := n.createWith(func(req *edgev1.CreateSandboxRequest) { req.Spec.AutoResume = true })
		quiet := n.create()
		for _, id := range []sandbox.ID{id, quiet} {
			n.peer(id)
			n.listen(id, "echo", "127.0.0.1:8001")
		}
		c, still := n.mustConnect(t, id, 8001), n.mustConnect(t, quiet, 8001)
		roundtrip(t, c)
		roundtrip(t, still)
		n.mustPause(id)
		n.mustPause(quiet)
		for _, c := range []*tunnel.Conn{c, still} {
			begin := time.Now()
			_, err := c.Read(make([]byte, 1))
			if f := fault.Of(err); f == nil || f.Kind != fault.WrongState || f.State != sandbox.Paused {
				t.Errorf("a pause ended a connection with %+v", f)
			}
			if took := time.Since(begin); took > time.Second {
				t.Errorf("it took %s to be told of a pause", took)
			}
		}
		if _, err := n.connect(t.Context(), quiet, 8001); !fault.Is(err, fault.WrongState) {
			t.Errorf("connecting to a paused sandbox: %v", err)
		}
		c = n.mustConnect(t, id, 8001) // wakes it
		roundtrip(t, c)
		n.mustResume(quiet)
		still = n.mustConnect(t, quiet, 8001)
		roundtrip(t, still)
		n.kill(t, id)
		_, err := c.Read(make([]byte, 1))
		if !fault.Is(err, fault.SandboxEnded) {
			t.Errorf("the sandbox's end ended a connection with %v", err)
		}
		roundtrip(t, still)
	})
}

func roundtrip(t *testing.T, c *tunnel.Conn) {
	t.Helper()
	buf := make([]byte, 4)
	if _, err := io.WriteString(c, "ping"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, buf); err != nil || string(buf) != "ping" {
		t.Fatalf("got %q, %v", buf, err)
	}
}

func (n *realNode) createWith(adapt func(*edgev1.CreateSandboxRequest)) sandbox.ID {
	n.t.Helper()
	id := sandbox.NewID()
	req := n.request(id)
	adapt(req)
	if _, err := n.client.CreateSandbox(n.t.Context(), connect.NewRequest(req)); err != nil {
		n.t.Fatal(err)
	}
	return id
}
