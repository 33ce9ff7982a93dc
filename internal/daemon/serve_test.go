package daemon_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/ca"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/mtls"
)

// running is a server under test.
type running struct {
	url    string
	stop   context.CancelFunc
	served chan error
}

func (r running) wait(t *testing.T) error {
	t.Helper()
	select {
	case err := <-r.served:
		return err
	case <-time.After(20 * time.Second):
		buf := make([]byte, 1<<20)
		t.Fatalf("the server does not end:\n%s", buf[:runtime.Stack(buf, true)])
		return nil
	}
}

func start(t *testing.T, cfg *tls.Config, grace time.Duration, h http.HandlerFunc) running {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	t.Cleanup(stop)
	r := running{url: "http://" + ln.Addr().String(), stop: stop, served: make(chan error, 1)}
	if cfg != nil {
		r.url = "https://" + ln.Addr().String()
	}
	go func() {
		r.served <- daemon.Serve(ctx, daemon.Server{
			Listener: ln, TLS: cfg, Handler: h, Grace: grace, Log: slog.New(slog.DiscardHandler),
		})
	}()
	return r
}

func identity(t *testing.T) *mtls.Identity {
	t.Helper()
	dir := t.TempDir()
	c, err := ca.Init(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Ensure(mtls.RoleEdge, []string{"127.0.0.1"}); err != nil {
		t.Fatal(err)
	}
	id, err := mtls.Load(dir, mtls.RoleEdge)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func request(t *testing.T, method, url string, body io.Reader) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// noMoreGoroutines fails when more goroutines run than before, once those that
// are just ending have had their time.
func noMoreGoroutines(t *testing.T, before int) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); runtime.NumGoroutine() > before; runtime.Gosched() {
		if time.Now().After(end) {
			buf := make([]byte, 1<<20)
			t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
		}
	}
}

func TestBothProtocols(t *testing.T) {
	before := runtime.NumGoroutine()
	id := identity(t)
	r := start(t, id.ServerConfig(), 0, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Proto) })
	h1 := &http.Client{Transport: &http.Transport{TLSClientConfig: id.ClientConfig(mtls.RoleEdge)}}
	for want, c := range map[string]*http.Client{"HTTP/2.0": daemon.Client(id.ClientConfig(mtls.RoleEdge)), "HTTP/1.1": h1} {
		res, err := c.Do(request(t, http.MethodGet, r.url, nil))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || string(body) != want {
			t.Errorf("got %q, %v; want %q", body, err, want)
		}
		c.CloseIdleConnections()
	}
	r.stop()
	if err := r.wait(t); err != nil {
		t.Error(err)
	}
	noMoreGoroutines(t, before)
}

func TestCallsFinishInTheGraceTime(t *testing.T) {
	before := runtime.NumGoroutine()
	id := identity(t)
	entered, leave := make(chan struct{}), make(chan struct{})
	r := start(t, id.ServerConfig(), time.Minute, func(w http.ResponseWriter, r *http.Request) {
		close(entered)
		<-leave
		fmt.Fprint(w, "whole", r.Context().Err())
	})
	c := daemon.Client(id.ClientConfig(mtls.RoleEdge))
	answer := make(chan string, 1)
	go func() {
		res, err := c.Do(request(t, http.MethodGet, r.url, nil))
		if err != nil {
			answer <- err.Error()
			return
		}
		defer res.Body.Close()
		body, _ := io.ReadAll(res.Body)
		answer <- string(body)
	}()
	<-entered
	r.stop()
	waitClosed(t, r.url) // no new connection comes in, the old call goes on
	close(leave)
	if got := <-answer; got != "whole<nil>" {
		t.Errorf("a call that was under way got %q", got)
	}
	if err := r.wait(t); err != nil {
		t.Error(err)
	}
	c.CloseIdleConnections()
	noMoreGoroutines(t, before)
}

// waitClosed returns when nothing listens at the URL any more.
func waitClosed(t *testing.T, at string) {
	t.Helper()
	u, err := url.Parse(at)
	if err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); runtime.Gosched() {
		conn, err := net.Dial("tcp", u.Host)
		if err != nil {
			return
		}
		conn.Close()
	}
	t.Fatal("the listener stays open")
}

// A call without end is cut after the grace time, on both protocols and also
// when a proxy has taken its connection over.
func TestEndlessCallsAreCut(t *testing.T) {
	before := runtime.NumGoroutine()
	entered := make(chan struct{}, 3)
	back := start(t, nil, time.Millisecond, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			fmt.Fprint(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nhello")
			entered <- struct{}{}
			_, _ = io.Copy(conn, conn)
			return
		}
		entered <- struct{}{}
		<-r.Context().Done()
	})
	target, err := url.Parse(back.url)
	if err != nil {
		t.Fatal(err)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	transport := &http.Transport{}
	proxy.Transport, proxy.ErrorHandler = transport, func(http.ResponseWriter, *http.Request, error) {}
	front := start(t, nil, time.Millisecond, proxy.ServeHTTP)
	plain := &http.Client{Transport: &http.Transport{}}
	done := make(chan struct{}, 2)
	go func() {
		if res, err := plain.Do(request(t, http.MethodGet, front.url, nil)); err == nil {
			res.Body.Close()
		}
		done <- struct{}{}
	}()
	go func() {
		req := request(t, http.MethodGet, front.url, nil)
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", "echo")
		if res, err := plain.Do(req); err == nil {
			_, _ = io.Copy(io.Discard, res.Body)
			res.Body.Close()
		}
		done <- struct{}{}
	}()
	<-entered
	<-entered
	front.stop()
	if err := front.wait(t); err != nil {
		t.Error(err)
	}
	<-done
	<-done
	transport.CloseIdleConnections()
	back.stop()
	if err := back.wait(t); err != nil {
		t.Error(err)
	}
	plain.CloseIdleConnections()
	noMoreGoroutines(t, before)
}

// Uploads that nobody reads do not stop the other calls of their connection.
func TestStalledStreamsDoNotBlockOthers(t *testing.T) {
	id := identity(t)
	const stalled = 16
	entered, leave := make(chan struct{}, stalled), make(chan struct{})
	r := start(t, id.ServerConfig(), time.Millisecond, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/stalled" {
			entered <- struct{}{}
			<-leave
			return
		}
		_, _ = io.Copy(w, r.Body)
	})
	c := daemon.Client(id.ClientConfig(mtls.RoleEdge))
	defer c.CloseIdleConnections()
	connections := countDials(c)
	// The first call makes the connection; calls that begin at once may each
	// make one.
	if res, err := c.Do(request(t, http.MethodGet, r.url, nil)); err != nil {
		t.Fatal(err)
	} else {
		res.Body.Close()
	}
	full, ended := make(chan struct{}, stalled), make(chan struct{}, stalled)
	for range stalled {
		go func() {
			defer func() { ended <- struct{}{} }()
			// Twice what a stream may hold unread.
			body := &noticed{r: io.LimitReader(zeros{}, 8<<20), at: 3 << 20, full: full}
			if res, err := c.Do(request(t, http.MethodPost, r.url+"/stalled", body)); err == nil {
				res.Body.Close()
			}
		}()
	}
	for range stalled {
		<-entered
		<-full
	}
	data := bytes.Repeat([]byte("x"), 10<<20)
	res, err := c.Do(request(t, http.MethodPost, r.url+"/echo", bytes.NewReader(data)))
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(res.Body)
	res.Body.Close()
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("got %d bytes, %v; want %d", len(got), err, len(data))
	}
	if n := connections(); n != 1 {
		t.Errorf("%d connections were used, want 1", n)
	}
	close(leave)
	for range stalled {
		<-ended
	}
	r.stop()
	if err := r.wait(t); err != nil {
		t.Error(err)
	}
}

// countDials makes a client count its connections.
func countDials(c *http.Client) func() int {
	transport := c.Transport.(*http.Transport)
	dial, n := transport.DialContext, make(chan int, 1)
	n <- 0
	transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		n <- 1 + <-n
		return dial(ctx, network, address)
	}
	return func() int {
		v := <-n
		n <- v
		return v
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// noticed tells when so many bytes were read from it.
type noticed struct {
	r    io.Reader
	at   int
	full chan struct{}
}

func (n *noticed) Read(p []byte) (int, error) {
	got, err := n.r.Read(p)
	if n.at > 0 && n.at <= got {
		n.full <- struct{}{}
	}
	n.at -= got
	return got, err
}

func TestServeSaysWhyItFailed(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	err = daemon.Serve(t.Context(), daemon.Server{Listener: ln, Handler: http.NotFoundHandler(), Log: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.Contains(err.Error(), ln.Addr().String()) {
		t.Errorf("got %v, want the address and the reason", err)
	}
}
