package edge

import (
	"context"
	"net"
	"sync"

	"github.com/kernflux/opendsec/internal/backend"
)

// connections are those to one machine's agent. They are closed by hand at the
// machine's end: one that still carried a call when the client was closed would
// stay, since a machine that is gone says nothing over it.
type connections struct {
	inst backend.Instance

	mu     sync.Mutex // guards what follows
	open   map[net.Conn]bool
	closed bool
}

// dial connects to the agent.
func (c *connections) dial(ctx context.Context) (net.Conn, error) {
	conn, err := c.inst.Dial(ctx, backend.AgentPort)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		conn.Close()
		return nil, net.ErrClosed
	}
	counted := &connection{conn, c}
	c.open[counted] = true
	return counted, nil
}

// close closes all connections and refuses more.
func (c *connections) close() {
	c.mu.Lock()
	all := c.open
	c.open, c.closed = map[net.Conn]bool{}, true
	c.mu.Unlock()
	for conn := range all {
		conn.Close()
	}
}

// connection leaves the list when it is closed.
type connection struct {
	net.Conn
	list *connections
}

func (c *connection) Close() error {
	c.list.mu.Lock()
	delete(c.list.open, c)
	c.list.mu.Unlock()
	return c.Conn.Close()
}

// NetConn returns the connection under it.
func (c *connection) NetConn() net.Conn { return c.Conn }
