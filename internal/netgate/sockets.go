package netgate

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/netslot"
)

// sockets are those that a guard has in its slot's namespace from the beginning.
type sockets struct {
	tcp    *net.TCPListener // of the relay
	dns    net.PacketConn
	dnsTCP net.Listener
}

// openSockets opens a guard's sockets. They are of both families where the
// kernel has IPv6.
func openSockets(slot backend.Slot) (s sockets, err error) {
	err = netslot.Inside(slot, func() error {
		ctx := context.Background()
		transparent := net.ListenConfig{Control: makeTransparent, KeepAliveConfig: keepAlive}
		relay, err := transparent.Listen(ctx, "tcp", ":"+strconv.Itoa(relayPort))
		if err != nil {
			return err
		}
		s.tcp = relay.(*net.TCPListener)
		if s.dnsTCP, err = transparent.Listen(ctx, "tcp", ":53"); err != nil {
			return err
		}
		reached := net.ListenConfig{Control: func(network, address string, c syscall.RawConn) error {
			return errors.Join(makeTransparent(network, address, c), tellAddress(network, c))
		}}
		udp, err := reached.ListenPacket(ctx, "udp", ":53")
		if err != nil {
			return err
		}
		s.dns = &answering{udp.(*net.UDPConn)}
		return nil
	})
	if err != nil {
		for _, c := range []interface{ Close() error }{s.tcp, s.dnsTCP, s.dns} {
			if c != nil && c != (*net.TCPListener)(nil) {
				c.Close()
			}
		}
		return sockets{}, fmt.Errorf("listen in network slot %s: %w", slot.Name, err)
	}
	return s, nil
}

// onSocket applies options to a socket that is being made.
func onSocket(c syscall.RawConn, f func(fd int) error) error {
	var err error
	if cerr := c.Control(func(fd uintptr) { err = f(int(fd)) }); cerr != nil {
		return cerr
	}
	return err
}

// makeTransparent lets a socket have any address for its own.
func makeTransparent(network, _ string, c syscall.RawConn) error {
	return onSocket(c, func(fd int) error {
		err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1)
		if err == nil && !isIPv4(network) {
			err = unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
		}
		if err != nil {
			return fmt.Errorf("make the socket transparent: %w", err)
		}
		return nil
	})
}

func isIPv4(network string) bool { return network == "tcp4" || network == "udp4" }

// tellAddress has a UDP socket tell to which address a packet was sent.
func tellAddress(network string, c syscall.RawConn) error {
	return onSocket(c, func(fd int) error {
		if isIPv4(network) {
			return unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_PKTINFO, 1)
		}
		return unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_RECVPKTINFO, 1)
	})
}

// answering is a UDP socket whose answers come from the address that was asked.
type answering struct{ *net.UDPConn }

// asker is where an answer goes, and from where it must come.
type asker struct {
	netip.AddrPort
	info []byte // the control message that says from where
}

func (a *asker) Network() string { return "udp" }

// infoSize is room for the control message about an address, of either family.
var infoSize = unix.CmsgSpace(unix.SizeofInet6Pktinfo)

func (c *answering) ReadFrom(b []byte) (int, net.Addr, error) {
	info := make([]byte, infoSize)
	n, size, _, from, err := c.ReadMsgUDPAddrPort(b, info)
	if err != nil {
		return n, nil, err
	}
	info = info[:size]
	if len(info) >= unix.SizeofCmsghdr {
		clearLink(info)
	}
	return n, &asker{from, info}, nil
}

// clearLink takes the link out of a control message, so that the answer goes
// where routes lead it.
func clearLink(info []byte) {
	msgs, err := unix.ParseSocketControlMessage(info)
	if err != nil || len(msgs) == 0 {
		return
	}
	data := msgs[0].Data
	switch {
	case msgs[0].Header.Level == unix.SOL_IP && len(data) >= unix.SizeofInet4Pktinfo:
		clear(data[:4])
	case msgs[0].Header.Level == unix.SOL_IPV6 && len(data) >= unix.SizeofInet6Pktinfo:
		clear(data[16:20])
	}
}

func (c *answering) WriteTo(b []byte, to net.Addr) (int, error) {
	a, ok := to.(*asker)
	if !ok {
		return 0, fmt.Errorf("answer %s, who did not ask", to)
	}
	n, _, err := c.WriteMsgUDPAddrPort(b, a.info, a.AddrPort)
	return n, err
}
