package agentclient

import (
	"context"
	"errors"
	"net"
	"net/http"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/kernflux/opendsec/api/gen/agent/v1"
	"github.com/kernflux/opendsec/api/gen/agent/v1/agentv1connect"
	"github.com/kernflux/opendsec/internal/fault"
)

// serve answers like an agent that says nothing but that it is there.
func serve(t *testing.T, h http.Handler) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	s.Protocols.SetUnencryptedHTTP2(true)
	go s.Serve(l)
	t.Cleanup(func() { s.Close() })
	return l
}

func healthy(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }

func to(l net.Listener) Dial {
	return func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", l.Addr().String())
	}
}

func TestWaitReady(t *testing.T) {
	l := serve(t, http.HandlerFunc(healthy))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for name, early := range map[string]func(ctx context.Context) error{
		"refused": func(context.Context) error { return syscall.ECONNREFUSED },
		// A machine that is not up swallows what is sent to it.
		"swallowed": func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
	} {
		t.Run(name, func(t *testing.T) {
			var attempts atomic.Int32
			c := New(func(ctx context.Context) (net.Conn, error) {
				if attempts.Add(1) <= 3 {
					return nil, early(ctx)
				}
				return to(l)(ctx)
			}, "t")
			defer c.Close()
			begin := time.Now()
			if err := c.WaitReady(ctx); err != nil {
				t.Fatal(err)
			}
			if d := time.Since(begin); d > attemptFor {
				t.Errorf("it took %v; it waited for an attempt that had no hope", d)
			}
			dialled := attempts.Load()
			if err := c.Health(ctx); err != nil || attempts.Load() != dialled {
				t.Errorf("Health = %v, with %d dials after %d; want the same connection", err, attempts.Load(), dialled)
			}
		})
	}
}

func TestWaitReadyGivesUp(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	c := New(func(context.Context) (net.Conn, error) { return nil, syscall.ECONNREFUSED }, "t")
	defer c.Close()
	if err := c.WaitReady(ctx); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("WaitReady = %v, want the last attempt's error", err)
	}
}

// Greet goes on until the agent says something, and has the time right then.
func TestGreet(t *testing.T) {
	var hellos atomic.Int32
	var last time.Time
	var mux http.ServeMux
	mux.Handle(agentv1connect.NewAgentHandler(greeter{hello: func(m *agentv1.HelloRequest) error {
		if now := m.GetNow().AsTime(); !now.After(last) || now.After(time.Now()) {
			t.Errorf("the time is %v, and was %v before", now, last)
		} else {
			last = now
		}
		if hellos.Add(1) == 1 {
			panic(http.ErrAbortHandler) // the agent goes before it answers
		}
		if m.GetDefaultUser() == "nobody" {
			return fault.ToConnect(fault.Invalid("default_user", "no such user"))
		}
		return nil
	}}))
	var attempts atomic.Int32
	l := serve(t, &mux)
	c := New(func(ctx context.Context) (net.Conn, error) {
		if attempts.Add(1) <= 3 {
			return nil, syscall.ECONNREFUSED
		}
		return to(l)(ctx)
	}, "t")
	defer c.Close()
	id := Identity{Token: "new", Now: time.Now()}
	if _, err := c.Greet(t.Context(), id); err != nil || hellos.Load() != 2 {
		t.Errorf("Greet = %v after %d calls; want none after the second", err, hellos.Load())
	}
	id.User, id.Now = "nobody", time.Now()
	if _, err := c.Greet(t.Context(), id); !fault.Is(err, fault.InvalidArgument) || hellos.Load() != 3 {
		t.Errorf("Greet = %v after %d calls; want the agent's refusal at once", err, hellos.Load())
	}
}

type greeter struct {
	agentv1connect.UnimplementedAgentHandler
	hello func(*agentv1.HelloRequest) error
}

func (g greeter) Hello(_ context.Context, req *connect.Request[agentv1.HelloRequest]) (*connect.Response[agentv1.HelloResponse], error) {
	if err := g.hello(req.Msg); err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.HelloResponse{}), nil
}

func TestCloseBreaksCalls(t *testing.T) {
	here := make(chan struct{})
	l := serve(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		close(here)
		<-r.Context().Done()
	}))
	c := New(to(l), "t")
	done := make(chan error)
	go func() { done <- c.Health(t.Context()) }()
	<-here
	c.Close()
	c.Close()
	if err := <-done; !fault.Is(err, fault.Unavailable) {
		t.Errorf("the call that ran = %v, want unavailable", err)
	}
	if err := c.Health(t.Context()); !errors.Is(err, errClosed) {
		t.Errorf("a later call = %v, want that it is closed", err)
	}
}

func TestTransportShowsTheToken(t *testing.T) {
	got := make(chan *http.Request, 1)
	l := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { got <- r }))
	c := New(to(l), "secret")
	defer c.Close()
	req, err := http.NewRequest("GET", "https://elsewhere:99/files?path=a%2Fb", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(TokenHeader, "what a caller sent")
	resp, err := c.Transport().RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	r := <-got
	if r.Header.Get(TokenHeader) != "secret" || len(r.Header.Values(TokenHeader)) != 1 || r.RequestURI != "/files?path=a%2Fb" {
		t.Errorf("the agent got %s with %v", r.RequestURI, r.Header)
	}
	if req.Header.Get(TokenHeader) != "what a caller sent" || req.URL.Host != "elsewhere:99" {
		t.Error("the caller's request was changed")
	}
}

func TestSignalOf(t *testing.T) {
	for in, want := range map[string]syscall.Signal{"signal: killed": 9, "signal: terminated": 15, "signal: signal 40": 40, "exit status 1": 0, "signal: what": 0} {
		if got := signalOf(in); got != want {
			t.Errorf("signalOf(%q) = %d, want %d", in, got, want)
		}
	}
}
