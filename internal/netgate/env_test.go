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
	"github.com/kernflux/opendsec/internal/netgate/gatetest"
	"github.com/kernflux/opendsec/internal/netpolicy"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// TestMain runs the tests in a network namespace that stands for a node's, so
// that they meet no other network.
func TestMain(m *testing.M) {
	if carries() {
		return
	}
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

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ip runs the program of this name.
func ip(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// guest stands for a sandbox: a namespace with the guest's end of a slot.
type guest struct {
	t     testing.TB
	slot  backend.Slot
	ns    backend.Slot
	gate  *Gate
	guard *Guard
}

func newLog(t testing.TB) *slog.Logger { return slog.New(slog.NewTextHandler(t.Output(), nil)) }

func newGate(t testing.TB, cfg Config) *Gate {
	t.Helper()
	if cfg.DNS.Upstreams == nil {
		cfg.DNS.Upstreams = []string{gatetest.Resolver}
	}
	g, err := New(newLog(t), cfg)
	must(t, err)
	return g
}

// newGuest makes a guest that nobody serves yet.
func newGuest(t testing.TB, g *Gate) *guest {
	t.Helper()
	return newGuestIn(t, g, g.Furnish)
}

// newGuestIn makes a guest of a slot that further has made of a bare one. With
// nil its link and its congestion control are as the kernel and the host have them.
func newGuestIn(t testing.TB, g *Gate, further func(backend.Slot) error) *guest {
	t.Helper()
	p := netslot.NewPool(slog.New(slog.DiscardHandler), backend.Prefix(t.TempDir()), 0, further)
	slot, err := p.Acquire(t.Context())
	must(t, err)
	t.Cleanup(func() { must(t, netslot.Remove(slot.Name)) })
	bare := netslot.NewPool(slog.New(slog.DiscardHandler), backend.Prefix(t.TempDir()), 0, nil)
	ns, err := bare.Acquire(t.Context())
	must(t, err)
	t.Cleanup(func() { must(t, netslot.Remove(ns.Name)) })
	gu := &guest{t: t, slot: slot, ns: ns, gate: g}
	if further == nil {
		hosts := hostsControl(t)
		must(t, netslot.Inside(ns, func() error { return os.WriteFile(congestionControl, hosts, 0) }))
	} else {
		must(t, netslot.Inside(slot, func() error { return netslot.LargeSegments(&netlink.Handle{}) }))
	}
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

const congestionControl = "/proc/sys/net/ipv4/tcp_congestion_control"

// hostsControl is the congestion control of connections that the host makes.
func hostsControl(t testing.TB) []byte {
	b, err := os.ReadFile(congestionControl)
	must(t, err)
	return b
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

func addrOf(t testing.TB, s string) netip.Addr {
	t.Helper()
	a, err := netip.ParseAddr(s)
	must(t, err)
	return a
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

// resolve asks as a guest's resolver does.
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
