package gvisor

import (
	"context"
	"errors"
	"net"
	"sync"
)

// errEnded says that a connection cannot be, for its machine has ended.
var errEnded = errors.New("the machine has ended")

// conns are the open connections into one machine. A sentry that is killed
// takes its network stack along without a word to the other side, so somebody
// here has to break them.
type conns struct {
	ctx   context.Context // done when the machine has ended
	ended context.CancelCauseFunc

	mu   sync.Mutex
	open map[*conn]struct{}
}

func newConns() *conns {
	ctx, ended := context.WithCancelCause(context.Background())
	return &conns{ctx: ctx, ended: ended, open: map[*conn]struct{}{}}
}

// dial makes a connection that breaks with the machine.
func (c *conns) dial(ctx context.Context, dial func(context.Context) (net.Conn, error)) (net.Conn, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stop := context.AfterFunc(c.ctx, func() { cancel(errEnded) })
	defer stop()
	made, err := dial(ctx)
	if err != nil {
		if context.Cause(ctx) == errEnded {
			return nil, errEnded
		}
		return nil, err
	}
	out := &conn{TCPConn: made.(*net.TCPConn), set: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		made.Close()
		return nil, errEnded
	}
	c.open[out] = struct{}{}
	return out, nil
}

// end breaks all connections and lets no more be made.
func (c *conns) end() {
	c.mu.Lock()
	c.ended(errEnded)
	open := c.open
	c.open = nil
	c.mu.Unlock()
	for o := range open {
		o.TCPConn.Close()
	}
}

// conn is one of them. It has all that a TCP connection has.
type conn struct {
	*net.TCPConn
	set *conns
}

// Close closes the connection.
func (c *conn) Close() error {
	c.set.mu.Lock()
	delete(c.set.open, c)
	c.set.mu.Unlock()
	return c.TCPConn.Close()
}
