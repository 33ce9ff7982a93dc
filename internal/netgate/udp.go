package netgate

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/netslot"
)

// quiet is how long a flow of datagrams is kept when none come.
const quiet = time.Minute

// carryDatagrams takes a flow at its address and carries it until it is quiet
// or cut. The first datagram goes on once it can be taken.
func (gd *Guard) carryDatagrams(o opening, f *flow) {
	defer gd.forget(f)
	defer gd.cut(f)
	inside, err := gd.takeDatagrams(f)
	if err != nil {
		gd.log.Warn("cannot take a flow of datagrams", "to", f.key.to, "error", err)
		gd.queue.decide(o.id, verdictDrop, 0)
		return
	}
	gd.mu.Lock()
	f.inside = inside
	gd.mu.Unlock()
	gd.queue.decide(o.id, verdictAccept, markAllow)
	stop := context.AfterFunc(gd.ctx, func() { gd.cut(f) })
	defer stop()
	var last atomic.Int64
	last.Store(time.Now().UnixNano())
	var both sync.WaitGroup
	outside := f.outside.(*net.UDPConn)
	for _, way := range []struct {
		dst, src *net.UDPConn
		pace     *pace
		moved    *atomic.Uint64
	}{{outside, inside, gd.up, &gd.counts.sent}, {inside, outside, gd.down, &gd.counts.received}} {
		both.Go(func() {
			defer gd.cut(f)
			for {
				n, err := moveDatagram(way.dst, way.src, &last)
				if err != nil {
					return
				}
				way.moved.Add(uint64(n))
				if way.pace.spent(gd.ctx, int64(n)) != nil {
					return
				}
			}
		})
	}
	both.Wait()
}

// takeDatagrams makes the sandbox's end: a socket at the address that it sends to.
func (gd *Guard) takeDatagrams(f *flow) (*net.UDPConn, error) {
	network := "udp4"
	if f.key.to.Addr().Is6() {
		network = "udp6"
	}
	d := net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(f.key.to), Control: func(network, address string, c syscall.RawConn) error {
		// Flows from several ports may be to one address.
		reuse := onSocket(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1) })
		return errors.Join(makeTransparent(network, address, c), reuse)
	}}
	var conn net.Conn
	err := netslot.Inside(gd.slot, func() (err error) {
		conn, err = d.DialContext(context.Background(), network, f.key.from.String())
		return err
	})
	if err != nil {
		return nil, err
	}
	return conn.(*net.UDPConn), nil
}

var buffers = sync.Pool{New: func() any { b := make([]byte, 64<<10); return &b }}

// moveDatagram waits for a datagram and moves it. It takes a buffer only when
// there is one. The error says that the flow has been quiet, or is over.
func moveDatagram(dst, src *net.UDPConn, last *atomic.Int64) (int, error) {
	raw, err := src.SyscallConn()
	if err != nil {
		return 0, err
	}
	var buf *[]byte
	defer func() {
		if buf != nil {
			buffers.Put(buf)
		}
	}()
	for {
		src.SetReadDeadline(time.Unix(0, last.Load()).Add(quiet))
		n := 0
		var rerr error
		err := raw.Read(func(fd uintptr) bool {
			buf = buffers.Get().(*[]byte)
			n, rerr = unix.Read(int(fd), *buf)
			if rerr != nil {
				buffers.Put(buf)
				buf = nil
			}
			return rerr != unix.EAGAIN
		})
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded) && time.Since(time.Unix(0, last.Load())) < quiet:
			continue // one went the other way meanwhile
		case err != nil:
			return 0, err
		case rerr != nil:
			continue // the far end has said that nobody is there
		}
		last.Store(time.Now().UnixNano())
		_, _ = dst.Write((*buf)[:n]) // datagrams get lost
		return n, nil
	}
}
