// Package netslot makes the network slots of sandboxes ahead of their use: a
// network namespace with one end of a veth pair as gateway and the other for
// the machine. Inside every slot the addresses are the same, so that a copy of
// a machine keeps its own. A slot has no way out: nothing routes from it.
//
// What a sandbox may reach is not decided here, and the package keeps no
// record of slots: the names on the host are the record. Package netgate makes
// a gate of a slot.
package netslot

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
)

// What is the same in every slot.
const (
	guestLink   = "eth0"
	gatewayLink = "gw0"
	guestMAC    = "02:00:0a:00:00:02"
	gatewayMAC  = "02:00:0a:00:00:01"
	mtu         = 1500

	// Of a range that is for links inside a host and on no network (RFC 7335),
	// so that whatever network a sandbox is to reach has other addresses.
	guestAddr   = "192.0.0.2/30"
	gatewayAddr = "192.0.0.1/30"
	// Of a private range of our own. Programs that sort addresses take IPv4
	// first from such a one.
	guestAddr6   = "fd5e:c0de:5eed::2/126"
	gatewayAddr6 = "fd5e:c0de:5eed::1/126"
)

// dir is where named network namespaces are, for "ip netns" too.
const dir = "/run/netns"

// describe returns the slot of a name; all else follows from the name.
func describe(name string) backend.Slot {
	return backend.Slot{
		Name:       name,
		NetNS:      filepath.Join(dir, name),
		GuestLink:  guestLink,
		GuestMAC:   guestMAC,
		GuestAddr:  guestAddr,
		GatewayIP:  "192.0.0.1",
		GatewayMAC: gatewayMAC,
		MTU:        mtu,

		GuestAddr6: guestAddr6,
		GatewayIP6: "fd5e:c0de:5eed::1",
	}
}

// List returns the names of the slots on this host that begin with prefix and
// a dash, used or not, sorted.
func List(prefix string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list network slots: %w", err)
	}
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix+"-") {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}

// Remove deletes a slot's links and its name. The kernel frees the namespace
// with the last process and socket in it. A slot that does not exist is no error.
func Remove(name string) error {
	path, err := pathOf(name)
	if err != nil {
		return err
	}
	if err := removeLinks(path); err != nil {
		return fmt.Errorf("remove network slot %s: %w", name, err)
	}
	if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && err != unix.EINVAL && err != unix.ENOENT {
		return fmt.Errorf("unmount network slot %s: %w", path, err)
	}
	err = os.Remove(path)
	if errors.Is(err, unix.EBUSY) {
		err = removeCovered(path)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove network slot %s: %w", name, err)
	}
	return nil
}

// removeCovered removes a name that has a mount which no path leads to. The
// first "ip netns add" on a machine makes such: it mounts the directory on
// itself. The kernel drops hidden mounts of a file that is removed where it is
// no mount point, so a process in a mount namespace of its own bares and
// removes it.
func removeCovered(path string) error {
	const script = `while umount -l "$1"; do :; done; while umount -l "$2"; do :; done; rm -f "$2"`
	cmd := exec.Command("/bin/sh", "-c", script, "sh", dir, path)
	cmd.SysProcAttr = &unix.SysProcAttr{Unshareflags: unix.CLONE_NEWNS} // and private, says package syscall
	out, err := cmd.CombinedOutput()
	if err == nil {
		_, err = os.Lstat(path)
	}
	if err == nil {
		return fmt.Errorf("something is mounted on %s and cannot be unmounted: %s", path, out)
	}
	return err
}

// pathOf returns where the namespace of a name is.
func pathOf(name string) (string, error) {
	if name == "" || name == "." || name == ".." || strings.ContainsRune(name, '/') {
		return "", fmt.Errorf("network slot %q: not a name of a slot", name)
	}
	return filepath.Join(dir, name), nil
}

// removeLinks deletes the veth pair, so that it goes at once even if something
// still holds the namespace. A file that is no namespace has no links.
func removeLinks(path string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err == unix.ENOENT || err == nil && st.Type != unix.NSFS_MAGIC {
		return nil
	}
	return inside(path, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		link, err := h.LinkByName(gatewayLink)
		if errors.As(err, new(netlink.LinkNotFoundError)) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("find link %s: %w", gatewayLink, err)
		}
		if err := h.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("delete link %s: %w", gatewayLink, err)
		}
		return nil
	})
}

// create makes the slot of a name. os.ErrExist says that the name is taken.
// further, unless it is nil, is called at the end, on a thread in the slot's namespace.
func create(name string, further func(backend.Slot) error) (slot backend.Slot, err error) {
	path, err := pathOf(name)
	if err != nil {
		return slot, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return slot, fmt.Errorf("make directory for network namespaces: %w", err)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return slot, fmt.Errorf("name network slot %s: %w", name, err)
	}
	f.Close()
	defer func() {
		if err != nil {
			err = errors.Join(err, Remove(name))
		}
	}()
	err = away(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount on %s: %w", path, err)
		}
		if err := furnish(); err != nil || further == nil {
			return err
		}
		return further(describe(name))
	})
	if err != nil {
		return slot, fmt.Errorf("make network slot %s: %w", name, err)
	}
	return describe(name), nil
}

// furnish sets up the namespace of the calling thread.
func furnish() error {
	// Before any link is there, so that none gets an IPv6 address first.
	for path, value := range map[string]string{
		"/proc/sys/net/ipv6/conf/all/disable_ipv6":     "1",
		"/proc/sys/net/ipv6/conf/default/disable_ipv6": "1",
		// A new namespace may inherit it from the host. With it the kernel would
		// send packets for the guest, which an AF_PACKET reader has already had,
		// a second time.
		"/proc/sys/net/ipv4/ip_forward": "0",
	} {
		if err := os.WriteFile(path, []byte(value), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	SetCongestionControl()
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	gw, guest := hardware(gatewayMAC), hardware(guestMAC)
	veth := &netlink.Veth{
		LinkAttrs:        netlink.LinkAttrs{Name: gatewayLink, MTU: mtu, HardwareAddr: gw, TxQLen: -1},
		PeerName:         guestLink,
		PeerHardwareAddr: guest,
		PeerMTU:          mtu,
	}
	if err := h.LinkAdd(veth); err != nil {
		return fmt.Errorf("add veth pair: %w", err)
	}
	for _, name := range []string{"lo", guestLink, gatewayLink} {
		link, err := h.LinkByName(name)
		if err != nil {
			return fmt.Errorf("find link %s: %w", name, err)
		}
		if err := h.LinkSetUp(link); err != nil {
			return fmt.Errorf("set link %s up: %w", name, err)
		}
		if name == gatewayLink {
			return errors.Join(address(h, link, gatewayAddr, guestAddr, guest), address6(h, link, guest))
		}
	}
	return nil
}

// SetCongestionControl has connections of the calling thread's namespace go by
// CUBIC, or by Reno where the host does not let namespaces have that. A namespace
// begins with the host's, and a host that reaches far networks by BBR would pace
// bytes by timers between a sandbox and its gateway, which are on one machine: that
// halves what a connection carries. Where the host allows neither, or has no such
// setting, its own stays, and only speed suffers.
func SetCongestionControl() {
	const path = "/proc/sys/net/ipv4/tcp_congestion_control"
	for _, name := range []string{"cubic", "reno"} {
		if os.WriteFile(path, []byte(name), 0) == nil {
			return
		}
	}
}

// LargeSegments lets TCP hand packets as large as the kernel takes over a slot's
// pair, 512 KiB by IPv4, in place of 64 KiB. One end makes them and the other takes
// them apart, so they are on no network. It is called in the slot's namespace, for a
// machine that has the host's kernel, before the guest's end is moved; who reads
// packets from the link himself must have room for them. A kernel before 6.3
// has nothing to set, and an end that refuses keeps what it has: only speed
// depends on it.
func LargeSegments(h *netlink.Handle) error {
	for _, name := range []string{guestLink, gatewayLink} {
		link, err := h.LinkByName(name)
		if err != nil {
			return fmt.Errorf("find link %s: %w", name, err)
		}
		now, most := link.Attrs().GSOIPv4MaxSize, link.Attrs().TSOMaxSize
		if now != 0 && now < most {
			_ = h.LinkSetGSOIPv4MaxSize(link, int(most))
		}
	}
	return nil
}

// address6 gives the gateway its IPv6 address, on a kernel that has IPv6.
func address6(h *netlink.Handle, link netlink.Link, guest net.HardwareAddr) error {
	conf := "/proc/sys/net/ipv6/conf/" + gatewayLink
	if _, err := os.Stat(conf); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, set := range [][2]string{
		{"addr_gen_mode", "1"}, // no address but the one below
		{"accept_ra", "0"}, {"accept_dad", "0"}, {"disable_ipv6", "0"},
	} {
		if err := os.WriteFile(filepath.Join(conf, set[0]), []byte(set[1]), 0); err != nil {
			return fmt.Errorf("set up IPv6 of link %s: %w", gatewayLink, err)
		}
	}
	return address(h, link, gatewayAddr6, guestAddr6, guest)
}

// address gives the gateway an address and tells it where the guest's is, so
// that no packet waits for an answer about that.
func address(h *netlink.Handle, link netlink.Link, own, guests string, guest net.HardwareAddr) error {
	addr, err := netlink.ParseAddr(own)
	if err != nil {
		return err
	}
	if err := h.AddrAdd(link, addr); err != nil {
		return fmt.Errorf("add address %s: %w", own, err)
	}
	ip, _, err := net.ParseCIDR(guests)
	if err != nil {
		return err
	}
	neigh := &netlink.Neigh{LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: ip, HardwareAddr: guest}
	if err := h.NeighSet(neigh); err != nil {
		return fmt.Errorf("add neighbour %s: %w", ip, err)
	}
	return nil
}

// hardware parses one of the constants above.
func hardware(mac string) net.HardwareAddr {
	a, err := net.ParseMAC(mac)
	if err != nil {
		panic(err)
	}
	return a
}

// inside runs f on a thread in the network namespace at path. What f opens
// belongs to that namespace for good.
func inside(path string, f func() error) error {
	ns, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", path, err)
	}
	defer unix.Close(ns)
	return away(func() error {
		if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", path, err)
		}
		return f()
	})
}

// away runs f on a thread that f may move to another network namespace, and
// brings the thread back. It does not drop the thread instead: the runtime
// keeps a process's first thread, and with it whatever namespace that is in.
func away(f func() error) error {
	runtime.LockOSThread()
	own, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open own network namespace: %w", err)
	}
	defer unix.Close(own)
	ferr := f()
	if err := unix.Setns(own, unix.CLONE_NEWNET); err != nil {
		// The thread stays locked, so no other goroutine ever runs on it.
		return errors.Join(ferr, fmt.Errorf("return to own network namespace: %w", err))
	}
	runtime.UnlockOSThread()
	return ferr
}

// Inside runs f on a thread in the slot's network namespace; f must not start
// goroutines that need it. What f opens belongs to that namespace for good.
func Inside(slot backend.Slot, f func() error) error { return inside(slot.NetNS, f) }
