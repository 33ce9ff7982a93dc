package tunnel_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/tunnel"
	"github.com/kernflux/opendsec/internal/tunnel/join"
)

// site serves tunnels to a TCP server of the test.
type site struct {
	t    *testing.T
	http *httptest.Server
	cut  context.CancelCauseFunc // cuts all tunnels
	gone chan error              // what Serve was told of each break
	over chan struct{}           // one for each tunnel that is over
}

// newSite serves tunnels over HTTP/2 or HTTP/1.1; handle is the TCP server.
func newSite(t *testing.T, http2 bool, handle func(*net.TCPConn)) *site {
	l, err := net.Listen("tcp", "127.0.0.1:0")
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
	s := &site{t: t, gone: make(chan error, 1000), over: make(chan struct{}, 1000)}
	life, cut := context.WithCancelCause(context.Background())
	s.cut = cut
	s.http = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/refused" {
			w.WriteHeader(http.StatusNotFound)
			_, _ = w.Write(fault.ToJSON(fault.New(fault.NotFound, "no such port")))
			return
		}
		conn, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			return // the test is over
		}
		ctx, cancel := context.WithCancelCause(r.Context())
		defer cancel(nil)
		defer context.AfterFunc(life, func() { cancel(context.Cause(life)) })()
		tunnel.Serve(w, r.WithContext(ctx), conn, func(err error) *fault.Error {
			s.gone <- err
			return fault.Of(errors.Join(context.Cause(ctx), err))
		})
		s.over <- struct{}{}
	}))
	s.http.EnableHTTP2 = http2
	s.http.StartTLS()
	t.Cleanup(s.http.Close)
	return s
}

func (s *site) dial() *tunnel.Conn {
	s.t.Helper()
	c, err := tunnel.Dial(s.t.Context(), s.http.Client().Transport, s.http.URL, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { join.Break(c) })
	return c
}

// each runs a test over both versions of HTTP.
func each(t *testing.T, handle func(*net.TCPConn), test func(t *testing.T, s *site)) {
	for name, http2 := range map[string]bool{"HTTP2": true, "HTTP1": false} {
		t.Run(name, func(t *testing.T) { test(t, newSite(t, http2, handle)) })
	}
}

func echo(c *net.TCPConn) { _, _ = io.Copy(c, c) }

func TestEveryByteBothWays(t *testing.T) {
	each(t, echo, func(t *testing.T, s *site) {
		var all sync.WaitGroup
		for range 20 {
			c := s.dial()
			all.Go(func() {
				data := make([]byte, 3<<20+7)
				_, _ = rand.Read(data)
				go func() {
					_, err := c.Write(data)
					if err := errors.Join(err, c.CloseWrite()); err != nil {
						t.Error(err)
					}
				}()
				if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, data) {
					t.Errorf("got %d bytes of %d, %v", len(got), len(data), err)
				}
			})
		}
		all.Wait()
	})
}

func TestPiecesComeAtOnce(t *testing.T) {
	each(t, echo, func(t *testing.T, s *site) {
		c := s.dial()
		for _, piece := range []string{"a", "bc", "def"} {
			if _, err := io.WriteString(c, piece); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(piece))
			if _, err := io.ReadFull(c, got); err != nil || string(got) != piece {
				t.Fatalf("got %q, %v", got, err)
			}
		}
	})
}

// The far side may end what it sends first, and what we send then still comes,
// also when we close at once.
func TestTheFarSideEndsFirst(t *testing.T) {
	got := make(chan string, 1)
	handle := func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "hello")
		_ = c.CloseWrite()
		all, err := io.ReadAll(c)
		if err != nil {
			all = []byte(err.Error())
		}
		got <- string(all)
	}
	each(t, handle, func(t *testing.T, s *site) {
		c := s.dial()
		if all, err := io.ReadAll(c); err != nil || string(all) != "hello" {
			t.Fatalf("got %q, %v", all, err)
		}
		want := string(bytes.Repeat([]byte("x"), 1<<20))
		if _, err := io.WriteString(c, want); err != nil {
			t.Fatal(err)
		}
		c.Close()
		if all := <-got; all != want {
			t.Errorf("the far side got %d bytes: %.100q", len(all), all)
		}
		<-s.over
	})
}

func TestBreaksAreNoEnds(t *testing.T) {
	broke := make(chan error, 1)
	handle := func(c *net.TCPConn) {
		first := make([]byte, 1)
		if _, err := io.ReadFull(c, first); err != nil {
			broke <- err
			return
		}
		if first[0] == 'b' {
			_ = c.SetLinger(0)
			return
		}
		_, err := io.ReadAll(c)
		broke <- err
	}
	each(t, handle, func(t *testing.T, s *site) {
		c := s.dial()
		_, _ = io.WriteString(c, "b")
		if _, err := io.ReadAll(c); err == nil {
			t.Error("a break of the far side is an end here")
		}
		c = s.dial()
		_, _ = io.WriteString(c, "aaaa")
		join.Break(c)
		if err := <-broke; err == nil {
			t.Error("a break of ours is an end there")
		}
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
			t.Errorf("then a read gives %v", err)
		}
	})
}

// A tunnel that is cut says why, to who reads and to who writes.
func TestACutSaysWhy(t *testing.T) {
	each(t, func(c *net.TCPConn) { <-t.Context().Done() }, func(t *testing.T, s *site) {
		reads, writes := s.dial(), s.dial()
		wrote := make(chan error, 1)
		go func() {
			_, err := io.Copy(writes, zeros{}) // nobody takes it, so it waits
			wrote <- err
		}()
		go func() { _, _ = io.Copy(io.Discard, writes) }()
		s.cut(fault.New(fault.WrongState, "it is paused"))
		for what, err := range map[string]error{"a read": second(io.ReadAll(reads)), "a write": <-wrote} {
			if f := fault.Of(err); f == nil || f.Kind != fault.WrongState || f.Message != "it is paused" {
				t.Errorf("%s gave %v", what, err)
			}
		}
	})
}

func second[A, B any](_ A, b B) B { return b }

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// Who does not read holds up who sends, and that one only.
func TestTheSlowAreWaitedFor(t *testing.T) {
	sent := make(chan int64, 1)
	var once sync.Once
	handle := func(c *net.TCPConn) {
		flood := false
		once.Do(func() { flood = true })
		if !flood {
			echo(c)
			return
		}
		n, _ := io.Copy(c, io.LimitReader(zeros{}, 1<<30))
		sent <- n
	}
	s := newSite(t, true, handle)
	slow := s.dial()
	if _, err := io.ReadFull(slow, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	other := s.dial()
	for range 100 {
		if _, err := other.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(other, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	join.Break(slow)
	if n := <-sent; n > 64<<20 {
		t.Errorf("%d MiB were taken from who sent, and nobody read them", n>>20)
	}
}

func TestRefusals(t *testing.T) {
	s := newSite(t, true, echo)
	_, err := tunnel.Dial(t.Context(), s.http.Client().Transport, s.http.URL+"/refused", nil)
	if f := fault.Of(err); f == nil || f.Kind != fault.NotFound || f.Message != "no such port" {
		t.Errorf("got %v", err)
	}
	plain := httptest.NewUnstartedServer(http.NotFoundHandler())
	plain.EnableHTTP2 = true
	plain.StartTLS()
	defer plain.Close()
	if _, err := tunnel.Dial(t.Context(), plain.Client().Transport, plain.URL, nil); err == nil {
		t.Error("a web page is a tunnel")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := tunnel.Dial(ctx, s.http.Client().Transport, s.http.URL, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled call gave %v", err)
	}
}

// The context of Dial bounds the opening only.
func TestAnOpenTunnelOutlivesItsContext(t *testing.T) {
	s := newSite(t, true, echo)
	ctx, cancel := context.WithCancel(t.Context())
	c, err := tunnel.Dial(ctx, s.http.Client().Transport, s.http.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	cancel()
	if _, err := io.WriteString(c, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
}

// A client of HTTP/1.1 that closes has its tunnel over at both ends.
func TestNothingIsLeftOpen(t *testing.T) {
	each(t, echo, func(t *testing.T, s *site) {
		for _, end := range []func(*tunnel.Conn){
			func(c *tunnel.Conn) { c.Close() },
			func(c *tunnel.Conn) { join.Break(c) },
			func(c *tunnel.Conn) { _ = c.CloseWrite(); _, _ = io.ReadAll(c); c.Close() },
		} {
			c := s.dial()
			_, _ = io.WriteString(c, "x")
			end(c)
			select {
			case <-s.over:
			case <-time.After(10 * time.Second):
				t.Fatal("a tunnel is still open")
			}
		}
	})
}

func TestPorts(t *testing.T) {
	for text, want := range map[string]int{
		"1": 1, "8000": 8000, "65535": 65535,
		"0": 0, "65536": 0, "-1": 0, "": 0, "x": 0, "1.5": 0, " 1": 0, "99999999999999999999": 0, "0x10": 0,
	} {
		got, err := tunnel.ParsePort(text)
		if want == 0 {
			if f := fault.Of(err); f == nil || f.Kind != fault.InvalidArgument || f.Field != "port" {
				t.Errorf("port %q: got %d, %v", text, got, err)
			}
		} else if got != want || err != nil {
			t.Errorf("port %q: got %d, %v", text, got, err)
		}
	}
}

func FuzzFrames(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 1, 'x', 1, 0, 0, 0, 0, 2, 0, 0, 0, 0})
	f.Add([]byte{2, 0, 0, 0, 2, '{', '}'})
	f.Add([]byte{0, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, frames []byte) {
		c, err := tunnel.Dial(t.Context(), answer(frames), "http://x", nil)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(c)
		if len(got) > len(frames) {
			t.Errorf("%d bytes of %d", len(got), len(frames))
		}
		if err != nil && fault.Of(err) == nil {
			t.Errorf("an error of no kind: %v", err)
		}
		join.Break(c)
	})
}

// answer is a transport that answers with a tunnel of so many bytes.
type answer []byte

func (a answer) RoundTrip(*http.Request) (*http.Response, error) {
	return &http.Response{
		StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {tunnel.ContentType}}, Body: io.NopCloser(bytes.NewReader(a)),
	}, nil
}
