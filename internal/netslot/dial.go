package netslot

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
)

// Dial connects to a TCP port of the machine in a slot, from inside the slot's
// network namespace. A refused connection is the error ECONNREFUSED at once.
func Dial(ctx context.Context, slot backend.Slot, port int) (net.Conn, error) {
	prefix, err := netip.ParsePrefix(slot.GuestAddr)
	if err != nil || !prefix.Addr().Is4() {
		return nil, fmt.Errorf("dial into network slot %s: guest address %q is not IPv4 with a prefix length", slot.Name, slot.GuestAddr)
	}
	if port < 1 || port > 65535 {
		return nil, fmt.Errorf("dial into network slot %s: port %d is not one of 1 to 65535", slot.Name, port)
	}
	to := &unix.SockaddrInet4{Port: port, Addr: prefix.Addr().As4()}
	conn, err := dial(ctx, slot, to)
	if err != nil {
		return nil, fmt.Errorf("dial %s:%d in network slot %s: %w", prefix.Addr(), port, slot.Name, err)
	}
	return conn, nil
}

func dial(ctx context.Context, slot backend.Slot, to *unix.SockaddrInet4) (net.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	fd := -1
	err := inside(slot.NetNS, func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
		return err
	})
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, err
	}
	// Before the file is made: the poller reports a socket that does not
	// connect yet as ready.
	cerr := unix.Connect(fd, to)
	f := os.NewFile(uintptr(fd), "slot connection")
	defer f.Close()
	switch cerr {
	case nil:
	case unix.EINPROGRESS, unix.EINTR:
		if err := await(ctx, f); err != nil {
			return nil, err
		}
	default:
		return nil, cerr
	}
	return net.FileConn(f)
}

// await returns when the socket is connected, has failed to, or ctx is done.
func await(ctx context.Context, f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { f.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	var cerr error
	err = raw.Write(func(fd uintptr) bool {
		n, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil {
			cerr = err
			return true
		}
		if n != 0 {
			cerr = unix.Errno(n)
			return true
		}
		_, err = unix.Getpeername(int(fd))
		return err == nil
	})
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return err
	}
	return cerr
}
