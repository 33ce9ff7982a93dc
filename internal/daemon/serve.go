// Package daemon holds what all programs that serve do alike: signals, the
// log, the version, the configuration file, and HTTP servers and clients set
// up for long streams. It knows nothing of what is served.
package daemon

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// Version is the version of the programs. The build sets it with
// -ldflags "-X github.com/kernflux/opendsec/internal/daemon.Version=…".
var Version = "devel"

// Windows of HTTP/2 flow control, in bytes. The connection's is far larger
// than a stream's: what a slow reader leaves unread on one stream must not
// stop the other streams of its connection.
const (
	streamWindow = 4 << 20
	connWindow   = 1 << 30
	readFrame    = 256 << 10
	maxStreams   = 10000
)

// How long to wait for what.
const (
	headerTimeout = 10 * time.Second
	serverIdle    = 5 * time.Minute
	clientIdle    = 2 * time.Minute // less, so that no call goes out on a connection that is just being closed
	defaultGrace  = 5 * time.Second
	handlersEnd   = 10 * time.Second // after the hard close
	serverPing    = 30 * time.Second // of silence, then a client is asked whether it lives
	clientPing    = 15 * time.Second // the same for a server
	pingTimeout   = 20 * time.Second // long, since a machine under load must not lose its streams
)

// Context returns a context that ends with the first SIGINT or SIGTERM. A
// second signal ends the process at once.
func Context() (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	return ctx, stop
}

// Server says what to serve.
type Server struct {
	Listener net.Listener // closed by Serve
	TLS      *tls.Config  // nil serves cleartext, HTTP/2 by prior knowledge included
	Handler  http.Handler
	Log      *slog.Logger
	// Grace is how long calls may go on once the context has ended; 0 means 5 s.
	// A handler that streams without end should end with its component instead
	// of waiting for this.
	Grace time.Duration
}

// Serve answers HTTP/1.1 and HTTP/2 until the context ends. Then it takes no
// more connections, lets calls finish for the grace time, cuts the rest, and
// returns when all handlers have. No time limits a call: streams may be as
// long as they like. The error is nil when the context's end was the reason.
func Serve(ctx context.Context, s Server) error {
	base, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	var calls sync.WaitGroup
	srv := &http.Server{
		Handler:           counted(&calls, s.Handler),
		TLSConfig:         s.TLS,
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       serverIdle,
		Protocols:         protocols(s.TLS != nil),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          maxStreams,
			MaxReadFrameSize:              readFrame,
			MaxReceiveBufferPerConnection: connWindow,
			MaxReceiveBufferPerStream:     streamWindow,
			SendPingTimeout:               serverPing,
			PingTimeout:                   pingTimeout,
		},
		BaseContext: func(net.Listener) context.Context { return base },
		ErrorLog:    slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	go func() {
		if s.TLS != nil {
			served <- srv.ServeTLS(s.Listener, "", "")
			return
		}
		served <- srv.Serve(s.Listener)
	}()
	var failed error
	select {
	case failed = <-served:
		failed = fmt.Errorf("serve %s: %w", s.Listener.Addr(), failed)
	case <-ctx.Done():
		s.drain(ctx, srv)
		<-served
	}
	cut()
	if err := srv.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		s.Log.Debug("close the server", "error", err)
	}
	return errors.Join(failed, waitFor(&calls, s.Listener.Addr()))
}

// drain stops the listener and lets calls finish for the grace time.
func (s Server) drain(ctx context.Context, srv *http.Server) {
	grace := s.Grace
	if grace == 0 {
		grace = defaultGrace
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
	defer cancel()
	if err := srv.Shutdown(ctx); err != nil {
		s.Log.Info("cut the calls that were still open", "address", s.Listener.Addr().String())
	}
}

func protocols(secure bool) *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetHTTP2(secure)
	p.SetUnencryptedHTTP2(!secure)
	return p
}

// counted keeps count of the handlers that run.
func counted(calls *sync.WaitGroup, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		calls.Add(1)
		defer calls.Done()
		next.ServeHTTP(w, r)
	})
}

// waitFor waits until no handler runs. One that does not end although its
// context did is a defect, which is better said than waited for.
func waitFor(calls *sync.WaitGroup, addr net.Addr) error {
	done := make(chan struct{})
	go func() {
		calls.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-time.After(handlersEnd):
		return fmt.Errorf("serve %s: a call did not end within %s of its context", addr, handlersEnd)
	}
}

// Client returns an HTTP/2 client for calls between components: one connection
// carries many calls, large windows, no time limit of its own, and a peer that
// is silent for 35 s in all counts as gone. Its connections are closed by
// CloseIdleConnections.
func Client(cfg *tls.Config) *http.Client {
	p := new(http.Protocols)
	p.SetHTTP2(true)
	return &http.Client{Transport: &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		TLSClientConfig:     cfg,
		TLSHandshakeTimeout: 5 * time.Second,
		Protocols:           p,
		DisableCompression:  true, // bytes are passed on as they are
		IdleConnTimeout:     clientIdle,
		HTTP2: &http.HTTP2Config{
			MaxReadFrameSize:              readFrame,
			MaxReceiveBufferPerConnection: connWindow,
			MaxReceiveBufferPerStream:     streamWindow,
			SendPingTimeout:               clientPing,
			PingTimeout:                   pingTimeout,
		},
	}, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}
