package gvisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/config"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/netslot"
)

// dial connects to the sentry's control socket. The directory's descriptor
// stands for its path, which may be longer than a socket's may.
func (s *sentry) dial() (*urpc.Client, error) {
	dir, err := os.Open(s.Dir)
	if err != nil {
		return nil, fmt.Errorf("reach the sentry: %w", err)
	}
	defer dir.Close()
	c, err := dialControl(filepath.Join("/proc/self/fd", strconv.Itoa(int(dir.Fd())), controlSocket))
	if err != nil {
		return nil, fmt.Errorf("reach the sentry at %s: %w", filepath.Join(s.Dir, controlSocket), err)
	}
	return c, nil
}

// start gives a sentry its network, starts its process 1 and sets the limit on
// processes and threads inside.
func (s *sentry) start(ctx context.Context, pids int64) error {
	return s.talk(ctx, func(c *urpc.Client) error {
		if err := s.connect(c, s.Slot); err != nil {
			return err
		}
		if err := c.Call(boot.ContMgrRootContainerStart, &s.Name, nil); err != nil {
			return fmt.Errorf("start process 1: %w", err)
		}
		return s.limit(c, pids)
	})
}

// talk calls a sentry that no sandbox has yet. It answers in some milliseconds;
// a hanging one is cut off by its end.
func (s *sentry) talk(ctx context.Context, f func(*urpc.Client) error) error {
	c, err := s.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { s.kill() })
	defer stop()
	err = f(c)
	if err == nil || ctx.Err() == nil {
		return err
	}
	return fmt.Errorf("%w: %w", ctx.Err(), err)
}

// limit limits the number of processes and threads inside.
func (s *sentry) limit(c *urpc.Client, pids int64) error {
	args := control.CgroupsWriteArgs{Args: []control.CgroupsWriteArg{{
		File:  control.CgroupControlFile{Path: "/" + s.Name, Name: "pids.max"},
		Value: strconv.FormatInt(pids, 10),
	}}}
	var out control.CgroupsResults
	err := c.Call(boot.CgroupsWriteControlFiles, &args, &out)
	for i := range out.Results {
		err = errors.Join(err, out.Results[i].AsError())
	}
	if err != nil {
		return fmt.Errorf("limit processes inside: %w", err)
	}
	return nil
}

// connect gives the sentry its links: lo always, and the slot's.
func (s *sentry) connect(c *urpc.Client, slot backend.Slot) error {
	args := boot.CreateLinksAndRoutesArgs{LoopbackLinks: []boot.LoopbackLink{boot.DefaultLoopbackLink}}
	if slot.NetNS != "" {
		packets, gso, err := packetSocket(slot)
		if err != nil {
			return fmt.Errorf("open link %s of network slot %s: %w", slot.GuestLink, slot.Name, err)
		}
		defer packets.Close() // the sentry has its own copy
		if err := addLink(&args, slot, gso); err != nil {
			return fmt.Errorf("describe link %s of network slot %s: %w", slot.GuestLink, slot.Name, err)
		}
		args.FilePayload = urpc.FilePayload{Files: []*os.File{packets}}
	}
	if err := c.Call(boot.ContMgrSetNetworkArgs, &args, nil); err != nil {
		return fmt.Errorf("set up the sentry's network: %w", err)
	}
	return nil
}

// addLink describes the slot's link to the sentry.
func addLink(args *boot.CreateLinksAndRoutesArgs, slot backend.Slot, gso uint32) error {
	mac, err := net.ParseMAC(slot.GuestMAC)
	if err != nil {
		return err
	}
	gatewayMAC, err := net.ParseMAC(slot.GatewayMAC)
	if err != nil {
		return err
	}
	ip, subnet, err := net.ParseCIDR(slot.GuestAddr)
	if err != nil {
		return err
	}
	gateway := net.ParseIP(slot.GatewayIP)
	if gateway == nil {
		return fmt.Errorf("gateway address %q", slot.GatewayIP)
	}
	size, _ := subnet.Mask.Size()
	args.FDBasedLinks = []boot.FDBasedLink{{
		Name:              guestName,
		MTU:               slot.MTU,
		LinkAddress:       mac,
		NumChannels:       1,
		QDisc:             config.QDiscFIFO,
		RXChecksumOffload: true, // the other end is in this kernel: nothing gets lost on the way
		GSOMaxSize:        gso,
		Addresses:         []boot.IPWithPrefix{{Address: ip, PrefixLen: size}},
		Routes:            []boot.Route{{Destination: *subnet}},
		Neighbors:         []boot.Neighbor{{IP: gateway, HardwareAddr: gatewayMAC}},
	}}
	args.Defaultv4Gateway = boot.DefaultRoute{Name: guestName, Route: boot.Route{
		Destination: net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)},
		Gateway:     gateway,
	}}
	if slot.GuestAddr6 == "" {
		return nil
	}
	return addIPv6(args, slot, gatewayMAC)
}

// addIPv6 gives the link that addLink has described its IPv6 address too.
func addIPv6(args *boot.CreateLinksAndRoutesArgs, slot backend.Slot, gatewayMAC net.HardwareAddr) error {
	ip, subnet, err := net.ParseCIDR(slot.GuestAddr6)
	if err != nil {
		return err
	}
	gateway := net.ParseIP(slot.GatewayIP6)
	if gateway == nil {
		return fmt.Errorf("gateway address %q", slot.GatewayIP6)
	}
	size, _ := subnet.Mask.Size()
	link := &args.FDBasedLinks[0]
	link.Addresses = append(link.Addresses, boot.IPWithPrefix{Address: ip, PrefixLen: size})
	link.Routes = append(link.Routes, boot.Route{Destination: *subnet})
	link.Neighbors = append(link.Neighbors, boot.Neighbor{IP: gateway, HardwareAddr: gatewayMAC})
	args.Defaultv6Gateway = boot.DefaultRoute{Name: guestName, Route: boot.Route{
		Destination: net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)},
		Gateway:     gateway,
	}}
	return nil
}

// guestName is the link's name inside, whatever it is outside.
const guestName = "eth0"

// packetBuffer is the size of the packet socket's buffers in bytes: some
// milliseconds of full speed while the sentry does something else.
const packetBuffer = 4 << 20

// packetSocket opens the machine's end of the slot's link as a socket for raw
// packets, which a sentry can read where it cannot read a TAP. It returns the
// size of the largest segment that the link takes whole.
func packetSocket(slot backend.Slot) (_ *os.File, gso uint32, err error) {
	fd := -1
	err = netslot.Inside(slot, func() error {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		gso, err = bindPackets(fd, slot.GuestLink)
		return err
	})
	f := os.NewFile(uintptr(fd), "packets of "+slot.Name)
	if err != nil {
		f.Close() // of nil too
		return nil, 0, err
	}
	return f, gso, nil
}

// bindPackets binds a packet socket to a link of the calling thread's network
// namespace.
func bindPackets(fd int, name string) (gso uint32, err error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return 0, err
	}
	defer h.Close()
	link, err := h.LinkByName(name)
	if err != nil {
		return 0, err
	}
	// Each packet then has a header that says where its checksum is and how to
	// cut it, so large segments pass whole.
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1); err != nil {
		return 0, fmt.Errorf("ask for offload headers: %w", err)
	}
	for _, opt := range []int{unix.SO_RCVBUFFORCE, unix.SO_SNDBUFFORCE} {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, opt, packetBuffer); err != nil {
			return 0, fmt.Errorf("size the buffer: %w", err)
		}
	}
	// Last: the socket gets packets from here on.
	all := uint16(unix.ETH_P_ALL)
	addr := unix.SockaddrLinklayer{Protocol: all<<8 | all>>8, Ifindex: link.Attrs().Index}
	if err := unix.Bind(fd, &addr); err != nil {
		return 0, fmt.Errorf("bind: %w", err)
	}
	return link.Attrs().GSOMaxSize, nil
}
