// Package gatetest is what tests of sandboxes' networks need: a world outside
// of the node, with servers that remember what reached them and a look at each
// packet that comes from the node; and attempts to get around the rules, which
// the program in prober makes from inside a sandbox.
//
// It is for tests only, and expects a network namespace that stands for the
// node's and in which nothing else is.
package gatetest

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/netslot"

	"github.com/kernflux/opendsec/internal/backend"
)

// World is a network namespace that the node is connected to.
type World struct {
	t    testing.TB
	slot backend.Slot
	deaf func() // ends the look at packets

	mu      sync.Mutex
	foreign []Event // packets that no rule allows
	queries []Event // names that were asked of the resolver
	bytes   []Event // what the servers on ports 80 and 443 were sent
	hits    []Event // connections to the node itself
}

// Event is something that reached the world or the node.
type Event struct {
	Time time.Time
	What string
}

func (e Event) String() string { return e.Time.Format("15:04:05.000 ") + e.What }

// Rules are those that the attempts are made under.
func Rules() map[string]bool {
	return map[string]bool{
		"example.com:80/tcp": true, "example.com:443": true, "*.wild.example:443": true, "*.wild.example:80/tcp": true,
		"denied.wild.example": false, Networks + ":7000-7010/tcp": true,
	}
}

// allowed reports whether a packet to the world is one that the rules let a
// sandbox cause.
func allowed(proto byte, dst netip.Addr, port uint16) bool {
	switch dst.String() {
	case Resolver:
		return port == 53
	case Good, Good6:
		return proto == unix.IPPROTO_TCP && (port == 80 || port == 443)
	case Network:
		return proto == unix.IPPROTO_TCP && port >= 7000 && port <= 7010
	}
	return false
}

// New connects the node's namespace with a world.
func New(t testing.TB) *World {
	t.Helper()
	w := &World{t: t}
	ip(t, "link", "set", "lo", "up")
	w.slot = bare(t)
	ip(t, "link", "add", "world0", "type", "veth", "peer", "name", "up0", "netns", w.slot.Name)
	t.Cleanup(func() { ip(t, "link", "del", "world0") })
	for _, a := range [][]string{{Node + "/24"}, {Node6 + "/64", "nodad"}} {
		ip(t, append([]string{"addr", "add", "dev", "world0"}, a...)...)
	}
	ip(t, "link", "set", "world0", "up")
	ip(t, "-n", w.slot.Name, "link", "set", "up0", "up")
	for _, a := range []string{Good, Bad, Resolver} {
		ip(t, "-n", w.slot.Name, "addr", "add", a+"/24", "dev", "up0")
	}
	for _, a := range []string{Network, Private, "169.254.169.254", "203.0.114.1"} {
		ip(t, "-n", w.slot.Name, "addr", "add", a+"/32", "dev", "up0")
	}
	for _, a := range []string{Good6, Bad6} {
		ip(t, "-n", w.slot.Name, "addr", "add", a+"/64", "dev", "up0", "nodad")
	}
	ip(t, "route", "add", "default", "via", Good)
	ip(t, "-6", "route", "add", "default", "via", Good6)
	w.sniff()
	w.serve()
	return w
}

// bare returns a namespace with nothing but its loopback in it.
func bare(t testing.TB) backend.Slot {
	t.Helper()
	name := fmt.Sprintf("%s-world", backend.Prefix(t.TempDir()))
	ip(t, "netns", "add", name)
	t.Cleanup(func() { ip(t, "netns", "del", name) })
	ip(t, "-n", name, "link", "set", "lo", "up")
	return backend.Slot{Name: name, NetNS: "/run/netns/" + name}
}

// ip runs the program of this name.
func ip(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// Route tells the world that an address is behind the node.
func (w *World) Route(addr string) {
	ip(w.t, "-n", w.slot.Name, "route", "add", addr+"/32", "via", Node)
}

// Listen opens a TCP listener in the world.
func (w *World) Listen(addr string) net.Listener {
	w.t.Helper()
	var l net.Listener
	err := netslot.Inside(w.slot, func() (err error) {
		l, err = net.Listen("tcp", addr)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { l.Close() })
	return l
}

// Packets opens a UDP socket in the world.
func (w *World) Packets(addr string) net.PacketConn {
	w.t.Helper()
	var c net.PacketConn
	err := netslot.Inside(w.slot, func() (err error) {
		c, err = net.ListenPacket("udp", addr)
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	return c
}

func (w *World) note(list *[]Event, format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	*list = append(*list, Event{time.Now(), fmt.Sprintf(format, args...)})
}

// Bypasses returns what reached the world, or the node, past the rules, as
// evidence: packets, names, bytes and connections. Empty is good.
func (w *World) Bypasses() []Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	found := slices.Clone(w.foreign)
	found = append(found, w.hits...)
	for _, q := range w.queries {
		if !askable(q.What) {
			found = append(found, Event{q.Time, "the resolver was asked for " + q.What})
		}
	}
	for _, b := range w.bytes {
		if strings.Contains(strings.ToLower(b.What), "evil") {
			found = append(found, Event{b.Time, fmt.Sprintf("a server was sent %q", b.What)})
		}
	}
	return found
}

// askable reports whether the rules allow a name to be asked for.
func askable(name string) bool {
	return name == "example.com." || strings.HasSuffix(name, ".wild.example.") && name != "denied.wild.example." && len(name) < 160
}

// Asked returns how often the resolver was asked for a name.
func (w *World) Asked(name string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, q := range w.queries {
		if q.What == name {
			n++
		}
	}
	return n
}

// sniff looks at each packet that comes from the node.
func (w *World) sniff() {
	fd := -1
	err := netslot.Inside(w.slot, func() (err error) {
		all := uint16(unix.ETH_P_ALL)<<8 | uint16(unix.ETH_P_ALL)>>8
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(all)); err != nil {
			return err
		}
		link, err := net.InterfaceByName("up0")
		if err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link.Index})
	})
	if err != nil {
		w.t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "packets of the world")
	raw, err := f.SyscallConn()
	if err != nil {
		w.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 128<<10)
		for {
			var n int
			var from unix.Sockaddr
			var rerr error
			err := raw.Read(func(fd uintptr) bool {
				n, from, rerr = unix.Recvfrom(int(fd), buf, 0)
				return !errors.Is(rerr, unix.EAGAIN)
			})
			if err != nil {
				return
			}
			if sl, ok := from.(*unix.SockaddrLinklayer); rerr == nil && ok && sl.Pkttype != unix.PACKET_OUTGOING {
				if what := judge(buf[:n]); what != "" {
					w.note(&w.foreign, "packet: %s", what)
				}
			}
		}
	}()
	w.deaf = sync.OnceFunc(func() { f.Close(); <-done })
	w.t.Cleanup(w.deaf)
}

// Deaf ends the look at packets, which copies them all: for what measures.
func (w *World) Deaf() { w.deaf() }

// judge words a frame that no rule allows, "" for one that is in order. What
// the node's own kernel needs to find its neighbours is.
func judge(frame []byte) string {
	if len(frame) < 14 {
		return fmt.Sprintf("% x", frame)
	}
	kind, p := uint16(frame[12])<<8|uint16(frame[13]), frame[14:]
	var proto byte
	var src, dst netip.Addr
	switch {
	case kind == unix.ETH_P_ARP:
		return ""
	case kind == unix.ETH_P_IP && len(p) >= 20:
		proto = p[9]
		src, _ = netip.AddrFromSlice(p[12:16])
		dst, _ = netip.AddrFromSlice(p[16:20])
		if p[0] != 0x45 {
			return fmt.Sprintf("%s to %s with IP options", src, dst)
		}
		p = p[20:]
	case kind == unix.ETH_P_IPV6 && len(p) >= 40:
		proto = p[6]
		src, _ = netip.AddrFromSlice(p[8:24])
		dst, _ = netip.AddrFromSlice(p[24:40])
		p = p[40:]
		if dst.IsMulticast() || proto == unix.IPPROTO_ICMPV6 && len(p) > 0 && p[0] >= 133 && p[0] <= 137 {
			return ""
		}
	default:
		return fmt.Sprintf("of type %#x", kind)
	}
	if src.String() != Node && src.String() != Node6 {
		return fmt.Sprintf("%s to %s: the source is not the node's", src, dst)
	}
	if len(p) >= 4 && (proto == unix.IPPROTO_TCP || proto == unix.IPPROTO_UDP) {
		if port := uint16(p[2])<<8 | uint16(p[3]); allowed(proto, dst, port) {
			return ""
		} else {
			return fmt.Sprintf("protocol %d from %s to %s port %d", proto, src, dst, port)
		}
	}
	return fmt.Sprintf("protocol %d from %s to %s", proto, src, dst)
}
