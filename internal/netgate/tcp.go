package netgate

import (
	"context"
	"errors"
	"io"
	"net"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kernflux/opendsec/internal/netpolicy"
)

// accept takes the sandbox's ends of the connections that were allowed.
func (gd *Guard) accept() {
	for {
		inside, err := gd.taken.AcceptTCP()
		if errors.Is(err, net.ErrClosed) || gd.ctx.Err() != nil {
			if err == nil {
				inside.Close()
			}
			return
		}
		if err != nil {
			gd.log.Warn("cannot take a connection", "error", err)
			select {
			case <-time.After(10 * time.Millisecond):
			case <-gd.ctx.Done():
			}
			continue
		}
		gd.join(inside)
	}
}

// join connects the sandbox's end with the host's.
func (gd *Guard) join(inside *net.TCPConn) {
	key := flowKey{netpolicy.TCP, addrPort(inside.RemoteAddr()), addrPort(inside.LocalAddr())}
	gd.mu.Lock()
	f := gd.flows[key]
	if f == nil || f.inside != nil || gd.closed {
		gd.mu.Unlock()
		inside.SetLinger(0)
		inside.Close()
		return
	}
	f.inside = inside
	gd.mu.Unlock()
	gd.work.Go(func() {
		if err := gd.relay(f, inside, f.outside.(*net.TCPConn)); err == nil {
			inside.Close()
			f.outside.Close()
		}
		gd.cut(f)
	})
}

// relay carries a connection to its end. An error says that it was broken off.
func (gd *Guard) relay(f *flow, inside, outside *net.TCPConn) error {
	if f.inspect {
		done, err := gd.inspect(f, inside, outside)
		if done || err != nil {
			return err
		}
	}
	var g errgroup.Group
	g.Go(func() error {
		err := gd.follow(f, inside, outside)
		if err == nil {
			err = carry(gd.ctx, outside, inside, gd.up, &gd.counts.sent)
		}
		if err != nil {
			gd.cut(f)
		}
		return err
	})
	g.Go(func() error {
		err := carry(gd.ctx, inside, outside, gd.down, &gd.counts.received)
		if err != nil {
			gd.cut(f)
		}
		return err
	})
	return g.Wait()
}

// follow inspects further what the sandbox sends, as long as that can tell
// another name.
func (gd *Guard) follow(f *flow, inside, outside *net.TCPConn) error {
	if !f.inspect || f.key.to.Port() != 443 {
		return nil
	}
	err := gd.followTLS(f, inside, outside)
	if errors.Is(err, io.EOF) {
		return nil // carry passes it on
	}
	if bad := (*badRequest)(nil); errors.As(err, &bad) {
		gd.denyHost(f, bad)
	}
	return err
}

// carry moves bytes one way until their end, which it passes on. The kernel
// moves them where it can.
func carry(ctx context.Context, dst, src *net.TCPConn, p *pace, moved *atomic.Uint64) error {
	for {
		n, err := io.CopyN(dst, src, p.chunk())
		moved.Add(uint64(n))
		if err == io.EOF {
			return dst.CloseWrite()
		}
		if err == nil {
			err = p.spent(ctx, n)
		}
		if err != nil {
			return err
		}
	}
}
