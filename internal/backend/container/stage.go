package container

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/netslot"
)

// A stage is a thread with a mount and a network namespace of its own, in which
// a container is prepared and from which the runtime starts it. Nothing that is
// mounted there is ever seen on the host; what the container took over lives as
// long as the container, and the rest ends with the thread.
type stage struct {
	netns string // path of the network namespace, good while the stage lives
}

// onStage runs f on a stage and returns its error.
func onStage(f func(stage) error) error {
	result := make(chan error)
	go func() {
		// Never unlocked: the thread ends with this goroutine, and the
		// namespaces with the thread.
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The runtime keeps a process's first thread for ever. With it
			// held here, another goroutine gets another.
			result <- onStage(f)
			runtime.UnlockOSThread()
			return
		}
		s, err := newStage()
		if err == nil {
			err = f(s)
		}
		result <- err
	}()
	return <-result
}

func newStage() (stage, error) {
	s := stage{netns: fmt.Sprintf("/proc/%d/task/%d/ns/net", unix.Getpid(), unix.Gettid())}
	if err := unix.Unshare(unix.CLONE_NEWNS | unix.CLONE_NEWNET); err != nil {
		return s, fmt.Errorf("make namespaces for a container: %w", err)
	}
	// Mounts made here stay here; what the host unmounts goes here too.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return s, fmt.Errorf("separate the mounts of a container: %w", err)
	}
	return s, nil
}

// openNetwork gives the stage's network namespace its loopback.
func (s stage) openNetwork() error {
	for path, value := range map[string]string{
		// Links that come later get no IPv6 address; the loopback has one.
		"/proc/sys/net/ipv6/conf/default/disable_ipv6": "1",
		// As in Docker's containers: low ports and ping without privileges.
		"/proc/sys/net/ipv4/ip_unprivileged_port_start": "0",
		"/proc/sys/net/ipv4/ping_group_range":           "0 2147483647",
	} {
		if err := os.WriteFile(path, []byte(value), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("set up a container's network: %w", err)
		}
	}
	netslot.SetCongestionControl()
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find the loopback: %w", err)
	}
	if err := h.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set the loopback up: %w", err)
	}
	return nil
}

// connect moves a slot's guest link to the stage and gives it its address. The
// kernel takes 10 to 20 ms for that, nearly all of it waiting, so it is called
// beside the runtime and on any thread.
func (s stage) connect(slot backend.Slot) error {
	ns, err := netns.GetFromPath(s.netns)
	if err != nil {
		return fmt.Errorf("open the network namespace of a container: %w", err)
	}
	defer ns.Close()
	err = netslot.Inside(slot, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("open netlink: %w", err)
		}
		defer h.Close()
		if err := netslot.LargeSegments(h); err != nil {
			return fmt.Errorf("slot %s: %w", slot.Name, err)
		}
		link, err := h.LinkByName(slot.GuestLink)
		if err != nil {
			return fmt.Errorf("find link %s of slot %s: %w", slot.GuestLink, slot.Name, err)
		}
		if err := h.LinkSetNsFd(link, int(ns)); err != nil {
			return fmt.Errorf("move link %s of slot %s: %w", slot.GuestLink, slot.Name, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return netslot.Inside(backend.Slot{NetNS: s.netns}, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("open netlink: %w", err)
		}
		defer h.Close()
		return address(h, slot)
	})
}

// openIPv6 lets a link have the IPv6 address that it is given and no other.
func openIPv6(link string) error {
	dir := filepath.Join("/proc/sys/net/ipv6/conf", link)
	for _, set := range [][2]string{{"addr_gen_mode", "1"}, {"accept_ra", "0"}, {"accept_dad", "0"}, {"disable_ipv6", "0"}} {
		if err := os.WriteFile(filepath.Join(dir, set[0]), []byte(set[1]), 0); err != nil {
			return fmt.Errorf("set up IPv6 of link %s: %w", link, err)
		}
	}
	return nil
}

// address gives the guest link its addresses and the way to the gateway. Nobody
// in the container can change that: it has no CAP_NET_ADMIN.
func address(h *netlink.Handle, slot backend.Slot) error {
	link, err := h.LinkByName(slot.GuestLink)
	if err != nil {
		return fmt.Errorf("find link %s in the container: %w", slot.GuestLink, err)
	}
	if slot.GuestAddr6 != "" {
		// Before the link is up, so that it gets no other address.
		if err := openIPv6(slot.GuestLink); err != nil {
			return err
		}
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("set link %s up: %w", slot.GuestLink, err)
	}
	for _, own := range []struct{ addr, gateway, all string }{
		{slot.GuestAddr, slot.GatewayIP, "0.0.0.0/0"},
		{slot.GuestAddr6, slot.GatewayIP6, "::/0"},
	} {
		if own.addr == "" {
			continue
		}
		if err := route(h, link, slot.GatewayMAC, own.addr, own.gateway, own.all); err != nil {
			return fmt.Errorf("address %q of slot %s: %w", own.addr, slot.Name, err)
		}
	}
	return nil
}

// route gives a link an address and leads all to a gateway.
func route(h *netlink.Handle, link netlink.Link, gatewayMAC, own, gateway, all string) error {
	addr, err := netlink.ParseAddr(own)
	if err != nil {
		return err
	}
	mac, err := net.ParseMAC(gatewayMAC)
	if err != nil {
		return err
	}
	_, everything, err := net.ParseCIDR(all)
	if err != nil {
		return err
	}
	if err := h.AddrAdd(link, addr); err != nil {
		return fmt.Errorf("add it: %w", err)
	}
	index, ip := link.Attrs().Index, net.ParseIP(gateway)
	neigh := &netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: ip, HardwareAddr: mac}
	if err := h.NeighSet(neigh); err != nil {
		return fmt.Errorf("add the neighbour %s: %w", gateway, err)
	}
	if err := h.RouteAdd(&netlink.Route{LinkIndex: index, Dst: everything, Gw: ip}); err != nil {
		return fmt.Errorf("add the route to %s: %w", gateway, err)
	}
	return nil
}

// Directories on a disk.
const (
	upperDir = "upper" // what is changed against the image
	workDir  = "work"  // overlayfs' own
)

// plainUpper are options that keep a file in the upper directory whole and what
// it seems to be, whatever the host's defaults are: it can be on another disk
// and in an image one day.
const plainUpper = ",index=off,metacopy=off,redirect_dir=off"

// mountRoot puts the container's root file system at dir/rootDir, a
// directory that exists: the image below, the disk above.
func (s stage) mountRoot(tree string, d *disk, dir string) error {
	upper := filepath.Join(dir, "disk")
	root := filepath.Join(dir, rootDir)
	if err := os.Mkdir(upper, 0o700); err != nil {
		return fmt.Errorf("make a mount point: %w", err)
	}
	if err := unix.MoveMount(d.mount, "", unix.AT_FDCWD, upper, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount the disk on %s: %w", upper, err)
	}
	// A disk that was another sandbox's has what overlayfs kept in there for it.
	if err := os.RemoveAll(filepath.Join(upper, workDir)); err != nil {
		return fmt.Errorf("prepare the disk: %w", err)
	}
	for name, mode := range map[string]os.FileMode{upperDir: 0o755, workDir: 0o700} {
		if err := os.Mkdir(filepath.Join(upper, name), mode); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("prepare the disk: %w", err)
		}
	}
	if info, err := os.Stat(tree); err != nil {
		return fmt.Errorf("the image's tree: %w", err)
	} else if !info.IsDir() {
		return fmt.Errorf("the image's tree %s is not a directory", tree)
	}
	options := "lowerdir=" + escape(tree) + ",upperdir=" + escape(filepath.Join(upper, upperDir)) +
		",workdir=" + escape(filepath.Join(upper, workDir)) + plainUpper
	// Volatile makes fsync in the sandbox cheap: its files are not meant to
	// outlive a crash of the host. Kernels before 5.10 do not know it.
	err := unix.Mount("overlay", root, "overlay", 0, options+",volatile")
	if err == unix.EINVAL {
		err = unix.Mount("overlay", root, "overlay", 0, options)
	}
	if err != nil {
		return fmt.Errorf("mount the root file system (%s): %w", options, err)
	}
	return nil
}

// escape makes a path fit for a mount option of overlayfs.
func escape(path string) string {
	return strings.NewReplacer(`\`, `\\`, `,`, `\,`, `:`, `\:`).Replace(path)
}

// hideUnified takes the v2 tree of a hybrid host out of the stage. crun refuses
// such a host as long as it sees both, and needs only the v1 trees there.
func (s stage) hideUnified() error {
	const unified = "/sys/fs/cgroup/unified"
	var fs unix.Statfs_t
	if err := unix.Statfs(unified, &fs); err != nil || fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil
	}
	if err := unix.Unmount(unified, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("hide %s: %w", unified, err)
	}
	return nil
}
