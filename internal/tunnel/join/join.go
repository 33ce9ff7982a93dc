// Package join lets two connections be one: bytes pass both ways, half-closes
// stay half-closes, and breaks stay breaks. It stands apart from package tunnel
// because it is part of the agent, which is kept small.
package join

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"golang.org/x/sys/unix"
)

// Conns passes bytes between two connections, both ways, until both have ended
// or the context does. A half-close is passed on; when one breaks the other is
// broken too, so that a cut is never taken for an end. It closes both, and
// returns what broke them.
func Conns(ctx context.Context, a, b net.Conn) error {
	stop := context.AfterFunc(ctx, func() { Break(a); Break(b) })
	defer stop()
	ways := make(chan error, 2)
	pass := func(to, from net.Conn) {
		_, err := io.Copy(to, from)
		if err == nil {
			err = CloseWrite(to)
		}
		if err != nil {
			Break(a)
			Break(b)
		}
		ways <- err
	}
	go pass(a, b)
	go pass(b, a)
	first := <-ways
	if second := <-ways; first == nil {
		first = second
	}
	a.Close()
	b.Close()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return first
}

// CloseWrite says over a connection that no more comes. That the other side has
// gone meanwhile is no error: it takes nothing more either way.
func CloseWrite(c net.Conn) error {
	half, ok := under[interface{ CloseWrite() error }](c)
	if !ok {
		return fmt.Errorf("a connection of type %T has no half-close", c)
	}
	err := half.CloseWrite()
	if errors.Is(err, unix.ENOTCONN) {
		return nil
	}
	return err
}

// Break closes a connection so that the other side takes it for broken, not
// for ended.
func Break(c net.Conn) {
	if hard, ok := under[interface{ SetLinger(int) error }](c); ok {
		_ = hard.SetLinger(0) // it is closed already
	}
	c.Close()
}

// under returns the first of a connection and those that it wraps that has what
// is asked for.
func under[T any](c net.Conn) (T, bool) {
	for {
		if t, ok := c.(T); ok {
			return t, true
		}
		wrap, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			var none T
			return none, false
		}
		c = wrap.NetConn()
	}
}
