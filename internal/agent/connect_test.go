package agent_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/tunnel/join"
)

// listen serves TCP on an address of this machine, and returns the port.
func listen(t *testing.T, address string, handle func(*net.TCPConn)) int {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				handle(c.(*net.TCPConn))
			}()
		}
	}()
	return l.Addr().(*net.TCPAddr).Port
}

func echo(c *net.TCPConn) { _, _ = io.Copy(c, c) }

func TestConnect(t *testing.T) {
	r := start(t)
	for _, address := range []string{"127.0.0.1:0", "[::1]:0", "0.0.0.0:0", own(t) + ":0"} {
		port := listen(t, address, echo)
		var all sync.WaitGroup
		for range 20 {
			all.Go(func() {
				c, err := r.Connect(t.Context(), port)
				if err != nil {
					t.Errorf("a server on %s: %v", address, err)
					return
				}
				data := make([]byte, 200_000)
				_, _ = rand.Read(data)
				go func() {
					_, err := c.Write(data)
					if err := errors.Join(err, join.CloseWrite(c)); err != nil {
						t.Error(err)
					}
				}()
				if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, data) {
					t.Errorf("a server on %s: got %d bytes, %v", address, len(got), err)
				}
				c.Close()
			})
		}
		all.Wait()
	}
}

// own returns an address of this machine that is not loopback, if it has one.
func own(t *testing.T) string {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() {
			return n.IP.String()
		}
	}
	return "0.0.0.0"
}

func TestConnectIsRefused(t *testing.T) {
	r := start(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	free := l.Addr().(*net.TCPAddr).Port
	l.Close()
	for port, kind := range map[int]fault.Kind{
		free: fault.NotFound, 0: fault.InvalidArgument, -1: fault.InvalidArgument, 65536: fault.InvalidArgument, 49983: fault.InvalidArgument,
	} {
		_, err := r.Connect(t.Context(), port)
		if f := fault.Of(err); f == nil || f.Kind != kind || f.Field != "port" {
			t.Errorf("port %d: got %v, want %s", port, err, kind)
		}
	}
	port := listen(t, "127.0.0.1:0", echo)
	stranger := agentclient.New(r.dial, "another token")
	defer stranger.Close()
	if _, err := stranger.Connect(t.Context(), port); !fault.Is(err, fault.Unauthenticated) {
		t.Errorf("without the token: %v", err)
	}
	for query, want := range map[string]int{
		"port=8000": http.StatusUpgradeRequired, "port=127.0.0.1:22": http.StatusBadRequest, "port=": http.StatusBadRequest,
		"port=example.com:80": http.StatusBadRequest, "host=10.0.0.1": http.StatusBadRequest,
	} {
		if got, body, _ := r.call(http.MethodGet, "/connect?"+query, nil, nil); got != want {
			t.Errorf("%s: got %d %s, want %d", query, got, body, want)
		}
	}
}

// A connection that breaks on one side does not stay on the other.
func TestConnectPassesBreaksOn(t *testing.T) {
	r := start(t)
	seen := make(chan error, 1)
	port := listen(t, "127.0.0.1:0", func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "x")
		_, err := io.ReadAll(c)
		seen <- err
	})
	c, err := r.Connect(t.Context(), port)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	join.Break(c)
	<-seen // a socket in the file system, as the test's agent has, knows no break
	gone := listen(t, "127.0.0.1:0", func(c *net.TCPConn) {
		_, _ = io.ReadFull(c, make([]byte, 1))
		_ = c.SetLinger(0)
	})
	c, err = r.Connect(t.Context(), gone)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = io.WriteString(c, "x")
	_, _ = io.ReadAll(c) // it ends in any case
}

// Connections end with the identity that they were opened with.
func TestConnectEndsWithTheToken(t *testing.T) {
	r := start(t)
	port := listen(t, "127.0.0.1:0", echo)
	c, err := r.Connect(t.Context(), port)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = io.WriteString(c, "x")
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	r.hello(agentclient.Identity{Token: "another"})
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("a connection goes on whose token does not count any more")
	}
	if c, err = r.Connect(t.Context(), port); err != nil {
		t.Fatal(err)
	}
	c.Close()
	r.Close()
	if _, err := r.Connect(t.Context(), port); err == nil {
		t.Error("a closed client connects")
	}
}

// What goes through is not kept, and leaves nothing open.
func TestConnectKeepsNothing(t *testing.T) {
	r := start(t)
	port := listen(t, "127.0.0.1:0", func(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) })
	c, err := r.Connect(t.Context(), port)
	if err != nil {
		t.Fatal(err)
	}
	files := len(filesOf(t, r.pid))
	before := r.status("VmHWM")
	if _, err := io.CopyN(c, zeros{}, 512<<20); err != nil {
		t.Fatal(err)
	}
	if grown := r.status("VmHWM") - before; grown > 16<<10 {
		t.Errorf("512 MiB through made the agent grow by %d KiB", grown)
	}
	c.Close()
	eventually(t, "the agent has closed both ends", func() bool { return len(filesOf(t, r.pid)) < files })
}

// filesOf lists the sockets that a process has open.
func filesOf(t *testing.T, pid int) []string {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		if to, err := os.Readlink(dir + "/" + e.Name()); err == nil && strings.HasPrefix(to, "socket:") {
			out = append(out, to)
		}
	}
	return out
}
