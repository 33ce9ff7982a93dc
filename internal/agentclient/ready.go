package agentclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
)

// How firstCall tries. A machine that is not up yet swallows the first packet
// of a connection, and TCP would send the next a second later; so new
// attempts are made beside the ones that wait.
const (
	firstPause = time.Millisecond      // between attempts, at the beginning
	pauseShare = 16                    // later: a share of the time waited so far
	longPause  = 50 * time.Millisecond // at most
	attemptFor = 250 * time.Millisecond
)

// WaitReady returns when the agent answers /health, or with the last failure
// when ctx ends.
func (c *Client) WaitReady(ctx context.Context) error { return c.firstCall(ctx, c.Health) }

// Greet waits until the agent takes its identity. It is one call instead of
// WaitReady and Hello, since the first call to a restored machine takes longest.
// id.Now is the time of the call of Greet; each attempt gives what it is by then.
func (c *Client) Greet(ctx context.Context, id Identity) (info Info, err error) {
	begin := time.Now()
	err = c.firstCall(ctx, func(ctx context.Context) (err error) {
		now := id
		if !id.Now.IsZero() {
			now.Now = id.Now.Add(time.Since(begin))
		}
		info, err = c.Hello(ctx, now)
		return err
	})
	return info, err
}

// firstCall makes a call until the agent says something to it.
func (c *Client) firstCall(ctx context.Context, call func(context.Context) error) error {
	begin := time.Now()
	for {
		conn, err := c.firstConn(ctx, begin)
		if err != nil {
			return fmt.Errorf("wait for the sandbox's agent: %w", err)
		}
		c.keep(conn)
		err = call(ctx)
		var said *fault.Error
		if err == nil || ctx.Err() == nil && errors.As(err, &said) && said.Kind != fault.Unavailable {
			return err
		}
		select {
		case <-time.After(pause(begin)):
		case <-ctx.Done():
			return fmt.Errorf("wait for the sandbox's agent: %w", err)
		}
	}
}

// keep has the transport use the connection next, in place of one that it was
// to use.
func (c *Client) keep(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ready != nil {
		c.ready.Close()
	}
	c.ready = conn
	if c.closed {
		c.ready = nil
		conn.Close()
	}
}

func pause(begin time.Time) time.Duration {
	return min(max(time.Since(begin)/pauseShare, firstPause), longPause)
}

type dialled struct {
	conn net.Conn
	err  error
}

// firstConn starts attempts one after another without waiting for the earlier
// ones, and returns the first connection that is made.
func (c *Client) firstConn(ctx context.Context, begin time.Time) (net.Conn, error) {
	attempts, stop := context.WithCancel(ctx)
	results := make(chan dialled)
	pending := 0
	defer func() {
		stop()
		for ; pending > 0; pending-- {
			if d := <-results; d.conn != nil {
				d.conn.Close()
			}
		}
	}()
	next := time.NewTimer(0)
	defer next.Stop()
	last := context.Cause(ctx)
	for {
		select {
		case <-next.C:
			pending++
			go func() {
				one, cancel := context.WithTimeout(attempts, attemptFor)
				defer cancel()
				conn, err := c.dial(one)
				results <- dialled{conn, err}
			}()
			next.Reset(pause(begin))
		case d := <-results:
			pending--
			if d.err == nil {
				return d.conn, nil
			}
			last = d.err
		case <-ctx.Done():
			if last == nil {
				last = context.Cause(ctx)
			}
			return nil, last
		}
	}
}
