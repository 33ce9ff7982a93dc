package sim

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
)

// machine is one simulated machine.
type machine struct {
	backend *Backend
	record  record
	handle  backend.Handle
	agent   *agent

	listener *listener
	server   *http.Server
	served   chan struct{} // closed when the server has ended

	done chan struct{} // closed when it has ended or is abandoned

	stillMu sync.Mutex // guards what follows
	paused  bool
	shots   int // snapshots that are being taken

	mu       sync.Mutex  // guards what is below
	fate     *time.Timer // when it dies; nil for never
	dialling *rand.Rand
	ended    bool
	exit     backend.Exit
	lost     error // why nothing is known of its end
}

var (
	_ backend.Instance    = (*machine)(nil)
	_ backend.Pauser      = (*machine)(nil)
	_ backend.Snapshotter = (*machine)(nil)
	_ backend.Differ      = (*machine)(nil)
)

// serve begins to answer connections.
func (m *machine) serve() {
	m.listener = &listener{conns: make(chan net.Conn), closed: make(chan struct{})}
	m.server = &http.Server{Handler: m.agent.handler(), Protocols: new(http.Protocols), ReadHeaderTimeout: time.Minute}
	m.server.Protocols.SetHTTP1(true)
	m.server.Protocols.SetUnencryptedHTTP2(true)
	m.served = make(chan struct{})
	go func() {
		defer close(m.served)
		_ = m.server.Serve(m.listener) // says that it was closed
	}()
}

// Handle returns what Recover needs.
func (m *machine) Handle() backend.Handle { return m.handle }

// Dial connects to the imitation of the agent. Nobody listens on other ports.
func (m *machine) Dial(ctx context.Context, port int) (net.Conn, error) {
	refused := func() error {
		return fmt.Errorf("dial port %d of simulated machine %s: %w", port, m.record.ID, unix.ECONNREFUSED)
	}
	m.mu.Lock()
	fails := m.dialling.Float64() < m.backend.behavior.DialFails
	m.mu.Unlock()
	if port != backend.AgentPort || fails {
		return nil, refused()
	}
	conn, err := m.listener.dial(ctx)
	if errors.Is(err, net.ErrClosed) {
		return nil, refused()
	}
	return conn, err
}

// Wait returns when the machine has ended.
func (m *machine) Wait(ctx context.Context) (backend.Exit, error) {
	select {
	case <-m.done:
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.exit, m.lost
	case <-ctx.Done():
		return backend.Exit{}, ctx.Err()
	}
}

// Usage counts the files. Nothing runs, so nothing else is used.
func (m *machine) Usage(context.Context) (backend.Usage, error) {
	used, err := m.agent.files.used()
	if err != nil {
		return backend.Usage{}, fmt.Errorf("usage of simulated machine %s: %w", m.record.ID, err)
	}
	return backend.Usage{DiskBytes: used}, nil
}

// Destroy ends the machine and removes its files.
func (m *machine) Destroy(context.Context) error {
	m.end(backend.Exit{Detail: "it was destroyed"}, nil)
	if err := remove(m.record); err != nil {
		return fmt.Errorf("destroy simulated machine %s: %w", m.record.ID, err)
	}
	return nil
}

// die ends the machine as if by itself.
func (m *machine) die(outOfMemory bool) {
	m.agent.finish()
	// Without this file no later process takes it for alive.
	if err := os.Remove(filepath.Join(m.record.StateDir, stateFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		m.backend.log.Error("cannot let a simulated machine die", "sandbox", m.record.ID, "error", err)
	}
	exit := backend.Exit{Detail: "its simulated agent ended"}
	if outOfMemory {
		exit = backend.Exit{OutOfMemory: true, Detail: "its simulated memory ran out"}
	}
	m.end(exit, nil)
}

// abandon stops to answer for the machine, which lives on in its directory.
func (m *machine) abandon() {
	m.end(backend.Exit{}, fmt.Errorf("simulated machine %s is not watched any more", m.record.ID))
}

func (m *machine) end(exit backend.Exit, lost error) {
	m.mu.Lock()
	first := !m.ended
	if first {
		m.ended, m.exit, m.lost = true, exit, lost
		if m.fate != nil {
			m.fate.Stop()
		}
	}
	m.mu.Unlock()
	if first {
		m.server.Close()
		<-m.served
		m.agent.close()
		m.backend.forget(m)
		close(m.done)
	}
	<-m.done
}

// listener hands connections in memory to a server.
type listener struct {
	conns  chan net.Conn
	once   sync.Once
	closed chan struct{}
}

func (l *listener) dial(ctx context.Context) (net.Conn, error) {
	near, far := net.Pipe()
	select {
	case l.conns <- far:
		return near, nil
	case <-l.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

func (l *listener) Addr() net.Addr { return &net.UnixAddr{Name: "simulated", Net: "unix"} }
