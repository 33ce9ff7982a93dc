package apiserver_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/kernflux/opendsec/internal/edgetest"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/mtls"
)

type protoName = protoreflect.FullName

// request is one to a sandbox's data plane.
func (u *user) request(ctx context.Context, id, path string, body io.Reader) *http.Request {
	u.c.t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u.c.url+"/sandboxes/"+id+path, body)
	if err != nil {
		u.c.t.Fatal(err)
	}
	if u.token != "" {
		req.Header.Set("Authorization", "Bearer "+u.token)
	}
	return req
}

// data makes a call to the data plane and returns its error as a fault.
func (u *user) data(id, path string) error {
	echo := connect.NewClient[emptyMessage, emptyMessage](u.c.http, u.c.url+"/sandboxes/"+id+path, connect.WithInterceptors(bearer(u.token)), connect.WithCodec(nothing{}))
	_, err := echo.CallUnary(u.c.t.Context(), connect.NewRequest(&emptyMessage{}))
	return err
}

type emptyMessage struct{}

// nothing is a codec for messages of no bytes.
type nothing struct{}

func (nothing) Name() string                { return "proto" }
func (nothing) Marshal(any) ([]byte, error) { return nil, nil }
func (nothing) Unmarshal([]byte, any) error { return nil }

func TestDataPlanePassesOnWithoutTheToken(t *testing.T) {
	c := newCluster(t, 2)
	dev := c.developer()
	for range 2 {
		sb := dev.mustCreate()
		req := dev.request(t.Context(), sb.GetId(), "/files?path=%2Fa%20b&x=1", strings.NewReader("hello"))
		req.Header.Set("Opendsec-User", "bob")
		res, err := c.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if string(body) != "hello" || res.Header.Get("X-Node") != sb.GetNode() || res.Header.Get("X-User") != "bob" {
			t.Errorf("got %q, %v", body, res.Header)
		}
		if got, want := res.Header.Get("X-Path"), "/sandboxes/"+sb.GetId()+"/files?path=%2Fa%20b&x=1"; got != want {
			t.Errorf("the edge was asked for %q; want %q", got, want)
		}
		if auth := res.Header.Get("X-Authorization"); auth != "" {
			t.Errorf("the edge got the token: %q", auth)
		}
	}
}

// Each piece arrives before the next is sent, on HTTP/2 and HTTP/1.1.
func TestDataPlaneStreamsBothWaysAtOnce(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	http1 := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: c.roots()}}}
	t.Cleanup(http1.CloseIdleConnections)
	for name, client := range map[string]*http.Client{"HTTP/2.0": c.http, "HTTP/1.1": http1} {
		t.Run(name, func(t *testing.T) {
			r, w := io.Pipe()
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			req := dev.request(ctx, id, "/process.Process/Start", r)
			if name == "HTTP/1.1" {
				req.Header.Set("Connection", "Upgrade")
				req.Header.Set("Upgrade", "h2c") // as some clients offer it; it may be left alone
			}
			res, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			if res.Proto != name {
				t.Errorf("it is %s", res.Proto)
			}
			buf := make([]byte, 5)
			for _, piece := range []string{"first", "secon", "third"} {
				if _, err := w.Write([]byte(piece)); err != nil {
					t.Fatal(err)
				}
				if _, err := io.ReadFull(res.Body, buf); err != nil || string(buf) != piece {
					t.Fatalf("got %q, %v; want %q", buf, err, piece)
				}
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			if rest, err := io.ReadAll(res.Body); err != nil || len(rest) > 0 {
				t.Errorf("then %q, %v", rest, err)
			}
		})
	}
}

func TestDataPlaneKeepsEveryByte(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	const size = 64 << 20
	sent, got := sha256.New(), sha256.New()
	body := io.TeeReader(io.LimitReader(rand.Reader, size), sent)
	begin := time.Now()
	res, err := c.http.Do(dev.request(t.Context(), id, "/files", body))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	n, err := io.Copy(got, res.Body)
	if err != nil || n != size || !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
		t.Errorf("got %d bytes, %v; the same: %v", n, err, bytes.Equal(sent.Sum(nil), got.Sum(nil)))
	}
	t.Logf("%.0f MB/s each way, hashed at both ends", size/1e6/time.Since(begin).Seconds())
}

// When the caller goes away the edge hears of it.
func TestDataPlaneEndsWithItsCaller(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	entered, left := make(chan struct{}), make(chan struct{})
	c.edges[0].SetHooks(edgetest.Hooks{Data: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		close(entered)
		<-r.Context().Done()
		close(left)
	})})
	ctx, cancel := context.WithCancel(t.Context())
	res, err := c.http.Do(dev.request(ctx, id, "/process.Process/Start", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	<-entered
	cancel()
	select {
	case <-left:
	case <-time.After(10 * time.Second):
		t.Error("the edge still serves a caller that is gone")
	}
}

func TestDataPlaneOfAnEndedSandbox(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	if err := dev.data(id, "/agent.v1.Agent/Activity"); err != nil {
		t.Fatal(err)
	}
	if _, err := dev.stop(id); err != nil {
		t.Fatal(err)
	}
	err := dev.data(id, "/agent.v1.Agent/Activity")
	if p := wantProblem(t, err, fault.SandboxEnded, ""); p.End == nil || p.End.Reason != "stopped" {
		t.Errorf("got %+v", p)
	}
	c.edges[0].Kill()
	live, err := dev.create()
	if err == nil {
		t.Errorf("made %v on a node that is gone", live)
	}
	c.edges[0].Serve(t)
}

func TestDataPlaneOfANodeThatIsGone(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	c.edges[0].Kill()
	err := dev.data(id, "/agent.v1.Agent/Activity")
	if p := wantProblem(t, err, fault.Unavailable, ""); !p.Retryable() {
		t.Error("it is not said to be retryable")
	}
	c.edges[0].Serve(t)
	eventually(t, "it answers again", func() bool { return dev.data(id, "/agent.v1.Agent/Activity") == nil })
}

// The way through the API costs well under a millisecond. The bound is wide,
// for machines with other things to do; the figure is in the log.
func TestDataPlaneAddsLittle(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	var mu sync.Mutex
	c.edges[0].SetHooks(edgetest.Hooks{Data: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		w.WriteHeader(http.StatusOK)
	})})
	direct := c.client(c.identity(mtls.RoleAPIServer).ClientConfig(mtls.RoleEdge))
	measure := func(client *http.Client, base string) time.Duration {
		best := time.Hour
		for range 300 {
			req := dev.request(t.Context(), id, "/health", nil)
			req.URL.Host = base
			begin := time.Now()
			res, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, res.Body)
			res.Body.Close()
			best = min(best, time.Since(begin))
		}
		return best
	}
	straight := measure(direct, c.edges[0].Address())
	through := measure(c.http, strings.TrimPrefix(c.url, "https://"))
	t.Logf("straight to the edge %s, through the API %s", straight, through)
	if added := through - straight; added > 5*time.Millisecond {
		t.Errorf("the API adds %s", added)
	}
}
