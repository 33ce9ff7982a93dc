package gvisor

import (
	"errors"
	"fmt"
	"math"
	"syscall"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/control/server"
	"gvisor.dev/gvisor/pkg/unet"
	"gvisor.dev/gvisor/pkg/urpc"
)

// sealed runs f, which makes descriptors that children would inherit, and
// takes that from them before any child can be started. gVisor's packages make
// sockets and event descriptors so: without this a sentry that is started at
// the same moment would hold another's control socket. f must not block, since
// no process can be started meanwhile.
func sealed(f func() error) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	err := f()
	return errors.Join(err, unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC))
}

// listenControl makes the control socket of a sentry that is to be started.
func listenControl(path string) (fd int, err error) {
	err = sealed(func() error {
		fd, err = server.CreateSocket(path)
		return err
	})
	return fd, err
}

// dialControl connects to a sentry's control socket.
func dialControl(path string) (*urpc.Client, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make a socket: %w", err)
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("connect: %w", err)
	}
	var conn *unet.Socket
	if err := sealed(func() error { conn, err = unet.NewSocket(fd); return err }); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return urpc.NewClient(conn), nil
}
