package agent

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
)

// conns are the server's open connections. A machine that was restored has
// those of the machine it was taken of, which lead nowhere.
type conns struct {
	net.Listener
	mu   sync.Mutex // guards what follows
	open map[*conn]struct{}
}

func listenThrough(l net.Listener) *conns {
	return &conns{Listener: l, open: map[*conn]struct{}{}}
}

// Accept waits for a connection.
func (cs *conns) Accept() (net.Conn, error) {
	nc, err := cs.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: nc, of: cs}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.open[c] = struct{}{}
	return c, nil
}

// cut closes all connections but the one that the call came by.
func (cs *conns) cut(call context.Context) {
	own := connOf(call)
	cs.mu.Lock()
	var others []*conn
	for c := range cs.open {
		if c != own {
			others = append(others, c)
		}
	}
	cs.mu.Unlock()
	for _, c := range others {
		c.lost.Store(true)
		c.Close() // its reader fails, and with it its calls
	}
}

// conn is a connection of the server's.
type conn struct {
	net.Conn
	of   *conns
	lost atomic.Bool // it broke, or was cut
}

func (c *conn) note(err error) {
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		c.lost.Store(true) // before the server acts on it
	}
}

// Read reads.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.note(err)
	return n, err
}

// Write writes.
func (c *conn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	c.note(err)
	return n, err
}

// Close closes the connection.
func (c *conn) Close() error {
	c.of.mu.Lock()
	delete(c.of.open, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}

type connKey struct{}

// withConn is http.Server.ConnContext.
func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

func connOf(call context.Context) *conn {
	c, _ := call.Value(connKey{}).(*conn)
	return c
}

// brokenOff reports whether a call ended because its connection did, and not
// because its caller wanted so.
func brokenOff(call context.Context) bool {
	c := connOf(call)
	return c != nil && c.lost.Load()
}
