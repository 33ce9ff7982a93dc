package netgate

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/netpolicy"
	"github.com/kernflux/opendsec/internal/netpolicy/dnsproxy"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// TestMain runs the tests in a network namespace that stands for a node's, so
// that they meet no other network.
func TestMain(m *testing.M) {
	const variable = "OPENDSEC_TEST_NODE"
	if os.Getenv(variable) != "" {
		os.Exit(m.Run())
	}
	if os.Getuid() != 0 {
		fmt.Fprintln(os.Stderr, "network namespaces need root")
		os.Exit(1)
	}
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Env = append(os.Environ(), variable+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		os.Exit(1)
	}
}

// The node's link to the world, and the world's addresses.
const (
	nodeAddr  = "198.51.100.1"
	nodeAddr6 = "2001:db8:51::1"
	worldDNS  = "198.51.100.53"
	world1    = "198.51.100.10" // serves example.com
	world2    = "198.51.100.20" // serves others
	world6    = "2001:db8:51::10"
	private   = "10.20.30.40" // a machine in a network of the node's owner
)

// world is what is outside of the node: a namespace with servers.
type world struct {
	t  testing.TB
	ns backend.Slot
}

// names are what the world's DNS knows.
var names = map[string][]string{
	"example.com.":         {world1, world6},
	"v4.example.com.":      {world1},
	"six.example.com.":     {world6},
	"www.example.com.":     {world1},
	"other.test.":          {world1}, // a shared address
	"evil.test.":           {world2},
	"rebind.example.com.":  {"127.0.0.1"},
	"private.example.com.": {private},
	"node.example.com.":    {nodeAddr},
	"meta.example.com.":    {"169.254.169.254"},
	"slot.example.com.":    {"192.0.0.1"},
	"zero.example.com.":    {"0.0.0.0"},
	"mapped.example.com.":  {"::ffff:127.0.0.1"},
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// run runs a program of iproute2.
func ip(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t}
	p := netslot.NewPool(slog.New(slog.DiscardHandler), backend.Prefix(t.TempDir()), 0, nil)
	slot, err := p.Acquire(t.Context())
	must(t, err)
	w.ns = slot
	t.Cleanup(func() { must(t, netslot.Remove(slot.Name)) })
	ip(t, "link", "set", "lo", "up")
	ip(t, "link", "add", "world0", "type", "veth", "peer", "name", "up0", "netns", slot.Name)
	t.Cleanup(func() { exec.Command("ip", "link", "del", "world0").Run() })
	ip(t, "addr", "add", nodeAddr+"/24", "dev", "world0")
	ip(t, "addr", "add", nodeAddr6+"/64", "dev", "world0", "nodad")
	ip(t, "link", "set", "world0", "up")
	ip(t, "route", "add", "default", "via", world1)
	ip(t, "-6", "route", "add", "default", "via", world6)
	ip(t, "-n", slot.Name, "link", "del", "gw0")
	must(t, netslot.Inside(slot, func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/up0/disable_ipv6", []byte("0"), 0)
	}))
	for _, a := range []string{world1 + "/24", world2 + "/24", worldDNS + "/24", private + "/32"} {
		ip(t, "-n", slot.Name, "addr", "add", a, "dev", "up0")
	}
	ip(t, "-n", slot.Name, "link", "set", "up0", "up")
	ip(t, "-n", slot.Name, "addr", "add", world6+"/64", "dev", "up0", "nodad")
	return w
}

// listen opens a listener in the world.
func (w *world) listen(addr string) net.Listener {
	w.t.Helper()
	var l net.Listener
	must(w.t, netslot.Inside(w.ns, func() (err error) {
		l, err = net.Listen("tcp", addr)
		return err
	}))
	w.t.Cleanup(func() { l.Close() })
	return l
}

func (w *world) packets(addr string) net.PacketConn {
	w.t.Helper()
	var c net.PacketConn
	must(w.t, netslot.Inside(w.ns, func() (err error) {
		c, err = net.ListenPacket("udp", addr)
		return err
	}))
	w.t.Cleanup(func() { c.Close() })
	return c
}

// guest stands for a sandbox: a namespace with the guest's end of a slot.
type guest struct {
	t     testing.TB
	slot  backend.Slot
	ns    backend.Slot
	gate  *Gate
	guard *Guard
}

func newGate(t testing.TB, cfg Config) *Gate {
	t.Helper()
	if cfg.DNS.Upstreams == nil {
		cfg.DNS.Upstreams = []string{worldDNS}
	}
	g, err := New(slog.New(slog.NewTextHandler(t.Output(), nil)), cfg)
	must(t, err)
	return g
}

// newGuest makes a guest that nobody serves yet.
func newGuest(t testing.TB, g *Gate) *guest {
	t.Helper()
	p := netslot.NewPool(slog.New(slog.DiscardHandler), backend.Prefix(t.TempDir()), 0, g.Furnish)
	slot, err := p.Acquire(t.Context())
	must(t, err)
	t.Cleanup(func() { must(t, netslot.Remove(slot.Name)) })
	bare := netslot.NewPool(slog.New(slog.DiscardHandler), backend.Prefix(t.TempDir()), 0, nil)
	ns, err := bare.Acquire(t.Context())
	must(t, err)
	t.Cleanup(func() { must(t, netslot.Remove(ns.Name)) })
	gu := &guest{t: t, slot: slot, ns: ns, gate: g}
	ip(t, "-n", ns.Name, "link", "del", "gw0")
	ip(t, "-n", slot.Name, "link", "set", slot.GuestLink, "netns", ns.Name)
	must(t, netslot.Inside(ns, func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/"+slot.GuestLink+"/disable_ipv6", []byte("0"), 0)
	}))
	ip(t, "-n", ns.Name, "link", "set", slot.GuestLink, "up")
	for _, a := range [][]string{{slot.GuestAddr, slot.GatewayIP}, {slot.GuestAddr6, slot.GatewayIP6}} {
		args := []string{"-n", ns.Name, "addr", "add", a[0], "dev", slot.GuestLink}
		if strings.Contains(a[0], ":") {
			args = append(args, "nodad")
		}
		ip(t, args...)
		ip(t, "-n", ns.Name, "neigh", "replace", a[1], "lladdr", slot.GatewayMAC, "dev", slot.GuestLink)
		ip(t, "-n", ns.Name, "route", "add", "default", "via", a[1])
	}
	return gu
}

// open begins to serve the guest.
func (gu *guest) open(rules map[string]bool) {
	gu.t.Helper()
	var err error
	gu.guard, err = gu.gate.Open(Sandbox{ID: sandbox.NewID(), Slot: gu.slot, Policy: parse(gu.t, rules)})
	must(gu.t, err)
	gu.t.Cleanup(gu.guard.Close)
}

func parse(t testing.TB, rules map[string]bool) *netpolicy.Policy {
	t.Helper()
	p, err := netpolicy.Parse(rules)
	must(t, err)
	return p
}

// dial connects from the guest; an error is one of the connect.
func (gu *guest) dial(network, addr string) (c net.Conn, err error) {
	d := net.Dialer{Timeout: 3 * time.Second}
	ierr := netslot.Inside(gu.ns, func() error {
		c, err = d.DialContext(context.WithoutCancel(gu.t.Context()), network, addr)
		return nil
	})
	if ierr != nil {
		return nil, ierr
	}
	return c, err
}

// resolver asks as a guest's resolver does.
func (gu *guest) resolve(name string) ([]netip.Addr, error) {
	r := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return gu.dial(network, gu.slot.GatewayIP+":53")
	}}
	ctx, cancel := context.WithTimeout(gu.t.Context(), 5*time.Second)
	defer cancel()
	return r.LookupNetIP(ctx, "ip", name)
}

func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for limit := time.Now().Add(10 * time.Second); !ok(); {
		if time.Now().After(limit) {
			t.Fatalf("waited too long for %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

var _ = netlink.LinkList
var _ dnsproxy.Config
